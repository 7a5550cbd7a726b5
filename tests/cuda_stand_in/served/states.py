"""A small model of which every second layer keeps a state instead of keys and values: Qwen3-Next's,
without experts.
"""

from __future__ import annotations

import json
from pathlib import Path

from served.weights import save_with_weights
from sgl_kvtier.lab.outside.model_shapes import BYTES, VOCABULARY

PAGE, STRATEGY = 64, "--mamba-radix-cache-strategy=extra_buffer"
"""Tokens of a page, and a flag, of a server with such a model: SGLang keeps states at multiples of
64 tokens.
"""


def write_state_model(folder: Path) -> Path:
    """The folder of a model of four layers with random weights in float32, its tokenizer that of the
    lab models. Weights are scaled as theirs (`model_shapes.py`), and states forget slowly: every
    token depends on the whole context.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    layers, width = 4, 128
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, full_attention_interval=2,
        linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=6,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        mlp_only_layers=list(range(layers)), tie_word_embeddings=False, max_position_embeddings=16384,
        bos_token_id=None, eos_token_id=BYTES, dtype="float32",
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(-4.0)
    save_with_weights(model, folder, {"embed_tokens": width**0.5, "q_proj": 4.0, "lm_head": 6.0})
    written = folder / "config.json"  # SGLang reads what transformers turns into types of layers
    kept = json.loads(written.read_text("utf-8")) | {"full_attention_interval": 2}
    written.write_text(json.dumps(kept), "utf-8")
    return folder
