"""Tables on the terminal and in markdown."""

from __future__ import annotations

import io
import re

import numpy
import pytest

from sgl_kvtier.console import (
    MISSING,
    Column,
    Table,
    format_value,
    print_statement,
    print_table,
    to_markdown,
)
from sgl_kvtier.console.table import field_of

ANSI = re.compile(r"\x1b\[")

COLUMNS = (
    Column("arm", "Arm"),
    Column("ttft_ms.p50", "TTFT p50", "ms", decimals=1),
    Column("ttft_ms.p99", "TTFT p99", "ms", decimals=1),
    Column("tokens", "Tokens"),
)
ROWS = (
    {"arm": "recompute", "ttft_ms": {"p50": 1234.56, "p99": 98765.4}, "tokens": 1234567},
    {"arm": "kvtier", "ttft_ms": {"p50": 0.0, "p99": None}, "tokens": 0},
)
TABLE = Table("Time to first token", COLUMNS, ROWS, notes=("Medians of 3 rounds.",))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class AsciiPipe(io.TextIOWrapper):
    """A pipe that can carry ASCII only."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="ascii")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]


def printed(table: Table) -> str:
    out = io.StringIO()
    print_table(table, out)
    return out.getvalue()


def on_terminal(table: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    print_table(table, out)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (None, None, MISSING),
        (float("nan"), 2, MISSING),
        (float("-inf"), None, MISSING),
        (numpy.float32("nan"), None, MISSING),
        (0, None, "0"),
        (0.0, 1, "0.0"),
        (-0.04, 1, "0.0"),
        (1234567, None, "1,234,567"),
        (numpy.int64(1234567), None, "1,234,567"),
        (1234.5, None, "1,234"),
        (123.45, None, "123.5"),
        (1.234, None, "1.23"),
        (0.0123, None, "0.012"),
        (numpy.float32(2.5), 2, "2.50"),
        (True, None, "yes"),
        (False, 3, "no"),
        ("text", 2, "text"),
    ],
)
def test_a_value_is_written_for_people(value: object, decimals: int | None, text: str) -> None:
    assert format_value(value, decimals) == text


def test_a_dotted_name_reaches_into_nested_values_and_a_literal_key_goes_first() -> None:
    assert field_of({"a": {"b": 1}}, "a.b") == 1
    assert field_of({"a.b": 2, "a": {"b": 1}}, "a.b") == 2
    assert field_of({"a": 3}, "a.b") is None
    assert field_of({}, "a") is None


def test_a_missing_value_is_an_en_dash_and_a_zero_is_a_zero() -> None:
    assert TABLE.cells()[1] == ["kvtier", "0.0", MISSING, "0"]


def test_a_columns_own_format_is_not_asked_about_missing_values() -> None:
    column = Column("share", "Share", format=lambda value: f"{value:.0%}")
    assert column.text({"share": 0.5}) == "50%"
    assert column.text({"share": None}) == MISSING


def test_a_pipe_gets_whole_rows_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = printed(TABLE)
    assert not ANSI.search(text)
    assert "…" not in text
    row = next(line for line in text.splitlines() if line.startswith("recompute"))
    assert row.split() == ["recompute", "1,234.6", "98,765.4", "1,234,567"]
    assert text.endswith("Medians of 3 rounds.\n")


def test_long_text_wraps_on_a_terminal_and_numbers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"arm": "a description of an arm that is far too long for one line", "tokens": 1234567}
    lines = on_terminal(Table("T", COLUMNS, (*ROWS, row)), 60, monkeypatch)
    assert all(len(line) <= 60 for line in lines)
    assert sum("1,234,567" in line for line in lines) == 2
    words = " ".join(line[:20].strip() for line in lines)
    assert "far too long" in words


def test_a_terminal_too_narrow_for_the_numbers_gets_a_list_with_every_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = on_terminal(TABLE, 30, monkeypatch)
    assert all(len(line) <= 30 for line in lines)
    text = "\n".join(lines)
    assert "TTFT p99 (ms)" in text
    for number in ("1,234.6", "98,765.4", "1,234,567"):
        assert number in text


def test_an_ascii_only_output_gets_a_hyphen_instead_of_an_exception() -> None:
    pipe = AsciiPipe()
    print_table(Table("µ", (Column("a", "µs"), Column("b", "B")), ({"b": 1},)), pipe)
    assert "?s" in pipe.text()
    assert pipe.text().splitlines()[-1].split() == ["-", "|", "1"]


def test_square_brackets_in_a_cell_are_text_and_not_markup() -> None:
    assert "[red]x[/red]" in printed(Table("T", (Column("a", "[b]A"),), ({"a": "[red]x[/red]"},)))


def test_a_table_without_rows_still_has_its_heading() -> None:
    assert "TTFT p50" in printed(Table("T", COLUMNS, ()))
    assert "TTFT p50 (ms)" in to_markdown(Table("T", COLUMNS, ()))


def test_markdown_has_units_alignment_and_notes() -> None:
    assert to_markdown(TABLE) == (
        "**Time to first token**\n"
        "\n"
        "| Arm | TTFT p50 (ms) | TTFT p99 (ms) | Tokens |\n"
        "| :--- | ---: | ---: | ---: |\n"
        "| recompute | 1,234.6 | 98,765.4 | 1,234,567 |\n"
        f"| kvtier | 0.0 | {MISSING} | 0 |\n"
        "\n"
        "Medians of 3 rounds.\n"
    )


def test_markdown_cells_cannot_break_the_table() -> None:
    text = to_markdown(Table("", (Column("a", "A"),), ({"a": "x|y\n<think> *z* &lt;"},)))
    assert text.splitlines()[-1] == "| x\\|y &lt;think> \\*z\\* &amp;lt; |"


def test_a_statement_is_red_on_a_terminal_where_it_is_bad_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    good, bad = Terminal(), Terminal()
    print_statement("All is well.", False, good)
    print_statement("INVALID.", True, bad)
    assert good.getvalue() == "\x1b[1mAll is well.\x1b[0m\n\n"
    assert bad.getvalue() == "\x1b[1;31mINVALID.\x1b[0m\n\n"


def test_a_statement_is_plain_text_without_a_terminal_or_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, plain, ascii_pipe = io.StringIO(), Terminal(), AsciiPipe()
    print_statement("INVALID.", True, pipe)
    monkeypatch.setenv("NO_COLOR", "1")
    print_statement("INVALID.", True, plain)
    print_statement(f"{MISSING} s", False, ascii_pipe)
    assert pipe.getvalue() == plain.getvalue() == "INVALID.\n\n"
    assert ascii_pipe.text() == "- s\n\n"
