"""Pages that clients asked to keep for a time: others are evicted first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from sgl_kvtier.store.index.hashtable import EMPTY, Rows
from sgl_kvtier.store.index.slots import SlotTable
from sgl_kvtier.types import PageKey


class Retention:
    """Which pages are retained, for whom and until when. A page may be retained before it is
    written, and by several owners. A restart forgets it. The core's lock guards every call.
    """

    def __init__(self, table: SlotTable, now: Callable[[], float]) -> None:
        """`now`: seconds of a monotonic clock."""
        self._table = table
        self._now = now
        self._owners: dict[str, tuple[float, tuple[PageKey, ...], int]] = {}
        self._kept: Counter[PageKey] = Counter()
        self._soonest = math.inf

    def __contains__(self, key: bytes) -> bool:
        self._expire()
        return key in self._kept

    def __len__(self) -> int:
        """Number of retained pages."""
        self._expire()
        return len(self._kept)

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float, most_bytes: int) -> int:
        """Retains these pages for `seconds` from now: the first ones, as many as fit into
        `most_bytes` together with the pages of other owners. Returns how many. Replaces what was
        retained for this owner; 0 seconds retain nothing.
        """
        self._expire()
        self._give_up(owner)
        if seconds <= 0 or not keys:
            return 0
        for name, (until, kept, nbytes) in self._owners.items():
            if not nbytes:  # retained while the store had no page to estimate from
                self._owners[name] = (until, kept, int(self._bytes_of(kept).sum()))
        room = most_bytes - sum(nbytes for _, _, nbytes in self._owners.values())
        sums = np.cumsum(self._bytes_of(keys))
        count = int(np.searchsorted(sums, room, "right"))
        if count:
            until = self._now() + seconds
            self._owners[owner] = (until, tuple(keys[:count]), int(sums[count - 1]))
            self._kept.update(keys[:count])
            self._soonest = min(self._soonest, until)
        return count

    def clear(self) -> None:
        """Ends every retention."""
        for owner in list(self._owners):
            self._give_up(owner)

    def rows(self) -> Rows:
        """The rows of the retained pages that are in the table."""
        self._expire()
        keys = list(self._kept)
        found = [] if not keys else [self._table.find(keys, pool) for pool in self._table.pools]
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        kept: Rows = rows[rows != EMPTY]
        return kept

    def _bytes_of(self, keys: Sequence[PageKey]) -> Rows:
        """Payload bytes of each page in all its pools. A page that is not there counts as much as
        the largest page that is.
        """
        table = self._table
        sums = np.zeros(len(keys), np.int64)
        for pool in table.pools:
            rows = table.find(keys, pool)
            there = rows != EMPTY
            sums[there] += table.length[rows[there]]
        absent = sums == 0
        if absent.any() and not absent.all():
            sums[absent] = sums.max()
        elif absent.any() and len(table.length):
            sums[absent] = table.length.max()
        return sums

    def _expire(self) -> None:
        if self._now() < self._soonest:
            return
        now = self._now()
        for owner in [owner for owner, (until, _, _) in self._owners.items() if until <= now]:
            self._give_up(owner)
        self._soonest = min((until for until, _, _ in self._owners.values()), default=math.inf)

    def _give_up(self, owner: str) -> None:
        _, keys, _ = self._owners.pop(owner, (0.0, (), 0))
        for key in keys:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]
