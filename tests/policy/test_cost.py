import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import CostModel, PrefillCost
from sgl_kvtier.types import Link

TRUE = PrefillCost(0.02, 1 / 3500, 3e-8)


def test_a_few_chunks_of_several_sizes_teach_the_cost():
    model = CostModel()
    for start, tokens in [
        (0, 512),
        (512, 512),
        (1024, 96),
        (1120, 512),
        (2048, 256),
        (3072, 512),
    ] * 3:
        model.saw(start, tokens, TRUE.chunk_seconds(start, tokens))
    assert model.cost.range_seconds(0, 8192, 512) == pytest.approx(
        TRUE.range_seconds(0, 8192, 512), rel=0.02
    )
    assert model.cost.chunk_seconds(4096, 32) == pytest.approx(
        TRUE.chunk_seconds(4096, 32), rel=0.1
    )


def test_a_machine_that_becomes_slower_is_noticed():
    model = CostModel()
    slow = PrefillCost(0.04, 2 / 3500, 6e-8)
    for cost in (TRUE, slow):
        for start in range(0, 512 * 300, 512):
            model.saw(
                start % 8192,
                512 if start % 1024 else 128,
                cost.chunk_seconds(start % 8192, 512 if start % 1024 else 128),
            )
    assert model.cost.range_seconds(0, 8192, 512) == pytest.approx(
        slow.range_seconds(0, 8192, 512), rel=0.05
    )


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
    links = Bandwidth({Link.STORAGE_TO_DEVICE: 1e9})
    for _ in range(60):
        links.saw(Link.STORAGE_TO_DEVICE, 1000, 1.0)
        links.saw(Link.STORAGE_TO_DEVICE, 100_000_000, 1.0)
    assert links.bytes_per_second(Link.STORAGE_TO_DEVICE) == pytest.approx(5e7, rel=0.1)


def test_one_outlier_does_not_replace_a_measured_bandwidth():
    links = Bandwidth({Link.STORAGE_TO_DEVICE: 1e8})
    for _ in range(20):
        links.saw(Link.STORAGE_TO_DEVICE, 1_000_000, 0.01)
    links.saw(Link.STORAGE_TO_DEVICE, 1_000_000, 0.1)
    assert 4e7 < links.bytes_per_second(Link.STORAGE_TO_DEVICE) < 1e8


def test_a_link_that_has_changed_is_known_after_four_transfers():
    for factor in (0.25, 0.5, 2, 4):
        link = Bandwidth({Link.STORAGE_TO_DEVICE: 1e9})
        for _ in range(20):
            link.saw(Link.STORAGE_TO_DEVICE, 2_000_000, 0.002)
        for _ in range(4):
            link.saw(Link.STORAGE_TO_DEVICE, 2_000_000, 0.002 / factor)
        assert link.bytes_per_second(Link.STORAGE_TO_DEVICE) == pytest.approx(factor * 1e9)


def test_three_outliers_or_some_to_both_sides_or_small_transfers_change_no_more_than_their_share():
    kept = Bandwidth({Link.STORAGE_TO_DEVICE: 1e9})
    for seconds in [0.002] * 20 + [0.006] * 3 + [0.0007] + [0.006] * 3:
        kept.saw(Link.STORAGE_TO_DEVICE, 2_000_000, seconds)
    assert 0.3e9 < kept.bytes_per_second(Link.STORAGE_TO_DEVICE) < 0.8e9, "decayed, not replaced"
    small = Bandwidth({Link.STORAGE_TO_DEVICE: 1e9})
    for nbytes, seconds in [(2_000_000, 0.002)] * 20 + [(100_000, 0.001)] * 8:
        small.saw(Link.STORAGE_TO_DEVICE, nbytes, seconds)
    assert small.bytes_per_second(Link.STORAGE_TO_DEVICE) > 0.6e9


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10)), min_size=1, max_size=40))
def test_the_estimate_lies_between_the_slowest_and_the_fastest_transfer(transfers):
    link = Bandwidth({})
    for nbytes, seconds in transfers:
        link.saw(Link.STORAGE_TO_DEVICE, nbytes, seconds)
    rates = [nbytes / seconds for nbytes, seconds in transfers]
    assert (
        min(rates) * (1 - 1e-9)
        <= link.bytes_per_second(Link.STORAGE_TO_DEVICE)
        <= max(rates) * (1 + 1e-9)
    )
