"""State that all modules working in a scheduler step share: the tree, the step's clock, our slots,
and the facts for the planner. One per scheduler process. Scheduler's thread.
"""

from __future__ import annotations

import math
import time
from functools import cached_property
from typing import Any, Protocol

from sgl_kvtier.policy.messages import Fact
from sgl_kvtier.runtime.sglang import anchors, step
from sgl_kvtier.runtime.sglang.device_slots import DeviceSlots
from sgl_kvtier.runtime.sglang.host_tier import HostTier
from sgl_kvtier.runtime.sglang.tree_nodes import TreeNodes
from sgl_kvtier.runtime.sglang.types import Handle, Req, Scheduler, Tree
from sgl_kvtier.runtime.step.chunk_clock import Chunk
from sgl_kvtier.runtime.step.page_names import PageNames
from sgl_kvtier.runtime.step.private_slots import PrivateSlots
from sgl_kvtier.runtime.step.real_room import RealRoom
from sgl_kvtier.runtime.step.tracked import Requests


class StepContext:
    """`facts` are reported to the planner in the next tick; `page` is the page size in tokens."""

    def __init__(self, tree: Tree, alone: bool = True) -> None:
        """`alone`: there is only one rank."""
        self.tree = tree
        self.alone = alone
        self.looking_ahead = False
        """Whether this process has a lookahead engine."""
        self.device = DeviceSlots(tree)
        self.host = HostTier(tree)
        self.anchors = anchors.of(tree)
        """Windows or states; None for models without."""
        self.slots = PrivateSlots(self.device, self.host, self.anchors)
        self.room = RealRoom(tree, self.slots)
        self.page = int(tree.page_size)
        self.page_bytes = self.host.page_bytes
        self.agreed_page_bytes = self.page_bytes
        """The page size in bytes that the planner uses on every rank. Pipeline stages with
        different numbers of layers have different pages, but must plan alike.
        """
        self.now = 0.0
        """The time of this tick in seconds, the same on every rank."""
        self.loaded_at = -math.inf
        """When a load of a restoration was last in flight, in the seconds of `now`. Loads have
        priority, so the duration of other reads says nothing about their link then.
        """
        self.scheduler: Scheduler | None = None
        """SGLang's, from the first tick on."""
        self.requests = Requests()
        """A record for each request that a module has noted something of."""
        self.facts: list[Fact | Chunk] = []
        self.hung_reads: list[Any] = []
        """Lookahead reads that did not end in time. Their host pages were given up but may still be
        written.
        """
        self._numbered = 0

    @cached_property
    def names(self) -> PageNames:
        """How the tree's pages are named."""
        return PageNames(self.page, pairs=TreeNodes(self.tree).named_by_pairs)

    def available(self) -> tuple[int, ...]:
        """Number of empty device slots; for models with anchors, of empty anchor slots too."""
        own = self.device.available()
        return (own,) if self.anchors is None else (own, self.anchors.available())

    def moment(self) -> float:
        """The time between two ticks in seconds; with several ranks the last agreed time."""
        return time.monotonic() if self.alone else self.now

    def next_number(self) -> int:
        """The number of a new load or poll, the same on every rank."""
        self._numbered += 1
        return self._numbered

    @property
    def reads_hang(self) -> bool:
        """Whether abandoned reads still write to host pages that are counted nowhere."""
        return any(not job.done for job in self.hung_reads)

    def waiting(self, handle: Handle) -> Req | None:
        """The waiting request with this handle, or None."""
        return step.waiting_of(self.scheduler, handle)


class Restoring(Protocol):
    """The part of the restore engine that other modules use."""

    @property
    def is_on(self) -> bool:
        """Whether prefixes are restored at all."""

    @property
    def owned(self) -> list[str]:
        """Ids of requests whose prefix SGLang need not query storage for."""
