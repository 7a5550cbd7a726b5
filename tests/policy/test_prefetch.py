"""Lookahead in front of small hands: what is moved, in which order, within which bounds."""

from __future__ import annotations

import itertools
import math

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from named_parts import named, parts

from sgl_kvtier.lab.rules import TierKV
from sgl_kvtier.policy.ahead.budget import TierBudget, Turn
from sgl_kvtier.policy.ahead.prefetch import Prefetcher
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.pages.eviction import NextUse
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Tier

PAGE = 1000
"""Bytes; links carry 100 pages a second from DRAM and 10 from SSD, so that the sums are easy."""
SPEEDS = {Link.HOST_TO_DEVICE: 100.0 * PAGE, Link.STORAGE_TO_HOST: 10.0 * PAGE}
PLENTY = {Tier.DEVICE: 10_000, Tier.HOST: 10_000}
NONE = {"lookahead": 0}
FAR = {"lookahead": 1, "lookahead_ssd": 10}


class Bench:
    """A map, a prefetcher, and requests whose pages lie somewhere."""

    def __init__(self, rules=Rules, **given):
        own = {"prefetch_margin": 0.0, "load_horizon_s": 60.0, "prefetch_share": 1.0}
        self.config, self.rules = parts(rules, **{**own, **given})
        self.map = TierMap(100_000, NextUse(), NextUse())
        self.prefetcher = Prefetcher(self.config, self.map, Bandwidth(SPEEDS), PAGE, self.rules)

    def request(self, name, keys, tier, turn=math.inf):
        if tier is not None:
            self.map.placed(keys, tier, 0.0)
        self.map.claim(name, keys, turn)

    def plan(self, turns, free=None, now=0.0, iteration_s=1.0, **more):
        return self.prefetcher.plan(now, turns, free or PLENTY, iteration_s, **more)

    def land(self, moves, now):
        for move in moves:
            self.placed(move.keys, move.target, now)

    def placed(self, keys, tier, now):
        self.map.placed(keys, tier, now)
        self.prefetcher.placed(keys, tier, now)

    def dropped(self, keys, tier, now):
        self.map.dropped(keys, tier)
        self.prefetcher.dropped(keys, tier, now)


def turn(name, steps, window_s=None):
    return Turn(name, name, steps, steps * 1.0 if window_s is None else window_s)


def bench_with(tier=Tier.HOST, rules=Rules, *, own=None, **pages):
    """A bench, and requests by name with so many pages in a tier, none of which share any."""
    bench = Bench(rules, **(own or {}))
    for n, (name, count) in enumerate(pages.items()):
        bench.request(name, named(count, 1000 * n), tier)
    return bench


def count(plan):
    return sum(len(move.keys) for move in plan.moves)


def moved(plan):
    return [(move.rid, len(move.keys), move.source, move.target) for move in plan.moves]


def test_a_waiting_requests_pages_come_up_before_its_turn():
    bench = bench_with(r=50)
    plan = bench.plan([turn("r", 1)])
    assert moved(plan) == [("r", 50, Tier.HOST, Tier.DEVICE)]
    assert plan.moves[0].keys == named(50)
    assert [test.held for test in plan.tests] == [True]
    assert plan.tests[0].transfer_s == pytest.approx(0.5)


def test_what_is_in_flight_is_not_moved_again_and_what_came_is_not_either():
    bench = bench_with(r=50)
    bench.request("s", named(60), Tier.HOST)  # it begins with the same pages
    first = bench.plan([turn("r", 1), turn("s", 1)])
    assert moved(first) == [("r", 50, Tier.HOST, Tier.DEVICE), ("s", 10, Tier.HOST, Tier.DEVICE)]
    assert bench.plan([turn("r", 1), turn("s", 1)], now=0.1).moves == ()
    bench.land(first.moves, 0.6)
    assert bench.prefetcher.in_flight == 0
    assert bench.plan([turn("r", 1), turn("s", 1)], now=0.7).moves == ()


def test_bytes_are_charged_behind_those_of_earlier_turns():
    bench = bench_with(r=80, s=80)
    plan = bench.plan([turn("r", 1), turn("s", 1)])
    assert moved(plan) == [("r", 80, Tier.HOST, Tier.DEVICE), ("s", 20, Tier.HOST, Tier.DEVICE)]
    assert [test.held for test in plan.tests] == [True, False]
    assert plan.moves[1].keys == named(20, 1000)


def test_the_papers_rule_tests_every_page_by_itself():
    bench = bench_with(rules=TierKV, r=80, s=80, late=80)
    plan = bench.plan([turn("r", 1), turn("s", 1), turn("late", 2)])
    assert moved(plan) == [("r", 80, Tier.HOST, Tier.DEVICE), ("s", 80, Tier.HOST, Tier.DEVICE)]
    assert [test.held for test in plan.tests] == [True, True]


def test_the_papers_rule_takes_stored_pages_in_two_hops_where_the_window_allows_it():
    for window, expected in ((1.0, [("r", 5, Tier.STORAGE, Tier.DEVICE)]), (0.1, [])):
        bench = bench_with(Tier.STORAGE, TierKV, r=5)
        assert moved(bench.plan([turn("r", 1)], iteration_s=window)) == expected


def test_what_is_needed_next_comes_to_the_device_and_what_is_needed_later_to_host_memory_first():
    bench = bench_with(Tier.STORAGE, own=FAR, next=4, later=20)
    plan = bench.plan([turn("next", 1), turn("later", 5)])
    assert moved(plan) == [
        ("next", 4, Tier.STORAGE, Tier.DEVICE),
        ("later", 20, Tier.STORAGE, Tier.HOST),
    ]


def test_pages_on_their_way_to_host_memory_are_promoted_once_they_are_there():
    bench = bench_with(Tier.STORAGE, own=FAR, r=20)
    first = bench.plan([turn("r", 5)])
    assert bench.plan([turn("r", 1)], now=1.0).moves == ()
    bench.land(first.moves, 2.0)
    assert moved(bench.plan([turn("r", 1)], now=2.0)) == [("r", 20, Tier.HOST, Tier.DEVICE)]


def test_a_prefix_is_brought_up_to_its_first_gap():
    bench = Bench()
    keys = named(30)
    bench.map.placed(keys[:10], Tier.HOST, 0.0)
    bench.map.placed(keys[12:], Tier.HOST, 0.0)
    bench.map.claim("r", keys)
    assert [move.keys for move in bench.plan([turn("r", 1)]).moves] == [keys[:10]]


def test_what_an_earlier_request_will_claim_is_not_given_to_a_later_one():
    bench = Bench()
    bench.request("first", named(60), None)
    bench.request("second", named(50, 100), Tier.HOST)
    plan = bench.plan(
        [turn("first", 0), turn("second", 1)], free={Tier.DEVICE: 100, Tier.HOST: 100}
    )
    assert moved(plan) == [("second", 40, Tier.HOST, Tier.DEVICE)]


def test_no_page_takes_the_place_of_one_that_is_needed_sooner():
    bench = Bench()
    bench.request("soon", named(30, 500), Tier.DEVICE, turn=0.5)
    bench.request("idle", named(10, 600), Tier.DEVICE, turn=100.0)
    bench.map.placed(named(5, 700), Tier.DEVICE, 0.0)
    bench.request("r", named(50), Tier.HOST, turn=1.0)
    plan = bench.plan([turn("r", 1)], free={Tier.DEVICE: 45, Tier.HOST: 0})
    assert moved(plan) == [("r", 15, Tier.HOST, Tier.DEVICE)]
    assert [(e.tier, sorted(e.keys)) for e in plan.evictions] == [
        (Tier.DEVICE, sorted(named(10, 600) + named(5, 700)))
    ]
    assert plan.evictions[0].keys[0] in named(5, 700)


def test_the_share_of_the_device_for_prefetched_pages_is_kept_until_they_are_used():
    bench = bench_with(own={"prefetch_share": 0.2}, r=50)
    first = bench.plan([turn("r", 1)], free={Tier.DEVICE: 100})
    assert moved(first) == [("r", 20, Tier.HOST, Tier.DEVICE)]
    bench.land(first.moves, 0.5)
    assert bench.plan([turn("r", 1)], free={Tier.DEVICE: 100}, now=0.5).moves == ()
    bench.prefetcher.started("r", named(50))
    assert count(bench.plan([turn("r", 1)], free={Tier.DEVICE: 100}, now=0.5)) > 0


def test_links_are_handed_no_more_than_the_horizon():
    bench = bench_with(own={"load_horizon_s": 0.1, "lookahead": 8}, r=500)
    plan = bench.plan([turn("r", 8)], iteration_s=0.1)
    assert count(plan) == 16
    bench.land(plan.moves, 0.2)
    assert count(bench.plan([turn("r", 8)], iteration_s=0.1, now=0.2)) == 16


def test_what_others_have_queued_on_a_link_comes_first():
    bench = bench_with(r=50)
    plan = bench.plan([turn("r", 1)], busy_s={Link.HOST_TO_DEVICE: 0.8})
    assert moved(plan) == [("r", 20, Tier.HOST, Tier.DEVICE)]
    assert plan.tests[0].held is False


def test_measured_speeds_choose_how_far_to_look():
    """A turn a second, expected up to twice as early: two iterations ahead suffice for pages that
    take no time (turns up to 4 are within), 0.8 s of pages per turn have to begin nine turns ahead,
    2 s thirteen.
    """
    for pages, looked in ((2, 4), (80, 9), (200, 13)):
        bench = bench_with(**{f"r{n}": pages for n in range(16)})
        plan = bench.plan([turn(f"r{n}", n) for n in range(16)])
        assert (pages, plan.lookahead) == (pages, looked)


def test_a_move_that_never_ends_is_given_up_and_tried_again():
    bench = bench_with(r=10)
    bench.plan([turn("r", 1)])
    assert bench.plan([turn("r", 1)], now=1.0).moves == ()
    assert bench.plan([turn("r", 1)], now=100.0).moves == ()
    assert moved(bench.plan([turn("r", 1)], now=101.0)) == [("r", 10, Tier.HOST, Tier.DEVICE)]


@pytest.mark.parametrize("rule", [Rules, TierKV])
def test_a_move_that_fails_is_asked_for_ever_later_but_again_at_some_time(rule):
    bench = bench_with(rules=rule, own={"lookahead": 4}, r=10)
    asked = []
    for tick in range(4000):
        now = tick / 100
        for move in bench.plan([turn("r", 1)], now=now, iteration_s=0.01).moves:
            asked.append(now)
            bench.dropped(move.keys, Tier.DEVICE, now)
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    growing = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    assert gaps == pytest.approx(growing + [5.0] * 6, abs=0.02)
    bench.prefetcher.started("r", named(10))
    assert bench.plan([turn("r", 1)], now=40.0, iteration_s=0.01).moves


def test_pages_that_have_come_halfway_are_no_failure_and_go_on_at_once():
    bench = bench_with(Tier.STORAGE, own=FAR, r=4)
    (move,) = bench.plan([turn("r", 1)]).moves
    assert (move.source, move.target) == (Tier.STORAGE, Tier.DEVICE)
    # Hands that take two hops tell of the first one, and that the pages have not come to HBM.
    come, lost = move.keys[:3], move.keys[3:]
    bench.placed(come, Tier.HOST, 0.5)
    for keys, paused in ((come, False), (lost, True)):
        bench.dropped(keys, Tier.DEVICE, 0.5)
        assert bench.prefetcher.prefetched.paused("r", 0.5) is paused
    assert set(bench.prefetcher.prefetched.unused[Tier.HOST]) == set(come)
    assert bench.prefetcher.in_flight == 0
    assert moved(bench.plan([turn("r", 1)], now=1.0))[0] == ("r", 3, Tier.HOST, Tier.DEVICE)


def test_what_was_brought_up_and_had_to_leave_is_not_brought_again_before_its_turn():
    bench = bench_with(r=10)
    bench.prefetcher.watch("r")
    bench.land(bench.plan([turn("r", 1)]).moves, 0.1)
    bench.dropped(named(3), Tier.DEVICE, 0.2)
    assert bench.plan([turn("r", 1)], now=0.3).moves == ()
    bench.prefetcher.started("r", named(10))
    assert moved(bench.plan([turn("r", 1)], now=0.4)) == [("r", 3, Tier.HOST, Tier.DEVICE)]


def test_of_two_that_wait_never_each_pushes_out_the_other():
    bench = Bench()
    bench.request("a", named(20), Tier.HOST, turn=5.0)
    bench.request("b", named(20, 100), Tier.HOST, turn=6.0)
    free = {Tier.DEVICE: 20, Tier.HOST: 0}
    # Their windows say that b's turn may come as early as a's.
    turns = [Turn("b", "b", 1, 1.0), Turn("a", "a", 1, 1.0)]
    moves = 0
    for step in range(6):
        plan = bench.plan(turns if step % 2 else turns[::-1], free=free, now=step / 10)
        moves += count(plan)
        for evict in plan.evictions:
            bench.map.dropped(evict.keys, evict.tier)
        bench.land(plan.moves, step / 10)
    assert moves <= 40
    assert bench.map.missing("a").runs == ()


@pytest.mark.parametrize(
    ("rid", "idle_until", "gives_way"), [(None, 1.8, False), (None, 2.5, True), ("s", 1.8, True)]
)
def test_a_session_that_may_come_displaces_only_what_is_used_much_later(rid, idle_until, gives_way):
    bench = Bench()
    bench.request("idle", named(30, 600), Tier.DEVICE, turn=idle_until)
    bench.request("s", named(20), Tier.HOST, turn=1.0)
    plan = bench.plan([Turn("s", rid, 1, 1.0)], free={Tier.DEVICE: 30, Tier.HOST: 0})
    assert bool(plan.moves) is gives_way


def test_pages_on_their_way_take_their_places_before_others_do():
    bench = Bench()
    bench.request("idle", named(30, 600), Tier.DEVICE, turn=100.0)
    bench.request("a", named(20), Tier.HOST, turn=1.0)
    bench.request("b", named(20, 100), Tier.HOST, turn=2.0)
    free = {Tier.DEVICE: 30, Tier.HOST: 0}
    assert moved(bench.plan([turn("a", 1)], free=free)) == [("a", 20, Tier.HOST, Tier.DEVICE)]
    plan = bench.plan([turn("b", 2)], free=free, now=0.1)
    assert moved(plan) == [("b", 10, Tier.HOST, Tier.DEVICE)]
    assert len(plan.evictions[0].keys) == 30


def test_nothing_is_fetched_ahead_over_a_device_that_restores():
    bench = bench_with(r=5)
    bench.request("s", named(5, 100), Tier.STORAGE)
    turns = [turn("r", 1), turn("s", 5)]
    assert moved(bench.plan(turns, busy_s={Link.STORAGE_TO_DEVICE: 0.1})) == [
        ("r", 5, Tier.HOST, Tier.DEVICE)
    ]
    assert moved(bench.plan(turns, now=0.1)) == [("s", 5, Tier.STORAGE, Tier.HOST)]


def test_pages_dropped_before_anyone_used_them_are_counted_as_wasted():
    bench = bench_with(r=10)
    plan = bench.plan([turn("r", 1)])
    failed, came = plan.moves[0].keys[:2], plan.moves[0].keys[2:]
    bench.dropped(failed, Tier.DEVICE, 0.1)
    bench.placed(came, Tier.DEVICE, 0.1)
    for keys in (came[:3], came[:3]):
        bench.dropped(keys, Tier.DEVICE, 0.2)
    assert bench.prefetcher.prefetched.wasted == 3


def test_predictions_are_compared_with_what_happened():
    names = ("right", "wrong", "hopeless", "lucky")
    bench = bench_with(**dict.fromkeys(names, 40))
    plan = bench.plan([turn(name, 1, 1.0) for name in names])
    assert [test.held for test in plan.tests] == [True, True, False, False]
    bench.land([move for move in plan.moves if move.rid == "right"], 1.0)
    bench.map.placed(named(40, 3000), Tier.DEVICE, 1.0)
    for name in ("right", "hopeless", "lucky"):
        bench.prefetcher.started(name, ())
    bench.map.dropped(plan.moves[1].keys, Tier.DEVICE)
    bench.prefetcher.started("wrong", ())
    counts = bench.prefetcher.overlaps.counts
    kinds = ("held_right", "held_wrong", "failed_right", "failed_wrong")
    assert [counts[kind] for kind in kinds] == [1] * 4


def test_pages_that_the_engine_fetches_at_the_turn_were_not_there_in_time():
    bench = bench_with(late=40, early=40)
    plan = bench.plan([turn("late", 0, 0.0), turn("early", 1, 1.0)])
    assert [test.held for test in plan.tests] == [False, True]
    assert {move.rid for move in plan.moves} == {"early"}
    bench.land(plan.moves, 0.4)
    bench.placed(named(40), Tier.DEVICE, 1.0)
    bench.prefetcher.started("late", ())
    bench.prefetcher.started("early", ())
    counts = bench.prefetcher.overlaps.counts
    assert (counts["failed_right"], counts["held_right"]) == (1, 1)
    assert (counts["failed_wrong"], counts["held_wrong"]) == (0, 0)


def test_without_room_nothing_is_predicted_to_be_there_in_time():
    for free, share, held in ((40, 1.0, True), (39, 1.0, False), (40, 0.1, False)):
        bench = bench_with(own={"prefetch_share": share}, r=40)
        plan = bench.plan([turn("r", 1)], free={Tier.DEVICE: free, Tier.HOST: 0})
        assert [test.held for test in plan.tests] == [held], (free, share)


def test_nothing_is_moved_when_it_is_off_or_k_is_0():
    for rules, own in ((Rules, {"prefetch": "off"}), (Rules, NONE), (TierKV, NONE)):
        bench = bench_with(rules=rules, own=own, r=10)
        assert bench.plan([turn("r", 1)]).moves == ()


requests = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 30), st.sampled_from([None, *Tier]), st.sampled_from([None, *Tier])),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(
    requests,
    st.sampled_from([Rules, TierKV]),
    st.integers(-1, 4),
    st.integers(-1, 6),
    st.floats(0.05, 1.0),
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=6
    ),
)
def test_whatever_happens_moves_stay_within_free_pages_and_no_page_is_moved_while_in_flight(
    wanted, rule, lookahead, lookahead_ssd, share, steps
):
    looks = {"lookahead": lookahead, "lookahead_ssd": lookahead_ssd}
    bench = Bench(rule, **looks, prefetch_share=share, load_deadline_s=60.0)
    for n, (start, pages, front, back) in enumerate(wanted):
        keys = named(pages, start)
        for tier, part in ((front, keys[: pages // 2]), (back, keys[pages // 2 :])):
            if tier is not None:
                bench.map.placed(part, tier, 0.0)
        bench.map.claim(f"r{n}", keys, next_use=n * 0.5)
    turns = [turn(f"r{n}", n, n * 0.5) for n in range(len(wanted))]
    flying = {}
    for now, (device, host, landing) in enumerate(steps):
        free = {Tier.DEVICE: device, Tier.HOST: host}
        where = {key: bench.map.page(key).tiers for key in bench.map}
        empty = max(0, device - bench.map.evictable(Tier.DEVICE))
        resident = bench.map.count(Tier.DEVICE)
        plan = bench.plan(turns, free=free, now=float(now))
        for tier in (Tier.DEVICE, Tier.HOST):
            pages = [key for move in plan.moves if move.target is tier for key in move.keys]
            assert len(pages) == len(set(pages)) <= free[tier]
        if rule is Rules:
            promoted = sum(len(move.keys) for move in plan.moves if move.target is Tier.DEVICE)
            assert promoted <= max(0, int(share * (resident + empty)))
        for move in plan.moves:
            for key in move.keys:
                assert key not in flying
                assert where[key] and min(where[key]) is move.source and move.target < move.source
                flying[key] = move.target
        evicted = [key for evict in plan.evictions for key in evict.keys]
        assert not [key for key in evicted if key in flying]
        for move in plan.moves[:landing]:
            bench.land([move], now + 0.5)
            for key in move.keys:
                del flying[key]


@pytest.mark.parametrize(("empty", "evicted"), [(10, 0), (3, 2), (0, 5)])
def test_pages_are_evicted_only_where_no_empty_ones_are_left(empty, evicted):
    tier_map = TierMap(100)
    tier_map.placed(named(20), Tier.DEVICE, 0.0)
    room = TierBudget(tier_map, Tier.DEVICE, 20, empty)
    assert room.reserve(5, 0.0) == 5
    room.fill(5)
    assert len(room.victims()) == evicted


def test_pages_needed_at_the_very_moment_are_not_evicted_for_it():
    tier_map = TierMap(100, NextUse(), NextUse())
    tier_map.placed(named(4), Tier.DEVICE, 0.0)
    tier_map.claim("a", named(4), 5.0)
    for needed_at, room in ((4.9, 4), (5.0, 0), (5.1, 0)):
        assert TierBudget(tier_map, Tier.DEVICE, 4, 0).reserve(4, needed_at) == room
