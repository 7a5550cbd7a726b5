"""Plots of TierKV's experiments, as SVG text by file name. Needs the extra [lab]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sgl_kvtier.lab.pages.plots import Series, cdf, lines
from sgl_kvtier.lab.papers.tierkv.figures import LOOKAHEADS, latency_run
from sgl_kvtier.lab.papers.tierkv.machine import Run, Server
from sgl_kvtier.lab.papers.tierkv.measures import latencies_ms, measure
from sgl_kvtier.lab.papers.tierkv.runs import HONEST, PRINTED, burst_run, column_run, sweep
from sgl_kvtier.lab.papers.tierkv.setup import (
    HONEST_LEVELS,
    LEVELS,
    POLICIES,
    load_setup,
    printed_figure,
    printed_table,
)

_LEVEL = "oversubscription (HBM is 80 GB over this)"
_BLOCK_SIZES = (4, 8, 16, 32, 64, 96, 128)


def figure_3() -> str:
    """Mean TPOT by oversubscription: simulated lines beside the printed numbers."""
    published = printed_table("5")
    series = []
    for policy in ("LRU", "Freq", "Static", "Attn-Pref.", "Prefetch"):
        simulated = [sweep(PRINTED, policy, level).tpot_ms for level in LEVELS]
        series.append(Series(policy, LEVELS, simulated))
        series.append(
            Series(f"{policy}, print", LEVELS, [published[str(level), policy] for level in LEVELS])
        )
    return lines(
        series,
        "Figure 3, reading “printed”: simulated and as printed",
        _LEVEL,
        "mean TPOT (ms)",
        log_y=True,
    )


def both_readings() -> str:
    """Mean TPOT of three policies in both readings; the others lie between LRU and Prefetch."""
    series = []
    for reading, levels in ((HONEST, HONEST_LEVELS), (PRINTED, LEVELS)):
        for policy in ("LRU", "Prefetch", "Oracle"):
            values = [sweep(reading, policy, level).tpot_ms for level in levels]
            series.append(Series(f"{policy}, {reading}", levels, values))
    return lines(series, "Mean TPOT in the two readings", _LEVEL, "mean TPOT (ms)", log_y=True)


def honest_throughput() -> str:
    """Throughput when bytes obey the link."""
    series = [
        Series(
            policy,
            HONEST_LEVELS,
            [sweep(HONEST, policy, level).tokens_per_s for level in HONEST_LEVELS],
        )
        for policy in POLICIES
    ]
    return lines(series, "Throughput when bytes obey the link", _LEVEL, "tokens/s", log_y=True)


def figure_4() -> str:
    """Latencies of single requests."""
    samples = {
        policy: latencies_ms(latency_run(policy)) for policy in ("LRU", "Prefetch", "Oracle")
    }
    return cdf(samples, "Figure 4: request latency, reading “printed”", "milliseconds")


def figure_6a() -> str:
    """TPOT by lookahead."""
    setup = load_setup()
    server = setup.column_server("7B")
    runs = [
        column_run(setup, server, setup.column_load(), "Prefetch", steps) for steps in LOOKAHEADS
    ]
    simulated = Series("simulated", LOOKAHEADS, _tpots(runs, [server] * len(runs)))
    published = printed_figure("fig6")
    shown = [steps for steps in LOOKAHEADS if (f"K={steps}", "TPOT") in published]
    series = [
        simulated,
        Series("as printed", shown, [published[f"K={steps}", "TPOT"] for steps in shown]),
    ]
    return lines(
        series, "Figure 6a: lookahead, reading “printed”", "K", "mean TPOT (ms)", whole_x=True
    )


def figure_6b() -> str:
    """TPOT by block size."""
    setup = load_setup()
    servers = [setup.column_server("7B", block_tokens=tokens) for tokens in _BLOCK_SIZES]
    runs = [column_run(setup, server, setup.column_load(), "Prefetch") for server in servers]
    series = [Series("simulated", _BLOCK_SIZES, _tpots(runs, servers))]
    return lines(
        series, "Figure 6b: block size, reading “printed”", "tokens per block", "mean TPOT (ms)"
    )


def figure_7() -> str:
    """Gigabytes in HBM and DRAM over time."""
    server, run = load_setup().sweep_server(3.0), burst_run(load_setup())
    seconds = [one.start_s for one in run.steps]
    total = [one.tokens * server.kv_bytes_per_token / 1e9 for one in run.steps]
    hbm = [min(value, server.hbm_bytes / 1e9) for value in total]
    dram = [all_gb - hbm_gb for all_gb, hbm_gb in zip(total, hbm, strict=True)]
    series = [Series("HBM", seconds, hbm), Series("DRAM", seconds, dram)]
    return lines(series, "Figure 7: tiers in a burst, reading “printed”", "seconds", "GB of KV")


def figure_7_hits() -> str:
    """The share of the batch's KV in HBM over the same time."""
    run = burst_run(load_setup())
    seconds = [one.start_s for one in run.steps]
    series = [Series("in HBM", seconds, [100 * one.paging.hit_share for one in run.steps])]
    return lines(series, "Figure 7: hit rate in a burst", "seconds", "of the batch's KV (%)")


def _tpots(runs: list[Run], servers: list[Server]) -> list[float]:
    return [
        measure(run, server.kv_bytes_per_token).tpot_ms
        for run, server in zip(runs, servers, strict=True)
    ]


PLOTS: Mapping[str, Callable[[], str]] = {
    "tierkv-fig3": figure_3,
    "tierkv-readings": both_readings,
    "tierkv-honest-throughput": honest_throughput,
    "tierkv-fig4": figure_4,
    "tierkv-fig6a": figure_6a,
    "tierkv-fig6b": figure_6b,
    "tierkv-fig7": figure_7,
    "tierkv-fig7-hits": figure_7_hits,
}
