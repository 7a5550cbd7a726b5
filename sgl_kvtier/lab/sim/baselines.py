"""Planners to compare the planner with, recompute everything and SGLang's own HiCache, and the
planner as a server has it: beside it an engine that loads by itself what the planner leaves to it,
in the order of the queue.

The engine's own way is StockHiCache. A server asks of each prefix whether it is left
(`LeftToEngine`), and whose stored pages are read next (`ReadsDue`); so does `Served`. Cake's and
CacheFlow's rules are classes for the planner itself (`lab/rules.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import (
    Compute,
    Consulted,
    Fact,
    LeftToEngine,
    Mode,
    Move,
    PagesDropped,
    PagesPlaced,
    Question,
    Queued,
    ReadsDue,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    RestoreStart,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PageKey, Span, Tier

# --- what the planner is compared with ------------------------------------------------------------


class RecomputeOnly:
    """Takes no offer: what is not on the device is computed."""

    def __init__(self) -> None:
        self._offers: list[str] = []

    def observe(self, fact: Fact) -> None:
        """Notes offers."""
        if isinstance(fact, RestoreOffered):
            self._offers.append(fact.rid)

    def step(self, view: StepView) -> StepPlan:
        """Declines them."""
        del view
        offers, self._offers = self._offers, []
        return StepPlan(
            starts=tuple(RestoreStart(rid, Mode.COMPUTE, "never loads") for rid in offers)
        )


# SGLang 0.5.23's constants, with `--hicache-storage-prefetch-policy timeout`.
_THRESHOLD_TOKENS = 256
_BATCH_PAGES = 128
_TIMEOUT_BASE_S, _TIMEOUT_PER_1024_TOKENS_S = 1.0, 0.25


@dataclass(slots=True)
class Operation:
    """One request's stored pages on their way to host memory, in batches from the front."""

    rid: str
    pages: int
    """Pages of its prefix below the device, in host memory or storage."""
    since: float
    """When it was enqueued, in seconds."""
    batches: list[tuple[Span, Tier]] = field(default_factory=list)
    moving: dict[PageKey, None] = field(default_factory=dict)
    asked: bool = False
    """Its turn to be fetched has come."""


class StockHiCache:
    """SGLang's own way: prefetch to host memory in the order requests were enqueued, front to back.

    A request is skipped until its prefetch has ended or takes too long. The engine then copies its
    pages from host memory in the step that admits it, and computes the rest (`ServerSpec.fetches`).

    Needs pages with names (`SimRequest.keys`). One prefetch batch is under way at a time, as stock
    has one thread for it.
    """

    def __init__(self, engine: EngineShape, threshold_tokens: int = _THRESHOLD_TOKENS) -> None:
        """`threshold_tokens`: of shorter prefixes nothing is fetched."""
        self._engine = engine
        self._threshold_tokens = threshold_tokens
        self._keys: dict[str, tuple[PageKey, ...]] = {}
        self._offers: list[RestoreOffered] = []
        self.operations: dict[str, Operation] = {}

    # --- facts ------------------------------------------------------------------------------------

    def observe(self, fact: Fact) -> None:
        """Takes note of what happened."""
        if isinstance(fact, RequestArrived):
            self._keys[fact.rid] = fact.keys
        elif isinstance(fact, RestoreOffered):
            self._offers.append(fact)
        elif isinstance(fact, RequestFinished):
            self.operations.pop(fact.rid, None)
            self._keys.pop(fact.rid, None)
        elif isinstance(fact, PagesPlaced | PagesDropped) and fact.tier == Tier.HOST:
            self._moved(fact)

    def _moved(self, fact: PagesPlaced | PagesDropped) -> None:
        for operation in self.operations.values():
            moved = [key for key in fact.keys if key in operation.moving]
            for key in moved:
                del operation.moving[key]
            if moved and isinstance(fact, PagesDropped):
                operation.batches.clear()

    # --- decisions --------------------------------------------------------------------------------

    def step(self, view: StepView) -> StepPlan:
        """Goes on prefetching, ends prefetches that take too long, and lets run what is over."""
        starts = tuple(self._begin(offer, view.now) for offer in self._offers)
        self._offers = []
        over = [one for one in self.operations.values() if self.ended(one, view.now)]
        for operation in over:
            del self.operations[operation.rid]
        computes = tuple(Compute(operation.rid, Span(0, 0), None) for operation in over)
        return StepPlan(starts=starts, computes=computes, moves=self._prefetch(view))

    def _begin(self, offer: RestoreOffered, now: float) -> RestoreStart:
        first = next((span.start for span, tier in offer.sources if tier > Tier.HOST), offer.pages)
        if (offer.pages - first) * self._engine.page_tokens < self._threshold_tokens:
            return RestoreStart(offer.rid, Mode.COMPUTE, "below the prefetch threshold")
        assert self._keys.get(offer.rid), (
            f"{offer.rid}: stock HiCache moves pages by name; give the request keys"
        )
        batches = [
            (Span(low, high), tier)
            for span, tier in _stored(offer, first)
            for low, high in itertools.pairwise(
                (*range(span.start, span.stop, _BATCH_PAGES), span.stop)
            )
        ]
        pages = offer.pages - offer.resident
        self.operations[offer.rid] = Operation(offer.rid, pages, now, batches)
        return RestoreStart(offer.rid, Mode.LOAD, "prefetch")

    def reading_order(self, view: StepView) -> Iterable[Operation]:
        """Whose pages are fetched first: those of the requests that came first."""
        del view
        return self.operations.values()

    def _prefetch(self, view: StepView) -> tuple[Move, ...]:
        """The next batch of the first operation that has one."""
        if not self.operations or any(one.moving for one in self.operations.values()):
            return ()
        operation = next((one for one in self.reading_order(view) if one.batches), None)
        if operation is None:
            return ()
        span, tier = operation.batches.pop(0)
        keys = self._keys[operation.rid][span.start : span.stop]
        operation.moving = dict.fromkeys(keys)
        return (Move(keys, tier, Tier.HOST, operation.rid),)

    def ended(self, operation: Operation, now: float) -> bool:
        """Whether its prefetch is over: complete, or given up now that the request could run."""
        tokens = operation.pages * self._engine.page_tokens
        patience_s = _TIMEOUT_BASE_S + _TIMEOUT_PER_1024_TOKENS_S * tokens / 1024
        if now - operation.since >= patience_s:
            operation.batches.clear()
        return not operation.batches and not operation.moving


def _stored(offer: RestoreOffered, first: int) -> list[tuple[Span, Tier]]:
    """Pages from `first` on in runs by where they are read from. A prefetch goes on over pages in
    host memory that lie between.
    """
    runs: list[tuple[Span, Tier]] = []
    for span, tier in offer.sources:
        below = Tier.REMOTE if tier is Tier.REMOTE else Tier.STORAGE
        if span.stop <= first:
            continue
        if runs and runs[-1][1] is below:
            runs[-1] = (Span(runs[-1][0].start, span.stop), below)
        else:
            runs.append((Span(max(span.start, first), span.stop), below))
    return runs


# --- the planner beside an engine that loads by itself --------------------------------------------

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
        super().__init__(shape)
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
