"""`kvtier compare restore`: the grid of one restoration's arms, lengths and
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import not_negative, positive
from sgl_kvtier.console import Progress, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    RUN,
    SERVER,
    add_options,
    each_once,
    server_shown,
    shape_of,
    words,
)
from sgl_kvtier.lab.experiment.arms import check_names
from sgl_kvtier.lab.experiment.comparison import device_of, paced_notes
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
from sgl_kvtier.lab.experiment.restore.cells import (
    LOGPROB_TOLERANCE,
    batch_results,
    failures,
    is_sound,
    pace_of,
    results_of,
)
from sgl_kvtier.lab.experiment.restore.plan import DECODERS, RestoreOptions, RestorePlan
from sgl_kvtier.lab.experiment.restore.run import SLOW, Grid, Run, Together, steps
from sgl_kvtier.lab.experiment.restore.server import Target, paced_of, started
from sgl_kvtier.lab.experiment.restore.trial import SLOWEST, Attempt, RestoreLog, ServerCpu, Trials
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.model_shapes import DRAWN, SHAPES, UNWEIGHTED
from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.paced.launching import is_paced
from sgl_kvtier.lab.pages.cells import Kind
from sgl_kvtier.lab.pages.kinds import BATCHES, GRID
from sgl_kvtier.launch import detect_device
from sgl_kvtier.outside import is_number, is_whole

FOREIGN_CORES, PACED_FOREIGN_CORES = 0.1, 0.5
"""Defaults of --foreign: a paced server leaves most of its cores to others."""

_COUNTED = "kvtier:restore_"
"""Prefix of the server's counters of restorations. Their growth over a run is in the result."""

_QUICK_ROUNDS, _ROUNDS = 2, 5
_PACED_CURVE_STEP = 2048
"""Tokens. One chunk of a paced device is a whole short prompt: its points are closer together."""
_RATIOS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0, 16.0)

_ALONE = (
    "All configurations run in one server process; between two requests its device and host caches are emptied and it is waited for "
    "until it does nothing. Every second round goes backwards. Figures are medians.",
    "T_opt: the best split of the prefix on the compute curve measured in the same run (linear between its points), the "
    "loading taken as linear, no interference, then what a prompt takes whose prefix is in device memory. The loading is measured, so that "
    "what SGLang does while it loads (copies in host memory, waiting for the next look) is in it.",
    "The best single way (`speedup_vs_best_single`) is the better of computing and SGLang's own load, and our engine's load where "
    "the configuration load_kvtier was measured.",
    "A configuration that estimates the bandwidth restores once before it is measured in a cell; `first_ttft_ms` is that restoration, which "
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
    "All configurations run in one server process and are asked for the same batches; before each its device and host caches are emptied and "
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_options(
        parser,
        RUN,
        "quick rounds json html log seed",
        quick={"help": "fewer lengths and bandwidths, two rounds: about 3 minutes on 2 cores"},
        rounds={"help": "rounds, every second one backwards (default %(default)s)"},
        log={
            "help": "keep every trial in FILE and continue from what is in it; models, lengths, ratios, configurations and rounds may be others then, nothing else"
        },
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        metavar="N,N",
        help="prefixes in tokens, k = 1024 (default %(default)s)",
    )
    parser.add_argument(
        "--load-over-compute",
        type=ratios,
        metavar="X,X",
        help="loading over computing, as 1/4,1,4: the bandwidth is derived from the measured time of computing (default %(default)s)",
    )
    parser.add_argument(
        "--slow-rounds",
        type=positive,
        metavar="N",
        help="measure configurations that take over 3 times the best of their cell in the first N rounds only (default: in all)",
    )
    parser.add_argument(
        "--arms",
        type=words,
        metavar="A,B",
        help=f"configurations, of {', '.join(RESTORE_ARMS)}; with --at-once of {', '.join(BATCH_ARMS)}. stock: SGLang's own way "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--hole",
        choices=("first",),
        help="the first page of every prefix is deleted whenever the store is asked for it: SGLang's own load reads nothing",
    )
    parser.add_argument(
        "--foreign",
        type=not_negative,
        metavar="CORES",
        help="repeat trials during which others used more, on an emulated GPU also those that lost over 10 %% of their time to the "
        "first token (default %(default)g)",
    )
    together = parser.add_argument_group("several at once")
    together.add_argument(
        "--at-once",
        type=sizes,
        metavar="N,N",
        help=f"ask for this many stored prefixes together, mixed of --lengths, next to {DECODERS} requests that decode; "
        "--load-over-compute is that of the mix",
    )
    server = parser.add_argument_group("server")
    add_options(
        server,
        SERVER,
        "device dilation page-size chunk storage-size server-arg folder",
        storage_size={
            "help": "of the store (default %(default)s, or more where all prompts of a model of ours need it)"
        },
    )
    server.add_argument(
        "--models",
        type=words,
        metavar="A,B",
        help=f"lab models ({', '.join(SHAPES)}), for an accelerator drawn ones ({', '.join(DRAWN)}) and shapes without weights "
        f"({', '.join(UNWEIGHTED)}), folders or names (default %(default)s)",
    )


def defaults(given: argparse.Namespace) -> dict[str, object]:
    """The defaults that help shows: they follow from the options that are given. Raises BenchError."""
    args = RestoreOptions.of(given)
    args = replace(args, device=args.device or detect_device())
    mode = mode_of(args)
    usual = options_of(
        replace(args, rounds=None, lengths=None, load_over_compute=None, arms=None), "", 0, 0
    )
    ratios = [f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}" for ratio in usual.ratios]
    return {
        **server_shown(args),
        "rounds": usual.rounds,
        "lengths": ",".join(f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in usual.lengths),
        "load_over_compute": ",".join(ratios),
        "arms": ", ".join(mode.default_arms),
        "foreign": _foreign(replace(args, foreign=None)),
        "models": ", ".join(models_of(replace(args, models=None))),
    }


def _tokens(part: str) -> int:
    return int(part[:-1]) * 1024 if part.lower().endswith("k") else int(part)


def _ratio(part: str) -> float:
    above, _, below = part.partition("/")
    divisor = float(below or 1)
    return float(above) / divisor if divisor else 0.0


lengths = each_once(
    "lengths of at least 256 tokens, each once, as 2k,4k", _tokens, lambda n: is_whole(n, 256)
)
ratios = each_once(
    "ratios above 0, each once, as 1/4,1,4", _ratio, lambda ratio: is_number(ratio) and ratio > 0
)
sizes = each_once("numbers of at least 1, each once, as 2,4,8", int, lambda n: is_whole(n, 1))


def check_arguments(args: RestoreOptions) -> None:
    """Raises BenchError for options that do not go together."""
    if is_paced(args.device) and args.models:
        raise BenchError(f"--models: {args.device} brings a model of its own")
    for name in ("hole", "slow_rounds"):
        if args.at_once and getattr(args, name):
            raise BenchError(
                f"--at-once: not with --{name.replace('_', '-')}; leave one of them out"
            )
    arms = args.arms or mode_of(args).default_arms
    page = shape_of(args, "").page
    if any(length % page for length in args.lengths or ()):
        raise BenchError(f"--lengths: must be whole pages of {page} tokens")
    if args.at_once:
        check_names(arms, list(BATCH_ARMS))
    else:
        check_restore_arms(arms)


def run(given: argparse.Namespace) -> int:
    """Measures and reports. The exit status: 0, 1 when tokens or log-probs of an answer differed or
    a request failed, 130 after Ctrl-C. Raises KVTierError; where the bench could not go on, after
    what had been measured is reported.
    """
    args = RestoreOptions.of(given)
    check(args)
    check_arguments(args)
    kind = mode_of(args).kind
    one = Restoring(args, RestoreLog.open(args.log, about(args)))
    return Experiment(
        args,
        kind.schema,
        measure=one.measure,
        results=one.results,
        tables=kind.tables,
        page=kind.page,
        standing=standing(args),
        notes=one.notes,
        measured=lambda: bool(one.attempts()),
        sound=lambda result: is_sound(result["summary"]) and not one.lost_pace(),
    ).run()


@dataclass
class Restoring:
    """All models in turn, each on a server of its own. What is measured is in the log."""

    args: RestoreOptions
    log: RestoreLog
    commands: dict[str, Sequence[str]] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mode = mode_of(self.args)
        self.paced = paced_of(self.args)

    def measure(self) -> None:
        """Every model. Raises BenchError when a server cannot be measured so."""
        for model in models_of(self.args):
            shape = shape_of(self.args, model)
            options = options_of(self.args, model, shape.page, shape.chunk)
            with self._target(options) as target:
                self.commands[model] = target.command
                self.measure_on(target, options)

    def measure_on(self, target: Target, options: RestorePlan) -> None:
        """Everything of one model; the growth of the server's counters is added."""

        async def go(shown: Progress) -> None:
            async with Client(
                target.url, admin_key=target.admin_key, dilation=self.args.dilation
            ) as client:
                before = (await client.metrics()).sums(_COUNTED)
                trials = self._trials(client, target)
                try:
                    await self.mode.run(
                        options, trials, self.log, shown.advance, shown.describe
                    ).run()
                finally:
                    after = (await client.metrics()).sums(_COUNTED)
                    self.counters[options.model] = {
                        name: n - before.get(name, 0.0) for name, n in after.items()
                    }

        with progress("restoring", steps(options), "steps") as shown:
            asyncio.run(go(shown))

    def _trials(self, client: Client, target: Target) -> Trials:
        # A paced device takes its time however slow the machine is, and says what it lost.
        slowest = math.inf if self.args.at_once and self.paced is not None else SLOWEST
        return Trials(
            client,
            ServerCpu(target.pid),
            quiet_foreign=_foreign(self.args),
            slowest=slowest,
            discard=self.log.keep,
            bytes_scale=1.0 if self.paced is None else self.paced.bytes_scale,
            steps=None if target.pace_log is None else pace.Reader(target.pace_log),
            arms=self.mode.arms,
        )

    def attempts(self) -> Sequence[Attempt]:
        """What was measured."""
        return [*self.log.trials, *self.log.batches]

    def results(self) -> dict[str, Any]:
        """The result, as docs/manual/json.md has it."""
        args, paced = self.args, self.paced
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
        return {
            **device_of(paced),
            "settings": settings,
            **self.mode.results(self.log),
            **({} if paced is None else {"pace": pace_of(self.attempts(), paced.dilation)}),
            "counters": self.counters,
        }

    def notes(self) -> list[str]:
        """Notes that this run has to be read with."""
        found = self.mode.results(self.log)
        notes = [*self.lost_pace(), *failures(self.attempts(), found["summary"]["errors"])]
        if self.log.continued:
            notes.append(f"{self.log.continued} trials were in the log before this run.")
        if not found["cells"]:
            notes.append("No cell was measured.")
        return notes

    def lost_pace(self) -> list[str]:
        """A note for every arm that a paced device could not keep the pace of."""
        found = {} if self.paced is None else pace_of(self.attempts(), self.paced.dilation)
        return [note for arm, figures in found.items() for note in pace.verdict(arm, figures)]

    @contextlib.contextmanager
    def _target(self, options: RestorePlan) -> Iterator[Target]:
        args, model = self.args, options.model
        with work_folder(args.folder, lambda: False) as own:
            folder = own / Path(model).name
            shutil.rmtree(folder / "storage", ignore_errors=True)
            print(
                f"{model}: starting a server, its log is {folder / 'server.log'}", file=sys.stderr
            )
            shape = shape_of(args, model)
            with started(args, shape, options, folder) as target:
                yield target


def standing(args: RestoreOptions) -> list[str]:
    """Notes that belong to every such result."""
    found = [*([HOLE] if args.hole else ()), *paced_notes(paced_of(args), *_REPEATED)]
    found += mode_of(args).standing
    if args.slow_rounds is not None:
        found.append(
            f"A configuration that takes more than {SLOW:g} times the best of its cell was measured in the first {args.slow_rounds} "
            "rounds only; `rounds` of each cell says how often each was."
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
        decoders=DECODERS if args.at_once else 0,
    )


def about(args: RestoreOptions) -> dict[str, Any]:
    """The settings that trials of one log have in common. Models, lengths, ratios, arms and rounds
    are not in it: a log may get more. Batches are of one mix beside as many that decode.
    """
    shape, paced = shape_of(args, ""), paced_of(args)
    options = options_of(args, "", shape.page, shape.chunk)
    mix = {"lengths": list(options.lengths), "decoders": options.decoders}
    return {
        "seed": args.seed,
        "device": shape.device,
        **made_with(shape.device),
        "dtype": shape.dtype,
        "threads": args.threads,
        "page_size": shape.page,
        "chunk": shape.chunk,
        "server_args": args.server_arg,
        **(mix if args.at_once else {}),
        **({"hole": args.hole} if args.hole else {}),
        **({} if paced is None else {"paced": paced.document()}),
    }
