"""Percentiles and paired ratios."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary

NUMBERS = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50)


def test_a_percentile_is_linear_between_the_two_nearest_values() -> None:
    assert percentile([10, 20], 50) == 15
    assert percentile([1, 2, 3, 4, 5], 90) == pytest.approx(4.6)
    assert percentile([7], 99) == 7


@given(NUMBERS)
def test_percentiles_lie_within_the_values_and_rise(values: list[float]) -> None:
    marks = [percentile(values, q) for q in (0, 25, 50, 75, 100)]
    assert marks == sorted(marks)  # type: ignore[type-var]
    assert marks[0] == min(values)
    assert marks[-1] == max(values)


@given(NUMBERS)
def test_missing_values_change_nothing(values: list[float]) -> None:
    assert summary([*values, None, math.nan, math.inf]) == summary(values)


def test_no_values_give_no_percentile_and_never_a_zero() -> None:
    assert percentile([], 50) is None
    assert percentile([None, math.nan], 50) is None
    assert summary([None]) == {"p50": None, "p90": None, "p99": None, "mean": None, "n": 0}


def test_a_summary_counts_what_it_is_made_of() -> None:
    result = summary(range(101))
    assert result == {"p50": 50, "p90": 90, "p99": 99, "mean": 50, "n": 101}


def test_ratios_are_taken_pair_by_pair_so_a_slow_round_cancels_out() -> None:
    # Round 2 ran on a machine ten times slower; the ratio of the medians would be 0.5 / (10 / 2).
    result = pair_ratios([1, 10, 2], [2, 20, 4])
    quartiles = {"median": 0.5, "p25": 0.5, "p75": 0.5, "n": 3}
    assert result == {**quartiles, "a": 13 / 3, "b": 26 / 3}


def test_quartiles_of_ratios_are_reported() -> None:
    quartiles = {"median": 2, "p25": 1.5, "p75": 2.5, "n": 3}
    assert pair_ratios([1, 2, 3], [1, 1, 1]) == {**quartiles, "a": 2, "b": 1}


def test_a_pair_without_a_value_or_with_nothing_to_divide_by_is_dropped() -> None:
    assert pair_ratios([1, None, 3, 4, math.nan], [2, 2, None, 0, 1]) == {
        "median": 0.5,
        "p25": 0.5,
        "p75": 0.5,
        "n": 1,
        "a": 1,
        "b": 2,
    }
    assert pair_ratios([], [])["median"] is None


def test_unequal_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 1"):
        pair_ratios([1, 2], [1])
