"""Tables as data: what is a column, and which rows there are of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sgl_kvtier.console.table import Column, Table, format_share
from sgl_kvtier.lab.pages import html

Row = dict[str, Any]

ARM = Column("arm", "Arm")


def arm_rows(result: dict) -> Iterator[Row]:
    """A row for each arm of each cell; the cell itself stands under "cell"."""
    for cell in result["cells"]:
        for arm, figures in cell["arms"].items():
            yield {**cell, "cell": cell, "arm": arm, **figures}


class Listing(NamedTuple):
    """A table. Columns, rows and notes may follow from the result."""

    title: str
    columns: Sequence[Column] | Callable[[dict], Sequence[Column]]
    rows: Callable[[dict], Iterable[Row]] = arm_rows
    notes: Sequence[str] | Callable[[dict], Iterable[str]] = ()

    def tables(self, result: dict) -> list[Table]:
        """It for one result; none without rows."""
        if not (rows := list(self.rows(result))):
            return []
        columns = self.columns(result) if callable(self.columns) else self.columns
        notes = self.notes(result) if callable(self.notes) else self.notes
        return [html.marked(Table(self.title, columns, rows, tuple(notes)), result)]


def share(name: str, title: str) -> Column:
    """A column of shares."""
    return Column(name, title, format=format_share)


def ms(name: str, title: str, decimals: int = 1) -> Column:
    """A column of milliseconds."""
    return Column(name, title, "ms", decimals=decimals)
