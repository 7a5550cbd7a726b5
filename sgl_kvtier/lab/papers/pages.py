"""All printed numbers of Cake and CacheFlow beside ours, as markdown for docs/results/papers/.

`python -m sgl_kvtier.lab.papers.pages docs/results/papers` replaces the text between the markers of
cake.md and cacheflow.md and writes the plots. The text around the markers is written by hand.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_kvtier.console.document import write_text
from sgl_kvtier.console.table import Column, Row, Table, to_markdown
from sgl_kvtier.lab.papers.cacheflow import command as cacheflow
from sgl_kvtier.lab.papers.cacheflow.plots import PLOTS as CACHEFLOW_PLOTS
from sgl_kvtier.lab.papers.cacheflow.rig import SCENARIOS, source
from sgl_kvtier.lab.papers.cake import command as cake
from sgl_kvtier.lab.papers.cake.fit import is_fitted
from sgl_kvtier.lab.papers.cake.grid import PUBLISHED, TABLES, Pair, printed
from sgl_kvtier.lab.papers.cake.plots import PLOTS as CAKE_PLOTS
from sgl_kvtier.lab.papers.cake.run import times
from sgl_kvtier.lab.sim.cells import Cell, agreement

BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"

_PAIR = (
    Column("row", "row"),
    Column("column", "column"),
    Column("paper", "paper"),
    Column("cake", "ours, Cake's rule"),
    Column("deviation", "deviation"),
    Column("kvtier", "ours, kvtier"),
    Column("fitted", "fitted"),
)
CELL = (
    Column("row", "row"),
    Column("column", "column"),
    Column("paper", "paper"),
    Column("ours", "ours", decimals=2),
    Column("deviation", "deviation"),
    Column("unit", "unit"),
    Column("reading", "reading"),
)
"""How `rows` are shown."""


def cake_markdown() -> str:
    """How well each table agrees, every pair, averages and figures, and where the paper contradicts
    itself.
    """
    parts = [to_markdown(_agreement_table())]
    parts += [
        to_markdown(Table(f"Cake Table {n}: over I/O-only \\ over compute-only", _PAIR, _pairs(n)))
        for n in TABLES
    ]
    rest = {name: cells for name, cells in cake.TABLES.items() if name not in TABLES}
    parts += [
        to_markdown(Table(f"Cake {name}", CELL, rows(cells()))) for name, cells in rest.items()
    ]
    return "\n".join([*parts, to_markdown(contradictions("cake"))])


def cacheflow_markdown() -> str:
    """Which sessions the lengths come from, every cell, and where the paper contradicts itself."""
    parts = [lengths_note()]
    parts += [
        to_markdown(Table(f"CacheFlow {name}", CELL, rows(cells())))
        for name, cells in cacheflow.TABLES.items()
    ]
    return "\n".join([*parts, to_markdown(contradictions("cacheflow"))])


def lengths_note() -> str:
    """For each workload with a trace, whether its lengths are the trace's."""
    notes = []
    for name, scene in SCENARIOS["workloads"].items():
        if "trace" in scene:
            found = source(name)
            notes.append(
                f"Lengths of {name}: {scene['sessions']} recorded sessions of `{found}`.\n"
                if found == scene["trace"]
                else f"Lengths of {name}: {scene['sessions']} sessions of `{found}`, since the "
                f"trace `{scene['trace']}` was not found. Cells that use them differ "
                "from those of the recorded sessions.\n"
            )
    return "\n".join(notes)


def contradictions(paper: str) -> Table:
    """Where it contradicts itself, and the reading chosen."""
    with (PUBLISHED / f"{paper}_contradictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [Column(name, name) for name in ("place", "printed", "conflict", "reading")]
    return Table("What the paper prints twice or cannot have", columns, rows)


def replaced(page: str, computed: str) -> str:
    """The page with this between its markers. Raises ValueError where they are missing."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{computed}\n{END}{after}"


def main(folder: str) -> None:
    """Rewrites both pages and their plots in this folder."""
    for name, computed in (("cake", cake_markdown()), ("cacheflow", cacheflow_markdown())):
        path = Path(folder) / f"{name}.md"
        write_text(replaced(path.read_text("utf-8"), computed), str(path))
    for name, plot in {**CAKE_PLOTS, **CACHEFLOW_PLOTS}.items():
        write_text(plot(), str(Path(folder) / f"{name}.svg"))


def _agreement_table() -> Table:
    rows: list[Row] = []
    for name in TABLES:
        measured = agreement(cake.TABLES[name]())
        median, share = measured["median_abs_deviation"], measured["within_15_percent"]
        rows.append(
            {
                "table": f"Table {name}",
                "cells": measured["predicted"],
                "share": _percent(share),
                "median": _percent(median),
            }
        )
    columns = (
        Column("table", "table"),
        Column("cells", "predicted cells"),
        Column("share", "within 15 %"),
        Column("median", "median absolute deviation"),
    )
    return Table("", columns, rows)


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
        "deviation": f"{_signed(cake_io / pair.over_io - 1)} \\ "
        f"{_signed(cake_compute / pair.over_compute - 1)}",
        "kvtier": f"{ours.io_s / ours.kvtier_s:.2f} \\ {ours.compute_s / ours.kvtier_s:.2f}",
        "fitted": "ratio" if is_fitted(pair) else "",
    }


def rows(cells: Sequence[Cell]) -> list[Row]:
    """Cells as rows of a page: ranges as printed, deviations in whole percent."""
    return [
        {
            "row": cell.row,
            "column": cell.column,
            "paper": _paper(cell),
            "ours": cell.ours,
            "deviation": _off(cell),
            "unit": cell.unit,
            "reading": cell.reading.removeprefix(_range_of(cell)).removeprefix("; "),
        }
        for cell in cells
    ]


def _range_of(cell: Cell) -> str:
    """The range the paper prints, as cacheflow/cells.py writes it into the reading; empty where it
    prints one number.
    """
    first = cell.reading.split(";")[0]
    return first if first.startswith("printed ") and " to " in first else ""


def _paper(cell: Cell) -> str | None:
    if cell.published is None:
        return None
    return _range_of(cell).removeprefix("printed ") or f"{cell.published:g}"


def _off(cell: Cell) -> str | None:
    if cell.deviation is None:
        return None
    return "inside" if _range_of(cell) and not cell.deviation else _signed(cell.deviation)


def _signed(value: float) -> str:
    return f"{round(100 * value) + 0:+d} %"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main(sys.argv[1])
