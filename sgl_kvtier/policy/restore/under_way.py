"""The restorations in progress, as facts report them: their requests, the landed pages, running
chunks, and transfers on each link.

Written by facts and by the commands of a step; the other modules of a RestorePlanner read it. One
thread, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import GUESS, CostModel, PrefillCost
from sgl_kvtier.policy.learned.links import LinkQueues
from sgl_kvtier.policy.learned.own_cost import OwnCost, guess_s
from sgl_kvtier.policy.messages import (
    CANCELLED,
    NO_ROOM_YET,
    ChunkDone,
    ChunkStarted,
    Compute,
    Fact,
    Mode,
    PagesLost,
    PolicyChanged,
    RequestFinished,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.restore.modes import Restoration
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span


class UnderWay:
    """Every restoration between its offer's answer and its end, and the learned costs. `profile` is
    from an earlier run: `links`, bytes per second by link name; `prefill`, the coefficients of a
    PrefillCost; `restore`, an OwnCost's `own_s`. Each may be missing.
    """

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        profile: Mapping[str, Mapping[str, float]],
        rules: Rules,
    ) -> None:
        prefill = profile.get("prefill")
        self.config = config
        self.rules = rules
        self.engine = engine
        self.profiled = prefill is not None
        self.cost = CostModel(PrefillCost(**prefill) if prefill else GUESS)
        self.bandwidth = Bandwidth(
            {Link(name): float(rate) for name, rate in profile.get("links", {}).items()}
        )
        self.own = OwnCost(float(profile.get("restore", {}).get("own_s", guess_s(engine))))
        self.links = LinkQueues(self.bandwidth, engine.page_bytes)
        self.items: dict[str, Restoration] = {}
        """By request, in the order they were offered."""
        self.complete: dict[str, Compute] = {}
        """Restorations that have landed whole and only wait to be spliced, with their Compute
        command.
        """
        self.readers: dict[Link, int] = {}
        """Number of restorations that could load pages over each link."""
        self.busy_until = 0.0
        """When the present computation should be done."""
        self.stood_s = 0.0
        """Seconds of chunks of restorations since the last step without one: so long running
        requests stood still.
        """
        self._chunked = False
        self._running: list[tuple[str, int]] = []
        self._observers: dict[type, Callable[[Any], None]] = {
            TransferDone: self._transferred,
            PagesLost: self._lost,
            ChunkStarted: self._chunk_started,
            ChunkDone: self._chunk_done,
            RequestFinished: self._finished,
            PolicyChanged: self._configured,
        }

    def observe(self, fact: Fact) -> None:
        """Takes note of a fact. Facts about unknown requests change nothing but estimates."""
        observer = self._observers.get(type(fact))
        if observer is not None:
            observer(fact)

    def next_step(self, view: StepView) -> None:
        """A step is decided: running requests decode in one without a chunk."""
        if not self._chunked:
            self.stood_s = 0.0
        self._chunked = False
        for item in self.items.values():
            if item.due >= 0 and not _alone(item, view):
                item.due = -1.0

    def begin(self, item: Restoration) -> None:
        """A request is being restored from now on."""
        if self.items:
            for other in (item, *self.items.values()):
                other.due = -1.0
        self.items[item.rid] = item
        for link in item.unread:
            self.readers[link] = self.readers.get(link, 0) + 1

    def give_up(self) -> None:
        """Ends all restorations, and forgets all transfers and chunks."""
        self.items.clear()
        self.complete.clear()
        self.readers.clear()
        self.links.clear()
        self._running.clear()
        self.busy_until = 0.0

    @property
    def costs_known(self) -> bool:
        """Whether the cost of compute was measured, here or in an earlier run."""
        return self.profiled or self.cost.seen > 0

    # --- facts ------------------------------------------------------------------------------------

    def _configured(self, fact: PolicyChanged) -> None:
        self.config = fact.config

    def _transferred(self, fact: TransferDone) -> None:
        self.bandwidth.saw(fact.link, fact.nbytes, fact.seconds)
        self._settle(fact.rid, fact.link, fact.span, fact.now)
        item = self.items.get(fact.rid)
        if item is None or not item.pointer.land(fact.span):
            return
        run = item.pointer.landed_run()
        if run.stop == item.pointer.units:
            self.complete[fact.rid] = Compute(fact.rid, run, None)

    def _lost(self, fact: PagesLost) -> None:
        for link in Link:
            self._settle(fact.rid, link, fact.span, fact.now)
        item = self.items.get(fact.rid)
        if item is None:
            return
        if fact.reason in (CANCELLED, NO_ROOM_YET):
            if fact.reason == NO_ROOM_YET:
                item.due = -1.0
            if item.pointer.give_back(fact.span):
                item.cancelled = 0
                for link in item.opened(fact.span):
                    self.readers[link] = self.readers.get(link, 0) + 1
        elif item.pointer.lose(fact.span):
            item.due = -1.0
            if item.mode is Mode.LOAD:
                item.mode = Mode.BOTH

    def _settle(self, rid: str, link: Link, span: Span, now: float) -> None:
        pages = self.links.ended(link, rid, span, now)
        if pages and (item := self.items.get(rid)):
            item.in_flight[link] = item.in_flight.get(link, 0) - pages

    def _chunk_started(self, fact: ChunkStarted) -> None:
        seconds = self.cost.cost.chunk_seconds(fact.tokens.start, len(fact.tokens))
        begin = max(fact.now, self.busy_until)
        self.busy_until = begin + seconds
        self._running.append((fact.rid, fact.tokens.stop))
        item = self.items.get(fact.rid)
        if item is None:
            return
        self.stood_s += seconds
        self._chunked = item.begun = True
        page = self.engine.page_tokens
        pointer = item.pointer
        start = min(fact.tokens.start // page, pointer.units)
        # A page that has begun belongs to compute, even where a chunk ends inside it.
        stop = min(-(-fact.tokens.stop // page), pointer.units)
        if start > pointer.front:
            pointer.splice(Span(pointer.front, start))
        claimed = pointer.take_front(stop - pointer.front)
        if claimed.stop < stop:
            raise ValueError(
                f"{fact.rid}: pages up to {stop} are computed, but a transfer has taken page "
                f"{claimed.stop}"
            )
        item.yields = 0
        if pointer.met:
            if item.due >= 0 and fact.tokens.start >= pointer.units * page:
                self.own.saw(begin - item.due)
            self._forget(fact.rid)
        elif fact.rid in self.complete:
            self.complete[fact.rid] = Compute(fact.rid, pointer.landed_run(), None)

    def _chunk_done(self, fact: ChunkDone) -> None:
        # A few tokens reach few experts: they say nothing of the fixed cost of more.
        if not fact.shared_tokens and len(fact.tokens) >= self.engine.page_tokens:
            self.cost.saw(fact.tokens.start, len(fact.tokens), fact.seconds)
        if (fact.rid, fact.tokens.stop) in self._running:
            self._running.remove((fact.rid, fact.tokens.stop))
        if not self._running:
            self.busy_until = fact.now
        if item := self.items.get(fact.rid):
            item.pointer.computed_up_to(fact.tokens.stop // self.engine.page_tokens)

    def _finished(self, fact: RequestFinished) -> None:
        self._forget(fact.rid)
        self._running = [running for running in self._running if running[0] != fact.rid]
        if not self._running:
            self.busy_until = min(self.busy_until, fact.now)

    def _forget(self, rid: str) -> None:
        item = self.items.pop(rid, None)
        if item is None:
            return
        self.complete.pop(rid, None)
        for link in item.unread:
            self.readers[link] -= 1


def _alone(item: Restoration, view: StepView) -> bool:
    """Whether nothing else runs, waits or holds the slot."""
    return (
        not view.decoding
        and all(rid == item.rid for rid in view.waiting)
        and (view.slot == item.rid or (view.slot is None and view.slot_open))
    )


def in_run_order(under_way: UnderWay, view: StepView) -> Iterator[Restoration]:
    """The slot's holder, then waiting requests in the order they will run, then all others in the
    order of their offers.
    """
    seen = {}
    for rid in (view.slot, *view.waiting):
        item = under_way.items.get(rid) if rid is not None else None
        if item is not None and rid not in seen:
            seen[rid] = True
            yield item
    if len(seen) < len(under_way.items):
        yield from [item for rid, item in under_way.items.items() if rid not in seen]
