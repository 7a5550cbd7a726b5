"""`kvtier compare restore`, also `kvtier bench restore`: the grid of one restoration's arms, lengths and
bandwidths, or several restorations at a time by rule (`--at-once`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier import __version__
from sgl_kvtier.console import Progress, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import shape_of
from sgl_kvtier.lab.experiment.arms import check_names
from sgl_kvtier.lab.experiment.comparison import paced_notes
from sgl_kvtier.lab.experiment.frame import Experiment, check, work_folder
from sgl_kvtier.lab.experiment.machine import made_with
from sgl_kvtier.lab.experiment.restore.arms import (
    BATCH_ARMS,
    DEFAULT_BATCH_ARMS,
    DEFAULT_RESTORE_ARMS,
    RESTORE_ARMS,
    RestoreArm,
    check_restore_arms,
)
from sgl_kvtier.lab.experiment.restore.batch_cells import batch_results
from sgl_kvtier.lab.experiment.restore.cells import (
    LOGPROB_TOLERANCE,
    failures,
    is_sound,
    pace_of,
    results_of,
)
from sgl_kvtier.lab.experiment.restore.log import RestoreLog
from sgl_kvtier.lab.experiment.restore.plan import (
    DECODERS,
    MOST_DECODED,
    RestoreOptions,
    RestorePlan,
    all_lengths,
)
from sgl_kvtier.lab.experiment.restore.run import SLOW, Grid, Run, Together
from sgl_kvtier.lab.experiment.restore.server import Demand, Target, paced_of, started
from sgl_kvtier.lab.experiment.restore.trial import SLOWEST, UNWATCHED_S, Attempt, ServerCpu, Trials
from sgl_kvtier.lab.experiment.scenarios.restore_arguments import (
    FOREIGN_CORES,
    PACED_FOREIGN_CORES,
    add_arguments,
    check_arguments,
)
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.paced.launching import is_paced, of_server
from sgl_kvtier.lab.pages.cells import Kind
from sgl_kvtier.lab.pages.kinds import BATCHES, GRID

__all__ = ["add_arguments", "run"]

_COUNTED = "kvtier:restore_"
"""Prefix of the server's counters of restorations. Their growth over a run is in the result."""

_QUICK_ROUNDS, _ROUNDS = 2, 5
_PACED_CURVE_STEP = 2048
"""Tokens. One chunk of a paced device is a whole short prompt: its points are closer together."""
_RATIOS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)

_ALONE = (
    "All arms run in one server process; between two requests its device and host caches are emptied and it is waited for "
    "until it does nothing. Every second round goes backwards. Figures are medians.",
    "T_opt: the best split of the prefix on the compute curve measured in the same run (linear between its points), the "
    "loading taken as linear, no interference, then what a prompt takes whose prefix is in device memory. T* = Tc Tl / (Tc "
    "+ Tl) takes all tokens to cost the same, so that more than 100 % of it is possible.",
    "T_link: the same with loading as fast as the bandwidth that was set allows, and no more behind it than loading alone leaves. "
    "T_opt's loading is measured, so that what SGLang does while it loads (copies in host memory, waiting for the next look) is in it.",
    "The best single way (`speedup_vs_best_single`) is the better of computing and SGLang's own load, and our engine's load where "
    "the arm load_kvtier was measured.",
    "An arm that estimates the bandwidth restores once before it is measured in a cell; `first_ttft_ms` is that restoration, which "
    "expects the bandwidth of the cell before.",
    f"Equality: tokens, and log-probs to {LOGPROB_TOLERANCE:g}, against computing the whole prompt. Attempts that were disturbed and "
    "made again (`discarded` in `trials`) are compared as well; their times count for nothing.",
)

_REPEATED = (
    "A trial that lost more than 10 % of the time to its first token because this machine was too slow is made again. `pace` has "
    "the forwards up to the first token; every row of every prefix was checked.",
)
"""Of a paced device."""

HOLE = (
    "The first page of every prefix was deleted whenever the store was asked for it (--hole first). SGLang's own load ends at the first "
    "missing page: it reads nothing, so that there is no bound of loading and computing."
)

_TOGETHER = (
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


@dataclass(frozen=True)
class Mode:
    """One prefix at a time, or several: what is measured, and how it is shown. `lengths` are the
    prefixes by whether the device is a paced one and the run a quick one, in tokens; `ratios` are
    loading over computing, by whether it is a quick one.
    """

    run: type[Run]
    results: Callable[[RestoreLog], dict[str, Any]]
    kind: Kind
    arms: Mapping[str, RestoreArm]
    default_arms: Sequence[str]
    lengths: Mapping[tuple[bool, bool], Sequence[int]]
    ratios: Mapping[bool, Sequence[float]]
    standing: Sequence[str]


ALONE = Mode(
    Grid,
    results_of,
    GRID,
    RESTORE_ARMS,
    DEFAULT_RESTORE_ARMS,
    {
        (False, False): (2048, 4096, 8192, 16384),
        (False, True): (2048,),
        (True, False): (8192, 16384, 32768, 65536),
        (True, True): (8192, 16384),
    },
    {False: _RATIOS, True: (0.25, 0.5, 1.0, 2.0, 4.0)},
    _ALONE,
)
TOGETHER = Mode(
    Together,
    batch_results,
    BATCHES,
    BATCH_ARMS,
    DEFAULT_BATCH_ARMS,
    {
        (False, False): (1024, 2048, 3072, 4096),
        (False, True): (512, 1024),
        (True, False): (4096, 8192, 16384, 32768),
        (True, True): (4096, 8192),
    },
    {False: (1.0,), True: (1.0,)},
    _TOGETHER,
)


def mode_of(args: RestoreOptions) -> Mode:
    """What the options ask for."""
    return TOGETHER if args.at_once else ALONE


def run(given: argparse.Namespace) -> int:
    """Measures and reports. The exit status: 0, 1 when tokens or log-probs of an answer differed or
    a request failed, 130 after Ctrl-C. Raises KVTierError; where the bench could not go on, after
    what had been measured is reported.
    """
    args = RestoreOptions.of(given)
    check(args, starts_servers=args.url is None)
    check_arguments(args)
    mode, paced = mode_of(args), paced_of(args)
    if args.at_once:
        check_names(args.arms or mode.default_arms, list(mode.arms))
    else:
        check_restore_arms(args.arms or mode.default_arms)
    one = Restoring(args, RestoreLog.open(args.log, about(args)))
    return Experiment(
        args,
        mode.kind.schema,
        measure=one.measure,
        results=one.results,
        tables=mode.kind.tables,
        page=mode.kind.page,
        standing=[*([HOLE] if args.hole else ()), *paced_notes(paced, *_REPEATED), *standing(args)],
        notes=one.notes,
        measured=lambda: bool(one.log.batches if args.at_once else one.log.trials),
        sound=lambda result: is_sound(result["summary"]) and not one.lost_pace(),
    ).run()


@dataclass
class Restoring:
    """All models in turn, each on a server of its own. What is measured is in the log."""

    args: RestoreOptions
    log: RestoreLog
    commands: dict[str, Sequence[str]] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)

    def measure(self) -> None:
        """Every model. Raises BenchError when a server cannot be measured so."""
        for model in models_of(self.args):
            with self._target(model) as target:
                self.commands[model] = target.command
                self.measure_on(target, self.counters.setdefault(model, {}))

    def measure_on(self, target: Target, counters: dict[str, float]) -> None:
        """Everything of one model; the growth of the server's counters is added."""
        args = self.args

        async def go(shown: Progress) -> None:
            async with Client(
                target.url, admin_key=target.admin_key, dilation=args.dilation
            ) as client:
                begun = await client.metrics()
                if args.url is not None and of_server(begun.to_json()) is not None:
                    raise BenchError(
                        f"--url: {args.url} is on a paced device, whose own log cannot "
                        "be read there; leave --url out, and give --device paced:PROFILE"
                    )
                before = begun.sums(_COUNTED)
                try:
                    trials = self._trials(client, target)
                    run = mode_of(args).run(
                        options, trials, self.log, shown.advance, shown.describe
                    )
                    await run.run()
                finally:
                    after = (await client.metrics()).sums(_COUNTED)
                    counters.update({name: n - before.get(name, 0.0) for name, n in after.items()})

        options = options_of(args, target.model, target.page, target.chunk)
        with progress("restoring", mode_of(args).run.steps(options), "steps") as shown:
            asyncio.run(go(shown))

    def _trials(self, client: Client, target: Target) -> Trials:
        paced = paced_of(self.args)
        # A paced device takes its time however slow the machine is, and says what it lost.
        slowest = math.inf if self.args.at_once and paced is not None else SLOWEST
        return Trials(
            client,
            ServerCpu(target.pid),
            quiet_foreign=_foreign(self.args),
            slowest=slowest,
            discard=self.log.keep,
            bytes_scale=1.0 if paced is None else paced.bytes_scale,
            steps=None if target.pace_log is None else pace.Reader(target.pace_log),
            arms=mode_of(self.args).arms,
        )

    def attempts(self) -> Sequence[Attempt]:
        """What was measured."""
        return [*self.log.trials, *self.log.batches]

    def results(self) -> dict[str, Any]:
        """The result, as docs/manual/json.md has it."""
        args = self.args
        settings = {
            "threads": args.threads,
            "rounds": rounds_of(args),
            "slow_rounds": args.slow_rounds,
            "seed": args.seed,
            "hole": args.hole,
            "foreign_cores_limit": _foreign(args),
            "cores": os.cpu_count(),
            "server_commands": self.commands,
        }
        paced = paced_of(args)
        return {
            **({} if paced is None else {"device": {"paced": paced.document()}}),
            "settings": settings,
            **mode_of(args).results(self.log),
            **({} if paced is None else {"pace": pace_of(self.attempts(), paced.dilation)}),
            "counters": self.counters,
        }

    def notes(self) -> list[str]:
        """Notes that this run has to be read with."""
        log, args = self.log, self.args
        found = mode_of(args).results(log)
        notes = [*self.lost_pace(), *failures(self.attempts(), found["summary"]["errors"])]
        if log.continued:
            notes.append(f"{log.continued} trials were in the log before this run.")
        if not found["cells"]:
            notes.append("No cell was measured.")
        if args.url is not None and args.pid is None:
            notes.append(
                "Without --pid the server's processor use is not told from that of others: `foreign_cores` is null, no trial was made "
                f"again for it, and the server was left alone for {UNWATCHED_S:g} s before each."
            )
        return notes

    def lost_pace(self) -> list[str]:
        """A note for every arm that a paced device could not keep the pace of."""
        paced = paced_of(self.args)
        found = {} if paced is None else pace_of(self.attempts(), paced.dilation)
        return [note for arm, figures in found.items() for note in pace.verdict(arm, figures)]

    @contextlib.contextmanager
    def _target(self, model: str) -> Iterator[Target]:
        args, shape = self.args, shape_of(self.args, model)
        if args.url is not None:
            yield Target(model, args.url, args.admin_key, args.pid, shape.page, shape.chunk)
            return
        demand = demand_of(options_of(args, model, shape.page, shape.chunk))
        with work_folder(args.folder, lambda: False) as own:
            folder = own / Path(model).name
            shutil.rmtree(folder / "storage", ignore_errors=True)
            print(
                f"{model}: starting a server, its log is {folder / 'server.log'}", file=sys.stderr
            )
            with started(args, shape, model, demand, _decision_log(args, model), folder) as target:
                yield target


def standing(args: RestoreOptions) -> list[str]:
    """Notes that belong to every such result."""
    found = [*mode_of(args).standing]
    if args.slow_rounds is not None:
        found.append(
            f"An arm that takes more than {SLOW:g} times the best of its cell was measured in the first {args.slow_rounds} "
            "rounds only; `rounds` of each cell says how often each arm was."
        )
    return found


def models_of(args: RestoreOptions) -> list[str]:
    paced = paced_of(args)
    if paced is not None:
        return [paced.profile.name]
    default = "lab-mha" if shape_of(args).device == "cpu" else "lab-gpu-1b"
    return list(args.models or [default])


def _foreign(args: RestoreOptions) -> float:
    usual = PACED_FOREIGN_CORES if is_paced(args.device) else FOREIGN_CORES
    return usual if args.foreign is None else float(args.foreign)


def rounds_of(args: RestoreOptions) -> int:
    return args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)


def options_of(args: RestoreOptions, model: str, page: int, chunk: int) -> RestorePlan:
    """What is measured on a server of that page and chunk size."""
    mode, paced = mode_of(args), is_paced(args.device)
    decoders = DECODERS if args.decoders is None else args.decoders
    return RestorePlan(
        model=model,
        page=page,
        chunk=chunk,
        lengths=args.lengths or mode.lengths[paced, args.quick],
        ratios=args.load_over_compute or mode.ratios[args.quick],
        arms=args.arms or mode.default_arms,
        rounds=rounds_of(args),
        seed=args.seed,
        slow_rounds=args.slow_rounds,
        hole=args.hole is not None,
        curve_step=min(chunk, _PACED_CURVE_STEP) if paced else None,
        at_once=args.at_once or (),
        decoders=decoders if args.at_once else 0,
        poisson=args.poisson,
    )


def demand_of(options: RestorePlan) -> Demand:
    """What a server has to have room for."""
    if not options.at_once:
        return Demand(options.lengths)
    beside = options.decoders * MOST_DECODED
    return Demand(all_lengths(options), max(options.at_once), beside, options.decoders)


def _decision_log(args: RestoreOptions, model: str) -> str:
    if args.decision_log is None:
        return ""
    path: Path = args.decision_log.absolute()
    if len(args.models or ()) > 1:
        path = path.with_name(f"{path.stem}-{Path(model).name}{path.suffix}")
    return str(path)


def about(args: RestoreOptions) -> dict[str, Any]:
    """The settings that trials of one log have in common. Models, lengths, ratios, arms and rounds
    are not in it: a log may get more. Batches are of one mix beside as many that decode.
    """
    shape, paced = shape_of(args, ""), paced_of(args)
    options = options_of(args, "", shape.page, shape.chunk)
    mix = {"lengths": list(options.lengths), "decoders": options.decoders}
    return {
        "kvtier": __version__,
        "seed": args.seed,
        "url": args.url is not None,
        "device": shape.device,
        **made_with(shape.device),
        "dtype": shape.dtype,
        "threads": args.threads,
        "page_size": shape.page,
        "chunk": shape.chunk,
        "strict": False,  # was an option; logs from then go on, and results keep the field
        "server_args": args.server_arg,
        **(mix if args.at_once else {}),
        **({"hole": args.hole} if args.hole else {}),
        **({} if paced is None else {"paced": paced.document()}),
    }
