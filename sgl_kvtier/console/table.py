"""Rows as a table for people, on the terminal and in markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MISSING = "–"
"""Printed for a missing value: None, NaN, an infinity, or a key that the row does not have."""

Row = Mapping[str, object]


@dataclass(frozen=True)
class Column:
    """One column. `name` is the key in the row, with dots for nested ones ("ttft_ms.p50"). `title`
    and `unit` are shown. `decimals` is the number of digits after the point. `format` replaces the
    formatting of all values that are not missing.
    """

    name: str
    title: str
    unit: str = ""
    decimals: int | None = None
    format: Callable[[object], str] | None = None

    def text(self, row: Row) -> str:
        """This column's cell for `row`, as text."""
        value = field_of(row, self.name)
        if is_missing(value):
            return MISSING
        return self.format(value) if self.format else format_value(value, self.decimals)

    @property
    def heading(self) -> str:
        """The title with its unit: "TTFT p50 (ms)"."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclass(frozen=True)
class Table:
    """A titled table for the terminal, markdown and HTML. `notes` are printed below it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str] = field(default=())

    def cells(self) -> list[list[str]]:
        """All cells as text, row by row."""
        return [[column.text(row) for column in self.columns] for row in self.rows]

    def is_numeric(self, column: Column) -> bool:
        """Whether a column holds only numbers, so that it is right-aligned and never wrapped."""
        values = [v for v in (field_of(row, column.name) for row in self.rows) if not is_missing(v)]
        return bool(values) and all(_is_number(v) for v in values)


def field_of(row: Row, name: str) -> object:
    """The value under a dotted name, or None. A key that itself contains dots goes first."""
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def is_missing(value: object) -> bool:
    """True for None and for floats that are not finite."""
    return value is None or (_is_number(value) and not math.isfinite(float(value)))  # type: ignore[arg-type]


def format_value(value: object, decimals: int | None = None) -> str:
    """A value for people: thousands separated, three significant digits or `decimals`."""
    if is_missing(value):
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not _is_number(value):
        return str(value)
    if decimals is None and not float(value).is_integer():  # type: ignore[arg-type]
        size = abs(float(value))  # type: ignore[arg-type]
        decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    # Adding 0.0 turns -0.0 into 0.0, since "-0.0 ms" looks like a mistake.
    return f"{round(float(value), decimals or 0) + 0.0:,.{decimals or 0}f}"  # type: ignore[arg-type]


def format_share(value: object) -> str:
    """A fraction as a percentage, which is 100 % or 0 % only if it is exactly that."""
    percent = 100 * float(value)  # type: ignore[arg-type]
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return f"{'<' if percent < 1 else '>'} {0.1 if percent < 1 else 99.9} %"
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"


def plain_lines(table: Table) -> list[str]:
    """The table as lines of plain text: title, headings, a rule, one line a row, notes."""
    heads = [column.heading for column in table.columns]
    cells = table.cells()
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    right = [table.is_numeric(column) for column in table.columns]

    def line(texts: Sequence[str]) -> str:
        padded = (
            t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [
        table.title,
        line(heads),
        "-" * (sum(widths) + 2 * len(widths) - 2),
        *map(line, cells),
        *table.notes,
    ]


def to_markdown(table: Table) -> str:
    """The table as GitHub-flavoured markdown with its title and notes. Ends with a newline."""
    heads = [_markdown(column.heading) for column in table.columns]
    rules = ["---:" if table.is_numeric(column) else ":---" for column in table.columns]
    lines = [f"**{_markdown(table.title)}**", ""] if table.title else []
    lines += [f"| {' | '.join(heads)} |", f"| {' | '.join(rules)} |"]
    lines += [f"| {' | '.join(_markdown(cell) for cell in row)} |" for row in table.cells()]
    for note in table.notes:
        lines += ["", _markdown(note)]
    return "\n".join(lines) + "\n"


def _is_number(value: object) -> bool:
    # numpy's float64 is a float. Its float32 and integers can only be recognised by protocol.
    return not isinstance(value, (bool, str)) and (
        isinstance(value, (int, float)) or (hasattr(value, "__float__") and hasattr(value, "dtype"))
    )


def encodable(text: str, encoding: str) -> str:
    """The text as this output can carry it: an ASCII-only pipe gets "-" and "?" for the rest."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace(MISSING, "-").encode(encoding, "replace").decode(encoding)
    return text


def _markdown(text: str) -> str:
    text = " ".join(text.split())
    for special, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*")):
        text = text.replace(special, escaped)
    return text
