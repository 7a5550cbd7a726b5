import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.policy.bandwidth import Bandwidth
from sgl_kvtier.policy.cost import CostModel, PrefillCost
from sgl_kvtier.types import Link

TRUE = PrefillCost(0.02, 1 / 3500, 3e-8)


def test_a_few_chunks_of_several_sizes_teach_the_cost():
    model = CostModel()
    for start, tokens in [(0, 512), (512, 512), (1024, 96), (1120, 512), (2048, 256), (3072, 512)] * 3:
        model.saw(start, tokens, TRUE.chunk_seconds(start, tokens))
    assert model.cost.range_seconds(0, 8192, 512) == pytest.approx(TRUE.range_seconds(0, 8192, 512), rel=0.02)
    assert model.cost.chunk_seconds(4096, 32) == pytest.approx(TRUE.chunk_seconds(4096, 32), rel=0.1)


def test_a_machine_that_becomes_slower_is_noticed():
    model = CostModel()
    slow = PrefillCost(0.04, 2 / 3500, 6e-8)
    for cost in (TRUE, slow):
        for start in range(0, 512 * 300, 512):
            model.saw(start % 8192, 512 if start % 1024 else 128, cost.chunk_seconds(start % 8192, 512 if start % 1024 else 128))
    assert model.cost.range_seconds(0, 8192, 512) == pytest.approx(slow.range_seconds(0, 8192, 512), rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(1, 8192), st.floats(1e-6, 1e3)), min_size=1, max_size=40
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
    links = Bandwidth({Link.SSD_TO_HBM: 1e9})
    for _ in range(60):
        links.saw(Link.SSD_TO_HBM, 1000, 1.0)
        links.saw(Link.SSD_TO_HBM, 100_000_000, 1.0)
    assert links.bytes_per_second(Link.SSD_TO_HBM) == pytest.approx(5e7, rel=0.1)


def test_one_outlier_does_not_replace_a_measured_bandwidth():
    links = Bandwidth({Link.SSD_TO_HBM: 1e8})
    for _ in range(20):
        links.saw(Link.SSD_TO_HBM, 1_000_000, 0.01)
    links.saw(Link.SSD_TO_HBM, 1_000_000, 0.1)
    assert 4e7 < links.bytes_per_second(Link.SSD_TO_HBM) < 1e8
