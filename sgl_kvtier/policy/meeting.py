"""Where one restoration's two ends should meet: the search that every step of a planner makes for every request it loads for.

What does not depend on the meeting page is looked up once; then each page tried costs a few additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sgl_kvtier.policy.bandwidth import Bandwidth
from sgl_kvtier.policy.cost import PrefillCost
from sgl_kvtier.policy.two_pointer import TwoPointer
from sgl_kvtier.types import Link, Span

Runs: TypeAlias = list[tuple[int, int]]
"""Pages as (first, behind the last), ascending."""
Ends: TypeAlias = Callable[[int], tuple[float, float]]
"""When compute and loads end if they meet at a page, in seconds from now."""
Road: TypeAlias = tuple[Runs, float, float, float]


class Split(NamedTuple):
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


class Open(NamedTuple):
    """What both ends have yet to share of a restoration, whatever compute costs and wherever they meet.

    `runs` are the open pages, `stuck` counts those that can only be computed. `roads`: of each link the open pages it could
    bring, when it is free for them, its latency, and its bytes per second. `least_s`: when all other links are done. `top`:
    above this page nothing changes with the meeting page.
    """

    runs: Runs
    stuck: int
    roads: list[Road]
    least_s: float
    top: int


def open_of(
    pace: Pace,
    pointer: TwoPointer,
    sources: Sequence[tuple[Link, Sequence[Span]]],
    front: int,
    own: Mapping[Link, int] | None = None,
) -> Open:
    """What is open of a restoration whose front is at a page. `sources` are disjoint page spans by the link they come over;
    `own` are pages under way by link that are counted as open again, as if their loads could be taken back; None leaves them
    where they are."""
    runs = pointer.free_runs(front) if own is None else pointer.unlanded_runs(front)
    bandwidth, backlogs_s = pace.bandwidth, pace.backlog_s
    roads, busy = [], 0
    for link, spans in sources:
        backlog_s = backlogs_s.get(link, 0.0)
        busy += link in backlogs_s
        if own and backlog_s:
            # These are counted among the pages already.
            backlog_s = max(0.0, backlog_s - bandwidth.seconds(link, own.get(link, 0) * pace.page_bytes))
        pieces = [
            (low if low > span.start else span.start, high if high < span.stop else span.stop)
            for span in spans
            for low, high in runs
            if low < span.stop and span.start < high
        ]
        roads.append((pieces, backlog_s, bandwidth.latency_s(link), bandwidth.bytes_per_second(link)))
    least_s = 0.0
    if busy < len(backlogs_s):
        own_links = dict(sources)
        least_s = max(backlog_s for link, backlog_s in backlogs_s.items() if link not in own_links)
    top = pointer.units if own is not None else max(front, runs[-1][1]) if runs else front
    return Open(runs, pointer.lost_from(front), roads, least_s, top)


def best_split(
    pace: Pace, compute_at_s: float, left: Open, front: int, guess: int = -1, charge: float = 1.0
) -> Split:
    """The page at which both ends of a restoration are predicted to finish together, or the sooner of its two neighbours.

    Compute begins `compute_at_s` from now at page `front`. `guess` is where they were to meet a step ago: it changes how long
    this takes, not what comes out, for compute ends no sooner, and loads no later, the higher they meet. `charge`: compute
    counts for so many times its seconds.
    """
    runs, stuck, roads, _, top = left
    of = _ends_of_one_run if len(runs) == 1 and len(roads) == 1 and roads[0][0] == runs else _ends
    meet, seconds = _crossing(of(pace, charge, compute_at_s, front, left), front, top, guess)
    return Split(meet, _computed_pages(runs, stuck, meet) * pace.page_tokens, seconds)


def _computed_pages(runs: Runs, stuck: int, meet: int) -> int:
    """Open pages below the meeting page, and those above it that can only be computed."""
    pages = stuck
    for low, high in runs:
        if low < meet:
            pages += (high if high < meet else meet) - low
    return pages


def _ends(pace: Pace, charge: float, compute_at_s: float, front: int, left: Open) -> Ends:
    runs, stuck, roads, least_s, _ = left
    page_tokens, page_bytes, chunk_tokens, cost = pace.page_tokens, pace.page_bytes, pace.chunk_tokens, pace.cost
    fixed_s, per_token_s, per_position_s = charge * cost.fixed_s, charge * cost.per_token_s, charge * cost.per_token_position_s
    start = front * page_tokens

    def ends(meet: int) -> tuple[float, float]:
        pages = _computed_pages(runs, stuck, meet)
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

    return ends


def _ends_of_one_run(pace: Pace, charge: float, compute_at_s: float, front: int, left: Open) -> Ends:
    """The same where the open pages are one run that one link brings, as nearly always: the same sums without the loops."""
    page_tokens, page_bytes, chunk_tokens, cost = pace.page_tokens, pace.page_bytes, pace.chunk_tokens, pace.cost
    fixed_s, per_token_s, per_position_s = charge * cost.fixed_s, charge * cost.per_token_s, charge * cost.per_token_position_s
    start = front * page_tokens
    ((low, high),), backlog_s, latency_s, bytes_per_s = left.roads[0]
    stuck, least_s = left.stuck, left.least_s
    idle_s = backlog_s if backlog_s > least_s else least_s

    def ends(meet: int) -> tuple[float, float]:
        pages = stuck
        if meet > low:
            pages += (meet if meet < high else high) - low
        computed_s = 0.0
        if pages:
            tokens = pages * page_tokens
            work_s = tokens * (per_token_s + per_position_s * (start + tokens / 2))
            computed_s = compute_at_s + (-(-tokens // chunk_tokens) * fixed_s + work_s)
        if meet >= high:
            return computed_s, idle_s
        end_s = backlog_s + (latency_s + (high - (low if low > meet else meet)) * page_bytes / bytes_per_s)
        return computed_s, end_s if end_s > least_s else least_s

    return ends


def _crossing(ends: Ends, low: int, high: int, guess: int) -> tuple[int, float]:
    """The page in [low, high] where the later of both ends is soonest, and when that is. Compute ends no sooner, and loads no
    later, the higher they meet: so the page is next to where compute begins to be the later one."""
    at_low: tuple[float, float] | None = None
    at_high: tuple[float, float] | None = None
    if low < guess < high:
        # From now on compute ends first at low, loads at high, as far as either was looked at.
        at_guess = ends(guess)
        by = 1 if at_guess[0] < at_guess[1] else -1
        if by > 0:
            low, at_low = guess, at_guess
        else:
            high, at_high = guess, at_guess
        if low < guess + by < high:
            at_next = ends(guess + by)
            if at_next[0] < at_next[1]:
                low, at_low = guess + by, at_next
            else:
                high, at_high = guess + by, at_next
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
        middle = low + 1 if middle <= low else high - 1 if middle >= high else middle
        straight = not straight
        at_middle = ends(middle)
        if at_middle[0] < at_middle[1]:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    low_s = at_low[0] if at_low[0] > at_low[1] else at_low[1]
    high_s = at_high[0] if at_high[0] > at_high[1] else at_high[1]
    return (low, low_s) if low_s <= high_s else (high, high_s)
