"""State shared by everything that works in a scheduler's step: the tree, the step's clock, our
pages, and the facts for the planner. One per scheduler process. Scheduler's thread.
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
    """`facts` are what the next tick tells the planner; `page` is in tokens."""

    def __init__(self, tree: Tree, alone: bool = True) -> None:
        """`alone`: there is no other rank to agree with."""
        self.tree = tree
        self.alone = alone
        self.looking_ahead = False
        """Whether a part of this process looks ahead."""
        self.device = DeviceSlots(tree)
        self.host = HostTier(tree)
        self.anchors = anchors.of(tree)
        """Windows or states, of a model that has some."""
        self.slots = PrivateSlots(self.device, self.host, self.anchors)
        self.room = RealRoom(tree, self.slots)
        self.page = int(tree.page_size)
        self.page_bytes = self.host.page_bytes
        self.agreed_page_bytes = self.page_bytes
        """The planner's size of a page, in bytes: pipeline stages with other numbers of layers have
        other pages, and plan the same.
        """
        self.now = 0.0
        """The time of this tick in seconds, the same on every rank."""
        self.loaded_at = -math.inf
        """When a load of a restoration was last in flight, in the same seconds: it goes before
        other reads, whose time says nothing of their link then.
        """
        self.scheduler: Scheduler | None = None
        """SGLang's, from the first tick on."""
        self.requests = Requests()
        """A record for each request that something is known of."""
        self.facts: list[Fact | Chunk] = []
        self.hung_reads: list[Any] = []
        """Jobs of reads ahead that did not end in time: their host pages were given up, and are
        read into all the same.
        """
        self._numbered = 0

    @cached_property
    def names(self) -> PageNames:
        """How this tree's pages are named."""
        return PageNames(self.page, pairs=TreeNodes(self.tree).named_by_pairs)

    def available(self) -> tuple[int, ...]:
        """Device slots that hold nothing; of a model with anchors, slots of those too."""
        own = self.device.available()
        return (own,) if self.anchors is None else (own, self.anchors.available())

    def moment(self) -> float:
        """The time between two ticks in seconds: with several ranks the last one they agreed on."""
        return time.monotonic() if self.alone else self.now

    def next_number(self) -> int:
        """The number of a new load or poll, alike on every rank."""
        self._numbered += 1
        return self._numbered

    @property
    def reads_hang(self) -> bool:
        """Whether reads that were given up still write to host pages that no count includes."""
        return any(not job.done for job in self.hung_reads)

    def waiting(self, handle: Handle) -> Req | None:
        """The waiting request with this handle, or None."""
        return step.waiting_of(self.scheduler, handle)


class Restoring(Protocol):
    """The part of a restoring engine that other modules use."""

    @property
    def is_on(self) -> bool:
        """Whether hits are taken over at all."""

    @property
    def owned(self) -> list[str]:
        """Requests whose prefix SGLang need not ask storage for."""
