"""Restoration while bandwidth and compute change, against the best fixed split in hindsight (as
Cake, section 5.7).

The bandwidth follows a seeded trace from 1/4 to 4 times the balanced one. It is changed in the
running server while it restores. Compute is disturbed by a seeded stream of other requests. The
best fixed split is found by measuring, with the split fixed beforehand. So it includes the chunks'
fixed cost and the other requests. It is predicted as well. For that, all splits are tried with the
changes as they were made, and the compute curve measured under the same disturbance.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from sgl_kvtier.lab.experiment.restore.arms import BOTH_ENDS, COMPUTE, LOAD, OURS
from sgl_kvtier.lab.experiment.restore.bound import Best, ComputeCurve, best_split
from sgl_kvtier.lab.experiment.restore.cells import (
    curve_of,
    equality,
    errors_by_arm,
    resident_seconds,
)
from sgl_kvtier.lab.experiment.restore.log import RestoreLog, Scale, seconds
from sgl_kvtier.lab.experiment.restore.trace import (
    BandwidthDriver,
    BandwidthTrace,
    OtherRequests,
    OtherRequestsDriver,
    together,
)
from sgl_kvtier.lab.experiment.restore.trial import Beside, Trial, Trials
from sgl_kvtier.lab.experiment.rounds import backwards
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.pages.stats import percentile

BANDWIDTH, COMPUTING, BOTH = "bandwidth", "compute", "both"
KINDS = (BANDWIDTH, COMPUTING, BOTH)
_PIECES = 8
_POINTS = 4
_COARSE, _FINE = 8, 16
_LOOKS = 2

Measure = Callable[[float | None], Awaitable[Trial]]
"""One trial with that share of the prefix computed, fixed beforehand. None: as our planner
decides.
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
        for share in backwards(coarse, look + 1):
            found.by_share.setdefault(share, []).append(await measure(share))
    best = found.best
    fine = [share for share in (best - 1 / _FINE, best, best + 1 / _FINE) if 0 <= share <= 1]
    for number in range(rounds):
        for each in backwards([*fine, None], number + 1):
            same = found.ours if each is None else found.by_share.setdefault(each, [])
            same.append(await measure(each))
    found.finalists = tuple(fine)
    found.trials = [trial for trials in found.by_share.values() for trial in trials]
    for share in fine:
        found.by_share[share] = found.by_share[share][-rounds:]
    return found


@dataclass(frozen=True)
class FluctuationOptions:
    """How many traces of each kind, and how often each is measured."""

    traces: int = 3
    rounds: int = 3
    kinds: Sequence[str] = KINDS
    seed: int = 0


class Fluctuation:
    """The traces of one length, after its grid: the prompt is stored and its compute curve
    measured.
    """

    def __init__(
        self,
        options: FluctuationOptions,
        trials: Trials,
        log: RestoreLog,
        scale: Scale,
        ids: Sequence[int],
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._trials = trials
        self._log = log
        self._scale = scale
        self._ids = ids
        self._advance = advance

    async def run(self) -> None:
        """All kinds and traces that the log does not have, or not without a failure."""
        for kind in self._options.kinds:
            for number in range(self._options.traces):
                if not self._known(kind, number):
                    self._log.add("fluctuation", await self._trace(kind, number))
                self._advance()

    def _known(self, kind: str, number: int) -> bool:
        place = (self._scale.model, self._scale.length, kind, number, self._options.seed)
        return any(
            (c["model"], c["length"], c["kind"], c["trace"], c["seed"]) == place
            and c["rounds"] >= self._options.rounds
            and not sum(c["errors"].values())
            for c in self._log.fluctuations
        )

    async def _trace(self, kind: str, number: int) -> dict[str, Any]:
        scale, seed = self._scale, 1000 * self._options.seed + number
        total = 6 * scale.compute_s
        # About as many pieces during a balanced restoration as Cake's traces show.
        pieces = BandwidthTrace.seeded(seed, scale.gbps(1.0), scale.compute_s / _PIECES, total)
        trace = BandwidthTrace((0.0,), (scale.gbps(1.0),)) if kind == COMPUTING else pieces
        others = (
            None
            if kind == BANDWIDTH
            else OtherRequests.seeded(seed, scale.compute_s / _PIECES, total)
        )
        begun = len(self._log.trials)
        curve = (
            curve_of(self._log, scale)
            if others is None
            else await self._disturbed_curve(kind, number, others)
        )
        found: list[Trial] = []
        ends: list[Best] = []
        changes: list[BandwidthTrace] = []
        changes_fixed: dict[float | None, list[BandwidthTrace]] = {}
        for round_number in range(1, self._options.rounds + 1):
            arms = (COMPUTE, LOAD, OURS) if round_number % 2 else (OURS, LOAD, COMPUTE)
            for arm in arms:
                one, applied = await self._once(kind, number, round_number, arm, trace, others)
                found.append(one)
                if arm == OURS:
                    ends.append(self._hindsight(curve, applied))
                    changes.append(applied)

        async def fixed_at(share: float | None) -> Trial:
            arm = OURS if share is None else BOTH_ENDS
            one, applied = await self._once(kind, number, 0, arm, trace, others, share)
            changes_fixed.setdefault(share, []).append(applied)
            return one

        fixed = await measure_fixed(fixed_at, self._options.rounds)
        await self._trials.switch.free_split()
        counted = len(fixed.by_share[fixed.best])  # the last of its trials
        applied_to = {
            OURS: changes,
            "kvtier_beside_fixed": changes_fixed[None],
            "fixed": changes_fixed[fixed.best][-counted:],
        }
        return {
            **self._cell(kind, number, trace, found, ends, fixed),
            "errors": errors_by_arm(self._log.trials[begun:]),
            "applied": {name: [asdict(one) for one in each] for name, each in applied_to.items()},
        }

    async def _disturbed_curve(self, kind: str, number: int, others: OtherRequests) -> ComputeCurve:
        """Computing parts of the prompt beside the same stream of other requests."""
        points = {}
        for part in range(1, _POINTS + 1):
            tokens = self._scale.length * part // _POINTS // self._scale.page * self._scale.page
            base = Trial(
                self._scale.model, self._scale.length, f"{kind}/{number}/curve", COMPUTE, 0, 0.0
            )
            times = []
            for _ in range(self._options.rounds):
                driver = OtherRequestsDriver(self._trials.client, others)
                one = await self._trials.run(base, self._ids[:tokens], beside=driver)
                self._log.keep(one)
                times += seconds([one])
            if (middle := percentile(times, 50)) is not None:
                points[tokens] = middle
        return ComputeCurve(points, curve_of(self._log, self._scale).request_s)

    async def _once(
        self,
        kind: str,
        number: int,
        round_number: int,
        arm: str,
        trace: BandwidthTrace,
        others: OtherRequests | None,
        share: float | None = None,
    ) -> tuple[Trial, BandwidthTrace]:
        bandwidth = BandwidthDriver(self._trials.switch, trace)
        stream = [OtherRequestsDriver(self._trials.client, others)] if others is not None else []
        beside: Beside = partial(_beside, drivers=(bandwidth, *stream))
        base = Trial(
            self._scale.model,
            self._scale.length,
            f"{kind}/{number}",
            arm,
            round_number,
            trace.gbps[0],
            fixed_split=share,
        )
        one = await self._trials.run(base, self._ids, beside=beside, repeat=False)
        self._log.keep(one)
        return one, bandwidth.applied

    def _hindsight(self, curve: ComputeCurve, applied: BandwidthTrace) -> Best:
        scale = self._scale
        per_token = scale.prefix_bytes / scale.length
        rest = resident_seconds(self._log, scale)
        return best_split(
            scale.length, scale.page, curve.seconds, lambda n: applied.seconds(n * per_token), rest
        )

    def _cell(
        self,
        kind: str,
        number: int,
        trace: BandwidthTrace,
        found: Sequence[Trial],
        ends: Sequence[Best],
        fixed: FixedSplits,
    ) -> dict[str, Any]:
        ours = [t for t in found if t.arm == OURS]
        pairs = zip(ours, ends, strict=True)
        over = [t.ttft_s / end.seconds for t, end in pairs if t.ttft_s is not None]
        middle = {
            arm: percentile(seconds(t for t in found if t.arm == arm), 50)
            for arm in (COMPUTE, LOAD, OURS)
        }
        best_s, ours_s = fixed.middle(fixed.best), percentile(seconds(fixed.ours), 50)
        loaded = [t.cached.storage + t.cached.host for t in ours if t.cached is not None]
        return {
            "model": self._scale.model,
            "length": self._scale.length,
            "kind": kind,
            "trace": number,
            "ttft_ms": {arm: milliseconds(value) for arm, value in middle.items()},
            "fixed_ms": milliseconds(best_s),
            "fixed_computed_share": fixed.best,
            "kvtier_beside_fixed_ms": milliseconds(ours_s),
            "over_fixed": ours_s / best_s if ours_s and best_s else None,
            "fixed_splits_ms": {
                f"{share:.4f}": milliseconds(fixed.middle(share))
                for share in sorted(fixed.by_share)
            },
            "hindsight_ms": milliseconds(percentile([end.seconds for end in ends], 50)),
            "over_hindsight": percentile(over, 50),
            "over_hindsight_each": over,
            "loaded_tokens": {OURS: percentile(loaded, 50)},
            "hindsight_loaded_tokens": percentile(
                [self._scale.length - end.computed_tokens for end in ends], 50
            ),
            "gbps": list(trace.gbps),
            "seed": self._options.seed,
            "rounds": self._options.rounds,
            **equality(self._log, self._scale, [*found, *fixed.trials, *fixed.ours]),
        }


async def _beside(over: Any, drivers: Sequence[BandwidthDriver | OtherRequestsDriver]) -> None:
    await together(over, *drivers)
