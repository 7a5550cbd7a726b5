"""Attention on a CPU whose prefill chunk costs O(chunk x sequence).

SGLang's torch_native backend pads each chunk's queries to the whole sequence and computes a square
attention, so a chunk costs O(sequence^2) and a chunked prefill O(n^3). Here a chunk attends to its
own tokens causally and to its prefix in full, and the two results are merged by their log-sum-exp:
no mask, no padding, grouped KV heads are not repeated over the prefix. Float32, bfloat16 and
float16; causal self-attention with equal head sizes of K and V. Sliding windows are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.cpu.platform import ATTENTION

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def gather_pages(cache: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """K or V rows of one request in order, [tokens, heads, head_dim], copied page by page.

    `cache` is [slots, heads, head_dim]; `slots` are the request's token slots, of which every run
    of `page_size` from the start is one page of the pool (SGLang's paged allocator guarantees it).
    """
    tokens, whole = slots.shape[0], slots.shape[0] // page_size
    if page_size == 1 or whole == 0:
        return cache.index_select(0, slots)
    rows = cache.view(cache.shape[0] // page_size, -1)
    out = cache.new_empty((tokens, *cache.shape[1:]))
    torch.index_select(
        rows,
        0,
        slots[: whole * page_size : page_size] // page_size,
        out=out[: whole * page_size].view(whole, -1),
    )
    if whole * page_size < tokens:
        out[whole * page_size :] = cache.index_select(0, slots[whole * page_size :])
    return out


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of the last `n` tokens of a sequence over all of it.

    q is [q_heads, n, head_dim]; k and v are [kv_heads, s, head_dim] with s >= n, and query i is at
    position s - n + i. Returns [q_heads, n, head_dim] in q's dtype.
    """
    q_heads, n, _ = q.shape
    kv_heads, s, _ = k.shape
    group, prefix = q_heads // kv_heads, s - n
    own_k, own_v = k[:, prefix:], v[:, prefix:]
    if group > 1:
        own_k, own_v = own_k.repeat_interleave(group, 0), own_v.repeat_interleave(group, 0)
    own, own_lse = _flash(q[None], own_k[None], own_v[None], 0.0, True, scale=scale)
    if prefix == 0:
        return own[0]
    folded = q.reshape(1, kv_heads, group * n, q.shape[2])
    past, past_lse = _flash(
        folded, k[None, :, :prefix], v[None, :, :prefix], 0.0, False, scale=scale
    )
    past = past.reshape(q.shape)
    past_lse = past_lse.reshape(q_heads, n)
    weight = torch.sigmoid(past_lse.float() - own_lse[0].float()).unsqueeze(-1)
    return torch.lerp(own[0].float(), past.float(), weight).to(q.dtype)


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one token over its whole sequence: q is [q_heads, head_dim], k and v [kv_heads,
    s, head_dim].
    """
    kv_heads = k.shape[0]
    folded = q.reshape(1, kv_heads, q.shape[0] // kv_heads, q.shape[1])
    out, _ = _flash(folded, k[None], v[None], 0.0, False, scale=scale)
    return out.reshape(q.shape)


class ChunkAttentionBackend(TorchNativeAttnBackend):
    """SGLang's torch_native backend with both inner loops replaced; cross-attention and unequal
    head sizes fall back.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        window = getattr(model_runner, "sliding_window_size", None)
        if self.use_sliding_window_kv_pool or (window is not None and window > -1):
            raise ConfigError(
                f"this model attends within a sliding window ({window} tokens), which the "
                f"{ATTENTION} attention backend does not do. Start the server with "
                "--attention-backend torch_native (slow but complete)"
            )
        self.page_size = model_runner.server_args.page_size or 1

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of the requests with which SGLang pads a batch of data-parallel attention, so
        that all ranks have equally many.
        """
        return 1

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        causal: bool = False,
        sliding_window_size: int | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or not causal or k_cache.shape[-1] != v_cache.shape[-1]:
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling=scaling,
                causal=causal,
                sliding_window_size=sliding_window_size,
                **rest,
            )
        _refuse_window(sliding_window_size)
        scale = _scale(scaling, query)
        start = 0
        rows, lengths, news = req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist()
        for row, length, n in zip(rows, lengths, news, strict=True):
            k, v = self._sequence(req_to_token[row, :length], k_cache, v_cache, query.dtype)
            q = query[start : start + n].transpose(0, 1)
            output[start : start + n] = chunk_attention(q, k, v, scale).transpose(0, 1)
            start += n
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or k_cache.shape[-1] != v_cache.shape[-1]:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling=scaling,
                sliding_window_size=sliding_window_size,
                **rest,
            )
        _refuse_window(sliding_window_size)
        scale = _scale(scaling, query)
        for i, (row, length) in enumerate(
            zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        ):
            k, v = self._sequence(req_to_token[row, :length], k_cache, v_cache, query.dtype)
            output[i] = decode_attention(query[i], k, v, scale)
        return output

    def _sequence(
        self, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slots.long()
        k = gather_pages(k_cache, slots, self.page_size).to(dtype).transpose(0, 1)
        v = gather_pages(v_cache, slots, self.page_size).to(dtype).transpose(0, 1)
        return k, v


def register() -> None:
    """Makes `--attention-backend kvtier_cpu` known in this process. Idempotent."""
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )

    if ATTENTION not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION])
    if ATTENTION not in ATTENTION_BACKENDS:
        register_attention_backend(ATTENTION)(ChunkAttentionBackend)


def _scale(scaling: float | None, query: torch.Tensor) -> float:
    return float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5


def _refuse_window(window: int | None) -> None:
    if window is not None and window > -1:
        raise ConfigError(
            f"a layer attends within a sliding window of {window} tokens; use --attention-backend "
            "torch_native"
        )
