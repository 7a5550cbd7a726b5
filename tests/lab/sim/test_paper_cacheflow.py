"""CacheFlow's numbers: the equations hold when run, and the arms order as said."""

from statistics import fmean

import pytest

from sgl_kvtier.lab.papers import pages
from sgl_kvtier.lab.papers.cacheflow import cells as cacheflow_cells
from sgl_kvtier.lab.papers.cacheflow import command as cacheflow
from sgl_kvtier.lab.papers.cacheflow import model as cacheflow_model
from sgl_kvtier.lab.papers.cacheflow import rig as cacheflow_rig
from sgl_kvtier.lab.papers.cacheflow.rig import (
    Place,
    Prompt,
    Stages,
    default,
    parallel,
    rig,
    sequential,
    serve,
)
from sgl_kvtier.lab.papers.cacheflow.splits import crossover_tokens, layer_split, token_split
from sgl_kvtier.policy.learned.cost import PrefillCost


def cells(name):
    return {(cell.row, cell.column, cell.reading): cell for cell in cacheflow.TABLES[name]()}


@pytest.fixture
def without_traces(monkeypatch):
    monkeypatch.setattr(cacheflow_rig, "trace_files", dict)
    for cached in (cacheflow_rig.source, cacheflow_rig.lengths):
        cached.cache_clear()
    yield
    for cached in (cacheflow_rig.source, cacheflow_rig.lengths):
        cached.cache_clear()


def test_generated_sessions_in_place_of_a_missing_trace_are_said(without_traces, capsys):
    assert len(cacheflow_rig.lengths("SWE-Bench")) > 10
    said = pages.lengths_note()
    assert "24 sessions of `generated:swe-mini`, since the trace `swe_mini_deepseek`" in said
    (line,) = capsys.readouterr().err.splitlines()
    assert "no trace swe_mini_deepseek was found" in line and "generated:swe-mini" in line


def test_recorded_sessions_are_named_and_nothing_is_warned(without_traces, monkeypatch, capsys):
    monkeypatch.setattr(cacheflow_rig, "trace_files", lambda: {"swe_mini_deepseek": None})
    assert pages.lengths_note() == (
        "Lengths of SWE-Bench: 24 recorded sessions of `swe_mini_deepseek`.\n"
    )
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_every_printed_number_has_a_cell():
    reached = {
        (name, cell.row, cell.column)
        for name in ("1", "eq", "5", "6", "7")
        for cell in cacheflow.TABLES[name]()
        if cell.published is not None
    }
    wanted = {
        place for place in cacheflow_cells.printed() if place[0] in ("1", "eq", "5", "6", "7")
    }
    assert reached == wanted


def test_a_range_counts_from_its_nearer_end():
    low, high = cacheflow_cells.printed()["4", "SWE-Bench", "TTFT speedup"]
    assert cacheflow_cells.cell("4", "SWE-Bench", "TTFT speedup", high + 1).published == high
    assert cacheflow_cells.cell("4", "SWE-Bench", "TTFT speedup", (low + high) / 2).deviation == 0
    assert cacheflow_cells.cell("4", "SWE-Bench", "not printed", 1.0).published is None


def test_the_equations_hold_when_they_are_run():
    for cell in cacheflow_model.equations():
        assert cell.ours == pytest.approx(cell.published, rel=0.04), cell
        assert cell.ours >= cell.published


def test_where_tokens_beat_layers_they_do_so_at_the_crossover_and_not_before():
    hardware, model, gbps = "A100", "Qwen3-8B", 40.0
    tokens = cacheflow_model.crossover(hardware, model, gbps)
    by_token, by_layer = cacheflow_model.axis_seconds(hardware, model, gbps, tokens)
    assert by_token <= by_layer
    for shorter in range(128, tokens, 64):
        by_token, by_layer = cacheflow_model.axis_seconds(hardware, model, gbps, shorter)
        assert by_token > by_layer


def test_the_gain_over_recompute_grows_with_the_length():
    gains = [cell.ours for cell in cacheflow.figure_6() if cell.column == "TTFT speedup"]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.2


def test_stages_that_restore_by_themselves_are_faster_than_stages_in_a_row():
    prompt = [Prompt(0.0, 12032, 64)]
    apart, in_a_row = (
        serve(rig(default(stages=stages)), prompt, "CacheFlow").ttfts()[0]
        for stages in (parallel(2), sequential(2))
    )
    whole = serve(rig(default(stages=Stages())), prompt, "CacheFlow").ttfts()[0]
    assert apart < in_a_row < whole
    assert apart == pytest.approx(whole / 2, rel=0.1)


@pytest.mark.parametrize("batch", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_io_in_the_order_of_compute_is_best_for_the_mean_of_a_batch(batch):
    means = {
        arm: fmean(t for run in runs for t in run)
        for arm, runs in cacheflow.batch_runs(batch).items()
    }
    assert means["kvtier"] < means["kvtier, shortest first"]
    assert means["kvtier"] < means["kvtier, longest first"]
    assert means["kvtier"] < means["CacheFlow"] < means["vLLM"]


def test_samples_and_arrivals_are_the_same_every_time():
    place = rig(default())
    assert cacheflow_rig.poisson("WildChat", place, 3) == cacheflow_rig.poisson(
        "WildChat", place, 3
    )
    assert cacheflow_rig.sample("LMSys-Chat", 5, 1) != cacheflow_rig.sample("LMSys-Chat", 5, 2)


@pytest.mark.parametrize("workload", ["SWE-Bench", "LMSys-Chat", "WildChat"])
def test_workloads_have_prefixes_long_enough_for_the_papers_figure_1a(workload):
    prefixes = [prefix for prefix, _ in cacheflow_rig.lengths(workload)]
    assert max(prefixes) > 20_000
    assert min(new for _, new in cacheflow_rig.lengths(workload)) >= 0


def test_each_arm_restores_what_it_is_given_and_single_ones_use_one_resource():
    place, prompts = (
        rig(Place("A100", "Llama-3.1-8B", 10.0)),
        [Prompt(0.0, 8192, 64), Prompt(0.1, 4096, 64)],
    )
    for arm in cacheflow_rig.ARMS:
        result = serve(place, prompts, arm)
        computed = sum(request.computed_tokens for request in result.requests)
        spliced = sum(request.spliced_tokens for request in result.requests)
        assert computed + spliced == 8192 + 4096 + 128
        assert (spliced == 0) == (arm == "vLLM")
        # Loading alone computes what is new, and no more.
        assert (computed == 128) == (arm == "LMCache")


def test_short_prefixes_gain_from_splitting_by_layers_and_long_ones_by_tokens():
    cost = PrefillCost(0.03, 1 / 20000, 0.0)
    per_token_s = 1 / 5000
    assert (
        layer_split(cost, 256, 256 * per_token_s, 32)[1]
        < token_split(cost, 256, 256 * per_token_s, 512, 512)[1]
    )
    crossover = crossover_tokens(cost, per_token_s, layers=32, chunk=512, unit=128, longest=16384)
    assert crossover is None or crossover > 256
