"""Plots of Cake's experiments, as SVG text by file name. Needs the extra [lab]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sgl_kvtier.lab.pages.plots import Series, lines
from sgl_kvtier.lab.papers.cake.figures import (
    SCENARIOS,
    burst_run,
    chunk_seconds,
    fluctuating_run,
    fluctuation,
)
from sgl_kvtier.lab.papers.cake.fit import is_fitted
from sgl_kvtier.lab.papers.cake.grid import printed, printed_all
from sgl_kvtier.lab.papers.cake.run import times

_SEED = 1


def against_print() -> str:
    """Predicted speedups over the printed ones, sorted; 1 is equal."""
    pairs = [pair for pair in printed_all() if not is_fitted(pair)]
    over_io = sorted(times(p.setup).io_s / times(p.setup).cake_s / p.over_io for p in pairs)
    over_compute = sorted(
        times(p.setup).compute_s / times(p.setup).cake_s / p.over_compute for p in pairs
    )
    share = [100 * (i + 0.5) / len(pairs) for i in range(len(pairs))]
    series = [
        Series("over I/O-only", share, over_io),
        Series("over compute-only", share, over_compute),
        Series("equal", [0, 100], [1, 1]),
    ]
    return lines(
        series,
        "Cake, Tables 3 to 7: simulated over printed",
        "share of predicted pairs (%)",
        "ratio",
    )


def bandwidths() -> str:
    """The speedup over the better baseline in Table 3's row of one A100 at 100 %: as printed, by
    the paper's rule, and ours.
    """
    pairs = [p for p in printed("3") if p.setup.hardware == "A100" and p.setup.share == 1]
    gbps = [pair.setup.gbps for pair in pairs]
    ours = [times(pair.setup) for pair in pairs]
    series = [
        Series("printed", gbps, [min(p.over_io, p.over_compute) for p in pairs]),
        Series("cake", gbps, [min(t.io_s, t.compute_s) / t.cake_s for t in ours]),
        Series("kvtier", gbps, [min(t.io_s, t.compute_s) / t.kvtier_s for t in ours]),
    ]
    title = "Table 3, A100: gain over the better of the two alone"
    return lines(series, title, "bandwidth (Gbit/s)", "speedup", log_x=True)


def figure_4() -> str:
    """Milliseconds of a chunk by its index."""
    series = []
    for hardware in SCENARIOS["fig4"]["hardware"]:
        seconds = chunk_seconds(hardware)
        series.append(Series(hardware, range(len(seconds)), [1e3 * value for value in seconds]))
    return lines(
        series, "Figure 4: what a chunk of 512 costs", "chunk index", "milliseconds", whole_x=True
    )


def figure_5() -> str:
    """Both pointers over time while budget and bandwidth change."""
    points = fluctuating_run(_SEED, "kvtier")[1].timeline.pointers
    seconds = [point[0] for point in points]
    series = [
        Series("computed up to", seconds, [point[2] for point in points]),
        Series("loaded from", seconds, [point[3] for point in points]),
    ]
    return lines(series, "Figure 5: two pointers, resources that fluctuate", "seconds", "tokens")


def figure_5_traces() -> str:
    """The resources over time: share of the token budget and of the bandwidth."""
    scene, traces = SCENARIOS["fig5"], fluctuation(_SEED)
    until_s = fluctuating_run(_SEED, "cake")[0]
    rates = [(since, rate) for since, rate in traces.rates if since < until_s]
    period_s = scene["budget_period_s"]
    budgets = traces.budgets[: int(until_s / period_s) + 1]
    series = [
        Series(
            "bandwidth",
            [since for since, _ in rates],
            [100 * rate * 8e-9 / scene["most_gbps"] for _, rate in rates],
        ),
        Series(
            "token budget",
            [i * period_s for i in range(len(budgets))],
            [100 * b / scene["budget"] for b in budgets],
        ),
    ]
    return lines(series, "Figure 5: the traces", "seconds", "of the most there is (%)")


def figure_6() -> str:
    """Prefill tokens per step over time, in both modes."""
    series = []
    for adaptive, name in ((False, "default"), (True, "adaptive")):
        steps = burst_run(_SEED, "cake", adaptive)[0].steps
        series.append(
            Series(name, [step.now for step in steps], [step.prefill_tokens for step in steps])
        )
    return lines(series, "Figure 6: prefill tokens per step", "seconds", "tokens in the step")


PLOTS: Mapping[str, Callable[[], str]] = {
    "cake-cells": against_print,
    "cake-table3": bandwidths,
    "cake-fig4": figure_4,
    "cake-fig5": figure_5,
    "cake-fig5-traces": figure_5_traces,
    "cake-fig6": figure_6,
}
