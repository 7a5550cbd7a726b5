"""Restoring while the bandwidth changes, against the best fixed split in hindsight (as Cake,
section 5.7). Virtual time.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

import pytest
from virtual_hands import COST, ENGINE, profile_of, restore

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import FixedSplit

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


def trace_of(seed: int, prefix: int, rate: float) -> BandwidthTrace:
    """About eight changes during a balanced restoration, between a quarter and four times the
    balanced bandwidth.
    """
    return BandwidthTrace.seeded(seed, rate * 8e-9, compute_s(prefix) / 8, 20.0)


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
    rate = prefix * ENGINE.page_bytes / ENGINE.page_tokens / compute_s(prefix)
    over = []
    for seed in SEEDS:
        trace = trace_of(seed, prefix, rate)
        out = restore(
            prefix,
            rate,
            suffix=SUFFIX,
            config=PolicyConfig(restore="both"),
            profile=profile_of(COST, rate),
            lasts=lambda begun, nbytes, trace=trace: lasts(trace, begun, nbytes),
        )
        over.append(out.seconds / in_hindsight(prefix, trace))
    assert statistics.median(over) <= median
    assert max(over) <= worst


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", [0, 5, 9])
def test_a_split_fixed_beforehand_stays_where_it_is_and_takes_as_long_as_the_trace_says(
    share, seed
):
    rate = 4096 * ENGINE.page_bytes / ENGINE.page_tokens / compute_s(4096)
    trace = trace_of(seed, 4096, rate)
    config, rules = PolicyConfig(restore="both"), FixedSplit(share)
    timing = {
        "suffix": SUFFIX,
        "profile": profile_of(COST, rate),
        "lasts": lambda begun, nbytes: lasts(trace, begun, nbytes),
    }
    out = restore(4096, rate, config=config, rules=rules, **timing)
    meet = round(share * 256)
    assert sum(map(len, out.loads)) == 256 - meet
    assert min((span.start for span in out.loads), default=256) == meet
    page = ENGINE.page_bytes // ENGINE.page_tokens
    ends = compute_s(meet * 16), trace.seconds((256 - meet) * ENGINE.page_bytes)
    assert ends[1] == trace.seconds((4096 - meet * 16) * page)
    assert out.seconds == pytest.approx(max(ends) + COST.chunk_seconds(4096, SUFFIX), abs=0.025)


def test_pages_that_fail_to_load_are_computed_behind_a_fixed_split_too():
    rate = 4096 * ENGINE.page_bytes / ENGINE.page_tokens / compute_s(4096)
    config, rules = PolicyConfig(restore="both"), FixedSplit(0.5)
    out = restore(
        4096,
        rate,
        config=config,
        rules=rules,
        profile=profile_of(COST, rate),
        failing=frozenset({3, 140, 200, 255}),
    )
    computed = {
        place for chunk in out.chunks for place in range(chunk.start // 16, -(-chunk.stop // 16))
    }
    assert {140, 200, 255} <= computed
    assert len(computed & set(range(256))) < 256


def test_the_meeting_point_moves_with_the_trace():
    rate = 4096 * ENGINE.page_bytes / ENGINE.page_tokens / compute_s(4096)
    met = set()
    for seed in SEEDS:
        trace = trace_of(seed, 4096, rate)
        out = restore(
            4096,
            rate,
            config=PolicyConfig(restore="both"),
            profile=profile_of(COST, rate),
            lasts=lambda begun, nbytes, trace=trace: lasts(trace, begun, nbytes),
        )
        met.add(out.spliced[-1].start)
    assert len(met) > len(SEEDS) // 2
