"""The search for the best fixed split: the best of those measured in turns with ours, however few
rounds there are.
"""

from __future__ import annotations

import asyncio

import pytest

from sgl_kvtier.lab.experiment.restore.fluctuate import measure_fixed
from sgl_kvtier.lab.experiment.restore.trial import Trial


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize(("optimum", "found"), [(0.5, 0.5), (0.3, 0.3125), (0.0, 0.0), (1.0, 1.0)])
def test_the_best_split_is_found_in_any_number_of_rounds(
    rounds: int, optimum: float, found: float
) -> None:
    asked: list[float | None] = []

    async def measure(share: float | None) -> Trial:
        asked.append(share)
        seconds = 1.1 if share is None else 1.0 + abs(share - optimum)
        return Trial("m", 2048, "bandwidth/0", "both", 0, 1.0, ttft_s=seconds, fixed_split=share)

    fixed = asyncio.run(measure_fixed(measure, rounds))
    assert fixed.best == found
    assert fixed.middle(fixed.best) == pytest.approx(1.0 + abs(found - optimum))
    assert len(fixed.ours) == rounds
    assert found in fixed.finalists
    assert asked.count(None) == rounds
    assert asked[:9] == [part / 8 for part in range(9)]
    assert asked[9:18] == asked[8::-1], "every second look backwards"


def test_a_share_that_always_failed_is_not_the_best() -> None:
    async def measure(share: float | None) -> Trial:
        fails = share is not None and share < 0.4
        return Trial(
            "m",
            2048,
            "bandwidth/0",
            "both",
            0,
            1.0,
            ttft_s=None if fails else 1.0 + (share or 0.0),
            fixed_split=share,
        )

    assert asyncio.run(measure_fixed(measure, 2)).best in (0.4375, 0.5)
