"""Compares the planner's map with the real state: the tree, the host pool and the store.

Differences are counted, and pages missing in the store are taken off the map. The map is advisory:
an error costs bad decisions, not correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from sgl_kvtier.policy.pages.page_state import PageView
from sgl_kvtier.runtime.ahead.tier_facts import TierFacts
from sgl_kvtier.runtime.sglang.attached import backend_of
from sgl_kvtier.runtime.sglang.host_tier import HostTier
from sgl_kvtier.runtime.sglang.tree_nodes import TreeNodes
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.types import Lookup, PageKey, Tier

_SLICE = 2048
"""Pages looked up in the store at a time: about half a millisecond of the scheduler's thread."""
_PERIOD_S = 1.0


class TierCheck:
    """A rolling check of stored pages, which may change unnoticed, and a complete one when idle."""

    def __init__(self, tree: Tree, pages: PageView, facts: TierFacts) -> None:
        self._tree = tree
        self._pages = pages
        self._facts = facts
        self._host = HostTier(tree)
        self._nodes = TreeNodes(tree)
        self._at = 0.0
        self._seen: tuple[int, int] | None = None
        self._next: int | None = None
        """Cursor into the map for the look-up of stored pages; None when none is running."""
        self._said = False

    def _store(self) -> Any:
        return getattr(backend_of(self._tree.cache_controller), "local_store", None)

    def roll(self, now: float) -> int:
        """Takes pages that the store has dropped off the map, some at a time; returns how many."""
        if now < self._at and self._next is None and not self._said:
            return 0
        self._at = now + _PERIOD_S
        if self._said:
            self._said = False
            return 0
        store = self._store()
        if self._next is None:
            stats = store.stats() if store is not None else None
            seen = (
                (stats.pages_evicted + stats.pages_corrupt, stats.pages)
                if stats is not None
                else (-1, 0)
            )
            if seen[0] == (self._seen or (0, 0))[0] and not (
                self._seen and seen[1] < self._seen[1]
            ):
                self._seen = seen
                return 0
            self._seen = seen
            self._next = 0
        part, self._next = self._pages.resident_part(Tier.STORAGE, self._next, _SLICE)
        gone = self._not_stored(store, part)
        self._facts.dropped(gone, Tier.STORAGE)
        return len(gone)

    def forget(self) -> None:
        """All stored pages were just reported as gone. The map learns this at the end of the tick,
        so the next `roll` checks nothing: it would count those pages again.
        """
        self._next, self._seen, self._said = None, None, True

    def _not_stored(self, store: Any, keys: Sequence[PageKey]) -> tuple[PageKey, ...]:
        if store is None:
            return tuple(keys)
        return tuple(
            key
            for key, answer in zip(keys, store.lookup(keys), strict=True)
            if answer is Lookup.MISS
        )

    def whole(self) -> dict[str, int]:
        """Number of differing pages by kind, for an idle server that has reported all its facts;
        O(pages).

        device_number: device pages of the tree and of the map, by count. device_names: pages of
        evictable paths that the map does not have on the device. host_names, storage_names: by
        name.
        """
        nodes, page = self._nodes, self._facts._page
        known = {
            tier: dict.fromkeys(self._pages.resident(tier))
            for tier in (Tier.DEVICE, Tier.HOST, Tier.STORAGE)
        }
        paths: dict[PageKey, None] = {}
        hosted: dict[PageKey, None] = {}
        for path in nodes.paths(nodes.leaves()):
            for node in path:
                keys = self._facts.node_keys(node.node_id)
                paths.update(dict.fromkeys(keys if node.full_value_len is not None else ()))
                hosted.update(dict.fromkeys(keys if self._host.has_copy(node.node_id) else ()))
        host = self._facts.host_pages()
        store = self._store()
        stored = list(islice(known[Tier.STORAGE], None))
        return {
            "device_number": abs(nodes.device_tokens() // page - len(known[Tier.DEVICE])),
            "device_names": sum(key not in known[Tier.DEVICE] for key in paths),
            "host_names": len(host.keys() ^ known[Tier.HOST].keys())
            + sum(key not in known[Tier.HOST] for key in hosted),
            "storage_names": len(self._not_stored(store, stored)),
        }
