"""Where one restoration's two ends should meet: the search that every step of a planner makes for every request it loads for.

What does not depend on the meeting page is looked up once; then each page tried costs a few additions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """How fast both ends are: sizes of the engine, what compute costs, and what each link has to do already."""

    page_tokens: int
    page_bytes: int
    chunk_tokens: int
    cost: PrefillCost
    bandwidth: Bandwidth
    backlog_s: Mapping[Link, float]

    def charged(self, factor: float) -> Pace:
        """The same with compute that takes so many times as long."""
        cost = self.cost
        dearer = PrefillCost(factor * cost.fixed_s, factor * cost.per_token_s, factor * cost.per_token_position_s)
        return replace(self, cost=dearer)


def best_split(
    pace: Pace,
    compute_at_s: float,
    pointer: TwoPointer,
    sources: Sequence[tuple[Link, Sequence[Span]]],
    front: int,
    own: Mapping[Link, int] | None = None,
    guess: int = -1,
) -> Split:
    """The page at which both ends of a restoration are predicted to finish together, or the sooner of its two neighbours.

    Compute begins `compute_at_s` from now at page `front`; `sources` are disjoint page spans by the link they come over.
    `own` are pages under way by link that are counted as open again, as if their loads could be taken back; None leaves them
    where they are. `guess` is where they were to meet a step ago: it changes how long this takes, not what comes out, for
    compute ends no sooner, and loads no later, the higher they meet.
    """
    page_tokens, page_bytes, chunk_tokens = pace.page_tokens, pace.page_bytes, pace.chunk_tokens
    fixed_s, per_token_s, per_position_s = pace.cost.fixed_s, pace.cost.per_token_s, pace.cost.per_token_position_s
    bandwidth, backlogs_s = pace.bandwidth, pace.backlog_s
    start = front * page_tokens
    runs = pointer.free_runs(front) if own is None else pointer.unlanded_runs(front)
    stuck = pointer.lost_from(front)
    roads: list[tuple[list[tuple[int, int]], float, float, float]] = []
    for link, spans in sources:
        backlog_s = backlogs_s.get(link, 0.0)
        if own and backlog_s:
            # These are counted among the pages already.
            backlog_s = max(0.0, backlog_s - bandwidth.seconds(link, own.get(link, 0) * page_bytes))
        pieces = [
            (low if low > span.start else span.start, high if high < span.stop else span.stop)
            for span in spans
            for low, high in runs
            if low < span.stop and span.start < high
        ]
        roads.append((pieces, backlog_s, bandwidth.latency_s(link), bandwidth.bytes_per_second(link)))
    least_s = 0.0
    for link, backlog_s in backlogs_s.items():
        if backlog_s > least_s and all(link is not other for other, _ in sources):
            least_s = backlog_s

    def computed_pages(meet: int) -> int:
        """Open pages below the meeting page, and those above it that can only be computed."""
        pages = stuck
        for low, high in runs:
            if low < meet:
                pages += (high if high < meet else meet) - low
        return pages

    def ends(meet: int) -> tuple[float, float]:
        """When compute and loads end, in seconds from now."""
        pages = computed_pages(meet)
        computed_s = 0.0
        if pages:
            # PrefillCost.range_seconds, written out: a search asks for it in every step.
            tokens = pages * page_tokens
            work_s = tokens * (per_token_s + per_position_s * (start + tokens / 2))
            computed_s = compute_at_s + (-(-tokens // chunk_tokens) * fixed_s + work_s)
        loaded_s = least_s
        for pieces, backlog_s, latency_s, bytes_per_s in roads:
            pages = 0
            for low, high in pieces:
                if high > meet:
                    pages += high - (low if low > meet else meet)
            end_s = backlog_s + (latency_s + pages * page_bytes / bytes_per_s) if pages else backlog_s
            if end_s > loaded_s:
                loaded_s = end_s
        return computed_s, loaded_s

    # Above the last page still to be loaded nothing changes with the meeting page. It is in (low, high]: compute ends
    # first at low, loads at high.
    low, high = front, pointer.units if own is not None else max(front, runs[-1][1] if runs else 0)
    at_low: tuple[float, float] | None = None
    at_high: tuple[float, float] | None = None
    if low < guess < high:
        at_guess = ends(guess)
        if at_guess[0] < at_guess[1]:
            low, at_low = guess, at_guess
            if guess + 1 < high:
                at_next = ends(guess + 1)
                if at_next[0] < at_next[1]:
                    low, at_low = guess + 1, at_next
                else:
                    high, at_high = guess + 1, at_next
        else:
            high, at_high = guess, at_guess
            if guess - 1 > low:
                at_next = ends(guess - 1)
                if at_next[0] < at_next[1]:
                    low, at_low = guess - 1, at_next
                else:
                    high, at_high = guess - 1, at_next
    if at_low is None:
        at_low = ends(low)
    if at_high is None:
        at_high = ends(high) if high > low else at_low
    if at_low[0] >= at_low[1]:
        high, at_high = low, at_low
    elif at_high[0] < at_high[1]:
        low, at_low = high, at_high
    straight = True
    while high - low > 1:
        # Both ends are nearly straight lines, so interpolation lands close; halving in between bounds the steps.
        slack, lead = at_low[1] - at_low[0], at_high[0] - at_high[1]
        middle = low + round((high - low) * slack / (slack + lead)) if straight else (low + high) // 2
        middle, straight = min(max(middle, low + 1), high - 1), not straight
        at_middle = ends(middle)
        if at_middle[0] < at_middle[1]:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    best, at_best = (low, at_low) if max(at_low) <= max(at_high) else (high, at_high)
    return Split(best, computed_pages(best) * page_tokens, max(at_best))
