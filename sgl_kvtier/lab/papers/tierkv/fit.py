"""The coefficients of the reading "printed", computed from the printed cells it names.

`python -m sgl_kvtier.lab.papers.tierkv.fit` writes them. Fitted, in this order; every other cell is
a prediction:

1. Tables 5, 6 and 7 at 1.0x: compute time per step and per request in the batch, arrivals per
   second.
2. Table 6 at 2.0x, LRU, Freq and Attn-Pref. as ratios to Static: each policy's share of a fault's
   cost. Static's is 1.
3. Table 5, LRU and Static at 1.5x and 5.0x: the number of requests of a run, and the longest
   generation, from a coarse grid.
4. Table 5 at 5.0x, Prefetch and Oracle: their cost per fault.
5. Fig. 4, mean of Prefetch: the share of long generations. Table 4: Oracle of 13B and 70B (compute
   times that appendix A leaves out) and LRU of every column (its HBM; printed is 3.0x for all).
   Fig. 5: LRU of summarization and Prefetch of mixed (HBM again). Fig. 7: the strength of the
   burst, from the DRAM it fills.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sgl_kvtier.lab.papers.tierkv.machine import Server
from sgl_kvtier.lab.papers.tierkv.measures import Measures, measure
from sgl_kvtier.lab.papers.tierkv.runs import burst_run, column_run, printed_measures
from sgl_kvtier.lab.papers.tierkv.setup import (
    COEFFICIENTS,
    POLICIES,
    Setup,
    load_setup,
    printed_figure,
    printed_table,
)

_REQUESTS = (300, 400, 500, 600)
_LONGEST = (512, 1024, 2048, 4096)
_GRID_CELLS = tuple((level, policy) for policy in ("LRU", "Static") for level in (1.5, 5.0))


def fit(start: Setup) -> Setup:
    """All coefficients anew; `start` gives what is printed and assumed, and where the search
    begins.
    """
    setup = replace(start, fitted={**start.fitted, "shares": _shares_under_stalls()})
    setup = _fit_length(setup)
    setup = _fit_lookahead_shares(setup)
    setup = _fit_columns(setup)
    setup = _fit_figures(setup)
    return replace(setup, fitted_on=fitted_cells())


def fitted_cells() -> dict[str, list[list[str]]]:
    """[table, row, column] of the cells each step uses."""
    columns = ("7B", "13B", "30B", "70B")
    return {
        "1 compute and arrivals": [
            [table, "1.0", policy] for table in "567" for policy in POLICIES
        ],
        "2 shares": [["6", "2.0", policy] for policy in ("LRU", "Freq", "Attn-Pref.", "Static")],
        "3 run length": [["5", str(level), policy] for level, policy in _GRID_CELLS],
        "4 lookahead": [["5", "5.0", policy] for policy in ("Prefetch", "Oracle")],
        "5 columns": [["fig4", "Prefetch", "mean"]]
        + [["4", "LRU", model] for model in columns]
        + [["4", "Oracle", model] for model in ("13B", "70B")],
        "6 figures": [
            ["fig5", "summarization", "LRU P95"],
            ["fig5", "mixed", "Prefetch reduction"],
            ["fig7", "burst", "DRAM"],
        ],
    }


def _shares_under_stalls() -> dict[str, float]:
    """Table 6's stalls at 2.0x over Static's: P95 less what it is without stalls."""
    cells = printed_table("6")
    stall = {policy: cells["2.0", policy] - cells["1.0", policy] for policy in POLICIES[:4]}
    return {policy: round(stall[policy] / stall["Static"], 4) for policy in POLICIES[:4]} | {
        "Prefetch": 0,
        "Oracle": 0,
    }


def _fit_unloaded(setup: Setup) -> Setup:
    """Compute time and arrivals such that a run without stalls has the printed mean, P95 and
    throughput.
    """
    tpot, p95 = printed_table("5")["1.0", "LRU"] / 1e3, printed_table("6")["1.0", "LRU"] / 1e3
    wanted = printed_table("7")["1.0", "LRU"]
    for _ in range(4):
        server = replace(setup.sweep_server(1.0), hbm_bytes=1e18)
        seen = printed_measures(setup, server, setup.sweep_load(), "Oracle")
        per_request = server.step_s_per_request
        mean_running = (seen.tpot_ms / 1e3 - server.step_s) / per_request
        p95_running = (seen.p95_tpot_ms / 1e3 - server.step_s) / per_request
        slope = (p95 - tpot) / (p95_running - mean_running)
        setup = _with(
            setup,
            step_s_per_request=slope,
            step_s=tpot - slope * mean_running,
            tokens_per_s=setup.fitted["tokens_per_s"] * wanted / seen.tokens_per_s,
        )
    return setup


def _fit_length(setup: Setup) -> Setup:
    candidates = []
    for requests in _REQUESTS:
        for longest in _LONGEST:
            tried = _fit_unloaded(_with(setup, requests=requests, generated=[[1, 128, longest]]))
            if _stalls(tried, 1.0):
                continue
            candidates.append((_grid_error(tried), requests, longest, tried))
    return min(candidates, key=lambda one: one[:3])[3]


def _stalls(setup: Setup, level: float) -> bool:
    return (
        printed_measures(setup, setup.sweep_server(level), setup.sweep_load(), "LRU").hit_share < 1
    )


def _grid_error(setup: Setup) -> float:
    cells = printed_table("5")
    return sum(
        abs(math.log(_tpot(setup, level, policy) / cells[str(level), policy]))
        for level, policy in _GRID_CELLS
    )


def _tpot(setup: Setup, level: float, policy: str) -> float:
    return printed_measures(setup, setup.sweep_server(level), setup.sweep_load(), policy).tpot_ms


def _fit_lookahead_shares(setup: Setup) -> Setup:
    cells = printed_table("5")
    shares = dict(setup.fitted["shares"])
    for policy in ("Prefetch", "Oracle"):

        def at(share: float, policy: str = policy) -> float:
            return _tpot(_with(setup, shares={**shares, policy: share}), 5.0, policy)

        shares[policy] = round(_solve(at, cells["5.0", policy], 0.0, 0.05), 5)
    return _with(setup, shares=shares)


def _fit_columns(setup: Setup) -> Setup:
    cells = printed_table("4")
    step_s = {model: cells["Oracle", model] / 1e3 for model in ("13B", "70B")}
    setup = _with(setup, column_step_s=step_s, column_generated=_long_generations())
    found: dict[str, float] = {}
    for model in setup.models:
        full = setup.column_load().contexts.mean * setup.kv_bytes(model) * setup.printed["batch"]

        def at(hbm_bytes: float, model: str = model) -> float:
            # Less HBM, more stall: the solver wants a rising function.
            return _column(setup, setup.column_server(model, -hbm_bytes), "LRU").tpot_ms

        found[model] = float(
            f"{-_solve(at, cells['LRU', model.removesuffix(' GQA')], -3 * full, -0.05 * full):.4g}"
        )
    return _with(setup, column_hbm_bytes=found)


def _fit_figures(setup: Setup) -> Setup:
    cells = printed_figure("fig5")
    full = 8192 * setup.kv_bytes("7B") * setup.printed["batch"]

    def lru_p95(hbm_bytes: float) -> float:
        return _column(
            setup, setup.column_server("7B", -hbm_bytes), "LRU", "summarization"
        ).p95_tpot_ms

    def reduction(hbm_bytes: float) -> float:
        server = setup.column_server("7B", -hbm_bytes)
        lru, ours = (
            _column(setup, server, policy, "mixed").p95_tpot_ms for policy in ("LRU", "Prefetch")
        )
        return 100 * (1 - ours / lru)

    hbm = {
        "summarization": -_solve(lru_p95, cells["summarization", "LRU P95"], -full, -0.01 * full),
        "mixed": -_solve(reduction, cells["mixed", "Prefetch reduction"], -full, -0.01 * full),
    }
    setup = _with(
        setup, workload_hbm_bytes={name: float(f"{value:.4g}") for name, value in hbm.items()}
    )

    def dram_gb(factor: float) -> float:
        tried = _with(setup, burst_factor=factor)
        server = tried.sweep_server(3.0)
        most = max(one.tokens for one in burst_run(tried).steps) * server.kv_bytes_per_token
        return (most - server.hbm_bytes) / 1e9

    return _with(
        setup, burst_factor=_solve(dram_gb, printed_figure("fig7")["burst", "DRAM"], 1.0, 20.0)
    )


def _column(setup: Setup, server: Server, policy: str, workload: str | None = None) -> Measures:
    return measure(
        column_run(setup, server, setup.column_load(workload), policy), server.kv_bytes_per_token
    )


def _long_generations() -> list[list[float]]:
    """Short generations as in the chatbot workload, long ones up to the longest context. Their
    shares follow from the mean latency and TPOT.
    """
    tokens = (
        printed_figure("fig4")["Prefetch", "mean"] / printed_table("4")["TierKV-Prefetch", "7B"]
    )
    short, long = (128, 512), (2048, 4096)
    share = (tokens - sum(short) / 2) / (sum(long) / 2 - sum(short) / 2)
    return [[round(1 - share, 3), *short], [round(share, 3), *long]]


def _with(setup: Setup, **fitted: Any) -> Setup:
    return replace(setup, fitted={**setup.fitted, **fitted})


def _solve(
    rising: Callable[[float], float], wanted: float, low: float, high: float, rounds: int = 24
) -> float:
    """Where a rising function takes a value, by halving."""
    for _ in range(rounds):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return (
        [_rounded(item) for item in value]
        if isinstance(value, Iterable) and not isinstance(value, str)
        else value
    )


def main() -> None:
    """Writes the fitted part of coefficients.json anew."""
    data = json.loads(COEFFICIENTS.read_text("utf-8"))
    setup = fit(load_setup())
    data["fitted"] = _rounded(dict(setup.fitted))
    data["fitted_on"] = dict(setup.fitted_on)
    COEFFICIENTS.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
