"""Makes SGLang's host pools and slot bookkeeping work in a worker on a CPU host: copies,
allocation, no pinned memory.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from sgl_kvtier.runtime.cpu import attention, copies
from sgl_kvtier.runtime.cpu.platform import RESERVE_BYTES

logger = logging.getLogger(__name__)

_POOL_MODULES = ("mha", "mla", "mamba", "dsa", "unified")
_COPIES = (
    "transfer_kv_direct",
    "transfer_kv_per_layer_direct_pf_lf",
    "transfer_kv_all_layer_direct_lf_pf",
)
_POOLS = "sglang.srt.mem_cache.pool_host."
UNPINNED = (
    _POOLS + "base.HostKVCache.__init__",
    _POOLS + "dsa.DSAIndexerPoolHost.__init__",
    _POOLS + "mamba.MambaPoolHost.__init__",
)
"""Pools whose constructors are followed by `_forget_pinning`. The last two do not call the base
class's constructor.
"""
_installed = False


def install() -> None:
    """Installs everything once in this process, on its main thread before any pool is built."""
    global _installed
    if _installed:
        return
    _installed = True
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.pool_host import base, common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attention.register()
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    for name in _POOL_MODULES:
        module = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for function in _COPIES:
            if not hasattr(module, function):
                setattr(module, function, getattr(copies, function))
    # get_last_loc picks a Triton kernel unless the backend is literally called torch_native.
    HookRegistry.register(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        allocation.get_last_loc_torch,
        HookType.REPLACE,
    )
    for target in UNPINNED:
        HookRegistry.register(target, _forget_pinning, HookType.AFTER)
    HookRegistry.apply_hooks()


def _allocate(
    dims: tuple[int, ...],
    dtype: Any,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    """Plain, page-aligned host memory from the pool's allocator, not registered with a driver."""
    del pin_memory, registration_granularity_bytes
    return allocator.allocate(dims, dtype=dtype, device=device)


def _forget_pinning(result: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    """Turns pinning off. Otherwise pools would later allocate pinned staging pages, which fails
    without a driver inside an I/O thread.
    """
    del result, args, kwargs
    pool.pin_memory = False
