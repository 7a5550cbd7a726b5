"""A prefix that lies half on disk and half elsewhere: the disk, the network and compute each bring
a part of it.
"""

from __future__ import annotations

import pytest
from named_parts import AHEAD, named
from test_restore import covered
from virtual_hands import (
    COST,
    ENGINE,
    balance,
    best_seconds,
    planner_of,
    profile_of,
    restore,
    stored,
)

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.budget import Turn
from sgl_kvtier.policy.ahead.prefetch import Prefetcher
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import LeftToEngine, Mode, Move, StepView
from sgl_kvtier.policy.pages.eviction import NextUse
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.restore.meeting import Speeds, best_split, open_of, stages_of
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.types import Link, PageKey, Span, Tier

PREFIX, SUFFIX = 8192, 64
PAGES = PREFIX // ENGINE.page_tokens
SUFFIX_S = COST.chunk_seconds(PREFIX, SUFFIX)
DISK, NETWORK = Link.STORAGE_TO_DEVICE, Link.REMOTE_TO_DEVICE


def both(rate, network, remote_from=PAGES // 2):
    known = profile_of(COST, rate, network)
    return restore(
        PREFIX, rate, profile=known, remote_from=remote_from, remote_bytes_per_second=network
    )


def loading_s(rate):
    return PREFIX * ENGINE.page_bytes / ENGINE.page_tokens / rate


def best_three_way(local, rate, network):
    """The best two meetings, without any granularity but the page: compute with the disk up to page
    `local`, then with the network.
    """
    cost, page, nbytes = COST, ENGINE.page_tokens, ENGINE.page_bytes

    def computed_s(first, pages):
        return cost.range_seconds(first * page, pages * page, ENGINE.chunk_tokens)

    through_s = min(
        max(computed_s(0, meet), (local - meet) * nbytes / rate) for meet in range(local + 1)
    )
    return min(
        max(through_s + computed_s(local, pages), (PAGES - local - pages) * nbytes / network)
        for pages in range(PAGES - local + 1)
    )


@pytest.mark.parametrize("network", [1 / 4, 1, 4])
@pytest.mark.parametrize("share", [1 / 4, 1 / 2, 3 / 4])
@pytest.mark.parametrize("ratio", [1 / 2, 1, 4])
def test_three_ways_end_together_wherever_the_prefix_lies(ratio, share, network):
    rate, local = balance(PREFIX) * ratio, int(PAGES * share)
    out = both(rate, rate * network, local)
    best_s = best_three_way(local, rate, rate * network)
    # A step and a page of each end more than the ideal.
    assert (out.seconds - SUFFIX_S) * 0.92 - 0.03 <= best_s
    assert sorted(n for n in covered(out) if n < PAGES) == list(range(PAGES))


def test_the_network_alone_is_restored_over_as_a_disk_is():
    rate = balance(PREFIX)
    out = both(rate, rate, remote_from=0)
    assert out.mode is Mode.BOTH
    assert out.seconds * 0.95 <= best_seconds(PREFIX, SUFFIX, rate)
    assert out.seconds - SUFFIX_S <= loading_s(rate) / 1.7
    assert list(out.busy_s) == [NETWORK]


def test_the_front_computes_between_the_disks_pages_and_the_networks():
    """The network is slow: compute is through with the disk's part long before it."""
    rate = balance(PREFIX)
    out = both(rate, rate / 4)
    first, second = out.spliced
    assert first.stop == PAGES // 2 < second.start < second.stop == PAGES
    assert any(chunk.start == first.stop * ENGINE.page_tokens for chunk in out.chunks)


@pytest.mark.parametrize("ratio", [1 / 4, 4])
def test_a_link_that_was_never_measured_is_probed_and_learned(ratio):
    rate = balance(PREFIX)
    out = restore(
        PREFIX, rate, planner=planner_of(rate, restore="both"),
        remote_from=PAGES // 2, remote_bytes_per_second=rate * ratio,
    )  # fmt: skip
    assert out.busy_s[NETWORK] > 0
    assert out.seconds - SUFFIX_S <= 1.25 * best_three_way(PAGES // 2, rate, rate * ratio) + 0.1


HERE = (Span(0, 100), Tier.STORAGE)


def why(planner: Planner, *sources: tuple[Span, Tier], **view: object) -> str | None:
    """Why a prompt is left to the engine."""
    seen = StepView(0.0, prefill_tokens=ENGINE.chunk_tokens, **view)  # type: ignore[arg-type]
    return planner.query(LeftToEngine(stored("a", PAGES, *sources), seen))


@pytest.mark.parametrize("restore", ["auto", "fastest"])
def test_what_comes_over_a_network_is_not_left_to_an_engine_that_cannot_stop_loading(restore):
    """It is left where it lies on the disk alone: loading is faster there."""
    rates = {link.value: 1e12 for link in Link}
    known = {**profile_of(COST, 1e12), "links": rates}
    planner = make_planner(PolicyConfig(restore=restore), ENGINE, known)
    assert why(planner, HERE, (Span(100, PAGES), Tier.STORAGE)) == "loading is faster"
    assert why(planner, HERE, (Span(100, PAGES), Tier.REMOTE)) is None


@pytest.mark.parametrize(("ratio", "left"), [(4, "no room"), (1 / 4, None)])
def test_over_a_slow_network_nothing_is_left_although_the_device_is_crowded(ratio, left):
    rate = balance(PREFIX) * ratio
    planner = make_planner(PolicyConfig(restore="auto"), ENGINE, profile_of(COST, rate, rate))
    crowded = {Tier.DEVICE: PAGES // 2}
    assert why(planner, (Span(0, PAGES), Tier.REMOTE), free_pages=crowded) == left


def test_a_network_that_was_never_measured_is_left_only_where_an_engine_would_measure_it():
    planner = planner_of(1e9, restore="auto")
    assert why(planner, (Span(0, PAGES), Tier.REMOTE)) == "not measured yet"
    assert why(planner, HERE, (Span(100, PAGES), Tier.REMOTE)) is None
    assert why(planner, (Span(0, 100), Tier.REMOTE), (Span(100, PAGES), Tier.STORAGE)) is None


def test_a_stage_begins_where_no_link_brings_pages_on_both_sides():
    assert stages_of([(NETWORK, [Span(10, 20)]), (DISK, [Span(0, 10)])]) == (10,)
    assert stages_of([(DISK, [Span(0, 10), Span(12, 14)]), (NETWORK, [Span(10, 12)])]) == ()
    assert stages_of([(DISK, [Span(5, 8)]), (NETWORK, [Span(10, 12)])]) == (8,)
    three = [(Link.HOST_TO_DEVICE, [Span(0, 2)]), (DISK, [Span(2, 5)]), (NETWORK, [Span(5, 9)])]
    assert stages_of(three) == (2, 5)
    assert stages_of([(DISK, [Span(0, 10)])]) == () == stages_of([])


def test_a_split_says_what_each_stage_computes_and_loads():
    speeds = Speeds(16, 1000, 512, COST, Bandwidth({DISK: 1e5, NETWORK: 1e5}), {})
    sources = [(DISK, [Span(0, 100)]), (NETWORK, [Span(100, 200)])]
    left = open_of(speeds, TwoPointer(0, 200), sources, 0, {}, stages=stages_of(sources))
    split = best_split(speeds, 0.0, left, 0)
    low, high = split.stages
    assert (low.first, high.first) == (0, 100)
    assert 0 < low.meet < 100 < high.meet < 200
    assert split.meet == low.meet
    assert split.compute_tokens == low.tokens == low.meet * 16
    assert high.tokens == (high.meet - 100) * 16
    assert split.loaded(200) == [Span(low.meet, 100), Span(high.meet, 200)]


def prefetcher_of(keys: tuple[PageKey, ...], local: int) -> Prefetcher:
    """Request 7 wants these pages, the first of which are stored here and the rest elsewhere."""
    tier_map = TierMap(1000, NextUse(), NextUse())
    tier_map.placed(keys[:local], Tier.STORAGE, now=0.0)
    tier_map.placed(keys[local:], Tier.REMOTE, now=0.0)
    speeds = {Link.HOST_TO_DEVICE: 2e10, Link.STORAGE_TO_HOST: 3e9, Link.REMOTE_TO_HOST: 1e9}
    made = Prefetcher(AHEAD, tier_map, Bandwidth(speeds), page_bytes=1 << 20)
    tier_map.claim("7", keys, next_use=0.2)
    made.watch("7")
    return made


TURNS = [Turn("7", "7", steps=1, window_s=0.2)]
FREE = {Tier.DEVICE: 512, Tier.HOST: 512}


def test_pages_that_only_others_have_are_prefetched_over_the_network():
    keys = named(8)
    plan = prefetcher_of(keys, 4).plan(0.0, TURNS, FREE, iteration_s=0.2)
    assert plan.moves == (
        Move(keys[:4], Tier.STORAGE, Tier.DEVICE, "7"),
        Move(keys[4:], Tier.REMOTE, Tier.DEVICE, "7"),
    )


def test_nothing_is_prefetched_over_the_network_while_a_restoration_uses_it():
    made = prefetcher_of(named(8), 0)
    assert not made.plan(0.0, TURNS, FREE, 0.2, {Link.REMOTE_TO_DEVICE: 0.01}).moves
    assert made.plan(0.1, TURNS, FREE, 0.2, {}).moves
