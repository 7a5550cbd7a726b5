"""Evicts from the device in the order of the planner's map.

SGLang's tree offers leaves for eviction in its own order and evicts the one that its caller names.
So the offers are collected first, without evicting, and then the leaf that comes first in the map's
order is evicted. Only leaves that the tree offered at that moment are evicted: never a locked node,
never one with a child on the device. If the map's order does not yield enough, SGLang's own
eviction runs afterwards as usual.
"""

from __future__ import annotations

from typing import Any

from sgl_kvtier.policy.pages.page_state import PageView
from sgl_kvtier.runtime.ahead.counters import LookaheadCounters
from sgl_kvtier.runtime.ahead.tier_facts import TierFacts
from sgl_kvtier.runtime.sglang.host_tier import HostTier
from sgl_kvtier.runtime.sglang.tree_nodes import TreeNodes
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.page_names import from_hex
from sgl_kvtier.types import PageKey, Tier

_SLACK_PAGES = 512
"""Pages requested from the map in addition to those needed, since some are of nodes in use."""


class Victims:
    """Evicts by the map's order. Scheduler's thread."""

    def __init__(
        self, tree: Tree, pages: PageView, facts: TierFacts, counters: LookaheadCounters
    ) -> None:
        self._pages = pages
        self._facts = facts
        self._counters = counters
        self._page = int(tree.page_size)
        self._host = HostTier(tree)
        self._nodes = TreeNodes(tree)

    def evict(self, tokens: int, tracker: dict[Any, int]) -> None:
        """Frees about `tokens` of the device; `tracker` is SGLang's count of freed tokens."""
        from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE as FULL

        if self._host.write_back:
            return  # pages are copied before they leave the device, and SGLang does that
        while tracker[FULL] < tokens:
            leaves = self._leaves()
            if not self._evict_some(leaves, tokens, tracker, FULL):
                return

    def _leaves(self) -> dict[PageKey, int]:
        """Nodes that can be evicted now, by the name of their last page."""
        nodes = self._nodes
        named = ((nodes.last_name(node), node) for node in nodes.leaves())
        return {from_hex((text,))[0]: node for text, node in named if text is not None}

    def _evict_some(
        self, leaves: dict[PageKey, int], tokens: int, tracker: dict[Any, int], full: Any
    ) -> bool:
        """Evicts in the map's order until enough is freed, or until the next node may just have
        become a leaf and so was not offered yet. Returns whether any was evicted.
        """
        missing = -(-(tokens - tracker[full]) // self._page)
        evicted = False
        bared: dict[PageKey, None] = {}
        left = self._facts.left
        for key in self._pages.victims_aside(Tier.DEVICE, missing + len(left) + _SLACK_PAGES):
            if key in left:
                continue
            node = leaves.pop(key, None)
            if node is None:
                if key in bared:
                    return True
                continue
            bared.update(self._parent_end(node))
            before = tracker[full]
            self._nodes.evict(node, tracker)
            self._counters.victims += (tracker[full] - before) // self._page
            evicted = True
            if tracker[full] >= tokens:
                return True
        return evicted

    def _parent_end(self, node: int) -> dict[PageKey, None]:
        """The name of the last page of a node's parent, if it has one with pages."""
        path = self._nodes.path(node)
        text = self._nodes.last_name(path[-2].node_id) if len(path) > 1 else None
        return {} if text is None else {from_hex((text,))[0]: None}
