"""A planner as a server has it: beside it an engine that loads by itself what the planner leaves to
it, in the order of the queue.

The engine's own way is StockHiCache. A server asks of each prefix whether it is left
(`LeftToEngine`), and whose stored pages are read next (`ReadsDue`); so does this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

from sgl_kvtier.lab.sim.baselines import Operation, StockHiCache, StockSettings
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import (
    Consulted,
    Fact,
    LeftToEngine,
    Question,
    Queued,
    ReadsDue,
    RequestFinished,
    RestoreOffered,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Tier

_A = TypeVar("_A")


class Served:
    """A planner and the engine it leaves prefixes to, as one planner. `shortest`: prefixes of fewer
    tokens are not offered (`policy.min_restore_tokens`).
    """

    def __init__(
        self, inner: Consulted, shape: EngineShape, spec: ServerSpec, shortest: int
    ) -> None:
        self._inner = inner
        self._reads = ReadsInTurn(inner, shape, spec)
        self._least = max(1, shortest)
        self._page = shape.page_tokens
        self._left: dict[str, None] = {}

    def query(self, question: Question[_A]) -> _A:
        """The planner's answer. What it leaves is noted."""
        if isinstance(question, LeftToEngine):
            offer = question.offer
            short = (offer.pages - offer.resident) * self._page < self._least
            why = "short" if short else self._inner.query(question)
            if why is not None:
                self._left[offer.rid] = None
            return why  # type: ignore[return-value]
        return self._inner.query(question)

    def observe(self, fact: Fact) -> None:
        """Facts are for both, offers for the one that takes them."""
        if not isinstance(fact, RestoreOffered):
            self._inner.observe(fact)
            self._reads.observe(fact)
        elif fact.rid in self._left:
            self._reads.observe(fact)
        else:
            self._inner.observe(fact)
        if isinstance(fact, RequestFinished):
            self._left.pop(fact.rid, None)

    def step(self, view: StepView) -> StepPlan:
        """Both plans."""
        plan = self._inner.step(view)
        own = self._reads.step(view)
        return dataclasses.replace(
            plan,
            starts=plan.starts + own.starts,
            computes=plan.computes + own.computes,
            moves=plan.moves + own.moves,
        )


class ReadsInTurn(StockHiCache):
    """SGLang's own loads, with stored pages read in the order of the queue, as far as host memory
    has room.
    """

    def __init__(self, planner: Consulted, shape: EngineShape, spec: ServerSpec) -> None:
        super().__init__(shape, StockSettings())
        self._planner = planner
        self._device_pages = spec.device_pages
        self._host_pages = spec.host_pages

    def ended(self, operation: Operation, now: float) -> bool:
        """As stock, but never before its turn to be fetched."""
        if operation.batches and not operation.asked:
            return False
        return super().ended(operation, now)

    def reading_order(self, view: StepView) -> Iterable[Operation]:
        """Those under way, then those whose turn it is."""
        waiting = [self.operations[rid] for rid in view.waiting if rid in self.operations]
        queue = tuple(
            Queued(one.rid, one.pages, bool(one.batches) and not one.asked) for one in waiting
        )
        for rid in self._planner.query(ReadsDue(queue, self._room(view))):
            self.operations[rid].asked, self.operations[rid].since = True, view.now
        return [one for one in waiting if one.asked]

    def _room(self, view: StepView) -> int:
        """Host pages for prefixes of waiting requests: what is on the device has its copy there."""
        if self._host_pages is None:
            return 1 << 40
        free = view.free_pages.get(Tier.DEVICE, 0)
        return max(0, self._host_pages - max(0, (self._device_pages or 0) - free))
