"""A run of batches: every arm is asked for the same batches, all in one server process.

Every prompt is computed once, which stores it and gives the answer that others are compared with.
Then prompts of each length are computed and timed, from which the bandwidth of the store follows.
Every arm runs once unmeasured, and rounds follow, each with batches of its own. A round goes
through all sizes and arms, the next one backwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.batches.batch import Batch, Batches, BatchLog
from sgl_kvtier.lab.experiment.batches.draw import (
    BatchOptions,
    arrivals_of,
    lengths_of,
    order,
    prompts_of,
    scale_prompt,
)
from sgl_kvtier.lab.experiment.restore.arms import BOTH_ENDS, COMPUTE, LOAD
from sgl_kvtier.lab.experiment.restore.log import GRID, PRIME, WARM, Scale, seconds
from sgl_kvtier.lab.experiment.restore.trial import Trial
from sgl_kvtier.lab.pages.stats import percentile

_CALIBRATIONS = 3


@dataclass
class BatchRun:
    """One run against one server. What it measures is in the log, also when it is interrupted."""

    options: BatchOptions
    batches: Batches
    log: BatchLog
    advance: Callable[[], None] = lambda: None
    describe: Callable[[str], None] = lambda _: None

    async def run(self) -> None:
        """All rounds. Raises BenchError when the server cannot be measured so."""
        options = self.options
        left = [
            (number, *cell)
            for number in range(1, options.rounds + 1)
            for cell in order(options, number)
        ]
        wanted = [one for one in left if not self.log.made(self._base(GRID, *one))]
        for _ in range(len(left) - len(wanted)):
            self.advance()
        if not wanted:
            return
        for number, at_once in dict.fromkeys((one[0], one[2]) for one in wanted):
            await self._store(number, at_once)
        scales = await self._scales()
        last_gbps = None
        for number, ratio, at_once, arm in wanted:
            gbps = balanced_gbps(scales) / ratio
            if gbps != last_gbps:
                await self._learn(number, at_once, gbps, first=last_gbps is None)
                last_gbps = gbps
            service_s = mean_service_s(scales, ratio)
            self.describe(f"round {number}, {at_once} at once, load/compute {ratio:g}, {arm}")
            base = self._base(GRID, number, ratio, at_once, arm, gbps)
            self.log.keep(
                await self.batches.run(
                    base,
                    prompts_of(options, at_once, number),
                    arrivals_of(options, at_once, number, service_s),
                )
            )
            self.advance()

    def _base(
        self, kind: str, number: int, ratio: float, at_once: int, arm: str, gbps: float = 0.0
    ) -> Batch:
        return Batch(
            self.options.model,
            sum(lengths_of(self.options, at_once, number)),
            kind,
            arm,
            number,
            gbps,
            ratio,
            at_once=at_once,
            poisson=self.options.poisson,
        )

    async def _store(self, number: int, at_once: int) -> None:
        """Computes each prompt of a round's batch alone, until storage has them. The answers of the
        first run count.
        """
        options, made = self.options, []
        for place, ids in enumerate(prompts_of(options, at_once, number), 1):
            self.describe(f"round {number}, {at_once} at once: storing {place} of {at_once}")
            trial, self._page_bytes = await self.batches.trials.prime(
                options.model, ids, options.page
            )
            made.append(trial)
        base = dataclasses.replace(
            self._base(PRIME, number, 1.0, at_once, COMPUTE), load_over_compute=None
        )
        if self.log.reference(base) is None:
            self.log.keep(dataclasses.replace(base, requests=tuple(made)))

    async def _scales(self) -> list[Scale]:
        """What computing a prompt of each length takes, and the bytes of its prefix."""
        options, found = self.options, []
        for length in sorted(options.lengths):
            scale = self.log.scale(options.model, length)
            if scale is None:
                self.describe(f"{length:,} tokens: computing")
                middle = await self._compute_s(length, scale_prompt(options, length))
                nbytes = round(length // options.page * self._page_bytes)
                scale = Scale(options.model, length, options.page, nbytes, middle)
                self.log.add("scale", scale)
            found.append(scale)
        return found

    async def _compute_s(self, length: int, ids: Sequence[int]) -> float:
        made = []
        for _ in range(_CALIBRATIONS):
            base = Trial(self.options.model, length, WARM, COMPUTE, 0, 0.0)
            made.append(await self.batches.trials.run(base, ids))
            self.log.keep(made[-1])
        failed = next((one.error for one in made if one.error is not None), None)
        middle = percentile(seconds(made), 50)
        if failed is not None or middle is None:
            raise BenchError(
                f"a prompt of {len(ids)} tokens could not be computed: {failed or 'no token came'}"
            )
        return middle

    async def _learn(self, number: int, at_once: int, gbps: float, *, first: bool) -> None:
        """A restoration, unmeasured, so that the bandwidth is known; first that storage gives back
        all of a prefix, then each arm once.
        """
        options = self.options
        ids = max(prompts_of(options, at_once, number), key=len)
        length = len(ids) - options.page
        for arm in (LOAD, *(BOTH_ENDS,) * _CALIBRATIONS) if first else (BOTH_ENDS,):
            self.describe(f"{length:,} tokens: warming up {arm}")
            base = Trial(options.model, length, WARM, arm, 0, gbps)
            one = await self.batches.trials.run(base, ids, repeat=False)
            self.log.keep(one)
            if one.error is not None:
                raise BenchError(f"{arm}: the warm-up request failed: {one.error}")
            if arm == LOAD and (one.cached is None or one.cached.storage < length):
                found = "nothing" if one.cached is None else f"{one.cached.storage} tokens"
                raise BenchError(
                    f"{found} of a stored prefix of {length} tokens came back from storage. The "
                    "server needs --enable-cache-report, a device pool for the prompts and a host "
                    "pool at least as large"
                )
        for arm in options.arms if first else ():
            self.describe(f"{at_once} at once: warming up {arm}")
            base_batch = self._base(WARM, number, 1.0, at_once, arm, gbps)
            prompts = prompts_of(options, at_once, number)
            self.log.keep(
                await self.batches.run(base_batch, prompts, (0.0,) * at_once, repeat=False)
            )


def balanced_gbps(scales: Sequence[Scale]) -> float:
    """The bandwidth, in gigabits per second, that loads a prompt of each length in the time that
    computing them takes.
    """
    return sum(one.prefix_bytes for one in scales) * 8e-9 / sum(one.compute_s for one in scales)


def mean_service_s(scales: Sequence[Scale], ratio: float) -> float:
    """The mean of T* = Tc Tl / (Tc + Tl) over the lengths: seconds for one with both resources."""
    mean_s = sum(one.compute_s for one in scales) / len(scales)
    return mean_s * ratio / (1 + ratio)
