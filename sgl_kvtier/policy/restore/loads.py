"""The load end of restorations: which pages are loaded next, so that every link has enough to do
until well after the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from sgl_kvtier.policy.messages import Compute, Load, Mode, StepView
from sgl_kvtier.policy.restore.chunks import Chunks, step_cover
from sgl_kvtier.policy.restore.meeting import Meeting, Split
from sgl_kvtier.policy.restore.modes import LINK_OF, Forecast, Queueing, Restoration
from sgl_kvtier.policy.restore.outlook import Outlook
from sgl_kvtier.policy.restore.under_way import UnderWay, in_run_order
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Span, Tier

_LOAD_S: Final = 0.02
"""Seconds that the last loads before the meeting take at most, unless they are one page: the front
may have to wait for all of one.
"""
_NEAR: Final = 4
"""A load is at most this fraction of the pages left to the meeting: far from it loads are whole, so
that their latency is rarely paid.
"""
_PROBES: Final = 2
"""Transfers begun on a link that was never measured."""
_UNBOUNDED: Final = 1 << 40
"""Pages of a tier that the view does not count."""

Floors: TypeAlias = tuple[tuple[int, int], ...]
"""For each stage, ascending: its first page, and the lowest page that should be loaded."""


class Loads:
    """Decides the back of each restoration. Loads it returns are claimed at once."""

    def __init__(self, under_way: UnderWay, outlook: Outlook, chunks: Chunks) -> None:
        self._under_way = under_way
        self._outlook = outlook
        self._chunks = chunks
        self._reorders = type(under_way.rules).load_order is not Rules.load_order

    def decide(self, view: StepView, computes: list[Compute]) -> tuple[Load, ...]:
        """Loads until every link has enough to do, in the rules' order."""
        known, outlook, now = self._under_way, self._outlook, view.now
        busy_s = outlook.busy_s(view)
        horizon_s = max(
            known.rules.load_horizon_s,
            step_cover(known) * (busy_s + self._step_seconds(view, computes)),
        )
        readers = known.readers
        open_links = [link for link in readers if not self._full(link, now, horizon_s)]
        if not any(map(readers.__getitem__, open_links)):
            return ()
        room = dict(view.free_pages)
        if Tier.DEVICE in room:
            # The pages of a chunk that the slot's holder may yet be granted are kept for it: loads
            # of other requests must not take them.
            granted = [
                self._chunks.unstuck(compute, view) if compute.rid == view.slot else compute
                for compute in computes
            ]
            room[Tier.DEVICE] -= (
                sum(compute.tokens or 0 for compute in granted) // known.engine.page_tokens
            )
        loads: list[Load] = []
        ending = {compute.rid: compute for compute in computes}
        # Compute reaches a request after those before it in the queue: the later its turn, the more
        # of it is loaded.
        ahead_s, fresh_s = busy_s, 0.0
        for item in self._in_io_order(view):
            if room.get(Tier.DEVICE, 1) <= 0 or not any(map(readers.__getitem__, open_links)):
                break
            before_s = outlook.fresh_s(view, item.rid)
            ahead_s += max(0.0, before_s - fresh_s)
            fresh_s = max(fresh_s, before_s)
            if any(map(item.unread.__contains__, open_links)):
                lowest, floors, split = self._floors(item, view, ending.get(item.rid), ahead_s)
                self._load_from(item, now, lowest, floors, horizon_s, room, loads)
                ahead_s = max(ahead_s, split.seconds) + outlook.suffix_s(item)
                open_links = [link for link in open_links if not self._full(link, now, horizon_s)]
        return tuple(loads)

    def _step_seconds(self, view: StepView, computes: list[Compute]) -> float:
        """Seconds of prefill in the step being decided: chunks of restorations, and fresh prefill
        as far as it fits in.
        """
        cost, engine, left, seconds = (
            self._under_way.cost.cost,
            self._under_way.engine,
            view.prefill_tokens,
            0.0,
        )
        for compute in computes:
            start, tokens = compute.splice.stop * engine.page_tokens, compute.tokens
            if tokens is None:
                tokens = self._under_way.items[compute.rid].prompt_tokens - start
            tokens = min(tokens, left)
            if tokens > 0:
                seconds += cost.chunk_seconds(start, tokens)
                left -= tokens
        fresh = min(view.fresh_tokens, left)
        return seconds + cost.chunk_seconds(0, fresh) if fresh > 0 else seconds

    def _stop_page(self, compute: Compute, item: Restoration) -> int:
        if compute.tokens is None:
            return item.pointer.units
        return compute.splice.stop + compute.tokens // self._under_way.engine.page_tokens

    def _full(self, link: Link, now: float, horizon_s: float) -> bool:
        """Whether a link has enough to do. A link that was never measured gets a few transfers to
        measure it.
        """
        if not self._under_way.bandwidth.known(link):
            return self._under_way.links.transfers(link) >= _PROBES
        return self._under_way.links.backlog_seconds(link, now) >= horizon_s

    def _floors(
        self, item: Restoration, view: StepView, proposed: Compute | None, ahead_s: float
    ) -> tuple[int, Floors, Split]:
        """The lowest page that may be loaded; the lowest that should be, by the first page of the
        stage; and the meeting page. Pages that compute is predicted to reach first should not be
        loaded, except copies from host memory that compute waits for.
        """
        rules, outlook = self._under_way.rules, self._outlook
        split = outlook.held(item) or outlook.meeting(item, view, ahead_s, item.pointer.front)
        lowest = item.pointer.front if proposed is None else self._stop_page(proposed, item)
        if item.fixed_meet >= 0:
            lowest = max(lowest, item.fixed_meet)
            return lowest, ((0, lowest),), split
        least = rules.min_chunk_tokens
        stages = split.stages or (Meeting(0, split.meet, split.compute_tokens),)
        if (
            not rules.balanced_chunks
            or item.mode is Mode.LOAD
            or all(stage.tokens < least for stage in stages)
        ):
            return lowest, ((0, lowest),), split
        charge = outlook.charge(view)
        if charge > 1 and any(stage.meet > lowest for stage in stages):
            charged = outlook.charged(item, view, ahead_s, item.pointer.front, charge)
            stages = charged.stages or (Meeting(0, charged.meet, least),)
        floors = (
            (first, max(lowest, meet if tokens >= least else first))
            for first, meet, tokens in stages
        )
        return lowest, tuple(floors), split

    def _load_from(
        self,
        item: Restoration,
        now: float,
        lowest: int,
        floors: Floors,
        horizon_s: float,
        room: dict[Tier, int],
        loads: list[Load],
    ) -> None:
        """Adds loads of this request, from the end of every stage down to its floor, until its
        links have enough to do.
        """
        config, engine, readers = (
            self._under_way.config,
            self._under_way.engine,
            self._under_way.readers,
        )
        links, rid, take_back = self._under_way.links, item.rid, item.pointer.take_back
        device, host = room.get(Tier.DEVICE, _UNBOUNDED), room.get(Tier.HOST, _UNBOUNDED)
        patience = self._under_way.rules.load_patience
        for source, tier in item.load_order:
            link = LINK_OF[tier]
            staged = engine.staged and tier > Tier.HOST
            pages, group = 0, self._group(link)
            floor = next(
                (floor for first, floor in reversed(floors) if first <= source.start), floors[0][1]
            )
            whole = max(group, config.load_tokens // engine.page_tokens)
            if self._under_way.rules.balanced_chunks:
                whole = max(whole, engine.whole_load_pages)
            while most := links.wanted(link, now, horizon_s, group, _PROBES):
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
                for part, backlog_s in zip(parts, links.asked(link, rid, parts, now), strict=True):
                    loads.append(
                        Load(rid, part, tier, link, patience * backlog_s + config.load_deadline_s)
                    )
            if pages:
                item.in_flight[link] = item.in_flight.get(link, 0) + pages
                self._outlook.loads_handed_out()
        room[Tier.DEVICE], room[Tier.HOST] = device, host
        for link in [link for link in list(item.unread) if item.read_out(link)]:
            readers[link] -= 1

    def _group(self, link: Link) -> int:
        """Pages per load: as many as configured, fewer on a slow link. The papers' rules have no
        such limit, and where nothing is computed no end waits at a meeting.
        """
        known = self._under_way
        most = max(1, known.config.load_tokens // known.engine.page_tokens)
        if (
            not known.rules.balanced_chunks
            or known.config.restore == "load"
            or not known.bandwidth.known(link)
        ):
            return most
        return max(
            1,
            min(
                most,
                int(known.bandwidth.bytes_per_second(link) * _LOAD_S / known.engine.page_bytes),
            ),
        )

    def _in_io_order(self, view: StepView) -> Iterable[Restoration]:
        known = self._under_way
        if not self._reorders or len(known.items) < 2:
            return in_run_order(known, view)
        forecast = Forecast(known.engine, known.cost.cost, known.bandwidth, 0.0, {})
        queue = [Queueing(item, forecast) for item in in_run_order(known, view)]
        return [known.items[one.rid] for one in known.rules.load_order(queue)]


def _parts(span: Span, floor: int, least: int, most: int) -> list[Span]:
    """Splits a span into loads, the last pages first: `most` pages each far above the meeting at
    `floor`, `least` near it.
    """
    parts, lowest, stop = [], span.start, span.stop
    while stop > lowest:
        pages = (stop - floor) // _NEAR
        pages = least if pages < least else pages if pages < most else most
        start = stop - pages if stop - pages > lowest else lowest
        parts.append(Span(start, stop))
        stop = start
    return parts
