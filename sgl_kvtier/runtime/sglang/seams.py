"""Every symbol of SGLang this package relies on, checked before serving.

SGLang swallows exceptions of plugins, so a hook that no longer fits would silently leave a stock
server behind. `seams.json` names each symbol with the feature that needs it, and how it is relied
on: what is called, or calls us, has to take the parameters that are used; data has to have the
attributes that are read; and what is imitated, or lays out pages, has to have a body that was read
and tried. Those bodies are listed by release in `releases/`. Checking reads source files only:
nothing is imported. What a server does without a feature is decided in `features.py`.

    # After the changes of a new SGLang release were read, and scripts/check-release has run it:
    python -m sgl_kvtier.runtime.sglang.seams --add
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import SeamError

MANIFEST = Path(__file__).with_name("seams.json")
_RELEASES = Path(__file__).with_name("releases")

PORTS = {
    "device slots": "claim, put back, give to a row, copy into",
    "host pages": "claim, free, pin, make room, what came and what left",
    "page I/O": "pages of host memory read from storage and written to it",
    "tree": "match, insert, evict a leaf, names of a node's pages",
    "request": "the waiting list, admission, a row and its prefix, the end",
    "offer": "a request has these pages in storage",
    "ranks": "what all ranks agree on",
    "step": "tick, idle, chunk times, flush, weights",
    "server": "arguments, registration, routes, platform: beside serving",
}
"""The part of SGLang that a seam belongs to. Another owner of a tier would change one port."""

CALLS, DATA, REPLACES, PAGES = "calls", "data", "replaces", "pages"
HOW = {
    CALLS: "we call it, hook it or override it: `names` are the parameters that are used",
    DATA: "it is read: `names` are its attributes that are used",
    REPLACES: "its body is imitated, or what we do relies on its order: it was read and tried",
    PAGES: "its body says where the bytes of a stored page lie",
}
AND_MORE = "*"
"""Last of a seam's names: further parameters that the function requires are passed on."""


@dataclass(frozen=True)
class Seam:
    """One symbol we rely on. `feature` is the group that needs it, `port` one of `PORTS`, `how` one
    of `HOW`. Without `names` it only has to exist.
    """

    feature: str
    port: str
    symbol: str
    why: str
    how: str = CALLS
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class SeamStatus:
    """The state of one seam in the installed SGLang. `problem` is empty when it is as expected."""

    seam: Seam
    problem: str = ""


@dataclass(frozen=True)
class Release:
    """An SGLang release that was read and tried. Releases with equal `pages` name and lay out pages
    alike. `digests` are those of function bodies, by symbol.
    """

    version: str
    pages: str
    digests: dict[str, str]


def load_manifest() -> list[Seam]:
    """The seams in the manifest, in its order."""
    data = json.loads(MANIFEST.read_text())
    return [Seam(**{**entry, "names": tuple(entry.get("names", ()))}) for entry in data["seams"]]


@cache
def releases() -> tuple[Release, ...]:
    """The releases that were tried, oldest first."""
    found = [json.loads(path.read_text()) for path in _RELEASES.glob("*.json")]
    found.sort(key=lambda data: [int(part) for part in data["sglang"].split(".")])
    return tuple(Release(data["sglang"], data["pages"], data["digests"]) for data in found)


def tried() -> str:
    """Their versions, as text."""
    return ", ".join(release.version for release in releases())


def installed_version() -> str | None:
    """The installed SGLang's version, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(groups: Iterable[str] = ()) -> list[SeamStatus]:
    """The state of every seam, or of those that some features need. Reads files, imports nothing,
    never raises.
    """
    wanted = set(groups)
    return [
        SeamStatus(s, _problem(s)) for s in load_manifest() if not wanted or s.feature in wanted
    ]


def page_format() -> str:
    """The page layout of the installed SGLang, for the fingerprint: equal for releases whose layout
    was read and found equal, otherwise a digest of their code.
    """
    symbols = [seam.symbol for seam in load_manifest() if seam.how == PAGES]
    found = {symbol: (_find(symbol) or _NOTHING).digest for symbol in symbols}
    for release in releases():
        if all(release.digests.get(symbol, "") == found[symbol] for symbol in symbols):
            return release.pages
    return "code-" + hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def require_hooks(targets: Iterable[str]) -> None:
    """Raises SeamError unless our hooks on these symbols are applied in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [
        t
        for t in targets
        if t not in HookRegistry._patched or not _ours(HookRegistry._hooks.get(t, ()))
    ]
    if missing:
        raise SeamError(
            "the plugin of sgl_kvtier is not active in this process: no hook on "
            f"{', '.join(missing)}. If SGLANG_PLUGINS is set, add kvtier to it; if SGLANG_PLATFORM "
            "names another package's platform, SGLang skips this plugin: use "
            "'--hicache-storage-backend dynamic' there (see docs/manual/store.md)"
        )


def add_release(pages: str, groups: Iterable[str] = ()) -> Path:
    """Lists the installed SGLang's bodies as read and tried: all, or those of some features."""
    wanted = set(groups)
    version = installed_version()
    digests = {}
    for seam in load_manifest():
        found = _find(seam.symbol)
        read = seam.how == REPLACES and (not wanted or seam.feature in wanted)
        if (read or seam.how == PAGES) and found is not None:
            digests[seam.symbol] = found.digest
    path = _RELEASES / f"{version}.json"
    data = {"sglang": version, "pages": pages, "digests": dict(sorted(digests.items()))}
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def _ours(hooks: Iterable[Any]) -> bool:
    return any(getattr(hook, "__module__", "").startswith("sgl_kvtier.") for _, hook, _ in hooks)


def _problem(seam: Seam) -> str:
    found = _find(seam.symbol)
    if seam.how == PAGES:
        return ""  # a layout that is not known makes a fingerprint of its own
    if found is None:
        return "missing"
    if seam.how == REPLACES:
        known = {release.digests.get(seam.symbol) for release in releases()}
        return "" if found.digest in known else "its source is not one that was tried"
    if seam.how == DATA:
        there = _attributes(seam.symbol) if seam.names else set()
        gone = [name for name in seam.names if name not in there]
        return f"it has no {', '.join(gone)}" if gone else ""
    return _unfit(seam.names, found.arguments)


def _unfit(names: tuple[str, ...], arguments: ast.arguments | None) -> str:
    """Why a function cannot be called with these parameters, in this order; empty if it can."""
    if arguments is None or not names:
        return ""
    positional = [*arguments.posonlyargs, *arguments.args]
    optional = {a.arg for a in positional[len(positional) - len(arguments.defaults) :]}
    keywords = [a.arg for a in arguments.kwonlyargs]
    optional |= {
        name
        for name, default in zip(keywords, arguments.kw_defaults, strict=True)
        if default is not None
    }
    known = [a.arg for a in positional] + keywords
    used = [name for name in names if name != AND_MORE]
    gone = [name for name in used if name not in known]
    if gone:
        return f"it takes no {', '.join(gone)}"
    if [name for name in known if name in used] != used:
        return f"it takes {', '.join(known)} in this order"
    more = [name for name in known if name not in used and name not in optional]
    return f"it demands {', '.join(more)}" if more and names[-1] != AND_MORE else ""


@dataclass(frozen=True)
class _Found:
    digest: str = ""
    arguments: ast.arguments | None = None


_NOTHING = _Found()


def _find(symbol: str) -> _Found | None:
    """Finds a symbol by reading its module's source; None if it does not exist."""
    node, source, _ = _node(symbol)
    if node is None:
        return None
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _Found(_digest(source, node), node.args)
    return _NOTHING


def _node(symbol: str) -> tuple[ast.AST | None, str, str]:
    """(node, source, module) of a symbol; the node is None if it does not exist."""
    module, tree, source = _module_of(symbol)
    node: ast.AST | None = tree
    for name in symbol.removeprefix(module + ".").split("."):
        if node is None:
            break
        node = _child(node, name)
    return node, source, module


def _attributes(symbol: str) -> set[str]:
    """Attributes of a class's objects: names in its body, those that its methods assign, and those
    of its base classes as far as they are SGLang's.
    """
    node, _, module = _node(symbol)
    if isinstance(node, ast.ImportFrom):
        known = symbol.rsplit(".", 1)[1]
        real = next(alias.name for alias in node.names if known in (alias.asname, alias.name))
        return _attributes(f"{node.module}.{real}")
    if not isinstance(node, ast.ClassDef):
        return set()
    found = set(_assigned(node))
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        if "." not in name:
            found |= _attributes(f"{module}.{name}")
    return found


def _assigned(owner: ast.ClassDef) -> Iterator[str]:
    for child in owner.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name
    for node in ast.walk(owner):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(one, ast.Name):
                    yield one.id
                elif isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                    yield one.attr


def _module_of(symbol: str) -> tuple[str, ast.Module | None, str]:
    parts = symbol.split(".")
    for end in range(len(parts) - 1, 0, -1):
        tree, source = _parse(".".join(parts[:end]))
        if tree is not None:
            return ".".join(parts[:end]), tree, source
    return "", None, ""


@lru_cache(maxsize=128)
def _parse(module: str) -> tuple[ast.Module | None, str]:
    spec = importlib.util.find_spec(module.split(".")[0])
    if spec is None or not spec.submodule_search_locations:
        return None, ""
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            source = path.read_text()
            return ast.parse(source), source
    return None, ""


def _child(node: ast.AST, name: str) -> ast.AST | None:
    for child in ast.walk(node) if isinstance(node, ast.Module) else ast.iter_child_nodes(node):
        if (
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and child.name == name
        ):
            return child
        if isinstance(child, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in child.names
        ):
            return child
        targets = (
            child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        )
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return child
    return None


def _digest(source: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    text = textwrap.dedent("\n".join(line.rstrip() for line in lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--add", action="store_true", help="list the installed SGLang's bodies as read and tried"
    )
    parser.add_argument(
        "--pages",
        default=releases()[-1].pages if releases() else "1",
        help="with --add: another name where this release names or lays out pages otherwise",
    )
    parser.add_argument("--groups", nargs="*", default=(), help="with --add: these features' alone")
    given = parser.parse_args()
    if given.add:
        print(add_release(given.pages, given.groups))
    for status in check():
        print(f"{status.problem or 'ok':8} {status.seam.feature:10} {status.seam.symbol}")
