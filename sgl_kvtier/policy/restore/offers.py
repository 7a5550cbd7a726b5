"""Restore candidates: whether each is restored, and in which mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from sgl_kvtier.policy.messages import Mode, RestoreOffered, RestoreStart, StepView
from sgl_kvtier.policy.restore.forecast import (
    Forecast,
    Outlook,
    Ways,
    choose_mode,
    slowed_by,
    why_declined,
)
from sgl_kvtier.policy.restore.restorations import (
    LINK_OF,
    Restoration,
    Restorations,
    Source,
    islands,
)
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.types import Link, Span, Tier

_LOOK_AGAIN: Final = 16
"""Of the requests that are computed because a link is slow, one in this many is restored with at
least its last page loaded, to measure whether the link has become faster.
"""

Claimable: TypeAlias = Callable[[StepView, int, float], int]
"""(view, pages, until) -> how many of these device pages can be allocated now without evicting a
page that is needed before `until`, in seconds of the planner's clock.
"""


class Offers:
    """The restore candidates without a decision yet, and the decisions on them."""

    def __init__(self, state: Restorations, outlook: Outlook, claimable: Claimable) -> None:
        self._claimable = claimable
        self._state = state
        self._outlook = outlook
        self._open: list[RestoreOffered] = []
        self._order = 0
        self._computed = 0
        """Number of candidates that are computed because links are slow."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, offer: RestoreOffered) -> None:
        """Adds a candidate, to be decided in the next step."""
        self._open.append(offer)

    def withdraw(self, rid: str) -> None:
        """Removes the candidate of a request that left the queue."""
        self._open = [offer for offer in self._open if offer.rid != rid]

    def give_up(self) -> None:
        """Drops all candidates without a decision."""
        self._open = []

    def answer(self, view: StepView) -> tuple[RestoreStart, ...]:
        """Decides on all candidates in queue order, and begins the restorations that pay."""
        starts = []
        places = {rid: place for place, rid in enumerate(view.waiting)}
        for offer in sorted(self._open, key=lambda offer: places.get(offer.rid, len(places))):
            self._order += 1
            item = self._item(offer, self._fixed_meet(offer))
            forecast = self._outlook.forecast_in_queue(view, offer.rid)
            self._copy_first(item, forecast)
            own_s = self._state.overhead.seconds
            ways = Ways(forecast, item, self._knows(offer), own_s=own_s, decoding=slowed_by(view))
            item.mode, reason = choose_mode(self._state.rules, ways, self._state.config)
            if reason == "computing is faster":
                self._computed += 1
                if self._computed % _LOOK_AGAIN == 0:
                    if forecast.both(item).meet == offer.pages:
                        item = self._item(offer, offer.pages - 1)
                    item.mode, reason = Mode.BOTH, "to measure"
            if item.mode is Mode.LOAD and item.holes:
                item.mode = Mode.BOTH
            if item.mode.restores and not item.pointer.met:
                if item.mode is Mode.BOTH and ways.known and item.fixed_meet < 0:
                    item.predicted_end = view.now + forecast.both(item).seconds
                self._state.begin(item)
            starts.append(RestoreStart(offer.rid, item.mode, reason))
        self._open = []
        return tuple(starts)

    def left_to_engine(self, offer: RestoreOffered, view: StepView) -> str | None:
        """Why the engine should load this prefix itself, or None. Changes nothing."""
        item = self._item(offer)
        forecast = self._outlook.forecast_in_queue(view, offer.rid)
        self._copy_first(item, forecast)
        reads = not item.pointer.lost_run(offer.resident)
        learns = reads and self._engine_learns(offer)
        crowded = self._crowded(offer, view, forecast.both(item).seconds)
        own_s = self._state.overhead.seconds
        ways = Ways(
            forecast, item, self._knows(offer), learns, crowded, own_s, decoding=slowed_by(view)
        )
        why = why_declined(self._state.rules, ways, self._state.config)
        return why if reads or why != "loading is faster" else "computing is faster"

    def _engine_learns(self, offer: RestoreOffered) -> bool:
        """Whether the engine, by loading this prefix, would measure a cost or a link that is not
        known. A read over several links at once measures none of them.
        """
        state = self._state
        below = {LINK_OF[tier]: None for _, tier in offer.sources if tier > Tier.HOST}
        links = list(below) or [Link.STORAGE_TO_DEVICE]
        alone = len(links) == 1 and not state.bandwidth.known(links[0])
        return not state.costs_known or alone

    def _crowded(self, offer: RestoreOffered, view: StepView, seconds: float) -> bool:
        """Whether the device lacks memory for this request, those before it and the restorations in
        progress, if pages that are needed within the predicted `seconds` of this restoration stay.
        """
        if Tier.DEVICE not in view.free_pages:
            return False
        page = self._state.engine.page_tokens
        tokens = offer.prompt_tokens - offer.resident * page + view.wanted_tokens
        for rid, item in self._state.items.items():
            if rid != view.slot:  # the free pages leave out what it needs
                rest = item.remaining_span()
                open_pages = item.pointer.free_in(rest) + item.pointer.lost_in(rest)
                tokens += item.prompt_tokens - (item.pointer.units - open_pages) * page
        pages = -(-tokens // page)
        return self._claimable(view, pages, view.now + seconds) < pages

    def _copy_first(self, item: Restoration, forecast: Forecast) -> None:
        """If a prefix begins in host memory and continues in lower tiers, its host pages are copied
        first and prefill starts after them, provided that they can be attached by themselves. A
        prefix that is entirely in host memory may be computed and loaded at once.
        """
        alone = not item.pointer.whole
        if self._state.rules.balanced_chunks and len(item.sources) > 1 and alone:
            item.copied = forecast.copies_first(item)

    def _item(self, offer: RestoreOffered, fixed_meet: int = -1) -> Restoration:
        """The restoration of this candidate. Pages that no tier has are computed. So are stored
        pages between and after them that are not worth a prefill chunk of their own.
        """
        pointer = TwoPointer(offer.resident, offer.pages, offer.anchor_pages)
        found, runs = list[Source](), islands(offer.sources)
        if pointer.whole:  # only a run up to the end can be attached
            runs = [run for run in runs if run[-1][0].stop == offer.pages]
        end = offer.resident
        for island in runs:
            span = Span(island[0][0].start, island[-1][0].stop)
            if span.start > end and not self._is_worth_a_chunk(span):
                continue
            pointer.lack(Span(end, span.start))
            found += island
            end = span.stop
        pointer.lack(Span(end, offer.pages))
        above = (
            (Span(max(span.start, fixed_meet), span.stop), tier)
            for span, tier in found
            if span.stop > fixed_meet
        )
        return Restoration(
            offer.rid,
            self._order,
            offer.prompt_tokens,
            pointer,
            tuple(above),
            holes=bool(pointer.lost_from(offer.resident)),
            fixed_meet=fixed_meet,
            anchor_bytes=offer.anchor_bytes,
        )

    def _is_worth_a_chunk(self, span: Span) -> bool:
        """Whether computing these pages takes longer than the fixed cost of a chunk. Loading them
        splits the computed pages before and after them into one chunk more.
        """
        cost, engine = self._state.cost.cost, self._state.engine
        start, tokens = span.start * engine.page_tokens, len(span) * engine.page_tokens
        chunks_s = tokens // engine.chunk_tokens * cost.fixed_s
        return cost.work_seconds(start, tokens) + chunks_s >= cost.fixed_s

    def _fixed_meet(self, offer: RestoreOffered) -> int:
        """The meeting page, if the rules fix it in advance; otherwise -1."""
        state = self._state
        share = state.rules.computed_share() if state.config.restore == "both" else None
        if share is None:
            return -1
        share = min(max(share, 0.0), 1.0)
        return offer.resident + round(share * (offer.pages - offer.resident))

    def _knows(self, offer: RestoreOffered) -> bool:
        """Whether the cost of prefill and this candidate's links were measured, now or earlier."""
        state = self._state
        return state.costs_known and all(
            state.bandwidth.known(LINK_OF[tier]) for _, tier in offer.sources
        )
