"""A cache of which pages the engine has. It has no clock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from sgl_kvtier.types import Lookup, PageKey

HERE_S = 5.0
"""Seconds that a HIT is cached: half of the time for which the engine keeps a page it reported."""
GONE_S = 1.0
UNREADABLE_S = 15.0
"""Seconds for which a page that could not be read is a miss. An engine lists the pages of a dead
host for 10 s, and each read of them takes a second.
"""
CORRUPT_S = 60.0
MOST = 1 << 17


class Presence:
    """Answers by (pool, key) with their expiry. Beyond `most` the oldest are dropped. Any thread;
    `now` is in seconds of one clock.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: dict[tuple[str, PageKey], tuple[Lookup, float, bool]] = {}
        self._hidden: Counter[tuple[str, PageKey]] = Counter()
        self._all_hidden = 0
        self._epoch = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def lookup(self, pool: str, keys: Iterable[PageKey], now: float) -> list[Lookup]:
        """HIT if a page is known to exist, else MISS."""
        return [self._answer(pool, key, now) or Lookup.MISS for key in keys]

    def gone(self, pool: str, key: PageKey, now: float) -> bool:
        """Whether a page is known not to exist, or not to be readable."""
        return self._answer(pool, key, now) is Lookup.MISS

    def unknown(self, pool: str, keys: Iterable[PageKey], now: float) -> list[PageKey]:
        """The keys without a valid answer."""
        return [key for key in keys if self._answer(pool, key, now) is None]

    @property
    def epoch(self) -> int:
        """Counts calls of `hide`. Results of calls begun in an earlier epoch are ignored."""
        return self._epoch

    def found(
        self, pool: str, keys: Sequence[PageKey], here: Sequence[bool], now: float, epoch: int
    ) -> None:
        """Records the engine's answers to a call begun in `epoch`, except for distrusted pages."""
        with self._lock:
            if epoch != self._epoch:
                return
            for key, is_here in zip(keys, here, strict=True):
                if not self._distrusted(pool, key, now):
                    lasts = HERE_S if is_here else GONE_S
                    self._set(pool, key, Lookup.HIT if is_here else Lookup.MISS, now + lasts)

    def stored(self, pool: str, keys: Iterable[PageKey], now: float, epoch: int) -> None:
        """Records pages that a call begun in `epoch` wrote."""
        with self._lock:
            if epoch != self._epoch:
                return
            for key in keys:
                self._set(pool, key, Lookup.HIT, now + HERE_S)

    def distrust(self, pool: str, keys: Iterable[PageKey], seconds: float, now: float) -> None:
        """Makes pages that could not be read misses for `seconds`, whatever the engine says."""
        with self._lock:
            for key in keys:
                self._set(pool, key, Lookup.MISS, now + seconds, distrusted=True)

    def hide(self, pool: str, keys: Iterable[PageKey] | None) -> None:
        """Makes pages misses, None for all pages, until `show` was called as often."""
        with self._lock:
            self._epoch += 1
            if keys is None:
                self._all_hidden += 1
                self._known.clear()
            for key in keys or ():
                self._hidden[pool, key] += 1
                self._known.pop((pool, key), None)

    def show(self, pool: str, keys: Iterable[PageKey] | None) -> None:
        """Undoes one `hide`, after the engine has removed the pages."""
        with self._lock:
            if keys is None:
                self._all_hidden -= 1
            for key in keys or ():
                self._hidden[pool, key] -= 1
                if not self._hidden[pool, key]:
                    del self._hidden[pool, key]

    def hides(self, pool: str, keys: Iterable[PageKey]) -> bool:
        """Whether one of these pages is hidden."""
        hidden = self._hidden
        return bool(self._all_hidden) or any((pool, key) in hidden for key in keys)

    def clear(self) -> None:
        """Forgets all answers; hidden pages stay hidden."""
        with self._lock:
            self._known.clear()

    def _answer(self, pool: str, key: PageKey, now: float) -> Lookup | None:
        if self.hides(pool, (key,)):
            return Lookup.MISS
        known = self._known.get((pool, key))
        return known[0] if known is not None and now < known[1] else None

    def _distrusted(self, pool: str, key: PageKey, now: float) -> bool:
        known = self._known.get((pool, key))
        return known is not None and known[2] and now < known[1]

    def _set(
        self, pool: str, key: PageKey, answer: Lookup, until: float, distrusted: bool = False
    ) -> None:
        self._known.pop((pool, key), None)
        self._known[pool, key] = (answer, until, distrusted)
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
