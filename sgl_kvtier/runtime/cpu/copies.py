"""HiCache's three `direct` page copies written with torch indexing, for tensors in host memory.

They replace the functions of the same names in sgl_kernel.kvcacheio (SGLang 0.5.23), which exist
only as CUDA code. Indices are int64 token slots; a page is `page_size` consecutive slots starting
at a multiple of it. Copies are done when the function returns. "lf" is [token, ...] per layer; "pf"
is [page, layer, token in page, ...] for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies token rows from one list of per-layer buffers to another, layer by layer."""
    del page_size
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst.index_copy_(0, dst_indices, src.index_select(0, src_indices))


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer of whole pages, from page-first host buffers to that layer's token rows."""
    src_pages = src_indices[::page_size] // page_size
    dst_pages = dst_indices[::page_size] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        rows = dst.view(dst.shape[0] // page_size, -1)
        rows.index_copy_(0, dst_pages, src[:, layer_id].index_select(0, src_pages).flatten(1))


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies whole pages of all layers, from per-layer token rows to page-first host buffers.

    `src_ptrs` holds the layers of the first destination (K), then those of the second (V) if there
    is one.
    """
    src_pages = src_indices[::page_size] // page_size
    dst_pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for which, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            src = src_ptrs[which * layers + layer]
            rows = src.view(src.shape[0] // page_size, -1).index_select(0, src_pages)
            dst[:, layer].index_copy_(0, dst_pages, rows.view(len(dst_pages), *dst.shape[2:]))
