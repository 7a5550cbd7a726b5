"""TierKV's printed numbers beside ours, as markdown for docs/results/papers/tierkv.md.

`python -m sgl_kvtier.lab.papers.tierkv.page docs/results/papers` replaces the text between the
page's markers and writes the plots. The text around the markers is written by hand.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sgl_kvtier.console.document import write_text
from sgl_kvtier.console.table import Column, Row, Table, to_markdown
from sgl_kvtier.lab.pages.plots import save_plot
from sgl_kvtier.lab.papers.tierkv.command import TABLES
from sgl_kvtier.lab.papers.tierkv.measures import Measures
from sgl_kvtier.lab.papers.tierkv.plots import PLOTS
from sgl_kvtier.lab.papers.tierkv.runs import HONEST, PRINTED, sweep
from sgl_kvtier.lab.papers.tierkv.setup import HONEST_LEVELS, POLICIES, PUBLISHED
from sgl_kvtier.lab.sim.cells import Cell, agreement

BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"

_TITLES = {
    "4": "Table 4, mean TPOT by model at 3x (ms)",
    "5": "Table 5, mean TPOT (ms)",
    "6": "Table 6, P95 TPOT (ms)",
    "7": "Table 7, throughput (tokens/s)",
}
_CELL = (
    Column("row", "row"),
    Column("column", "column"),
    Column("paper", "paper", decimals=2),
    Column("ours", "ours", decimals=2),
    Column("deviation", "deviation"),
    Column("unit", "unit"),
    Column("reading", "reading"),
)


def markdown() -> str:
    """How well it agrees, every cell in both readings, and where the paper contradicts itself."""
    cells = {name: list(compute()) for name, compute in TABLES.items()}
    parts = [_agreement(cells)]
    for name, title in _TITLES.items():
        for reading in dict.fromkeys(cell.reading for cell in cells[name]):
            parts.append(
                _pivot(
                    f"{title}, reading “{reading}”",
                    [c for c in cells[name] if c.reading == reading],
                )
            )
    parts.append(_cost_of_honesty())
    for name in TABLES:
        if name.startswith("fig"):
            parts.append(Table(f"Figure {name[3:]}", _CELL, _rows(cells[name])))
    parts.append(_contradictions())
    return "\n".join(to_markdown(part) for part in parts)


def replaced(page: str, computed: str) -> str:
    """The page with this between its markers. Raises ValueError where they are missing."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{computed}\n{END}{after}"


def main(folder: str) -> None:
    """Rewrites tierkv.md and its plots in this folder."""
    path = Path(folder) / "tierkv.md"
    write_text(replaced(path.read_text("utf-8"), markdown()), str(path))
    for name, plot in PLOTS.items():
        save_plot(plot(), str(Path(folder) / f"{name}.svg"))


def _agreement(cells: dict[str, list[Cell]]) -> Table:
    """Agreement of the reading that is meant to give the printed numbers."""
    rows: list[Row] = []
    for name, table in cells.items():
        seen = agreement([cell for cell in table if cell.reading == PRINTED])
        median, share = seen["median_abs_deviation"], seen["within_15_percent"]
        rows.append(
            {
                "table": f"Table {name}" if name in _TITLES else f"Figure {name[3:]}",
                "fitted": sum(cell.fitted and cell.reading == PRINTED for cell in table),
                "cells": seen["predicted"],
                "share": None if share is None else f"{100 * share:.0f} %",
                "median": None if median is None else f"{100 * median:.1f} %",
            }
        )
    columns = (
        Column("table", "table"),
        Column("fitted", "fitted cells"),
        Column("cells", "predicted cells"),
        Column("share", "of these within 15 %"),
        Column("median", "median absolute deviation"),
    )
    return Table("Agreement of the reading “printed”", columns, rows)


def _pivot(title: str, cells: Sequence[Cell]) -> Table:
    """A table laid out as in the paper; each cell is "paper / ours (deviation)"."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    rows: dict[str, dict[str, object]] = {}
    for cell in cells:
        rows.setdefault(cell.row, {"row": cell.row})[cell.column] = _text(cell)
    notes = ("* fitted",) if any(cell.fitted for cell in cells) else ()
    return Table(
        title,
        (Column("row", ""), *(Column(name, name) for name in columns)),
        list(rows.values()),
        notes,
    )


def _text(cell: Cell) -> str:
    assert cell.published is not None and cell.ours is not None
    digits = 0 if cell.unit == "tokens/s" else 2
    ours = f"{cell.published:.{digits}f} / {cell.ours:.{digits}f}"
    if cell.fitted:
        return f"{ours} *"
    if cell.reading == HONEST or cell.deviation is None:
        return ours
    return f"{ours} ({100 * cell.deviation:+.0f} %)"


def _cost_of_honesty() -> Table:
    """The results of the reading "honest" besides TPOT."""
    rows = [
        {
            "level": f"{level}x",
            "policy": policy,
            "tpot": seen.tpot_ms,
            "hits": 100 * seen.hit_share,
            "moved": (seen.demand_gb + seen.ahead_gb) / 1e3,
            "rate": seen.tokens_per_s,
            "wait": seen.wait_ms / 1e3,
        }
        for level in HONEST_LEVELS[1:]
        for policy, seen in _honest(level)
    ]
    columns = (
        Column("level", ""),
        Column("policy", "policy"),
        Column("tpot", "mean TPOT", "ms", 1),
        Column("hits", "of the batch's KV in HBM", "%", 1),
        Column("moved", "moved to HBM", "TB", 0),
        Column("rate", "throughput", "tokens/s", 0),
        Column("wait", "mean wait before the first step", "s", 1),
    )
    return Table("What the policies cost when bytes obey the link", columns, rows)


def _honest(level: float) -> Iterator[tuple[str, Measures]]:
    for policy in POLICIES:
        yield policy, sweep(HONEST, policy, level)


def _rows(cells: Sequence[Cell]) -> list[Row]:
    return [
        {
            "row": cell.row,
            "column": cell.column,
            "paper": cell.published,
            "ours": cell.ours,
            "deviation": None if cell.deviation is None else f"{100 * cell.deviation:+.0f} %",
            "unit": cell.unit,
            "reading": f"{cell.reading}, fitted" if cell.fitted else cell.reading,
        }
        for cell in cells
    ]


def _contradictions() -> Table:
    with (PUBLISHED / "tierkv_contradictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [Column(name, name) for name in ("place", "printed", "conflict", "reading")]
    return Table("Where the paper contradicts itself, and the reading chosen", columns, rows)


if __name__ == "__main__":
    main(sys.argv[1])
