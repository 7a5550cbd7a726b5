"""What a waiting request is predicted to take, behind the restorations before it in the queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_hands import COST, ENGINE, balance, profile_of, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import ChunkStarted, RequestFinished, StepView
from sgl_kvtier.policy.restore.forecast import Outlook
from sgl_kvtier.policy.restore.meeting import Speeds, best_split, open_of
from sgl_kvtier.policy.restore.offers import Offers
from sgl_kvtier.policy.restore.planner import free
from sgl_kvtier.policy.restore.restorations import Restoration, Restorations
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Span, Tier

PAGES, SUFFIX = 256, 64
SOURCES = ((Span(0, PAGES), Tier.STORAGE),)
TOKENS = PAGES * ENGINE.page_tokens
COMPUTE_S = COST.range_seconds(0, TOKENS, ENGINE.chunk_tokens)
VIEW = StepView(0.0, ("a",), prefill_tokens=512)


def restorations() -> Restorations:
    """With as much to compute as to load."""
    return Restorations(PolicyConfig(), ENGINE, profile_of(COST, balance(TOKENS)), Rules())


def item(rid: str, order: int) -> Restoration:
    return Restoration(rid, order, TOKENS + SUFFIX, TwoPointer(0, PAGES), SOURCES)


def outlook(*restoring: str) -> Outlook:
    """Of a planner that restores these."""
    known = restorations()
    made = Outlook(known)
    offers = Offers(known, made, free)
    for rid in restoring:
        offers.add(stored(rid))
        offers.answer(replace(VIEW, waiting=(rid,)))
    return made


def asked(made: Outlook, *waiting: str, **view: object) -> tuple[float, float]:
    """Seconds until request a is computed, and until it is loaded."""
    forecast = made.forecast_in_queue(replace(VIEW, waiting=waiting, **view), "a")  # type: ignore[arg-type]
    return forecast.compute_only(item("a", 9)), forecast.load_only(item("a", 9))


def test_one_that_is_first_has_compute_and_links_to_itself() -> None:
    assert asked(outlook(), "a") == pytest.approx((COMPUTE_S, COMPUTE_S))


def test_one_behind_a_restoration_gets_compute_and_links_when_that_is_done_with_them() -> None:
    compute_s, load_s = asked(outlook("b"), "b", "a")
    suffix_s = COST.range_seconds(TOKENS, SUFFIX, ENGINE.chunk_tokens)
    assert compute_s == pytest.approx(1.5 * COMPUTE_S + suffix_s, rel=0.1), "half and its suffix"
    assert load_s == pytest.approx(1.5 * COMPUTE_S, rel=0.1), "half of it is loaded"


def test_every_restoration_before_it_counts() -> None:
    compute_s, load_s = asked(outlook("b", "c"), "b", "c", "a")
    assert compute_s > asked(outlook("b"), "b", "a")[0] + 0.3 * COMPUTE_S
    assert load_s > asked(outlook("b"), "b", "a")[1] + 0.3 * COMPUTE_S


def test_restorations_behind_it_in_the_queue_do_not_count() -> None:
    assert asked(outlook("b"), "a", "b") == asked(outlook(), "a", "b")


def test_the_slots_holder_counts_wherever_it_stands() -> None:
    assert asked(outlook("b"), "a", slot="b")[0] > 1.4 * COMPUTE_S


def test_one_that_is_not_in_the_queue_yet_is_behind_all() -> None:
    assert asked(outlook("b"), "b") == asked(outlook("b"), "b", "a")


def test_fresh_prefill_before_it_takes_compute_alone() -> None:
    compute_s, load_s = asked(outlook(), "a", fresh_tokens=512)
    fresh_s = COST.range_seconds(0, 512, ENGINE.chunk_tokens)
    assert (compute_s, load_s) == pytest.approx((COMPUTE_S + fresh_s, COMPUTE_S))


def test_fresh_prefill_behind_it_in_the_queue_does_not_count() -> None:
    behind = {"fresh_tokens": 512, "fresh": (0, 512)}
    assert asked(outlook(), "a", "f", **behind) == asked(outlook(), "a")
    assert asked(outlook(), "f", "a", fresh_tokens=512, fresh=(512, 0))[0] > COMPUTE_S


def test_offers_of_one_step_are_answered_in_the_order_of_the_queue() -> None:
    known = restorations()
    offers = Offers(known, Outlook(known), free)
    for rid in ("late", "early"):
        offers.add(stored(rid))
    starts = offers.answer(replace(VIEW, waiting=("early", "late")))
    assert [start.rid for start in starts] == ["early", "late"]


@pytest.mark.parametrize(("tokens", "pages"), [(1.0, 1), (1.5, 2), (2.0, 2)])
def test_a_page_that_a_chunk_ends_in_belongs_to_compute(tokens: float, pages: int) -> None:
    known, one = restorations(), item("a", 1)
    known.begin(one)
    known.observe(ChunkStarted("a", Span(0, int(tokens * ENGINE.page_tokens)), 0.0))
    assert one.pointer.front == pages


def test_a_link_has_no_reader_left_when_its_restorations_have_ended() -> None:
    known = restorations()
    for rid in "ab":
        known.begin(item(rid, 1))
    assert sum(known.readers.values()) == 2
    for rid, left in (("a", 1), ("b", 0)):
        known.observe(RequestFinished(rid, 0.0))
        assert sum(known.readers.values()) == left


# The search for the meeting page against trying every page.


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
        Speeds(PAGE, PAGE_BYTES, CHUNK, cost, bandwidth, backlog_s),
        draw(st.floats(0, 0.5)),
        pointer,
        sources,
        in_flight,
    )


def ends(speeds, at_s, pointer, sources, meet, in_flight, taken_back):
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
        + speeds.cost.range_seconds(pointer.front * PAGE, computed * PAGE, CHUNK)
        + len(holes) * speeds.cost.fixed_s
        if computed
        else 0.0
    )
    loaded_s = 0.0
    for link, spans in sources:
        loads = [page for page in free if page >= meet and any(page in span for span in spans)]
        behind_s, own = speeds.backlog_s.get(link, 0.0), in_flight.get(link, 0)
        if taken_back:
            behind_s, own = max(0.0, behind_s - speeds.bandwidth.seconds(link, own * PAGE_BYTES)), 0

        def until_s(pages: int) -> float:
            return behind_s + speeds.bandwidth.seconds(link, pages * PAGE_BYTES)  # noqa: B023

        if loads or own:  # what a link does for others alone is nothing to this request
            loaded_s = max(loaded_s, until_s(len(loads)))
        for place, (low, _) in enumerate(holes):
            # A hole is computed when the pages before it are there, and so are those behind it.
            pages = sum(page < low for page in loads)
            rest_s = sum(
                speeds.cost.range_seconds(first * PAGE, (stop - first) * PAGE, CHUNK)
                for first, stop in holes[place:]
            )
            loaded_s = max(loaded_s, until_s(pages) + rest_s if pages else 0.0)
    return computed_s, loaded_s


@settings(max_examples=examples(60), deadline=None)
@given(st.booleans().flatmap(races), st.integers(-1, 45), st.booleans())
def test_no_page_is_better_and_where_they_met_before_changes_nothing(race, guess, recall):
    speeds, at_s, pointer, sources, in_flight = race
    left = open_of(speeds, pointer, sources, pointer.front, in_flight, recall)
    split = best_split(speeds, at_s, left, pointer.front)
    assert best_split(speeds, at_s, left, pointer.front, guess) == split
    every = [
        max(ends(speeds, at_s, pointer, sources, meet, in_flight, recall))
        for meet in range(pointer.front, pointer.units + 1)
    ]
    assert split.seconds == pytest.approx(min(every))
    assert max(
        ends(speeds, at_s, pointer, sources, split.meet, in_flight, recall)
    ) == pytest.approx(split.seconds)
