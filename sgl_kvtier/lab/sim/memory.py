"""The pages a tier holds: named ones in LRU order, pinned ones, and private ones without a name.
Counts, no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgl_kvtier.types import PLACES, Link, PageKey, Tier

UNLIMITED = 1 << 40
"""Pages of a tier without a limit."""


class TierMemory:
    """One tier. A page is idle (may be evicted), pinned (counted), or private to a request.

    `on_drop` hears of every page that leaves. Asserts where a caller would use room there is not.
    """

    def __init__(self, tier: Tier, capacity: int | None) -> None:
        self.tier = tier
        self.capacity = UNLIMITED if capacity is None else capacity
        self._idle: dict[PageKey, None] = {}
        self._pins: dict[PageKey, int] = {}
        self._private = 0
        self._first: dict[PageKey, None] = {}
        self._prefetched: dict[PageKey, Link] = {}
        self.dropped: list[PageKey] = []
        """Pages that have left since the caller last emptied this."""
        self.unused_prefetches: dict[Link, int] = {}
        """Prefetched pages that left before anyone used them, by the link they came over."""

    def __contains__(self, key: PageKey) -> bool:
        return key in self._idle or key in self._pins

    def __len__(self) -> int:
        return len(self._idle) + len(self._pins)

    @property
    def used(self) -> int:
        """Pages that hold something."""
        return len(self) + self._private

    @property
    def available(self) -> int:
        """Pages that are empty or could be."""
        return self.capacity - self._private - len(self._pins)

    def prefix(self, keys: Sequence[PageKey]) -> int:
        """How many of the leading keys are here."""
        return next((i for i, key in enumerate(keys) if key not in self), len(keys))

    def touch(self, keys: Sequence[PageKey]) -> None:
        """These were asked for: they leave last. A chain's end leaves before its beginning."""
        for key in reversed(keys):
            self._prefetched.pop(key, None)
            if key in self._idle:
                del self._idle[key]
                self._idle[key] = None

    def pin(self, keys: Iterable[PageKey]) -> None:
        """They stay until unpinned as often."""
        for key in keys:
            self._idle.pop(key, None)
            self._pins[key] = self._pins.get(key, 0) + 1

    def use(self, keys: Iterable[PageKey]) -> None:
        """A request runs on these: they were not prefetched in vain."""
        for key in keys:
            self._prefetched.pop(key, None)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """Takes one pin each back; a chain's end becomes the older."""
        for key in reversed(keys):
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                self._idle[key] = None

    def claim(self, count: int) -> None:
        """Takes private pages, evicting idle ones where needed."""
        assert 0 <= count <= self.available, (
            f"{count} pages of {PLACES[self.tier]} claimed, {self.available} available"
        )
        self._private += count
        self._make_room()

    def release(self, count: int) -> None:
        """Gives private pages back."""
        assert 0 <= count <= self._private, (
            f"{count} pages of {PLACES[self.tier]} released, {self._private} are private"
        )
        self._private -= count

    def name_private(self, key: PageKey) -> bool:
        """A private page becomes the named one, pinned once. False where the name is here already:
        then that page is pinned and the private one is given back.
        """
        new = key not in self
        self.release(1)
        self.pin((key,))
        return new

    def mark_prefetched(self, keys: Iterable[PageKey], link: Link) -> None:
        """These came over a link only because someone thought they would be needed."""
        self._prefetched.update(dict.fromkeys(keys, link))

    def evict_first(self, keys: Iterable[PageKey]) -> None:
        """When room is needed these leave before others, in this order."""
        self._first = dict.fromkeys(keys)

    def finish(self) -> None:
        """Counts prefetched pages that no request used."""
        for link in self._prefetched.values():
            self._unused(link)
        self._prefetched = {}

    def _unused(self, link: Link) -> None:
        self.unused_prefetches[link] = self.unused_prefetches.get(link, 0) + 1

    def _make_room(self) -> None:
        while self.used > self.capacity:
            key = next((key for key in self._first if key in self._idle), None) or next(
                iter(self._idle)
            )
            self._first.pop(key, None)
            del self._idle[key]
            self.dropped.append(key)
            if key in self._prefetched:
                self._unused(self._prefetched.pop(key))
