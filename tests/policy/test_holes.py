"""Pages that no tier has are computed, and what is stored behind them is used."""

from dataclasses import replace

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_leave import VIEW, planner
from test_restore import covered
from virtual_hands import COST, ENGINE, balance, planner_of, profile_of, restore, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import CacheFlow, Cake, FixedSplit
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import LeftToEngine, Mode, RestoreOffered, StepView
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Span, Tier

PAGES = 256
PREFIX = PAGES * ENGINE.page_tokens


def offer(*spans: Span, pages: int = PAGES, rid: str = "a") -> RestoreOffered:
    """A prompt of which these pages are stored, and no others."""
    return stored(rid, pages, *((span, Tier.STORAGE) for span in spans))


def seconds(holes: frozenset[int], ratio: float = 1.0) -> float:
    bytes_per_s = balance(PREFIX, ratio)
    return restore(PREFIX, bytes_per_s, profile=profile_of(COST, bytes_per_s), holes=holes).seconds


@settings(max_examples=examples(60), deadline=None)
@given(
    st.frozensets(st.integers(0, PAGES - 1), max_size=PAGES),
    st.sampled_from([1 / 4, 1, 4]),
    st.sampled_from([Rules(), Cake(), CacheFlow(), FixedSplit(0.0), FixedSplit(0.5)]),
    st.sampled_from(["auto", "both", "load"]),
)
def test_wherever_the_holes_are_they_are_computed_and_every_page_comes_once(
    holes, ratio, rules, restored
):
    bytes_per_s = balance(PREFIX, ratio)
    planner = planner_of(bytes_per_s, rules, restore=restored)
    out = restore(PREFIX, bytes_per_s, planner=planner, holes=holes)
    pages = [page for page in covered(out) if page < PAGES]
    assert sorted(pages) == list(range(PAGES))


@pytest.mark.parametrize("first", [1, 8])
def test_without_its_first_pages_a_prefix_takes_little_longer(first):
    assert seconds(frozenset(range(first))) < 1.05 * seconds(frozenset())


@pytest.mark.parametrize("page", [1, PAGES // 4, PAGES // 2, PAGES - 2])
def test_a_missing_page_costs_a_chunk_at_most(page):
    whole = seconds(frozenset())
    assert whole <= seconds(frozenset({page})) < whole + 2.5 * COST.chunk_seconds(PREFIX, 16)


def test_where_every_second_page_is_missing_all_is_computed_in_whole_chunks():
    holes = frozenset(range(0, PAGES, 2))
    bytes_per_s = balance(PREFIX)
    out = restore(PREFIX, bytes_per_s, profile=profile_of(COST, bytes_per_s), holes=holes)
    assert not out.loads
    assert len(out.chunks) <= 1 + PREFIX // ENGINE.chunk_tokens


def test_few_pages_between_two_holes_are_computed_with_them():
    one = planner(storage=balance(PREFIX, 100), restore="both")
    one.observe(offer(Span(0, 100), Span(101, 104), Span(105, PAGES)))
    loads = one.step(VIEW).loads
    loaded = {page for load in loads for page in range(load.span.start, load.span.stop)}
    assert loaded.isdisjoint(range(100, 105))
    assert loaded.issuperset(range(110, PAGES))


def test_where_tokens_cost_little_whole_chunks_behind_a_hole_are_loaded():
    """As on a small model: 0.1 s for a chunk, whatever its length."""
    profile = profile_of(PrefillCost(0.1, 1e-7), 1e9)
    for span, loaded in ((Span(1, PAGES), True), (Span(1, 32), False)):
        one = make_planner(PolicyConfig(restore="both"), ENGINE, profile)
        one.observe(offer(span, pages=span.stop))
        assert bool(one.step(VIEW).loads) is loaded


def test_a_prefix_with_a_hole_is_not_only_loaded():
    one = planner(storage=balance(PREFIX, 100), restore="load")
    one.observe(offer(Span(1, PAGES)))
    (start,) = one.step(VIEW).starts
    assert start.mode is Mode.BOTH


@pytest.mark.parametrize("known", [True, False])
def test_what_an_engine_could_not_read_for_a_hole_before_it_is_not_left_to_it(known):
    behind_a_hole = LeftToEngine(offer(Span(1, PAGES)), VIEW)
    speed = balance(PREFIX) if known else None
    assert planner(storage=speed).query(behind_a_hole) is None
    whole = LeftToEngine(offer(Span(0, PAGES)), VIEW)
    assert planner().query(whole) == "not measured yet"


def test_an_engine_that_reads_up_to_a_hole_is_asked_to_compute_the_rest():
    fast = planner(storage=balance(PREFIX, 100))
    nearly_all = LeftToEngine(offer(Span(0, PAGES - 4), Span(PAGES - 3, PAGES)), VIEW)
    assert fast.query(nearly_all) == "loading is faster"
    half = LeftToEngine(offer(Span(0, PAGES // 2), Span(PAGES // 2 + 1, PAGES)), VIEW)
    assert fast.query(half) is None


def test_what_is_not_worth_loading_behind_a_hole_is_computed():
    one = planner(storage=balance(PREFIX))
    few = offer(Span(PAGES - 2, PAGES))
    assert one.query(LeftToEngine(few, VIEW)) == "computing is faster"
    slow = planner(storage=balance(PREFIX, 1 / 1000))
    assert slow.query(LeftToEngine(offer(Span(1, PAGES)), VIEW)) == "computing is faster"


def test_room_for_holes_is_counted_while_a_restoration_is_under_way():
    holed = offer(Span(128, PAGES))
    one = planner(storage=balance(PREFIX), restore="auto")
    one.observe(holed)
    one.step(VIEW)
    other = offer(Span(0, 64), pages=64, rid="b")
    room = {Tier.DEVICE: PAGES + 64 + 8}
    view = StepView(0.0, ("a", "b"), prefill_tokens=512, free_pages=room)
    assert one.query(LeftToEngine(other, view)) != "no room"
    tight = replace(view, free_pages={Tier.DEVICE: PAGES + 64 - 128})
    assert one.query(LeftToEngine(other, tight)) == "no room"


def least_seconds(hole: Span, bytes_per_s: float) -> float:
    """The best there is with one hole: pages before it are shared by both ends, then it is computed
    while those behind it are loaded, as far as they are not computed as well.
    """

    def computed_s(first: int, stop: int) -> float:
        page = ENGINE.page_tokens
        return COST.range_seconds(first * page, (stop - first) * page, ENGINE.chunk_tokens)

    page_s = ENGINE.page_bytes / bytes_per_s
    return min(
        max(
            max(computed_s(0, meet), (hole.start - meet) * page_s) + computed_s(hole.start, end),
            (hole.start - meet + PAGES - end) * page_s,
        )
        for meet in range(hole.start + 1)
        for end in range(hole.stop, PAGES + 1)
    ) + COST.chunk_seconds(PREFIX, 64)


@pytest.mark.parametrize("hole", [Span(0, 40), Span(20, 60), Span(100, 150), Span(180, 250)])
@pytest.mark.parametrize("ratio", [1 / 2, 1, 2])
def test_while_a_long_hole_is_computed_what_lies_behind_it_is_loaded(hole, ratio):
    least_s = least_seconds(hole, balance(PREFIX, ratio))
    assert seconds(frozenset(range(hole.start, hole.stop)), ratio) < 1.1 * least_s
