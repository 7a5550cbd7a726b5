"""Access to SGLang's host tier: its pool, and the copies that its tree keeps there.

A slot holds one token; whole pages are allocated. Everything here may differ in another SGLang
release: no other module of the runtime touches it. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_kvtier.runtime.sglang import slot_pools
from sgl_kvtier.runtime.sglang.types import HostPool, Tree

if TYPE_CHECKING:
    import torch


class Pin(NamedTuple):
    """Keeps the host pages of the path to a node until it is released."""

    node: int
    params: Any


class Grafted(NamedTuple):
    """Pages that the tree took: those after the first `known_tokens`, which it had already. `node`
    is the last node, or None if SGLang names none.
    """

    known_tokens: int
    node: int | None


class HostTier:
    """Host memory of one tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @property
    def _pool(self) -> HostPool:
        return self._tree.cache_controller.mem_pool_host

    @property
    def tokens(self) -> int:
        """Total number of slots."""
        return int(self._pool.size)

    @property
    def kv_tokens(self) -> int:
        """Slots of the pool of ordinary KV pages."""
        return int(self._pool.anchor_entry.host_pool.size)

    @property
    def slot_numbers(self) -> int:
        """One more than the highest slot number."""
        return int(self._pool.anchor_entry.host_pool.logical_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers of this process, in all pools that share these slots."""
        return slot_pools.page_bytes(self._pool, self._tree.page_size)

    @property
    def write_back(self) -> bool:
        """Whether pages are copied here only when they leave the device. Otherwise they are copied
        as soon as they are computed, and host copies of pages on the device cannot be evicted.
        """
        return self._tree.cache_controller.write_policy == "write_back"

    @property
    def write_through(self) -> bool:
        """Whether every page is copied here as soon as it is in the tree."""
        return self._tree.cache_controller.write_policy == "write_through"

    def available(self) -> int:
        """Number of empty slots."""
        return int(self._pool.available_size())

    def claim(self, tokens: int) -> torch.Tensor | None:
        """Allocates whole pages, evicting the least recently used; None when there is no room."""
        return self._pool.alloc(tokens, reclaim=self._tree.evict_host)

    def free(self, slots: torch.Tensor) -> None:
        """Frees pages that no I/O touches."""
        self._pool.free(slots)

    # --- the tree's host copies -------------------------------------------------------------------

    def pin(self, node: int) -> Pin:
        """Pins the host copies of a path. KeyError if there is no such node."""
        return Pin(node, self._tree.inc_host_lock_ref(node).to_dec_params())

    def unpin(self, pin: Pin) -> None:
        """Releases them."""
        self._tree.dec_host_lock_ref(pin.node, pin.params)

    def has_copy(self, node: int) -> bool:
        """Whether this node has a host copy. KeyError if there is no such node."""
        return bool(self._tree.tree_core.is_backuped(node))

    def takes_behind(self, node: int) -> bool:
        """Whether pages can be grafted after this node: it is a root, or has a host copy."""
        core = self._tree.tree_core
        return bool(core.is_backuped(node) or core.is_root(node))

    def slots_below(self, node: int) -> torch.Tensor:
        """Slots of the path's pages that are in host memory and not on the device."""
        slots: torch.Tensor = self._tree.tree_core.build_load_back_spec(node, req=None)[
            0
        ].host_indices
        return slots

    def graft(
        self,
        anchor: int,
        key: Any,
        slots: torch.Tensor,
        names: list[str],
        beside: Callable[[Any], None] | None = None,
    ) -> Grafted | None:
        """Gives filled pages to the tree, after the node `anchor`; None if it takes none. `beside`
        is called with SGLang's result, to insert an anchor at the end of the pages.
        """
        try:
            result = self._tree.tree_core.insert_host(anchor, key, slots, names)
        except KeyError:
            return None  # the node was evicted with its path
        self._tree._apply_cache_actions(result.cache_actions)
        if result.host_insert_dropped:
            return None
        if beside is not None:
            beside(result)
        return Grafted(result.prefix_len, result.inserted_host_node or None)

    def watch(self, came: Callable[[Sequence[str], torch.Tensor], None]) -> Callable[[], None]:
        """Calls `came` with names and slots of pages that the tree puts into host memory; returns a
        function that ends this. The tree core has no callbacks, so two of its methods are replaced.
        """
        core, page = self._tree.tree_core, self._tree.page_size
        backup, insert = core.commit_backup, core.insert_host

        def on_backup(node_id: int, host_indices: Any, comp_xfers: Any) -> None:
            backup(node_id, host_indices, comp_xfers)
            came(core.get_hash_values(node_id), host_indices)

        def on_insert(node_id: int, key: Any, host_value: Any, hash_value: Any) -> Any:
            result = insert(node_id, key, host_value, hash_value)
            if not result.host_insert_dropped:  # the tree may have had the first ones already
                start = result.prefix_len
                came(hash_value[start // page :], host_value[start:])
            return result

        def end() -> None:
            core.commit_backup, core.insert_host = backup, insert

        core.commit_backup, core.insert_host = on_backup, on_insert
        return end
