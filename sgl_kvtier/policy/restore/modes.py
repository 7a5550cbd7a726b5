"""Restoration decided request by request: where the two pointers should meet, and whether to split
at all.

All predictions are seconds from now. Compute of a request can begin `compute_at_s` from now, and
each link has a backlog. The best meeting page is where both ends are predicted to finish together.
That is CacheFlow Eq. 1 with a cost curve instead of a constant rate, so that it reaches T_opt and
not only T* = Tc Tl / (Tc + Tl).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.policy.restore.meeting import Open, Pace, Split, best_split, open_of, stages_of
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

LINK_OF: Final[Mapping[Tier, Link]] = {
    Tier.HOST: Link.HOST_TO_DEVICE,
    Tier.STORAGE: Link.STORAGE_TO_DEVICE,
    Tier.REMOTE: Link.REMOTE_TO_DEVICE,
}
"""The link a restoration loads over, by the page's tier."""

Source: TypeAlias = tuple[Span, Tier]


def islands(sources: Sequence[Source]) -> list[list[Source]]:
    """The sources as runs without a hole between them."""
    runs: list[list[Source]] = []
    for source in sources:
        if runs and runs[-1][-1][0].stop == source[0].start:
            runs[-1].append(source)
        else:
            runs.append([source])
    return runs


@dataclass(slots=True)
class Restoration:
    """One request's restoration as the planner sees it. In pages; `order` is the place of its offer
    among all offers.
    """

    rid: str
    order: int
    prompt_tokens: int
    pointer: TwoPointer
    sources: tuple[Source, ...]
    mode: Mode = Mode.BOTH
    yields: int = 0
    cancelled: int = 0
    """Loads below this page were cancelled, and it is not known yet which of them had not begun."""
    in_flight: dict[Link, int] = field(default_factory=dict)
    """Pages in flight, by link."""
    unread: dict[Link, None] = field(default_factory=dict)
    """Links that could still bring pages of it."""
    load_order: tuple[Source, ...] = ()
    """The sources in the order they are loaded: what lies before a hole is needed to compute it."""
    by_link: tuple[tuple[Link, tuple[Span, ...]], ...] = ()
    """The sources again, by link."""
    stages: tuple[int, ...] = ()
    """Pages at which links begin that bring none of the pages below (`meeting.stages_of`)."""
    meet: int = -1
    """The meeting page of the last search."""
    charged_meet: int = -1
    """The same with compute charged for the requests that wait behind it."""
    copied: int = 0
    """Pages below this one are copied from host memory, which is faster than computing them; those
    that fail to come are computed.
    """
    stuck_since: float = -1.0
    """When it first waited for a slot with no load in flight and none since; -1: it does not."""
    due: float = -1.0
    """When it is predicted to end by compute and links alone; -1: not known, or it had to share
    them.
    """
    begun: bool = False
    """A chunk of it was computed."""
    holes: bool = False
    """Pages of it were in no tier when it was offered."""
    fixed_meet: int = -1
    """Compute takes all pages below this one and loads all others, in every case; -1: as predicted
    best on the way.
    """

    def __post_init__(self) -> None:
        self.load_order = tuple(
            source for island in islands(self.sources) for source in reversed(island)
        )
        self.unread = {LINK_OF[tier]: None for _, tier in self.sources}
        self.by_link = tuple(
            (link, tuple(span for span, tier in self.sources if LINK_OF[tier] is link))
            for link in self.unread
        )
        self.stages = stages_of(self.by_link)

    def left(self, pace: Pace, front: int, taken_back: bool = False) -> Open:
        """Its open pages from page `front` on (`meeting.open_of`)."""
        return open_of(
            pace, self.pointer, self.by_link, front, self.in_flight, taken_back, self.stages
        )

    def read_out(self, link: Link) -> bool:
        """Notes a link as used up when it has no page left to bring; True when it was noted now."""
        for other, spans in self.by_link:
            if other is link and any(map(self.pointer.free_in, spans)):
                return False
        del self.unread[link]
        return True

    def opened(self, span: Span) -> list[Link]:
        """Notes that pages can be loaded again; returns the links that had been used up until
        now.
        """
        links = [
            LINK_OF[tier]
            for source, tier in self.sources
            if source.start < span.stop and span.start < source.stop
        ]
        new = [link for link in dict.fromkeys(links) if link not in self.unread]
        self.unread.update(dict.fromkeys(new))
        return new

    def behind_copies(
        self, front: int, bandwidth: Bandwidth, engine: EngineShape
    ) -> tuple[int, float]:
        """The first page from `front` on that is not copied from host memory anyway, and the
        seconds until the copies are there.
        """
        if front >= self.copied:
            return front, 0.0
        runs = self.pointer.unlanded_runs(front)
        pages = sum(min(stop, self.copied) - start for start, stop in runs if start < self.copied)
        return self.copied, bandwidth.seconds(Link.HOST_TO_DEVICE, pages * engine.page_bytes)

    def remaining_span(self, start: int | None = None) -> Span:
        """From the front, or from a page the front is about to step to, to the end."""
        return Span(self.pointer.front if start is None else start, self.pointer.units)

    def link_pages(self, span: Span) -> dict[Link, int]:
        """Number of pages of `span` that could still be loaded, by link."""
        pages: dict[Link, int] = {}
        for source, tier in self.sources:
            low, high = max(source.start, span.start), min(source.stop, span.stop)
            if low < high:
                pages[LINK_OF[tier]] = pages.get(LINK_OF[tier], 0) + self.pointer.free_in(
                    Span(low, high)
                )
        return pages


class Forecast:
    """Predicted finish times of one restoration, from the learned costs and the state of links and
    compute.
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
        self._pace = Pace(
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
        """Seconds that computing all saves where its last chunk takes the rest of the prompt along;
        behind loaded pages that is a chunk of its own.
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
        """Seconds until all open pages are loaded, behind the work of the links that bring them.
        Behind a hole nothing is: an engine computes all from there on.
        """
        span = item.remaining_span()
        hole = item.pointer.first_lost(span.start)
        end = 0.0
        for link, pages in item.link_pages(Span(span.start, hole)).items():
            if pages or item.in_flight.get(link):
                seconds = self._bandwidth.seconds(link, pages * self._engine.page_bytes)
                end = max(end, self._backlog_s.get(link, 0.0) + seconds)
        if hole < span.stop:
            waits_s = max(0.0, end - self._compute_at_s)
            end = waits_s + self.compute_seconds(hole, span.stop - hole)
        return end

    def both(self, item: Restoration) -> Split:
        """The best meeting page."""
        front, copied_s = item.behind_copies(item.pointer.front, self._bandwidth, self._engine)
        left = item.left(self._pace, front)
        split = best_split(self._pace, self._compute_at_s + copied_s, left, front)
        return split._replace(seconds=max(split.seconds, copied_s))

    def copies_first(self, item: Restoration) -> int:
        """The end of the pages that lie in host memory at the front and are copied faster than
        computed; the front where there are none.
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
    """What each way to restore one prefix is predicted to take, for the rules (`rules.Ways`).
    `learns`: an engine that loads it would measure what is not `known`; `crowded`: the device is
    short for what waits. `own_s`: what a restoration takes beside compute and links.
    """

    def __init__(
        self,
        forecast: Forecast,
        item: Restoration,
        known: bool,
        learns: bool = False,
        crowded: bool = False,
        own_s: float = 0.0,
    ) -> None:
        self._forecast = forecast
        self._item = item
        self._known = known
        self._learns = learns
        self._crowded = crowded
        self._own_s = own_s

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


class Queueing:
    """A restoration that links could load for, for the rules (`rules.Waiting`)."""

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


def choose_mode(rules: Rules, ways: Ways, config: PolicyConfig) -> tuple[Mode, str]:
    """One resource or both, with the reason: as configured, or as the rules say."""
    if config.restore in ("both", "load", "compute"):
        return Mode(config.restore), "configured"
    return rules.mode(ways)


def leave(rules: Rules, ways: Ways, config: PolicyConfig) -> str | None:
    """Why this prefix is not to be restored but left to an engine that can load by itself, or
    None.
    """
    return rules.leave(ways) if config.restore == "auto" else None


def chunk_tokens(split: Split, barrier_tokens: int, engine: EngineShape, rules: Rules) -> int:
    """Tokens of the next chunk: a multiple of the page, at most one engine chunk, up to the first
    page a load has taken.

    Balanced: the tokens left for compute are cut into equal chunks, so that the last ends at the
    meeting.
    """
    page = engine.page_tokens
    whole = max(page, engine.chunk_tokens // page * page)
    if not rules.balanced_chunks:
        return min(whole, barrier_tokens)
    if split.compute_tokens <= 0:
        return 0
    chunks = math.ceil(split.compute_tokens / whole)
    return min(math.ceil(split.compute_tokens / chunks / page) * page, whole, barrier_tokens)
