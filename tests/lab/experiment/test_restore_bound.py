"""The bound a restoration is measured against."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.experiment.restore.bound import (
    ComputeCurve,
    best_split,
    curve_points,
    optimal,
    request_seconds,
)

STRAIGHT = ComputeCurve({4096: 2.0}, 0.0)


def test_with_a_straight_curve_the_optimum_is_the_half() -> None:
    best = optimal(4096, 1, STRAIGHT, load_only_s=2.0, resident_s=0.0)
    assert best.seconds == pytest.approx(1.0, rel=1e-3)
    assert best.computed_tokens == pytest.approx(2048, abs=1)


def test_with_dearer_tokens_at_the_back_the_optimum_computes_more_than_half() -> None:
    curve = ComputeCurve({n: 2.0 * (n / 4096) ** 2 for n in range(512, 4097, 512)}, 0.0)
    best = optimal(4096, 16, curve, load_only_s=2.0, resident_s=0.0)
    assert best.seconds < 1.0
    assert best.computed_tokens > 2048


def test_what_follows_the_prefix_is_part_of_every_split() -> None:
    best = optimal(4096, 1, STRAIGHT, load_only_s=2.3, resident_s=0.3)
    assert best.seconds == pytest.approx(1.0 + 0.3, rel=1e-3)


def test_the_curve_is_straight_between_points_and_loses_what_the_request_costs() -> None:
    curve = ComputeCurve({512: 1.1, 1024: 3.1}, request_s=0.1)
    found = [curve.seconds(tokens) for tokens in (0, 256, 768, 1280)]
    assert found == pytest.approx([0.0, 0.5, 2.0, 4.0])


def test_the_best_split_takes_the_measured_times_of_both() -> None:
    best = best_split(100, 10, lambda n: n * 1.0, lambda n: n * 4.0, rest_s=2.0)
    assert (best.computed_tokens, best.seconds) == (80, 82.0)


def test_a_request_costs_what_is_left_of_one_page_after_a_decoding_step() -> None:
    assert request_seconds([0.03, 0.05, 0.04], [0.01, 0.03, 0.02]) == pytest.approx(0.02)
    assert request_seconds([0.01], [0.02]) == 0.0


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
