"""On a card: what FlashInfer reads and writes of restored pages, against torch."""

from __future__ import annotations

import pytest
import torch

from sgl_kvtier.runtime.cuda.flashinfer_scatter import FlashInferScatter
from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.scatter import TritonScatter
from sgl_kvtier.runtime.cuda.staging import Room

pytestmark = pytest.mark.gpu
HEADS, DIM = 8, 128


def ints(*numbers: int) -> torch.Tensor:
    """A tensor of indices on the card."""
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def noise(*shape: int) -> torch.Tensor:
    """Random bfloat16 numbers on the card."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.slow  # nvcc compiles FlashInfer's module
@pytest.mark.parametrize("page", [1, 16, 64])
def test_flashinfer_appends_pages_of_a_page_first_buffer_where_an_index_copy_does(page):
    flashinfer = pytest.importorskip("flashinfer")
    layers, layer, total = 4, 1, 64 * page
    tokens = 4 * page + page // 2  # the last page is half full
    pages = -(-tokens // page)
    staged = noise(2, tokens, layers, HEADS, DIM)  # rows of one layer are strided
    k, v = (torch.zeros(total, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    chosen = torch.randperm(64, device="cuda")[:pages].to(torch.int32)
    paged = tuple(cache.view(-1, page, HEADS, DIM) for cache in (k, v))
    batch, positions = torch.zeros(tokens, dtype=torch.int32, device="cuda"), ints(*range(tokens))
    last = ints(tokens - (pages - 1) * page)
    flashinfer.append_paged_kv_cache(
        staged[0, :, layer], staged[1, :, layer], batch, positions, paged, chosen, ints(0, pages), last, "NHD"
    )  # fmt: skip
    slots = (chosen.long()[:, None] * page + torch.arange(page, device="cuda")).flatten()[:tokens]
    for cache, piece in ((k, staged[0]), (v, staged[1])):
        wanted = torch.zeros_like(cache).index_copy_(0, slots, piece[:, layer].contiguous())
        assert torch.equal(cache, wanted)


@pytest.mark.slow  # nvcc compiles FlashInfer's module
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("page", [16, 64])
def test_flashinfers_append_puts_staged_pages_where_our_kernel_does(page, dtype):
    """uint8: a pool of 8-bit floats as SGLang keeps it."""
    pytest.importorskip("flashinfer")
    shape, pages = PageShape(page, 3, HEADS * DIM * dtype.itemsize, layer_major=False), 6
    room = Room(
        torch.randint(0, 120, (2 * pages * shape.half_bytes,), dtype=torch.uint8, device="cuda"),
        pages,
        shape.half_bytes,
    )
    places = torch.randperm(20, device="cuda")[:5]
    slots = (places[:, None] * page + torch.arange(page, device="cuda")).flatten()
    pools = []
    for make in (TritonScatter, FlashInferScatter):
        pool = [torch.zeros(20 * page, HEADS, DIM, dtype=dtype, device="cuda") for _ in range(6)]
        scatter = make(shape, pages, pool)
        scatter.prepare()
        scatter.launch(room, slots)
        pools.append(torch.stack(pool).view(torch.uint8).cpu())
    assert pools[0].count_nonzero() and torch.equal(*pools)
