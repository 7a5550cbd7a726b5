from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_hands import COST, ENGINE, balance, profile_of, restore, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import (
    ACCELERATOR_S,
    CPU_S,
    CostModel,
    FixedOverhead,
    PrefillCost,
)
from sgl_kvtier.policy.messages import ChunkDone, LeftToEngine, Mode, StepView
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.types import Link, Span, Tier

TRUE = PrefillCost(0.02, 1 / 3500, 3e-8)
SSD = Link.STORAGE_TO_DEVICE


def test_a_few_chunks_of_several_sizes_teach_the_cost():
    model = CostModel()
    chunks = [(0, 512), (512, 512), (1024, 96), (1120, 512), (2048, 256), (3072, 512)]
    for start, tokens in chunks * 3:
        model.saw(start, tokens, TRUE.chunk_seconds(start, tokens))
    whole_s, short_s = TRUE.range_seconds(0, 8192, 512), TRUE.chunk_seconds(4096, 32)
    assert model.cost.range_seconds(0, 8192, 512) == pytest.approx(whole_s, rel=0.02)
    assert model.cost.chunk_seconds(4096, 32) == pytest.approx(short_s, rel=0.1)


def test_a_machine_that_becomes_slower_is_noticed():
    model = CostModel()
    slow = PrefillCost(0.04, 2 / 3500, 6e-8)
    for cost in (TRUE, slow):
        for start in range(0, 512 * 300, 512):
            tokens = 512 if start % 1024 else 128
            model.saw(start % 8192, tokens, cost.chunk_seconds(start % 8192, tokens))
    slow_s = slow.range_seconds(0, 8192, 512)
    assert model.cost.range_seconds(0, 8192, 512) == pytest.approx(slow_s, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(1, 8192), st.floats(1e-6, 1e3)),
        min_size=1,
        max_size=40,
    )
)
def test_no_measurement_makes_a_cost_negative_or_undefined(seen):
    model = CostModel()
    for start, tokens, seconds in seen:
        model.saw(start, tokens, seconds)
    cost = model.cost
    assert min(cost.fixed_s, cost.per_token_s, cost.per_token_position_s) >= 0
    assert 0 < cost.chunk_seconds(1000, 100) < float("inf")


def test_a_profile_gives_the_same_predictions_back():
    model = CostModel(TRUE)
    model.saw(0, 512, 0.2)
    again = CostModel(PrefillCost(**model.profile()))
    assert again.cost == model.cost


def test_bandwidth_follows_bytes_not_transfers():
    links = Bandwidth({SSD: 1e9})
    for _ in range(60):
        links.saw(SSD, 1000, 1.0)
        links.saw(SSD, 100_000_000, 1.0)
    assert links.bytes_per_second(SSD) == pytest.approx(5e7, rel=0.1)


def test_a_link_that_has_changed_is_known_after_four_transfers():
    for factor in (0.25, 0.5, 2, 4):
        link = Bandwidth({SSD: 1e9})
        for _ in range(20):
            link.saw(SSD, 2_000_000, 0.002)
        for _ in range(4):
            link.saw(SSD, 2_000_000, 0.002 / factor)
        assert link.bytes_per_second(SSD) == pytest.approx(factor * 1e9)


def test_three_outliers_or_some_to_both_sides_or_small_transfers_change_no_more_than_their_share():
    kept = Bandwidth({SSD: 1e9})
    for seconds in [0.002] * 20 + [0.006] * 3 + [0.0007] + [0.006] * 3:
        kept.saw(SSD, 2_000_000, seconds)
    assert 0.3e9 < kept.bytes_per_second(SSD) < 0.8e9, "decayed, not replaced"
    small = Bandwidth({SSD: 1e9})
    for nbytes, seconds in [(2_000_000, 0.002)] * 20 + [(100_000, 0.001)] * 8:
        small.saw(SSD, nbytes, seconds)
    assert small.bytes_per_second(SSD) > 0.6e9


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10)), min_size=1, max_size=40))
def test_the_estimate_lies_between_the_slowest_and_the_fastest_transfer(transfers):
    link = Bandwidth({})
    for nbytes, seconds in transfers:
        link.saw(SSD, nbytes, seconds)
    rates, found = [nbytes / seconds for nbytes, seconds in transfers], link.bytes_per_second(SSD)
    assert min(rates) * (1 - 1e-9) <= found <= max(rates) * (1 + 1e-9)


# What a restoration takes beside compute and links is learned from those that run alone.


TOKENS = 4096
RATE = balance(TOKENS)
"""Bytes per second at which loading takes as long as computing."""


def planner(own_s: float | None = None, rate: float = RATE) -> Planner:
    profile = profile_of(COST, rate)
    if own_s is not None:
        profile["restore"] = {"own_s": own_s}
    return make_planner(PolicyConfig(), ENGINE, profile)


def learned(one: Planner) -> float:
    seconds: float = one.profile()["restore"]["own_s"]
    return seconds


def restored(one: Planner, times: int, own_s: float, **hands: object) -> float:
    """What it has learned after so many restorations that end `own_s` late."""
    begin_s = 0.0
    for _ in range(times):
        out = restore(TOKENS, RATE, planner=one, begin_s=begin_s, own_s=own_s, **hands)  # type: ignore[arg-type]
        begin_s = 10.0 + out.seconds
    return learned(one)


def test_each_kind_of_device_begins_with_its_own_and_what_was_learned_comes_first() -> None:
    shape = replace(ENGINE, accelerator=True)
    first = make_planner(PolicyConfig(), shape)
    assert (learned(first), learned(planner())) == (ACCELERATOR_S, CPU_S)
    known = profile_of(COST, RATE) | {"restore": {"own_s": 0.012}}
    assert learned(make_planner(PolicyConfig(), shape, known)) == 0.012


def test_what_restorations_end_later_than_predicted_is_learned() -> None:
    on_time_s = restored(planner(), 20, 0.0)
    assert on_time_s < CPU_S / 2
    assert restored(planner(), 20, 0.05) == pytest.approx(on_time_s + 0.05, abs=0.002)


def test_one_that_was_held_up_changes_nothing() -> None:
    assert restored(planner(), 3, 5.0) == CPU_S


@pytest.mark.parametrize("how", [{"decoding": 4}, {"failing": frozenset({200})}])
def test_beside_requests_that_decode_or_with_lost_pages_nothing_is_learned(how) -> None:
    assert restored(planner(), 20, 0.05, **how) == CPU_S


def test_two_at_a_time_teach_nothing() -> None:
    one = planner()
    restored(one, 20, 0.05)
    before = learned(one)
    now = 1000.0
    one.observe(stored("b", now=now))
    one.step(StepView(now, ("b",), prefill_tokens=512, free_pages={Tier.DEVICE: 0}))
    assert one.restoring == ("b",)
    restore(TOKENS, RATE, planner=one, begin_s=now + 0.001, own_s=0.05)
    assert learned(one) == before


def test_where_restorations_cost_more_than_a_split_saves_the_engine_loads() -> None:
    """Loading takes a fourth of computing here: a split saves about a tenth of a second."""
    asked = LeftToEngine(stored(), StepView(0.0, ("a",), prefill_tokens=512))
    left = [planner(own_s, RATE * 12).query(asked) for own_s in (0.0, 0.1)]
    assert left == [None, "loading is faster"]


@given(st.lists(st.floats(-1e6, 1e6), max_size=80))
def test_it_is_never_negative_nor_beyond_its_bound(late_s: list[float]) -> None:
    own = FixedOverhead(CPU_S)
    for seconds in late_s:
        own.saw(seconds)
        assert 0 <= own.seconds <= 0.1


def test_earlier_ones_are_forgotten() -> None:
    own = FixedOverhead(CPU_S)
    for _ in range(500):
        own.saw(0.08)
    for _ in range(31):
        own.saw(0.01)
    assert own.seconds == 0.01


def test_restoring_has_to_beat_computing_with_it_and_computing_takes_nothing_beside() -> None:
    """The link is so slow that both together save 60 ms of computing alone."""
    slower = COST.range_seconds(0, TOKENS, ENGINE.chunk_tokens) / 0.06 - 1

    def mode(own_s: float) -> tuple[Mode, str]:
        one = planner(own_s, RATE / slower)
        one.observe(stored())
        (start,) = one.step(StepView(0.0, ("a",), prefill_tokens=512)).starts
        return start.mode, start.reason

    assert mode(0.02) == (Mode.BOTH, "split is faster")
    assert mode(0.1) == (Mode.COMPUTE, "computing is faster")


def test_of_a_chunk_shorter_than_a_page_nothing_is_learned() -> None:
    one = planner()
    known = one.profile()["prefill"]
    one.observe(ChunkDone("a", Span(0, ENGINE.page_tokens - 1), 1e-4, 1.0))
    assert one.profile()["prefill"] == known
    one.observe(ChunkDone("a", Span(0, ENGINE.page_tokens), 1e-4, 1.0))
    assert one.profile()["prefill"] != known
