"""Where one restoration's two ends should meet: the search that every step of a planner makes for every request it loads for.

What does not depend on the meeting page is looked up once; then each page asked for costs a few counts of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sgl_kvtier.policy.bandwidth import Bandwidth
from sgl_kvtier.policy.cost import PrefillCost
from sgl_kvtier.policy.two_pointer import TwoPointer
from sgl_kvtier.types import Link, Span


@dataclass(frozen=True, slots=True)
class Split:
    """Where to meet: compute takes what is open below `meet` (a page), loads take the rest. Seconds from now."""

    meet: int
    compute_tokens: int
    seconds: float


@dataclass(slots=True)
class Pace:
    """How fast both ends are: sizes of the engine, what compute costs and when it can begin, and each link's backlog."""

    page_tokens: int
    page_bytes: int
    chunk_tokens: int
    cost: PrefillCost
    bandwidth: Bandwidth
    compute_at_s: float
    backlog_s: Mapping[Link, float]


class Race:
    """Both ends of one restoration as functions of the page they meet at, with the front at page `front`.

    `sources` are disjoint page spans with the link each comes over. `own` are pages under way by link, which are counted as
    open again, as if their loads could be taken back; None leaves them where they are. Nothing may change meanwhile.
    """

    __slots__ = ("_by_link", "_count", "_front", "_least_s", "_pace", "_page_bytes", "_pointer", "_recall", "_start", "_stuck")

    def __init__(
        self,
        pace: Pace,
        pointer: TwoPointer,
        sources: Iterable[tuple[Span, Link]],
        front: int,
        own: Mapping[Link, int] | None = None,
    ) -> None:
        self._pace, self._pointer, self._front = pace, pointer, front
        self._recall = own is not None
        self._count = pointer.free_between if own is None else pointer.unlanded_between
        self._stuck = pointer.lost_between(front, pointer.units)
        self._start = front * pace.page_tokens
        self._page_bytes = pace.page_bytes
        spans: dict[Link, list[Span]] = {}
        for span, link in sources:
            spans.setdefault(link, []).append(span)
        self._least_s = 0.0
        self._by_link: list[tuple[list[Span], float, float, float]] = []
        bandwidth = pace.bandwidth
        for link, parts in spans.items():
            backlog_s = pace.backlog_s.get(link, 0.0)
            if own and backlog_s:
                # These are counted among the pages already.
                backlog_s = max(0.0, backlog_s - bandwidth.seconds(link, own.get(link, 0) * pace.page_bytes))
            self._by_link.append((parts, backlog_s, bandwidth.latency_s(link), bandwidth.bytes_per_second(link)))
        for link, backlog_s in pace.backlog_s.items():
            if link not in spans:
                self._least_s = max(self._least_s, backlog_s)

    def computed_pages(self, meet: int) -> int:
        """Open pages below the meeting page, and those above it that can only be computed."""
        return self._count(self._front, meet) + self._stuck

    def ends(self, meet: int) -> tuple[float, float]:
        """When compute and loads end, in seconds from now."""
        count, pace = self._count, self._pace
        computed_s = 0.0
        pages = count(self._front, meet) + self._stuck
        if pages:
            tokens = pages * pace.page_tokens
            computed_s = pace.compute_at_s + pace.cost.range_seconds(self._start, tokens, pace.chunk_tokens)
        loaded_s = self._least_s
        for spans, backlog_s, latency_s, bytes_per_s in self._by_link:
            pages = 0
            for span in spans:
                low = span.start if span.start > meet else meet
                if low < span.stop:
                    pages += count(low, span.stop)
            end_s = backlog_s + (latency_s + pages * self._page_bytes / bytes_per_s) if pages else backlog_s
            if end_s > loaded_s:
                loaded_s = end_s
        return computed_s, loaded_s

    def best(self) -> Split:
        """The page at which both ends are predicted to finish together, or the sooner of its two neighbours."""
        # Above the last page still to be loaded nothing changes with the meeting page. It is in (low, high]: compute ends
        # first at low, loads at high.
        front, units = self._front, self._pointer.units
        low, high = front, units if self._recall else self._pointer.free_top(Span(front, units))
        at_low = self.ends(low)
        at_high = self.ends(high) if high > low else at_low
        if at_low[0] >= at_low[1]:
            high, at_high = low, at_low
        elif at_high[0] < at_high[1]:
            low, at_low = high, at_high
        guess = True
        while high - low > 1:
            # Both ends are nearly straight lines, so interpolation lands close; halving in between bounds the steps.
            slack, lead = at_low[1] - at_low[0], at_high[0] - at_high[1]
            middle = low + round((high - low) * slack / (slack + lead)) if guess else (low + high) // 2
            middle, guess = min(max(middle, low + 1), high - 1), not guess
            ends = self.ends(middle)
            if ends[0] < ends[1]:
                low, at_low = middle, ends
            else:
                high, at_high = middle, ends
        best, ends = (low, at_low) if max(at_low) <= max(at_high) else (high, at_high)
        return Split(best, self.computed_pages(best) * self._pace.page_tokens, max(ends))
