"""The lab models: complete, repeatable, and able to show a wrong KV cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside import lab_model, model_shapes, smollm2


def test_equal_names_and_seeds_give_equal_bytes_and_another_seed_others(tmp_path: Path) -> None:
    one = lab_model.write_model("tiny-qwen3", seed=3, folder=tmp_path / "a")
    two = lab_model.write_model("tiny-qwen3", seed=3, folder=tmp_path / "b")
    assert one.name == two.name
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name
    other = lab_model.write_model("tiny-qwen3", seed=4, folder=tmp_path / "a")
    key = "model.layers.0.self_attn.q_proj.weight"
    assert (
        load_file(one / "model.safetensors")[key] != load_file(other / "model.safetensors")[key]
    ).any()


def test_a_folder_without_its_completion_mark_is_written_again(tmp_path: Path) -> None:
    first = lab_model.write_model("tiny-qwen3", folder=tmp_path)
    whole = (first / "model.safetensors").read_bytes()
    (first / "kvtier_model.json").unlink()
    (first / "model.safetensors").write_bytes(b"half")
    assert lab_model.write_model("tiny-qwen3", folder=tmp_path) == first
    assert (first / "model.safetensors").read_bytes() == whole


def test_a_folder_that_cannot_be_made_and_an_unknown_model_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="lab-mha, lab-gqa"):
        lab_model.write_model("gpt-9", folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="XDG_CACHE_HOME"):
        lab_model.write_model("tiny-qwen3", folder=tmp_path / "file" / "models")


@pytest.mark.parametrize("name", list(model_shapes.SHAPES))
def test_the_weights_have_the_shapes_that_the_config_says(name: str, tmp_path: Path) -> None:
    folder = lab_model.write_model(name, folder=tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    heads, kv_heads, size = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        assert tensors[prefix + "q_proj.weight"].shape == (heads * size, hidden)
        assert tensors[prefix + "k_proj.weight"].shape == (kv_heads * size, hidden)
        assert tensors[prefix + "o_proj.weight"].shape == (hidden, heads * size)
        assert (prefix + "q_norm.weight" in tensors) == (config["model_type"] == "qwen3")
    assert tensors["lm_head.weight"].shape == (config["vocab_size"], hidden)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}
    assert config["max_position_embeddings"] >= 32768


def test_every_byte_has_its_own_token_and_no_special_token_can_win(tmp_path: Path) -> None:
    folder = lab_model.write_model("tiny-qwen3", folder=tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(256))
    assert tokenizer["model"]["vocab"]["A"] == ord("A")
    assert [token["id"] for token in tokenizer["added_tokens"]] == list(range(256, 512))
    assert not load_file(folder / "model.safetensors")["lm_head.weight"][256:].any()


def test_the_tokenizers_library_reads_the_tokenizer_back_byte_for_byte(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="comes with sglang")
    folder = lab_model.write_model("tiny-qwen3", folder=tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "def f(x):\n\treturn 'naïve' + \"€\" # 10 % 日本\x00\x7f"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|im_start|>user").ids[0] == 257


def test_a_shape_without_weights_is_a_folder_that_a_server_fills_with_random_ones(
    tmp_path: Path,
) -> None:
    path = lab_model.write_unweighted("shape-8b", folder=tmp_path)
    assert lab_model.write_unweighted("shape-8b", folder=tmp_path) == path
    config = json.loads((path / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (
        4096,
        32,
        128,
    )
    assert config["torch_dtype"] == "bfloat16"  # SGLang's "auto" makes float16 of float32
    assert config["max_position_embeddings"] == 131072
    assert not list(path.glob("*.safetensors"))
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in path.iterdir()}


def test_a_drawn_model_is_bfloat16_of_the_lab_models_scales(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="comes with sglang")
    from safetensors.torch import load_file as load

    folder = lab_model.write_named("lab-gpu-tiny", folder=tmp_path)
    assert lab_model.write_named("lab-gpu-tiny", folder=tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    config = json.loads((folder / "config.json").read_text())
    assert (config["torch_dtype"], config["head_dim"]) == ("bfloat16", 128)
    tensors = load(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    wanted = {
        weight.name: weight
        for weight in model_shapes.weights_of(model_shapes.DRAWN["lab-gpu-tiny"])
    }
    assert wanted.keys() == tensors.keys()
    for name, weight in wanted.items():
        found = tensors[name].float()
        if weight.columns is None:
            assert found.shape == (weight.rows,) and (found == weight.scale).all()
            continue
        assert found.shape == (weight.rows, weight.columns)
        drawn = found[: weight.zero_from]
        assert drawn.std().item() == pytest.approx(weight.scale / weight.columns**0.5, rel=0.02)
        assert weight.zero_from is None or not found[weight.zero_from :].any()


def test_only_a_model_of_ours_is_served_as_bfloat16_on_an_accelerator() -> None:
    assert model_shapes.serving_dtype("cpu", "lab-mha") == "float32"
    assert model_shapes.serving_dtype("cuda", "lab-mha") == "bfloat16"
    assert model_shapes.serving_dtype("cuda", "shape-8b") == "bfloat16"
    assert model_shapes.serving_dtype("cuda", "/models/some-checkpoint") == "auto"


def test_heads_that_flashinfer_has_no_kernels_for_are_refused_on_an_accelerator() -> None:
    model_shapes.check_heads("cpu", "tiny-qwen3")
    for name in (*model_shapes.DRAWN, *model_shapes.UNWEIGHTED, "/models/some-checkpoint"):
        model_shapes.check_heads("cuda", name)
    with pytest.raises(BenchError, match="lab-gpu-1b"):
        model_shapes.check_heads("cuda", "tiny-qwen3")


# SmolLM2's weights under transformers' names and in its order, out of llama.cpp's.

FACTS = {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1}


def paired(data: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to queries and keys (convert_hf_to_gguf.py, `permute`)."""
    rows, columns = data.shape
    halves = data.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def test_queries_and_keys_get_their_order_back_and_all_others_stay() -> None:
    query, key, value = (np.arange(rows * 3.0).reshape(rows, 3) for rows in (8, 4, 4))
    weights = {
        "token_embd.weight": value,
        "output_norm.weight": value[0],
        "blk.7.attn_q.weight": paired(query, 2),
        "blk.7.attn_k.weight": paired(key, 1),
        "blk.7.attn_v.weight": value,
        "blk.7.ffn_down.weight": query,
    }
    found = smollm2.renamed(weights, FACTS)
    layer = "model.layers.7."
    assert set(found) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"{layer}self_attn.{part}_proj.weight" for part in "qkv"),
        f"{layer}mlp.down_proj.weight",
    }
    np.testing.assert_array_equal(found[f"{layer}self_attn.q_proj.weight"], query)
    np.testing.assert_array_equal(found[f"{layer}self_attn.k_proj.weight"], key)
    np.testing.assert_array_equal(found[f"{layer}mlp.down_proj.weight"], query)


def test_a_file_that_is_not_the_wheel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    wrong = tmp_path / "x.whl"
    wrong.write_bytes(b"no archive")
    monkeypatch.setenv(smollm2.WHEEL_VARIABLE, str(wrong))
    (tmp_path / "model").mkdir()
    with pytest.raises(BenchError, match="is not the wheel"):
        smollm2.write(tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []
