"""Pages that the planner moves between tiers: pages in flight, prefetched pages that were not used
yet, how many may be prefetched, and whether the moves were hidden behind compute.

After a failed move nothing is moved for its owner for some time, which is longer after each further
failure. If an owner's prefetched pages were evicted from a tier before its turn, no more are
prefetched to that tier.

Prefetched pages that were used pay for those that were not (`Ledger`), since a session may stay
away, and pages may be evicted before their turn. A page that was used earns the share that may be
wasted for it. A page that is evicted unused costs a whole page. A page of a session that has not
returned yet is charged its probability of being wasted. While the balance is used up, nothing more
is prefetched. Each page on which a request runs earns a little, so that prefetching starts again
after a long run of wrong predictions. Waiting requests have a balance of their own, on which
sessions that stay away have no effect. So for each of the two balances, with s the share:

    wasted <= start + s / (1 - s) * used + tried * ran + pages waiting uncharged at `allows`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sgl_kvtier.policy.sessions import LIKELY
from sgl_kvtier.types import Link, PageKey, Tier

_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
"""Nothing is moved for an owner for this many seconds after a failed move. The pause doubles with
each further failure up to the longest.
"""
_TRIED: Final = 0.0001
"""Pages that the balance earns per page on which a request ran."""
_START, _MOST = 0.05, 0.1
"""The initial and the highest balance, as shares of the device's pages."""


@dataclass(slots=True)
class _Move:
    owner: str
    """The owner for whom pages are moved; "" for a demotion."""
    target: Tier
    links: tuple[Link, ...]
    """The links over which the pages are moved, one after the other."""
    pages: dict[PageKey, None]
    """The pages that have not arrived yet."""
    late_at: float
    """When the move counts as failed, in seconds of the executor's clock."""


class InFlight:
    """The moves in flight. A page is in flight to at most one tier. Seconds of the executor's
    clock; memory grows with the pages in flight.
    """

    def __init__(self) -> None:
        self._of: dict[PageKey, _Move] = {}
        """The move that each page in flight belongs to."""
        self._moves: dict[int, _Move] = {}
        """Moves by number, the oldest first."""
        self._serial = 0
        self._pages: dict[Link, int] = {}
        """Number of pages that have yet to arrive over each link."""
        self._coming = {Tier.DEVICE: 0, Tier.HOST: 0, Tier.STORAGE: 0, Tier.REMOTE: 0}
        """Number of pages in flight to each tier."""
        self._since: dict[Link, float] = {}
        """When a page last arrived over each link, or since when it has been busy."""

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._of

    def others(self, keys: tuple[PageKey, ...]) -> tuple[PageKey, ...]:
        """The given pages without those in flight."""
        return (
            keys
            if self._of.keys().isdisjoint(keys)
            else tuple(key for key in keys if key not in self._of)
        )

    def pages(self, link: Link) -> int:
        """Number of pages that have yet to arrive over a link."""
        return self._pages.get(link, 0)

    def coming(self, tier: Tier) -> int:
        """Number of pages in flight to a tier."""
        return self._coming[tier]

    def owners(self, keys: Sequence[PageKey], target: Tier) -> tuple[str, ...]:
        """The owners of the given pages that are in flight to a tier."""
        if self._of.keys().isdisjoint(keys):
            return ()
        moves = (self._of.get(key) for key in keys)
        return tuple(
            dict.fromkeys(
                move.owner for move in moves if move is not None and move.target is target
            )
        )

    def from_below_host(self, key: PageKey) -> bool:
        """Whether a page is in flight through host memory to the device."""
        move = self._of.get(key)
        return move is not None and move.target is Tier.DEVICE and len(move.links) > 1

    def begin(
        self,
        keys: Sequence[PageKey],
        target: Tier,
        links: tuple[Link, ...],
        now: float,
        late_at: float,
        owner: str = "",
    ) -> None:
        """A move begins for an owner. From `late_at` on it counts as failed."""
        move = _Move(owner, target, links, dict.fromkeys(keys), late_at)
        self._coming[target] += len(keys)
        self._serial += 1
        self._moves[self._serial] = move
        assert self._of.keys().isdisjoint(keys), "a page in flight is not moved again"
        self._of.update(dict.fromkeys(keys, move))
        for link in links:
            if not self._pages.get(link):
                self._since[link] = now
            self._pages[link] = self._pages.get(link, 0) + len(keys)

    def ended(self, keys: Sequence[PageKey], target: Tier, now: float) -> int:
        """Pages have arrived in a tier, or will not. Returns how many were in flight to it."""
        count = 0
        if self._of.keys().isdisjoint(keys):
            return count
        for key in keys:
            move = self._of.get(key)
            if move is None or move.target is not target:
                continue
            del self._of[key], move.pages[key]
            count += 1
            self._coming[target] -= 1
            for link in move.links:
                self._pages[link] -= 1
                self._since[link] = now
        return count

    def backlog_seconds(self, link: Link, seconds_per_page: float, now: float) -> float:
        """Seconds until a link has moved all its pages, minus the time since the last arrival."""
        pages = self._pages.get(link, 0)
        return max(0.0, pages * seconds_per_page - (now - self._since[link])) if pages else 0.0

    def late(self, now: float) -> list[tuple[tuple[PageKey, ...], Tier]]:
        """Removes and returns overdue moves, from the oldest up to the first that is in time."""
        overdue = []
        while self._moves:
            serial = next(iter(self._moves))
            move = self._moves[serial]
            if move.pages and move.late_at > now:
                break
            del self._moves[serial]
            if move.pages:
                keys = tuple(move.pages)
                self.ended(keys, move.target, now)
                overdue.append((keys, move.target))
        return overdue


class Ledger:
    """Two balances in pages: of expected sessions, which may stay away, and of waiting requests,
    which run for certain. `share` of all prefetched pages may be wasted. A balance begins with, and
    never exceeds, a share of the device.
    """

    def __init__(self, share: float) -> None:
        self._earns = share / (1 - share) if share < 1 else math.inf
        self._most = 0.0
        self.balances = {False: 0.0, True: 0.0}
        """By whether the owner runs for certain."""
        self._charged: dict[Tier, dict[PageKey, float]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        """The charge of each page; 0 if its owner runs for certain."""

    def capacity(self, pages: int) -> None:
        """Sets the number of pages of the device."""
        if not self._most:
            for certain, balance in self.balances.items():
                self.balances[certain] = min(balance, 0.0) + _START * pages
        self._most = _MOST * pages

    def allows(self, chance: float) -> bool:
        """Whether to prefetch for an owner that runs with this probability; always with share 1."""
        return self.balances[chance >= 1] > 0 or self._earns == math.inf

    def prefetched(self, keys: Iterable[PageKey], tier: Tier, chance: float) -> None:
        """Pages were prefetched for an owner that runs with this probability."""
        charge = max(0.0, 1 - chance)
        for key in keys:
            self.failed(key, tier)
            self.balances[not charge] -= charge
            self._charged[tier][key] = charge

    def used(self, key: PageKey, tier: Tier) -> None:
        """A page was used, or a request arrived for it."""
        charge = self._charged[tier].pop(key, None)
        if charge is not None:
            self._earn(not charge, charge + self._earns)

    def wasted(self, key: PageKey, tier: Tier) -> None:
        """A page was evicted before it was used."""
        charge = self._charged[tier].pop(key, None)
        if charge is not None:
            self.balances[not charge] -= 1 - charge

    def failed(self, key: PageKey, tier: Tier) -> None:
        """A page did not arrive, or is now prefetched for another owner."""
        charge = self._charged.get(tier, {}).pop(key, None)
        if charge is not None:
            self._earn(not charge, charge)

    def halfway(self, key: PageKey) -> None:
        """A page in flight to the device reached host memory. Its charge moves there."""
        charge = self._charged[Tier.DEVICE].pop(key, None)
        if charge is not None:
            self._charged[Tier.HOST][key] = charge

    def ran(self, pages: int) -> None:
        """A request runs on this many pages."""
        for certain in self.balances:
            self._earn(certain, pages * _TRIED)

    def _earn(self, certain: bool, pages: float) -> None:
        self.balances[certain] = min(self._most, self.balances[certain] + pages)


class Prefetched:
    """The prefetched pages and their owners. Each Prefetcher has one and shares its pages in
    flight. `waste`: fraction of prefetched pages that may go unused.
    """

    def __init__(self, in_flight: InFlight, waste: float) -> None:
        self._in_flight = in_flight
        self._ledger = Ledger(waste)
        self.unused: dict[Tier, dict[PageKey, str]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        """Unused pages that were prefetched to a tier or are in flight to it, with their owners."""
        self._evicted_early: dict[str, dict[Tier, None]] = {}
        """Owners whose prefetched pages were evicted from a tier before the owner ran."""
        self._pauses: dict[str, tuple[float, float]] = {}
        """Owners whose moves failed: (when their pause ends, its length), both in seconds."""
        self.wasted = 0
        """Number of pages that were prefetched to the device and evicted unused."""

    def capacity(self, pages: int) -> None:
        """Sets the number of pages of the device."""
        self._ledger.capacity(pages)

    def begun(self, keys: Sequence[PageKey], tier: Tier, owner: str, chance: float) -> None:
        """Moves of these pages have begun, for an owner that runs with this probability."""
        self.unused[tier].update(dict.fromkeys(keys, owner))
        self._ledger.prefetched(keys, tier, chance)
        if tier is Tier.DEVICE:
            for key in keys if self.unused[Tier.HOST] else ():
                if self.unused[Tier.HOST].pop(key, None) is not None:
                    self._ledger.failed(key, Tier.HOST)

    def given_up(self, keys: Sequence[PageKey], tier: Tier, now: float) -> None:
        """A move took too long."""
        for key in keys:
            owner = self.unused.get(tier, {}).pop(key, None)
            if owner is not None:
                self._ledger.failed(key, tier)
                self._failed(owner, now)

    def left(
        self, keys: Sequence[PageKey], tier: Tier, now: float, watched: Mapping[str, None]
    ) -> None:
        """Pages have left a tier, or will not arrive. `watched`: owners that have yet to run."""
        unused = self.unused.get(tier)
        if unused:
            for key in keys:
                owner = unused.pop(key, None)
                if owner is None:
                    continue
                if key in self._in_flight:
                    self._ledger.failed(key, tier)
                    continue
                self._ledger.wasted(key, tier)
                self.wasted += tier is Tier.DEVICE
                if owner in watched:
                    self._evicted_early.setdefault(owner, {})[tier] = None
        if len(self._in_flight):
            for owner in self._in_flight.owners(keys, tier):
                self._failed(owner, now)

    def halfway(self, keys: Sequence[PageKey]) -> None:
        """Pages in flight to the device have reached host memory; the rest is a move of its own."""
        for key in keys:
            owner = self.unused[Tier.DEVICE].pop(key, None)
            if owner is not None:
                self.unused[Tier.HOST][key] = owner
                self._ledger.halfway(key)

    def used(self, owner: str, keys: Sequence[PageKey]) -> None:
        """An owner begins to run on these pages."""
        self._evicted_early.pop(owner, None)
        self._pauses.pop(owner, None)
        self._ledger.ran(len(keys))
        for tier, unused in self.unused.items():
            for key in keys if unused else ():
                if unused.pop(key, None) is not None:
                    self._ledger.used(key, tier)

    def forget(self, owner: str) -> None:
        self._evicted_early.pop(owner, None)
        self._pauses.pop(owner, None)

    def may_move(self, owner: str, chance: float, target: Tier, now: float) -> bool:
        """Whether pages may be moved to `target` for an owner that runs with this probability. They
        may not during a pause after a failed move, nor to a tier from which the owner's prefetched
        pages were evicted unused, nor if too many prefetched pages went unused.
        """
        if self.paused(owner, now) or target in self._evicted_early.get(owner, ()):
            return False
        return chance >= LIKELY and self._ledger.allows(chance)

    def paused(self, owner: str, now: float) -> bool:
        """Whether moves for an owner pause after a failed one."""
        pause = self._pauses.get(owner)
        return pause is not None and now < pause[0]

    def _failed(self, owner: str, now: float) -> None:
        """A move for this owner failed, so its moves pause, longer after each further failure."""
        until, pause_s = self._pauses.get(owner, (now, 0.0))
        if until <= now:
            pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S)
            self._pauses[owner] = (now + pause_s, pause_s)


@dataclass(frozen=True, slots=True)
class Overlap:
    """One test of TierKV's Eq. 1: whether a transfer is hidden behind earlier iterations."""

    owner: str
    pages: int
    """Number of pages that the owner lacks."""
    transfer_s: float
    """Seconds until all of them have arrived, after earlier transfers."""
    window_s: float
    """Seconds until the owner runs, plus the slack."""
    held: bool
    """Whether the transfer was predicted to be hidden."""


class Overlaps:
    """Counts tests and outcomes, for the first test of each turn. Memory: per open turn."""

    def __init__(self) -> None:
        self._open: dict[str, bool] = {}
        self.counts = {
            "held": 0,
            "failed": 0,
            "held_right": 0,
            "held_wrong": 0,
            "failed_right": 0,
            "failed_wrong": 0,
        }
        """held: predicted to be hidden; failed: predicted not to be. right: all pages were there
        when the owner ran (held), or some were missing (failed).
        """
        self._fetched: set[str] = set()

    def __contains__(self, owner: str) -> bool:
        """Whether this owner's turn was tested before."""
        return owner in self._open

    def tested(self, test: Overlap) -> bool:
        """Records a test. False if this owner's turn was tested before."""
        if test.owner in self._open:
            return False
        self._open[test.owner] = test.held
        self.counts["held" if test.held else "failed"] += 1
        return True

    def __len__(self) -> int:
        """Number of tested turns that have not run yet."""
        return len(self._open)

    def fetched(self, owner: str) -> None:
        """The owner's turn has come, and the engine loads pages that were missing."""
        if owner in self._open:
            self._fetched.add(owner)

    def started(self, owner: str, complete: bool) -> None:
        """The owner runs. `complete`: no page is missing now; some were if just `fetched`."""
        held = self._open.pop(owner, None)
        if held is not None:
            complete = complete and owner not in self._fetched
            self._fetched.discard(owner)
            self.counts[
                ("held_" if held else "failed_") + ("right" if held is complete else "wrong")
            ] += 1

    def forget(self, owner: str) -> None:
        """The owner will not run."""
        self._open.pop(owner, None)
        self._fetched.discard(owner)
