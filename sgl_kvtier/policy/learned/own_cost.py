"""What a restoration takes beside compute and links, learned from those that ran alone: scheduler
steps, the last load's way into the row, waiting for one another at the meeting.
"""

from __future__ import annotations

from typing import Final

from sgl_kvtier.policy.shape import EngineShape

CPU_S: Final = 0.02
"""On a CPU restorations of 2k tokens, the shortest measured, ended 5 to 46 ms above the best split
at ratios from 1/4 to 4, 19 ms in the median of two models (docs/results/data/restore.json).
"""
ACCELERATOR_S: Final = 0.007
"""At the pace of an H100 those of 8k tokens, the shortest there, ended 4 to 11 ms above it at the
same ratios, 7 ms in the median (docs/results/data/paced-restore.json). No card has measured it.
"""

_MOST_S: Final = 0.1
_COUNTED: Final = 31
"""The last ones that count."""
_GUESSED: Final = 5
"""The first guess counts as this many."""


def guess_s(engine: EngineShape) -> float:
    """What a restoration is taken to cost on this kind of device until some ran alone, in
    seconds.
    """
    return ACCELERATOR_S if engine.accelerator else CPU_S


class OwnCost:
    """The median of how much later restorations ended than compute and links were predicted to
    take, in seconds; from 0 to 0.1. `initial` counts as a few of them: one or two that were held up
    change little.
    """

    def __init__(self, initial_s: float) -> None:
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
