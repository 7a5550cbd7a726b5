"""The tables of a restoration bench: the bound of the link, what the best single way is, and what
failed.
"""

from __future__ import annotations

import pytest

from sgl_kvtier.console.table import Table
from sgl_kvtier.lab.pages.restore.grid import restore_tables


def cell(**more: object) -> dict:
    by_arm = {"compute": 1000.0, "load": 1000.0, "kvtier": 600.0}
    values: dict = {
        "model": "m", "length": 2048, "load_over_compute": 1.0, "ttft_ms": by_arm, "ttft_ms_low": by_arm, "ttft_ms_high": by_arm,
        "first_ttft_ms": {"kvtier": 650.0}, "best_computed_tokens": 1024, "bound_fraction": 0.9, "link_bound_fraction": 0.8,
        "link_bound_ms": 480.0, "errors": {"load": 0, "kvtier": 2},
    }  # fmt: skip
    return {**values, **more}


def result(cells: list[dict], *arms: str, **summary: object) -> dict:
    figures = {
        "worst_speedup_vs_best_single": 1.6,
        "median_bound_fraction": 0.9,
        "worst_bound_fraction": 0.9,
        "median_link_bound_fraction": 0.8,
        "errors": 0,
        "missed": [],
    }
    return {
        "cells": cells,
        "arms": dict.fromkeys(("compute", "load", "kvtier", *arms), ""),
        "curves": [],
        "summary": {**figures, **summary},
    }


def column(table: Table, title: str) -> list[str]:
    place = [one.title for one in table.columns].index(title)
    return [row[place] for row in table.cells()]


def test_shares_of_both_bounds_and_failures_stand_side_by_side() -> None:
    grid, detail, _ = restore_tables(result([cell()], median_link_bound_fraction=0.8, errors=2))
    assert (column(grid, "of T_opt"), column(grid, "of T_link"), column(grid, "Failed")) == (
        ["90.0 %"],
        ["80.0 %"],
        ["2"],
    )
    assert (column(detail, "T_link"), column(detail, "First after a change")) == (["480"], ["650"])
    assert "of T_link: median 80.0 %." in grid.notes[1]
    assert "Requests that failed: 2." in grid.notes


@pytest.mark.parametrize(
    ("arms", "title"),
    [
        ((), "vs better of compute, load"),
        (("load_kvtier",), "vs best of compute, load, load_kvtier"),
    ],
)
def test_the_best_single_way_is_named_by_what_was_measured(
    arms: tuple[str, ...], title: str
) -> None:
    column(restore_tables(result([cell()], *arms))[0], title)
