"""A small model with multi-head latent attention (MLA): DeepSeek V3's, without experts."""

from __future__ import annotations

from pathlib import Path

from served.weights import save_with_weights
from sgl_kvtier.lab.outside.model_shapes import BYTES, VOCABULARY

LATENT, ROTARY = 512, 64
"""Numbers of a token's latent in each layer, as DeepSeek V3 has them."""


def write_latent_model(folder: Path) -> Path:
    """The folder of a model of two layers with random weights in float32, its tokenizer that of the
    lab models. Weights are scaled as theirs (`model_shapes.py`): every token depends on the whole
    context.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    layers = 2
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=layers,
        first_k_dense_replace=layers, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=64, kv_lora_rank=LATENT, qk_rope_head_dim=ROTARY, qk_nope_head_dim=32, v_head_dim=32,
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid",
        num_mtp_layers=0, max_position_embeddings=4096, bos_token_id=None, eos_token_id=BYTES, dtype="float32",
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).float().eval()
    save_with_weights(
        model, folder, {"embed_tokens": config.hidden_size**0.5, "q_b_proj": 4.0, "lm_head": 6.0}
    )
    return folder
