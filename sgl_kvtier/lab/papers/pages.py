"""All printed numbers of Cake and CacheFlow beside ours, as markdown for docs/results/papers/.

`python -m sgl_kvtier.lab.papers.pages docs/results/papers` replaces the text between the markers of
cake.md and cacheflow.md and writes the plots. The text around the markers is written by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sgl_kvtier.console.document import write_text
from sgl_kvtier.console.table import Column, Row, Table, to_markdown
from sgl_kvtier.lab.papers.cacheflow import command as cacheflow
from sgl_kvtier.lab.papers.cacheflow.plots import PLOTS as CACHEFLOW_PLOTS
from sgl_kvtier.lab.papers.cacheflow.rig import SCENARIOS, source
from sgl_kvtier.lab.papers.cake import command as cake
from sgl_kvtier.lab.papers.cake.fit import is_fitted
from sgl_kvtier.lab.papers.cake.grid import TABLES, Pair, printed
from sgl_kvtier.lab.papers.cake.plots import PLOTS as CAKE_PLOTS
from sgl_kvtier.lab.papers.cake.run import times
from sgl_kvtier.lab.papers.parts import CELL, contradictions, replaced, rows, signed
from sgl_kvtier.lab.sim.cells import agreement

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
        "deviation": f"{signed(cake_io / pair.over_io - 1)} \\ "
        f"{signed(cake_compute / pair.over_compute - 1)}",
        "kvtier": f"{ours.io_s / ours.kvtier_s:.2f} \\ {ours.compute_s / ours.kvtier_s:.2f}",
        "fitted": "ratio" if is_fitted(pair) else "",
    }


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main(sys.argv[1])
