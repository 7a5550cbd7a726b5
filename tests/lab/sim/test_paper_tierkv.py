"""TierKV's printed tables: transcribed whole, and not obtained when bytes obey the link."""

from __future__ import annotations

import json

import pytest

from sgl_kvtier.lab.papers.tierkv.command import FITTED, MODELS, TABLES
from sgl_kvtier.lab.papers.tierkv.measures import measure
from sgl_kvtier.lab.papers.tierkv.runs import run
from sgl_kvtier.lab.papers.tierkv.setup import (
    COLUMN_POLICIES,
    POLICIES,
    load_setup,
    printed_figure,
    printed_table,
)
from sgl_kvtier.lab.sim.cells import Cell, agreement, as_rows, split_null

PRINTED_LEVELS = ("1.0", "1.5", "2.0", "2.5", "3.0", "3.5", "4.0", "4.5", "5.0")


def cell(cells: list[Cell], row: str, column: str) -> Cell:
    return next(one for one in cells if (one.row, one.column) == (row, column))


def test_all_printed_cells_are_there():
    assert len(printed_table("4")) == 7 * 4
    grid = {(level, policy) for level in PRINTED_LEVELS for policy in POLICIES}
    assert set(printed_table("5")) == set(printed_table("6")) == grid
    assert len(printed_table("7")) == 3 * len(POLICIES)
    assert len(printed_figure("fig6")) == 7


def test_printed_stalls_of_a_policy_are_one_share_of_lrus_at_every_level():
    """What the conclusion of the page rests on: the paper's policies are constant factors."""
    p95 = printed_table("6")
    for policy, share in (("Freq", 0.85), ("Static", 0.60), ("Attn-Pref.", 0.45)):
        for level in PRINTED_LEVELS[2:]:
            stall, lru = (p95[level, one] - p95["1.0", one] for one in (policy, "LRU"))
            assert stall / lru == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("level", [1.5, 5.0])
def test_when_bytes_obey_the_link_prefetch_is_not_flat_and_only_waiting_is(level: float):
    setup = load_setup()
    load, seed = setup.sweep_load(), setup.seeds[0]

    def seen(policy: str, at: float = level):
        return measure(run(setup.sweep_server(at), load, policy, seed))

    prefetch, lru, oracle = (seen(policy) for policy in ("Prefetch", "LRU", "Oracle"))
    assert prefetch.tpot_ms > 100 * printed_table("5")[str(level), "Prefetch"]
    assert prefetch.tpot_ms > 0.8 * lru.tpot_ms
    assert oracle.tpot_ms < 1.05 * printed_table("5")[str(level), "Oracle"]
    assert oracle.wait_ms > 100 * seen("Oracle", 1.0).wait_ms


def test_nothing_moves_at_1x():
    setup = load_setup()
    done = run(setup.sweep_server(1.0), setup.sweep_load(), "LRU", setup.seeds[0])
    assert measure(done).hit_share == 1
    assert done.link.nbytes == 0


@pytest.mark.slow
def test_lookahead_beyond_one_step_changes_nothing():
    cells = list(TABLES["fig6"]())
    assert cell(cells, "K=16", "TPOT").ours == cell(cells, "K=1", "TPOT").ours
    # Only what was fetched for requests that ended before their next turn.
    assert cell(cells, "K=1", "wasted bandwidth").ours < 0.5


@pytest.mark.slow
def test_table_4_has_every_policy_and_only_not_starting_requests_keeps_a_step_short():
    cells = list(TABLES["4"]())
    rows = as_rows(cells)
    assert json.loads(json.dumps(rows)) == rows
    found = {(one.row, one.column): one.ours for one in cells}
    assert set(found) == {(row, model) for row in COLUMN_POLICIES for model in MODELS}
    for model in MODELS:
        lru, ours = found["LRU", model], found["TierKV-Prefetch", model]
        assert ours > 0.4 * lru > 10 * found["Oracle", model]


def test_fitted_cells_are_printed_ones_and_as_many_as_the_page_says():
    setup = load_setup()
    named = [tuple(one) for part in setup.fitted_on.values() for one in part]
    assert len(named) == len(set(named)) == FITTED.numbers
    for table, row, column in set(named) - {("fig4", "Prefetch", "mean")}:
        assert (row, column) in printed_table(table)


def test_the_accounting_predicts_no_fitted_cell_and_the_null_model_no_cell_that_it_is_given():
    planned, null = split_null(list(TABLES["accounting"]()))
    assert len(planned) == len(null) == 2 * 54 + 18
    fitted = {(one.table, one.row, one.column) for one in planned if one.fitted}
    setup = load_setup()
    assert fitted == {
        (table, f"{row}x", policy)
        for part in ("load", "shares")
        for table, row, policy in setup.fitted_on[part]
    }
    assert all(one.fitted for one in null if one.column == "LRU" or one.row == "1.0x")
    # What it is given it gives back.
    assert all(one.deviation == pytest.approx(0, abs=1e-9) for one in null if one.fitted)


def test_the_print_is_mostly_one_curve_the_accounting_and_the_null_model_both_give_it():
    for cells in split_null(list(TABLES["accounting"]())):
        assert agreement(cells)["within_15_percent"] > 0.9
