"""What every printed row of the three papers comes to, held against tests/golden/papers/NAME.txt.

A line is a printed number: table | row | column | reading | paper | ours | verdict, rounded as the
pages round it. The first lines sum tables up, for planners and for the null model. To record the files again:
python tests/lab/sim/test_paper_verdicts.py
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.papers.pages import put
from sgl_kvtier.lab.sim.cells import Agreement, Cell, agreement
from sgl_kvtier.lab.workload.catalogue import trace_files

GOLDEN = Path(__file__).parents[2] / "golden" / "papers"
QUICK = {"cake": ("4", "7", "fig6"), "cacheflow": ("6",), "tierkv": ("fig6",)}
"""Tables that take seconds."""


def module(paper: str) -> Any:
    return importlib.import_module(f"sgl_kvtier.lab.papers.{paper}")


def cells_of(paper: str, tables: Iterable[str]) -> list[Cell]:
    return [cell for table in tables for cell in module(paper).TABLES[table]()]


def verdict(cell: Cell) -> str:
    if cell.fitted:
        return "fitted"
    if cell.deviation is None:
        return "no share"
    return "within 15 %" if abs(cell.deviation) <= 0.15 else "off"


def lines(cells: Sequence[Cell]) -> list[str]:
    """One line per printed number."""
    return [
        f"{cell.table} | {cell.row} | {cell.column} | {cell.reading} | {cell.published:g} | "
        f"{cell.ours:.2f} | {verdict(cell)}"
        for cell in cells
        if cell.published is not None
    ]


def in_words(what: str, table: str, one: Agreement) -> str:
    share, middle = one.within_15_percent or 0.0, one.median_abs_deviation or 0.0
    return (
        f"{what} | {table} | {one.predicted} predicted | {100 * share:.1f} % within 15 % | "
        f"median {100 * middle:.1f} %"
    )


def agreements(cells: Sequence[Cell]) -> list[str]:
    """By table: how many of its predicted cells are within 15 %, and their median deviation."""
    by_table = {
        table: agreement([cell for cell in cells if table in ("all", cell.table)])
        for table in (*dict.fromkeys(cell.table for cell in cells), "all")
    }
    return [in_words("agreement", table, one) for table, one in by_table.items() if one.predicted]


def null_model(paper: str) -> list[str]:
    """That of the model without a planner, which is recorded in the paper's module."""
    prefix = "" if paper == "tierkv" else f"{paper} "
    return [
        in_words("null model", name if name == "all" else f"{prefix}{name}", one)
        for name, one in module(paper).NULL_MODEL.items()
    ]


def every_line(paper: str) -> list[str]:
    """All that is recorded of a paper."""
    cells = cells_of(paper, module(paper).TABLES)
    return [*agreements(cells), *null_model(paper), *lines(cells)]


def recorded(paper: str) -> list[str]:
    return (GOLDEN / f"{paper}.txt").read_text("utf-8").splitlines()


@pytest.mark.parametrize("paper", QUICK)
def test_quick_tables_come_to_the_recorded_verdicts(paper: str) -> None:
    found = [*null_model(paper), *lines(cells_of(paper, QUICK[paper]))]
    tables = {line.split(" | ")[0] for line in found}
    assert len(tables) == 1 + len(QUICK[paper])
    assert found == [line for line in recorded(paper) if line.split(" | ")[0] in tables]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("paper", QUICK)
def test_every_printed_row_comes_to_the_recorded_verdict(paper: str) -> None:
    if paper == "cacheflow" and "swe_mini_deepseek" not in trace_files():
        pytest.skip("needs the trace swe_mini_deepseek")
    assert every_line(paper) == recorded(paper)


# What commands write into results pages stands between markers.


def test_only_what_stands_between_the_markers_of_a_name_is_replaced() -> None:
    page = "# Title\n\n<!-- a: begin -->\nold\n<!-- a: end -->\n\n<!-- b: begin -->\nb\n<!-- b: end -->\n"
    new = page.replace("\nold\n", "\n\nnew\n\n")
    assert put(page, "a", "new") == new
    assert put(put(page, "a", "other"), "a", "new") == new


def test_a_page_without_markers_is_left_alone() -> None:
    with pytest.raises(TraceError, match="a: begin"):
        put("# Title\n", "a", "new")


if __name__ == "__main__":
    for name in QUICK:
        (GOLDEN / f"{name}.txt").write_text("\n".join(every_line(name)) + "\n", "utf-8")
