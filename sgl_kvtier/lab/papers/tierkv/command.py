"""TierKV's Tables 4 to 7 in two readings, and in `TABLES` the figures beside them.

"printed" is the accounting that gives the numbers, with few fitted coefficients. printed.py
describes that accounting; fit.py names the fitted cells. "honest" runs the same arrivals
with bytes that obey the link (honest.py). The paper contradicts itself;
published/tierkv_contradictions.csv lists where, and which statement was followed.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgl_kvtier.lab.papers.tierkv.figures import figure_4, figure_5, figure_6, figure_7
from sgl_kvtier.lab.papers.tierkv.runs import HONEST, PRINTED, column, column_honest, sweep
from sgl_kvtier.lab.papers.tierkv.setup import (
    COLUMN_POLICIES,
    HONEST_LEVELS,
    LEVELS,
    POLICIES,
    load_setup,
    printed_table,
)
from sgl_kvtier.lab.sim.cells import Cell, Tables

MODELS = ("7B", "13B", "30B", "70B")

OWN_HBM = "printed"
ONE_HBM = "printed, 7B's HBM for all"
SWEEP_HBM = "printed, HBM of 3.0x"
GQA = "printed, 70B with 8 KV heads"
"""How Table 4 can be read. Under the first each column has an HBM fitted on its LRU cell."""

_OVERSUBSCRIPTION = 3.0
_MEASURE = {"5": "tpot_ms", "6": "p95_tpot_ms", "7": "tokens_per_s"}
_UNIT = {"5": "ms", "6": "ms", "7": "tokens/s"}


def table_4() -> list[Cell]:
    """Mean TPOT by model at 3x."""
    sweep_hbm = load_setup().printed["hbm_bytes"] / _OVERSUBSCRIPTION
    first_hbm = load_setup().fitted["column_hbm_bytes"]["7B"]
    cells = []
    for row, policy in COLUMN_POLICIES.items():
        cells += [_cell_4(row, model, column(policy, model).tpot_ms, OWN_HBM) for model in MODELS]
        cells.append(_cell_4(row, "70B", column(policy, "70B GQA").tpot_ms, GQA))
    cells += list(_derived())
    for reading, hbm in ((ONE_HBM, first_hbm), (SWEEP_HBM, sweep_hbm)):
        cells += [
            _cell_4("LRU", model, column("LRU", model, hbm).tpot_ms, reading) for model in MODELS
        ]
    for row, policy in COLUMN_POLICIES.items():
        cells += [
            _cell_4(row, m, column_honest(policy, m, sweep_hbm).tpot_ms, HONEST) for m in MODELS
        ]
    return cells


def table_5() -> list[Cell]:
    """Mean TPOT by oversubscription."""
    return list(_sweep_cells("5"))


def table_6() -> list[Cell]:
    """P95 TPOT by oversubscription."""
    return list(_sweep_cells("6"))


def table_7() -> list[Cell]:
    """Throughput by oversubscription."""
    return list(_sweep_cells("7"))


def _sweep_cells(table: str) -> Iterator[Cell]:
    published, setup = printed_table(table), load_setup()
    for reading, levels in ((PRINTED, LEVELS), (HONEST, HONEST_LEVELS)):
        for level in levels:
            for policy in POLICIES:
                if (str(level), policy) not in published:
                    continue
                ours = getattr(sweep(reading, policy, level), _MEASURE[table])
                fitted = reading == PRINTED and setup.is_fitted(table, str(level), policy)
                yield Cell(
                    table,
                    f"{level}x",
                    policy,
                    published[str(level), policy],
                    ours,
                    _UNIT[table],
                    fitted,
                    reading,
                )


def _cell_4(row: str, model: str, ours: float, reading: str) -> Cell:
    fitted = reading in (OWN_HBM, GQA) and load_setup().is_fitted("4", row, model)
    return Cell("4", row, model, printed_table("4")[row, model], ours, "ms", fitted, reading)


def _derived() -> Iterator[Cell]:
    """Table 4's last two rows, from our own numbers."""
    for model in MODELS:
        lru, ours, oracle = (
            column(policy, model).tpot_ms for policy in ("LRU", "Prefetch", "Oracle")
        )
        for row, value in (
            ("% Reduction vs. LRU", 1 - ours / lru),
            ("% Gap to Oracle", ours / oracle - 1),
        ):
            yield Cell(
                "4", row, model, printed_table("4")[row, model], 100 * value, "%", False, OWN_HBM
            )


TABLES: Tables = {
    "4": table_4,
    "5": table_5,
    "6": table_6,
    "7": table_7,
    "fig4": figure_4,
    "fig5": figure_5,
    "fig6": figure_6,
    "fig7": figure_7,
}
"""Fig. 3 shows Table 5."""
