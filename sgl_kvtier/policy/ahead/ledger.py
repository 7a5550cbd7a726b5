"""How much may be prefetched on a guess: pages prefetched for sessions are paid for by those that
were used.

A session may stay away, or its pages may be evicted before it comes. A page that was used earns the
share that may be wasted for it; a page that left unused costs a whole page; a page that still waits
is charged its chance of being wasted. While the balance is spent, nothing more is prefetched on a
guess. Every page a request runs on earns a little, so that a server with a long run of wrong
guesses tries again. So in every case, with s the share:

    wasted <= start + s / (1 - s) * used + tried * ran + pages waiting uncharged at `allows`
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from sgl_kvtier.types import PageKey, Tier

_TRIED: Final = 0.01
"""Pages earned per page on which a request ran."""
_START, _MOST = 0.05, 0.1
"""The balance at first and at most, as shares of the device's pages."""


class Ledger:
    """A balance in pages. `share` of all prefetched pages may be wasted. The balance begins with,
    and is never more than, a share of the device.
    """

    def __init__(self, share: float) -> None:
        self._earns = share / (1 - share) if share < 1 else math.inf
        self._most = 0.0
        self.balance = 0.0
        self._charged: dict[Tier, dict[PageKey, float]] = {Tier.DEVICE: {}, Tier.HOST: {}}

    def capacity(self, pages: int) -> None:
        """Sets the number of pages that the device has."""
        if not self._most:
            self.balance = min(self.balance, 0.0) + _START * pages
        self._most = _MOST * pages

    def allows(self, chance: float) -> bool:
        """Whether to prefetch for an owner that comes with this chance; a share of 1: always."""
        return self.balance > 0 or chance >= 1 or self._earns == math.inf

    def brought(self, keys: Iterable[PageKey], tier: Tier, chance: float) -> None:
        """Pages were prefetched."""
        charge = 1 - chance
        if charge <= 0:
            return
        charged = self._charged[tier]
        for key in keys:
            self.balance -= charge - charged.get(key, 0.0)
            charged[key] = charge

    def used(self, key: PageKey, tier: Tier) -> None:
        """A page was used, or a request came for it."""
        charge = self._charged[tier].pop(key, None)
        if charge is not None:
            self._earn(charge + self._earns)

    def wasted(self, key: PageKey, tier: Tier) -> None:
        """A page left before it was used."""
        charge = self._charged[tier].pop(key, None)
        if charge is not None:
            self.balance -= 1 - charge

    def failed(self, key: PageKey, tier: Tier) -> None:
        """A page did not come at all."""
        charge = self._charged.get(tier, {}).pop(key, None)
        if charge is not None:
            self._earn(charge)

    def halfway(self, key: PageKey) -> None:
        """A page on its way to the device reached host memory: its charge moves there."""
        charge = self._charged[Tier.DEVICE].pop(key, None)
        if charge is not None:
            self._charged[Tier.HOST][key] = charge

    def ran(self, pages: int) -> None:
        """A request runs on this many pages."""
        self._earn(pages * _TRIED)

    def _earn(self, pages: float) -> None:
        self.balance = min(self._most, self.balance + pages)
