"""Access to SGLang's device slots: their allocation, and copies that SGLang itself makes into them.

A slot holds one token; whole pages are allocated. Scheduler's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_kvtier.runtime.sglang import windows
from sgl_kvtier.runtime.sglang.types import Tree

if TYPE_CHECKING:
    import torch


class DeviceSlots:
    """The allocator of one tree, and its queue of copies from host memory."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._allocator = tree.token_to_kv_pool_allocator
        # With windows in the model: window slots are allocated separately (`windows`).
        self._full: Any = getattr(self._allocator, "full_attn_allocator", None)

    @property
    def tokens(self) -> int:
        """Total number of slots."""
        return int((self._full or self._allocator).size)

    def available(self) -> int:
        """Number of empty slots."""
        return int((self._full or self._allocator).available_size())

    def claimable(self) -> int:
        """Empty slots, and slots of the tree that no request uses."""
        tree = self._tree
        unused = tree.evictable_size() if self._full is None else windows.unused(tree)
        return self.available() + int(unused)

    def claim(self, tokens: int) -> torch.Tensor | None:
        """Allocates whole pages, evicting unused ones; None when there is no room."""
        self.free_up(tokens)
        slots: torch.Tensor | None = (self._full or self._allocator).alloc(tokens)
        return slots

    def free_up(self, tokens: int) -> int:
        """Evicts unused pages until `tokens` slots are empty; returns how many are."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        short = tokens - self.available()
        if short > 0 and self._full is not None:
            windows.evict(self._tree, tokens=short)
        elif short > 0:
            evict_from_tree_cache(self._tree, tokens)
        return self.available()

    def free(self, slots: torch.Tensor) -> None:
        """Frees whole pages. Not inside result processing, where SGLang groups frees."""
        if self._full is not None:
            windows.free_without(self._allocator, slots)
        else:
            self._allocator.free_segment(slots, start_pos=0)

    # --- SGLang's own copies to the device --------------------------------------------------------

    @property
    def copies_are_begun(self) -> bool:
        """Whether SGLang is copying to the device already, so that no more copies can be queued."""
        tree = self._tree
        return bool(tree.cache_controller.ack_load_queue) or not tree.has_free_load_back_slot()

    def locked_by_copies(self, node: int) -> int:
        """Slots of the path to this node that can be evicted now, but not while its copies are in
        flight.
        """
        before = self.claimable()
        lock = self._tree.lock(node)
        try:
            return before - self.claimable()
        finally:
            self._tree.unlock(lock)

    def queue_copies(self, node: int) -> bool:
        """Allocates slots for the path to this node and queues its copies; whether it could."""
        return bool(self._tree.load_back(node))

    def end_copies(self) -> None:
        """Blocks until all copies that SGLang has begun are done, and unlocks their pages."""
        self._tree.loading_check(finish_count=len(self._tree.cache_controller.ack_load_queue))

    def begin_copies(self) -> tuple[int, Any] | None:
        """Starts the queued copies. Returns the number of their layer counter and SGLang's record
        of them; None if nothing was queued.
        """
        controller = self._tree.cache_controller
        counter = controller.start_loading()
        return (counter, controller.ack_load_queue[-1]) if counter >= 0 else None
