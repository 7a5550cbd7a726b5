"""Facts about pages that enter and leave tiers in SGLang.

SGLang's tree has no callbacks, so the few methods that change it are hooked: insert, load back,
copy to host memory, graft into host memory, evict. A node's pages are named by SGLang's own page
hashes. Host pages are freed by slot, so their names are kept by slot (about 100 bytes each). Device
pages need no such list, because leaves are evicted one by one. Facts are noted in order and
reported at the next tick. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from sgl_kvtier.policy.messages import Fact, PagesDropped, PagesPlaced
from sgl_kvtier.policy.pages.page_state import PageView
from sgl_kvtier.runtime.sglang.host_tier import HostTier
from sgl_kvtier.runtime.sglang.tree_nodes import TreeNodes
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.page_names import from_hex
from sgl_kvtier.types import PageKey, Tier

_LATER = 0.0
"""Placeholder for the time in facts noted between two ticks; the tick sets it."""


class TierFacts:
    """Watches one tree. `left` and `_came` are pages that left or entered the device since facts
    were last reported.
    """

    def __init__(self, tree: Tree, tell: Callable[[Fact], None], pages: PageView) -> None:
        """Starts watching the tree, which must still be empty."""
        self._tell = tell
        self._pages = pages
        self._page = int(tree.page_size)
        self._nodes = TreeNodes(tree)
        host = HostTier(tree)
        self._host: list[PageKey | None] = [None] * (host.slot_numbers // self._page + 1)
        self._hosted: dict[PageKey, None] = {}
        self.left: dict[PageKey, None] = {}
        self._came: dict[PageKey, None] = {}
        self._unused: dict[PageKey, None] = {}
        self.wasted = 0
        """Prefetched host pages that were evicted without having been on the device."""
        self._watched = host.watch(self._hold), self._nodes.watch(self._loaded)

    def stop(self) -> None:
        """Stops watching."""
        for end in self._watched:
            end()
        self._tell = _nobody

    def node_keys(self, node_id: int) -> tuple[PageKey, ...]:
        """Names of the pages of a node, without its ancestors. KeyError if it does not exist."""
        return from_hex(self._nodes.names(node_id))

    def host_pages(self) -> dict[PageKey, int]:
        """Name and slot of every host page of the tree, for comparisons."""
        return {key: slot for slot, key in enumerate(self._host) if key is not None}

    def placed(self, keys: tuple[PageKey, ...], tier: Tier) -> None:
        """Pages have entered a tier."""
        if keys:
            if tier is Tier.DEVICE:
                for key in keys:
                    self.left.pop(key, None)
                    self._unused.pop(key, None)
                self._came.update(dict.fromkeys(keys))
            self._tell(PagesPlaced(keys, tier, _LATER))

    def dropped(self, keys: tuple[PageKey, ...], tier: Tier) -> None:
        """Pages have left a tier, or will not enter it."""
        if keys:
            if tier is Tier.DEVICE:
                for key in keys:
                    self._came.pop(key, None)
                self.left.update(dict.fromkeys(keys))
            elif tier is Tier.HOST and self._unused:
                self.wasted += sum(self._unused.pop(key, self) is None for key in keys)
            self._tell(PagesDropped(keys, tier, _LATER))

    def failed(self, keys: tuple[PageKey, ...], target: Tier) -> None:
        """A move of these pages failed; those that entered the target another way are skipped."""
        gone = tuple(key for key in keys if not self._is_there(key, target))
        if gone:
            self._tell(PagesDropped(gone, target, _LATER))

    def brought(self, keys: tuple[PageKey, ...]) -> None:
        """Pages were prefetched to host memory before a request needed them."""
        self._unused.update(dict.fromkeys(keys))

    @property
    def unused(self) -> int:
        """Number of pages prefetched to host memory that have not been on the device since."""
        return len(self._unused)

    def _is_there(self, key: PageKey, tier: Tier) -> bool:
        if tier is Tier.HOST:
            return key in self._hosted
        page = self._pages.page(key)
        known = page is not None and tier in page.tiers
        if tier is not Tier.DEVICE:
            return known
        return key in self._came or (known and key not in self.left)

    def stored(self, keys: Sequence[PageKey]) -> int:
        """How many of these pages, from the first on, the map has in storage."""
        tiers = {Tier.STORAGE, Tier.REMOTE}
        for place, page in enumerate(map(self._pages.page, keys)):
            if page is None or tiers.isdisjoint(page.tiers):
                return place
        return len(keys)

    def told(self) -> None:
        """All facts noted so far are in the map."""
        self.left.clear()
        self._came.clear()

    def host_freed(self, freed: Iterable[torch.Tensor]) -> None:
        """The tree frees host pages: tensors of token slots."""
        keys = []
        for slots in freed:
            for slot in slots[:: self._page].tolist():
                key, self._host[slot // self._page] = self._host[slot // self._page], None
                if key is not None:
                    keys.append(key)
                    self._hosted.pop(key, None)
        self.dropped(tuple(keys), Tier.HOST)

    def cleared(self) -> tuple[PageKey, ...]:
        """Device and host pools are emptied; returns the pages that were in host memory."""
        keys = tuple(key for key in self._host if key is not None)
        self._host = [None] * len(self._host)
        self._hosted.clear()
        return keys

    def _loaded(self, nodes: Sequence[int]) -> None:
        """These nodes of a path have device pages again."""
        self.placed(tuple(key for node in nodes for key in self.node_keys(node)), Tier.DEVICE)

    def _hold(self, names: Sequence[str], host_slots: torch.Tensor) -> None:
        """Pages entered host memory: copies of a node, or pages from storage."""
        keys, slots = from_hex(names), host_slots[:: self._page].tolist()
        if len(slots) != len(keys):
            return  # pages without names: written while no storage was attached
        for key, slot in zip(keys, slots, strict=True):
            self._host[slot // self._page] = key
        self._hosted.update(dict.fromkeys(keys))
        self.placed(keys, Tier.HOST)


def _nobody(fact: Fact) -> None:
    """Drops a fact, since there is no receiver any more."""
    del fact
