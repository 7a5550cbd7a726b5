"""What every printed row of the three papers comes to, held against tests/golden/papers/NAME.txt.

A line is a printed number: table | row | column | reading | paper | ours | verdict, rounded as the
pages round it. The first lines sum tables up, for planners and for the null model. To record the files again:
python tests/lab/sim/test_paper_verdicts.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.workload.catalogue import trace_files

GOLDEN = Path(__file__).parents[2] / "golden" / "papers"
PAPERS = ("cake", "cacheflow", "tierkv")
QUICK = {"cake": ("4", "7", "fig4", "fig6"), "cacheflow": ("1", "eq"), "tierkv": ("fig6",)}
"""Tables that take seconds."""

NULL = "null model"

Cell = Mapping[str, Any]


def written(paper: str, tables: Sequence[str] = ()) -> Mapping[str, Any]:
    """What the command writes of some tables, or of all."""
    asked = [word for table in tables for word in ("--table", table)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells.json"
        assert main(["sim", "paper", paper, *asked, "--json", str(out)]) == 0
        found: Mapping[str, Any] = json.loads(out.read_text("utf-8"))
        return found


def verdict(cell: Cell) -> str:
    if cell["fitted"]:
        return "fitted"
    if cell["deviation"] is None:
        return "no share"
    return "within 15 %" if abs(cell["deviation"]) <= 0.15 else "off"


def lines(cells: Sequence[Cell]) -> list[str]:
    """One line per printed number."""
    return [
        " | ".join(
            (
                cell["table"],
                cell["row"],
                cell["column"],
                cell["reading"],
                f"{cell['published']:g}",
                f"{cell['ours']:.2f}",
                verdict(cell),
            )
        )
        for cell in cells
        if cell["published"] is not None
    ]


def agreement(cells: Sequence[Cell]) -> list[str]:
    """By table: how many of its predicted cells are within 15 %, and their median deviation."""
    found = []
    for table in (*dict.fromkeys(cell["table"] for cell in cells), "all"):
        off = sorted(
            abs(cell["deviation"])
            for cell in cells
            if table in ("all", cell["table"]) and cell["deviation"] is not None
            if not cell["fitted"]
        )
        if off:
            middle = (off[len(off) // 2] + off[(len(off) - 1) // 2]) / 2
            share = sum(value <= 0.15 for value in off) / len(off)
            found.append(f"agreement | {in_words(table, len(off), share, middle)}")
    return found


def in_words(table: str, predicted: int, share: float, middle: float) -> str:
    return (
        f"{table} | {predicted} predicted | {100 * share:.1f} % within 15 % | "
        f"median {100 * middle:.1f} %"
    )


def null_model(paper: str, by_table: Mapping[str, Any]) -> list[str]:
    """That of the model without a planner, which is recorded in the paper's module."""
    prefix = "" if paper == "tierkv" else f"{paper} "
    return [
        f"{NULL} | "
        + in_words(
            name if name == "all" else f"{prefix}{name}",
            one["predicted"],
            one["within_15_percent"],
            one["median_abs_deviation"],
        )
        for name, one in by_table.items()
    ]


def every_line(paper: str) -> list[str]:
    """All that is recorded of a paper."""
    found = written(paper)
    cells = found["cells"]
    return [*agreement(cells), *null_model(paper, found["null_model"]), *lines(cells)]


def recorded(paper: str) -> list[str]:
    return (GOLDEN / f"{paper}.txt").read_text("utf-8").splitlines()


def needs_trace(paper: str) -> None:
    if paper == "cacheflow" and "swe_mini_deepseek" not in trace_files():
        pytest.skip("needs the trace swe_mini_deepseek")


@pytest.mark.parametrize("paper", PAPERS)
def test_quick_tables_come_to_the_recorded_verdicts(paper: str) -> None:
    result = written(paper, QUICK[paper])
    found = [*null_model(paper, result["null_model"]), *lines(result["cells"])]
    tables = {line.split(" | ")[0] for line in found}
    assert len(tables) == 1 + len(QUICK[paper])
    assert found == [line for line in recorded(paper) if line.split(" | ")[0] in tables]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("paper", PAPERS)
def test_every_printed_row_comes_to_the_recorded_verdict(paper: str) -> None:
    needs_trace(paper)
    assert every_line(paper) == recorded(paper)


if __name__ == "__main__":
    for name in PAPERS:
        (GOLDEN / f"{name}.txt").write_text("\n".join(every_line(name)) + "\n", "utf-8")
