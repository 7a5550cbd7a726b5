"""The measures of a run that TierKV's tables show: TPOT, throughput, latencies, hits, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sgl_kvtier.lab.papers.tierkv.machine import Run


@dataclass(frozen=True, slots=True)
class Measures:
    """Measures of one run, or the mean of several. Time per output token is that of each single
    token. So long steps with a large batch weigh more than those with a small one. `wait_ms`: from
    arrival to the first step.
    """

    tpot_ms: float
    p95_tpot_ms: float
    tokens_per_s: float
    hit_share: float
    wait_ms: float
    demand_gb: float
    ahead_gb: float
    wasted_share: float


def measure(run: Run) -> Measures:
    """The numbers of one run."""
    tokens = sum(one.count * one.running for one in run.steps)
    accesses = sum(one.count * one.tokens for one in run.steps)
    ahead = sum(one.count * one.paging.ahead_bytes for one in run.steps)
    wasted = sum(one.count * one.paging.wasted_bytes for one in run.steps)
    return Measures(
        tpot_ms=1e3 * sum(one.seconds * one.count * one.running for one in run.steps) / tokens,
        p95_tpot_ms=1e3
        * weighted_quantile([(one.seconds, one.count * one.running) for one in run.steps], 0.95),
        tokens_per_s=tokens / run.end_s,
        hit_share=sum(one.count * one.tokens * one.paging.hit_share for one in run.steps)
        / accesses,
        wait_ms=1e3 * fmean(one.admitted_s - one.arrived_s for one in run.finished),
        demand_gb=sum(one.count * one.paging.demand_bytes for one in run.steps) / 1e9,
        ahead_gb=ahead / 1e9,
        wasted_share=wasted / ahead if ahead else 0.0,
    )


def mean_of(parts: Sequence[Measures]) -> Measures:
    """Seed by seed the paper averages; so do we."""
    return Measures(*(fmean(getattr(part, name) for part in parts) for name in Measures.__slots__))


def weighted_quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """The smallest value with at least `share` of the weight at or below it; values are (value,
    weight).
    """
    ordered = sorted(values)
    wanted = share * sum(weight for _, weight in ordered)
    seen = 0.0
    for value, weight in ordered:
        seen += weight
        if seen >= wanted:
            return value
    return ordered[-1][0]
