"""What one planning step may spend: seconds of links and pages of tiers, drawn down move by move."""

from __future__ import annotations

import math

from sgl_kvtier.policy.bandwidth import Bandwidth
from sgl_kvtier.policy.tier_map import TierMap
from sgl_kvtier.types import Link, PageKey, Tier

TWO_HOPS = (Link.SSD_TO_DRAM, Link.DRAM_TO_HBM)


class LinkTime:
    """When a link will be done with what it has been charged, in seconds from now. `factor` > 1 takes it for slower."""

    def __init__(self, bandwidth: Bandwidth, link: Link, page_bytes: int, factor: float = 1.0) -> None:
        source = link
        if link is Link.SSD_TO_DRAM and not bandwidth.known(link) and bandwidth.known(Link.SSD_TO_HBM):
            # The same device; the second hop is the faster one.
            source = Link.SSD_TO_HBM
        self.page_s = page_bytes / bandwidth.bytes_per_second(source) * factor
        self.latency_s = max(0.0, bandwidth.seconds(source, page_bytes) * factor - self.page_s)
        self.end_s = 0.0

    def seconds(self, pages: int) -> float:
        """Eq. 2 on an idle link."""
        return self.latency_s + pages * self.page_s if pages else 0.0

    def fit(self, until_s: float) -> int:
        """Pages that could come behind the others until then."""
        return max(0, int((until_s - self.end_s - self.latency_s) / self.page_s + 1e-9)) if until_s < math.inf else 1 << 30

    def charge(self, pages: int) -> None:
        """So many more pages will come over it."""
        self.end_s += self.seconds(pages)


class Room:
    """Pages of a tier that may be claimed: the empty ones first, then those that give way, farthest next use first.

    Lazy: asks the map for as many classes of victims as are needed. Nothing may be regrouped meanwhile.
    """

    def __init__(self, tier_map: TierMap, tier: Tier, free: int, empty: int | None = None) -> None:
        self._map = tier_map
        self._tier = tier
        self._left = max(0, free)
        self.empty = max(0, free - tier_map.evictable(tier)) if empty is None else max(0, min(empty, free))
        self._have = self.empty
        self._classes = tier_map.classes(tier)
        self._next: tuple[int, float, int] | None = None
        self._drawn: list[int] = []
        self.claimed = 0

    def take(self, pages: int, needed_at: float) -> int:
        """Sets aside up to `pages`, displacing only what is needed later than `needed_at`; returns how many."""
        pages = min(pages, self._left)
        while self._have < pages:
            if self._next is None:
                self._next = next(self._classes, None)
            if self._next is None or self._next[1] <= needed_at:
                break
            self._drawn.append(self._next[0])
            self._have += self._next[2]
            self._next = None
        granted = max(0, min(pages, self._have))
        self._have -= granted
        self._left -= granted
        return granted

    def claim(self, pages: int) -> None:
        """So many of the pages set aside are filled in this step."""
        self.claimed += pages

    def victims(self) -> tuple[PageKey, ...]:
        """Who has to leave for what is filled in this step."""
        missing = self.claimed - self.empty
        return self._map.victims_of(self._tier, self._drawn, missing) if missing > 0 else ()
