"""`kvtier compare restore --at-once`: several restorations at a time, by rule."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.console import Progress
from sgl_kvtier.lab.experiment.arms import check_names
from sgl_kvtier.lab.experiment.batches.arms import BATCH_ARMS, DEFAULT_BATCH_ARMS
from sgl_kvtier.lab.experiment.batches.batch import Batches, BatchLog
from sgl_kvtier.lab.experiment.batches.draw import (
    DECODERS,
    LENGTHS,
    MOST_DECODED,
    PACED_LENGTHS,
    BatchOptions,
    all_lengths,
    decoders_of,
    order,
)
from sgl_kvtier.lab.experiment.batches.figures import batch_results
from sgl_kvtier.lab.experiment.batches.run import BatchRun
from sgl_kvtier.lab.experiment.frame import Experiment
from sgl_kvtier.lab.experiment.restore.arms import RestoreArm
from sgl_kvtier.lab.experiment.restore.cells import LOGPROB_TOLERANCE, is_sound
from sgl_kvtier.lab.experiment.restore.server import Demand, Target, paced_of
from sgl_kvtier.lab.experiment.restore.trial import Attempt, Trials
from sgl_kvtier.lab.experiment.scenarios.restore_grid import (
    Restoring,
    about,
    paced_notes,
    rounds_of,
)
from sgl_kvtier.lab.paced.launching import is_paced
from sgl_kvtier.lab.pages.restore.batches import SCHEMA, batch_page, batch_tables

_QUICK_LENGTHS, _PACED_QUICK_LENGTHS = (512, 1024), (4096, 8192)

STANDING = (
    "All arms run in one server process and are asked for the same batches; before each its device and host caches are emptied and "
    "it is waited for until it does nothing. Every second round goes backwards, and each has batches of its own.",
    "Time to first token is from a request's own sending, makespan from the first sending to the last first token. Percentiles are of "
    "all requests of a cell, makespans are medians over rounds.",
    "The bandwidth is the one that loads one prefix of each length in the time that computing them takes, one by one, over "
    "`load_over_compute`.",
    "Gaps between tokens are of requests that decode beside, begun before the batch and ended after it, as far as the batch is under "
    "way.",
    f"Equality: tokens, and log-probs to {LOGPROB_TOLERANCE:g}, against computing each prompt alone. `beside_equal_fraction` compares "
    "those that decode with the first that did.",
)


def run_batches(args: argparse.Namespace) -> int:
    """Measures and reports; the exit status."""
    check_names(args.arms or DEFAULT_BATCH_ARMS, list(BATCH_ARMS))
    one = Together(args, BatchLog.open(args.log, _about(args)))
    return Experiment(
        args,
        SCHEMA,
        measure=one.measure,
        results=one.results,
        tables=batch_tables,
        page=batch_page,
        standing=[*paced_notes(paced_of(args)), *STANDING],
        notes=one.notes,
        measured=lambda: bool(one.log.batches),
        sound=lambda result: is_sound(result["summary"]) and not one.lost_pace(),
    ).run()


class Together(Restoring):
    """Batches of restorations."""

    log: BatchLog

    @property
    def arms(self) -> Mapping[str, RestoreArm]:
        return BATCH_ARMS

    @property
    def slowest(self) -> float:
        # A paced device takes its time however slow the machine is, and says what it lost.
        return math.inf if is_paced(self.args.device) else super().slowest

    def demand(self, model: str, page: int, chunk: int) -> Demand:
        del chunk
        options = _options(self.args, model, page)
        return Demand(
            all_lengths(options),
            max(options.at_once),
            options.decoders * MOST_DECODED,
            options.decoders,
        )

    def steps(self, target: Target) -> int:
        options = _options(self.args, target.model, target.page)
        return options.rounds * len(order(options, 1))

    async def trials_on(self, target: Target, trials: Trials, shown: Progress) -> None:
        options = _options(self.args, target.model, target.page)
        batches = Batches(trials, decoders_of(options))
        await BatchRun(options, batches, self.log, shown.advance, shown.describe).run()

    def attempts(self) -> Sequence[Attempt]:
        return [*self.log.trials, *self.log.batches]

    def found(self) -> dict[str, Any]:
        return batch_results(self.log)


def _options(args: argparse.Namespace, model: str, page: int) -> BatchOptions:
    paced = is_paced(args.device)
    usual = (PACED_LENGTHS, _PACED_QUICK_LENGTHS) if paced else (LENGTHS, _QUICK_LENGTHS)
    return BatchOptions(
        model=model,
        page=page,
        at_once=args.at_once,
        lengths=args.lengths or usual[args.quick],
        ratios=args.load_over_compute or (1.0,),
        arms=args.arms or DEFAULT_BATCH_ARMS,
        rounds=rounds_of(args),
        seed=args.seed,
        decoders=DECODERS if args.decoders is None else args.decoders,
        poisson=args.poisson,
    )


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """Batches of one log have these in common; sizes, arms, ratios and rounds may be others."""
    options = _options(args, "", 1)
    return {**about(args), "lengths": list(options.lengths), "decoders": options.decoders}
