"""CacheFlow's numbers: the equations hold when run, and the arms order as said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.papers import cacheflow
from sgl_kvtier.lab.papers.cacheflow import (
    Place,
    Prompt,
    Stages,
    l_delta,
    layer_split,
    parallel,
    rig,
    sequential,
    serve,
    token_seconds,
)
from sgl_kvtier.lab.sim.hardware import Batch
from sgl_kvtier.types import Span


@pytest.fixture
def without_traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cacheflow, "trace_files", dict)
    cacheflow.lengths.cache_clear()
    yield
    cacheflow.lengths.cache_clear()


@pytest.mark.usefixtures("without_traces")
def test_a_table_whose_trace_is_missing_fails_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sim", "paper", "cacheflow", "--table", "9"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "swe_mini_deepseek, which was not found: put its file into " in said


def test_a_range_counts_from_its_nearer_end() -> None:
    def cell(ours: float, column: str = "TTFT speedup") -> cacheflow.Cell:
        return cacheflow._cell("4", "SWE-Bench", column, ours)

    assert (cell(2.7).published, cell(1.0).published) == (1.7, 1.1)
    assert cell(1.4).deviation == 0
    assert cell(1.0, "not printed").published is None


def test_a_ratio_of_several_draws_is_that_of_the_means_with_the_range_of_single_ones() -> None:
    one = cacheflow._ratio("none", "row", "column", [2.0, 6.0], [1.0, 2.0], "")
    assert (one.ours, one.spread) == (2.6667, (2.0, 3.0))
    assert cacheflow._ratio("none", "row", "column", [2.0], [1.0], "").spread is None


def axis_seconds(place: Place, tokens: int) -> tuple[float, float]:
    """Seconds of a prefix restored by tokens and by layers, by the formulas."""
    parts = rig(place)
    load_s = tokens * parts.token_s
    by_token = token_seconds(parts.cost, tokens, load_s, 512)
    return by_token, layer_split(parts.cost, tokens, load_s, parts.layers)[1]


def test_tokens_beat_layers_at_l_delta_and_not_before() -> None:
    place = Place("A100", "Qwen3-8B", 40.0)
    tokens = int(l_delta(rig(place)))
    by_token, by_layer = axis_seconds(place, tokens)
    assert by_token <= by_layer
    for shorter in range(128, tokens, 64):
        by_token, by_layer = axis_seconds(place, shorter)
        assert by_token > by_layer


@pytest.mark.parametrize(
    ("hardware", "model", "tokens"),
    [("H100", "Qwen3-8B", 6016), ("L40S", "Qwen3-30B-A3B", 2048), ("L40S", "Qwen3-30B-A3B", 12032)],
)
def test_a_prefix_restored_by_layers_takes_as_long_as_the_formula_says(
    hardware: str, model: str, tokens: int
) -> None:
    place = Place(hardware, model, 10.0)
    parts = rig(place)
    assert tokens < l_delta(parts)
    seconds = serve(parts, [Prompt(0.0, tokens, 64)], "CacheFlow").ttfts()[0]
    suffix_s = parts.cost.seconds(Batch((Span(tokens, tokens + 64),)))
    formula_s = axis_seconds(place, tokens)[1]
    assert formula_s <= seconds - suffix_s < 1.08 * formula_s


def test_stages_that_restore_by_themselves_are_faster_than_stages_in_a_row() -> None:
    prompt = [Prompt(0.0, 12032, 64)]
    apart, in_a_row, whole = (
        serve(rig(Place(stages=stages)), prompt, "CacheFlow").ttfts()[0]
        for stages in (parallel(2), sequential(2), Stages())
    )
    assert apart < in_a_row < whole
    assert apart == pytest.approx(whole / 2, rel=0.1)


def test_each_arm_restores_what_it_is_given_and_single_ones_use_one_resource() -> None:
    place = rig(Place("A100", "Llama-3.1-8B", 10.0))
    prompts = [Prompt(0.0, 8192, 64), Prompt(0.1, 4096, 64)]
    for arm in ("vLLM", "LMCache", "CacheFlow", "kvtier"):
        result = serve(place, prompts, arm)
        computed = sum(request.computed_tokens for request in result.requests)
        spliced = sum(request.spliced_tokens for request in result.requests)
        if arm != "CacheFlow":  # of which tokens count as layers
            assert computed + spliced == 8192 + 4096 + 128
        assert (spliced == 0) == (arm == "vLLM")
        # Loading alone computes what is new, and no more.
        assert (computed == 128) == (arm == "LMCache")
