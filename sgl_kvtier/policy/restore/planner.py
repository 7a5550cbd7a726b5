"""The restoration half of a planner (`policy/planner.py`): how each request is restored, which
chunk is computed next, and which pages are loaded in which order. One thread, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import (
    ChunkBeside,
    Compute,
    Fact,
    HeldBack,
    LeftToEngine,
    Load,
    RequestFinished,
    RestoreOffered,
    RunOrder,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.restore.ends import Chunks, Loads
from sgl_kvtier.policy.restore.forecast import Outlook
from sgl_kvtier.policy.restore.offers import Claimable, Offers
from sgl_kvtier.policy.restore.queue_order import QueueOrder
from sgl_kvtier.policy.restore.restorations import Restorations
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Tier


class RestorePlanner:
    """Plans the restorations of waiting requests: mode, meeting page, chunk sizes, order of loads.
    `profile` is the result of `profile()` at the end of an earlier run, or parts of it.
    """

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        profile: Mapping[str, Mapping[str, float]] | None = None,
        rules: Rules | None = None,
        claimable: Claimable | None = None,
    ) -> None:
        """`claimable` knows how many device pages can be allocated; default: all that are free."""
        self._state = Restorations(
            config, engine, profile or {}, Rules() if rules is None else rules
        )
        self._outlook = Outlook(self._state)
        self._offers = Offers(self._state, self._outlook, claimable or free)
        self._chunks = Chunks(self._state, self._outlook)
        self._loads = Loads(self._state, self._outlook, self._chunks)
        self._queue = QueueOrder(self._state)
        self.bandwidth = self._state.bandwidth
        self.links = self._state.links

    def observe(self, fact: Fact) -> None:
        """Records a fact. Facts about unknown requests change nothing but the learned estimates."""
        self._state.observe(fact)
        if isinstance(fact, RestoreOffered):
            self._offers.add(fact)
        elif isinstance(fact, RequestFinished):
            self._offers.withdraw(fact.rid)

    def step(self, view: StepView) -> StepPlan:
        """Decides this step. Reserves loads at once, chunks when a ChunkStarted reports them."""
        self._state.next_step(view)
        if not self._state.items and not self._offers:
            return StepPlan()
        self._outlook.begin()
        starts = self._offers.answer(view)
        computes, cancels = self._chunks.decide(view)
        loads = self._loads.decide(view, computes)
        granted = [
            self._chunks.within_stall_bound(self._unstuck(compute, view, loads), view)
            for compute in computes
        ]
        computes = [
            compute for compute in granted if compute.tokens != 0 or compute.rid == view.slot
        ]
        return StepPlan(starts=starts, cancels=cancels, loads=loads, computes=tuple(computes))

    def _unstuck(self, compute: Compute, view: StepView, loads: Sequence[Load]) -> Compute:
        """Lets the request in the slot compute if it has no load in flight. A request that still
        waits for the slot may do so only after some time, and if no load of this step needs the
        memory.
        """
        if compute.rid == view.slot or (self._chunks.waited_long(compute, view) and not loads):
            return self._chunks.unstuck(compute, view)
        return compute

    def give_up(self) -> None:
        """Ends all restorations after an error, with their loads and chunks. Learned costs stay."""
        self._state.give_up()
        self._offers.give_up()
        self._outlook.begin()

    def left_to_engine(self, question: LeftToEngine) -> str | None:
        """Why the engine should load this prefix itself, or None. Changes nothing."""
        return self._offers.left_to_engine(question.offer, question.view)

    def known(self, rid: str) -> dict[str, str]:
        """The records of a request as text: `queue` and `restoration`, each if there is one."""
        item = self._state.items.get(rid)
        found = {
            "queue": self._queue.known(rid),
            "restoration": None if item is None else str(item),
        }
        return {part: text for part, text in found.items() if text is not None}

    def order(self, question: RunOrder) -> tuple[str, ...]:
        """The order in which these requests should run."""
        return self._queue.order(question)

    def chunk_beside(self, question: ChunkBeside) -> int:
        """Size in tokens of a chunk that leaves part of the step to waiting requests."""
        return self._queue.chunk_beside(question)

    def patience_s(self, question: HeldBack) -> float:
        """For how many seconds a request should wait for a session that runs before it."""
        return self._queue.patience_s(question)

    def hold(self, question: HeldBack) -> None:
        """The request waits for one that arrives later, so it counts as overtaken from now on."""
        self._queue.hold(question)

    def profile(self) -> dict[str, Any]:
        """Learned costs and bandwidths for the next run, as plain data."""
        return {
            "prefill": self._state.cost.profile(),
            "links": self.bandwidth.profile(),
            "restore": self._state.overhead.profile(),
        }

    @property
    def restoring(self) -> Collection[str]:
        """Ids of the requests being restored, in the order they were offered. Lookup takes O(1)."""
        return self._state.items.keys()


def free(view: StepView, pages: int, until: float) -> int:
    """The default for `claimable`: all pages that the view calls free can be allocated."""
    del until
    return min(pages, view.free_pages[Tier.DEVICE])
