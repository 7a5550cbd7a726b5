"""Access to the nodes of SGLang's radix tree: finding by tokens, names, walks, eviction.

Nodes are numbers. SGLang writes names of pages as hexadecimal text. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sgl_kvtier.runtime.sglang.types import Tree

_ALL_TOKENS = 1 << 40


class Found(NamedTuple):
    """How many of a key's tokens the tree has. `node` is the last node of the path, `host_node` the
    last one after which host pages may follow.
    """

    tokens: int
    node: int
    host_node: int


class Whose(NamedTuple):
    """The tenant of a node's pages. `salt` is the `cache_salt` of the requests that have them, else
    their `extra_key`, else None.
    """

    first: str
    """The name of its first page."""
    salt: str | None


def whose(core: Any, node: int) -> Whose | None:
    """The tenant of a node of a tree core; None if it has no named page. Scheduler's thread."""
    found = core.snapshot_buffer_backup(node, False)
    if found is None or not found.hash_values:
        return None
    key = found.key
    salt = key.cache_salt if key.cache_salt is not None else key.extra_key
    return Whose(found.hash_values[0], salt)


class TreeNodes:
    """The nodes of one tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._core = tree.tree_core

    @property
    def named_by_pairs(self) -> bool:
        """Whether pages are named by pairs of neighbouring tokens instead of tokens."""
        return bool(self._core.is_eagle)

    def names(self, node: int) -> Sequence[str]:
        """Names of a node's pages, without its ancestors'. KeyError when there is no such node."""
        return self._core.get_hash_values(node)

    def last_name(self, node: int) -> str | None:
        """The name of a node's last page; None where it has none."""
        return self._core.get_last_hash_value(node)

    def path(self, node: int) -> list[Any]:
        """SGLang's description of each node from the root on. KeyError without such a node."""
        return self._core.collect_path_info([node])[0]

    def paths(self, nodes: list[int]) -> list[list[Any]]:
        """The same of several nodes."""
        return self._core.collect_path_info(nodes)

    def find(self, key: Any) -> Found:
        """The path of a key (SGLang's RadixKey), as far as the tree has it."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self._tree.match_prefix(MatchPrefixParams(key=key))
        tokens = found.device_prefix_len + found.host_hit_length
        return Found(tokens, found.best_match_node, found.last_host_node)

    def leaves(self) -> list[int]:
        """Nodes that SGLang would evict from the device now, in its order, without evicting any.
        About 6 microseconds each.
        """
        from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE as FULL

        core, found = self._core, []
        core.evict_device_start(FULL, _ALL_TOKENS)
        try:
            while (node := core.evict_device_next_node(FULL, {FULL: 0}).node_id) is not None:
                found.append(node)
        finally:
            core.evict_device_end(FULL)
        return found

    def evict(self, leaf: int, tracker: dict[Any, int]) -> None:
        """Evicts a leaf that was just offered. `tracker` is SGLang's count of freed tokens."""
        self._tree._evict_device_leaf(leaf, tracker)

    def device_tokens(self) -> int:
        """Number of device slots of the whole tree. O(nodes)."""
        return int(self._core.all_values_flatten().numel())

    def watch(self, loaded: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        """Calls `loaded` with nodes whose pages are loaded back to the device; returns a function
        that ends this. The tree core has no callbacks, so one of its methods is replaced.
        """
        core = self._core
        commit = core.commit_load_back

        def on_load_back(node_id: int, device_indices: Any, kv_xfer: Any, comp_xfers: Any) -> Any:
            actions = commit(node_id, device_indices, kv_xfer, comp_xfers)
            loaded(kv_xfer.nodes_to_load or ())
            return actions

        def end() -> None:
            core.commit_load_back = commit

        core.commit_load_back = on_load_back
        return end
