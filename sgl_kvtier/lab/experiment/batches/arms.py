"""The arms of several restorations at once: the ways of one, the papers' rules, and ours with one
thing changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sgl_kvtier.lab.experiment.restore.arms import (
    BOTH_ENDS,
    COMPUTE,
    LAYERS,
    LOAD,
    OURS,
    RESTORE_ARMS,
    STOCK,
    RestoreArm,
)

PAPERS = ("cake", "cacheflow")
"""The rules of papers that ours is compared with."""
BY_ARRIVAL, STALL_ANY = "by-arrival", "stall-any"
"""Ours with one thing taken away: the planner's order of the queue, the bound of the gaps."""
SHORTEST_FIRST = "-shortest-first"
"""The end of the name of an arm with another order of compute."""


@dataclass(frozen=True)
class BatchArm(RestoreArm):
    """One way. `shortest_first`: the requests of a batch are sent in the order of their length, so
    that the queue has them so; else in the order that was drawn.
    """

    shortest_first: bool = False


_OURS = replace(RESTORE_ARMS[OURS], rule="kvtier")
_SPLITTING: dict[str, RestoreArm] = {
    "cake": RestoreArm(
        "auto",
        "timeout",
        "Cake's rule: computed and loaded at once always, in whole chunks, loads by arrival",
        "cake",
        stall_ms=0.0,
    ),
    "cacheflow": RestoreArm(
        "auto",
        "timeout",
        "CacheFlow's rule: as Cake's, loads for the longest remaining restoration first",
        "cacheflow",
        stall_ms=0.0,
    ),
    OURS: _OURS,
    BOTH_ENDS: replace(RESTORE_ARMS[BOTH_ENDS], rule="kvtier"),
}
BATCH_ARMS: dict[str, RestoreArm] = {
    # What is SGLang's own runs in its own order.
    "stock": replace(RESTORE_ARMS[STOCK], rule=BY_ARRIVAL),
    COMPUTE: replace(RESTORE_ARMS[COMPUTE], rule=BY_ARRIVAL),
    LOAD: replace(RESTORE_ARMS[LOAD], rule=BY_ARRIVAL),
    **_SPLITTING,
    "longest-io-first": replace(
        _OURS, rule="longest-io-first", about="kvtier, loads for the longest restoration first"
    ),
    "shortest-io-first": replace(
        _OURS, rule="shortest-io-first", about="kvtier, loads for the shortest restoration first"
    ),
    "uncharged": replace(
        _OURS, rule="uncharged", about="kvtier, computing not made dearer by requests that wait"
    ),
    "decodes-charged": replace(
        _OURS, rule="decodes-charged", about="kvtier, computing made dearer by requests that decode"
    ),
    BY_ARRIVAL: replace(
        _OURS, rule=BY_ARRIVAL, about="kvtier, requests computed in the order they came"
    ),
    LAYERS: RestoreArm(
        "auto",
        "timeout",
        "CacheFlow's layer axis: lower layers of the whole prefix computed, upper ones loaded",
        "layers",
        stall_ms=0.0,
    ),
    **{
        f"stall-{stall_ms}": replace(
            _OURS,
            stall_ms=float(stall_ms),
            about=f"kvtier, requests that decode stand still for {stall_ms} ms at most",
        )
        for stall_ms in (50, 200)
    },
    STALL_ANY: replace(
        _OURS, stall_ms=0.0, about="kvtier, no bound on how long requests that decode stand still"
    ),
    **{
        f"{name}{SHORTEST_FIRST}": BatchArm(
            arm.restore,
            arm.prefetch,
            f"{name}, requests sent in the order of their length, so that they are computed so",
            arm.rule,
            arm.stall_ms,
            shortest_first=True,
        )
        for name, arm in _SPLITTING.items()
    },
}
"""Every arm. The first six are measured unless others are named."""

DEFAULT_BATCH_ARMS = tuple(BATCH_ARMS)[:6]
