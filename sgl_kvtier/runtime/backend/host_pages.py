"""Pages of HiCache's host pools as the store sees them: their shape, and views of the pool's
memory, which is read and written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import cycle
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from sgl_kvtier.runtime.backend.page_shape import PageShape, RankShare

PAGE_AXES = {
    "page_first": ("token", "layer", "head"),
    "page_first_direct": ("layer", "token", "head"),
    "page_head": ("head", "token", "layer"),
}
"""The axes of a page's K or V in host memory, from the outermost to the innermost; after them come
the numbers of one head. Source: `init_kv_buffer` in sglang/srt/mem_cache/pool_host.
"""
CONTIGUOUS = tuple(PAGE_AXES)
"""Host layouts in which a page can be read in place, because the store has the same."""
_USUAL = "nhd"
"""SGLang's usual order of a page on the device (KVBufferLayout, from 0.5.23 on)."""
_NEWER = frozenset({"dcp_size", "dp_rank"})
"""Fields of SGLang's storage configuration that releases before 0.5.23 or 0.5.21 lack, where
RankShare's default holds. These releases refuse storage with parallel decode contexts, and no
folder is named by a data-parallel rank.
"""


def is_page_contiguous(pool: Any) -> bool:
    """Whether a page of this host pool lies in few pieces (K and V, or the tensors of a state) that
    can be read in place.
    """
    return pool.layout in CONTIGUOUS and (has_states(pool) or bool(buffers_of(pool)))


def has_states(pool: Any) -> bool:
    """Whether this host pool's pages are states, each of several separate tensors."""
    return isinstance(pool, MambaPoolHost)


def buffer_of(pool: Any) -> torch.Tensor | None:
    """The tensor that holds all of a host pool's pages; None if there is none, or more than one."""
    buffers = buffers_of(pool)
    return buffers[0] if len(buffers) == 1 else None


def buffers_of(pool: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that hold all of a host pool's pages, if any. Usually one, which index keys have
    under another name. Where heads of K and V have different widths (MiMo V2), one for K and one
    for V, in which the pieces of a page alternate.
    """
    if isinstance(pool, AsymmetricMHATokenToKVPoolHost):
        return tuple(pool.kv_buffer or ())
    names = ("kv_buffer", "index_k_with_scale_buffer")
    found = [getattr(pool, name, None) for name in names]
    return tuple(buffer for buffer in found if isinstance(buffer, torch.Tensor))[:1]


def is_replicated(pool: Any) -> bool:
    """Whether every TP rank of a model with latents (MLA) has the same pages of this host pool.

    That holds for latents, for their index keys, and for the compressed latents, index keys and
    compressor states of DeepSeek V4, which SGLang computes in full on every rank (with
    ReplicatedLinear layers). States of linear layers, and keys and values of heads, are a rank's
    share, even in models with latents: the states of Kimi-Linear, an EAGLE3 draft of DeepSeek. An
    unknown kind of host pool counts as a share, which costs space but never a wrong answer.
    """
    return isinstance(pool, (MLATokenToKVPoolHost, DSAIndexerPoolHost)) or type(pool) in (
        LogicalHostPool,
        DeepSeekV4PagedHostPool,
        DeepSeekV4StateHostPool,
    )


def has_bytes(pool: Any) -> bool:
    """Whether pages of this host pool have bytes. Those of DeepSeek V4's KV pool have none: its
    slots only number the pages of its side pools.
    """
    return not isinstance(pool, LogicalHostPool)


def shape_of(pool: Any) -> PageShape:
    """The shape of a host pool's pages. Sizes that a pool lacks are None: states have no heads."""
    return PageShape(
        layout=_plain(pool, "layout"),
        page_size=_plain(pool, "page_size"),
        dtype=str(getattr(pool, "dtype", None)),
        head_num=_plain(pool, "head_num"),
        head_dim=_plain(pool, "head_dim"),
        v_head_dim=_plain(pool, "v_head_dim"),
        kv_cache_dim=_plain(pool, "kv_cache_dim"),
        format=str(getattr(pool, "storage_format_tag", None)),
        state_dtype=_text(getattr(pool, "temporal_dtype", None)),
        device_layout=_device_layout(pool),
    )


def _device_layout(pool: Any) -> str | None:
    """How the device pools of a host pool lay out a page, unless it is token by token."""
    found = [getattr(info, "buffers", None) for info in getattr(pool, "_buffer_infos", ())]
    layouts = {
        str(buffers.layout.value) if hasattr(buffers, "layout") else _USUAL
        for buffers in found
        if buffers is not None
    }
    return "+".join(sorted(layouts - {_USUAL})) or None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def share_of(storage_config: Any) -> RankShare:
    """This rank's share, from the configuration that HiCache passes to its storage backends."""
    return RankShare(
        **{
            f.name: getattr(storage_config, f.name)
            for f in fields(RankShare)
            if f.name not in _NEWER or hasattr(storage_config, f.name)
        }
    )


def _plain(pool: Any, name: str) -> Any:
    value = getattr(pool, name, None)
    return value if isinstance(value, (int, str)) else None


def says_where_pages_lie(pool: Any) -> bool:
    """Whether this host pool gives the addresses of all bytes of a page, including scales."""
    if not hasattr(pool, "get_page_buffer_meta"):
        return True
    try:
        pool.get_page_buffer_meta(torch.arange(pool.page_size))
    except NotImplementedError:
        return False
    except ValueError:  # a layout whose pages are copied one by one
        return True
    return True


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor; the view keeps the tensor alive. For a page without
    bytes, one byte of its own as a marker, by which the store knows that the page is there.
    """
    if not tensor.numel():
        return memoryview(bytearray(1))
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


def parts_of(pool: Any, pages: int, host_indices: torch.Tensor) -> list[list[memoryview]]:
    """Each page's pieces in a page-contiguous host pool, as views of the pool's memory.
    `host_indices` has a slot for each token or state.
    """
    if has_states(pool):
        states = [pool._iter_page_tensors(slot) for slot in host_indices.tolist()]
        return [[bytes_of(part) for part in state if part.numel()] for state in states]
    addresses, sizes = pool.get_page_buffer_meta(host_indices)
    buffers = [(bytes_of(buffer.view(-1)), buffer.data_ptr()) for buffer in buffers_of(pool)]
    assert buffers, "a page-contiguous pool has some"
    pieces = [
        whole[a - base : a - base + n]
        for (whole, base), a, n in zip(cycle(buffers), addresses, sizes, strict=False)
    ]
    per_page = len(pieces) // pages if pages else 0
    return [pieces[i * per_page : (i + 1) * per_page] for i in range(pages)]


def page_bytes(pool: Any) -> int:
    """Bytes of a page of this host pool; 0 if it has none, or none that can be stored."""
    if not has_bytes(pool):
        return 0
    if is_page_contiguous(pool):
        (page,) = parts_of(pool, 1, torch.arange(1 if has_states(pool) else pool.page_size))
        return sum(part.nbytes for part in page)
    try:
        return int(pool.get_dummy_flat_data_page().nbytes)
    except NotImplementedError:  # some of SGLang's pools have no page to copy into
        return 0


def device_buffers(device: Any) -> list[Any]:
    """A device pool's tensors [slot, head, number], lists by layer: K and V, or latents."""
    if getattr(device, "k_buffer", None) is not None:
        return [device.k_buffer, device.v_buffer]
    return [device.kv_buffer]


def nbytes_of(parts: Sequence[Sequence[memoryview]], moved: Sequence[bool]) -> int:
    """Total bytes of the pages whose entry in `moved` is True."""
    return sum(sum(p.nbytes for p in page) for page, ok in zip(parts, moved, strict=True) if ok)
