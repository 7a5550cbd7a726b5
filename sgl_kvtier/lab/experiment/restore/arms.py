"""The arms of `compare restore`: ways to restore one stored prefix, or several at once, all in one
running server.

An arm is a few settings of that server, changed between two requests. One is `policy.restore` of
kvtier.json. Another is how long SGLang itself waits for its storage
(--hicache-storage-prefetch-policy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import check_names
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.rules import IN_TURN

COMPUTE, LOAD, STOCK, OURS, BOTH_ENDS = "compute", "load", "stock_timeout", "kvtier", "both"
LAYERS = "layers"
RULES_IN_TURN = "sgl_kvtier.lab.rules:InTurn"
"""policy.rules of a server in which one class of rules can take the place of another."""
_STALL_MS: float = PolicyConfig().max_stall_ms
_BACKEND = "kvtier"


@dataclass(frozen=True)
class RestoreArm:
    """One way: its settings, and what it is in words."""

    restore: str
    prefetch: str
    about: str
    rule: str | None = None
    """Which of `lab.rules.IN_TURN` decides, in a server started with those; None: any."""
    stall_ms: float = _STALL_MS
    """`policy.max_stall_ms`, in milliseconds of the modelled machine."""
    shortest_first: bool = False
    """Of a batch: its requests are sent in the order of their length, so that the queue has them
    so; else in the order that was drawn.
    """

    @property
    def estimates(self) -> bool:
        """Whether it decides by a bandwidth it has to know."""
        return self.restore in ("auto", "both")


RESTORE_ARMS = {
    COMPUTE: RestoreArm("compute", "timeout", "the prefix is computed again"),
    LOAD: RestoreArm(
        "off", "wait_complete", "SGLang waits until all of the prefix is loaded (wait_complete)"
    ),
    STOCK: RestoreArm(
        "off",
        "timeout",
        "SGLang waits for the load up to its timeout and computes what is missing (its default)",
    ),
    OURS: RestoreArm(
        "auto",
        "timeout",
        "front computed while the back is loaded, or one of both where that is predicted faster",
    ),
    BOTH_ENDS: RestoreArm("both", "timeout", "the same, never one of both alone"),
    "load_kvtier": RestoreArm("load", "timeout", "our engine loads all of the prefix"),
}
"""The arms of one prefix at a time. The first four are measured unless others are named."""

DEFAULT_RESTORE_ARMS = (COMPUTE, LOAD, STOCK, OURS)
SINGLES = (COMPUTE, LOAD, "load_kvtier")
"""Arms that use one resource alone: the better of those measured is what ours must not be slower
than.
"""

PAPERS = ("cake", "cacheflow")
"""The rules of papers that ours is compared with."""
BY_ARRIVAL, STALL_ANY = "by-arrival", "stall-any"
"""Both ends with one thing taken away: the planner's order of the queue, the bound of the gaps."""
SHORTEST_FIRST = "-shortest-first"
"""The end of the name of an arm whose requests are computed in the order of their length."""


def _paper(name: str, about: str) -> RestoreArm:
    return RestoreArm("auto", "timeout", about, rule=name, stall_ms=0.0)


_OURS = replace(RESTORE_ARMS[OURS], rule="kvtier")
_SPLITTING: dict[str, RestoreArm] = {
    "cake": _paper(
        "cake", "Cake's rule: computed and loaded at once always, in whole chunks, loads by arrival"
    ),
    "cacheflow": _paper(
        "cacheflow",
        "CacheFlow's rule: as Cake's, loads for the longest remaining restoration first",
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
    BY_ARRIVAL: replace(
        _SPLITTING[BOTH_ENDS],
        rule=BY_ARRIVAL,
        about="both, requests computed in the order they came",
    ),
    LAYERS: RestoreArm(
        "auto",
        "timeout",
        "CacheFlow's layer axis: lower layers of the whole prefix computed, upper ones loaded",
        LAYERS,
        stall_ms=0.0,
    ),
    STALL_ANY: replace(
        _SPLITTING[BOTH_ENDS],
        stall_ms=0.0,
        about="both, no bound on how long requests that decode stand still",
    ),
    **{
        f"{name}{SHORTEST_FIRST}": replace(
            arm,
            about=f"{name}, requests sent in the order of their length, so that they are computed so",
            shortest_first=True,
        )
        for name, arm in _SPLITTING.items()
    },
}
"""The arms of several prefixes at once. The first six are measured unless others are named."""

DEFAULT_BATCH_ARMS = tuple(BATCH_ARMS)[:6]


def check_restore_arms(arms: Sequence[str]) -> None:
    """Raises BenchError unless the arms exist, once each, with the two that every figure is
    relative to.
    """
    check_names(arms, list(RESTORE_ARMS))
    if COMPUTE not in arms or LOAD not in arms:
        raise BenchError(
            f"--arms: {COMPUTE} and {LOAD} are what the others are compared with; both must be among them"
        )


class ArmSwitch:
    """Sets a server to an arm and a bandwidth, and sends only what changes.

    Bandwidths are those of the modelled machine. A paced device moves one byte for `bytes_scale` of
    them, and its client knows its dilation.
    """

    def __init__(
        self,
        client: Client,
        bytes_scale: float = 1.0,
        arms: Mapping[str, RestoreArm] = RESTORE_ARMS,
    ) -> None:
        self._client = client
        self._arms = arms
        self._slower = bytes_scale * client.dilation
        self._prefetch: str | None = None
        self._state: dict[str, float] = {}
        self._policy: dict[str, Any] = {"max_stall_ms": _STALL_MS * client.dilation}

    async def use(self, arm: str, read_gbps: float) -> None:
        """Switches the server to an arm, from the next request on. Raises BenchError when the
        server refuses.
        """
        wanted = self._arms[arm]
        policy = {
            "restore": wanted.restore,
            "max_stall_ms": wanted.stall_ms * self._client.dilation,
        }
        if not policy.items() <= self._policy.items():
            await self._client.set_policy(**policy)
            self._policy = policy
        if wanted.prefetch != self._prefetch:
            await self._client.set_prefetch_policy(_BACKEND, wanted.prefetch)
            self._prefetch = wanted.prefetch
        if wanted.rule is not None:
            await self._set("kvtier.rules.place", list(IN_TURN).index(wanted.rule))
        await self._set("kvtier.throttle.read_gbps", read_gbps / self._slower)

    async def _set(self, name: str, value: float) -> None:
        if self._state.get(name) != value:
            await self._client.set_state({name: value})
            self._state[name] = value
