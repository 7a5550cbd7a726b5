"""`kvtier doctor MODEL --gpu`: whether a disk is fast enough, estimated by the model's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab import profile
from sgl_kvtier.runtime.tools import disk_fit
from sgl_kvtier.runtime.tools.disk_fit import (
    break_even,
    break_even_tokens,
    compute_seconds,
    fit,
    shape_of,
)

RESTORE = Path(__file__).parents[2] / "docs" / "results" / "data" / "restore.json"
LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "h100-llama8b": (LLAMA, 1),
    "h100x2-qwen32b": (
        {
            "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600,
        },
        2,
    ),
    "h100x4-llama70b": (
        {
            "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "intermediate_size": 28672,
        },
        4,
    ),
    "h100-qwen30b-a3b": (
        {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        },
        1,
    ),
    "h100x8-deepseek-v3": (
        {
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1,
            "first_k_dense_replace": 3,
        },
        8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
def test_the_estimate_is_within_a_fifth_of_the_measured_profiles(name, tokens):
    config, gpus = MODELS[name]
    shape, measured = shape_of(name, config), profile.read(name)
    assert shape.kv_bytes == measured.kv_bytes_per_token
    chunks = [(8192, start) for start in range(0, tokens, 8192)]
    wanted = sum(measured.prefill_seconds([chunk]) for chunk in chunks)
    assert compute_seconds(shape, "h100", gpus, tokens) == pytest.approx(wanted, rel=0.21)


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_both_ends_meet_where_the_first_tokens_are_computed_when_the_others_are_loaded(factor):
    shape = shape_of("m", LLAMA)
    speed = factor * break_even(shape, "h100", 1, 32768)
    found = fit(shape, "h100", 1, speed, 32768)
    computed = 32768 - found.both_s * speed / shape.kv_bytes
    assert 0 < computed < 32768
    assert compute_seconds(shape, "h100", 1, round(computed)) == pytest.approx(
        found.both_s, rel=1e-3
    )
    # Attention makes the first half of a prompt cheaper than the second: better than the average.
    average = found.compute_s * found.load_s / (found.compute_s + found.load_s)
    assert found.both_s < average


def test_the_published_estimates_follow_from_the_code_and_lie_beside_what_was_measured():
    grids = json.loads(RESTORE.read_text())["grids"]
    measured = {tuple(row[:2]): row[-1] for row in grids["emulated H100"]["rows"]}
    rows = grids["estimate and emulated server"]["rows"]
    assert len(rows) == len(measured)
    for tokens, ratio, gb_per_s, estimate, emulated in rows:
        found = fit(shape_of("m", LLAMA), "h100", 1, gb_per_s * 1e9, tokens * 1024)
        assert estimate == pytest.approx(1 / (1 - found.saved), abs=0.01)
        assert emulated == measured[tokens, ratio]
        assert estimate == pytest.approx(emulated, rel=0.27)


@pytest.mark.parametrize("tokens", [1000, 32768])
def test_the_break_even_length_is_where_this_disk_takes_as_long_as_computing(tokens):
    shape = shape_of("m", LLAMA)
    speed = break_even(shape, "h100", 1, tokens)
    assert break_even_tokens(shape, "h100", 1, speed) == pytest.approx(tokens, abs=1)
    assert break_even_tokens(shape, "h100", 1, speed * 1.1) < tokens


def test_a_fast_disk_loads_faster_at_any_length_and_a_slow_one_at_none_the_model_takes():
    shape = shape_of("m", LLAMA | {"max_position_embeddings": 8192})
    assert break_even_tokens(shape, "h100", 1, 100e9) == 1
    at_most = break_even(shape, "h100", 1, 8192)
    assert break_even_tokens(shape, "h100", 1, 1.01 * at_most) is not None
    assert break_even_tokens(shape, "h100", 1, 0.99 * at_most) is None
    assert break_even_tokens(shape_of("m", LLAMA), "h100", 1, 0.99 * at_most) > 8192


def test_a_text_model_inside_another_counts():
    assert shape_of("m", {"hidden_size": 1, "text_config": LLAMA}) == shape_of("m", LLAMA)


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_config_that_says_too_little_is_refused(missing):
    config = {key: value for key, value in LLAMA.items() if key != missing}
    with pytest.raises(KVTierError, match=f"{missing} = null"):
        shape_of("m", config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with Llama's configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = LLAMA | {"model_type": "llama", "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_without_a_folder_the_disk_of_the_default_store_is_measured_and_named(
    model, tmp_path, capsys, monkeypatch
):
    folder, out = tmp_path / "caches" / "kvtier" / "pages", tmp_path / "out.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("KVTIER_STORE_PATH", raising=False)
    main(["doctor", str(model), "--gpu", "h100", "--json", str(out)])
    said = " ".join(capsys.readouterr().out.split())
    assert "from both ends" in said and "32,768" in said
    assert "A token takes 128.0 KiB of KV cache. The disk reads " in said
    found = json.loads(out.read_text())
    checks = {one["check"]: one["found"] for one in found["findings"]}
    assert checks["store"] == "the folder that KVTIER=1 uses"
    assert checks["disk"].startswith(f"{folder} (") and "MB/s" in checks["disk speed"]
    assert not folder.parent.exists()
    assert [row["tokens"] for row in found["fits"]] == list(disk_fit.LENGTHS)
    assert all(row["both_s"] < min(row["compute_s"], row["load_s"]) for row in found["fits"])


@pytest.mark.parametrize(
    ("gbytes", "where"),
    [
        ("50", "loading is faster than computing at any length"),
        ("3", "loading is faster than computing from "),
        ("0.1", "loading is faster than computing at no length up to 131,072 tokens"),
    ],
)
def test_the_sentence_has_the_break_even_length_and_both_speeds(gbytes, where, model, capsys):
    assert main(["doctor", str(model), "--gpu", "h100", "--read", gbytes]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Break-even length: {where}" in said
    assert f"The disk loads {float(gbytes) * 1e9 / 131072:,.0f} tokens/s; prefill on h100" in said


def test_disks_of_other_speeds_are_compared_without_one(model, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["doctor", str(model), "--gpu", "h100", "--read", "1.5,6.4", "--json", str(out)]
    assert main(words) == 0
    assert "Is a disk of 1.5 GB/s fast enough" in capsys.readouterr().out
    rows = json.loads(out.read_text())["fits"]
    by_speed = {(row["read_gb_per_s"], row["tokens"]): row["load_s"] for row in rows}
    assert len(rows) == 2 * len(disk_fit.LENGTHS)
    assert by_speed[1.5, 8192] == pytest.approx(8192 * 131072 / 1.5e9)


@pytest.mark.parametrize("words", [["--gpu", "h100", "--read", "3"], ["--gpu", "h100"]])
def test_a_gpu_or_a_speed_without_a_model_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 1
    assert "--gpu and --read are about a model" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/models/none", ""])
def test_a_models_folder_that_is_not_there_is_named(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", folder, "--gpu", "h100", "--read", "3"]) == 1
    assert f'doctor: "{folder}": no such folder' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--store", "s"], "needs the GPU and the disk"),
        (["--gpu", "h100", "--store", "s", "--no-disk"], "needs the GPU and the disk"),
        (["--gpu", "h100", "--store", "s"], "no config.json can be read"),
    ],
)
def test_a_question_that_lacks_something_says_what(tmp_path, words, why, capsys):
    assert main(["doctor", str(tmp_path), *words]) == 1
    assert why in capsys.readouterr().err
