"""Prefetched pages: the owner they were prefetched for, whether they were used, and owners whose
pages are not to be moved now.

After a failed move nothing is moved for its owner for a while, longer after each further failure.
Where an owner's pages were evicted from a tier before its turn, no more are prefetched to that
tier. Prefetches are limited by the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from sgl_kvtier.policy.ahead.flights import Flights
from sgl_kvtier.policy.ahead.ledger import Ledger
from sgl_kvtier.policy.sessions.returns import LIKELY
from sgl_kvtier.types import PageKey, Tier

_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
"""Nothing is moved for an owner for this many seconds after a failed move, doubled with each
further failure up to the longest.
"""


class Brought:
    """One per Prefetcher, sharing its flights. `waste`: share of moved pages that may go unused."""

    def __init__(self, flights: Flights, waste: float) -> None:
        self._flights = flights
        self._ledger = Ledger(waste)
        self.unused: dict[Tier, dict[PageKey, str]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        """Pages prefetched to a tier, or being so, and not used yet, with their owners."""
        self._gave_way: dict[str, dict[Tier, None]] = {}
        """Owners with prefetched pages that were evicted from a tier before the owner's turn."""
        self._pauses: dict[str, tuple[float, float]] = {}
        """Owners whose moves have failed: nothing is moved for them until the first time; the
        second is the length of this pause, both in seconds.
        """
        self.wasted = 0
        """Pages prefetched to the device that left it unused."""

    def capacity(self, pages: int) -> None:
        """Sets the number of pages that the device has."""
        self._ledger.capacity(pages)

    def begun(self, keys: Sequence[PageKey], tier: Tier, owner: str, chance: float) -> None:
        """Moves of these pages have begun, for an owner that comes with this chance."""
        self.unused[tier].update(dict.fromkeys(keys, owner))
        self._ledger.brought(keys, tier, chance)
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
        """Pages have left a tier, or will not come. `watched`: owners whose turn is to come."""
        unused = self.unused.get(tier)
        if unused:
            for key in keys:
                owner = unused.pop(key, None)
                if owner is None:
                    continue
                if key in self._flights:
                    self._ledger.failed(key, tier)
                    continue
                self._ledger.wasted(key, tier)
                self.wasted += tier is Tier.DEVICE
                if owner in watched:
                    self._gave_way.setdefault(owner, {})[tier] = None
        if len(self._flights):
            for owner in self._flights.owners(keys, tier):
                self._failed(owner, now)

    def halfway(self, keys: Sequence[PageKey]) -> None:
        """Pages on their way to the device have reached host memory, and the rest of the way is a
        move of its own: nothing has failed.
        """
        for key in keys:
            owner = self.unused[Tier.DEVICE].pop(key, None)
            if owner is not None:
                self.unused[Tier.HOST][key] = owner
                self._ledger.halfway(key)

    def used(self, owner: str, keys: Sequence[PageKey]) -> None:
        """An owner runs from now on, on these pages."""
        self._gave_way.pop(owner, None)
        self._pauses.pop(owner, None)
        self._ledger.ran(len(keys))
        for tier, unused in self.unused.items():
            for key in keys if unused else ():
                if unused.pop(key, None) is not None:
                    self._ledger.used(key, tier)

    def forget(self, owner: str) -> None:
        """Forgets an owner."""
        self._gave_way.pop(owner, None)
        self._pauses.pop(owner, None)

    def may_move(self, owner: str, chance: float, target: Tier, now: float) -> bool:
        """Whether pages may be moved for an owner. Not right after a failed move for it. Not to a
        tier where its prefetched pages were evicted unused: there is no room before its turn. Not
        where too many prefetched pages were not used.
        """
        if self.paused(owner, now) or target in self._gave_way.get(owner, ()):
            return False
        return chance >= LIKELY and self._ledger.allows(chance)

    def paused(self, owner: str, now: float) -> bool:
        """Whether nothing is moved for an owner because a move has failed."""
        pause = self._pauses.get(owner)
        return pause is not None and now < pause[0]

    def _failed(self, owner: str, now: float) -> None:
        """A move for this owner failed: the next one waits, longer after each further failure."""
        until, pause_s = self._pauses.get(owner, (now, 0.0))
        if until <= now:
            pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S)
            self._pauses[owner] = (now + pause_s, pause_s)
