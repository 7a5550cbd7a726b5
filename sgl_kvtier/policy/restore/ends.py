"""The decisions of one step about the two ends of all restorations. Compute: which request gets the
chunked-prefill slot, how long its next chunk is, which loads are cancelled. Loads: which pages are
loaded next, so that every link has enough work until well after the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from sgl_kvtier.policy.messages import Cancel, Compute, Load, Mode, StepView
from sgl_kvtier.policy.restore.forecast import (
    Forecast,
    Outlook,
    Queueing,
    Ways,
    chunk_tokens,
    slowed_by,
)
from sgl_kvtier.policy.restore.meeting import Meeting, Split
from sgl_kvtier.policy.restore.restorations import LINK_OF, Restoration, Restorations, in_run_order
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Span, Tier

_STEP_COVER: Final = 1.5
_STEP_COVER_ALONE: Final = 3.0
"""Loads cover this many times the predicted time until the next step, so that no link becomes idle
before it. A single restoration gets more, enough for a link that turns out this much faster; loads
that compute reaches first are cancelled.
"""
_LONGEST_STUCK_S: Final = 2.0
"""A waiting request whose loads have found no free memory for this many seconds is computed."""
_WORTH_ASKING: Final = 2
"""Loads are cancelled only if that gives compute this many chunks of minimum size."""
_LOAD_S: Final = 0.02
"""The last loads before the meeting page take at most this many seconds each, or are a single page,
since compute may have to wait for a whole load.
"""
_NEAR: Final = 4
"""A load is at most 1/_NEAR of the pages left to the meeting page. Loads far from it have full
size, so that their latency is rarely paid.
"""
_PROBES: Final = 2
"""Number of transfers in flight on a link that was never measured."""
_UNBOUNDED: Final = 1 << 40
"""Free pages of a tier that the view does not list."""


class Floor(NamedTuple):
    """The page down to which a stage should be loaded."""

    first: int
    """The first page of the stage."""
    lowest: int
    """The lowest page of the stage that should be loaded."""


class LoadBounds(NamedTuple):
    """Which pages of a restoration may be loaded in this step."""

    lowest: int
    """The lowest page that may be loaded; pages below are computed."""
    floors: tuple[Floor, ...]
    """The lowest page that should be loaded of each stage, the lowest stage first."""
    split: Split
    """The predicted meeting page."""


class Chunks:
    """Decides the chunks of restorations. A chunk is reserved when a ChunkStarted reports it."""

    def __init__(self, state: Restorations, outlook: Outlook) -> None:
        self._state = state
        self._outlook = outlook

    def decide(self, view: StepView) -> tuple[list[Compute], tuple[Cancel, ...]]:
        """The commands for the request in the slot, or for the one that could get it, and for
        requests that are completely loaded and need no slot.
        """
        items, complete = self._state.items, self._state.complete
        computes = list(complete.values())
        cancels: list[Cancel] = []
        if view.slot is None and view.slot_open:
            first = next(
                (item for item in in_run_order(self._state, view) if item.rid not in complete), None
            )
            if first is not None and self._wants_slot(first, view):
                compute, cancels = self._compute(first, view)
                computes.append(compute)
        elif view.slot in items and view.slot not in complete:
            compute, cancels = self._compute(items[view.slot], view)
            computes.append(compute)
        return computes, tuple(cancels)

    def unstuck(self, compute: Compute, view: StepView) -> Compute:
        """Replaces a wait by a chunk if no load of the request is in flight for which to wait."""
        item, engine = self._state.items[compute.rid], self._state.engine
        if compute.tokens != 0 or item.pointer.loading or view.prefill_tokens < engine.page_tokens:
            return compute
        barrier = (
            item.pointer.barrier(compute.splice.stop) - compute.splice.stop
        ) * engine.page_tokens
        whole = engine.chunk_tokens // engine.page_tokens * engine.page_tokens
        budget = view.prefill_tokens // engine.page_tokens * engine.page_tokens
        return Compute(compute.rid, compute.splice, min(barrier, whole, budget))

    def within_stall_bound(self, compute: Compute, view: StepView) -> Compute:
        """Keeps the gap that restorations' chunks are predicted to cause between two output tokens
        of running requests below the bound (`Restorations.longest_chunk_s`). It cuts the chunk, or
        defers it by one step if earlier chunks have used up the time.
        """
        state, page = self._state, self._state.engine.page_tokens
        item, start = state.items[compute.rid], compute.splice.stop * page
        end = item.pointer.units * page
        most_s = state.longest_chunk_s(view)
        if not most_s or compute.tokens == 0 or start >= end:
            return compute
        wanted = min(item.prompt_tokens - start, view.prefill_tokens, state.engine.chunk_tokens)
        tokens = wanted if compute.tokens is None else compute.tokens
        pieces = 1
        while tokens > page and self._chunk_s(start, tokens, pieces) > most_s:
            pieces += 1
            if -(-tokens // pieces) <= max(page, state.rules.min_chunk_tokens):
                break
        if state.stalled_s > 0 and state.stalled_s + self._chunk_s(start, tokens, pieces) > most_s:
            return Compute(compute.rid, compute.splice, 0)
        if pieces == 1:
            return compute
        return Compute(compute.rid, compute.splice, min(_piece(tokens, pieces, page), end - start))

    def _chunk_s(self, start: int, tokens: int, pieces: int) -> float:
        page = self._state.engine.page_tokens
        return self._state.cost.cost.chunk_seconds(start, _piece(tokens, pieces, page))

    def waited_long(self, compute: Compute, view: StepView) -> bool:
        """Whether a request without a slot has waited long with no load in flight; records when
        that began. Memory for its loads is usually free soon, but others may take it each time.
        """
        item = self._state.items[compute.rid]
        if compute.tokens != 0 or item.pointer.loading:
            item.stuck_since = -1.0
        elif item.stuck_since < 0:
            item.stuck_since = view.now
        return 0 <= item.stuck_since <= view.now - _LONGEST_STUCK_S

    def _wants_slot(self, item: Restoration, view: StepView) -> bool:
        """Whether a request should compute. Changes LOAD to BOTH once that has become faster."""
        state = self._state
        if item.mode is Mode.LOAD and state.config.restore != "load":
            forecast = self._outlook.forecast(view, self._outlook.compute_at_s(view, item))
            ways = Ways(forecast, item, known=True, decoding=slowed_by(view))
            both_s = state.rules.cost_s(ways.both_s, ways.both_stalls_s)
            if both_s <= ways.load_s * (1 - state.rules.split_margin):
                item.mode = Mode.BOTH
        return item.mode is Mode.BOTH

    def _compute(self, item: Restoration, view: StepView) -> tuple[Compute, list[Cancel]]:
        engine, rules = self._state.engine, self._state.rules
        page = engine.page_tokens
        run = item.pointer.landed_run()
        if run.stop == item.pointer.units:
            return Compute(item.rid, run, None), []
        barrier = (item.pointer.barrier(run.stop) - run.stop) * page
        split = self._outlook.hold(item, view, self._outlook.busy_s(view), run.stop)
        if item.fixed_meet >= 0:
            return Compute(item.rid, run, self._up_to_fixed(item, view, run.stop, barrier)), []
        if not barrier:
            # The page at the prefill cursor is loading. The only decision is whether to cancel that
            # load.
            if not rules.balanced_chunks or run.stop < item.copied:
                return Compute(item.rid, run, 0), []
            return Compute(item.rid, run, 0), self._cancel_slow_loads(item, view, 0, 0, run.stop)
        if run.stop < item.copied:
            lost = self._within_budget(item, view, item.pointer.lost_run(run.stop) * page)
            return Compute(item.rid, run, min(lost, engine.chunk_tokens // page * page)), []
        if (
            split.meet == item.pointer.units
            and barrier == (item.pointer.units - run.stop) * page
            and not self._yields(view)
        ):
            # Nothing is loading or will be loaded. The engine's own chunks are best, since they
            # include the rest of the prompt.
            return Compute(item.rid, run, None), []
        tokens = chunk_tokens(split, barrier, engine, rules)
        cancels = (
            self._cancel_slow_loads(item, view, tokens, barrier, run.stop)
            if rules.balanced_chunks
            else []
        )
        tokens = self._within_budget(item, view, tokens)
        least = min(rules.min_chunk_tokens, barrier or page)
        if tokens < least and (item.pointer.loading or split.meet < item.pointer.units):
            tokens = 0
        if item.pointer.lost_in(Span(run.stop, run.stop + 1)) and not tokens:
            tokens = self._within_budget(item, view, min(barrier, max(page, least // page * page)))
        return Compute(item.rid, run, tokens), cancels

    def _up_to_fixed(
        self, item: Restoration, view: StepView, start: int, barrier: int
    ) -> int | None:
        """Tokens of the next chunk of a request with a fixed meeting page. Above that page only
        pages whose load failed are computed.
        """
        page = self._state.engine.page_tokens
        whole = self._state.engine.chunk_tokens // page * page
        if (
            item.fixed_meet == item.pointer.units
            and start * page + barrier == item.pointer.units * page
        ):
            return None
        mine = item.fixed_meet - start if start < item.fixed_meet else item.pointer.lost_run(start)
        chunks = max(1, -(-mine * page // whole))
        return self._within_budget(item, view, min(-(-mine // chunks) * page, barrier))

    def _within_budget(self, item: Restoration, view: StepView, tokens: int) -> int:
        """Limits a chunk to the step's budget. Fresh prefill goes first while the restoration has
        loads in flight, for a limited number of steps in a row (Cake, section 4).
        """
        state, page = self._state, self._state.engine.page_tokens
        tokens = min(tokens, view.prefill_tokens // page * page)
        if not (self._yields(view) and item.pointer.loading):
            return tokens
        left = max(0, view.prefill_tokens - view.fresh_tokens) // page * page
        if left >= min(tokens, state.rules.min_chunk_tokens):
            return min(tokens, left)
        if item.yields >= state.rules.max_yields:
            return tokens
        item.yields += 1
        return 0

    def _yields(self, view: StepView) -> bool:
        return self._state.rules.yields_to_fresh and view.fresh_tokens > 0

    def _cancel_slow_loads(
        self, item: Restoration, view: StepView, tokens: int, barrier: int, front: int
    ) -> list[Cancel]:
        """Cancels loads that have not started and that compute would overtake."""
        engine = self._state.engine
        least = _WORTH_ASKING * self._state.rules.min_chunk_tokens
        reach = front + barrier // engine.page_tokens
        if not item.pointer.loading or tokens < barrier or item.cancelled >= reach + 1:
            return []
        run = item.pointer.last_loading()
        if run.start != reach:
            return []
        meet = self._outlook.meeting(
            item,
            view,
            self._outlook.busy_s(view),
            front,
            charge=self._outlook.charge(view),
            taken_back=True,
        ).meet
        if tokens and not any(rid != item.rid for rid in view.waiting):
            # No load can begin while this chunk runs. So if no other request needs loads, leave the
            # link enough work even if it becomes faster meanwhile.
            meet = min(meet, reach + self._spare_pages(item, reach, front, tokens))
        if (meet - reach) * engine.page_tokens < least:
            return []
        # A load is cancelled as a whole or not at all.
        stop = self._state.links.whole_below(item.rid, reach, min(meet, run.stop))
        if (stop - reach) * engine.page_tokens < least:
            return []
        item.cancelled = stop
        return [Cancel(item.rid, Span(reach, stop))]

    def _spare_pages(self, item: Restoration, reach: int, front: int, tokens: int) -> int:
        """Number of the request's pages in flight that can be cancelled without idling the link
        that loads page `reach`. The link keeps work for `step_cover` times the duration of a chunk
        of `tokens` tokens at page `front`.
        """
        state = self._state
        link = next(LINK_OF[tier] for source, tier in item.sources if reach in source)
        chunk_s = state.cost.cost.chunk_seconds(front * state.engine.page_tokens, tokens)
        rate = state.bandwidth.bytes_per_second(link)
        could = step_cover(state) * chunk_s * rate / state.engine.page_bytes
        return max(0, item.in_flight.get(link, 0) - int(could))


def _piece(tokens: int, pieces: int, page: int) -> int:
    """Size in tokens of one of `pieces` equal pieces, rounded up to whole pages."""
    return tokens if pieces == 1 else max(page, math.ceil(tokens / pieces / page) * page)


def step_cover(state: Restorations) -> float:
    """The multiple of the time until the next step for which a link should have work."""
    alone = state.rules.balanced_chunks and len(state.items) == 1
    return _STEP_COVER_ALONE if alone else _STEP_COVER


class Loads:
    """Decides the loads of restorations. Loads that it returns are reserved at once."""

    def __init__(self, state: Restorations, outlook: Outlook, chunks: Chunks) -> None:
        self._state = state
        self._outlook = outlook
        self._chunks = chunks
        self._reorders = type(state.rules).load_order is not Rules.load_order

    def decide(self, view: StepView, computes: list[Compute]) -> tuple[Load, ...]:
        """Loads in the order of the rules, until every link has enough work."""
        state, outlook, now = self._state, self._outlook, view.now
        busy_s = outlook.busy_s(view)
        horizon_s = max(
            state.rules.load_horizon_s,
            step_cover(state) * (busy_s + self._step_seconds(view, computes)),
        )
        readers = state.readers
        open_links = [link for link in readers if not self._full(link, now, horizon_s)]
        if not any(map(readers.__getitem__, open_links)):
            return ()
        free = dict(view.free_pages)
        if Tier.DEVICE in free:
            # Keep the pages of the chunk that the request in the slot may be granted: loads of
            # other requests must not take them.
            granted = [
                self._chunks.unstuck(compute, view) if compute.rid == view.slot else compute
                for compute in computes
            ]
            free[Tier.DEVICE] -= (
                sum(compute.tokens or 0 for compute in granted) // state.engine.page_tokens
            )
        loads: list[Load] = []
        ending = {compute.rid: compute for compute in computes}
        # Compute reaches a request after those before it in the queue. The later its turn, the more
        # of it is loaded.
        ahead_s, fresh_s = busy_s, 0.0
        for item in self._in_io_order(view):
            if free.get(Tier.DEVICE, 1) <= 0 or not any(map(readers.__getitem__, open_links)):
                break
            before_s = outlook.fresh_s(view, item.rid)
            ahead_s += max(0.0, before_s - fresh_s)
            fresh_s = max(fresh_s, before_s)
            if any(map(item.unread.__contains__, open_links)):
                bounds = self._bounds(item, view, ending.get(item.rid), ahead_s)
                self._load_from(item, now, bounds, horizon_s, free, loads)
                ahead_s = max(ahead_s, bounds.split.seconds) + outlook.suffix_s(item)
                open_links = [link for link in open_links if not self._full(link, now, horizon_s)]
        return tuple(loads)

    def _step_seconds(self, view: StepView, computes: list[Compute]) -> float:
        """Seconds of prefill in this step: restorations' chunks, and fresh prefill that fits."""
        cost, engine = self._state.cost.cost, self._state.engine
        left, seconds = view.prefill_tokens, 0.0
        for compute in computes:
            start, tokens = compute.splice.stop * engine.page_tokens, compute.tokens
            if tokens is None:
                tokens = self._state.items[compute.rid].prompt_tokens - start
            tokens = min(tokens, left)
            if tokens > 0:
                seconds += cost.chunk_seconds(start, tokens)
                left -= tokens
        fresh = min(view.fresh_tokens, left)
        return seconds + cost.chunk_seconds(0, fresh) if fresh > 0 else seconds

    def _stop_page(self, compute: Compute, item: Restoration) -> int:
        if compute.tokens is None:
            return item.pointer.units
        return compute.splice.stop + compute.tokens // self._state.engine.page_tokens

    def _full(self, link: Link, now: float, horizon_s: float) -> bool:
        """Whether a link has enough work; a link that was never measured gets a few transfers."""
        if not self._state.bandwidth.known(link):
            return self._state.links.transfers(link) >= _PROBES
        return self._state.links.backlog_seconds(link, now) >= horizon_s

    def _bounds(
        self, item: Restoration, view: StepView, proposed: Compute | None, ahead_s: float
    ) -> LoadBounds:
        """The pages of this restoration that may and that should be loaded. Those that compute is
        predicted to reach first should not be, except copies from host memory that compute awaits.
        """
        rules, outlook = self._state.rules, self._outlook
        split = outlook.held(item) or outlook.meeting(item, view, ahead_s, item.pointer.front)
        lowest = item.pointer.front if proposed is None else self._stop_page(proposed, item)
        if item.fixed_meet >= 0:
            lowest = max(lowest, item.fixed_meet)
            return LoadBounds(lowest, (Floor(0, lowest),), split)
        least = rules.min_chunk_tokens
        stages = split.stages or (Meeting(0, split.meet, split.compute_tokens),)
        if (
            not rules.balanced_chunks
            or item.mode is Mode.LOAD
            or all(stage.tokens < least for stage in stages)
        ):
            return LoadBounds(lowest, (Floor(0, lowest),), split)
        charge = outlook.charge(view)
        if charge > 1 and any(stage.meet > lowest for stage in stages):
            charged = outlook.meeting(item, view, ahead_s, item.pointer.front, charge=charge)
            stages = charged.stages or (Meeting(0, charged.meet, least),)
        # If loaded pages can be attached only up to the end, all pages above a loaded one are
        # loaded too.
        most = item.pointer.barrier() if item.pointer.whole else item.pointer.units
        floors = (
            Floor(first, max(lowest, min(meet, most) if tokens >= least else first))
            for first, meet, tokens in stages
        )
        return LoadBounds(lowest, tuple(floors), split)

    def _load_from(
        self,
        item: Restoration,
        now: float,
        bounds: LoadBounds,
        horizon_s: float,
        free: dict[Tier, int],
        loads: list[Load],
    ) -> None:
        """Adds loads from the end of each stage down to its floor, while its links have time."""
        config, engine, readers = self._state.config, self._state.engine, self._state.readers
        links, rid, take_back = self._state.links, item.rid, item.pointer.take_back
        device, host = free.get(Tier.DEVICE, _UNBOUNDED), free.get(Tier.HOST, _UNBOUNDED)
        patience = self._state.rules.load_patience
        lowest, floors, _ = bounds
        for source, tier in item.load_order:
            link = LINK_OF[tier]
            staged = engine.staged and tier > Tier.HOST
            pages, group = 0, self._group(link)
            floor = next(
                (floor for first, floor in reversed(floors) if first <= source.start), floors[0][1]
            )
            whole = max(group, config.load_tokens // engine.page_tokens)
            if self._state.rules.balanced_chunks:
                whole = max(whole, engine.whole_load_pages)
            while most := links.refill(link, now, horizon_s, group, _PROBES):
                most = min(most, device, host) if staged else min(most, device)
                span = take_back(most, source, floor if source.start >= item.copied else lowest)
                count = span.stop - span.start
                if not count:
                    break
                device -= count
                if staged:
                    host -= count
                pages += count
                parts = _parts(span, floor, group, whole)
                for part, backlog_s in zip(parts, links.begin(link, rid, parts, now), strict=True):
                    loads.append(
                        Load(rid, part, tier, link, patience * backlog_s + config.load_deadline_s)
                    )
            if pages:
                item.in_flight[link] = item.in_flight.get(link, 0) + pages
                self._outlook.loads_begun()
        free[Tier.DEVICE], free[Tier.HOST] = device, host
        for link in [link for link in list(item.unread) if item.read_out(link)]:
            readers[link] -= 1

    def _group(self, link: Link) -> int:
        """Pages per load: as many as configured, fewer on a slow link. Not reduced for the rules of
        the papers, and if nothing is computed, since then no compute waits for a load.
        """
        state = self._state
        most = max(1, state.config.load_tokens // state.engine.page_tokens)
        if (
            not state.rules.balanced_chunks
            or state.config.restore == "load"
            or not state.bandwidth.known(link)
        ):
            return most
        pages = int(state.bandwidth.bytes_per_second(link) * _LOAD_S / state.engine.page_bytes)
        return max(1, min(most, pages))

    def _in_io_order(self, view: StepView) -> Iterable[Restoration]:
        state = self._state
        if not self._reorders or len(state.items) < 2:
            return in_run_order(state, view)
        forecast = Forecast(state.engine, state.cost.cost, state.bandwidth, 0.0, {})
        queue = [Queueing(item, forecast) for item in in_run_order(state, view)]
        return [state.items[one.rid] for one in state.rules.load_order(queue)]


def _parts(span: Span, floor: int, least: int, most: int) -> list[Span]:
    """Splits a span into loads, the last pages first. Far above the meeting page `floor` they have
    `most` pages each, near it `least`.
    """
    parts, lowest, stop = [], span.start, span.stop
    while stop > lowest:
        pages = (stop - floor) // _NEAR
        pages = least if pages < least else pages if pages < most else most
        start = stop - pages if stop - pages > lowest else lowest
        parts.append(Span(start, stop))
        stop = start
    return parts
