"""Usual durations, from single samples: a decayed histogram over a logarithmic scale."""

from __future__ import annotations

import math
from array import array
from typing import Final

_LOW_S: Final = 1e-3
_PER_DECADE: Final = 8
_BUCKETS: Final = 64
"""1 ms to 10^5 s in steps of a third: 256 bytes."""


def bucket_of(seconds: float) -> int:
    """The bucket of a duration; the first and the last one are open."""
    if seconds <= _LOW_S:
        return 0
    return min(_BUCKETS - 1, int(math.log10(seconds / _LOW_S) * _PER_DECADE))


def _edge(bucket: int) -> float:
    return _LOW_S * 10 ** (bucket / _PER_DECADE)


class Gaps:
    """Durations seen, later ones counting more: each earlier sample keeps `keep` of its weight per
    later one.
    """

    def __init__(self, keep: float = 0.98) -> None:
        self._weights = array("f", bytes(4 * _BUCKETS))
        self._keep = keep
        self.total = 0.0

    def saw(self, seconds: float) -> None:
        """Adds a sample."""
        for bucket in range(_BUCKETS):
            self._weights[bucket] *= self._keep
        self._weights[bucket_of(seconds)] += 1.0
        self.total = self.total * self._keep + 1.0

    def weight(self, bucket: int) -> float:
        """The weight of the samples in a bucket."""
        return self._weights[bucket]


def longer(parts: list[tuple[Gaps, float]], elapsed_s: float) -> float:
    """The share of samples longer than this; 1 where there is none. `parts` are mixed as in
    `quantile`.
    """
    mix = _mixed(parts)
    whole = sum(mix)
    if whole <= 1e-9 or elapsed_s <= 0:
        return 1.0
    first = bucket_of(elapsed_s)
    return sum(mix[first + 1 :], mix[first] * _left_of(first, elapsed_s)) / whole


def quantile(parts: list[tuple[Gaps, float]], share: float, elapsed_s: float = 0.0) -> float | None:
    """The duration that `share` of the samples longer than `elapsed_s` do not exceed; None where
    there is none.

    `parts` are mixed by their weights, each counting as a whole however many samples it has. Within
    a bucket samples are assumed to lie evenly on the logarithmic scale, so a quantile is right to
    within a third.
    """
    mix = _mixed(parts)
    first = bucket_of(elapsed_s) if elapsed_s > 0 else 0
    mix[first] *= _left_of(first, elapsed_s)
    rest = sum(mix[first:])
    if rest <= 1e-9:
        return None
    below = 0.0
    for bucket in range(first, _BUCKETS):
        if below + mix[bucket] >= share * rest and mix[bucket] > 0:
            inside = (share * rest - below) / mix[bucket]
            low = max(elapsed_s, _edge(bucket)) if bucket else elapsed_s
            return (
                low * (_edge(bucket + 1) / low) ** inside if low > 0 else _edge(bucket + 1) * inside
            )
        below += mix[bucket]
    return _edge(_BUCKETS)


def _mixed(parts: list[tuple[Gaps, float]]) -> list[float]:
    mix = [0.0] * _BUCKETS
    for gaps, weight in parts:
        if gaps.total > 0:
            for bucket in range(_BUCKETS):
                mix[bucket] += gaps.weight(bucket) * weight / gaps.total
    return mix


def _left_of(bucket: int, elapsed_s: float) -> float:
    """The share of a bucket that lies behind a duration in it."""
    if elapsed_s <= _LOW_S:
        return 1.0
    return max(0.0, 1 - math.log10(elapsed_s / _edge(bucket)) * _PER_DECADE)
