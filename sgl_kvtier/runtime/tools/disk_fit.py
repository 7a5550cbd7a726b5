"""Whether a disk is fast enough for a model on a GPU: seconds to compute a prompt, to load it, and
to do both from its two ends.

The time to compute is an estimate: the arithmetic of the model's matrices and of attention at a
fraction of the GPU's peak. With the fractions below it is within 20 % of all six step-time profiles
of this repository (H100 and H200, 8B to DeepSeek-V3, prompts of 8k to 128k tokens). It does not
include overlap with other requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.outside import is_whole, shown

GPUS: Final[Mapping[str, float]] = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "h20": 148e12,
    "b200": 2250e12,
    "l40s": 362e12,
    "a10": 125e12,
    "rtx4090": 165e12,
}
"""Peak operations per second with dense bfloat16 matrices, counting a multiply-add as two
operations (NVIDIA's data sheets).
"""
_SHARE: Final = 0.6
_SHARE_LATENT: Final = 0.22
"""Fraction of the peak that prefill reaches; `_SHARE_LATENT` for models with latents (MLA), which
spend most of their time elsewhere.
"""
LENGTHS: Final = (4096, 8192, 32768, 131072)
"""Prompt lengths that are shown, in tokens."""


@dataclass(frozen=True)
class Shape:
    """The properties of a model that matter here, per token."""

    name: str
    layers: int
    kv_bytes: int
    """Bytes of keys and values, or latents, in all layers, in the model's number type."""
    matrix_parameters: float
    """Parameters that a token is multiplied with; only active experts count."""
    attention_width: float
    """Multiply-adds per layer for each pair of tokens, counting both products."""
    latent: bool
    most_tokens: int
    """Longest prompt (max_position_embeddings); 0 if its configuration does not tell."""


@dataclass(frozen=True)
class Fit:
    """Times for a prompt of `tokens` tokens on a disk with this read speed. Seconds."""

    tokens: int
    read_gb_per_s: float
    compute_s: float
    load_s: float
    both_s: float
    """Computed from its first token on while it is loaded from its last page on."""

    @property
    def saved(self) -> float:
        """Fraction of the time of the faster of the two alone."""
        return 1 - self.both_s / min(self.compute_s, self.load_s)


def shape_of(name: str, config: Mapping[str, Any], number_bytes: int = 2) -> Shape:
    """The shape from a model's `config.json`. Raises KVTierError if it does not tell enough."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config

    def of(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        value = default if value is None else value
        if not is_whole(value, 0):
            raise KVTierError(f"{name}: config.json has {key} = {shown(value)}: a number is needed")
        return value

    hidden, layers, heads = (
        of(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    head = of("head_dim", hidden // max(1, heads))
    latent = of("kv_lora_rank", 0)
    if latent:
        rope, nope, value = of("qk_rope_head_dim"), of("qk_nope_head_dim"), of("v_head_dim")
        query = of("q_lora_rank", 0)
        queries = (
            (hidden + heads * (nope + rope)) * query if query else (hidden * heads * (nope + rope))
        )
        projections = (
            queries
            + hidden * (latent + rope)
            + latent * heads * (nope + value)
            + heads * value * hidden
        )
        kv_values, width = latent + rope, heads * (nope + rope + value)
    else:
        kv_heads = of("num_key_value_heads", heads)
        projections = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
        kv_values, width = 2 * kv_heads * head, 2 * heads * head
    dense = 3 * hidden * of("intermediate_size")
    active = of("num_experts_per_tok", 0)
    if active:
        shared = of("n_shared_experts", 0)
        expert = of("moe_intermediate_size", of("intermediate_size"))
        first = min(layers, of("first_k_dense_replace", 0))
        feed = first * dense + (layers - first) * 3 * hidden * expert * (active + shared)
    else:
        feed = layers * dense
    return Shape(
        name=name,
        layers=layers,
        kv_bytes=layers * kv_values * number_bytes,
        matrix_parameters=float(layers * projections + feed),
        attention_width=float(width),
        latent=bool(latent),
        most_tokens=of("max_position_embeddings", 0),
    )


def compute_seconds(shape: Shape, gpu: str, gpus: int, tokens: int) -> float:
    """Seconds to prefill a prompt on `gpus` GPUs. Raises KVTierError for an unknown kind of GPU."""
    per_token_s, per_pair_s = _costs(shape, gpu, gpus)
    return per_token_s * tokens + per_pair_s * tokens**2


def _costs(shape: Shape, gpu: str, gpus: int) -> tuple[float, float]:
    """Seconds for each token of a prompt, and for each pair of its tokens in order (attention)."""
    speed = _operations_per_s(shape, gpu, gpus)
    return 2 * shape.matrix_parameters / speed, shape.layers * shape.attention_width / speed


def _operations_per_s(shape: Shape, gpu: str, gpus: int) -> float:
    if gpu not in GPUS:
        raise KVTierError(f"no GPU {gpu!r} is known here. There are: {', '.join(GPUS)}")
    share = _SHARE_LATENT if shape.latent else _SHARE
    return share * GPUS[gpu] * gpus


def break_even(shape: Shape, gpu: str, gpus: int, tokens: int) -> float:
    """Bytes per second from which on loading a prompt is faster than computing it."""
    return tokens * shape.kv_bytes / compute_seconds(shape, gpu, gpus, tokens)


def break_even_tokens(shape: Shape, gpu: str, gpus: int, bytes_per_s: float) -> int | None:
    """The shortest prompt that this disk loads at least as fast as it is computed: 1 if that holds
    for every prompt; None if it holds for none that the model accepts. In longer prompts attention
    costs more per token, while loading costs the same.
    """
    per_token = _operations_per_s(shape, gpu, gpus) * shape.kv_bytes / bytes_per_s
    over = per_token - 2 * shape.matrix_parameters
    if over <= 0:
        return 1
    attention = shape.layers * shape.attention_width
    tokens = math.ceil(over / attention) if attention else math.inf
    return None if tokens > (shape.most_tokens or math.inf) or tokens == math.inf else int(tokens)


def fits(shape: Shape, gpu: str, gpus: int, bytes_per_s: float) -> list[Fit]:
    """Estimates for prompts of each length in `LENGTHS`."""
    return [fit(shape, gpu, gpus, bytes_per_s, tokens) for tokens in LENGTHS]


def fit(shape: Shape, gpu: str, gpus: int, bytes_per_s: float, tokens: int) -> Fit:
    """The estimate for a prompt of this length. From both ends, the first tokens, whose attention
    costs least, are computed until the others are loaded.
    """
    per_token_s, per_pair_s = _costs(shape, gpu, gpus)
    load_token_s = shape.kv_bytes / bytes_per_s
    load_s = tokens * load_token_s
    # Solved for the computed tokens: computing these takes as long as loading the others.
    linear = per_token_s + load_token_s
    computed = 2 * load_s / (linear + math.sqrt(linear**2 + 4 * per_pair_s * load_s))
    return Fit(
        tokens,
        bytes_per_s / 1e9,
        compute_seconds(shape, gpu, gpus, tokens),
        load_s,
        load_s - computed * load_token_s,
    )
