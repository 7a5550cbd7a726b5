"""Predictions: how long each way to restore a request takes, when compute can reach it, and where
the prefill and load cursors of each restoration should meet.

All predictions are seconds from now. Compute of a request can begin `compute_at_s` from now, and
each link has a backlog. The best meeting page is the one at which compute and loads are predicted
to finish together. That is CacheFlow Eq. 1 with a cost curve instead of a constant rate, so that it
reaches T_opt and not only T* = Tc Tl / (Tc + Tl).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import Mode, StepView
from sgl_kvtier.policy.restore.meeting import OpenPages, Speeds, Split, best_split
from sgl_kvtier.policy.restore.restorations import Restoration, Restorations, in_run_order
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

_MOST_CHARGED: Final = 8
"""Delays are counted for at most this many waiting requests, and as many decoding ones."""
_SLOWED: Final = 0.5
"""Requests that decode in steps with a chunk lose this share of its seconds: such a step takes
about twice as long as one without (`policy.max_stall_ms`).
"""


class Forecast:
    """Predicted finish times of a restoration, given the learned costs, the backlog of each link,
    and the time until compute is free.
    """

    def __init__(
        self,
        engine: EngineShape,
        cost: PrefillCost,
        bandwidth: Bandwidth,
        compute_at_s: float,
        backlog_s: Mapping[Link, float],
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._bandwidth = bandwidth
        self._compute_at_s = compute_at_s
        self._backlog_s = backlog_s
        self._speeds = Speeds(
            engine.page_tokens, engine.page_bytes, engine.chunk_tokens, cost, bandwidth, backlog_s
        )

    def compute_seconds(self, start_page: int, pages: int) -> float:
        """Seconds until `pages` open pages from `start_page` on are computed."""
        tokens = pages * self._engine.page_tokens
        start = start_page * self._engine.page_tokens
        return self._compute_at_s + self._cost.range_seconds(
            start, tokens, self._engine.chunk_tokens
        )

    def compute_only(self, item: Restoration) -> float:
        """Seconds until all open pages are computed."""
        span = item.remaining_span()
        return self.compute_seconds(
            span.start, item.pointer.free_in(span) + item.pointer.lost_in(span)
        )

    def one_chunk_less(self, item: Restoration) -> float:
        """Seconds that computing everything saves because its last chunk includes the rest of the
        prompt. After loaded pages, that rest needs a chunk of its own.
        """
        span, chunk, page = (
            item.remaining_span(),
            self._engine.chunk_tokens,
            self._engine.page_tokens,
        )
        prefix = (item.pointer.free_in(span) + item.pointer.lost_in(span)) * page
        rest = item.prompt_tokens - span.stop * page
        apart = math.ceil(prefix / chunk) + math.ceil(rest / chunk)
        return (apart - math.ceil((prefix + rest) / chunk)) * self._cost.fixed_s

    def load_only(self, item: Restoration) -> float:
        """Seconds until all open pages are loaded, after the work that their links already have. An
        engine stops loading at the first hole and computes everything from there on.
        """
        span = item.remaining_span()
        hole = item.pointer.first_lost(span.start)
        end = 0.0
        for link, pages in item.link_pages(Span(span.start, hole)).items():
            if pages or item.in_flight.get(link):
                nbytes = pages * self._engine.page_bytes
                if item.anchor_bytes and link is item.last_link():
                    nbytes += item.anchor_left()
                seconds = self._bandwidth.seconds(link, nbytes)
                end = max(end, self._backlog_s.get(link, 0.0) + seconds)
        if hole < span.stop:
            waits_s = max(0.0, end - self._compute_at_s)
            end = waits_s + self.compute_seconds(hole, span.stop - hole)
        return end

    def both(self, item: Restoration) -> Split:
        """The best meeting page, and when it is done."""
        front, copied_s = item.after_copies(item.pointer.front, self._bandwidth, self._engine)
        left = item.open_pages(self._speeds, front)
        split = best_split(self._speeds, self._compute_at_s + copied_s, left, front)
        return split._replace(seconds=max(split.seconds, copied_s))

    def prefill_seconds(self, item: Restoration) -> float:
        """Seconds of computing all open pages, without waiting."""
        return self.compute_only(item) - self._compute_at_s

    def front_seconds(self, item: Restoration) -> float:
        """Seconds of computing up to the best meeting page, without waiting."""
        tokens = self.both(item).compute_tokens
        start = item.pointer.front * self._engine.page_tokens
        return self._cost.range_seconds(start, tokens, self._engine.chunk_tokens)

    def copies_first(self, item: Restoration) -> int:
        """The end of the pages at the prefill cursor that are in host memory and copied faster than
        computed; the cursor if there are none.
        """
        source, tier = item.sources[0] if item.sources else (Span(0, 0), Tier.STORAGE)
        start = item.pointer.front
        if tier is not Tier.HOST or source.start != start:
            return start
        copied_s = self._bandwidth.seconds(
            Link.HOST_TO_DEVICE, len(source) * self._engine.page_bytes
        )
        return (
            source.stop
            if copied_s < self.compute_seconds(start, len(source)) - self._compute_at_s
            else start
        )


class Ways:
    """The predictions about one prefix that rules decide on (`rules.Ways`). `learns`: the engine,
    by loading it, would measure what is not `known`. `crowded`: device memory is short. `own_s`:
    fixed overhead of a restoration. `decoding`: number of decoding requests (`slowed_by`).
    """

    def __init__(
        self,
        forecast: Forecast,
        item: Restoration,
        known: bool,
        learns: bool = False,
        crowded: bool = False,
        own_s: float = 0.0,
        decoding: float = 0.0,
    ) -> None:
        self._forecast = forecast
        self._item = item
        self._known = known
        self._learns = learns
        self._crowded = crowded
        self._own_s = own_s
        self._decoding = decoding

    @property
    def known(self) -> bool:
        return self._known

    @property
    def learns(self) -> bool:
        return self._learns

    @property
    def crowded(self) -> bool:
        return self._crowded

    @property
    def in_host(self) -> bool:
        sources = self._item.sources
        return bool(sources) and all(tier is Tier.HOST for _, tier in sources)

    @property
    def shared(self) -> bool:
        return any(tier is Tier.REMOTE for _, tier in self._item.sources)

    @property
    def compute_s(self) -> float:
        return self._forecast.compute_only(self._item) - self._forecast.one_chunk_less(self._item)

    @property
    def own_s(self) -> float:
        return self._own_s

    @property
    def load_s(self) -> float:
        return self._forecast.load_only(self._item)

    @property
    def both_s(self) -> float:
        return self._forecast.both(self._item).seconds

    @property
    def compute_stalls_s(self) -> float:
        return self._decoding and self._decoding * self._forecast.prefill_seconds(self._item)

    @property
    def both_stalls_s(self) -> float:
        return self._decoding and self._decoding * self._forecast.front_seconds(self._item)


class Queueing:
    """A restoration that has pages to load, as rules see it (`rules.Waiting`)."""

    def __init__(self, item: Restoration, forecast: Forecast) -> None:
        self.item = item
        self._forecast = forecast
        self._compute_s = -1.0

    @property
    def rid(self) -> str:
        return self.item.rid

    @property
    def order(self) -> int:
        return self.item.order

    @property
    def compute_s(self) -> float:
        if self._compute_s < 0:
            self._compute_s = self._forecast.compute_only(self.item)
        return self._compute_s


def slowed_by(view: StepView) -> float:
    """The number of decoding requests, as far as a second of compute takes a second from them."""
    return min(view.decoding, _MOST_CHARGED) * (_SLOWED if view.mixes else 1.0)


def choose_mode(rules: Rules, ways: Ways, config: PolicyConfig) -> tuple[Mode, str]:
    """The mode and the reason for it: as configured, or decided by the rules."""
    if config.restore in ("both", "load", "compute"):
        return Mode(config.restore), "configured"
    return rules.mode(ways)


def why_declined(rules: Rules, ways: Ways, config: PolicyConfig) -> str | None:
    """Why the engine should load this prefix itself, or None: restore it."""
    return rules.why_declined(ways) if config.restore in ("auto", "fastest") else None


def chunk_tokens(split: Split, barrier_tokens: int, engine: EngineShape, rules: Rules) -> int:
    """Tokens of the next chunk: a multiple of the page, at most one engine chunk, up to the first
    loaded or loading page. Balanced: equal chunks, of which the last ends at the meeting page.
    """
    page = engine.page_tokens
    whole = max(page, engine.chunk_tokens // page * page)
    if not rules.balanced_chunks:
        return min(whole, barrier_tokens)
    if split.compute_tokens <= 0:
        return 0
    chunks = math.ceil(split.compute_tokens / whole)
    return min(math.ceil(split.compute_tokens / chunks / page) * page, whole, barrier_tokens)


class Outlook:
    """The predictions of one step, in seconds from the view's `now`."""

    def __init__(self, state: Restorations) -> None:
        self._state = state
        self._speeds: Speeds | None = None
        """Costs and link backlogs in this step; None until they are looked up again."""
        self._left_of: Restoration | None = None
        self._left = OpenPages([], 0, [], [], 0)
        """The open pages of the request of the last search, at these speeds. A search with a charge
        follows directly, from the same page or from before pages that were loaded there.
        """
        self._holder: str | None = None
        """The request for which `hold` recorded a meeting in this step."""
        self._held = Split(0, 0, 0.0)

    def begin(self) -> None:
        """A new step begins. Discards the predictions of the last one."""
        self._holder = self._speeds = None

    def loads_begun(self) -> None:
        """Loads were added to links, so their backlogs have to be looked up again."""
        self._speeds = None

    def busy_s(self, view: StepView) -> float:
        """Seconds until the running chunks are done."""
        return max(0.0, self._state.busy_until - view.now)

    def forecast(
        self, view: StepView, compute_at_s: float, left_s: Mapping[Link, float] | None = None
    ) -> Forecast:
        """Predictions for one request. `left_s`: seconds of work that links do before it, in
        addition to the loads in flight.
        """
        state = self._state
        backlog_s = state.links.backlogs(view.now)
        for link, seconds in (left_s or {}).items():
            backlog_s[link] = backlog_s.get(link, 0.0) + seconds
        cost = state.cost_beside(view)
        return Forecast(state.engine, cost, state.bandwidth, compute_at_s, backlog_s)

    def forecast_in_queue(self, view: StepView, rid: str) -> Forecast:
        """Predictions for a waiting request that is not being restored yet. Compute and links reach
        it when they are done with the restorations before it in the queue.
        """
        state = self._state
        places = {waiting: place for place, waiting in enumerate(view.waiting)}
        mine = places.get(rid, len(places))
        left_s: dict[Link, float] = {}
        ahead_s = self.busy_s(view) + self.fresh_s(view, rid)
        for item in in_run_order(state, view):
            if item.rid != view.slot and places.get(item.rid, -1) > mine:
                continue
            split = self.forecast(view, ahead_s, left_s).both(item)
            for rest in split.loaded(item.pointer.units):
                for link, pages in item.link_pages(rest).items():
                    seconds = state.bandwidth.seconds(link, pages * state.engine.page_bytes)
                    left_s[link] = left_s.get(link, 0.0) + seconds
            ahead_s = max(ahead_s, split.seconds) + self.suffix_s(item)
        return self.forecast(view, ahead_s, left_s)

    def meeting(
        self,
        item: Restoration,
        view: StepView,
        compute_at_s: float,
        front: int,
        *,
        charge: float = 1.0,
        taken_back: bool = False,
    ) -> Split:
        """The meeting page of a request, with its prefill cursor at page `front` and compute from
        `compute_at_s` on. Links first do all loads begun until now. `charge`: weight of a second of
        compute. `taken_back`: as if its loads in flight could be cancelled.
        """
        speeds = self._speeds or self._look(view)
        charged = charge != 1 or taken_back
        if charged and not taken_back and item is self._left_of and front >= item.copied:
            left = self._left
        else:
            front, copied_s = item.after_copies(front, speeds.bandwidth, self._state.engine)
            compute_at_s += copied_s
            left = item.open_pages(speeds, front, taken_back)
        if charged:
            split = best_split(speeds, compute_at_s, left, front, item.charged_meet, charge)
            item.charged_meet = split.meet
        else:
            self._left_of, self._left = item, left
            split = best_split(speeds, compute_at_s, left, front, item.meet)
            item.meet = split.meet
        return split

    def hold(self, item: Restoration, view: StepView, compute_at_s: float, front: int) -> Split:
        """The meeting of the request that has or could get the slot, kept for the step (`held`)."""
        self._holder, self._held = item.rid, self.meeting(item, view, compute_at_s, front)
        return self._held

    def held(self, item: Restoration) -> Split | None:
        """The result of `hold` for this request in this step; None for other requests."""
        return self._held if self._holder == item.rid else None

    def charge(self, view: StepView) -> float:
        """The weight of a second of compute, which delays all that wait; loads do not."""
        waiting = min(max(0, len(view.waiting) - 1), _MOST_CHARGED)
        return 1 + self._state.rules.queue_charge * waiting

    def _look(self, view: StepView) -> Speeds:
        state, engine = self._state, self._state.engine
        self._left_of = None
        self._speeds = Speeds(
            engine.page_tokens,
            engine.page_bytes,
            engine.chunk_tokens,
            state.cost_beside(view),
            state.bandwidth,
            state.links.backlogs(view.now),
        )
        return self._speeds

    def compute_at_s(self, view: StepView, item: Restoration) -> float:
        """Seconds until compute is free of running chunks, the slot's request and fresh prefill."""
        ahead_s = self.busy_s(view)
        if view.slot == item.rid:
            return ahead_s
        ahead_s += self.fresh_s(view, item.rid)
        holder = self._state.items.get(view.slot or "")
        if holder is not None:
            split = self.held(holder) or self.meeting(holder, view, ahead_s, holder.pointer.front)
            ahead_s = max(ahead_s, split.seconds)
        return ahead_s

    def fresh_s(self, view: StepView, rid: str) -> float:
        """Seconds of fresh prefill before this request in the queue."""
        state, tokens = self._state, view.fresh_tokens
        if rid == view.slot:
            tokens -= sum(view.fresh)
        elif view.fresh and rid in view.waiting:
            tokens -= sum(view.fresh[view.waiting.index(rid) :])
        return state.cost.cost.range_seconds(0, tokens, state.engine.chunk_tokens)

    def suffix_s(self, item: Restoration) -> float:
        """Seconds to compute the rest of its prompt after its prefix."""
        state = self._state
        end = item.pointer.units * state.engine.page_tokens
        return state.cost.cost.range_seconds(
            end, item.prompt_tokens - end, state.engine.chunk_tokens
        )
