"""The budget of one planning step: seconds of links and pages of tiers, charged move by move."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.types import Link, PageKey, Tier

FIRST_HOP: Final[Mapping[Tier, Link]] = {
    Tier.STORAGE: Link.STORAGE_TO_HOST,
    Tier.REMOTE: Link.REMOTE_TO_HOST,
}
"""The link that brings pages of a tier below host memory there."""
_IN_ONE: Final[Mapping[Link, Link]] = {
    Link.STORAGE_TO_HOST: Link.STORAGE_TO_DEVICE,
    Link.REMOTE_TO_HOST: Link.REMOTE_TO_DEVICE,
}
"""The same device or network as restorations use it. The second hop is the faster one."""


def restored_over(hop: Link) -> Link:
    """The link of restorations that takes the same device or network as this first hop."""
    return _IN_ONE[hop]


def hops(source: Tier) -> tuple[Link, ...]:
    """The links from a tier to the device, one after the other."""
    if source is Tier.HOST:
        return (Link.HOST_TO_DEVICE,)
    return (FIRST_HOP[source], Link.HOST_TO_DEVICE)


class LinkTime:
    """The time at which a link will have done everything charged to it, in seconds from now. A
    `factor` > 1 makes it slower.
    """

    def __init__(
        self, bandwidth: Bandwidth, link: Link, page_bytes: int, factor: float = 1.0
    ) -> None:
        source, whole = link, _IN_ONE.get(link)
        if whole is not None and not bandwidth.known(link) and bandwidth.known(whole):
            source = whole
        self.page_s = page_bytes / bandwidth.bytes_per_second(source) * factor
        self.latency_s = max(0.0, bandwidth.seconds(source, page_bytes) * factor - self.page_s)
        self.end_s = 0.0
        self.closed = False
        """A request waits for pages of this link: nothing more is charged to it in this step."""

    def seconds(self, pages: int) -> float:
        """Seconds that Eq. 2 gives for pages on an idle link."""
        return self.latency_s + pages * self.page_s if pages else 0.0

    def fit(self, until_s: float) -> int:
        """Number of pages that could come within `until_s` seconds, behind those charged."""
        if self.closed:
            return 0
        return (
            max(0, int((until_s - self.end_s - self.latency_s) / self.page_s + 1e-9))
            if until_s < math.inf
            else 1 << 30
        )

    def charge(self, pages: int) -> None:
        """Charges this many more pages to the link."""
        self.end_s += self.seconds(pages)


class Room:
    """Pages of a tier that may be claimed: the empty ones first, then evictable ones, farthest next
    use first.

    `coming` pages are on their way there and may not have taken their places yet: they are served
    first, and pages may still have to be evicted for them. It is lazy: the map is queried for as
    many classes of victims as are needed. The map must not regroup its pages meanwhile.
    """

    def __init__(
        self, tier_map: TierMap, tier: Tier, free: int, empty: int | None = None, coming: int = 0
    ) -> None:
        self._map = tier_map
        self._tier = tier
        self.left = max(0, free)
        """Number of pages that may still be set aside."""
        self.empty = (
            max(0, free - tier_map.evictable(tier)) if empty is None else max(0, min(empty, free))
        )
        self._have = self.empty
        self._classes = tier_map.classes(tier)
        self._next: tuple[int, float, int] | None = None
        self._drawn: list[int] = []
        self._drawn_pages = 0
        self.claimed = 0
        if coming:
            self.claimed = self.take(coming, -math.inf)

    def take(self, pages: int, needed_at: float) -> int:
        """Sets aside up to `pages`, evicting pages needed after `needed_at`; returns how many."""
        if not self.left:
            return 0
        granted = self._gather(min(pages, self.left), needed_at)
        self.left -= granted
        return granted

    def pass_over(self, pages: int) -> None:
        """Leaves the first evictable pages to other requests, which have not claimed them yet."""
        self._gather(pages, -math.inf)

    def claim(self, pages: int) -> None:
        """Counts pages of those set aside that are filled in this step."""
        self.claimed += pages

    def victims(self) -> tuple[PageKey, ...]:
        """The pages to evict for those filled in this step."""
        missing = self.claimed - self.empty
        if missing <= 0:
            return ()
        while self._drawn_pages < missing and self._draw():
            pass
        return self._map.victims_of(self._tier, self._drawn, missing)

    def _gather(self, pages: int, needed_at: float) -> int:
        """Takes up to `pages` of those drawn and those evictable; returns how many there were."""
        while self._have < pages and (more := self._draw(needed_at)):
            self._have += more
        granted = max(0, min(pages, self._have))
        self._have -= granted
        return granted

    def _draw(self, needed_at: float = -math.inf) -> int:
        """Draws the next class of victims, unless needed too soon; returns its number of pages."""
        if self._next is None:
            self._next = next(self._classes, None)
        if self._next is None or self._next[1] <= needed_at:
            return 0
        name, _, pages = self._next
        self._drawn.append(name)
        self._drawn_pages += pages
        self._next = None
        return pages
