"""The arms of the restoration bench: ways to restore a stored prefix, all in one running server.

An arm is a few settings of that server, changed between two requests. One is `policy.restore` of
kvtier.json. Another is how long SGLang itself waits for its storage
(--hicache-storage-prefetch-policy).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import check_names
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.rules import IN_TURN

COMPUTE, LOAD, STOCK, OURS, BOTH_ENDS = "compute", "load", "stock_timeout", "kvtier", "both"
LAYERS = "layers"
FIXED_SPLITS = "sgl_kvtier.lab.rules:FixedSplit"
"""policy.rules of a server in which the computed share of a prefix can be fixed."""
RULES_IN_TURN = "sgl_kvtier.lab.rules:InTurn"
"""policy.rules of a server in which one class of rules can take the place of another."""
_STALL_MS: float = PolicyConfig().max_stall_ms
BACKEND = "kvtier"
"""The storage backend of a server that can be measured so."""


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
"""Every arm. The first four are measured unless others are named."""

DEFAULT_RESTORE_ARMS = (COMPUTE, LOAD, STOCK, OURS)
SINGLES = (COMPUTE, LOAD, "load_kvtier")
"""Arms that use one resource alone: the better of those measured is what ours must not be slower
than.
"""


def check_restore_arms(arms: Sequence[str]) -> None:
    """Raises BenchError unless the arms exist, once each, with the two that every figure is
    relative to.
    """
    check_names(arms, list(RESTORE_ARMS))
    if COMPUTE not in arms or LOAD not in arms:
        raise BenchError(
            f"--arms: {COMPUTE} and {LOAD} are what the others are compared with; both must be among them"
        )


def restore_choice(name: str) -> float:
    """The number that stands for a value of policy.restore in a message to a running server."""
    setting = next(f for f in dataclasses.fields(PolicyConfig) if f.name == "restore")
    return float(setting.metadata["choices"].index(name))


class ArmSwitch:
    """Sets a server to an arm and a bandwidth. Remembers both and sends only what changes.

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
        self._restore: str | None = None
        self._prefetch: str | None = None
        self._rule: str | None = None
        self._stall_ms = _STALL_MS
        self._gbps: float | None = None
        self._fixed_split: float | None = None

    async def use(self, arm: str, read_gbps: float, fixed_split: float | None = None) -> None:
        """Switches the server to an arm, from the next request on.

        `fixed_split` is the computed share of a prefix, for a server started with the rules
        `FIXED_SPLITS`. None: the share is decided on the way. Raises BenchError when the server
        refuses.
        """
        wanted = self._arms[arm]
        if wanted.restore != self._restore:
            await self._client.set_state({"kvtier.policy.restore": restore_choice(wanted.restore)})
            self._restore = wanted.restore
        if wanted.prefetch != self._prefetch:
            await self._client.set_prefetch_policy(BACKEND, wanted.prefetch)
            self._prefetch = wanted.prefetch
        if wanted.rule not in (None, self._rule):
            await self._client.set_state({"kvtier.rules.place": list(IN_TURN).index(wanted.rule)})
            self._rule = wanted.rule
        if wanted.stall_ms != self._stall_ms:
            wall_ms = wanted.stall_ms * self._client.dilation
            await self._client.set_state({"kvtier.policy.max_stall_ms": wall_ms})
            self._stall_ms = wanted.stall_ms
        await self._split(fixed_split)
        await self.bandwidth(read_gbps)

    async def free_split(self) -> None:
        """The computed share is decided on the way again."""
        await self._split(None)

    async def _split(self, share: float | None) -> None:
        if share != self._fixed_split:
            await self._client.set_state({"kvtier.rules.share": -1.0 if share is None else share})
            self._fixed_split = share

    async def bandwidth(self, read_gbps: float) -> None:
        """Sets the read bandwidth of the store's device, for pages not begun yet. It may be changed
        while a prefix is being restored.
        """
        if read_gbps != self._gbps:
            await self._client.set_state({"kvtier.throttle.read_gbps": read_gbps / self._slower})
            self._gbps = read_gbps
