"""TierKV's Tables 4 to 7 and its Figure 6a beside a machine whose bytes obey the link (honest.py).

The paper contradicts itself; published/tierkv_contradictions.csv lists where, and which statement
was followed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sgl_kvtier.lab.papers.tierkv.measures import Measures
from sgl_kvtier.lab.papers.tierkv.runs import column, sweep
from sgl_kvtier.lab.papers.tierkv.setup import (
    COLUMN_POLICIES,
    LEVELS,
    POLICIES,
    printed_figure,
    printed_table,
)
from sgl_kvtier.lab.sim.cells import Cell, Fitted, Tables

FITTED = Fitted(parameters=10, numbers=28)
"""coefficients.json: arrivals, lengths and step times, to cells of Tables 4 to 7."""

MODELS = ("7B", "13B", "30B", "70B")
_LOOKAHEADS = (0, 1, 16)


def table_4() -> list[Cell]:
    """Mean TPOT by model at 3x."""
    published = printed_table("4")
    return [
        Cell("4", row, model, published[row, model], column(policy, model).tpot_ms, "ms")
        for row, policy in COLUMN_POLICIES.items()
        for model in MODELS
    ]


def figure_6() -> list[Cell]:
    """The lookahead K on 7B at 3x."""
    published, cells = printed_figure("fig6"), []
    for steps in _LOOKAHEADS:
        seen = column("Prefetch", "7B", steps)
        numbers = {
            "TPOT": (seen.tpot_ms, "ms"),
            "hit rate": (100 * seen.hit_share, "%"),
            "wasted bandwidth": (100 * seen.wasted_share, "%"),
        }
        for name, (value, unit) in numbers.items():
            row = f"K={steps}"
            cells.append(Cell("fig6", row, name, published.get((row, name)), value, unit))
    return cells


def _sweep_cells(table: str, unit: str, figure: Callable[[Measures], float]) -> list[Cell]:
    """A table by oversubscription and policy."""
    published = printed_table(table)
    return [
        Cell(
            table, f"{level}x", policy, published[str(level), policy],
            figure(sweep(policy, level)), unit,
        )
        for level in LEVELS
        for policy in POLICIES
        if (str(level), policy) in published
    ]  # fmt: skip


TABLES: Tables = {
    "4": table_4,
    "5": partial(_sweep_cells, "5", "ms", lambda seen: seen.tpot_ms),
    "6": partial(_sweep_cells, "6", "ms", lambda seen: seen.p95_tpot_ms),
    "7": partial(_sweep_cells, "7", "tokens/s", lambda seen: seen.tokens_per_s),
    "fig6": figure_6,
}
"""Mean TPOT, P95 of TPOT, and throughput are Tables 5, 6 and 7."""
