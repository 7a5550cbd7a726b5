"""What the pages of papers have in common: markers, cells as rows, contradictions."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from sgl_kvtier.console.table import Column, Row, Table
from sgl_kvtier.lab.sim.cells import Cell

PUBLISHED = Path(__file__).with_name("published")
BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"

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
DRAWN = (*CELL[:4], Column("spread", "by draw"), *CELL[4:])
"""The same, of a paper whose requests are drawn several times."""


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


def rows(cells: Sequence[Cell]) -> list[Row]:
    """Cells as rows of a page: ranges as printed, deviations in whole percent."""
    return [
        {
            "row": cell.row,
            "column": cell.column,
            "paper": _paper(cell),
            "ours": cell.ours,
            "spread": None if cell.spread is None else "{:.2f} to {:.2f}".format(*cell.spread),
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
    return "inside" if _range_of(cell) and not cell.deviation else signed(cell.deviation)


def signed(value: float) -> str:
    """A share as whole per cent with its sign."""
    return f"{round(100 * value) + 0:+d} %"
