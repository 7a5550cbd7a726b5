"""Linear layers on the CUDA stand-in: Qwen3-Next's gated delta nets by the operators of `linear.cpp`,
in the place of Triton kernels that compute in floating point. Which state a forward goes on from,
where it leaves one, and which ones it keeps is SGLang's own code.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn.functional import softplus

CHUNK = 64
"""Tokens after which SGLang's kernel keeps a state."""


def in_place() -> None:
    """Replaces the kernels in this process."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.models import qwen3_next

    torch.ops.load_library(os.environ["STAND_IN_LINEAR"])
    gdn_backend.causal_conv1d_fn = _convolve_prefill
    gdn_backend.causal_conv1d_update = _convolve_decode
    gdn_backend.fused_gdn_gating = _gates
    gdn_backend.fused_qkv_split_gdn_prefill = _split
    gdn_triton.chunk_gated_delta_rule = _prefill
    gdn_triton.fused_recurrent_gated_delta_rule_packed_decode = _decode
    fused_norm_gate.FusedRMSNormGated.forward = _norm
    qwen3_next.Qwen2MoeSparseMoeBlock = _dense(qwen3_next.Qwen2MoeMLP)


def _dense(mlp: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """SGLang has Qwen3-Next with experts alone, whose kernels compute in floating point."""

    class Dense(mlp):  # type: ignore[misc, valid-type]
        num_fused_shared_experts = 0

        def __init__(self, *, config: Any, quant_config: Any, prefix: str, **more: Any) -> None:
            super().__init__(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                quant_config,
                prefix=prefix,
                reduce_results=False,
            )

        def forward(self, hidden: torch.Tensor, forward_batch: Any = None, **more: Any) -> Any:
            return super().forward(hidden)

    return Dense


def _convolve_prefill(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str,
    **more: Any,
) -> torch.Tensor:
    """`inputs` are [channels, tokens]."""
    assert activation == "silu"
    out = torch.empty_like(inputs.T, memory_format=torch.contiguous_format)
    torch.ops.cuda_stand_in.convolve(
        inputs.T, weight, bias, conv_states, cache_indices, query_start_loc, has_initial_state, out
    )
    return out.T


def _convolve_decode(
    inputs: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    assert activation == "silu"
    out = torch.empty_like(inputs)
    torch.ops.cuda_stand_in.convolve(
        inputs, weight, bias, conv_states, conv_state_indices, None, None, out
    )
    return out


def _gates(
    log_a: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    decay = -log_a.float().exp() * softplus(a.float() + bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def _split(
    mixed: torch.Tensor, q_heads: int, k_heads: int, v_heads: int, q: int, k: int, v: int
) -> list[torch.Tensor]:
    parts = mixed.split([q_heads * q, k_heads * k, v_heads * v], dim=-1)
    heads = ((q_heads, q), (k_heads, k), (v_heads, v))
    return [part.unflatten(-1, one).unsqueeze(0) for part, one in zip(parts, heads, strict=True)]


def _prefill(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    inplace_update: bool,
    **more: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    assert inplace_update
    # At least as many chunks as all sequences have.
    chunks = v.shape[1] // CHUNK + len(initial_state_indices)
    out, kept = torch.empty_like(v), v.new_empty((chunks, *initial_state.shape[1:]))
    _delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, out, kept)
    return out, None, kept.unsqueeze(0)


def _decode(
    *,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    **more: Any,
) -> None:
    heads, v, k = initial_state.shape[1:]
    k_heads = (mixed_qkv.shape[1] - heads * v) // (2 * k)
    query, key, value = _split(mixed_qkv, k_heads, k_heads, heads, k, k, v)
    decay, beta = _gates(A_log, a, b, dt_bias)
    _delta_rule(
        query, key, value, decay, beta, initial_state, ssm_state_indices, None, out.transpose(0, 1), None
    )  # fmt: skip


def _delta_rule(*tensors: torch.Tensor | None) -> None:
    """Of a batch of one row; states and their numbers have none."""
    query, key, value, decay, beta, states, indices, starts, out, kept = tensors
    rows = [one[0] for one in (query, key, value, decay, beta)]
    torch.ops.cuda_stand_in.delta_rule(*rows, states, indices, starts, out[0], kept, CHUNK)


def _norm(self: Any, hidden: torch.Tensor, gate: torch.Tensor, **more: Any) -> torch.Tensor:
    hidden = hidden.float()
    scaled = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
    return (self.weight * scaled) * torch.nn.functional.silu(gate.float())
