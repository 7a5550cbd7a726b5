"""Tables as data: what is a column, which rows there are of a result, and by which figures arms are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sgl_kvtier.console.table import Column, Table, field_of, format_share
from sgl_kvtier.lab.pages import html

Row = dict[str, Any]
Statement = tuple[str, bool]
"""A sentence; True marks what is wrong."""

ARM = Column("arm", "Configuration")


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


class Measure(NamedTuple):
    """A figure by which arms are compared. `unit` is "" where more is better; with a unit less is."""

    label: str
    path: str
    unit: str = "ms"
    decimals: int = 1

    def of(self, figures: Mapping[str, Any] | None) -> float | None:
        """Its value among an arm's figures."""
        value = field_of(figures or {}, self.path)
        return None if value is None else float(value)  # type: ignore[arg-type]

    def text(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:.{self.decimals}f} {self.unit}".rstrip()


def worse(
    cells: Sequence[Row],
    where: Callable[[Row], str],
    measures: Sequence[Measure],
    ours: str,
    bounds: Sequence[str] = (),
) -> list[Statement]:
    """Every cell and measure in which another arm than `bounds` does better than ours. No margin for
    noise is taken off.
    """
    found, compared = [], 0
    for cell in cells:
        arms = as_arms(cell)
        for arm, measure in ((a, m) for a in arms for m in measures):
            mine, theirs = measure.of(arms.get(ours)), measure.of(arms[arm])
            if arm in (ours, *bounds) or mine is None or theirs is None:
                continue
            compared += 1
            if mine > theirs if measure.unit else mine < theirs:
                place = ", ".join(filter(None, (where(cell), measure.label)))
                both = f"{ours} {measure.text(mine)}, {arm} {measure.text(theirs)}"
                found.append((f"{place}: {both}.", True))
    if not compared:
        return [(f"Nothing to compare: there is no configuration {ours} beside another.", False)]
    none = f"None: in none of {compared} figures is another configuration better than {ours}."
    return found or [(none, False)]


def as_arms(cell: Row) -> Mapping[str, Mapping[str, Any]]:
    """A cell's figures by arm, also of a grid's, which has them by figure."""
    if "arms" in cell:
        found: Mapping[str, Mapping[str, Any]] = cell["arms"]
        return found
    names = ("ttft_ms", "ttft_ms_low", "ttft_ms_high")
    return {arm: {name: cell[name].get(arm) for name in names} for arm in cell["ttft_ms"]}
