"""Copies all layers of a load in one launch of SGLang's kernel, for pages that cannot be staged.

SGLang launches this kernel from the device to a host pool of layout layer_first. It reads the
addresses of the layers' buffers from tables and has one row stride on either side
(kvcacheio/hicache.cuh and hicache_tma.cuh, run_all). So it also works in the other direction, and
for layout page_first. Layouts with unequal strides (page_first_direct, page_head) only have copies
of one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sgl_kvtier.runtime.cuda.page_shape import host_pool_of

LAYOUTS = ("page_first", "layer_first")
"""Host layouts in which the rows of a layer have one stride."""


class AllLayers:
    """Replaces its host pool in a transfer of one layer, and copies all layers instead."""

    def __init__(self, pool: Any, launch: Callable[..., None]) -> None:
        """`launch` takes `indices_src` (host rows) and `indices_dst` (device rows), on the GPU."""
        self._pool, self._launch = pool, launch
        self._in_order: Any = None

    def of(self, transfers: list[Any]) -> list[Any] | None:
        """These transfers as one transfer of one layer; None unless they are of its pool alone."""
        if len(transfers) != 1:
            return None
        pool, *_, mapper, is_draft = transfers[0]
        if pool is not self._pool or is_draft or not self._maps_in_order(mapper):
            return None
        return [transfers[0]._replace(host_pool=self, layer_mapper=None)]

    def _maps_in_order(self, mapper: Callable[[int], int | None] | None) -> bool:
        if mapper is None or mapper is self._in_order:
            return True
        if any(mapper(layer) != layer for layer in range(self._pool.layer_num)):
            return False
        self._in_order = mapper  # SGLang constructs it once
        return True

    def prepare_transfer_indices(
        self, host: torch.Tensor, device: torch.Tensor, io_backend: str
    ) -> Any:
        """See the pool's method."""
        return self._pool.prepare_transfer_indices(host, device, io_backend)

    def load_to_device_per_layer_physical(
        self, _device_pool: Any, host: torch.Tensor, device: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        """Copies every layer of these rows, on the current stream."""
        self._launch(indices_src=host, indices_dst=device)


def all_layers_of(controller: Any) -> AllLayers | None:
    """One launch for the loads of this HiCache controller, or None if SGLang has none."""
    pool = host_pool_of(controller)
    if controller.io_backend != "kernel" or pool.layout not in LAYOUTS:
        return None
    launch = _launch_of(pool)
    # A pool may also hold a draft's layers, another rank's rows, or pages that move.
    alone = (
        pool.layer_num == pool.target_layer_num == controller.transfer_layer_id_max
        and pool.shared_allocation_domain is None
        and pool.dcp_size == 1
    )
    return AllLayers(pool, launch) if launch is not None and alone else None


def _launch_of(pool: Any) -> Callable[..., None] | None:
    from sglang.kernels.ops.kvcache import hicache
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    # Pools derived from these have more than rows, such as scales.
    if not getattr(pool, "can_use_jit", False):
        return None
    if type(pool) is MHATokenToKVPoolHost and pool.head_dim == pool.v_head_dim:
        return partial(
            hicache.transfer_hicache_all_layer,
            k_ptr_src=pool.k_data_ptrs,
            v_ptr_src=pool.v_data_ptrs,
            k_ptr_dst=pool.device_k_data_ptrs,
            v_ptr_dst=pool.device_v_data_ptrs,
            kv_cache_src_stride_bytes=_step(pool.k_data_refs[0]),
            kv_cache_dst_stride_bytes=pool.device_row_stride_bytes,
            element_size=pool.token_stride_size,
            page_size=pool.page_size,
        )
    if type(pool) is MLATokenToKVPoolHost and pool.device_data_ptrs is not None:
        return partial(
            hicache.transfer_hicache_all_layer_mla,
            ptr_src=pool.data_ptrs,
            ptr_dst=pool.device_data_ptrs,
            cache_src_stride_bytes=_step(pool.data_refs[0]),
            cache_dst_stride_bytes=pool.device_row_stride_bytes,
            element_size=pool.token_stride_size,
            page_size=pool.page_size,
        )
    return None


def _step(layer: torch.Tensor) -> int:
    """Bytes from a row of a layer to the next row."""
    return layer.stride(0) * layer.element_size()
