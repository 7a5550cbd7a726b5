"""TierKV's printed tables: transcribed whole, obtained in one reading, and not in the one where
bytes obey the link.
"""

from __future__ import annotations

import json

import pytest

from sgl_kvtier.lab.papers.tierkv.command import GQA, MODELS, ONE_HBM, OWN_HBM, SWEEP_HBM, TABLES
from sgl_kvtier.lab.papers.tierkv.figures import efficiency
from sgl_kvtier.lab.papers.tierkv.fit import fitted_cells
from sgl_kvtier.lab.papers.tierkv.measures import measure
from sgl_kvtier.lab.papers.tierkv.runs import HONEST, PRINTED, column, run_honest, sweep
from sgl_kvtier.lab.papers.tierkv.setup import (
    COLUMN_POLICIES,
    LEVELS,
    POLICIES,
    load_setup,
    printed_figure,
    printed_table,
)
from sgl_kvtier.lab.sim.cells import Cell, agreement, as_rows

LOADED = LEVELS[1:]
SLOWEST_FIRST = ("LRU", "Freq", "Static", "Attn-Pref.", "Prefetch", "Oracle")


def cell(cells: list[Cell], row: str, column: str, reading: str = PRINTED) -> Cell:
    return next(
        one for one in cells if (one.row, one.column, one.reading) == (row, column, reading)
    )


def printed_cells(table: str) -> list[Cell]:
    """Tables 5 to 7 without the reading "honest", which takes a minute."""
    attribute = {"5": "tpot_ms", "6": "p95_tpot_ms", "7": "tokens_per_s"}[table]
    setup = load_setup()
    return [
        Cell(
            table,
            row,
            policy,
            value,
            getattr(sweep(PRINTED, policy, float(row)), attribute),
            fitted=setup.is_fitted(table, row, policy),
        )
        for (row, policy), value in printed_table(table).items()
    ]


def test_all_printed_cells_are_there():
    assert len(printed_table("4")) == 7 * 4
    assert len(printed_table("5")) == len(printed_table("6")) == len(LEVELS) * len(POLICIES)
    assert len(printed_table("7")) == 3 * len(POLICIES)
    assert {name: len(printed_figure(name)) for name in ("fig4", "fig5", "fig6", "fig7")} == {
        "fig4": 6, "fig5": 8, "fig6": 10, "fig7": 5,
    }  # fmt: skip


def test_what_was_fitted_is_what_the_coefficients_say_and_is_printed():
    assert {name: [list(one) for one in cells] for name, cells in fitted_cells().items()} == dict(
        load_setup().fitted_on
    )
    for cells in fitted_cells().values():
        for table, row, column_name in cells:
            source = printed_figure(table) if table.startswith("fig") else printed_table(table)
            assert (row, column_name) in source


def test_shares_are_the_ratios_of_the_stalls_that_table_6_prints_at_2x():
    p95 = printed_table("6")
    static = p95["2.0", "Static"] - p95["1.0", "Static"]
    for policy in ("LRU", "Freq", "Attn-Pref."):
        stall = p95["2.0", policy] - p95["1.0", policy]
        assert load_setup().share(policy) == pytest.approx(stall / static, rel=1e-3)
    assert load_setup().share("Static") == 1


def test_printed_stalls_keep_these_ratios_at_every_level_above():
    p95 = printed_table("6")
    for level in map(str, LEVELS[2:]):
        stall = {policy: p95[level, policy] - p95["1.0", policy] for policy in POLICIES}
        for policy in ("LRU", "Freq", "Attn-Pref."):
            assert stall[policy] / stall["Static"] == pytest.approx(
                load_setup().share(policy), rel=0.02
            )


@pytest.mark.parametrize("measure_name", ["tpot_ms", "p95_tpot_ms"])
@pytest.mark.slow
def test_policies_come_in_the_printed_order_at_every_level_above_1x(measure_name: str):
    for level in LOADED:
        values = [getattr(sweep(PRINTED, policy, level), measure_name) for policy in SLOWEST_FIRST]
        assert values == sorted(values, reverse=True), level


def test_prefetch_stays_within_2_percent_of_oracle_and_flat_within_5():
    base = sweep(PRINTED, "Prefetch", 1.0).tpot_ms
    for level in LOADED:
        ours, oracle = (sweep(PRINTED, policy, level).tpot_ms for policy in ("Prefetch", "Oracle"))
        assert oracle <= ours <= 1.02 * oracle
        assert ours <= 1.05 * base


@pytest.mark.parametrize("table", ["5", "6", "7"])
def test_most_predicted_cells_of_the_sweep_come_out(table: str):
    seen = agreement(printed_cells(table))
    assert seen["predicted"] == {"5": 42, "6": 44, "7": 12}[table]
    assert seen["within_15_percent"] is not None and seen["within_15_percent"] >= 0.8
    assert seen["median_abs_deviation"] is not None and seen["median_abs_deviation"] <= 0.06


def test_nothing_stalls_at_1x():
    for policy in POLICIES:
        assert sweep(PRINTED, policy, 1.0).hit_share == 1


def test_the_batch_is_what_the_printed_tables_imply():
    tpot, rate = printed_table("5"), printed_table("7")
    for level, policy in (("3.0", "LRU"), ("5.0", "LRU"), ("5.0", "Prefetch")):
        implied = tpot[level, policy] / 1e3 * rate[level, policy]
        assert sweep(PRINTED, policy, float(level)).running == pytest.approx(implied, rel=0.15)


@pytest.mark.slow
def test_every_column_of_table_4_follows_from_its_lru_cell():
    for row, policy in COLUMN_POLICIES.items():
        for model in (*MODELS, "70B GQA"):
            printed = printed_table("4")[row, model.removesuffix(" GQA")]
            assert column(policy, model).tpot_ms == pytest.approx(printed, rel=0.1), (row, model)


def test_the_columns_of_table_4_do_not_follow_from_one_another():
    hbm = load_setup().fitted["column_hbm_bytes"]["7B"]
    for model in ("13B", "70B"):
        assert column("LRU", model, hbm).tpot_ms > 1.5 * printed_table("4")["LRU", model]


def test_table_4_is_not_what_3x_of_table_5_gives():
    hbm = load_setup().printed["hbm_bytes"] / 3.0
    assert column("LRU", "7B", hbm).tpot_ms > 2 * printed_table("4")["LRU", "7B"]
    assert column("LRU", "7B", hbm).tpot_ms < 0.5 * printed_table("5")["3.0", "LRU"]


def test_99_percent_transfer_efficiency_is_table_3_and_not_section_3():
    assert efficiency(load_setup().sweep_server(1.0)) == pytest.approx(99.2, abs=0.05)


@pytest.mark.slow
def test_lookahead_beyond_one_step_changes_nothing_and_the_figure_says_so():
    cells = list(TABLES["fig6"]())
    ahead = [cell(cells, f"K={steps}", "TPOT").ours for steps in (1, 2, 4, 8, 16)]
    assert len(set(ahead)) == 1
    none = cell(cells, "K=0", "TPOT")
    assert none.ours == pytest.approx(none.published, rel=0.05)
    # Only what was fetched for requests that ended before their next turn.
    assert cell(cells, "K=1", "wasted bandwidth", "honest").ours < 0.5
    # What is printed as hit rate cannot stand beside the printed TPOT.
    assert cell(cells, "K=0", "hit rate").ours > 2 * cell(cells, "K=0", "hit rate").published


def test_the_burst_of_figure_7_fills_dram_and_its_hit_rate_is_hbms_share():
    cells = list(TABLES["fig7"]())
    hbm, dram = cell(cells, "burst", "HBM").ours, cell(cells, "burst", "DRAM").ours
    assert hbm == pytest.approx(80 / 3)
    assert cell(cells, "burst", "SSD").ours == 0
    assert cell(cells, "burst", "hit rate").ours == pytest.approx(hbm / (hbm + dram), rel=1e-3)


@pytest.mark.slow
def test_workloads_that_fit_gain_nothing_and_long_ones_most():
    cells = list(TABLES["fig5"]())
    gain = {
        name: cell(cells, name, "Prefetch reduction").ours
        for name in load_setup().printed["workloads"]
    }
    assert gain["uniform"] == gain["chatbot"] == 0
    assert gain["summarization"] == max(gain.values()) > gain["mixed"] > 0


def test_latencies_of_figure_4_are_in_the_printed_proportion():
    cells = list(TABLES["fig4"]())
    for policy, name in (("LRU", "mean"), ("LRU", "P99"), ("Prefetch", "P95"), ("Prefetch", "P99")):
        one = cell(cells, policy, name)
        assert one.ours == pytest.approx(one.published, rel=0.15)


@pytest.mark.parametrize("level", [1.5, 5.0])
def test_when_bytes_obey_the_link_prefetch_is_not_flat_and_only_waiting_is(level: float):
    setup = load_setup()
    server, load, seed = setup.sweep_server(level), setup.sweep_load(), setup.seeds[0]
    prefetch, lru, oracle = (
        measure(run_honest(server, load, policy, seed), server.kv_bytes_per_token)
        for policy in ("Prefetch", "LRU", "Oracle")
    )
    assert prefetch.tpot_ms > 100 * printed_table("5")[str(level), "Prefetch"]
    assert prefetch.tpot_ms > 0.8 * lru.tpot_ms
    assert oracle.tpot_ms < 1.05 * printed_table("5")[str(level), "Oracle"]
    assert oracle.wait_ms > 100 * sweep(PRINTED, "Oracle", level).wait_ms


def test_cells_are_plain_data_with_the_agreed_keys():
    rows = as_rows(TABLES["fig4"]())
    assert json.loads(json.dumps(rows)) == rows
    assert {"table", "row", "column", "published", "ours", "reading", "fitted"} <= set(rows[0])


@pytest.mark.slow
def test_table_4_has_every_printed_cell_in_the_reading_printed_and_every_policy_in_the_honest_one():
    cells = list(TABLES["4"]())
    assert {(one.row, one.column) for one in cells if one.reading == OWN_HBM} == set(
        printed_table("4")
    )
    assert {one.column for one in cells if one.reading == GQA} == {"70B"}
    assert {one.row for one in cells if one.reading in (ONE_HBM, SWEEP_HBM)} == {"LRU"}
    honest = {(one.row, one.column): one.ours for one in cells if one.reading == HONEST}
    assert set(honest) == {(row, model) for row in COLUMN_POLICIES for model in MODELS}
    # What a policy saves is small beside what crosses the link; only not starting requests keeps a
    # step short.
    for model in MODELS:
        assert (
            honest["TierKV-Prefetch", model]
            > 0.4 * honest["LRU", model]
            > 10 * honest["Oracle", model]
        )
