"""Page keys in the lines of a decision log: in full, or by numbers from their second mention on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from sgl_kvtier.outside import is_whole, shown
from sgl_kvtier.types import PageKey

MOST_NUMBERED = 1 << 18
"""Keys with a number at a time: some 40 MB, in the writer and in the reader."""


class InFull:
    """Page keys as they are."""

    def write(self, keys: Sequence[PageKey]) -> list[Any]:
        """Keys as a line has them."""
        return [key.hex() for key in keys]

    def read(self, values: Sequence[Any]) -> tuple[PageKey, ...]:
        """And back. Raises ValueError, TypeError."""
        return tuple(PageKey(bytes.fromhex(text)) for text in values)


class Numbered:
    """Page keys by numbers. One of it takes all lines of a log, in their order. It holds `most`
    keys; one more, and it forgets them all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: dict[PageKey, int] = {}
        self._keys: list[PageKey] = []

    def write(self, keys: Sequence[PageKey]) -> list[Any]:
        found: list[Any] = []
        run: list[int] | None = None
        for key in keys:
            number = self._numbers.get(key)
            if number is None:
                self._add(key)
                found.append(key.hex())
                run = None
            elif run is not None and _goes_on(run, number):
                run[1] = number
            else:
                run = [number, number]
                found.append(run)
        return [one[0] if type(one) is list and one[0] == one[1] else one for one in found]

    def read(self, values: Sequence[Any]) -> tuple[PageKey, ...]:
        keys: list[PageKey] = []
        for value in values:
            if isinstance(value, str):
                key = PageKey(bytes.fromhex(value))
                if key not in self._numbers:
                    self._add(key)
                keys.append(key)
                continue
            first, last = value if isinstance(value, list) else (value, value)
            known = len(self._keys) - 1
            if not (is_whole(first, 0, known) and is_whole(last, 0, known)):
                raise ValueError(f"no page key has the number {shown(value)} here")
            step = 1 if last >= first else -1
            keys += [self._keys[number] for number in range(first, last + step, step)]
        return tuple(keys)

    def _add(self, key: PageKey) -> None:
        if len(self._keys) >= self._most:
            self._numbers.clear()
            self._keys.clear()
        self._numbers[key] = len(self._keys)
        self._keys.append(key)


def _goes_on(run: Sequence[int], number: int) -> bool:
    first, last = run
    return number - last == (1 if last > first else -1) or (first == last == number - 1)


Keys: TypeAlias = InFull | Numbered
IN_FULL = InFull()
