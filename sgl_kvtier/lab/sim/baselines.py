"""Planners to compare the planner with: recompute everything, load everything, stock HiCache, and
an oracle.

Cake's and CacheFlow's rules are classes for the planner itself (`lab/rules.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_kvtier.policy.messages import (
    Compute,
    Evict,
    Fact,
    Mode,
    Move,
    PagesDropped,
    PagesPlaced,
    Planner,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    RestoreStart,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PageKey, Span, Tier


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


class StaticTiering:
    """Placement by arrival, as TierKV's Static-Tiering.

    A page keeps the place it found: of the pages that may leave a tier, the last to come leaves
    first. Pages that are not on the device are read for each run and evicted again after it.
    `inner` restores.
    """

    def __init__(self, inner: Planner) -> None:
        self._inner = inner
        self._in: dict[Tier, dict[PageKey, None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self._changed: dict[Tier, None] = {}

    def observe(self, fact: Fact) -> None:
        """Passes everything on, and keeps the order in which pages came."""
        self._inner.observe(fact)
        if isinstance(fact, PagesPlaced | PagesDropped) and fact.tier in self._in:
            here = self._in[fact.tier]
            for key in fact.keys:
                if isinstance(fact, PagesPlaced):
                    here.setdefault(key, None)
                else:
                    here.pop(key, None)
            self._changed[fact.tier] = None

    def step(self, view: StepView) -> StepPlan:
        """The inner plan with its own order of eviction, said again when it has changed."""
        plan = self._inner.step(view)
        evictions = tuple(
            Evict(tuple(reversed(self._in[tier])), tier) for tier in self._changed if self._in[tier]
        )
        self._changed = {}
        return dataclasses.replace(plan, evictions=evictions)


class Stop(enum.Enum):
    """When stock HiCache ends a prefetch (`--hicache-storage-prefetch-policy`)."""

    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"
    BEST_EFFORT = "best_effort"


@dataclass(frozen=True, slots=True)
class StockSettings:
    """Stock HiCache's constants, as SGLang 0.5.23 has them. Tokens, pages, seconds."""

    stop: Stop = Stop.TIMEOUT
    threshold_tokens: int = 256
    batch_pages: int = 128
    timeout_base_s: float = 1.0
    timeout_per_1024_tokens_s: float = 0.25


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

    A request is skipped until its prefetch has ended or its stop policy ends it. The engine then
    copies its pages from host memory in the step that admits it, and computes the rest
    (`ServerSpec.fetches`).

    Needs pages with names (`SimRequest.keys`). One prefetch batch is under way at a time, as stock
    has one thread for it.
    """

    def __init__(self, engine: EngineShape, settings: StockSettings | None = None) -> None:
        self._engine = engine
        self.settings = settings or StockSettings()
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
        """Goes on prefetching, ends prefetches by the stop policy, and lets run what is over."""
        starts = tuple(self._begin(offer, view.now) for offer in self._offers)
        self._offers = []
        over = [one for one in self.operations.values() if self.ended(one, view.now)]
        for operation in over:
            del self.operations[operation.rid]
        computes = tuple(Compute(operation.rid, Span(0, 0), None) for operation in over)
        return StepPlan(starts=starts, computes=computes, moves=self._prefetch(view))

    def _begin(self, offer: RestoreOffered, now: float) -> RestoreStart:
        first = next((span.start for span, tier in offer.sources if tier > Tier.HOST), offer.pages)
        if (offer.pages - first) * self._engine.page_tokens < self.settings.threshold_tokens:
            return RestoreStart(offer.rid, Mode.COMPUTE, "below the prefetch threshold")
        assert self._keys.get(offer.rid), (
            f"{offer.rid}: stock HiCache moves pages by name; give the request keys"
        )
        batches = [
            (Span(low, high), tier)
            for span, tier in _stored(offer, first)
            for low, high in itertools.pairwise(
                (*range(span.start, span.stop, self.settings.batch_pages), span.stop)
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
        """Whether its prefetch is over: complete, or ended by the policy now that the request could
        run.
        """
        policy = self.settings.stop
        tokens = operation.pages * self._engine.page_tokens
        patience_s = (
            self.settings.timeout_base_s + self.settings.timeout_per_1024_tokens_s * tokens / 1024
        )
        late = policy is Stop.TIMEOUT and now - operation.since >= patience_s
        if policy is Stop.BEST_EFFORT or late:
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
