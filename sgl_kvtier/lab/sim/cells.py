"""One printed cell beside ours. A paper module offers a dict from a table's name to the function
that computes its cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from sgl_kvtier.console import Column, Table


@dataclass(frozen=True, slots=True)
class Cell:
    """A number a paper prints and the one that comes out here. `published` is None where the paper
    shows only a curve.

    `fitted`: the coefficients were fitted on it, so it predicts nothing. `reading` names how the
    paper was read, where it can be read in more than one way. `unit` is for people. `spread`: the
    least and the most of single draws, where ours is of several.
    """

    table: str
    row: str
    column: str
    published: float | None
    ours: float | None
    unit: str = ""
    fitted: bool = False
    reading: str = ""
    spread: tuple[float, float] | None = None

    @property
    def deviation(self) -> float | None:
        """(ours - published) / published; None where either is missing."""
        if self.published is None or self.ours is None or self.published == 0:
            return None
        return self.ours / self.published - 1


@dataclass(frozen=True, slots=True)
class Fitted:
    """How many quantities were solved from how many printed numbers."""

    parameters: int
    numbers: int


Tables: TypeAlias = Mapping[str, Callable[[], Iterable[Cell]]]
"""The `TABLES` of a paper module, e.g. {"3": table_3, "fig4": figure_4}. Each call computes anew,
deterministically.
"""


def as_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The cells as plain data, in their order."""
    return [{**asdict(cell), "deviation": cell.deviation} for cell in cells]


class Agreement(NamedTuple):
    """How well predicted cells agree: how many, the median absolute deviation, and the share within
    15 %.
    """

    predicted: int
    median_abs_deviation: float | None
    within_15_percent: float | None


def agreement(cells: Sequence[Cell]) -> Agreement:
    """That of the cells which are neither fitted nor unprinted."""
    off = [abs(cell.deviation) for cell in cells if cell.deviation is not None and not cell.fitted]
    if not off:
        return Agreement(0, None, None)
    return Agreement(len(off), median(off), sum(value <= 0.15 for value in off) / len(off))


def agreement_by_reading(cells: Sequence[Cell]) -> dict[str, Agreement]:
    """The same for each reading by itself. A reading may be there to show that it does not give the
    printed numbers.
    """
    readings = dict.fromkeys(cell.reading for cell in cells)
    return {
        reading: agreement([cell for cell in cells if cell.reading == reading])
        for reading in readings
    }


def cells_table(cells: Sequence[Cell], title: str) -> Table:
    """Paper, ours, deviation; one row per cell."""
    rows = [
        {
            "table": cell.table,
            "row": cell.row,
            "column": cell.column,
            "published": cell.published,
            "ours": cell.ours,
            "spread": None if cell.spread is None else "{:.2f} to {:.2f}".format(*cell.spread),
            "deviation": None if cell.deviation is None else 100 * cell.deviation,
            "note": ", ".join(
                text for text in (cell.unit, "fitted" if cell.fitted else "", cell.reading) if text
            ),
        }
        for cell in cells
    ]
    columns = [
        Column("table", "table"),
        Column("row", "row"),
        Column("column", "column"),
        Column("published", "paper"),
        Column("ours", "ours"),
        Column("spread", "by draw"),
        Column("deviation", "deviation", "%", 1),
        Column("note", "note"),
    ]
    return Table(title, columns, rows)
