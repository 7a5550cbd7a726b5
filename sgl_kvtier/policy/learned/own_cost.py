"""What a restoration takes beside compute and links, learned from those that ran alone: scheduler
steps, the last load's way into the row, waiting for one another at the meeting.
"""

from __future__ import annotations

from typing import Final

GUESS_S: Final = 0.02
"""Where nothing else is known: on a CPU restorations ended 20 ms above the best split."""

_MOST_S: Final = 0.1
_COUNTED: Final = 31
"""The last ones that count."""
_GUESSED: Final = 5
"""The first guess counts as this many."""


class OwnCost:
    """The median of how much later restorations ended than compute and links were predicted to
    take, in seconds; from 0 to 0.1. `initial` counts as a few of them: one or two that were held up
    change little.
    """

    def __init__(self, initial_s: float = GUESS_S) -> None:
        self._late_s = [initial_s] * _GUESSED
        self.seconds = initial_s

    def saw(self, late_s: float) -> None:
        """A restoration that ran alone ended this much later than predicted."""
        self._late_s.append(late_s)
        if len(self._late_s) > _COUNTED:
            del self._late_s[0]
        ranked = sorted(self._late_s)
        self.seconds = min(max(ranked[len(ranked) // 2], 0.0), _MOST_S)

    def profile(self) -> dict[str, float]:
        """The estimate as plain data."""
        return {"own_s": self.seconds}
