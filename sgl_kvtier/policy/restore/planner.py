"""All restorations: how each request is restored, which chunk is computed next, and which pages are
loaded in which order.

One of the two halves of a planner (`planner.py`); the other is `ahead/`. One thread, no clock.
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
    """Restores waiting requests: mode, meeting point, chunk sizes, order of loads. `profile` is
    what `profile()` gave at the end of an earlier run, or parts of it.
    """

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        profile: Mapping[str, Mapping[str, float]] | None = None,
        rules: Rules | None = None,
        claimable: Claimable | None = None,
    ) -> None:
        """`claimable`: how many device pages may be claimed, where more is known of them than the
        view says.
        """
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
        """Takes note of a fact. Facts about unknown requests change nothing but estimates."""
        self._state.observe(fact)
        if isinstance(fact, RestoreOffered):
            self._offers.add(fact)
        elif isinstance(fact, RequestFinished):
            self._offers.withdraw(fact.rid)

    def step(self, view: StepView) -> StepPlan:
        """Decides this step. Loads in the plan are claimed at once, chunks when a ChunkStarted
        reports them.
        """
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
        """Lets the slot's holder go on where it has no load in flight. A request that waits for a
        slot goes on only after a while, and not into room that these loads were to have.
        """
        if compute.rid == view.slot or (self._chunks.waited_long(compute, view) and not loads):
            return self._chunks.unstuck(compute, view)
        return compute

    def give_up(self) -> None:
        """Ends all restorations after an error: nothing is restored or in flight from now on.
        Learned costs stay.
        """
        self._state.give_up()
        self._offers.give_up()
        self._outlook.begin()

    def left_to_engine(self, question: LeftToEngine) -> str | None:
        """Why this prefix is not worth offering to an engine that can load by itself, or None.
        Changes nothing.
        """
        return self._offers.left_to_engine(question.offer, question.view)

    def promised_s(self, question: LeftToEngine) -> float:
        """What a restoration in its place is predicted to take, the rest of the prompt included.
        Changes nothing.
        """
        return self._offers.promised_s(question.offer, question.view)

    def known(self, rid: str) -> dict[str, str]:
        """What its parts know of a request, in words: `queue` and `restoration`, where there is
        something.
        """
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
        """The tokens of a chunk that leaves tokens of the step to waiting requests."""
        return self._queue.chunk_beside(question)

    def patience_s(self, question: HeldBack) -> float:
        """For how long a request waits for a session that runs before it. Changes nothing."""
        return self._queue.patience_s(question)

    def hold(self, question: HeldBack) -> None:
        """The request waits for one that comes later: it is overtaken from now on."""
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
        """Requests being restored, in the order they were offered; quick to search."""
        return self._state.items.keys()


def free(view: StepView, pages: int, until: float) -> int:
    """Nothing is known of when pages are needed: all that the view calls free."""
    del until
    return min(pages, view.free_pages[Tier.DEVICE])
