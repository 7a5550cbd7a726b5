"""The features that work with the installed SGLang. Each feature relies on some symbols in
`seams.json`; one whose symbols have changed is off, and the others work. Only storage is required,
since without it there is no backend at all.

Reads source files only. Results are cached, since SGLang does not change while a process runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from sgl_kvtier.errors import SeamError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.runtime.sglang import seams
from sgl_kvtier.runtime.sglang.seams import SeamStatus

_MOST_NAMED = 4


@dataclass(frozen=True)
class Feature:
    """One feature. `groups` are the `feature` of the seams it needs; `without` says what a server
    does without it, and what its user can do.
    """

    name: str
    groups: tuple[str, ...]
    without: str


FEATURES = (
    Feature(
        "arguments",
        ("arguments",),
        "settings are checked only once the model is loaded, and no page size is chosen on a GPU: "
        "give --page-size 64, and name the backend in its dynamic form (docs/manual/store.md)",
    ),
    Feature("storage", ("storage",), "there is no other way to store pages"),
    Feature(
        "zero-copy",
        ("storage", "zero-copy"),
        "pages are copied once more between host memory and disk, and none are read ahead",
    ),
    Feature(
        "restore",
        ("storage", "restore"),
        'stored prefixes are loaded SGLang\'s own way; policy.restore = "off" ends this line',
    ),
    Feature(
        "windows",
        ("storage", "restore", "windows"),
        "stored prefixes of models with sliding windows are loaded SGLang's own way",
    ),
    Feature(
        "states",
        ("storage", "restore", "states"),
        "stored prefixes of models with linear layers are loaded SGLang's own way",
    ),
    Feature(
        "checkpoints",
        ("checkpoints",),
        "SGLang keeps a state every --mamba-track-interval generated tokens; a multiple of 64 and "
        "of the page size, as small as possible, lets the next turn find most of an answer",
    ),
    Feature(
        "lookahead",
        ("storage", "restore", "lookahead"),
        "pages are prefetched and evicted SGLang's own way",
    ),
    Feature("hints", ("hints",), "POST /kvtier/hint is not there"),
    Feature(
        "weights",
        ("weights",),
        "do not change weights of a running server, or restart it right after: pages of the old "
        "weights would be used",
    ),
    Feature(
        "tenants",
        ("storage", "tenants"),
        "pages name no tenant: none has a share, and kvtier purge --salt finds none of them",
    ),
    Feature("control", ("control",), "settings change only with a restart"),
    Feature(
        "cpu",
        ("cpu",),
        "a host without an accelerator has SGLang's own CPU engine alone (SGLANG_USE_CPU_ENGINE=1)",
    ),
)
"""All features, in the order in which they are shown."""

_BY_NAME = {feature.name: feature for feature in FEATURES}


@cache
def _group(name: str) -> tuple[SeamStatus, ...]:
    return tuple(seams.check([name]))


@cache
def moved(name: str) -> tuple[SeamStatus, ...]:
    """The symbols of a feature that are not as it needs them; empty if it works."""
    return tuple(s for group in _BY_NAME[name].groups for s in _group(group) if s.problem)


def counted(name: str) -> int:
    """How many symbols a feature relies on."""
    return sum(len(_group(group)) for group in _BY_NAME[name].groups)


def line(name: str) -> str | None:
    """The log line for a feature that is off; None if it works."""
    if not moved(name):
        return None
    return f"{name} is off: {described(moved(name))}. {_first_upper(_BY_NAME[name].without)}"


def untried() -> str | None:
    """The log line for an SGLang release that was not tried, or None."""
    version = seams.installed_version()
    if version is None or version in {release.version for release in seams.releases()}:
        return None
    return (
        f"SGLang {version} was not tried with sgl_kvtier, which was with {seams.tried()}. What it "
        "relies on is checked feature by feature: kvtier doctor lists them"
    )


def require(*names: str) -> None:
    """Raises SeamError unless all of these features work."""
    version = seams.installed_version()
    if version is None:
        raise SeamError(f"SGLang is not installed. Run: {how_to_install('sglang')}")
    for name in names:
        if moved(name):
            raise SeamError(
                f"{name} cannot be had from this SGLang {version}: {described(moved(name))}. "
                f"sgl_kvtier was tried with {seams.tried()}. Run: pip install "
                f"'sglang=={seams.releases()[-1].version}'"
                + ("" if name == "storage" else ", or leave that setting at auto")
            )


def described(statuses: Sequence[SeamStatus]) -> str:
    """Symbols with the problem of each, a few of them by name."""
    named = [f"{_short(s.seam.symbol)}: {s.problem}" for s in statuses[:_MOST_NAMED]]
    rest = len(statuses) - len(named)
    return "; ".join(named) + (f"; and {rest} more (kvtier doctor --verbose)" if rest else "")


def _short(symbol: str) -> str:
    """The last two components of a symbol: a class and its method."""
    return ".".join(symbol.split(".")[-2:])


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
