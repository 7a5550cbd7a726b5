"""How much may be prefetched: pages that were prefetched are paid for by those that were used.

A session may stay away. Its pages, or those of a waiting request, may be evicted before its turn. A
page that was used earns the share that may be wasted for it; a page that left unused costs a whole
page; a page of a session that still waits is charged its chance of being wasted. While the balance
is spent, nothing more is prefetched. Every page a request runs on earns a little, so that a server
with a long run of wrong guesses tries again. Waiting requests have a balance of their own: sessions
that stay away take nothing from it. So for each of both, with s the share:

    wasted <= start + s / (1 - s) * used + tried * ran + pages waiting uncharged at `allows`
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from sgl_kvtier.types import PageKey, Tier

_TRIED: Final = 0.0001
"""Pages earned per page on which a request ran."""
_START, _MOST = 0.05, 0.1
"""A balance at first and at most, as shares of the device's pages."""


class Ledger:
    """Two balances in pages, of guesses and of waiting requests. `share` of all prefetched pages
    may be wasted. A balance begins with, and is never more than, a share of the device.
    """

    def __init__(self, share: float) -> None:
        self._earns = share / (1 - share) if share < 1 else math.inf
        self._most = 0.0
        self.balances = {False: 0.0, True: 0.0}
        """Of guesses, and of owners that come for certain (True)."""
        self._charged: dict[Tier, dict[PageKey, float]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        """What a page was charged: nothing where its owner comes for certain."""

    def capacity(self, pages: int) -> None:
        """Sets the number of pages that the device has."""
        if not self._most:
            for certain, balance in self.balances.items():
                self.balances[certain] = min(balance, 0.0) + _START * pages
        self._most = _MOST * pages

    def allows(self, chance: float) -> bool:
        """Whether to prefetch for an owner that comes with this chance; a share of 1: always."""
        return self.balances[chance >= 1] > 0 or self._earns == math.inf

    def brought(self, keys: Iterable[PageKey], tier: Tier, chance: float) -> None:
        """Pages were prefetched for an owner that comes with this chance."""
        charge = max(0.0, 1 - chance)
        for key in keys:
            self.failed(key, tier)
            self.balances[not charge] -= charge
            self._charged[tier][key] = charge

    def used(self, key: PageKey, tier: Tier) -> None:
        """A page was used, or a request came for it."""
        charge = self._charged[tier].pop(key, None)
        if charge is not None:
            self._earn(not charge, charge + self._earns)

    def wasted(self, key: PageKey, tier: Tier) -> None:
        """A page left before it was used."""
        charge = self._charged[tier].pop(key, None)
        if charge is not None:
            self.balances[not charge] -= 1 - charge

    def failed(self, key: PageKey, tier: Tier) -> None:
        """A page did not come at all, or is prefetched for another owner."""
        charge = self._charged.get(tier, {}).pop(key, None)
        if charge is not None:
            self._earn(not charge, charge)

    def halfway(self, key: PageKey) -> None:
        """A page on its way to the device reached host memory: its charge moves there."""
        charge = self._charged[Tier.DEVICE].pop(key, None)
        if charge is not None:
            self._charged[Tier.HOST][key] = charge

    def ran(self, pages: int) -> None:
        """A request runs on this many pages."""
        for certain in self.balances:
            self._earn(certain, pages * _TRIED)

    def _earn(self, certain: bool, pages: float) -> None:
        self.balances[certain] = min(self._most, self.balances[certain] + pages)
