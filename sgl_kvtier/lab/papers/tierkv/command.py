"""TierKV's Tables 4 to 7 and its Figure 6a beside a machine whose bytes obey the link (honest.py).
Beside Tables 5 to 7 also the accounting that gives the printed numbers, and a null model.

The paper contradicts itself; published/tierkv_contradictions.csv lists where, and which statement
was followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sgl_kvtier.lab.papers.tierkv.measures import Measures
from sgl_kvtier.lab.papers.tierkv.runs import accounted, column, sweep
from sgl_kvtier.lab.papers.tierkv.setup import (
    COLUMN_POLICIES,
    LEVELS,
    POLICIES,
    PRINTED_LEVELS,
    load_setup,
    printed_figure,
    printed_table,
)
from sgl_kvtier.lab.sim.cells import NULL, Cell, Fitted, Tables

FITTED = Fitted(parameters=13, numbers=32)
"""coefficients.json: 5 quantities of the sweep's load to 22 cells of Tables 5 to 7, 5 shares of the
accounting to 6, 3 of Table 4's columns to 4.
"""

BYTES, ONE_BLOCK = "bytes obey the link", "one block per fault"
"""The readings: what a fault is charged."""

MODELS = ("7B", "13B", "30B", "70B")
_LOOKAHEADS = (0, 1, 16)
_MEASURES: dict[str, tuple[str, Callable[[Measures], float]]] = {
    "5": ("ms", lambda seen: seen.tpot_ms),
    "6": ("ms", lambda seen: seen.p95_tpot_ms),
    "7": ("tokens/s", lambda seen: seen.tokens_per_s),
}
"""Mean TPOT, P95 of TPOT, and throughput are Tables 5, 6 and 7."""


def table_4() -> list[Cell]:
    """Mean TPOT by model at 3x."""
    published, setup = printed_table("4"), load_setup()
    return [
        Cell(
            "4", row, model, published[row, model], column(policy, model).tpot_ms, "ms",
            setup.is_fitted("columns", "4", row, model), BYTES,
        )
        for row, policy in COLUMN_POLICIES.items()
        for model in MODELS
    ]  # fmt: skip


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
            given = published.get((row, name))
            cells.append(Cell("fig6", row, name, given, value, unit, reading=BYTES))
    return cells


def accounting() -> list[Cell]:
    """Tables 5 to 7 at every printed level, by the accounting and by the null model."""
    return [
        cell
        for table in _MEASURES
        for cell in (
            *_sweep_cells(table, PRINTED_LEVELS, accounted, ONE_BLOCK),
            *_null_cells(table),
        )
    ]


def _sweep_cells(
    table: str, levels: Sequence[float], point: Callable[[str, float], Measures], reading: str
) -> list[Cell]:
    """A table by oversubscription and policy."""
    published, setup = printed_table(table), load_setup()
    unit, figure = _MEASURES[table]
    parts = ("load", "shares") if reading == ONE_BLOCK else ("load",)
    return [
        Cell(
            table, f"{level}x", policy, published[str(level), policy],
            figure(point(policy, level)), unit,
            any(setup.is_fitted(part, table, str(level), policy) for part in parts), reading,
        )
        for level in levels
        for policy in POLICIES
        if (str(level), policy) in published
    ]  # fmt: skip


def _null_cells(table: str) -> list[Cell]:
    """The print's own ratios, without machine or load: a policy's stall is a constant share of the
    stall that the same row prints for LRU. LRU and the cells that give the shares predict nothing.
    """
    published, shares = printed_table(table), _printed_shares()
    return [
        Cell(
            table, f"{level}x", policy, published[str(level), policy],
            _null(table, str(level), shares.get(policy, 1.0)), _MEASURES[table][0],
            policy == "LRU" or level == 1.0 or (table, str(level)) == _SHARES_FROM[policy],
            f"{ONE_BLOCK}; {NULL}",
        )
        for level in PRINTED_LEVELS
        for policy in POLICIES
        if (str(level), policy) in published
    ]  # fmt: skip


_SHARES_FROM = {
    **dict.fromkeys(("Freq", "Attn-Pref.", "Static"), ("6", "2.0")),
    **dict.fromkeys(("Prefetch", "Oracle"), ("5", "5.0")),
}
"""The cells that also the accounting's shares come from."""


def _printed_shares() -> dict[str, float]:
    """Each policy's stall over LRU's in one printed row."""
    return {
        policy: _stall(table, level, policy) / _stall(table, level, "LRU")
        for policy, (table, level) in _SHARES_FROM.items()
    }


def _stall(table: str, level: str, policy: str) -> float:
    published = printed_table(table)
    return published[level, policy] - published["1.0", policy]


def _null(table: str, level: str, share: float) -> float:
    """Tables 5 and 6: the time without stalls and the share of LRU's. Table 7: LRU's batch over
    that time, at most what is asked for.
    """
    if table != "7":
        return printed_table(table)["1.0", "LRU"] + share * _stall(table, level, "LRU")
    rates, seconds = printed_table("7"), printed_table("5")
    batch = rates[level, "LRU"] * seconds[level, "LRU"]
    return min(rates["1.0", "LRU"], batch / _null("5", level, share))


TABLES: Tables = {
    "4": table_4,
    **{name: partial(_sweep_cells, name, LEVELS, sweep, BYTES) for name in _MEASURES},
    "fig6": figure_6,
    "accounting": accounting,
}
