"""All printed numbers of Cake and CacheFlow beside ours, as markdown for docs/results/papers/.

`python -m sgl_kvtier.lab.papers.pages docs/results/papers` replaces the text between the markers of
cake.md and cacheflow.md and writes the plots. The text around the markers is written by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from sgl_kvtier.console import progress
from sgl_kvtier.console.document import write_text
from sgl_kvtier.console.table import Column, Row, Table, to_markdown
from sgl_kvtier.lab.papers.cacheflow import command as cacheflow
from sgl_kvtier.lab.papers.cacheflow.plots import PLOTS as CACHEFLOW_PLOTS
from sgl_kvtier.lab.papers.cacheflow.rig import SCENARIOS
from sgl_kvtier.lab.papers.cake import command as cake
from sgl_kvtier.lab.papers.cake.fit import is_fitted
from sgl_kvtier.lab.papers.cake.grid import TABLES, Pair, printed
from sgl_kvtier.lab.papers.cake.plots import PLOTS as CAKE_PLOTS
from sgl_kvtier.lab.papers.cake.run import least_seconds, times
from sgl_kvtier.lab.papers.parts import CELL, DRAWN, contradictions, replaced, rows, signed
from sgl_kvtier.lab.sim.cells import Cell, Fitted, agreement, split_null

_PAIR = (
    Column("row", "row"),
    Column("column", "column"),
    Column("paper", "paper"),
    Column("cake", "ours, Cake's rule"),
    Column("deviation", "deviation"),
    Column("kvtier", "ours, kvtier"),
    Column("fitted", "fitted"),
)


def cake_markdown() -> str:
    """How well each table agrees, every pair, averages and figures, and where the paper contradicts
    itself.
    """
    parts = [to_markdown(_cake_agreement()), to_markdown(in_figures())]
    parts += [
        to_markdown(Table(f"Cake Table {n}: over I/O-only \\ over compute-only", _PAIR, _pairs(n)))
        for n in TABLES
    ]
    rest = {name: cells for name, cells in cake.TABLES.items() if name not in (*TABLES, "null")}
    parts += [
        to_markdown(Table(f"Cake {name}", CELL, rows(cells()))) for name, cells in rest.items()
    ]
    return "\n".join([*parts, to_markdown(contradictions("cake"))])


def cacheflow_markdown() -> str:
    """How well the figures agree, every cell, and where the paper contradicts itself."""
    cells = {name: table() for name, table in cacheflow.TABLES.items()}
    parts = [_cacheflow_agreement(cells), _map(cells.pop("map"))]
    parts += [Table(f"CacheFlow {name}", DRAWN, rows(one)) for name, one in cells.items()]
    return "\n".join(map(to_markdown, [*parts, contradictions("cacheflow")]))


def main(folder: str) -> None:
    """Rewrites both pages and their plots in this folder."""
    pages = {"cake": cake_markdown, "cacheflow": cacheflow_markdown}
    plots = {**CAKE_PLOTS, **CACHEFLOW_PLOTS}
    with progress("pages of Cake and CacheFlow", len(pages) + len(plots), "parts") as bar:
        for name, computed in pages.items():
            bar.describe(f"{name}.md")
            path, text = Path(folder) / f"{name}.md", computed()
            write_text(replaced(path.read_text("utf-8"), text), str(path))
            bar.advance()
        for name, plot in plots.items():
            bar.describe(f"{name}.svg")
            write_text(plot(), str(Path(folder) / f"{name}.svg"))
            bar.advance()


_AGREEMENT = (
    Column("table", "table"),
    Column("cells", "predicted cells"),
    Column("share", "within 15 %"),
    Column("median", "median absolute deviation"),
    Column("null_share", "null model within 15 %"),
    Column("null_median", "its median"),
)


def _agreement_row(name: str, cells: Sequence[Cell]) -> Row:
    planned, null = map(agreement, split_null(cells))
    return {
        "table": name,
        "cells": planned["predicted"],
        "share": _percent(planned["within_15_percent"]),
        "median": _percent(planned["median_abs_deviation"]),
        "null_share": _percent(null["within_15_percent"]),
        "null_median": _percent(null["median_abs_deviation"]),
    }


def _note(fitted: Fitted, ratio: str) -> str:
    return (
        f"Null model: Eq. 1 on {ratio}, without any planner. Fitted: {fitted.parameters} "
        f"quantities to {fitted.numbers} printed numbers, which are left out."
    )


def _cake_agreement() -> Table:
    null = cake.null_model()
    by_table = {
        name: [*cake.TABLES[name](), *(one for one in null if one.table == f"cake {name}")]
        for name in TABLES
    }
    found = [_agreement_row(f"Table {name}", cells) for name, cells in by_table.items()]
    found.append(_agreement_row("all", [one for cells in by_table.values() for one in cells]))
    note = _note(cake.FITTED, "each pair's own printed ratio")
    return Table("Agreement", _AGREEMENT, found, (note,))


def _cacheflow_agreement(cells: Mapping[str, Sequence[Cell]]) -> Table:
    """Of the figures that show results; the null model where both baselines were run."""
    found = [_agreement_row(f"Figure {name}", cells[name]) for name in _RESULTS]
    found.append(_agreement_row("all", [one for name in _RESULTS for one in cells[name]]))
    note = _note(cacheflow.FITTED, "the ratio of the simulated vLLM and LMCache")
    return Table("Agreement", _AGREEMENT, found, (note,))


_RESULTS = ("4", "5", "6", "7", "7b", "8", "9")


def _map(cells: Sequence[Cell]) -> Table:
    """The break-even of tokens and layers: a column per bandwidth and size of chunk."""
    found: dict[str, dict[str, object]] = {}
    heads: dict[str, Column] = {}
    for cell in cells:
        model, gbps, tokens = cell.row.split(", ")
        head = f"{gbps}, {cell.column}"
        heads[head] = Column(head, head, decimals=2)
        row = f"{model}, {tokens}"
        found.setdefault(row, {"row": row})[head] = cell.ours
    scene = SCENARIOS["map"]["hardware"]
    note = f"{scene}: seconds by tokens over seconds by layers, one request. Above 1 layers win."
    columns = (Column("row", "prefix"), *heads.values())
    return Table("Where layers pay", columns, list(found.values()), (note,))


def in_figures() -> Table:
    """The figures of the page's text, over all pairs of Cake's tables."""
    pairs = [pair for name in TABLES for pair in printed(name)]
    ours = [times(pair.setup) for pair in pairs]
    cells = [cell for name in TABLES for cell in cake.TABLES[name]()]
    off = [cell.deviation for cell in cells if cell.deviation is not None and not cell.fitted]
    ratios = [
        one.io_s / one.compute_s / (pair.over_io / pair.over_compute) - 1
        for pair, one in zip(pairs, ours, strict=True)
        if not is_fitted(pair)
    ]
    best = [min(one.io_s, one.compute_s) for one in ours]
    least = [least_seconds(pair.setup) for pair in pairs]
    beside = [one.cake_s / one.kvtier_s for one in ours]
    values = {
        "cells more than 15 % off": sum(abs(value) > 0.15 for value in off),
        "median deviation (%)": 100 * median(off),
        "baselines' ratio, median deviation (%)": 100 * median(map(abs, ratios)),
        "baselines' ratio, largest deviation (%)": 100 * max(map(abs, ratios)),
        "Cake's rule over the better baseline, least": min(
            s / one.cake_s for s, one in zip(best, ours, strict=True)
        ),
        "ours over the better baseline, least": min(
            s / one.kvtier_s for s, one in zip(best, ours, strict=True)
        ),
        "ours over Cake's rule, least": min(beside),
        "ours over Cake's rule, median": median(beside),
        "ours over Cake's rule, most": max(beside),
        "Cake's rule, least share of T_opt (%)": 100
        * min(s / one.cake_s for s, one in zip(least, ours, strict=True)),
        "ours, least share of T_opt (%)": 100
        * min(s / one.kvtier_s for s, one in zip(least, ours, strict=True)),
    }
    found = [{"what": what, "value": round(value, 4)} for what, value in values.items()]
    columns = (Column("what", "over all pairs"), Column("value", "value", decimals=3))
    return Table("In figures", columns, found)


def _pairs(name: str) -> list[Row]:
    return [_pair_row(pair) for pair in printed(name)]


def _pair_row(pair: Pair) -> Row:
    ours = times(pair.setup)
    cake_io, cake_compute = ours.io_s / ours.cake_s, ours.compute_s / ours.cake_s
    return {
        "row": pair.row,
        "column": pair.column,
        "paper": f"{pair.over_io:.2f} \\ {pair.over_compute:.2f}",
        "cake": f"{cake_io:.2f} \\ {cake_compute:.2f}",
        "deviation": f"{signed(cake_io / pair.over_io - 1)} \\ "
        f"{signed(cake_compute / pair.over_compute - 1)}",
        "kvtier": f"{ours.io_s / ours.kvtier_s:.2f} \\ {ours.compute_s / ours.kvtier_s:.2f}",
        "fitted": "ratio" if is_fitted(pair) else "",
    }


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main(sys.argv[1])
