"""CacheFlow's numbers: the equations hold when run, and the arms order as said."""

from statistics import fmean

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.papers.cacheflow import cells as cacheflow_cells
from sgl_kvtier.lab.papers.cacheflow import command as cacheflow
from sgl_kvtier.lab.papers.cacheflow import model as cacheflow_model
from sgl_kvtier.lab.papers.cacheflow import rig as cacheflow_rig
from sgl_kvtier.lab.papers.cacheflow.rig import (
    BY_TOKENS,
    Place,
    Prompt,
    Stages,
    default,
    l_delta,
    parallel,
    rig,
    sequential,
    serve,
)
from sgl_kvtier.lab.papers.cacheflow.splits import (
    chunks_seconds,
    crossover_tokens,
    layer_split,
    token_split,
)
from sgl_kvtier.lab.sim.costs import Batch, StepCost
from sgl_kvtier.lab.workload.catalogue import trace_files
from sgl_kvtier.types import Span

needs_trace = pytest.mark.skipif(
    "swe_mini_deepseek" not in trace_files(),
    reason="needs the trace swe_mini_deepseek in ../shared/traces",
)


def cells(name):
    return {(cell.row, cell.column, cell.reading): cell for cell in cacheflow.TABLES[name]()}


@pytest.fixture
def without_traces(monkeypatch):
    monkeypatch.setattr(cacheflow_rig, "trace_files", dict)
    cacheflow_rig.lengths.cache_clear()
    yield
    cacheflow_rig.lengths.cache_clear()


def test_a_table_whose_trace_is_missing_fails_and_says_what_to_do(without_traces, capsys):
    assert main(["sim", "paper", "cacheflow", "--table", "9"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "swe_mini_deepseek, which was not found: put its file into ../shared/traces" in said


def test_a_table_without_a_trace_does_not_ask_for_one(without_traces):
    assert main(["sim", "paper", "cacheflow", "--table", "3"]) == 0


@needs_trace
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


def test_a_ratio_of_several_draws_is_that_of_the_means_with_the_range_of_single_ones():
    one = cacheflow_cells.ratio("none", "row", "column", [2.0, 6.0], [1.0, 2.0])
    assert (one.ours, one.spread) == (2.6667, (2.0, 3.0))
    assert cacheflow_cells.ratio("none", "row", "column", [2.0], [1.0]).spread is None


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
    gains = [cell.ours for cell in cacheflow.figure_6() if cell.reading == "CacheFlow over vLLM"]
    assert gains[-1] == max(gains)
    assert gains[-1] > gains[0] + 0.1


def test_stages_that_restore_by_themselves_are_faster_than_stages_in_a_row():
    prompt = [Prompt(0.0, 12032, 64)]
    apart, in_a_row = (
        serve(rig(default(stages=stages)), prompt, "CacheFlow").ttfts()[0]
        for stages in (parallel(2), sequential(2))
    )
    whole = serve(rig(default(stages=Stages())), prompt, "CacheFlow").ttfts()[0]
    assert apart < in_a_row < whole
    assert apart == pytest.approx(whole / 2, rel=0.1)


@needs_trace
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


@pytest.mark.parametrize(
    "workload", [pytest.param("SWE-Bench", marks=needs_trace), "LMSys-Chat", "WildChat"]
)
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
        if arm != "CacheFlow":  # of which tokens count as layers
            assert computed + spliced == 8192 + 4096 + 128
        assert (spliced == 0) == (arm == "vLLM")
        # Loading alone computes what is new, and no more.
        assert (computed == 128) == (arm == "LMCache")


def test_short_prefixes_gain_from_splitting_by_layers_and_long_ones_by_tokens():
    cost = StepCost(0.03, 1 / 20000)
    per_token_s = 1 / 5000
    assert (
        layer_split(cost, 256, 256 * per_token_s, 32)[1]
        < token_split(cost, 256, 256 * per_token_s, 512, 512)[1]
    )
    crossover = crossover_tokens(cost, per_token_s, layers=32, chunk=512, unit=128, longest=16384)
    assert crossover is None or crossover > 256


def test_the_best_split_by_tokens_is_found_as_by_trying_all():
    cost = StepCost(0.004, 1 / 20000, 1e-9, floor_s=0.02)
    for tokens, load_s in ((64, 0.001), (1000, 0.1), (3008, 0.1), (3008, 0.9), (3008, 1e-6)):
        tried = {
            computed: max(
                chunks_seconds(cost, computed, 512), load_s * (tokens - computed) / tokens
            )
            for computed in [*range(0, tokens, 64), tokens]
        }
        best = min(tried, key=lambda computed: (tried[computed], computed))
        assert token_split(cost, tokens, load_s, 512, 64) == (best, tried[best])


@pytest.mark.parametrize(
    ("hardware", "model", "tokens"),
    [("H100", "Qwen3-8B", 6016), ("L40S", "Qwen3-30B-A3B", 2048), ("L40S", "Qwen3-30B-A3B", 12032)],
)
def test_a_prefix_restored_by_layers_takes_as_long_as_the_formula_says(hardware, model, tokens):
    place = rig(Place(hardware, model, 10.0))
    assert tokens < l_delta(place, 512)
    seconds = serve(place, [Prompt(0.0, tokens, 64)], "CacheFlow").ttfts()[0]
    suffix_s = place.cost.seconds(Batch((Span(tokens, tokens + 64),)))
    formula_s = cacheflow_model.axis_seconds(hardware, model, 10.0, tokens)[1]
    assert formula_s <= seconds - suffix_s < 1.08 * formula_s


def test_prefixes_are_split_by_tokens_from_l_delta_on():
    place = rig(Place("A100", "Qwen3-8B", 40.0))
    threshold = int(l_delta(place, 512))
    for tokens, same in ((threshold, True), (threshold - 64, False)):
        prompts = [Prompt(0.0, tokens, 64)]
        runs = [serve(place, prompts, arm).ttfts() for arm in ("CacheFlow", BY_TOKENS)]
        assert (runs[0] == runs[1]) == same


def test_of_two_requests_by_layers_the_first_computes_and_the_longer_has_the_link():
    place = rig(default())
    prompts = [Prompt(0.0, 3008, 64), Prompt(0.001, 9024, 64)]
    both = serve(place, prompts, "CacheFlow").requests
    alone = [serve(place, [prompt], "CacheFlow").requests[0] for prompt in prompts]
    assert both[0].first_chunk_s == alone[0].first_chunk_s
    assert both[0].spliced_tokens < alone[0].spliced_tokens
    assert both[1].spliced_tokens > alone[1].spliced_tokens
    assert both[0].first_token_s < both[1].first_token_s
