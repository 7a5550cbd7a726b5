"""Percentiles and paired ratios. Missing values (None, NaN) are left out and never counted as zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy


def percentile(values: Iterable[float | None], q: float) -> float | None:
    """The q-th percentile (q from 0 to 100), linear between the two nearest values. None when there
    is no value.
    """
    present = _present(values)
    return float(numpy.percentile(present, q)) if present else None


def summary(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """p50, p90, p99 and mean of the values present, and how many there are (n)."""
    present = _present(values)
    if not present:
        return {"p50": None, "p90": None, "p99": None, "mean": None, "n": 0}
    p50, p90, p99 = (float(p) for p in numpy.percentile(present, [50, 90, 99]))
    return {
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "mean": float(numpy.mean(present)),
        "n": len(present),
    }


def pair_ratios(
    ours: Sequence[float | None], theirs: Sequence[float | None]
) -> dict[str, float | int | None]:
    """Median and quartiles of ours/theirs taken pair by pair: below 1 means `ours` is smaller. `a`
    and `b` are the means of ours and theirs over the same pairs.

    The two sequences are paired by position: round i of one arm with round i of the other. So a
    machine's disturbance during a round cancels out. A pair with a missing value or a zero below
    the line is dropped; n counts those left. Raises ValueError when the lengths differ.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"pairs need equally many rounds, not {len(ours)} and {len(theirs)}")
    pairs = [
        (a, b)
        for a, b in zip(ours, theirs, strict=True)
        if a is not None and b and _is_present(a) and _is_present(b)
    ]
    ratios = [a / b for a, b in pairs]
    a, b = (_mean([pair[side] for pair in pairs]) for side in (0, 1))
    quartiles = [percentile(ratios, q) for q in (50, 25, 75)]
    named = dict(zip(("median", "p25", "p75"), quartiles, strict=True))
    return {**named, "n": len(ratios), "a": a, "b": b}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _present(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if _is_present(value)]  # type: ignore[arg-type]


def _is_present(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
