"""The pages that each tier holds: named ones in LRU order, pinned ones, and private ones without a
name. Counts, no bytes. And the three tiers together: matches of a prompt in them, copies written
down behind it, and moves of a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from sgl_kvtier.lab.sim.links import Transfer, Transfers
from sgl_kvtier.policy.messages import Evict, Fact, Move, PagesDropped, PagesPlaced, TransferDone
from sgl_kvtier.types import PLACES, Link, PageKey, Span, Tier

# --- one tier -------------------------------------------------------------------------------------

UNLIMITED = 1 << 40
"""Pages of a tier without a limit."""
_SLACK_PAGES = 256
"""Victims asked for beyond those needed: some are in use by now."""


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
        self._before: dict[PageKey, PageKey] = {}
        """The page before each in its chain."""
        self._behind: dict[PageKey, int] = {}
        """How many pages here come next after each."""
        self.victims: Callable[[int], Iterable[PageKey]] | None = None
        """The planner's order of eviction, for so many pages; None: the least recently used."""
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
        if new and key in self._before:
            before = self._before[key]
            self._behind[before] = self._behind.get(before, 0) + 1
        return new

    def chain(self, keys: Sequence[PageKey]) -> None:
        """Pages that will be named here, in the order of their prompt: with `victims`, no page
        leaves before one behind it.
        """
        self._before.update((key, before) for before, key in itertools.pairwise(keys))

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
        missing = self.used - self.capacity
        if missing > 0 and self.victims is not None:
            self._evict_ends(self.victims(missing + _SLACK_PAGES), missing)
        while self.used > self.capacity:
            key = next((key for key in self._first if key in self._idle), None) or next(
                iter(self._idle)
            )
            self._drop(key)

    def _evict_ends(self, victims: Iterable[PageKey], missing: int) -> None:
        """Evicts these in their order, each once no page is behind it."""
        passed: dict[PageKey, None] = {}
        for victim in victims:
            if victim not in self._idle:
                continue
            passed[victim] = None
            key: PageKey | None = victim
            while key in passed and not self._behind.get(key):
                del passed[key]
                self._drop(key)
                missing -= 1
                if not missing:
                    return
                key = self._before.get(key)

    def _drop(self, key: PageKey) -> None:
        self._first.pop(key, None)
        del self._idle[key]
        self.dropped.append(key)
        if key in self._before:
            self._behind[self._before[key]] -= 1
        if key in self._prefetched:
            self._unused(self._prefetched.pop(key))


# --- the three tiers ------------------------------------------------------------------------------

_UP = {
    (Tier.STORAGE, Tier.HOST): Link.STORAGE_TO_HOST,
    (Tier.HOST, Tier.DEVICE): Link.HOST_TO_DEVICE,
    (Tier.STORAGE, Tier.DEVICE): Link.STORAGE_TO_DEVICE,
    (Tier.DEVICE, Tier.HOST): Link.DEVICE_TO_HOST,
    (Tier.HOST, Tier.STORAGE): Link.HOST_TO_STORAGE,
}

_NO_SPAN = Span(0, 0)


class Caches:
    """Device, host memory and storage with what moves between them. `tell` passes facts on; `now`
    is the virtual clock.
    """

    def __init__(
        self,
        capacities: dict[Tier, int | None],
        transfers: Transfers,
        page_bytes: int,
        tell: Callable[[Fact], None],
        now: Callable[[], float],
    ) -> None:
        self.tiers = {tier: TierMemory(tier, pages) for tier, pages in capacities.items()}
        self._below = tuple(tier for tier in self.tiers if tier > Tier.DEVICE)
        self.device, self.host, self.storage = (
            self.tiers[tier] for tier in (Tier.DEVICE, Tier.HOST, Tier.STORAGE)
        )
        self._transfers = transfers
        self._page_bytes = page_bytes
        self._tell = tell
        self._now = now
        self.wanted_pages = 0
        """Pages of the device the first waiting request lacks: moves leave them alone."""

    def match(self, keys: Sequence[PageKey]) -> tuple[int, tuple[tuple[Span, Tier], ...]]:
        """The number of leading pages on the device, and the tiers of the pages behind them. These
        go as far as the chain goes without a gap.
        """
        resident = self.device.prefix(keys)
        sources: list[tuple[Span, Tier]] = []
        for place in range(resident, len(keys)):
            tier = next((t for t in self._below if keys[place] in self.tiers[t]), None)
            if tier is None:
                break
            if sources and sources[-1][1] == tier:
                sources[-1] = (Span(sources[-1][0].start, place + 1), tier)
            else:
                sources.append((Span(place, place + 1), tier))
        return resident, tuple(sources)

    def look_up(self, keys: Sequence[PageKey]) -> tuple[int, tuple[tuple[Span, Tier], ...]]:
        """The same for a request that has just arrived: what it finds counts as used."""
        resident, sources = self.match(keys)
        found = sources[-1][0].stop if sources else resident
        for memory in self.tiers.values():
            memory.touch([key for key in keys[:found] if key in memory])
        return resident, sources

    def place(self, keys: Sequence[PageKey], tier: Tier) -> None:
        """Says that these pages are in a tier now."""
        if keys:
            self._tell(PagesPlaced(tuple(keys), tier, self._now()))

    def tell_drops(self) -> None:
        """Passes on what was evicted since the last time."""
        for tier, memory in self.tiers.items():
            if memory.dropped:
                self._tell(PagesDropped(tuple(memory.dropped), tier, self._now()))
                memory.dropped = []

    def write_down(self, keys: Sequence[PageKey]) -> None:
        """Copies of pages new on the device go to host memory and from there to storage, where they
        are not (write-through).
        """
        self._copy(
            keys,
            Tier.DEVICE,
            Tier.HOST,
            lambda done: self._copy(done, Tier.HOST, Tier.STORAGE, None),
        )

    def carry_out(self, move: Move) -> None:
        """A plan's move."""
        self._copy(move.keys, move.source, move.target, None)

    def evict(self, evict: Evict) -> None:
        """A plan's wish which pages go first."""
        self.tiers[evict.tier].evict_first(evict.keys)

    def finish(self) -> None:
        """Counts as wasted what was prefetched and never used."""
        for memory in self.tiers.values():
            memory.finish()
            for link, pages in memory.unused_prefetches.items():
                self._transfers.results[link].wasted_bytes += pages * self._page_bytes

    def _copy(
        self,
        wanted: Sequence[PageKey],
        source: Tier,
        target: Tier,
        then: Callable[[Sequence[PageKey]], None] | None,
    ) -> None:
        link = _UP[source, target]
        above, below = self.tiers[source], self.tiers[target]
        keys = [key for key in wanted if key in above and key not in below]
        self._tell_outcome(wanted, keys, target)
        if not keys:
            return
        above.pin(keys)

        def begin(transfer: Transfer) -> bool:
            del transfer
            if below.available < len(keys) + (self.wanted_pages if target is Tier.DEVICE else 0):
                above.unpin(keys)
                self._tell(PagesDropped(tuple(keys), target, self._now()))
                return False
            below.claim(len(keys))
            self.tell_drops()
            return True

        def done(transfer: Transfer, seconds: float) -> None:
            del transfer
            fresh = [key for key in keys if below.name_private(key)]
            below.unpin(keys)
            above.unpin(keys)
            if target < source:
                below.mark_prefetched(fresh, link)
            nbytes = len(keys) * self._page_bytes
            # Under no request's name: a restoration of the same pages has loads of its own, which
            # have not ended by this.
            self._tell(TransferDone("", link, _NO_SPAN, nbytes, seconds, self._now()))
            self.place(fresh, target)
            if then is not None:
                then(keys)

        # Under no request's name: cancelling a request's loads leaves moves alone.
        self._transfers.submit(Transfer(link, "", Span(0, len(keys)), begin, done, _never))

    def _tell_outcome(
        self, wanted: Sequence[PageKey], moving: Sequence[PageKey], target: Tier
    ) -> None:
        """Reports pages that will not be moved: there already, or nowhere to be moved from."""
        under_way, below = dict.fromkeys(moving), self.tiers[target]
        there = tuple(key for key in wanted if key in below)
        gone = tuple(key for key in wanted if key not in below and key not in under_way)
        self.place(there, target)
        if gone:
            self._tell(PagesDropped(gone, target, self._now()))


def _never(transfer: Transfer, span: Span, reason: str) -> None:
    raise AssertionError(f"a move over {transfer.link.value} was taken back: {span} {reason}")
