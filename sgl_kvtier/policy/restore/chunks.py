"""The compute end of restorations: which request gets the engine's slot, how long the next chunk
is, which loads are cancelled.
"""

from __future__ import annotations

import math
from typing import Final

from sgl_kvtier.policy.messages import Cancel, Compute, Mode, StepView
from sgl_kvtier.policy.restore.modes import LINK_OF, Restoration, chunk_tokens
from sgl_kvtier.policy.restore.outlook import Outlook
from sgl_kvtier.policy.restore.under_way import UnderWay, in_run_order
from sgl_kvtier.types import Span

_STEP_COVER: Final = 1.5
_STEP_COVER_ALONE: Final = 3.0
"""Loads cover this many times the predicted time until the next step, so that no link waits for a
plan. A restoration that is alone gets as many as a link that has become this much faster needs:
those that compute reaches first are cancelled.
"""
_LONGEST_STUCK_S: Final = 2.0
"""A waiting request whose pages find no room for this many seconds computes them."""
_FIXED_SHARE: Final = 0.1
"""Bounded chunks are no shorter than makes their fixed cost this share of their time."""
_WORTH_ASKING: Final = 2
"""Cancelling loads has to gain this many of the shortest chunks; otherwise compute waits for
them.
"""


class Chunks:
    """Decides the front of each restoration. Chunks are claimed when a ChunkStarted reports
    them.
    """

    def __init__(self, under_way: UnderWay, outlook: Outlook) -> None:
        self._under_way = under_way
        self._outlook = outlook

    def decide(self, view: StepView) -> tuple[list[Compute], tuple[Cancel, ...]]:
        """The commands for the slot's holder, or for the request that could get the slot, and for
        complete requests, which need no slot.
        """
        items, complete = self._under_way.items, self._under_way.complete
        computes = list(complete.values())
        cancels: list[Cancel] = []
        if view.slot is None and view.slot_open:
            first = next(
                (item for item in in_run_order(self._under_way, view) if item.rid not in complete),
                None,
            )
            if first is not None and self._wants_slot(first, view):
                compute, cancels = self._compute(first, view)
                computes.append(compute)
        elif view.slot in items and view.slot not in complete:
            compute, cancels = self._compute(items[view.slot], view)
            computes.append(compute)
        return computes, tuple(cancels)

    def unstuck(self, compute: Compute, view: StepView) -> Compute:
        """Waiting makes sense only while loads of the request are in flight; otherwise the front
        goes on.
        """
        item, engine = self._under_way.items[compute.rid], self._under_way.engine
        if compute.tokens != 0 or item.pointer.loading or view.prefill_tokens < engine.page_tokens:
            return compute
        barrier = (
            item.pointer.barrier(compute.splice.stop) - compute.splice.stop
        ) * engine.page_tokens
        whole = engine.chunk_tokens // engine.page_tokens * engine.page_tokens
        budget = view.prefill_tokens // engine.page_tokens * engine.page_tokens
        return Compute(compute.rid, compute.splice, min(barrier, whole, budget))

    def beside_decodes(self, compute: Compute, view: StepView) -> Compute:
        """Keeps the gap that chunks of restorations are predicted to make between two tokens of
        running requests below `policy.max_stall_ms`. A chunk takes no longer, and a step without
        one comes before it where the last ones leave no time for it.
        """
        known, page = self._under_way, self._under_way.engine.page_tokens
        item, start = known.items[compute.rid], compute.splice.stop * page
        end = item.pointer.units * page
        bound = known.config.max_stall_ms > 0 and view.decoding > 0
        if not bound or compute.tokens == 0 or start >= end:
            return compute
        most_s = max(known.config.max_stall_ms / 1000, known.cost.cost.fixed_s / _FIXED_SHARE)
        wanted = min(item.prompt_tokens - start, view.prefill_tokens, known.engine.chunk_tokens)
        tokens = wanted if compute.tokens is None else compute.tokens
        pieces = 1
        while tokens > page and self._chunk_s(start, tokens, pieces) > most_s:
            pieces += 1
            if -(-tokens // pieces) <= max(page, known.rules.min_chunk_tokens):
                break
        if known.stood_s > 0 and known.stood_s + self._chunk_s(start, tokens, pieces) > most_s:
            return Compute(compute.rid, compute.splice, 0)
        if pieces == 1:
            return compute
        return Compute(compute.rid, compute.splice, min(_piece(tokens, pieces, page), end - start))

    def _chunk_s(self, start: int, tokens: int, pieces: int) -> float:
        page = self._under_way.engine.page_tokens
        return self._under_way.cost.cost.chunk_seconds(start, _piece(tokens, pieces, page))

    def waited_long(self, compute: Compute, view: StepView) -> bool:
        """Whether a request without a slot has waited long with no load in flight; notes when that
        began. Room for its loads usually comes a moment later, but other requests may take it again
        and again.
        """
        item = self._under_way.items[compute.rid]
        if compute.tokens != 0 or item.pointer.loading:
            item.stuck_since = -1.0
        elif item.stuck_since < 0:
            item.stuck_since = view.now
        return 0 <= item.stuck_since <= view.now - _LONGEST_STUCK_S

    def _wants_slot(self, item: Restoration, view: StepView) -> bool:
        """A request that was to be loaded only starts computing as well when that has become
        faster.
        """
        known = self._under_way
        if item.mode is Mode.LOAD and known.config.restore != "load":
            forecast = self._outlook.forecast(view, self._outlook.ahead_s(view, item))
            least_s = forecast.load_only(item) * (1 - known.rules.split_margin)
            if forecast.both(item).seconds <= least_s:
                item.mode = Mode.BOTH
        return item.mode is Mode.BOTH

    def _compute(self, item: Restoration, view: StepView) -> tuple[Compute, list[Cancel]]:
        engine, rules = self._under_way.engine, self._under_way.rules
        page = engine.page_tokens
        run = item.pointer.landed_run()
        if run.stop == item.pointer.units:
            return Compute(item.rid, run, None), []
        barrier = (item.pointer.barrier(run.stop) - run.stop) * page
        self._outlook.hold(item, view, self._outlook.busy_s(view), run.stop)
        if item.fixed_meet >= 0:
            return Compute(item.rid, run, self._up_to_fixed(item, view, run.stop, barrier)), []
        if not barrier:
            # The page at the front is being loaded: the only decision is whether to cancel that
            # load.
            recalls = rules.balanced_chunks and run.stop >= item.copied
            return Compute(item.rid, run, 0), self._recall(
                item, view, 0, 0, run.stop
            ) if recalls else []
        if run.stop < item.copied:
            lost = self._within_budget(item, view, item.pointer.lost_run(run.stop) * page)
            return Compute(item.rid, run, min(lost, engine.chunk_tokens // page * page)), []
        split = self._outlook.held(item)
        assert split is not None, "it was noted above"
        if (
            split.meet == item.pointer.units
            and barrier == (item.pointer.units - run.stop) * page
            and not self._yields(view)
        ):
            # Nothing loads and nothing will: the engine's own chunks, which include the suffix, are
            # the best.
            return Compute(item.rid, run, None), []
        tokens = chunk_tokens(split, barrier, engine, rules)
        cancels = (
            self._recall(item, view, tokens, barrier, run.stop) if rules.balanced_chunks else []
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
        """Tokens of the next chunk of a request whose meeting page is fixed: behind that page only
        pages that failed to load.
        """
        page = self._under_way.engine.page_tokens
        whole = self._under_way.engine.chunk_tokens // page * page
        if (
            item.fixed_meet == item.pointer.units
            and start * page + barrier == item.pointer.units * page
        ):
            return None
        mine = item.fixed_meet - start if start < item.fixed_meet else item.pointer.lost_run(start)
        chunks = max(1, -(-mine * page // whole))
        return self._within_budget(item, view, min(-(-mine // chunks) * page, barrier))

    def _within_budget(self, item: Restoration, view: StepView, tokens: int) -> int:
        """Fresh prefill goes first while the restoration can go on loading, for a bounded number of
        steps in a row (Cake 4).
        """
        known, page = self._under_way, self._under_way.engine.page_tokens
        tokens = min(tokens, view.prefill_tokens // page * page)
        if not (self._yields(view) and item.pointer.loading):
            return tokens
        left = max(0, view.prefill_tokens - view.fresh_tokens) // page * page
        if left >= min(tokens, known.rules.min_chunk_tokens):
            return min(tokens, left)
        if item.yields >= known.rules.max_yields:
            return tokens
        item.yields += 1
        return 0

    def _yields(self, view: StepView) -> bool:
        return self._under_way.rules.yields_to_fresh and view.fresh_tokens > 0

    def _recall(
        self, item: Restoration, view: StepView, tokens: int, barrier: int, front: int
    ) -> list[Cancel]:
        """Cancels loads that compute would reach before the link does, as far as they were not
        begun.
        """
        engine = self._under_way.engine
        least = _WORTH_ASKING * self._under_way.rules.min_chunk_tokens
        reach = front + barrier // engine.page_tokens
        if not item.pointer.loading or tokens < barrier or item.cancelled >= reach + 1:
            return []
        run = item.pointer.last_loading()
        if run.start != reach:
            return []
        meet = self._outlook.meeting_if_taken_back(
            item, view, self._outlook.busy_s(view), front
        ).meet
        if tokens and not any(rid != item.rid for rid in view.waiting):
            # While this chunk runs no load can begin. So a link that becomes faster meanwhile must
            # not run out of work where no other request needs loads.
            meet = min(meet, reach + self._spare_pages(item, reach, front, tokens))
        if (meet - reach) * engine.page_tokens < least:
            return []
        # A load is cancelled as a whole or not at all.
        stop = self._under_way.links.whole_below(item.rid, reach, min(meet, run.stop))
        if (stop - reach) * engine.page_tokens < least:
            return []
        item.cancelled = stop
        return [Cancel(item.rid, Span(reach, stop))]

    def _spare_pages(self, item: Restoration, reach: int, front: int, tokens: int) -> int:
        """Number of the request's pages in flight that could be cancelled without leaving the link
        idle. The link is the one that brings page `reach`. While a chunk of `tokens` at page
        `front` runs, it is given work for `step_cover` times the chunk's duration.
        """
        known = self._under_way
        link = next(LINK_OF[tier] for source, tier in item.sources if reach in source)
        chunk_s = known.cost.cost.chunk_seconds(front * known.engine.page_tokens, tokens)
        could = (
            step_cover(known)
            * chunk_s
            * known.bandwidth.bytes_per_second(link)
            / known.engine.page_bytes
        )
        return max(0, item.in_flight.get(link, 0) - int(could))


def _piece(tokens: int, pieces: int, page: int) -> int:
    """Tokens of one of equal pieces, in whole pages."""
    return tokens if pieces == 1 else max(page, math.ceil(tokens / pieces / page) * page)


def step_cover(under_way: UnderWay) -> float:
    """A link should have work for this many times the time until the next step."""
    alone = under_way.rules.balanced_chunks and len(under_way.items) == 1
    return _STEP_COVER_ALONE if alone else _STEP_COVER
