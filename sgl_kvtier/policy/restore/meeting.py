"""The search for the meeting page of one restoration, where the prefill cursor and the load cursor
meet. Each step of a planner makes this search for each request for which it loads, so values that
do not depend on the meeting page are looked up once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.types import Link, Span

Runs: TypeAlias = list[tuple[int, int]]
"""Page ranges as (first, one past the last), in ascending order."""
Ends: TypeAlias = Callable[[int], tuple[float, float]]
"""meeting page -> (when compute ends, when loads end), in seconds from now."""


class Meeting(NamedTuple):
    """The meeting page of one stage (`OpenPages.later`)."""

    first: int
    """The first page of the stage."""
    meet: int
    """Open pages below this one are computed, the others are loaded."""
    tokens: int
    """Number of tokens to compute."""


class Split(NamedTuple):
    """The meeting page of a restoration: with several stages, that of the first one with loads."""

    meet: int
    """Open pages below this one are computed, the others are loaded."""
    compute_tokens: int
    """Number of tokens to compute, up to the stage of `meet`."""
    seconds: float
    """When both compute and loads are done, in seconds from now."""
    stages: tuple[Meeting, ...] = ()
    """The meeting of each stage, the lowest first; empty if there is only one stage."""

    def loaded(self, units: int) -> list[Span]:
        """The pages below `units` that are loaded, as far as they are open."""
        if not self.stages:
            return [Span(self.meet, units)]
        stops = [*(stage.first for stage in self.stages[1:]), units]
        return [Span(stage.meet, stop) for stage, stop in zip(self.stages, stops, strict=True)]


@dataclass(slots=True)
class Speeds:
    """What determines how fast pages are computed and loaded."""

    page_tokens: int
    page_bytes: int
    chunk_tokens: int
    """The most tokens of one prefill step."""
    cost: PrefillCost
    """Seconds of prefill."""
    bandwidth: Bandwidth
    """Bytes per second of each link."""
    backlog_s: Mapping[Link, float]
    """Seconds of work that each link already has queued."""


class LinkWork(NamedTuple):
    """What one link could load of a restoration."""

    runs: Runs
    """The open pages that it could load."""
    backlog_s: float
    """Seconds until the link can start on them."""
    latency_s: float
    """Seconds that a transfer takes in addition to its bytes."""
    bytes_per_s: float
    in_flight_s: float
    """Seconds until this request's own loads in flight complete; 0 if it has none, since it does
    not wait for loads of other requests.
    """


class Hole(NamedTuple):
    """A hole after the prefill cursor; it is computed once all pages before it are there."""

    first: int
    """The first page of the hole."""
    compute_s: float
    """Seconds to compute this hole and all later ones."""


class OpenPages(NamedTuple):
    """The open pages of a restoration: those that are neither computed, loaded nor in flight.
    Nothing here depends on the cost of compute or on the meeting page.
    """

    runs: Runs
    """The pages that may be computed or loaded."""
    compute_only: int
    """Number of pages that can only be computed."""
    holes: list[Hole]
    """The holes after the prefill cursor, the last one first."""
    links: list[LinkWork]
    top: int
    """The highest possible meeting page."""
    later: tuple[tuple[int, OpenPages], ...] = ()
    """Further stages, each as its first page and its open pages. A new stage begins where the pages
    further up are loaded over links that load no page below; the fields above then describe the
    lowest stage only. Each stage has its own meeting page: all links work at the same time, and
    compute reaches a stage when the one before it is done.
    """


def stages_of(sources: Sequence[tuple[Link, Sequence[Span]]]) -> tuple[int, ...]:
    """The first page of each stage but the lowest. No link loads pages on both sides of one."""
    ends = sorted((spans[0].start, spans[-1].stop) for _, spans in sources if spans)
    found, reach = list[int](), 0
    for place, (start, stop) in enumerate(ends):
        if place and start >= reach:
            found.append(reach)
        reach = max(reach, stop)
    return tuple(found)


def open_of(
    speeds: Speeds,
    pointer: TwoPointer,
    sources: Sequence[tuple[Link, Sequence[Span]]],
    front: int,
    in_flight: Mapping[Link, int],
    taken_back: bool = False,
    stages: Sequence[int] = (),
    anchor_bytes: int = 0,
) -> OpenPages:
    """The open pages of a restoration whose prefill cursor is at page `front`. `sources`: disjoint
    page spans by the link they are loaded over. `in_flight`: its number of pages in flight by link.
    `taken_back`: pages in flight count as open, as if their loads could be cancelled. `stages`:
    result of `stages_of`. `anchor_bytes`: loaded in addition to the last pages.
    """
    firsts = [first for first in stages if first > front]
    if not firsts:
        whole = Span(front, pointer.units)
        return _stage(speeds, pointer, sources, whole, in_flight, taken_back, anchor_bytes)
    parts, least = [], 0
    for low, high in zip((front, *firsts), (*firsts, pointer.units), strict=True):
        within = [source for source in sources if least < source[1][-1].stop <= high]
        part = _stage(speeds, pointer, within, Span(low, high), in_flight, taken_back, anchor_bytes)
        parts.append((low, part))
        least = high
    return parts[0][1]._replace(later=tuple(parts[1:]))


def _stage(
    speeds: Speeds,
    pointer: TwoPointer,
    sources: Sequence[tuple[Link, Sequence[Span]]],
    within: Span,
    in_flight: Mapping[Link, int],
    taken_back: bool,
    anchor_bytes: int,
) -> OpenPages:
    front, end = within.start, within.stop
    runs = pointer.unlanded_runs(front) if taken_back else pointer.free_runs(front)
    if end < pointer.units:
        runs = [(low, min(high, end)) for low, high in runs if low < end]
    bandwidth, backlogs_s = speeds.bandwidth, speeds.backlog_s
    links = []
    for link, spans in sources:
        backlog_s, own = backlogs_s.get(link, 0.0), in_flight.get(link, 0)
        if own and taken_back:
            # `runs` includes these pages already.
            backlog_s, own = (
                max(0.0, backlog_s - bandwidth.seconds(link, own * speeds.page_bytes)),
                0,
            )
        later_s = backlog_s
        if anchor_bytes and spans[-1].stop == pointer.units:
            later_s += anchor_bytes / bandwidth.bytes_per_second(link)
        pieces = [
            (low if low > span.start else span.start, high if high < span.stop else span.stop)
            for span in spans
            for low, high in runs
            if low < span.stop and span.start < high
        ]
        links.append(
            LinkWork(
                pieces,
                later_s,
                bandwidth.latency_s(link),
                bandwidth.bytes_per_second(link),
                backlog_s if own else 0.0,
            )
        )
    top = end if taken_back else max(front, runs[-1][1]) if runs else front
    lost = pointer.lost_in(within)
    return OpenPages(runs, lost, _holes(speeds, pointer, within) if lost else [], links, top)


def _holes(speeds: Speeds, pointer: TwoPointer, within: Span) -> list[Hole]:
    holes, seconds, page = list[Hole](), 0.0, speeds.page_tokens
    for low, stop in reversed(pointer.lost_runs(within.start)):
        high = min(stop, within.stop)
        if low < high:
            seconds += speeds.cost.range_seconds(
                low * page, (high - low) * page, speeds.chunk_tokens
            )
            holes.append(Hole(low, seconds))
    return holes


def best_split(
    speeds: Speeds,
    compute_at_s: float,
    left: OpenPages,
    front: int,
    guess: int = -1,
    charge: float = 1.0,
) -> Split:
    """The meeting page at which compute and loads are predicted to finish together, or the one of
    its two neighbours that finishes sooner. The higher it is, the later compute ends and the sooner
    loads do.

    Compute begins `compute_at_s` seconds from now at page `front`. `guess` is the meeting page of
    the last step; it changes the duration of the search, not its result. `charge` is the weight of
    a second of compute.
    """
    if left.later:
        return _in_stages(speeds, compute_at_s, left, front, guess, charge)
    ends = _ends(speeds, charge, compute_at_s, front, left)
    meet, seconds = _crossing(ends, front, left.top, guess)
    pages = _computed_pages(left.runs, left.compute_only, meet)
    return Split(meet, pages * speeds.page_tokens, seconds)


def _in_stages(
    speeds: Speeds, compute_at_s: float, left: OpenPages, front: int, guess: int, charge: float
) -> Split:
    """The best meeting of each stage, the lowest first: the sooner compute finishes one stage, the
    sooner it can help with the next.
    """
    meet, tokens, loads = front, 0, False
    found = []
    seconds = 0.0
    for low, part in ((front, left._replace(later=())), *left.later):
        first = max(low, front)
        split = best_split(speeds, max(compute_at_s, seconds), part, first, guess, charge)
        seconds = max(seconds, split.seconds)
        found.append(Meeting(first, split.meet, split.compute_tokens))
        if not loads:
            meet, tokens = max(meet, split.meet), tokens + split.compute_tokens
            loads = bool(part.runs) and split.meet < part.top
    return Split(meet, tokens, seconds, tuple(found))


def _computed_pages(runs: Runs, compute_only: int, meet: int) -> int:
    """Number of pages to compute: open ones below `meet`, and those that can only be computed."""
    pages = compute_only
    for low, high in runs:
        if low < meet:
            pages += (high if high < meet else meet) - low
    return pages


def _ends(speeds: Speeds, charge: float, compute_at_s: float, front: int, left: OpenPages) -> Ends:
    runs, compute_only, holes, links, _, _ = left
    breaks = len(holes)
    page_tokens, page_bytes, chunk_tokens, cost = (
        speeds.page_tokens,
        speeds.page_bytes,
        speeds.chunk_tokens,
        speeds.cost,
    )
    fixed_s, per_token_s, per_position_s = (
        charge * cost.fixed_s,
        charge * cost.per_token_s,
        charge * cost.per_token_position_s,
    )
    start = front * page_tokens

    def ends(meet: int) -> tuple[float, float]:
        pages = _computed_pages(runs, compute_only, meet)
        computed_s = 0.0
        if pages:
            # PrefillCost.range_seconds, inlined because each step's search evaluates it many times.
            tokens = pages * page_tokens
            work_s = tokens * (per_token_s + per_position_s * (start + tokens / 2))
            computed_s = compute_at_s + ((breaks - (-tokens // chunk_tokens)) * fixed_s + work_s)
        loaded_s = 0.0
        for pieces, backlog_s, latency_s, bytes_per_s, in_flight_s in links:
            pages = 0
            for low, high in pieces:
                if high > meet:
                    pages += high - (low if low > meet else meet)
            end_s = (
                backlog_s + (latency_s + pages * page_bytes / bytes_per_s) if pages else in_flight_s
            )
            if end_s > loaded_s:
                loaded_s = end_s
        for first, compute_s in holes:
            end_s = _loaded_between(meet, first, links, page_bytes)
            if end_s:
                loaded_s = max(loaded_s, end_s + charge * compute_s)
        return computed_s, loaded_s

    return ends


def _loaded_between(meet: int, first: int, links: list[LinkWork], page_bytes: int) -> float:
    """Seconds until the open pages from `meet` up to page `first` are loaded, if links load them
    before all others; 0 if there are none.
    """
    loaded_s = 0.0
    for pieces, backlog_s, latency_s, bytes_per_s, _ in links:
        pages = 0
        for low, high in pieces:
            pages += max(0, min(high, first) - max(low, meet))
        if pages:
            loaded_s = max(loaded_s, backlog_s + (latency_s + pages * page_bytes / bytes_per_s))
    return loaded_s


def _crossing(ends: Ends, low: int, high: int, guess: int) -> tuple[int, float]:
    """The page in [low, high] at which the later of compute and loads finishes soonest, and the
    seconds until then. The higher the page, the later compute ends and the sooner loads do. So it
    is the first page at which compute ends last, or the page before it.
    """
    at_low: tuple[float, float] | None = None
    at_high: tuple[float, float] | None = None
    if low < guess < high:
        # Invariant from here on, for ends evaluated so far: at `low` compute ends first, at `high`
        # loads do.
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
        # Both ends are nearly linear in the page, so interpolation lands close. Bisection in every
        # other step bounds the number of steps.
        slack, lead = at_low[1] - at_low[0], at_high[0] - at_high[1]
        middle = (
            low + round((high - low) * slack / (slack + lead)) if straight else (low + high) // 2
        )
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
