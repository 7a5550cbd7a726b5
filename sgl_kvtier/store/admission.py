"""Which new pages are worth a write: all of them, or those offered a second time. Flash wears by bytes written."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvtier.types import PageKey

_REMEMBERED = 1 << 17
"""Keys per generation; two generations are kept. 8 bytes of each key stand for it."""


class SecondHit:
    """Lets a page in when it is offered for the second time. The core's lock guards it.

    Memory is bounded: the keys of the last one to two generations of first offers are remembered, older ones forgotten.
    Two keys that share 8 bytes let each other in, which costs a write and nothing else.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def admit(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each page should be written now."""
        return [self._admit_one(key[:8]) for key in keys]

    def _admit_one(self, short: bytes) -> bool:
        if short in self._young or short in self._old:
            return True
        if len(self._young) >= self._remembered:
            self._old, self._young = self._young, set()
        self._young.add(short)
        return False
