from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import virtual_hands
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

from sgl_kvtier.lab.rules import Cake, FixedSplit
from sgl_kvtier.policy.messages import NO_ROOM_YET, Mode, PagesLost, StepView
from sgl_kvtier.policy.rules import Rules

RATIOS = (1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 16)


def covered(out) -> list[int]:
    """Every prefix page in the order it was delivered."""
    page = ENGINE.page_tokens
    pages = [n for chunk in out.chunks for n in range(chunk.start // page, chunk.stop // page)]
    return pages + [n for span in out.spliced for n in range(span.start, span.stop)]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("prefix", [1024, 4096, 8192])
def test_a_restoration_with_known_costs_comes_near_the_best_split(prefix, ratio):
    rate = balance(prefix, ratio)
    out = restore(prefix, rate, profile=profile_of(COST, rate))
    assert out.seconds * 0.95 <= best_seconds(prefix, 64, rate)


def test_loads_go_from_the_back_to_the_front():
    rate = balance(4096)
    out = restore(4096, rate, profile=profile_of(COST, rate))
    assert out.loads[0].stop == 256
    assert all(later.stop == earlier.start for earlier, later in pairwise(out.loads))


@pytest.mark.parametrize(("ratio", "first", "last"), [(1 / 8, 4, 1), (2, 8, 6), (8, 8, 8)])
def test_loads_are_as_long_as_asked_for_and_near_the_meeting_what_their_link_does_in_20_ms(
    ratio, first, last
):
    rate = balance(4096, ratio)
    out = restore(4096, rate, profile=profile_of(COST, rate))
    lengths = [len(span) for span in out.loads]
    assert first <= lengths[0] <= max(lengths) <= 8
    assert lengths[-1] <= last


def test_far_from_the_meeting_loads_are_as_long_as_a_device_takes_at_once(monkeypatch):
    monkeypatch.setattr(virtual_hands, "ENGINE", replace(ENGINE, whole_load_pages=32))
    rate = balance(8192)
    lengths = [len(span) for span in restore(8192, rate, profile=profile_of(COST, rate)).loads]
    assert max(lengths) == 32 and lengths[-1] <= 8
    papers = restore(8192, rate, profile=profile_of(COST, rate), rules=Cake())
    assert max(len(span) for span in papers.loads) == 8, "the papers' units are their own"


def test_a_link_that_slows_down_moves_the_meeting_point():
    rate = balance(8192)
    steady = restore(8192, rate, profile=profile_of(COST, rate))
    slowed = restore(8192, rate, profile=profile_of(COST, rate), slow_after_s=0.3, slow_factor=5.0)
    assert slowed.spliced[-1].start > steady.spliced[-1].start
    assert slowed.seconds < COST.range_seconds(0, 8192, 512) + 0.2


def test_loads_the_front_would_reach_first_are_asked_back():
    rate = balance(8192, 4)
    out = restore(8192, rate, profile=profile_of(COST, rate), slow_after_s=0.05, slow_factor=40.0)
    assert out.cancels
    assert out.seconds < COST.range_seconds(0, 8192, 512) + 0.5


def test_pages_asked_back_are_loaded_after_all_where_the_link_has_recovered():
    rate = balance(8192, 4)

    def lasts(begun, nbytes):
        return nbytes / rate * (40 if 0.05 < begun < 1.0 else 1)

    out = restore(8192, rate, profile=profile_of(COST, rate), lasts=lasts)
    assert out.cancels
    again = [page for span in out.loads for page in range(span.start, span.stop)]
    assert len(again) > len(set(again)), "some were asked for twice"
    assert set(again) >= {page for span in out.spliced for page in range(span.start, span.stop)}


def test_without_room_for_loads_the_prefix_is_computed():
    rate = balance(4096)
    out = restore(4096, rate, profile=profile_of(COST, rate), free_pages=0)
    assert not out.loads
    assert not out.spliced


@pytest.mark.parametrize(("reason", "again"), [(NO_ROOM_YET, True), ("no room", False)])
def test_pages_without_room_for_a_moment_are_loaded_later(reason, again):
    rate = balance(4096)
    planner = planner_of(rate, restore="load")
    planner.observe(stored())
    first = planner.step(StepView(0.0, waiting=("a",))).loads
    for load in first:
        planner.observe(PagesLost("a", load.span, reason, 0.01))
    then = planner.step(StepView(0.02, waiting=("a",))).loads
    assert first and ({load.span for load in first} <= {load.span for load in then}) is again


def test_a_fast_link_is_used_alone_and_a_slow_one_not_at_all():
    fast, slow = balance(1024) * 200, balance(1024) / 200
    assert restore(1024, fast, profile=profile_of(COST, fast)).mode is Mode.LOAD
    assert restore(1024, slow, profile=profile_of(COST, slow)).mode is Mode.COMPUTE


@pytest.mark.parametrize("forced", ["both", "load", "compute"])
def test_the_configuration_can_force_the_mode(forced):
    rate = balance(1024)
    out = restore(1024, rate, planner=planner_of(rate, restore=forced))
    assert out.mode is Mode(forced)


def test_nothing_measured_yet_means_both_with_a_few_loads_to_measure_by():
    out = restore(4096, balance(4096))
    assert out.mode is Mode.BOTH
    assert sorted(n for n in covered(out) if n < 256) == list(range(256))


def test_balanced_chunks_beat_whole_chunks_where_few_chunks_fit():
    rate = balance(1024, 4)
    ours = restore(1024, rate, profile=profile_of(COST, rate))
    cake = restore(1024, rate, profile=profile_of(COST, rate), rules=Cake())
    assert ours.seconds < cake.seconds


def loaded_with(waiting: tuple[str, ...], **rules: object) -> list[int]:
    """The pages asked for at once, with these requests in the queue, of which the first restores
    256 pages.
    """
    planner = planner_of(balance(4096), Rules(load_horizon_s=60.0, **rules), max_stall_ms=0.0)
    planner.observe(stored())
    plan = planner.step(StepView(0.0, waiting, None, prefill_tokens=512))
    return [page for load in plan.loads for page in range(load.span.start, load.span.stop)]


def test_the_more_wait_behind_a_restoration_the_more_of_it_is_loaded():
    alone, one, many = (len(loaded_with(("a", *"bcdefghijklm"[:count]))) for count in (0, 1, 12))
    assert 0 < alone < one < many < 256
    assert len(loaded_with(("a", *"bcdefghijklm"), queue_charge=0.0)) == alone
    assert len(loaded_with(("a", *"bcdefghi"))) == many


# Restoring while the bandwidth changes, against the best fixed split in hindsight (as Cake,
# section 5.7). Virtual time.


SUFFIX = 64
SEEDS = range(20)


@dataclass(frozen=True)
class BandwidthTrace:
    """Piecewise constant: from each of `starts_s` on (the first is 0) the bandwidth `gbps` at the
    same place.
    """

    starts_s: tuple[float, ...]
    gbps: tuple[float, ...]

    @classmethod
    def seeded(
        cls, seed: int, mean_gbps: float, piece_s: float, total_s: float, spread: float = 4.0
    ) -> BandwidthTrace:
        """Pieces of half to one and a half `piece_s`, their bandwidths log-uniform from 1/spread to
        spread times the mean.
        """
        rng = random.Random(seed)
        starts, rates, now = [], [], 0.0
        while now < total_s:
            starts.append(now)
            rates.append(mean_gbps * spread ** rng.uniform(-1, 1))
            now += piece_s * rng.uniform(0.5, 1.5)
        return cls(tuple(starts), tuple(rates))

    def seconds(self, nbytes: float) -> float:
        """How long the first `nbytes` take from the beginning; the last piece goes on."""
        return lasts(self, 0.0, nbytes)


def compute_s(tokens: int) -> float:
    return COST.range_seconds(0, tokens, ENGINE.chunk_tokens)


def trace_of(seed: int, prefix: int) -> BandwidthTrace:
    """About eight changes during a balanced restoration, between a quarter and four times the
    balanced bandwidth.
    """
    return BandwidthTrace.seeded(seed, balance(prefix) * 8e-9, compute_s(prefix) / 8, 20.0)


def lasts(trace: BandwidthTrace, begun: float, nbytes: float) -> float:
    """Seconds of a transfer that begins in the middle of the trace."""
    now, left = begun, nbytes
    for end, gbps in zip([*trace.starts_s[1:], float("inf")], trace.gbps, strict=True):
        can = max(0.0, end - now) * gbps * 1e9 / 8
        if left <= can:
            return now + left * 8e-9 / gbps - begun
        left, now = left - can, max(now, end)
    raise AssertionError("the last piece has no end")


def in_hindsight(prefix: int, trace: BandwidthTrace) -> float:
    """The best fixed split of somebody who knew the trace."""
    page = ENGINE.page_bytes // ENGINE.page_tokens
    splits = range(0, prefix + 1, ENGINE.page_tokens)
    return min(
        max(compute_s(x), trace.seconds((prefix - x) * page)) for x in splits
    ) + COST.chunk_seconds(prefix, SUFFIX)


@pytest.mark.parametrize(
    ("prefix", "median", "worst"), [(2048, 1.1, 1.35), (4096, 1.1, 1.25), (8192, 1.06, 1.25)]
)
def test_it_keeps_near_the_best_fixed_split_although_it_does_not_know_what_comes(
    prefix, median, worst
):
    rate = balance(prefix)
    over = []
    for seed in SEEDS:
        trace = trace_of(seed, prefix)
        planner = planner_of(rate, restore="both")
        out = restore(prefix, rate, planner=planner, lasts=partial(lasts, trace))
        over.append(out.seconds / in_hindsight(prefix, trace))
    assert statistics.median(over) <= median
    assert max(over) <= worst


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", [0, 5, 9])
def test_a_split_fixed_beforehand_stays_where_it_is_and_takes_as_long_as_the_trace_says(
    share, seed
):
    rate, trace = balance(4096), trace_of(seed, 4096)
    planner = planner_of(rate, FixedSplit(share), restore="both")
    out = restore(4096, rate, planner=planner, lasts=partial(lasts, trace))
    meet = round(share * 256)
    assert sum(map(len, out.loads)) == 256 - meet
    assert min((span.start for span in out.loads), default=256) == meet
    ends = compute_s(meet * 16), trace.seconds((256 - meet) * ENGINE.page_bytes)
    assert out.seconds == pytest.approx(max(ends) + COST.chunk_seconds(4096, SUFFIX), abs=0.025)
