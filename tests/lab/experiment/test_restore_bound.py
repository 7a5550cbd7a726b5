"""The bound a restoration is measured against."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.experiment.restore.bound import (
    ComputeCurve,
    best_split,
    curve_points,
    optimal,
    optimal_of_link,
    request_seconds,
    t_star,
)


def straight(tokens: int, seconds: float) -> ComputeCurve:
    return ComputeCurve({tokens: seconds}, 0.0)


def test_with_a_straight_curve_the_optimum_is_t_star() -> None:
    best = optimal(4096, 1, straight(4096, 2.0), load_only_s=2.0, resident_s=0.0)
    assert best.seconds == pytest.approx(t_star(2.0, 2.0), rel=1e-3)
    assert best.computed_tokens == pytest.approx(2048, abs=1)


def test_with_dearer_tokens_at_the_back_the_optimum_lies_below_t_star() -> None:
    curve = ComputeCurve({n: 2.0 * (n / 4096) ** 2 for n in range(512, 4097, 512)}, 0.0)
    best = optimal(4096, 16, curve, load_only_s=2.0, resident_s=0.0)
    assert best.seconds < t_star(2.0, 2.0)
    assert best.computed_tokens > 2048


def test_what_follows_the_prefix_is_part_of_every_split() -> None:
    best = optimal(4096, 1, straight(4096, 2.0), load_only_s=2.3, resident_s=0.3)
    assert best.seconds == pytest.approx(1.0 + 0.3, rel=1e-3)


def test_a_resource_that_is_much_faster_gets_almost_everything() -> None:
    best = optimal(4096, 16, straight(4096, 100.0), load_only_s=0.1, resident_s=0.0)
    assert best.computed_tokens == 0
    assert best.seconds == pytest.approx(0.1)


def test_the_curve_is_straight_between_points_and_loses_what_the_request_costs() -> None:
    curve = ComputeCurve({512: 1.1, 1024: 3.1}, request_s=0.1)
    assert curve.seconds(0) == 0.0
    assert curve.seconds(256) == pytest.approx(0.5)
    assert curve.seconds(768) == pytest.approx(2.0)
    assert curve.seconds(1280) == pytest.approx(4.0)


def test_the_best_split_takes_the_measured_times_of_both() -> None:
    best = best_split(100, 10, lambda n: n * 1.0, lambda n: n * 4.0, rest_s=2.0)
    assert (best.computed_tokens, best.seconds) == (80, 82.0)


def test_a_request_costs_what_is_left_of_one_page_after_a_decoding_step() -> None:
    assert request_seconds([0.03, 0.05, 0.04], [0.01, 0.03, 0.02]) == pytest.approx(0.02)
    assert request_seconds([0.01], [0.02]) == 0.0


def test_the_bound_of_the_link_leaves_out_what_loading_costs_beside_it() -> None:
    # Loading alone took 2.6 s, 0.2 s of them after the prefix was there; the link needs 2 s of the
    # 2.4 s between.
    best = optimal_of_link(
        4096, 1, straight(4096, 2.0), load_only_s=2.6, resident_s=0.2, link_s=2.0
    )
    assert best.seconds == pytest.approx(1.0 + 0.2, rel=1e-3)
    assert best.computed_tokens == pytest.approx(2048, abs=1)
    assert (
        best.seconds
        < optimal(4096, 1, straight(4096, 2.0), load_only_s=2.6, resident_s=0.2).seconds
    )


def test_the_bound_of_the_link_is_the_measured_one_where_the_link_is_all_there_is() -> None:
    measured = optimal(4096, 1, straight(4096, 2.0), load_only_s=2.2, resident_s=0.2)
    assert (
        optimal_of_link(4096, 1, straight(4096, 2.0), load_only_s=2.2, resident_s=0.2, link_s=2.0)
        == measured
    )


def test_loading_that_was_faster_than_the_link_was_set_to_is_taken_as_it_was_measured() -> None:
    found = optimal_of_link(
        4096, 1, straight(4096, 2.0), load_only_s=1.0, resident_s=0.2, link_s=5.0
    )
    assert found.seconds == pytest.approx(t_star(2.0, 0.8), rel=1e-3)


@pytest.mark.parametrize(
    ("prefix", "points"),
    [
        (2048, [512, 1024, 1536, 2048]),
        (8192, [1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192]),
        (1000, [512, 1000]),
        (256, [256]),
    ],
)
def test_the_curve_is_measured_at_multiples_of_the_chunk_and_at_the_end(
    prefix: int, points: list[int]
) -> None:
    assert curve_points(prefix, 512) == points
