"""Which new pages are worth a write: all, or those offered a second time. Flash wears by bytes
written.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.types import PageKey

_REMEMBERED = 1 << 17
"""Pages per generation; two generations are kept. A page is remembered by 8 bytes of its key and
its pool.
"""


class SecondHit:
    """Admits a page when it is offered for the second time. The core's lock guards it.

    Memory is bounded: the pages of the last one to two generations of first offers are remembered,
    older ones forgotten. Two keys of a pool that share 8 bytes admit each other, which costs a
    write and nothing else.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def admit(self, pages: Iterable[tuple[PageKey, str]]) -> list[bool]:
        """Whether each page, none of which is in the store, should be written now. `pages`: key and
        pool.
        """
        return [self._admit_one(key[:8] + pool.encode()) for key, pool in pages]

    def _admit_one(self, short: bytes) -> bool:
        if short in self._young or short in self._old:
            return True
        if len(self._young) >= self._remembered:
            self._old, self._young = self._young, set()
        self._young.add(short)
        return False


def admission_of(config: StoreConfig) -> SecondHit | None:
    """The filter that the settings name; None when every page is written."""
    return SecondHit() if config.admission == "second-hit" else None
