"""All restorations under way: who is restored how, who computes what next, and which pages are loaded in which order.

One of the two halves of a planner (`planner.py`); the other is `lookahead.py`. One thread, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.bandwidth import Bandwidth
from sgl_kvtier.policy.cost import GUESS, CostModel, PrefillCost
from sgl_kvtier.policy.links import LinkQueues
from sgl_kvtier.policy.meeting import Pace, Split, best_split
from sgl_kvtier.policy.messages import (
    Cancel,
    ChunkDone,
    ChunkStarted,
    Compute,
    Fact,
    Load,
    Mode,
    PagesLost,
    RequestFinished,
    RestoreOffered,
    RestoreStart,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.restore import (
    LINK_OF,
    EngineShape,
    Forecast,
    Restoration,
    choose_mode,
    chunk_tokens,
    leave,
    rule_of,
)
from sgl_kvtier.policy.two_pointer import TwoPointer
from sgl_kvtier.types import Link, Span, Tier

_STEP_COVER = 1.5
"""Loads handed out cover this many times the predicted time until the next step, so that no device waits for a plan."""
_LOAD_S = 0.02
"""The last loads before the meeting take no longer than this, but for one page: the front may have to wait for all of one."""
_NEAR = 4
"""A load is at most this part of what is left to the meeting: far from it they are whole, so that their latency is paid seldom."""
_LOOK_AGAIN = 16
"""Every so many requests that are computed because a link is slow, one is restored: it may have become faster."""
_PROBES = 2
"""Transfers handed out on a link that was never measured."""
_MOST_BEHIND = 8
"""So many waiting requests are charged for at most."""
_UNBOUNDED = 1 << 40
"""Pages of a tier the view does not count."""


def _item(offer: RestoreOffered, order: int) -> Restoration:
    return Restoration(offer.rid, order, offer.prompt_tokens, TwoPointer(offer.resident, offer.pages), offer.sources)


class RestorePlanner:
    """Restores waiting requests: mode, meeting point, chunk sizes, order of loads. `links` and `prefill` are what an
    earlier run learned: bytes per second by link name, and the coefficients of a PrefillCost."""

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        links: Mapping[str, float] | None = None,
        prefill: Mapping[str, float] | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._rule = rule_of(config)
        self._profiled = prefill is not None
        self._cost = CostModel(PrefillCost(**prefill) if prefill else GUESS)
        self.bandwidth = Bandwidth({Link(name): float(rate) for name, rate in (links or {}).items()})
        self.links = LinkQueues(self.bandwidth, engine.page_bytes)
        self._items: dict[str, Restoration] = {}
        self._offers: list[RestoreOffered] = []
        self._complete: dict[str, None] = {}
        """Restorations that have landed whole and only wait to be spliced."""
        self._readers: dict[Link, int] = {}
        """How many restorations could ask each link for pages."""
        self._splits: dict[str, Split] = {}
        """Meeting points found in this step."""
        self._pace: Pace | None = None
        """What is known of costs and links in this step, until loads are handed out."""
        self._order = 0
        self._computed = 0
        """Offers answered by computing, because links are slow."""
        self._busy_until = 0.0
        self._running: list[tuple[str, int]] = []
        self._observers: dict[type, Callable[[Any], None]] = {
            RestoreOffered: self._offered,
            TransferDone: self._transferred,
            PagesLost: self._lost,
            ChunkStarted: self._chunk_started,
            ChunkDone: self._chunk_done,
            RequestFinished: self._finished,
        }

    def observe(self, fact: Fact) -> None:
        """Takes note of what happened. Facts about requests it does not know, or no longer, change nothing but estimates."""
        observer = self._observers.get(type(fact))
        if observer is not None:
            observer(fact)

    def step(self, view: StepView) -> StepPlan:
        """Decides this step. Loads in the plan are claimed at once, chunks when a ChunkStarted reports them."""
        if not self._items and not self._offers:
            return StepPlan()
        self._splits.clear()
        self._pace = None
        starts = self._answer_offers(view)
        computes, cancels = self._computes(view)
        loads = self._loads(view, computes)
        computes = [self._unstuck(compute, view) for compute in computes]
        return StepPlan(starts=starts, cancels=cancels, loads=loads, computes=tuple(computes))

    def left_to_engine(self, offer: RestoreOffered, view: StepView) -> str | None:
        """Why this is not worth being offered to an engine that can load by itself, or None. Changes nothing."""
        item = _item(offer, self._order)
        forecast = self._forecast(view, self._ahead_s(view, item))
        self._copy_first(item, forecast)
        learns = not self._costs_known or not self.bandwidth.known(Link.SSD_TO_HBM)
        return leave(forecast, item, self._config, self._knows(offer), learns, self._crowded(offer, view))

    def configure(self, config: PolicyConfig) -> None:
        """Other settings from now on. Restorations under way go on in the mode they were given."""
        self._config = config
        self._rule = rule_of(config)

    def profile(self) -> dict[str, Any]:
        """What was learned, to be given to the next run: plain data."""
        return {"prefill": self._cost.profile(), "links": self.bandwidth.profile()}

    @property
    def restoring(self) -> tuple[str, ...]:
        """Requests being restored, in the order they were offered."""
        return tuple(self._items)

    @property
    def under_way(self) -> Collection[str]:
        """The same as a view that is quick to search."""
        return self._items.keys()

    # --- facts ----------------------------------------------------------------------------------------------------

    def _offered(self, fact: RestoreOffered) -> None:
        self._offers.append(fact)

    def _transferred(self, fact: TransferDone) -> None:
        self.bandwidth.saw(fact.link, fact.nbytes, fact.seconds)
        self._settle(fact.rid, fact.link, fact.span, fact.now)
        item = self._items.get(fact.rid)
        if item is None or not item.pointer.land(fact.span):
            return
        if item.pointer.landed_run().stop == item.pointer.units:
            self._complete[fact.rid] = None

    def _lost(self, fact: PagesLost) -> None:
        for link in Link:
            self._settle(fact.rid, link, fact.span, fact.now)
        item = self._items.get(fact.rid)
        if item is not None and item.pointer.lose(fact.span) and item.mode is Mode.LOAD:
            item.mode = Mode.BOTH

    def _settle(self, rid: str, link: Link, span: Span, now: float) -> None:
        pages = self.links.ended(link, rid, span, now)
        if pages and (item := self._items.get(rid)):
            item.in_flight[link] = item.in_flight.get(link, 0) - pages

    def _chunk_started(self, fact: ChunkStarted) -> None:
        seconds = self._cost.cost.chunk_seconds(fact.tokens.start, len(fact.tokens))
        self._busy_until = max(fact.now, self._busy_until) + seconds
        self._running.append((fact.rid, fact.tokens.stop))
        item = self._items.get(fact.rid)
        if item is None:
            return
        page = self._engine.page_tokens
        pointer = item.pointer
        start = min(fact.tokens.start // page, pointer.units)
        stop = min(-(-fact.tokens.stop // page), pointer.units)  # a page begun is compute's, also where a chunk ends inside
        if start > pointer.front:
            pointer.splice(Span(pointer.front, start))
        claimed = pointer.take_front(stop - pointer.front)
        if claimed.stop < stop:
            raise ValueError(f"{fact.rid}: pages up to {stop} are computed, but a transfer has taken page {claimed.stop}")
        item.yields = 0
        if pointer.met:
            self._forget(fact.rid)

    def _chunk_done(self, fact: ChunkDone) -> None:
        if not fact.shared_tokens:
            self._cost.saw(fact.tokens.start, len(fact.tokens), fact.seconds)
        if (fact.rid, fact.tokens.stop) in self._running:
            self._running.remove((fact.rid, fact.tokens.stop))
        if not self._running:
            self._busy_until = fact.now
        if item := self._items.get(fact.rid):
            item.pointer.computed_up_to(fact.tokens.stop // self._engine.page_tokens)

    def _finished(self, fact: RequestFinished) -> None:
        self._forget(fact.rid)
        self._offers = [offer for offer in self._offers if offer.rid != fact.rid]
        self._running = [running for running in self._running if running[0] != fact.rid]
        if not self._running:
            self._busy_until = min(self._busy_until, fact.now)

    def _forget(self, rid: str) -> None:
        item = self._items.pop(rid, None)
        if item is None:
            return
        self._complete.pop(rid, None)
        for link in item.unread:
            self._readers[link] -= 1

    # --- decisions ------------------------------------------------------------------------------------------------

    def _answer_offers(self, view: StepView) -> tuple[RestoreStart, ...]:
        starts = []
        for offer in self._offers:
            self._order += 1
            item = _item(offer, self._order)
            forecast = self._forecast(view, self._ahead_s(view, item))
            self._copy_first(item, forecast)
            item.mode, reason = choose_mode(forecast, item, self._config, self._knows(offer))
            if reason == "computing is faster":
                self._computed += 1
                if self._computed % _LOOK_AGAIN == 0:
                    item.mode, reason = Mode.BOTH, "to measure"
            if item.mode is not Mode.COMPUTE and not item.pointer.met:
                self._items[offer.rid] = item
                for link in item.unread:
                    self._readers[link] = self._readers.get(link, 0) + 1
            starts.append(RestoreStart(offer.rid, item.mode, reason))
        self._offers = []
        return tuple(starts)

    def _crowded(self, offer: RestoreOffered, view: StepView) -> bool:
        """Whether HBM has no room for this request and the fresh ones that wait beside it."""
        page = self._engine.page_tokens
        needed = offer.prompt_tokens - offer.resident * page + view.fresh_tokens
        return Tier.HBM in view.free_pages and view.free_pages[Tier.HBM] * page < needed

    def _copy_first(self, item: Restoration, forecast: Forecast) -> None:
        """A prefix that begins in DRAM and goes on below it is computed only behind what is copied from DRAM; one that lies
        in DRAM as a whole may have both ends."""
        if self._rule.balanced_chunks and len(item.sources) > 1:
            item.copied = forecast.copies_first(item)

    def _knows(self, offer: RestoreOffered) -> bool:
        """Whether what an answer depends on was measured, here or in an earlier run."""
        return self._costs_known and all(self.bandwidth.known(LINK_OF[tier]) for _, tier in offer.sources)

    @property
    def _costs_known(self) -> bool:
        return self._profiled or self._cost.seen > 0

    def _forecast(self, view: StepView, compute_at_s: float) -> Forecast:
        backlogs = self.links.backlogs(view.now)
        return Forecast(self._engine, self._cost.cost, self.bandwidth, compute_at_s, backlogs)

    def _meeting(
        self, item: Restoration, view: StepView, compute_at_s: float, front: int, recall: bool = False, charge: float = 1.0
    ) -> Split:
        """Where a request's two ends should meet, with its front at a page, as Forecast.both says, from what the last search
        came to. Links have what was asked of them up to now to do. `charge`: compute counts for so many times its seconds."""
        pace = self._pace
        if pace is None:
            engine, backlogs = self._engine, self.links.backlogs(view.now)
            pace = self._pace = Pace(
                engine.page_tokens, engine.page_bytes, engine.chunk_tokens, self._cost.cost, self.bandwidth, backlogs
            )
        front, copied_s = item.behind_copies(front, self.bandwidth, self._engine)
        compute_at_s += copied_s
        if recall:
            return best_split(pace, compute_at_s, item.pointer, item.by_link, front, item.in_flight)
        if charge != 1.0:
            return best_split(pace.charged(charge), compute_at_s, item.pointer, item.by_link, front)
        split = best_split(pace, compute_at_s, item.pointer, item.by_link, front, None, item.meet)
        item.meet = split.meet
        return split

    def _ahead_s(self, view: StepView, item: Restoration) -> float:
        """Until compute can begin for this request: the running chunk, the slot's holder, and fresh prefill."""
        ahead_s = max(0.0, self._busy_until - view.now)
        if view.slot == item.rid:
            return ahead_s
        ahead_s += self._fresh_s(view)
        holder = self._items.get(view.slot or "")
        if holder is not None:
            split = self._splits.get(holder.rid) or self._meeting(holder, view, ahead_s, holder.pointer.front)
            ahead_s = max(ahead_s, split.seconds)
        return ahead_s

    def _fresh_s(self, view: StepView) -> float:
        return self._cost.cost.range_seconds(0, view.fresh_tokens, self._engine.chunk_tokens)

    def _suffix_s(self, item: Restoration) -> float:
        end = item.pointer.units * self._engine.page_tokens
        return self._cost.cost.range_seconds(end, item.prompt_tokens - end, self._engine.chunk_tokens)

    def _computes(self, view: StepView) -> tuple[list[Compute], tuple[Cancel, ...]]:
        """What the slot's holder does, or who gets the slot, and who is complete and needs none."""
        whole = [self._items[rid] for rid in self._complete]
        computes = [Compute(item.rid, item.pointer.landed_run(), None) for item in whole]
        cancels: list[Cancel] = []
        if view.slot is None and view.slot_open:
            first = next((item for item in self._in_run_order(view) if item.rid not in self._complete), None)
            if first is not None and self._wants_slot(first, view):
                compute, cancels = self._compute(first, view)
                computes += [compute] if compute.tokens != 0 else []
        elif view.slot in self._items and view.slot not in self._complete:
            compute, cancels = self._compute(self._items[view.slot], view)
            computes.append(compute)
        return computes, tuple(cancels)

    def _wants_slot(self, item: Restoration, view: StepView) -> bool:
        """A request that was to be loaded only joins in computing when that has become the faster way."""
        if item.mode is Mode.LOAD and self._config.restore != "load":
            forecast = self._forecast(view, self._ahead_s(view, item))
            if forecast.both(item).seconds <= forecast.load_only(item) * (1 - self._config.split_margin):
                item.mode = Mode.BOTH
        return item.mode is Mode.BOTH

    def _compute(self, item: Restoration, view: StepView) -> tuple[Compute, list[Cancel]]:
        page = self._engine.page_tokens
        run = item.pointer.landed_run()
        if run.stop == item.pointer.units:
            return Compute(item.rid, run, None), []
        barrier = (item.pointer.barrier(run.stop) - run.stop) * page
        split = self._splits[item.rid] = self._meeting(item, view, max(0.0, self._busy_until - view.now), run.stop)
        if run.stop < item.copied:
            lost = self._within_budget(item, view, item.pointer.lost_run(run.stop) * page)
            return Compute(item.rid, run, min(lost, self._engine.chunk_tokens // page * page)), []
        if split.meet == item.pointer.units and barrier == (item.pointer.units - run.stop) * page and not self._yields(view):
            # Nothing loads and nothing will: the engine's own chunks, which take the suffix along, are the best.
            return Compute(item.rid, run, None), []
        tokens = chunk_tokens(split, barrier, self._engine, self._rule)
        cancels = self._recall(item, view, tokens, barrier, run.stop) if self._rule.balanced_chunks else []
        tokens = self._within_budget(item, view, tokens)
        least = min(self._config.min_chunk_tokens, barrier or page)
        if tokens < least and (item.pointer.loading or split.meet < item.pointer.units):
            tokens = 0
        if item.pointer.lost_in(Span(run.stop, run.stop + 1)) and not tokens:
            tokens = self._within_budget(item, view, min(barrier, max(page, least // page * page)))
        return Compute(item.rid, run, tokens), cancels

    def _within_budget(self, item: Restoration, view: StepView, tokens: int) -> int:
        """Fresh prefill goes first while the restoration can go on loading, a bounded number of steps in a row (Cake 4)."""
        page = self._engine.page_tokens
        tokens = min(tokens, view.prefill_tokens // page * page)
        if not (self._yields(view) and item.pointer.loading):
            return tokens
        left = max(0, view.prefill_tokens - view.fresh_tokens) // page * page
        if left >= min(tokens, self._config.min_chunk_tokens):
            return min(tokens, left)
        if item.yields >= self._config.max_yields:
            return tokens
        item.yields += 1
        return 0

    def _yields(self, view: StepView) -> bool:
        return self._config.yield_to_fresh and view.fresh_tokens > 0

    def _recall(self, item: Restoration, view: StepView, tokens: int, barrier: int, front: int) -> list[Cancel]:
        """Loads that compute would reach before the link does are asked back, as far as they were not begun."""
        reach = front + barrier // self._engine.page_tokens
        if not item.pointer.loading or tokens < barrier or item.cancelled >= reach + 1:
            return []
        meet = self._meeting(item, view, max(0.0, self._busy_until - view.now), front, recall=True).meet
        run = item.pointer.last_loading()
        if run.start != reach or meet - reach < max(1, self._config.load_tokens // self._engine.page_tokens):
            return []
        item.cancelled = min(meet, run.stop)
        return [Cancel(item.rid, Span(run.start, item.cancelled))]

    def _loads(self, view: StepView, computes: list[Compute]) -> tuple[Load, ...]:
        """Loads until every link has enough to do until well after the next step, in the rule's order."""
        ending = {compute.rid: self._stop_page(compute, self._items[compute.rid]) for compute in computes}
        room = dict(view.free_pages)
        if Tier.HBM in room:
            # A chunk that may yet be granted below keeps its pages too: loads of others must not take them.
            granted = [self._unstuck(compute, view).tokens or 0 for compute in computes]
            room[Tier.HBM] -= sum(granted) // self._engine.page_tokens
        next_step_s = max(0.0, self._busy_until - view.now) + max(
            (self._cost.cost.chunk_seconds(0, compute.tokens) for compute in computes if compute.tokens), default=0.0
        )
        horizon_s = max(self._config.load_horizon_s, _STEP_COVER * next_step_s)
        loads: list[Load] = []
        # Compute reaches a request after those before it in the queue: the later its turn, the more of it is loaded.
        ahead_s = max(0.0, self._busy_until - view.now) + self._fresh_s(view)
        open_links = dict.fromkeys(link for link in self._readers if not self._full(link, view.now, horizon_s))
        for item in self._in_io_order(view) if open_links else ():
            if room.get(Tier.HBM, 1) <= 0 or not any(map(self._readers.__getitem__, open_links)):
                break
            if not open_links.keys().isdisjoint(item.unread):
                lowest, floor, split = self._floor(item, view, ending.get(item.rid), ahead_s)
                self._load_from(item, view.now, lowest, floor, horizon_s, room, loads)
                ahead_s = max(ahead_s, split.seconds) + self._suffix_s(item)
                open_links = dict.fromkeys(link for link in open_links if not self._full(link, view.now, horizon_s))
        return tuple(loads)

    def _stop_page(self, compute: Compute, item: Restoration) -> int:
        if compute.tokens is None:
            return item.pointer.units
        return compute.splice.stop + compute.tokens // self._engine.page_tokens

    def _full(self, link: Link, now: float, horizon_s: float) -> bool:
        """Whether a link has enough to do. One that was never measured gets a few transfers to be measured by."""
        if not self.bandwidth.known(link):
            return self.links.transfers(link) >= _PROBES
        return self.links.backlog_seconds(link, now) >= horizon_s

    def _floor(self, item: Restoration, view: StepView, proposed: int | None, ahead_s: float) -> tuple[int, int, Split]:
        """The lowest page that may be loaded; the lowest that should be: what compute is predicted to reach first is not
        loaded, but for copies from DRAM that it waits for; and where the two meet."""
        split = self._splits.get(item.rid) or self._meeting(item, view, ahead_s, item.pointer.front)
        lowest = item.pointer.front if proposed is None else proposed
        if not self._rule.balanced_chunks or item.mode is Mode.LOAD or split.compute_tokens < self._config.min_chunk_tokens:
            return lowest, lowest, split
        meet = split.meet
        behind = min(len(view.waiting) - 1, _MOST_BEHIND)
        if behind > 0 and self._config.queue_charge > 0 and meet > lowest:
            # What compute takes delays all behind it, and a link's work goes on beside: with others waiting more is loaded.
            meet = self._meeting(item, view, ahead_s, item.pointer.front, charge=1 + self._config.queue_charge * behind).meet
        return lowest, max(lowest, meet), split

    def _load_from(
        self, item: Restoration, now: float, lowest: int, floor: int, horizon_s: float, room: dict[Tier, int], loads: list[Load]
    ) -> None:
        """Adds loads of this request, from its end down to the floor, until its links have enough to do."""
        links, rid, take_back = self.links, item.rid, item.pointer.take_back
        hbm, dram = room.get(Tier.HBM, _UNBOUNDED), room.get(Tier.DRAM, _UNBOUNDED)
        for source, tier in reversed(item.sources):
            link = LINK_OF[tier]
            staged = self._engine.staged and tier > Tier.DRAM
            pages, group = 0, self._group(link)
            whole = max(group, self._config.load_tokens // self._engine.page_tokens)
            while most := links.wanted(link, now, horizon_s, group, _PROBES):
                most = min(most, hbm, dram) if staged else min(most, hbm)
                span = take_back(most, source, floor if source.start >= item.copied else lowest)
                count = span.stop - span.start
                if not count:
                    break
                hbm -= count
                if staged:
                    dram -= count
                pages += count
                parts = _parts(span, floor, group, whole)
                for part, backlog_s in zip(parts, links.asked(link, rid, parts, now), strict=True):
                    loads.append(Load(rid, part, tier, link, 2 * backlog_s + self._config.load_deadline_s))
            if pages:
                item.in_flight[link] = item.in_flight.get(link, 0) + pages
                self._pace = None
        room[Tier.HBM], room[Tier.DRAM] = hbm, dram
        for link in [link for link in list(item.unread) if item.read_out(link)]:
            self._readers[link] -= 1

    def _group(self, link: Link) -> int:
        """Pages per load: as many as are asked for, fewer on a slow link. The papers' rules know no such thing, and where
        nothing is computed nobody waits at a meeting."""
        most = max(1, self._config.load_tokens // self._engine.page_tokens)
        if not self._rule.balanced_chunks or self._config.restore == "load" or not self.bandwidth.known(link):
            return most
        return max(1, min(most, int(self.bandwidth.bytes_per_second(link) * _LOAD_S / self._engine.page_bytes)))

    def _unstuck(self, compute: Compute, view: StepView) -> Compute:
        """Waiting makes sense only while something of the request is under way; otherwise the front goes on."""
        item = self._items[compute.rid]
        if compute.tokens != 0 or item.pointer.loading or view.prefill_tokens < self._engine.page_tokens:
            return compute
        barrier = (item.pointer.barrier(compute.splice.stop) - compute.splice.stop) * self._engine.page_tokens
        whole = self._engine.chunk_tokens // self._engine.page_tokens * self._engine.page_tokens
        budget = view.prefill_tokens // self._engine.page_tokens * self._engine.page_tokens
        return Compute(compute.rid, compute.splice, min(barrier, whole, budget))

    # --- orders ---------------------------------------------------------------------------------------------------

    def _in_run_order(self, view: StepView) -> Iterator[Restoration]:
        """The slot's holder, then waiting requests as they will run, then any other in the order of their offers."""
        seen = {}
        for rid in (view.slot, *view.waiting):
            item = self._items.get(rid) if rid is not None else None
            if item is not None and rid not in seen:
                seen[rid] = True
                yield item
        if len(seen) < len(self._items):
            yield from [item for rid, item in self._items.items() if rid not in seen]

    def _in_io_order(self, view: StepView) -> Iterable[Restoration]:
        if self._rule.io_order == "arrival" or len(self._items) < 2:
            return self._in_run_order(view)
        items = list(self._in_run_order(view))
        forecast = Forecast(self._engine, self._cost.cost, self.bandwidth, 0.0, {})
        longest = self._rule.io_order == "longest"
        cost = {item.rid: forecast.compute_only(item) for item in items}
        return sorted(items, key=lambda item: (-cost[item.rid] if longest else cost[item.rid], item.order))


def _parts(span: Span, floor: int, least: int, most: int) -> list[Span]:
    """A span as loads, the last pages first: `most` pages each far above the meeting at `floor`, `least` near it."""
    parts, stop = [], span.stop
    while stop > span.start:
        start = max(span.start, stop - max(least, min(most, (stop - floor) // _NEAR)))
        parts.append(Span(start, stop))
        stop = start
    return parts
