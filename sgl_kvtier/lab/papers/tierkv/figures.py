"""TierKV's Figures 4 to 7: request latencies, workloads, lookahead and block size, and tiers over
time in a burst.

The text gives some of their numbers; the others have no `published`. All but the last are the batch
of 32 of Table 4's 7B column with its HBM.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgl_kvtier.lab.papers.tierkv.load import Load
from sgl_kvtier.lab.papers.tierkv.machine import Run, Server
from sgl_kvtier.lab.papers.tierkv.measures import latencies_ms, measure
from sgl_kvtier.lab.papers.tierkv.runs import (
    HONEST,
    PRINTED,
    burst_run,
    column,
    column_honest,
    column_run,
    requests_of,
)
from sgl_kvtier.lab.papers.tierkv.setup import load_setup, printed_figure
from sgl_kvtier.lab.sim.cells import Cell

LOOKAHEADS = (0, 1, 2, 4, 8, 16)
BLOCKS = (4, 8, 16, 32, 64, 128, 256)
OWN_HBM = "printed, HBM per workload"

_HONEST_LOOKAHEADS = (0, 1, 16)


def figure_4() -> list[Cell]:
    """Per-request latency at 3x."""
    cells = []
    for policy in ("LRU", "Prefetch", "Oracle"):
        values = latencies_ms(latency_run(policy))
        numbers = {
            "mean": sum(values) / len(values),
            "P95": _quantile(values, 0.95),
            "P99": _quantile(values, 0.99),
        }
        cells += [_cell("fig4", policy, name, value, "ms") for name, value in numbers.items()]
    return cells


def latency_run(policy: str) -> Run:
    """The run behind Fig. 4."""
    setup = load_setup()
    return column_run(setup, setup.column_server("7B"), setup.column_load(), policy)


def figure_5() -> list[Cell]:
    """P95 TPOT by workload: with one HBM for all, and with one fitted for each workload that is
    printed.
    """
    setup = load_setup()
    cells: list[Cell] = []
    for workload in setup.printed["workloads"]:
        cells += _workload(workload, None, PRINTED)
    for workload, hbm_bytes in setup.fitted["workload_hbm_bytes"].items():
        cells += _workload(workload, hbm_bytes, OWN_HBM)
    return cells


def _workload(workload: str, hbm_bytes: float | None, reading: str) -> Iterator[Cell]:
    lru, attention, ours = (
        column(policy, "7B", hbm_bytes, workload).p95_tpot_ms
        for policy in ("LRU", "Attn-Pref.", "Prefetch")
    )
    numbers = {
        "LRU P95": (lru, "ms"),
        "Prefetch P95": (ours, "ms"),
        "Prefetch reduction": (100 * (1 - ours / lru), "%"),
        "Attn-Prefetch reduction": (100 * (1 - attention / lru), "%"),
    }
    for name, (value, unit) in numbers.items():
        yield _cell("fig5", workload, name, value, unit, reading)


def figure_6() -> list[Cell]:
    """(a) lookahead K, (b) block size."""
    setup = load_setup()
    load = setup.column_load()
    cells = []
    for steps in LOOKAHEADS:
        server = setup.column_server("7B")
        seen = measure(
            column_run(setup, server, load, "Prefetch", steps), server.kv_bytes_per_token
        )
        cells.append(_cell("fig6", f"K={steps}", "TPOT", seen.tpot_ms, "ms"))
        cells.append(_cell("fig6", f"K={steps}", "hit rate", 100 * seen.hit_share, "%"))
    for tokens in BLOCKS:
        server = setup.column_server("7B", block_tokens=tokens)
        seen = measure(column_run(setup, server, load, "Prefetch"), server.kv_bytes_per_token)
        cells.append(_cell("fig6", f"{tokens} tokens", "TPOT", seen.tpot_ms, "ms"))
        cells.append(
            _cell("fig6", f"{tokens} tokens", "fragmentation", fragmentation(load, tokens), "%")
        )
        cells.append(
            _cell("fig6", f"{tokens} tokens", "transfer efficiency", efficiency(server), "%")
        )
    hbm_bytes = setup.printed["hbm_bytes"] / 3.0
    for steps in _HONEST_LOOKAHEADS:
        seen = column_honest("Prefetch", "7B", hbm_bytes, steps)
        cells.append(_cell("fig6", f"K={steps}", "TPOT", seen.tpot_ms, "ms", HONEST))
        cells.append(_cell("fig6", f"K={steps}", "hit rate", 100 * seen.hit_share, "%", HONEST))
        # The reading "printed" moves no bytes that could be wasted.
        cells.append(
            _cell("fig6", f"K={steps}", "wasted bandwidth", 100 * seen.wasted_share, "%", HONEST)
        )
    return cells


def fragmentation(load: Load, block_tokens: int) -> float:
    """Per cent of the contexts' size that lies empty in their last blocks."""
    contexts = [one.context for one in requests_of(load, load_setup().seeds[0])]
    return 100 * sum(-one % block_tokens for one in contexts) / sum(contexts)


def efficiency(server: Server) -> float:
    """Per cent of a block's transfer, alone on the link, in which bytes move: Eq. 2 without its
    latency over Eq. 2.
    """
    bytes_s = server.block_bytes / server.link_bytes_per_s
    return 100 * bytes_s / (server.link_latency_s + bytes_s)


def figure_7() -> list[Cell]:
    """Tiers and hit rate in a burst."""
    setup = load_setup()
    server = setup.sweep_server(3.0)
    run = burst_run(setup)
    fullest = max(run.steps, key=lambda one: one.tokens)
    gb = fullest.tokens * server.kv_bytes_per_token / 1e9
    hbm_gb = min(gb, server.hbm_bytes / 1e9)
    dram_gb = min(gb - hbm_gb, server.dram_bytes / 1e9)
    numbers = {"HBM": hbm_gb, "DRAM": dram_gb, "SSD": gb - hbm_gb - dram_gb}
    cells = [_cell("fig7", "burst", name, value, "GB") for name, value in numbers.items()]
    cells.append(_cell("fig7", "ramp-up", "hit rate", run.steps[0].paging.hit_share, ""))
    cells.append(_cell("fig7", "burst", "hit rate", fullest.paging.hit_share, ""))
    cells.append(_cell("fig7", "burst", "TPOT", 1e3 * fullest.seconds, "ms"))
    return cells


def _cell(table: str, row: str, name: str, ours: float, unit: str, reading: str = PRINTED) -> Cell:
    fitted = load_setup().is_fitted(table, row, name) and reading == _fitted_in(table)
    return Cell(
        table, row, name, printed_figure(table).get((row, name)), ours, unit, fitted, reading
    )


def _fitted_in(table: str) -> str:
    return OWN_HBM if table == "fig5" else PRINTED


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
