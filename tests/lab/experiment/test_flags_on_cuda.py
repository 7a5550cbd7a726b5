"""What the benchmarks ask of a server on a card, by their own command lines."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier import launch
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import arms
from sgl_kvtier.lab.experiment.argtypes import shape_of
from sgl_kvtier.lab.experiment.arms import OURS, Setup, prepare
from sgl_kvtier.lab.experiment.restore.plan import RestoreOptions
from sgl_kvtier.lab.experiment.restore.server import setup_for, storage_bytes
from sgl_kvtier.lab.experiment.scenarios import restore
from sgl_kvtier.lab.stress.server import command as fuzz

CARD = Setup("/m", "m", device="cuda", page_size=64, chunk_tokens=4096, dtype="bfloat16")
LENGTHS = [8 << 10, 16 << 10, 32 << 10, 64 << 10]


def options(arguments: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if after.startswith("--") else after
    return found


def parsed(part: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    part.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def no_sampling_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "find_spec", lambda _name: None)


def test_float32_is_refused_where_flashinfer_is_the_attention(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="bfloat16"):
        prepare(OURS, replace(CARD, dtype="float32"), tmp_path)
    prepare(OURS, replace(CARD, dtype="float32", device="cpu"), tmp_path / "cpu")
    other = ("--attention-backend", "triton")
    prepare(OURS, replace(CARD, dtype="float32", extra=other), tmp_path / "triton")


def test_torch_samples_on_a_card_whose_sampling_modules_are_not_compiled(
    tmp_path: Path, no_sampling_modules: None
) -> None:
    found = options(prepare(OURS, CARD, tmp_path).arguments)
    assert found["--sampling-backend"] == "pytorch"
    assert found["--attention-backend"] == "flashinfer"


def test_flashinfer_samples_where_its_modules_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "flashinfer" / "data" / "aot" / "sampling" / "sampling.so"
    module.parent.mkdir(parents=True)
    module.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "flashinfer")])
    monkeypatch.setattr(arms, "find_spec", lambda name: spec if name == "flashinfer" else None)
    assert "--sampling-backend" not in prepare(OURS, CARD, tmp_path / "arm").arguments


def test_a_users_own_server_samples_as_sglang_chooses(no_sampling_modules: None) -> None:
    assert "--sampling-backend" not in launch.serve_flags("m", "cuda", "@/s.json")


@pytest.mark.parametrize("model", ["shape-8b", "lab-gpu-1b"])
def test_the_store_holds_every_prompt_of_a_model_of_ours(model: str) -> None:
    tokens, per_token = sum(LENGTHS), {"shape-8b": 131072, "lab-gpu-1b": 65536}[model]
    assert storage_bytes(None, model, "bfloat16", tokens) >= tokens * per_token
    with pytest.raises(BenchError, match="--storage-size"):
        storage_bytes(4 << 30, model, "bfloat16", tokens)
    assert storage_bytes(40 << 30, model, "bfloat16", tokens) == 40 << 30


def test_the_size_of_the_store_is_taken_at_its_word_for_a_model_that_is_not_known() -> None:
    assert storage_bytes(1 << 30, "/models/some", "auto", 65536) == 1 << 30
    assert storage_bytes(None, "/models/some", "auto", 65536) == 4 << 30


def test_a_restore_server_on_a_card_serves_bfloat16_from_a_store_of_the_size_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("--device", "cuda", "--storage-size", "30GiB", "--lengths", "64k")
    args = RestoreOptions.of(parsed(restore, *words))
    planned = restore.options_of(args, "shape-8b", page=64, chunk=4096)
    setup = setup_for(args, shape_of(args, "shape-8b"), planned, "key")
    found = options(prepare(OURS, setup, tmp_path / "server").arguments)
    assert (found["--dtype"], found["--load-format"]) == ("bfloat16", "dummy")
    assert "--context-length" not in found  # the model's own, which is long enough
    config = json.loads((Path(found["--model-path"]) / "config.json").read_text())
    assert config["max_position_embeddings"] >= int(found["--max-total-tokens"]) > 65536
    settings = json.loads((tmp_path / "server" / "storage.json").read_text())
    assert settings["store"]["capacity_bytes"] == 30 << 30


def test_the_model_that_is_restored_by_default_has_weights_on_a_card() -> None:
    assert restore.models_of(RestoreOptions.of(parsed(restore, "--device", "cuda"))) == [
        "lab-gpu-1b"
    ]
    assert restore.models_of(RestoreOptions.of(parsed(restore, "--device", "cpu"))) == ["lab-mha"]


def test_a_fuzz_run_on_a_card_has_heads_and_numbers_that_flashinfer_knows() -> None:
    args = parsed(fuzz, "--device", "cuda", "--storage-size", "8GiB")
    chosen = SimpleNamespace(longest_tokens=100, rows=[{"longest_tokens": 100}])
    assert fuzz.fuzzed_model(args) == "lab-gpu-tiny"
    setup = fuzz.make_setup(args, Path("/m"), chosen)  # type: ignore[arg-type]
    assert (setup.device, setup.dtype, setup.storage_bytes) == ("cuda", "bfloat16", 8 << 30)
    with pytest.raises(BenchError, match="heads of 32"):
        fuzz.fuzzed_model(parsed(fuzz, "--device", "cuda", "--model", "tiny-qwen3"))


def test_a_fuzz_run_with_another_attention_has_its_numbers_and_its_answers_too() -> None:
    words = ("--attention-backend", "triton", "--hicache-io-backend", "direct")
    named = [f"--server-arg={word}" for word in (*words, "--sampling-backend=pytorch")]
    args = parsed(
        fuzz, "--device", "cuda", "--dtype", "float32", "--model", "tiny-qwen3", "--tp", "2",
        "--overlap", "off", *named,
    )  # fmt: skip
    assert fuzz.fuzzed_model(args) == "tiny-qwen3"
    chosen = SimpleNamespace(longest_tokens=4096, rows=[{"longest_tokens": 4096}])
    setup = fuzz.make_setup(args, Path("/m"), chosen)  # type: ignore[arg-type]
    computing = fuzz.only_computing(setup)
    assert computing.extra == ("--attention-backend", "triton", "--sampling-backend=pytorch")
    assert (computing.dtype, computing.tp) == ("float32", 1)


def test_a_fuzz_run_on_a_cpu_is_what_it_was() -> None:
    args = parsed(fuzz, "--device", "cpu")
    chosen = SimpleNamespace(longest_tokens=100, rows=[{"longest_tokens": 100}])
    setup = fuzz.make_setup(args, Path("/m"), chosen)  # type: ignore[arg-type]
    assert fuzz.fuzzed_model(args) == "tiny-qwen3"
    assert (setup.dtype, setup.storage_bytes) == ("float32", 1 << 30)
