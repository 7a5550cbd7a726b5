"""HiCache controllers over several of SGLang's own pools, with its own descriptions of a load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from pools import PAGE, dsa_pool, latent_host_pool, latent_pool
from sglang.srt.mem_cache import memory_pool_host
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool_host import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    LogicalHostPool,
)
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sgl_kvtier.lab.gpu.pools import pools, random_bytes
from sgl_kvtier.runtime.cpu import copies, hicache


class Beside(NamedTuple):
    """A controller, its page in tokens, and by name of a half the device's buffers by layer."""

    controller: Any
    page: int
    buffers: dict[str, list[torch.Tensor]]
    anchor_page: int = 0
    """Slots of a window page or a state; 0: there are none."""

    def host(self, name: str) -> Any:
        """The host pool of this name."""
        return self.controller.mem_pool_host.entry_map[PoolName(name)].host_pool


def controller_of(*entries: PoolEntry, layers: int, device: str = "cpu", io: str = "direct") -> Any:
    """As much of SGLang's controller as loads ask for, with its own methods."""
    found = SimpleNamespace(
        device=device,
        io_backend=io,
        load_fence_stream=None,
        transfer_layer_id_max=layers,
        mem_pool_host=HostPoolGroup(list(entries)),
        mem_pool_device=entries[0].device_pool,
        storage_backend=None,
    )
    for name in ("move_indices", "_l2_transfers", "_l2_load_transfers"):
        setattr(found, name, getattr(HybridCacheController, name).__get__(found))
    return found


def entry(name: PoolName, host: Any, device: Any, layers: int, **more: Any) -> PoolEntry:
    """A pool whose layers go with the first ones of the model."""
    mapper = {layer: layer for layer in range(layers)}.get
    return PoolEntry(name, host, device, mapper, **more)


def with_draft(
    layout: str = "page_first_direct", device: str = "cpu", io: str = "direct"
) -> Beside:
    """Keys and values of 4 layers, and a draft of other heads and 4 layers in a pool of its own."""
    (kv, kv_host), (draft, draft_host) = (
        pools(device, layout, page=PAGE, heads=heads, dim=64) for heads in (2, 4)
    )
    found = controller_of(
        entry(PoolName.KV, kv_host, kv, kv.layer_num, is_primary_index_anchor=True),
        entry(PoolName.DRAFT, draft_host, draft, draft.layer_num),
        layers=kv.layer_num,
        device=device,
        io=io,
    )
    buffers = {"keys": kv.k_buffer, "values": kv.v_buffer}
    buffers |= {"draft keys": draft.k_buffer, "draft values": draft.v_buffer}
    return Beside(found, PAGE, buffers)


def with_index_keys(
    layout: str = "page_first_direct", device: str = "cpu", io: str = "direct"
) -> Beside:
    """Latents and index keys of 2 layers (DSA), in pages of 64 tokens."""
    on_device = dsa_pool(tokens=1024, rope=32, device=device)
    latents = latent_host_pool(on_device, layout=layout, tokens=2048)
    keys = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(on_device), latents)
    random_bytes(latents.kv_buffer)
    random_bytes(keys.index_k_with_scale_buffer)
    found = controller_of(
        entry(PoolName.KV, latents, on_device, 2, is_primary_index_anchor=True),
        entry(PoolName.INDEXER, keys, on_device, 2),
        layers=2,
        device=device,
        io=io,
    )
    buffers = {"latents": on_device.kv_buffer, "index keys": on_device.index_k_with_scale_buffer}
    return Beside(found, 64, buffers)


def with_windows(
    layout: str = "page_first_direct", device: str = "cpu", io: str = "direct"
) -> Beside:
    """Keys and values of 4 layers, and windows of 4 others, of other heads, in fewer slots."""
    kv, kv_host = pools(device, layout, page=PAGE, heads=2, dim=64)
    window, window_host = pools(device, layout, page=PAGE, tokens=512, heads=4, dim=64)
    full, sliding = ({2 * layer + odd: layer for layer in range(4)}.get for odd in (1, 0))
    found = controller_of(
        PoolEntry(PoolName.KV, kv_host, kv, full, is_primary_index_anchor=True),
        PoolEntry(PoolName.SWA, window_host, window, sliding),
        layers=8,
        device=device,
        io=io,
    )
    buffers = {"keys": kv.k_buffer, "values": kv.v_buffer}
    buffers |= {"window keys": window.k_buffer, "window values": window.v_buffer}
    return Beside(found, PAGE, buffers, PAGE)


def with_states(
    layout: str = "page_first_direct", device: str = "cpu", io: str = "direct"
) -> Beside:
    """Keys and values of 4 layers, and states (recurrence, convolution) of 3 between them."""
    if device == "cpu":
        hicache.install()
    kv, kv_host = pools(device, layout, page=PAGE, heads=2, dim=64)
    states = MambaStateBufferInfo(
        temporal=torch.zeros(3, 16, 2, 8, 16, device=device),
        conv=(torch.zeros(3, 16, 24, 4, dtype=torch.bfloat16, device=device),),
    )
    host = MambaPoolHost(states, 2.0, 0, device_capacity=16, layout=layout)
    for buffer in host.kv_buffer:
        random_bytes(buffer)
    full, linear = ({2 * layer + odd: layer for layer in range(4)}.get for odd in (0, 1))
    found = controller_of(
        PoolEntry(PoolName.KV, kv_host, kv, full, is_primary_index_anchor=True),
        PoolEntry(PoolName.MAMBA, host, None, linear),
        layers=7,
        device=device,
        io=io,
    )
    buffers = {"keys": kv.k_buffer, "values": kv.v_buffer}
    buffers |= {"recurrent states": [*states.temporal], "convolution states": [*states.conv[0]]}
    return Beside(found, PAGE, buffers, 1)


_ROWS = 64
"""Tokens of a page below, whose rows are whole pages."""


def with_compressed(
    layout: str = "page_first_direct", device: str = "cpu", io: str = "direct"
) -> Beside:
    """DeepSeek V4's pools, small: KV pages without bytes, compressed latents of layers 1 and 3 at
    their numbers; windows of 4 layers and a draft's, and states of the compressors at the numbers
    of the windows' pages.
    """
    if device == "cpu":
        hicache.install()
        for name in ("transfer_kv_per_layer_direct_pf_lf", "transfer_kv_all_layer_direct_lf_pf"):
            if not hasattr(memory_pool_host, name):  # SGLang imports it beside CUDA alone
                setattr(memory_pool_host, name, getattr(copies, name))

    def rows(layers: int, pages: int, nbytes: int) -> list[torch.Tensor]:
        return [torch.zeros(pages, nbytes, dtype=torch.uint8, device=device) for _ in range(layers)]

    def paged(name: PoolName, on_device: list[torch.Tensor], pages: int) -> Any:
        return DeepSeekV4PagedHostPool(
            str(name),
            on_device,
            on_device[0].shape[1],
            pages,
            _ROWS,
            layout,
            pin_memory=device != "cpu",
        )

    def own(name: PoolName, host: Any, layers: dict[int, int], **more: Any) -> PoolEntry:
        random_bytes(host.kv_buffer)
        return PoolEntry(name, host, SimpleNamespace(), layers.get, **more)

    c4, c128, window = rows(2, 16, 640), rows(1, 16, 96), rows(5, 12, 1200)
    states = [
        SimpleNamespace(
            ring_size=8,
            kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(12 * 8 + 3, 6, device=device)),
        )
        for _ in range(2)
    ]
    c4_state = DeepSeekV4StateHostPool(
        "c4_state", states, 20, _ROWS, layout, pin_memory=device != "cpu"
    )
    every, compressed = {n: n for n in range(4)}, {1: 0, 3: 1}
    found = controller_of(
        PoolEntry(
            PoolName.KV, LogicalHostPool(24 * _ROWS, _ROWS, layout), None, every.get,
            is_primary_index_anchor=True,
        ),
        own(
            PoolName.SWA, paged(PoolName.SWA, window, 20), {**every, 4: 4},
            packed_draft_device_pools=(window[4],),
        ),
        own(PoolName.DEEPSEEK_V4_C4, paged(PoolName.DEEPSEEK_V4_C4, c4, 24), compressed),
        own(PoolName.DEEPSEEK_V4_C4_STATE, c4_state, compressed),
        own(PoolName.DEEPSEEK_V4_C128, paged(PoolName.DEEPSEEK_V4_C128, c128, 24), {2: 0}),
        layers=4,
        device=device,
        io=io,
    )  # fmt: skip
    buffers = {"c4 pages": c4, "c128 pages": c128}
    buffers |= {"window pages": window, "c4 state pages": c4_state.device_page_views}
    return Beside(found, _ROWS, buffers, _ROWS)


def with_packed_draft() -> Beside:
    """Latents of 2 layers, and a draft's layer in the same host pages (MTP)."""
    target, draft = latent_pool(2), latent_pool(1)
    host = latent_host_pool(target, drafts=(draft,))
    random_bytes(host.kv_buffer)
    mapper = {layer: layer for layer in range(3)}.get
    found = controller_of(
        PoolEntry(
            PoolName.KV, host, target, mapper, is_primary_index_anchor=True, packed_draft_device_pools=(draft,)
        ),
        layers=2,
    )  # fmt: skip
    return Beside(found, PAGE, {"latents": [*target.kv_buffer, *draft.kv_buffer]})


def with_packed_keys(
    layout: str = "page_first_direct", device: str = "cpu", io: str = "direct"
) -> Beside:
    """Keys and values of 4 layers, and a draft's layer of the same heads in the same host pages."""
    (target, _), (draft, _) = (
        pools(device, layout, page=PAGE, heads=2, dim=64, layers=layers) for layers in (4, 1)
    )
    infos = [pool.get_device_pool_infos()[0].buffer_info for pool in (target, draft)]
    host = MHATokenToKVPoolHost(
        infos[0], 2.0, 0, PAGE, layout, draft_buffer_infos=(infos[1],), device_capacity_tokens=1024,
        start_layer=0, end_layer=4, host_token_capacity=2048,
    )  # fmt: skip
    random_bytes(host.kv_buffer)
    mapper = {layer: layer for layer in range(5)}.get
    found = controller_of(
        PoolEntry(
            PoolName.KV, host, target, mapper, is_primary_index_anchor=True, packed_draft_device_pools=(draft,)
        ),
        layers=4,
        device=device,
        io=io,
    )  # fmt: skip
    keys = [*target.k_buffer, *draft.k_buffer]
    return Beside(found, PAGE, {"keys": keys, "values": [*target.v_buffer, *draft.v_buffer]})


def slots_of(pages: list[int], page: int) -> torch.Tensor:
    """The token slots of these pages."""
    return (torch.tensor(pages)[:, None] * page + torch.arange(page)).flatten()
