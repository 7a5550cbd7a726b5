"""The admission filter: all new pages are written, or only those put twice (flash wears)."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.types import PageKey

_REMEMBERED = 1 << 17
"""Pages per generation; two are remembered. A page takes 8 bytes of its key, and its pool."""


class SecondHit:
    """Admits a page the second time it is put. The core's lock guards it.

    Memory is bounded: it remembers one to two generations of first puts and forgets older ones. Two
    keys of a pool with the same first 8 bytes admit each other, which costs one extra write and
    nothing else.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def admit(self, pages: Iterable[tuple[PageKey, str]]) -> list[bool]:
        """Whether each page (key, pool) should be written now. None may be in the store already."""
        return [self._admit_one(key[:8] + pool.encode()) for key, pool in pages]

    def _admit_one(self, short: bytes) -> bool:
        if short in self._young or short in self._old:
            return True
        if len(self._young) >= self._remembered:
            self._old, self._young = self._young, set()
        self._young.add(short)
        return False


def admission_of(config: StoreConfig) -> SecondHit | None:
    """The filter that the settings name; None if every page is written."""
    return SecondHit() if config.admission == "second-hit" else None
