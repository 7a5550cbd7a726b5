"""The grid: every arm restores the same stored prompts at every bandwidth, all in one server
process.

Per length: prime a prompt, measure what computing it takes, and derive the bandwidths from that.
Then every arm runs once unmeasured, and rounds follow. A round goes through all bandwidths and
arms, the next one backwards. The compute curve is measured between rounds, at the beginning, in the
middle and at the end.

An arm that estimates the bandwidth restores once before it is measured in a cell. That first
restoration still expects the bandwidth of the cell before, so it is kept apart.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.restore.arms import (
    COMPUTE,
    DEFAULT_RESTORE_ARMS,
    LOAD,
    OURS,
    RESTORE_ARMS,
)
from sgl_kvtier.lab.experiment.restore.bound import curve_points
from sgl_kvtier.lab.experiment.restore.log import (
    CURVE,
    FIRST,
    GRID,
    PAGE,
    RESIDENT,
    WARM,
    RestoreLog,
    Scale,
    seconds,
)
from sgl_kvtier.lab.experiment.restore.trial import Trial, Trials
from sgl_kvtier.lab.experiment.rounds import backwards
from sgl_kvtier.lab.pages.stats import percentile

RATIOS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)
LENGTHS = (2048, 4096, 8192, 16384)
PACED_LENGTHS = (8192, 16384, 32768, 65536)
CURVE_ROUNDS = 3
SLOW = 3.0
"""An arm that takes this many times as long as the best of its cell is slow: see
`GridOptions.slow_rounds`.
"""

_CALIBRATIONS = 3
_BYTES = 256


@dataclass(frozen=True)
class GridOptions:
    """Options of a grid. `slow_rounds` is the number of first rounds that measure slow arms; None:
    all.

    `ratios` are loading over computing. `page` and `chunk` are the server's.
    """

    model: str
    page: int
    chunk: int
    lengths: Sequence[int] = LENGTHS
    ratios: Sequence[float] = RATIOS
    arms: Sequence[str] = DEFAULT_RESTORE_ARMS
    rounds: int = 5
    slow_rounds: int | None = None
    seed: int = 0
    always_store: bool = False
    """Prime and warm up also where every trial is in the log already: something else follows that
    needs it.
    """
    hole: bool = False
    """The first page of every prefix is gone when storage is asked for it: SGLang's load reads
    nothing.
    """
    curve_step: int | None = None
    """Tokens between two points of the compute curve; None: a chunk."""

    def curve_points(self, length: int) -> list[int]:
        """Where the compute curve of a length is measured."""
        return curve_points(length, self.curve_step or self.chunk)


@dataclass
class Grid:
    """One run against one server. What it measures is in the log, also when it is interrupted."""

    options: GridOptions
    trials: Trials
    log: RestoreLog
    advance: Callable[[], None] = lambda: None
    describe: Callable[[str], None] = lambda _: None

    async def run(self) -> None:
        """All lengths. Raises BenchError when the server cannot be measured so."""
        for length in self.options.lengths:
            if self.options.always_store or self._is_left(length):
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
        scale = self.log.scale(options.model, length) or await self._calibrate(
            length, ids, page_bytes
        )
        await self._small(scale, ids)
        await self._warm_up(scale, ids)
        for number in range(1, options.rounds + 1):
            if number in curve_rounds(options.rounds):
                await self._curve(scale, ids, number)
            for ratio, arm in order(options, number):
                await self._cell(scale, ids, number, ratio, arm)

    async def _calibrate(self, length: int, ids: Sequence[int], page_bytes: float) -> Scale:
        options = self.options
        base = Trial(options.model, length, WARM, COMPUTE, 0, 0.0)
        made = [await self.trials.run(base, ids) for _ in range(_CALIBRATIONS)]
        for one in made:
            self.log.keep(one)
        failed = next((one.error for one in made if one.error is not None), None)
        middle = percentile(seconds(made), 50)
        if failed is not None or middle is None:
            raise BenchError(
                f"a prompt of {len(ids)} tokens could not be computed: {failed or 'no token came'}"
            )
        scale = Scale(
            options.model, length, options.page, round(length // options.page * page_bytes), middle
        )
        self.log.add("scale", scale)
        return scale

    async def _small(self, scale: Scale, ids: Sequence[int]) -> None:
        """Measures a request without its prefix: a prompt of one page, and the prompt while it is
        still in device memory.
        """
        for number in range(_CALIBRATIONS):
            base = Trial(
                scale.model,
                scale.length,
                RESIDENT,
                COMPUTE,
                number + 1,
                0.0,
                prompt_tokens=len(ids),
            )
            if not self.log.has(base):
                warm = await self.trials.run(
                    Trial(scale.model, scale.length, WARM, COMPUTE, 0, 0.0), ids, repeat=False
                )
                if warm.error is not None:
                    raise BenchError(
                        f"a prompt of {len(ids)} tokens could not be computed: {warm.error}"
                    )
                self.log.keep(await self.trials.run(base, ids, flush=False))
            one = Trial(
                scale.model,
                scale.length,
                PAGE,
                COMPUTE,
                number + 1,
                0.0,
                prompt_tokens=self.options.page,
            )
            if not self.log.has(one):
                self.log.keep(await self.trials.run(one, ids[: self.options.page]))

    async def _warm_up(self, scale: Scale, ids: Sequence[int]) -> None:
        """Every arm once, so that costs and bandwidths are known; the loading one has to bring all
        of the prefix, ours some of one with a hole.
        """
        gbps = scale.gbps(1.0)
        loader, least = (OURS, 1) if self.options.hole else (LOAD, scale.length)
        for arm in self.options.arms:
            for _ in range(3 if RESTORE_ARMS[arm].estimates else 1):
                self.describe(f"{scale.model} {scale.length:,} tokens: warming up {arm}")
                one = await self.trials.run(
                    Trial(scale.model, scale.length, WARM, arm, 0, gbps), ids, repeat=False
                )
                self.log.keep(one)
                if one.error is not None:
                    raise BenchError(f"{arm}: the warm-up request failed: {one.error}")
                if arm == loader and (one.cached is None or one.cached.storage < least):
                    found = "nothing" if one.cached is None else f"{one.cached.storage} tokens"
                    raise BenchError(
                        f"{found} of a stored prefix of {scale.length} tokens came back from storage. The server needs "
                        "--enable-cache-report, a device pool for the prompt and a host pool at least as large"
                    )

    async def _curve(self, scale: Scale, ids: Sequence[int], number: int) -> None:
        for tokens in self.options.curve_points(scale.length):
            base = Trial(
                scale.model, scale.length, CURVE, COMPUTE, number, 0.0, prompt_tokens=tokens
            )
            self.describe(f"{scale.model} {scale.length:,} tokens: compute curve, {tokens:,}")
            if not self.log.has(base):
                self.log.keep(await self.trials.run(base, ids[:tokens]))
            self.advance()

    async def _cell(
        self, scale: Scale, ids: Sequence[int], number: int, ratio: float, arm: str
    ) -> None:
        self.describe(
            f"{scale.model} {scale.length:,} tokens, round {number}, load/compute {ratio:g}, {arm}"
        )
        base = Trial(
            scale.model,
            scale.length,
            GRID,
            arm,
            number,
            scale.gbps(ratio),
            ratio,
            prompt_tokens=len(ids),
        )
        missing = not self.log.has(base)
        if not self._is_made(base) and not (missing and self._is_spared(base)):
            if RESTORE_ARMS[arm].estimates:
                self.log.keep(
                    await self.trials.run(dataclasses.replace(base, kind=FIRST), ids, repeat=False)
                )
            if missing:
                self.log.keep(await self.trials.run(base, ids))
        self.advance()

    def _is_spared(self, base: Trial) -> bool:
        limit = self.options.slow_rounds
        if limit is None or base.round <= limit:
            return False
        cell = [
            t
            for t in self.log.of(base.model, base.length, GRID)
            if t.load_over_compute == base.load_over_compute
        ]
        best = min(seconds(cell), default=0.0)
        mine = percentile(seconds(t for t in cell if t.arm == base.arm), 50)
        return mine is not None and mine > SLOW * best


def order(options: GridOptions, number: int) -> list[tuple[float, str]]:
    """Bandwidths and arms of a round: every second one backwards."""
    return backwards([(ratio, arm) for ratio in options.ratios for arm in options.arms], number)


def curve_rounds(rounds: int) -> list[int]:
    """Before which rounds the compute curve is measured."""
    return sorted({1, (rounds + 1) // 2, rounds})[:CURVE_ROUNDS]


def planned(options: GridOptions, length: int) -> Iterator[Trial]:
    """Every trial of a length that is counted as progress, as far as it is known in advance."""
    for number in range(1, options.rounds + 1):
        if number in curve_rounds(options.rounds):
            for tokens in options.curve_points(length):
                yield Trial(
                    options.model, length, CURVE, COMPUTE, number, 0.0, prompt_tokens=tokens
                )
        for ratio, arm in order(options, number):
            yield Trial(
                options.model,
                length,
                GRID,
                arm,
                number,
                0.0,
                ratio,
                prompt_tokens=length + options.page,
            )


def prompt(options: GridOptions, length: int) -> list[int]:
    """The prompt of a length: a prefix that can be restored and one page more. The page's last
    token has to be computed.
    """
    seed = zlib.crc32(f"{options.seed}:{options.model}:{length}".encode())
    return random.Random(seed).choices(range(_BYTES), k=length + options.page)
