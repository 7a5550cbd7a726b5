"""Whether a session comes back at all: learned online, by the number of turns it has had."""

from __future__ import annotations

from typing import Final

LIKELY: Final = 0.5
"""With at least this chance a session comes rather than not."""
_KEEP: Final = 0.99
_PRIOR: Final = 2.0
"""All sessions together count as much as this many sessions of the class."""
_CLASSES: Final = 8


def class_of(turns: int) -> int:
    """Sessions of 1, 2 to 3, 4 to 7, ... turns behave alike."""
    return min(turns.bit_length(), _CLASSES - 1)


class _Share:
    """Weights of sessions that came back and that did not, later ones counting more."""

    __slots__ = ("back", "gone")

    def __init__(self) -> None:
        self.back = self.gone = 0.0

    def count(self, back: float, gone: float) -> None:
        self.back = self.back * _KEEP + back
        self.gone = max(0.0, self.gone * _KEEP + gone)


class Returns:
    """Chances per class. A session that was counted as gone and returns is counted again."""

    def __init__(self) -> None:
        self._classes = [_Share() for _ in range(_CLASSES)]
        self._all = _Share()

    def came_back(self, turns: int, was_gone: bool) -> None:
        """A session with this number of turns has come back."""
        for share in (self._classes[class_of(turns)], self._all):
            share.count(1.0, -1.0 if was_gone else 0.0)

    def gone(self, turns: int) -> None:
        """A session with this number of turns is not expected any more."""
        for share in (self._classes[class_of(turns)], self._all):
            share.count(0.0, 1.0)

    def chance(self, turns: int) -> float:
        """The chance that a session returns after this many turns; a half if nothing is known."""
        everybody = (self._all.back + 1.0) / (self._all.back + self._all.gone + 2.0)
        own = self._classes[class_of(turns)]
        return (own.back + _PRIOR * everybody) / (own.back + own.gone + _PRIOR)
