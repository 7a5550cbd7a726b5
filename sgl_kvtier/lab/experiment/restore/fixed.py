"""The best fixed split of a restoration, found by measuring: the same server, the same changes, the
split fixed beforehand.

What is predicted from curves (`restore_bound`) has no chunk with a fixed part, and shares no chunk
with other requests. A split that was fixed and measured has all of that, so it tells what deciding
on the way is worth by itself.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sgl_kvtier.lab.experiment.restore.log import seconds
from sgl_kvtier.lab.experiment.restore.trial import Trial
from sgl_kvtier.lab.pages.stats import percentile

_COARSE, _FINE = 8, 16
_LOOKS = 2

_Share = TypeVar("_Share")
Measure = Callable[[float | None], Awaitable[Trial]]
"""One trial with so much of the prefix computed, decided beforehand; None: as our planner decides.
"""


@dataclass
class FixedSplits:
    """Trials by computed share, and those of our planner that were made in turns with the last of
    them.
    """

    by_share: dict[float, list[Trial]] = field(default_factory=dict)
    ours: list[Trial] = field(default_factory=list)
    finalists: tuple[float, ...] = ()
    """Shares measured in turns with our planner; before there are any, all of them."""
    trials: list[Trial] = field(default_factory=list)
    """Every one with a fixed split, also those before the finalists' turns."""

    def middle(self, share: float) -> float | None:
        """The median time to first token in seconds; None where every trial failed."""
        return percentile(seconds(self.by_share[share]), 50)

    @property
    def best(self) -> float:
        """The share with the least median, of the finalists."""
        return min(
            self.finalists or self.by_share,
            key=lambda share: (self.middle(share) or math.inf, share),
        )


async def measure_fixed(measure: Measure, rounds: int) -> FixedSplits:
    """Every eighth twice; then the best of these and the sixteenths beside it, in turns with our
    planner, `rounds` times.
    """
    found = FixedSplits()
    coarse = [part / _COARSE for part in range(_COARSE + 1)]
    for look in range(_LOOKS):
        for share in _turned(coarse, look):
            found.by_share.setdefault(share, []).append(await measure(share))
    best = found.best
    fine = [share for share in (best - 1 / _FINE, best, best + 1 / _FINE) if 0 <= share <= 1]
    for number in range(rounds):
        for each in _turned([*fine, None], number):
            same = found.ours if each is None else found.by_share.setdefault(each, [])
            same.append(await measure(each))
    found.finalists = tuple(fine)
    found.trials = [trial for trials in found.by_share.values() for trial in trials]
    for share in fine:
        found.by_share[share] = found.by_share[share][-rounds:]
    return found


def _turned(shares: Sequence[_Share], number: int) -> list[_Share]:
    """Every second time backwards."""
    return list(shares if number % 2 == 0 else reversed(shares))
