"""Stand-in models: one small configuration for each kind of cache that the recipes' models have.
The kinds of layers and the sizes that lay out pages are those of the model; layers are few, and
nothing is computed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sgl_kvtier.lab.outside.lab_model import write_model

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 256,
    "bos_token_id": None,
    "pad_token_id": 259,
    "rope_theta": 1e6,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
}
_QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_DELTA = {
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 0.25,
}
_DSA = {
    "num_attention_heads": 16,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
}
_KDA = {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "mla_use_nope": True,
    "head_dim": 32,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
}


def _shape(architecture: str, kind: str, *parts: dict[str, Any], **own: Any) -> dict[str, Any]:
    found = {**_BASE, "architectures": [architecture], "model_type": kind}
    for part in parts:
        found |= part
    return found | own


SHAPES: dict[str, dict[str, Any]] = {
    "llama": _shape("LlamaForCausalLM", "llama", _GQA),
    "qwen3": _shape("Qwen3ForCausalLM", "qwen3", _GQA),
    "qwen3-moe": _shape("Qwen3MoeForCausalLM", "qwen3_moe", _GQA, _QWEN_EXPERTS),
    "minimax-m2": _shape(
        "MiniMaxM2ForCausalLM", "minimax_m2", _GQA, num_local_experts=8, num_experts_per_tok=2
    ),
    "glm-4": _shape(
        "Glm4MoeForCausalLM", "glm4_moe", _GQA, _EXPERTS,
        num_nextn_predict_layers=1, use_qk_norm=True, partial_rotary_factor=0.5,
    ),
    "deepseek-v3": _shape(
        "DeepseekV3ForCausalLM", "deepseek_v3", _LATENT, _EXPERTS, num_nextn_predict_layers=1
    ),
    "deepseek-v3.2": _shape(
        "DeepseekV32ForCausalLM", "deepseek_v32", _LATENT, _EXPERTS, _DSA, num_key_value_heads=16
    ),
    "glm-5": _shape(
        "GlmMoeDsaForCausalLM", "glm_moe_dsa", _LATENT, _EXPERTS, _DSA, num_key_value_heads=16
    ),
    "gpt-oss": _shape(
        "GptOssForCausalLM", "gpt_oss", _GQA,
        sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=8, num_experts_per_tok=2, swiglu_limit=7.0, rope_scaling=None,
        attention_bias=True,
    ),
    "gemma-3": _shape(
        "Gemma3ForCausalLM", "gemma3_text", _GQA,
        num_hidden_layers=6, sliding_window=1024, sliding_window_pattern=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"], query_pre_attn_scalar=64,
        rope_local_base_freq=10000.0, hidden_activation="gelu_pytorch_tanh",
    ),
    "gemma-4": _shape(
        "Gemma4ForCausalLM", "gemma4_text", _GQA,
        num_hidden_layers=6, sliding_window=1024,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        hidden_activation="gelu_pytorch_tanh", global_head_dim=64, num_global_key_value_heads=2,
        swa_num_key_value_heads=2, num_kv_shared_layers=0, attention_k_eq_v=False,
        enable_moe_block=True, num_experts=8,
        top_k_experts=2, moe_intermediate_size=32,
    ),
    "llama4": {
        **_BASE,
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "vision_config": {},
        "text_config": _shape(
            "Llama4ForCausalLM", "llama4_text", _GQA,
            num_local_experts=8, num_experts_per_tok=1, intermediate_size_mlp=64,
            interleave_moe_layer_step=1, attention_chunk_size=8192, no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0], use_qk_norm=True, attn_temperature_tuning=True,
            layer_types=["chunked_attention"] * 3 + ["full_attention"],
        ),
    },
    "mimo-v2": _shape(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash",
        num_key_value_heads=2, head_dim=192, v_head_dim=128, swa_num_attention_heads=4,
        swa_num_key_value_heads=4, swa_head_dim=192, swa_v_head_dim=128, sliding_window=128,
        sliding_window_size=128, hybrid_layer_pattern=[0, 1, 1, 0],
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "qwen3-next": _shape("Qwen3NextForCausalLM", "qwen3_next", _GQA, _QWEN_EXPERTS, _DELTA),
    "qwen3.5": _shape("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _GQA, _QWEN_EXPERTS, _DELTA),
    "kimi-k3": _shape("KimiLinearForCausalLM", "kimi_linear", _LATENT, _KDA, q_lora_rank=None),
    "nemotron-3": _shape(
        "NemotronHForCausalLM", "nemotron_h", _GQA,
        hybrid_override_pattern="MEM*", mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=32,
        n_groups=2, conv_kernel=4, chunk_size=64, mamba_hidden_act="silu", n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
        n_shared_experts=1, max_position_embeddings=32768,
    ),
    "deepseek-v4": _shape(
        "DeepseekV4ForCausalLM", "deepseek_v4", _EXPERTS,
        num_attention_heads=16, num_key_value_heads=1, head_dim=512, q_lora_rank=64,
        qk_rope_head_dim=64, o_lora_rank=64, o_groups=4, sliding_window=128, index_n_heads=4,
        index_head_dim=128, index_topk=512, compress_ratios=[0, 4, 128, 4, 0],
        compress_rope_theta=40000, hc_mult=4, hc_sinkhorn_iters=2, hc_eps=1e-6,
        num_hash_layers=0, num_nextn_predict_layers=1, swiglu_limit=7.0,
        scoring_func="sqrtsoftplus",
    ),
    "llama-eagle3": _shape(
        "LlamaForCausalLMEagle3", "llama", _GQA, num_hidden_layers=1, draft_vocab_size=512
    ),
}  # fmt: skip
"""By the word that a recipe has for its model, or for its draft."""


_TRITON = {"--attention-backend": "triton"}
_STATES = {"--max-mamba-cache-size": 40}
ADDED: dict[str, dict[str, Any]] = {
    "qwen3-next": _STATES,
    "qwen3.5": _STATES,
    "kimi-k3": _STATES,
    "nemotron-3": _STATES,
    "gpt-oss": _TRITON,
    "mimo-v2": _TRITON,
    "gemma-4": _TRITON,
    "deepseek-v4": {"--page-size": 256, "--max-total-tokens": 65536},
}
"""Flags by shape, for what SGLang would choose on a GPU: how many states its memory has room for,
the attention backend, and the size of V4's pages. A tenth of V4's tokens have room in its windows:
SGLang admits no prompt that needs all of it.
"""


_WORDS = {
    "deepseek-v4": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think> "
        "<｜deepseek_image｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>"
    )
}
"""Special tokens that SGLang looks up when a server starts."""


def write(shape: str, folder: Path) -> Path:
    """The folder of a stand-in model: its configuration, and the tokenizer of a lab model."""
    folder.mkdir(parents=True, exist_ok=True)
    small = write_model("tiny-llama")
    for file in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(small / file, folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["model_max_length"] = _BASE["max_position_embeddings"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    words = json.loads((folder / "tokenizer.json").read_text())
    like = words["added_tokens"][0]
    for number, word in enumerate(_WORDS.get(shape, "").split(), 300):
        words["added_tokens"].append({**like, "id": number, "content": word})
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return folder


def bytes_per_token(shape: str) -> int:
    """Keys and values, or latents, of one token in bfloat16, roughly: windows count in full, but
    for DeepSeek V4's.
    """
    config = SHAPES[shape].get("text_config", SHAPES[shape])
    layers = config["num_hidden_layers"]
    if "compress_ratios" in config:  # latents, and of every four tokens index keys
        rows = {0: 0.0, 4: (584 + 132) / 4, 128: 584 / 128}
        return int(sum(rows[ratio] for ratio in config["compress_ratios"][:layers]))
    if "kv_lora_rank" in config:
        return int(2 * layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]))
    return int(2 * layers * 2 * config["num_key_value_heads"] * config["head_dim"])
