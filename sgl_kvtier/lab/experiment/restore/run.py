"""A run against one server: every arm restores the same stored prompts at every bandwidth, all in one
server process. Prompts are stored and computing them is timed, from which the bandwidths follow.
Then every arm runs once unmeasured, and rounds follow. A round goes through all bandwidths and arms,
the next one backwards.

One at a time (`Grid`): the same prompt in all rounds, length by length. The compute curve is measured
between rounds, at the beginning, in the middle and at the end. An arm that estimates the bandwidth
restores once before it is measured in a cell; that first restoration still expects the bandwidth of
the cell before, so it is kept apart.

Several at once (`Together`): each round has batches of its own. Every prompt is computed once alone,
which stores it and gives the answer that others are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.restore.arms import BOTH_ENDS, COMPUTE, LOAD, OURS, RESTORE_ARMS
from sgl_kvtier.lab.experiment.restore.plan import (
    RestorePlan,
    decoders_of,
    lengths_of,
    order,
    planned,
    prompt,
    prompts_of,
    scale_prompt,
)
from sgl_kvtier.lab.experiment.restore.trial import (
    FIRST,
    GRID,
    PAGE,
    PRIME,
    RESIDENT,
    WARM,
    Batch,
    RestoreLog,
    Scale,
    Trial,
    Trials,
    seconds,
)
from sgl_kvtier.lab.pages.stats import percentile

SLOW = 3.0
"""An arm that takes this many times as long as the best of its cell is slow: see
`RestorePlan.slow_rounds`.
"""

_CALIBRATIONS = 3


@dataclass
class Run:
    """What both have in common. What is measured is in the log, also when it is interrupted."""

    options: RestorePlan
    trials: Trials
    log: RestoreLog
    advance: Callable[[], None] = lambda: None
    describe: Callable[[str], None] = lambda _: None

    async def run(self) -> None:
        """Does it. Raises BenchError when the server cannot be measured so."""
        raise NotImplementedError

    def trial(self, length: int, kind: str, arm: str, number: int = 0, gbps: float = 0.0) -> Trial:
        """A trial that is to be made."""
        return Trial(self.options.model, length, kind, arm, number, gbps)

    async def scale(self, length: int, ids: Sequence[int], page_bytes: float) -> Scale:
        """What computing a prompt of a length takes, and the bytes of its prefix: those of the log,
        or measured now.
        """
        options = self.options
        scale = self.log.scale(options.model, length)
        if scale is not None:
            return scale
        made = []
        for _ in range(_CALIBRATIONS):
            made.append(await self.trials.run(self.trial(length, WARM, COMPUTE), ids))
            self.log.keep(made[-1])
        middle = percentile(seconds(made), 50)
        failed = next((one.error for one in made if one.error is not None), None)
        if failed is not None or middle is None:
            raise BenchError(_not_computed(ids, failed or "no token came"))
        nbytes = round(length // options.page * page_bytes)
        scale = Scale(options.model, length, options.page, nbytes, middle)
        self.log.add("scale", scale)
        return scale

    async def warm(self, base: Trial, ids: Sequence[int], least: int) -> None:
        """A restoration that is not measured, of which at least so many tokens come from storage."""
        self.describe(f"{base.length:,} tokens: warming up {base.arm}")
        one = await self.trials.run(base, ids, repeat=False)
        self.log.keep(one)
        if one.error is not None:
            raise BenchError(f"{base.arm}: the warm-up request failed: {one.error}")
        if least and (one.cached is None or one.cached.storage < least):
            found = "nothing" if one.cached is None else f"{one.cached.storage} tokens"
            raise BenchError(
                f"{found} of a stored prefix of {base.length} tokens came back from storage. The server needs "
                "--enable-cache-report, a device pool for the prompts and a host pool at least as large"
            )


def _not_computed(ids: Sequence[int], why: str) -> str:
    return f"a prompt of {len(ids)} tokens could not be computed: {why}"


class Grid(Run):
    """One restoration at a time."""

    async def run(self) -> None:
        for length in self.options.lengths:
            if self._is_left(length):
                await self._run_length(length)
            else:
                for _ in planned(self.options, length):
                    self.advance()

    def _is_left(self, length: int) -> bool:
        """Whether something of a length is not measured yet, or failed."""
        small = any(self.log.failed(self.options.model, length, kind) for kind in (RESIDENT, PAGE))
        return small or not all(self._is_made(trial) for trial in planned(self.options, length))

    def _is_made(self, trial: Trial) -> bool:
        """With the restoration before it, where its arm has one."""
        restores_first = trial.kind == GRID and RESTORE_ARMS[trial.arm].estimates
        return self.log.has(trial) and (
            not restores_first or self.log.has(dataclasses.replace(trial, kind=FIRST))
        )

    async def _run_length(self, length: int) -> None:
        options = self.options
        ids = prompt(options, length)
        self.describe(f"{options.model} {length:,} tokens: storing")
        primed, page_bytes = await self.trials.prime(options.model, ids, options.page)
        self.log.keep(primed)
        scale = await self.scale(length, ids, page_bytes)
        await self._small(length, ids)
        # The loading arm has to bring all of the prefix, ours some of one with a hole.
        loader, least = (OURS, 1) if options.hole else (LOAD, length)
        for arm in options.arms:
            for _ in range(_CALIBRATIONS if RESTORE_ARMS[arm].estimates else 1):
                base = self.trial(length, WARM, arm, gbps=scale.gbps(1.0))
                await self.warm(base, ids, least if arm == loader else 0)
        for wanted in planned(options, length):
            ratio = wanted.load_over_compute
            gbps = 0.0 if ratio is None else scale.gbps(ratio)
            await self._measure(dataclasses.replace(wanted, gbps=gbps), ids)
            self.advance()

    async def _small(self, length: int, ids: Sequence[int]) -> None:
        """Measures a request without its prefix: a prompt of one page, and the prompt while it is
        still in device memory.
        """
        page = self.options.page
        for number in range(1, _CALIBRATIONS + 1):
            base = self.trial(length, RESIDENT, COMPUTE, number)
            base = dataclasses.replace(base, prompt_tokens=len(ids))
            if not self.log.has(base):
                warm = self.trial(length, WARM, COMPUTE)
                warm = await self.trials.run(warm, ids, repeat=False)
                if warm.error is not None:
                    raise BenchError(_not_computed(ids, warm.error))
                self.log.keep(await self.trials.run(base, ids, flush=False))
            base = dataclasses.replace(base, kind=PAGE, prompt_tokens=page)
            if not self.log.has(base):
                self.log.keep(await self.trials.run(base, ids[:page]))

    async def _measure(self, base: Trial, ids: Sequence[int]) -> None:
        """A trial of a round, unless it was made. An arm that estimates the bandwidth restores once
        before it.
        """
        ratio = base.load_over_compute
        what = f"compute curve, {base.prompt_tokens:,}"
        if ratio is not None:
            what = f"load/compute {ratio:g}, {base.arm}"
        self.describe(f"{base.model} {base.length:,} tokens, round {base.round}, {what}")
        missing = not self.log.has(base)
        if self._is_made(base) or (missing and self._is_spared(base)):
            return
        if ratio is not None and RESTORE_ARMS[base.arm].estimates:
            first = dataclasses.replace(base, kind=FIRST)
            self.log.keep(await self.trials.run(first, ids, repeat=False))
        if missing:
            self.log.keep(await self.trials.run(base, ids[: base.prompt_tokens]))

    def _is_spared(self, base: Trial) -> bool:
        limit = self.options.slow_rounds
        if limit is None or base.round <= limit:
            return False
        made = self.log.of(base.model, base.length, GRID)
        cell = [t for t in made if t.load_over_compute == base.load_over_compute]
        best = min(seconds(cell), default=0.0)
        mine = percentile(seconds(t for t in cell if t.arm == base.arm), 50)
        return mine is not None and mine > SLOW * best


class Together(Run):
    """Several restorations at once."""

    async def run(self) -> None:
        options = self.options
        numbers = range(1, options.rounds + 1)
        left = [(number, *cell) for number in numbers for cell in order(options, number)]
        wanted = [one for one in left if not self.log.has(self._base(GRID, *one))]
        for _ in range(len(left) - len(wanted)):
            self.advance()
        page_bytes = 0.0
        for number, at_once in dict.fromkeys((one[0], one[2]) for one in wanted):
            page_bytes = await self._store(number, at_once)
        scales = [
            await self.scale(length, scale_prompt(options, length), page_bytes)
            for length in sorted(options.lengths if wanted else ())
        ]
        last_gbps = None
        for number, ratio, at_once, arm in wanted:
            gbps = balanced_gbps(scales) / ratio
            if gbps != last_gbps:
                await self._learn(number, at_once, gbps, first=last_gbps is None)
                last_gbps = gbps
            self.describe(f"round {number}, {at_once} at once, load/compute {ratio:g}, {arm}")
            base = self._base(GRID, number, ratio, at_once, arm, gbps)
            prompts = prompts_of(options, at_once, number)
            self.log.keep(await self.trials.batch(base, prompts, decoders_of(options)))
            self.advance()

    def _base(
        self, kind: str, number: int, ratio: float | None, at_once: int, arm: str, gbps: float = 0.0
    ) -> Batch:
        options = self.options
        tokens = sum(lengths_of(options, at_once, number))
        base = Batch(options.model, tokens, kind, arm, number, gbps, ratio)
        return dataclasses.replace(base, at_once=at_once)

    async def _store(self, number: int, at_once: int) -> float:
        """Computes each prompt of a round's batch alone, until storage has them. The answers of the
        first run count. The bytes of a page.
        """
        options, made, page_bytes = self.options, [], 0.0
        for place, ids in enumerate(prompts_of(options, at_once, number), 1):
            self.describe(f"round {number}, {at_once} at once: storing {place} of {at_once}")
            trial, page_bytes = await self.trials.prime(options.model, ids, options.page)
            made.append(trial)
        base = self._base(PRIME, number, None, at_once, COMPUTE)
        if self.log.reference(base) is None:
            self.log.keep(dataclasses.replace(base, requests=tuple(made)))
        return page_bytes

    async def _learn(self, number: int, at_once: int, gbps: float, *, first: bool) -> None:
        """A restoration, unmeasured, so that the bandwidth is known; first that storage gives back
        all of a prefix, then each arm once.
        """
        options = self.options
        prompts = prompts_of(options, at_once, number)
        ids = max(prompts, key=len)
        length = len(ids) - options.page
        for arm in (LOAD, *(BOTH_ENDS,) * _CALIBRATIONS) if first else (BOTH_ENDS,):
            base = self.trial(length, WARM, arm, gbps=gbps)
            await self.warm(base, ids, length if arm == LOAD else 0)
        for arm in options.arms if first else ():
            self.describe(f"{at_once} at once: warming up {arm}")
            batch = self._base(WARM, number, 1.0, at_once, arm, gbps)
            made = await self.trials.batch(batch, prompts, decoders_of(options), repeat=False)
            self.log.keep(made)


def steps(options: RestorePlan) -> int:
    """How much there is to do."""
    if options.at_once:
        return options.rounds * len(order(options, 1))
    return sum(len(list(planned(options, length))) for length in options.lengths)


def balanced_gbps(scales: Sequence[Scale]) -> float:
    """The bandwidth, in gigabits per second, that loads a prompt of each length in the time that
    computing them takes.
    """
    return sum(one.prefix_bytes for one in scales) * 8e-9 / sum(one.compute_s for one in scales)
