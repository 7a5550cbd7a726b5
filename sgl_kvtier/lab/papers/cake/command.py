"""Cake from the simulator: Tables 3 to 7 with the averages of the text, and Figures 4 to 6.

Each printed pair gives four cells: both speedups by the rule of the paper beside the print, and by
ours. `run` says how the paper is read, and `fit` what was fitted.
published/cake_contradictions.csv says where the paper contradicts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

from sgl_kvtier.lab.papers.cake.figures import figure_4, figure_5, figure_6
from sgl_kvtier.lab.papers.cake.fit import is_fitted
from sgl_kvtier.lab.papers.cake.grid import TABLES as PRINTED
from sgl_kvtier.lab.papers.cake.grid import Pair, printed, printed_averages
from sgl_kvtier.lab.papers.cake.run import Times, least_seconds, times
from sgl_kvtier.lab.sim.cells import NULL, Cell, Fitted, Tables

CAKE, OURS = "cake's rule", "kvtier"
"""Readings of a cell: whose rule it is."""

FITTED = Fitted(parameters=16, numbers=19)
"""coefficients.json: the printed ratios that `is_fitted` names, and what is solved from them."""

_LABELS = ("over I/O", "over compute")


def table(name: str) -> Sequence[Cell]:
    """Every printed number of one table: the paper's rule beside the print, then ours, which is not
    printed.
    """
    cells = []
    for pair in printed(name):
        ours = times(pair.setup)
        cells += _cells(pair, ours.cake_s, ours, CAKE)
        cells += _cells(pair, ours.kvtier_s, ours, OURS)
    return cells


def _cells(pair: Pair, seconds: float, ours: Times, reading: str) -> list[Cell]:
    fitted, compared = is_fitted(pair), reading != OURS
    speedups = (ours.io_s / seconds, ours.compute_s / seconds)
    numbers = zip(_LABELS, (pair.over_io, pair.over_compute), speedups, strict=True)
    return [
        Cell(
            table=f"cake {pair.table}",
            row=pair.row,
            column=f"{pair.column} {label}",
            published=published if compared else None,
            ours=round(speedup, 4),
            unit="x",
            fitted=fitted,
            reading=reading,
        )
        for label, published, speedup in numbers
    ]


def null_model() -> Sequence[Cell]:
    """Eq. 1's time, loading times computing over their sum, from each pair's own printed ratio:
    what the print implies without any planner.
    """
    cells = []
    for pair in (pair for name in PRINTED for pair in printed(name)):
        speedups = (1 + pair.over_io / pair.over_compute, 1 + pair.over_compute / pair.over_io)
        numbers = zip(_LABELS, (pair.over_io, pair.over_compute), speedups, strict=True)
        cells += [
            Cell(
                f"cake {pair.table}",
                pair.row,
                f"{pair.column} {label}",
                published,
                round(speedup, 4),
                "x",
                fitted=is_fitted(pair),
                reading=NULL,
            )
            for label, published, speedup in numbers
        ]
    return cells


def averages() -> Sequence[Cell]:
    """The averages of sections 5.2 to 5.5, over the pairs without a number above ten ("highlighted
    in red").
    """
    cells = []
    for name, *numbers in printed_averages():
        pairs = [pair for pair in printed(name) if max(pair.over_io, pair.over_compute) <= 10]
        ours = [times(pair.setup) for pair in pairs]
        means = (
            sum(one.io_s / one.cake_s for one in ours) / len(ours),
            sum(one.compute_s / one.cake_s for one in ours) / len(ours),
        )
        of_cells = (
            sum(p.over_io for p in pairs) / len(pairs),
            sum(p.over_compute for p in pairs) / len(pairs),
        )
        for label, number, mean, cell_mean in zip(_LABELS, numbers, means, of_cells, strict=True):
            reading = f"the printed cells average {cell_mean:.2f}"
            cells.append(
                Cell(
                    "cake averages",
                    f"Table {name}",
                    label,
                    number,
                    round(mean, 4),
                    "x",
                    reading=reading,
                )
            )
    return cells


def optimum() -> Sequence[Cell]:
    """Per table: the median share of the best possible speed that is reached, T_opt over the time
    taken. Not printed.
    """
    cells = []
    for name in PRINTED:
        setups = [pair.setup for pair in printed(name)]
        for reading in (CAKE, OURS):
            reached = [
                least_seconds(s) / (times(s).cake_s if reading == CAKE else times(s).kvtier_s)
                for s in setups
            ]
            for label, value in (("median", median(reached)), ("least", min(reached))):
                ours = round(100 * value, 2)
                cells.append(
                    Cell(
                        "cake optimum",
                        f"Table {name}",
                        label,
                        None,
                        ours,
                        "% of T_opt",
                        reading=reading,
                    )
                )
    return cells


TABLES: Tables = {
    **{name: partial(table, name) for name in PRINTED},
    "null": null_model,
    "averages": averages,
    "optimum": optimum,
    "fig4": figure_4,
    "fig5": figure_5,
    "fig6": figure_6,
}
