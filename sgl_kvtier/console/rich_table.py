"""Tables that fit the terminal, with `rich` (extra [bench])."""

from __future__ import annotations

from typing import TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from sgl_kvtier.console.table import Table, encodable

_NARROWEST_TEXT = 12
"""Minimum width of a text column, in cells. If columns do not fit, rows are printed as a list."""


def print_rich(table: Table, file: TextIO) -> None:
    """Prints a table to `file`: fitted to the width of a terminal, otherwise at full width."""
    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        natural = sum(_widths(table, narrow=False)) + 3 * len(table.columns) + 1
        console = Console(
            file=file,
            width=max(natural, 40),
            highlight=False,
            markup=False,
            emoji=False,
            color_system=None,
            force_terminal=False,
        )
    encoding = getattr(file, "encoding", None) or "utf-8"
    side_by_side = sum(_widths(table, narrow=True)) + 3 * len(table.columns) + 1 <= console.width
    console.print(_title(table, encoding))
    console.print(_grid(table, encoding) if side_by_side else _list(table, encoding))
    for note in table.notes:
        console.print(
            Text(encodable(note, encoding)), style="dim", soft_wrap=not console.is_terminal
        )


def _widths(table: Table, *, narrow: bool) -> list[int]:
    """The width in cells that each column needs: with `narrow` the minimum, with text and headings
    wrapped; otherwise unwrapped.
    """
    cells = table.cells()
    widths = []
    for index, column in enumerate(table.columns):
        longest = max((cell_len(row[index]) for row in cells), default=1)
        words = max(cell_len(word) for word in f"{column.title} {column.unit}".split() or ["-"])
        if narrow:
            body = longest if table.is_numeric(column) else min(longest, _NARROWEST_TEXT)
            widths.append(max(body, words))
        else:
            widths.append(max(longest, cell_len(column.title), cell_len(column.unit)))
    return widths


def _title(table: Table, encoding: str) -> Text:
    return Text(encodable(table.title, encoding), style="bold")


def _grid(table: Table, encoding: str) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column, width in zip(table.columns, _widths(table, narrow=True), strict=True):
        heading = Text(encodable(column.title, encoding))
        if column.unit:
            heading.append(encodable(f"\n{column.unit}", encoding), style="dim not bold")
        numeric = table.is_numeric(column)
        grid.add_column(
            heading, justify="right" if numeric else "left", overflow="fold", min_width=width
        )
    for row in table.cells():
        grid.add_row(*(Text(encodable(cell, encoding)) for cell in row))
    return grid


def _list(table: Table, encoding: str) -> RichTable:
    grid = RichTable(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim", overflow="fold")
    grid.add_column(overflow="fold")
    for index, row in enumerate(table.cells()):
        if index:
            grid.add_row("", "")
        for column, cell in zip(table.columns, row, strict=True):
            grid.add_row(Text(encodable(column.heading, encoding)), Text(encodable(cell, encoding)))
    return grid
