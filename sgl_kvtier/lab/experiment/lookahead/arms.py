"""The arms of `kvtier compare lookahead`: one more part of looking ahead in each, and an oracle
that never evicts.

Arms with the kvtier backend differ in kvtier.json's policy section only; `oracle` is `recompute`
with another device pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import (
    BASELINE,
    ORACLE,
    OURS,
    Setup,
    Variant,
    check_names,
    oracle,
)
from sgl_kvtier.lab.experiment.load import Load, undisturbed_tokens

AUTO = -1
"""As many iterations as measured speeds ask for."""
_OFF: Mapping[str, Any] = {"prefetch": "off", "eviction": "lru", "sessions": False}
_STEPS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (
        "restore",
        "prefixes are restored by computing and loading at once, nothing is done ahead",
        {},
    ),
    (
        "lookahead",
        "and pages of waiting requests are moved up before their turn",
        {"prefetch": "on"},
    ),
    (
        "next-use",
        "and what runs latest is evicted first",
        {"prefetch": "on", "eviction": "next-use"},
    ),
    (
        OURS,
        "and sessions are expected back",
        {"prefetch": "on", "eviction": "next-use", "sessions": True},
    ),
)
AHEAD = tuple(name for name, _, policy in _STEPS if policy)
"""Arms that move pages ahead of requests."""
LOOKAHEAD_ARMS = (BASELINE, "hicache-file", *(name for name, _, _ in _STEPS), ORACLE)
"""In the order in which results are shown."""


@dataclass(frozen=True)
class Pools:
    """Tokens in each pool, for a load that needs `needed` to keep the contexts of all its sessions."""

    needed: int
    device: int
    host: int
    oracle: int

    @property
    def host_ratio(self) -> float:
        """The host pool as SGLang is told of it."""
        return self.host / self.device


def pools(load: Load, oversubscription: float, page: int) -> Pools:
    """The device pool holds needed / oversubscription, and host memory half of the rest. SGLang's
    host pool has copies of what is on the device too, so it is given room for both. Raises
    BenchError where not even one request fits.
    """
    needed = load.context_tokens
    device = _pages(needed / oversubscription, page)
    least = load.longest_tokens + 2 * page
    if device < least:
        most = needed / least
        raise BenchError(
            f"--oversubscription {oversubscription:g}: the device pool would have {device:,} tokens, and the longest request needs "
            f"{least:,}. With these sessions at most {most:.1f} is possible: take more with --sessions"
        )
    return Pools(
        needed=needed,
        device=device,
        host=_pages(device + max(0, needed - device) / 2, page) + page,
        oracle=undisturbed_tokens(load, page),
    )


def arm_setup(setup: Setup, sizes: Pools, restore: str, lookahead: Sequence[int]) -> Setup:
    """The setup with these pools and all arms in it. Several values of `lookahead` make the full
    arm one arm per value.
    """
    steps = {
        name: Variant(
            OURS, about, {**_OFF, "restore": restore, "rules": _k(name, lookahead), **policy}
        )
        for name, about, policy in _STEPS
    }
    swept = {
        sweep_name(k): Variant(
            OURS, f"kvtier, {k} iterations ahead", {**steps[OURS].policy, "rules": _rules(k)}
        )
        for k in lookahead
        if len(lookahead) > 1 and k != AUTO
    }
    return replace(
        setup,
        device_tokens=sizes.device,
        host_ratio=sizes.host_ratio,
        variants={**steps, **swept, ORACLE: oracle(sizes.oracle)},
    )


def arm_names(wanted: Sequence[str] | None, lookahead: Sequence[int]) -> list[str]:
    """The arms to measure, in their order. Raises BenchError for a name that is none."""
    chosen = list(LOOKAHEAD_ARMS if wanted is None else wanted)
    check_names(chosen, LOOKAHEAD_ARMS)
    found: list[str] = []
    for arm in LOOKAHEAD_ARMS:
        if arm not in chosen:
            continue
        if arm == OURS and len(lookahead) > 1:
            found += [sweep_name(k) for k in lookahead]
        else:
            found.append(arm)
    return found


def sweep_name(k: int) -> str:
    """The full arm's name with this lookahead; `auto` is the full arm itself."""
    return OURS if k == AUTO else f"{OURS}-k{k}"


def _k(name: str, lookahead: Sequence[int]) -> str:
    return _rules(lookahead[0]) if len(lookahead) == 1 and name in AHEAD else ""


def _rules(k: int) -> str:
    """policy.rules of kvtier's own with this lookahead."""
    return "" if k == AUTO else f"sgl_kvtier.lab.rules:K{k}"


def _pages(tokens: float, page: int) -> int:
    return -(-int(tokens) // page) * page
