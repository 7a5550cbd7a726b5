"""A small model whose layers see a sliding window and the whole context in turn, with attention
sinks, as gpt-oss has them: Granite SWA's, without experts.
"""

from __future__ import annotations

from pathlib import Path

from served.weights import save_with_weights
from sgl_kvtier.lab.outside.model_shapes import BYTES, VOCABULARY

WINDOW = 40
"""Tokens that a layer with a window sees, the one at hand included."""


def write_windowed_model(folder: Path) -> Path:
    """The folder of a model of four layers with random weights in float32, its tokenizer that of the
    lab models. Weights are scaled as theirs (`model_shapes.py`).
    """
    import torch
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    kinds, heads, width = ["sliding_attention", "full_attention"] * 2, 4, 128
    config = GraniteSWAConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=len(kinds),
        num_attention_heads=heads, num_key_value_heads=2, layer_types=kinds, sliding_window=WINDOW,
        attention_multiplier=(width / heads) ** -0.5, tie_word_embeddings=False, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, layer_rope_theta=[10000.0] * len(kinds),
        pad_token_id=None, bos_token_id=None, eos_token_id=BYTES, dtype="float32",
    )  # fmt: skip
    model = GraniteSWAForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.copy_(torch.arange(heads) / 2)  # SGLang has them in bfloat16
    save_with_weights(model, folder, {"embed_tokens": width**0.5, "q_proj": 4.0, "lm_head": 6.0})
    return folder
