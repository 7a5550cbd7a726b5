"""Our CPU attention against SGLang's torch_native, which is slow and right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.cpu.attention import ChunkAttentionBackend

PAGE = 16


def runner(window: int | None = None, page_size: int = PAGE) -> SimpleNamespace:
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=None,
        token_to_kv_pool=object(),
        sliding_window_size=window,
        server_args=SimpleNamespace(page_size=page_size),
    )


def batch(lengths, news, q_heads, kv_heads, dim, dtype, page_size=PAGE, seed=0):
    """Requests whose pages lie scattered in one pool: (query, k_cache, v_cache, rows, ids, lengths,
    prefixes, news).
    """
    g = torch.Generator().manual_seed(seed)
    pages = sum(-(-n // page_size) for n in lengths) + 3
    order = torch.randperm(pages, generator=g)
    rows = torch.zeros((len(lengths) + 1, max(lengths) + page_size), dtype=torch.int32)
    used = 0
    for i, n in enumerate(lengths):
        own = order[used : used + -(-n // page_size)]
        used += len(own)
        slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:n]
        rows[i + 1, :n] = slots
    shape = (pages * page_size, kv_heads, dim)
    k, v = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
    q = torch.randn((sum(news), q_heads, dim), generator=g).to(dtype)
    ids = torch.arange(1, len(lengths) + 1)
    prefixes = [n - m for n, m in zip(lengths, news, strict=True)]
    return q, k, v, rows, ids, torch.tensor(lengths), torch.tensor(prefixes), torch.tensor(news)


def attended(backend, made, *, decoding=False, causal=True, scaling=0.125):
    """What a backend makes of a batch."""
    (q, *caches, lengths, prefixes, news) = made
    out = torch.empty_like(q)
    how = {"scaling": scaling, "causal": causal, "is_cross_attn": False}
    how["enable_gqa"] = q.shape[1] != caches[0].shape[1]
    if decoding:
        backend._run_sdpa_forward_decode(q, out, *caches, lengths, **how)
    else:
        backend._run_sdpa_forward_extend(q, out, *caches, lengths, prefixes, news, **how)
    return out


def stock_and_ours(made, page_size=PAGE, **how):
    backends = TorchNativeAttnBackend(runner()), ChunkAttentionBackend(runner(page_size=page_size))
    return [attended(backend, made, **how) for backend in backends]


IN = pytest.mark.parametrize(
    ("dtype", "close"),
    [(torch.float32, {"atol": 5e-6, "rtol": 1e-5}), (torch.bfloat16, {"atol": 2e-2, "rtol": 1e-2})],
    ids=["fp32", "bf16"],
)


CASES = [
    ([64], [64]),
    ([700], [188]),
    ([1500, 37, 512], [512, 37, 1]),
    ([33, 16], [1, 16]),
    ([529], [5]),
]


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(8, 8), (8, 2), (4, 1)], ids=["mha", "gqa", "mqa"]
)
@IN
@pytest.mark.parametrize(("lengths", "news"), CASES)
def test_a_chunk_attends_as_in_torch_native(lengths, news, q_heads, kv_heads, dtype, close):
    stock, ours = stock_and_ours(batch(lengths, news, q_heads, kv_heads, 64, dtype))
    torch.testing.assert_close(ours, stock, **close)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (8, 2)], ids=["mha", "gqa"])
@IN
def test_a_decoded_token_attends_as_in_torch_native(q_heads, kv_heads, dtype, close):
    made = batch([1, 16, 17, 900], [1] * 4, q_heads, kv_heads, 64, dtype)
    stock, ours = stock_and_ours(made, decoding=True, causal=False)
    torch.testing.assert_close(ours, stock, **close)


def test_pages_of_one_token_need_no_alignment():
    made = batch([40], [9], 4, 4, 32, torch.float32, page_size=1)
    stock, ours = stock_and_ours(made, page_size=1, scaling=None)
    torch.testing.assert_close(ours, stock, atol=5e-6, rtol=1e-5)


def test_the_result_does_not_depend_on_how_a_prompt_is_cut_into_chunks():
    whole_q, k, v, rows, ids, _, _, _ = batch([700], [700], 8, 8, 64, torch.float32)
    backend = ChunkAttentionBackend(runner())
    outputs = []
    for cuts in ([700], [512, 700], [16, 32, 256, 700]):
        out, start = torch.empty_like(whole_q), 0
        for stop in cuts:
            backend._run_sdpa_forward_extend(
                whole_q[start:stop], out[start:stop], k, v, rows, ids,
                torch.tensor([stop]), torch.tensor([start]), torch.tensor([stop - start]), scaling=0.125, causal=True,
            )  # fmt: skip
            start = stop
        outputs.append(out)
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=5e-6, rtol=1e-5)


def test_attention_without_a_causal_mask_is_left_to_torch_native():
    made = batch([64], [64], 4, 4, 32, torch.float32)
    stock, ours = stock_and_ours(made, causal=False, scaling=None)
    assert torch.equal(ours, stock)


def test_a_sliding_window_is_refused_with_what_to_do_instead():
    with pytest.raises(ConfigError, match="--attention-backend torch_native"):
        ChunkAttentionBackend(runner(window=128))
    q, *others = batch([64], [64], 4, 4, 32, torch.float32)
    backend, out = ChunkAttentionBackend(runner()), torch.empty_like(q)
    with pytest.raises(ConfigError, match="sliding window of 128"):
        backend._run_sdpa_forward_extend(q, out, *others, causal=True, sliding_window_size=128)
