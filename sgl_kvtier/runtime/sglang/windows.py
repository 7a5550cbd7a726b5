"""Access to SGLang's pool of sliding windows: layers with a window keep rows of the last tokens
only, in slots of their own.

To continue after a prefix, a forward needs the window rows at its end. They are the anchor of a
restoration: they come with its last `pages` pages and are attached with them, as with pages that
SGLang's external linker has loaded. Scheduler's thread; what a copy needs is for any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_kvtier.runtime.sglang import compressed_pools

if TYPE_CHECKING:
    import torch

POOL = "swa"
"""SGLang's name for these pools, in host memory and in storage."""


class Windows:
    """The window slots of one tree, on the device and in host memory; whole pages."""

    name, what, one = POOL, "windows", "window"

    def __init__(self, tree: Any) -> None:
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        self._tree = tree
        self._kind = ComponentType.SWA
        self._component = tree.components[self._kind]
        self._slots = tree.token_to_kv_pool_allocator.swa_attn_allocator
        entries = tree.cache_controller.mem_pool_host.entry_map
        self._host = entries[POOL].host_pool
        self.pages = int(self._component.full_window_pages)
        """Pages of one window, rounded up."""
        self.page_slots = int(tree.page_size)
        hosts = [entries[n].host_pool for n in (POOL, *compressed_pools.AT_WINDOWS) if n in entries]
        self.page_bytes = sum(compressed_pools.page_bytes(h, self.page_slots) for h in hosts)

    def available(self) -> int:
        """Number of empty device slots."""
        return int(self._slots.available_size())

    def claim(self, slots: int) -> torch.Tensor | None:
        """Allocates device slots, evicting unused ones; None when there is no room."""
        if (short := slots - self.available()) > 0:
            evict(self._tree, window_tokens=short)
        claimed: torch.Tensor | None = self._slots.alloc(slots)
        return claimed

    def is_short(self) -> bool:
        """Never: SGLang counts these slots before it admits a request."""
        return False

    def spares(self, slots: int) -> bool:
        """Always: SGLang copies nothing that there is no room for."""
        del slots
        return True

    def free(self, slots: torch.Tensor) -> None:
        """Frees device slots."""
        self._slots.free(slots)

    def claim_host(self, slots: int) -> torch.Tensor | None:
        """Allocates host slots, evicting the least recently used; None when there is no room."""
        claimed: torch.Tensor | None = self._component.alloc_prefetch_staging(slots)
        return claimed

    def free_host(self, slots: torch.Tensor) -> None:
        """Frees host slots that no I/O touches."""
        self._host.free(slots)

    def take_over(
        self, req: Any, slots: torch.Tensor, windows: torch.Tensor, front: int, stop: int
    ) -> None:
        """A request's row continues after token `front` with these KV slots, up to token `stop`;
        `windows` are the window slots of its last tokens. Its own window rows before the window at
        `stop` are freed.
        """
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
        from sglang.srt.mem_cache.unified_cache.components.base import ExternalLinkerLoadPhase

        page, kv = self._tree.page_size, req.kv
        gone = max(kv.get_evicted_seqlen(self._kind), kv.swa_dead_lo(page))
        end = min(front, max(0, stop - self.pages * page))
        if gone < end:
            row = self._tree.req_to_token_pool.req_to_token[kv.req_pool_idx]
            allocator = self._tree.token_to_kv_pool_allocator
            allocator.free_swa_segment(row[gone:end], start_pos=gone)
        self._component.update_external_linker_load(
            ExternalLinkerLoadPhase.PREPARE,
            req,
            PoolTransfer(name=PoolName.KV, device_indices=slots),
            PoolTransfer(name=PoolName.SWA, device_indices=windows),
            stop,
        )
        # A branch that the loaded part covers is not needed: the request inserts all of it.
        if req.swa_branching_seqlen is not None and req.swa_branching_seqlen <= stop:
            req.swa_branching_seqlen = None

    def drop_old_copy(self, req: Any) -> None:
        """Nothing to do: windows are not copied for a request."""

    def not_admitted(self, req: Any) -> None:
        """Nothing to do: nothing is allocated for a request at its match."""

    @staticmethod
    def evicted_with(params: Any) -> int:
        """How many of these device slots an eviction is to free."""
        return int(params.swa_num_tokens)


def unknown(tree: Any) -> str | None:
    """Why the windows of this tree are not restored, or None."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    allocator = tree.token_to_kv_pool_allocator
    # Other allocators keep windows in the KV pages' memory, or in a ring per request.
    if type(allocator) is not SWATokenToKVPoolAllocator or allocator.swa_req_ring:
        return f"windows in a {type(allocator).__name__}"
    if POOL not in tree.cache_controller.mem_pool_host.entry_map:
        return "windows without host memory"
    return None


def unused(tree: Any) -> int:
    """KV slots of a tree with windows that no request uses."""
    return int(tree.full_evictable_size())


def evict(tree: Any, *, tokens: int = 0, window_tokens: int = 0) -> None:
    """Evicts so many KV slots and window slots from the device, as far as no request uses them."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree.evict_for_alloc(EvictParams(num_tokens=tokens, swa_num_tokens=window_tokens))


def free_without(allocator: Any, slots: torch.Tensor) -> None:
    """Frees whole pages of KV slots that have no window slots."""
    allocator.free_full_segment(slots, start_pos=0)
