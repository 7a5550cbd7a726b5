"""The search for the meeting page against trying every page."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.restore.meeting import Pace, best_split, open_of
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.types import Link, Span

PAGE, PAGE_BYTES, CHUNK = 16, 1000, 64
SSD, DRAM, DOWN = Link.STORAGE_TO_DEVICE, Link.HOST_TO_DEVICE, Link.DEVICE_TO_HOST


@st.composite
def races(draw, one_link=False):
    """A restoration somewhere on its way, the speeds of both ends, and what the links have to do."""
    units = draw(st.integers(1, 40))
    pointer = TwoPointer(0, units)
    in_flight: dict[Link, int] = {}
    cut = 0 if one_link else draw(st.integers(0, units))
    parts = [(DRAM, Span(0, cut)), (SSD, Span(cut, units))]
    for _ in range(draw(st.integers(0, 6))):
        link, within = draw(st.sampled_from(parts))
        span = pointer.take_back(draw(st.integers(1, 6)), within, draw(st.integers(0, units)))
        end = draw(st.sampled_from(["landed", "lost", "loading"]))
        if end == "loading":
            in_flight[link] = in_flight.get(link, 0) + len(span)
        elif end == "landed":
            pointer.land(span)
        else:
            pointer.lose(span)
    pointer.take_front(draw(st.integers(0, units)))
    cost = PrefillCost(
        *(draw(st.sampled_from([0.0, 1e-3, 1e-2])) for _ in range(2)),
        draw(st.sampled_from([0.0, 1e-5])),
    )
    rates = {link: draw(st.sampled_from([1e3, 1e5, 1e6])) for link in (SSD, DRAM)}
    bandwidth = Bandwidth(rates, {SSD: draw(st.sampled_from([0.0, 0.01]))})
    backlog_s = {
        link: draw(st.floats(0.001, 0.5)) for link in (SSD, DRAM, DOWN) if draw(st.booleans())
    }
    sources = [(link, [span]) for link, span in parts if span]
    return (
        Pace(PAGE, PAGE_BYTES, CHUNK, cost, bandwidth, backlog_s),
        draw(st.floats(0, 0.5)),
        pointer,
        sources,
        in_flight,
    )


def ends(pace, at_s, pointer, sources, meet, in_flight, taken_back):
    """When compute and loads end if they meet there, counted page by page."""
    states = [(page, Span(page, page + 1)) for page in range(pointer.front, pointer.units)]
    loading = pointer.unlanded_runs(pointer.front)
    free = [page for page, one in states if pointer.free_in(one)]
    if taken_back:
        free = [page for low, high in loading for page in range(low, high)]
    lost = sum(pointer.lost_in(one) for _, one in states)
    computed = sum(page < meet for page in free) + lost
    holes = pointer.lost_runs(pointer.front)
    computed_s = (
        at_s
        + pace.cost.range_seconds(pointer.front * PAGE, computed * PAGE, CHUNK)
        + len(holes) * pace.cost.fixed_s
        if computed
        else 0.0
    )
    loaded_s = 0.0
    for link, spans in sources:
        loads = [page for page in free if page >= meet and any(page in span for span in spans)]
        behind_s, own = pace.backlog_s.get(link, 0.0), in_flight.get(link, 0)
        if taken_back:
            behind_s, own = max(0.0, behind_s - pace.bandwidth.seconds(link, own * PAGE_BYTES)), 0

        def until_s(pages: int) -> float:
            return behind_s + pace.bandwidth.seconds(link, pages * PAGE_BYTES)  # noqa: B023

        if loads or own:  # what a link does for others alone is nothing to this request
            loaded_s = max(loaded_s, until_s(len(loads)))
        for place, (low, _) in enumerate(holes):
            # A hole is computed when the pages before it are there, and so are those behind it.
            pages = sum(page < low for page in loads)
            rest_s = sum(
                pace.cost.range_seconds(first * PAGE, (stop - first) * PAGE, CHUNK)
                for first, stop in holes[place:]
            )
            loaded_s = max(loaded_s, until_s(pages) + rest_s if pages else 0.0)
    return computed_s, loaded_s


@settings(max_examples=examples(60), deadline=None)
@given(st.booleans().flatmap(races), st.integers(-1, 45), st.booleans())
def test_no_page_is_better_and_where_they_met_before_changes_nothing(race, guess, recall):
    pace, at_s, pointer, sources, in_flight = race
    left = open_of(pace, pointer, sources, pointer.front, in_flight, recall)
    split = best_split(pace, at_s, left, pointer.front)
    assert best_split(pace, at_s, left, pointer.front, guess) == split
    every = [
        max(ends(pace, at_s, pointer, sources, meet, in_flight, recall))
        for meet in range(pointer.front, pointer.units + 1)
    ]
    assert split.seconds == pytest.approx(min(every))
    assert max(ends(pace, at_s, pointer, sources, split.meet, in_flight, recall)) == pytest.approx(
        split.seconds
    )


def test_pages_in_flight_are_waited_for_although_the_rest_is_computed():
    pointer = TwoPointer(0, 10)
    pointer.take_back(3)
    bandwidth = Bandwidth({SSD: 1e6})
    pace = Pace(PAGE, PAGE_BYTES, CHUNK, PrefillCost(1e-6, 0.0, 0.0), bandwidth, {SSD: 0.4})
    left = open_of(pace, pointer, [(SSD, [Span(0, 10)])], 0, {SSD: 3})
    assert best_split(pace, 0.0, left, 0).seconds == pytest.approx(0.4)


def test_every_hole_above_the_meeting_is_computed_behind_the_one_before():
    pointer = TwoPointer(0, 20)
    pointer.lack(Span(8, 10))
    pointer.lack(Span(14, 16))
    sources = [(SSD, [Span(0, 20)])]
    pace = Pace(PAGE, PAGE_BYTES, CHUNK, PrefillCost(0.0, 1e-3, 0.0), Bandwidth({SSD: 1e6}), {})
    split = best_split(pace, 0.0, open_of(pace, pointer, sources, 0, {}), 0)
    every = [max(ends(pace, 0.0, pointer, sources, meet, {}, False)) for meet in range(21)]
    assert split.seconds == pytest.approx(min(every))
