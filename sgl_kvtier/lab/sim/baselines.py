"""Planners to compare the planner with: recompute everything, load everything, stock HiCache, and
an oracle.

Cake's and CacheFlow's rules are classes for the planner itself (`lab/rules.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from dataclasses import dataclass, field

from sgl_kvtier.policy.messages import (
    ChunkStarted,
    Compute,
    Evict,
    Fact,
    Load,
    Mode,
    Move,
    PagesDropped,
    PagesLost,
    PagesPlaced,
    Planner,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    RestoreStart,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, PageKey, Span, Tier

_NEVER_S = 1e9
"""A deadline nothing is late for."""


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
class _Operation:
    """One request's prefix on its way, in pages. It goes first up to host memory in batches from
    the front, then to the device in one load.
    """

    rid: str
    offer: RestoreOffered
    since: float
    batches: list[Span]
    usable: int
    """Below, all pages are in host or device."""
    moving: dict[PageKey, int] = field(default_factory=dict)
    arrived: dict[int, None] = field(default_factory=dict)
    stopped: bool = False
    loaded: int | None = None
    """End of the load-back, in pages; None before it."""
    loading: bool = False
    front: int = 0


class StockHiCache:
    """SGLang's own way: prefetch to host memory in the order requests were enqueued, front to back.

    A request is skipped until its prefetch has ended or its stop policy ends it. Its pages in host
    memory are then loaded back, the rest computed.

    Needs pages with names (`SimRequest.keys`). One prefetch batch is under way at a time, as stock
    has one thread for it.
    """

    def __init__(self, engine: EngineShape, settings: StockSettings | None = None) -> None:
        self._engine = engine
        self._settings = settings or StockSettings()
        self._keys: dict[str, tuple[PageKey, ...]] = {}
        self._offers: list[RestoreOffered] = []
        self._operations: dict[str, _Operation] = {}

    # --- facts ------------------------------------------------------------------------------------

    def observe(self, fact: Fact) -> None:
        """Takes note of what happened."""
        if isinstance(fact, RequestArrived):
            self._keys[fact.rid] = fact.keys
        elif isinstance(fact, RestoreOffered):
            self._offers.append(fact)
        elif isinstance(fact, RequestFinished):
            self._operations.pop(fact.rid, None)
            self._keys.pop(fact.rid, None)
        elif isinstance(fact, PagesPlaced | PagesDropped):
            if fact.tier == Tier.HOST:
                self._prefetched(fact)
        elif isinstance(fact, TransferDone | PagesLost):
            self._loaded_back(fact)
        elif isinstance(fact, ChunkStarted):
            self._ran(fact)

    def _prefetched(self, fact: PagesPlaced | PagesDropped) -> None:
        for operation in self._operations.values():
            places = [
                place for key in fact.keys if (place := operation.moving.pop(key, None)) is not None
            ]
            if places and isinstance(fact, PagesDropped):
                operation.batches.clear()
                continue
            operation.arrived.update(dict.fromkeys(places))
            while operation.usable in operation.arrived:
                operation.usable += 1

    def _loaded_back(self, fact: TransferDone | PagesLost) -> None:
        operation = self._operations.get(fact.rid)
        if operation is None or not operation.loading or not fact.span:
            return
        if isinstance(fact, PagesLost):
            operation.loading, operation.loaded = False, fact.span.start
        elif fact.link is Link.HOST_TO_DEVICE:
            operation.loading = False

    def _ran(self, fact: ChunkStarted) -> None:
        operation = self._operations.get(fact.rid)
        if operation is not None:
            operation.front = fact.tokens.stop // self._engine.page_tokens
            if operation.front >= operation.offer.pages:
                del self._operations[fact.rid]

    # --- decisions --------------------------------------------------------------------------------

    def step(self, view: StepView) -> StepPlan:
        """Goes on prefetching, ends prefetches by the stop policy, loads back, and lets run what is
        complete.
        """
        starts = tuple(self._begin(offer, view.now) for offer in self._offers)
        self._offers = []
        loads: list[Load] = []
        computes: list[Compute] = []
        room = view.prefill_tokens
        for rid in (view.slot, *view.waiting):
            operation = self._operations.get(rid or "")
            if operation is None or not self._stopped(operation, view.now):
                continue
            if operation.loaded is None and room > 0 and not loads:
                loads = self._load_back(operation, view.free_pages.get(Tier.DEVICE, 0))
            if operation.loaded is not None and not operation.loading:
                splice = Span(operation.front, max(operation.front, operation.loaded))
                computes.append(Compute(operation.rid, splice, None))
            room -= operation.offer.prompt_tokens - operation.usable * self._engine.page_tokens
        moves = self._prefetch()
        return StepPlan(starts=starts, loads=tuple(loads), computes=tuple(computes), moves=moves)

    def _begin(self, offer: RestoreOffered, now: float) -> RestoreStart:
        first_below = next(
            (span.start for span, tier in offer.sources if tier > Tier.HOST), offer.pages
        )
        tokens = (offer.pages - first_below) * self._engine.page_tokens
        stop = offer.pages if tokens >= self._settings.threshold_tokens else first_below
        if stop == offer.resident:
            return RestoreStart(offer.rid, Mode.COMPUTE, "below the prefetch threshold")
        assert self._keys.get(offer.rid), (
            f"{offer.rid}: stock HiCache moves pages by name; give the request keys"
        )
        cuts = [*range(first_below, stop, self._settings.batch_pages), stop]
        batches = [Span(low, high) for low, high in itertools.pairwise(cuts)]
        self._operations[offer.rid] = _Operation(
            offer.rid, offer, now, batches, usable=first_below, front=offer.resident
        )
        return RestoreStart(offer.rid, Mode.LOAD, "prefetch")

    def _prefetch(self) -> tuple[Move, ...]:
        """The next batch of the first operation that has one."""
        if any(operation.moving for operation in self._operations.values()):
            return ()
        operation = next(
            (op for op in self._operations.values() if op.batches and not op.stopped), None
        )
        if operation is None:
            return ()
        span = operation.batches.pop(0)
        keys = self._keys[operation.rid][span.start : span.stop]
        operation.moving = {key: span.start + place for place, key in enumerate(keys)}
        return (Move(keys, Tier.STORAGE, Tier.HOST, operation.rid),)

    def _stopped(self, operation: _Operation, now: float) -> bool:
        """Whether the prefetch is over: complete, or ended by the policy now that the request could
        run.
        """
        policy = self._settings.stop
        tokens = (operation.offer.pages - operation.offer.resident) * self._engine.page_tokens
        patience_s = (
            self._settings.timeout_base_s + self._settings.timeout_per_1024_tokens_s * tokens / 1024
        )
        late = policy is Stop.TIMEOUT and now - operation.since >= patience_s
        if not operation.batches or policy is Stop.BEST_EFFORT or late:
            operation.stopped = True
        return operation.stopped and not operation.moving

    def _load_back(self, operation: _Operation, free: int) -> list[Load]:
        """The part that is in host memory, all at once, when the whole prompt fits: stock loads
        back in admission.
        """
        span = Span(operation.offer.resident, operation.usable)
        prompt_pages = -(-operation.offer.prompt_tokens // self._engine.page_tokens)
        if prompt_pages - operation.offer.resident > free:
            return []
        operation.loaded = span.stop
        operation.loading = bool(span)
        return [Load(operation.rid, span, Tier.HOST, Link.HOST_TO_DEVICE, _NEVER_S)] if span else []
