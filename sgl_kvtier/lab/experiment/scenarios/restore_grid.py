"""`kvtier compare restore`: the grid of one restoration's arms, lengths and bandwidths."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier import __version__
from sgl_kvtier.console import Progress, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import shape_of
from sgl_kvtier.lab.experiment.frame import Experiment, work_folder
from sgl_kvtier.lab.experiment.machine import made_with
from sgl_kvtier.lab.experiment.restore.arms import (
    DEFAULT_RESTORE_ARMS,
    RESTORE_ARMS,
    RestoreArm,
    check_restore_arms,
)
from sgl_kvtier.lab.experiment.restore.cells import (
    LOGPROB_TOLERANCE,
    failures,
    is_sound,
    pace_of,
    results_of,
)
from sgl_kvtier.lab.experiment.restore.fluctuate import Fluctuation, FluctuationOptions
from sgl_kvtier.lab.experiment.restore.grid import (
    LENGTHS,
    PACED_LENGTHS,
    RATIOS,
    SLOW,
    Grid,
    GridOptions,
    planned,
    prompt,
)
from sgl_kvtier.lab.experiment.restore.log import RestoreLog
from sgl_kvtier.lab.experiment.restore.server import Demand, Target, paced_of, started
from sgl_kvtier.lab.experiment.restore.trial import SLOWEST, UNWATCHED_S, Attempt, ServerCpu, Trials
from sgl_kvtier.lab.experiment.scenarios.restore_arguments import FOREIGN_CORES, PACED_FOREIGN_CORES
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.paced.launching import Paced, is_paced, of_server
from sgl_kvtier.lab.pages.restore.grid import SCHEMA, restore_page, restore_tables

_COUNTED = "kvtier:restore_"
"""Prefix of the server's counters of restorations. Their growth over a run is in the result."""

_QUICK_LENGTHS, _QUICK_RATIOS, _QUICK_ROUNDS = (2048,), (0.25, 0.5, 1.0, 2.0, 4.0), 2
_PACED_QUICK_LENGTHS = (8192, 16384)
_PACED_CURVE_STEP = 2048
"""Tokens. One chunk of a paced device is a whole short prompt: its points are closer together."""

STANDING = (
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

HOLE = (
    "The first page of every prefix was deleted whenever the store was asked for it (--hole first). SGLang's own load ends at the first "
    "missing page: it reads nothing, so that there is no bound of loading and computing."
)


def run_grid(args: argparse.Namespace) -> int:
    """Measures and reports; the exit status."""
    check_restore_arms(args.arms or DEFAULT_RESTORE_ARMS)
    one = Restoring(args, RestoreLog.open(args.log, about(args)))
    return Experiment(
        args,
        SCHEMA,
        measure=one.measure,
        results=one.results,
        tables=restore_tables,
        page=restore_page,
        standing=[
            *([HOLE] if args.hole else ()),
            *paced_notes(paced_of(args)),
            *standing(args.slow_rounds),
        ],
        notes=one.notes,
        measured=lambda: bool(one.log.trials),
        sound=lambda result: is_sound(result["summary"]) and not one.lost_pace(),
    ).run()


@dataclass
class Restoring:
    """All models in turn, each on a server of its own. What is measured is in the log."""

    args: argparse.Namespace
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
                    await self.trials_on(target, self._trials(client, target), shown)
                finally:
                    after = (await client.metrics()).sums(_COUNTED)
                    counters.update({name: n - before.get(name, 0.0) for name, n in after.items()})

        with progress("restoring", self.steps(target), "steps") as shown:
            asyncio.run(go(shown))

    def _trials(self, client: Client, target: Target) -> Trials:
        paced = paced_of(self.args)
        return Trials(
            client,
            ServerCpu(target.pid),
            quiet_foreign=_foreign(self.args),
            slowest=self.slowest,
            discard=self.log.keep,
            bytes_scale=1.0 if paced is None else paced.bytes_scale,
            steps=None if target.pace_log is None else pace.Reader(target.pace_log),
            arms=self.arms,
        )

    def demand(self, model: str, page: int, chunk: int) -> Demand:
        """What the server of a model has to have room for."""
        return Demand(_options(self.args, model, page, chunk).lengths)

    def steps(self, target: Target) -> int:
        """How much there is to do on a server: the grid and the fluctuation."""
        options, wanted = self._of(target)
        return sum(
            len(list(planned(options, length))) + len(wanted.kinds) * wanted.traces
            for length in options.lengths
        )

    async def trials_on(self, target: Target, trials: Trials, shown: Progress) -> None:
        """Does it."""
        log, (options, wanted) = self.log, self._of(target)
        await Grid(options, trials, log, shown.advance, shown.describe).run()
        for length in options.lengths if wanted.traces else ():
            scale = log.scale(options.model, length)
            assert scale is not None, "the grid has measured it"
            shown.describe(f"{scale.model} {length:,} tokens: fluctuating")
            ids = prompt(options, length)
            await Fluctuation(wanted, trials, log, scale, ids, shown.advance).run()

    def _of(self, target: Target) -> tuple[GridOptions, FluctuationOptions]:
        args = self.args
        options = _options(args, target.model, target.page, target.chunk)
        rounds = min(options.rounds, 3)
        wanted = FluctuationOptions(traces=args.fluctuate or 0, rounds=rounds, seed=args.seed)
        return options, wanted

    def attempts(self) -> Sequence[Attempt]:
        """What was measured."""
        return self.log.trials

    def found(self) -> dict[str, Any]:
        """What follows from it."""
        return results_of(self.log)

    @property
    def slowest(self) -> float:
        """How slow the machine may be around what is measured before it is repeated."""
        return SLOWEST

    @property
    def arms(self) -> Mapping[str, RestoreArm]:
        """The arms there are."""
        return RESTORE_ARMS

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
            **self.found(),
            **({} if paced is None else {"pace": pace_of(self.attempts(), paced.dilation)}),
            "counters": self.counters,
        }

    def notes(self) -> list[str]:
        """Notes that this run has to be read with."""
        log, args = self.log, self.args
        found = self.found()
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
        demand = self.demand(model, shape.page, shape.chunk)
        with work_folder(args.folder, lambda: False) as own:
            folder = own / Path(model).name
            shutil.rmtree(folder / "storage", ignore_errors=True)
            print(
                f"{model}: starting a server, its log is {folder / 'server.log'}", file=sys.stderr
            )
            with started(args, shape, model, demand, _decision_log(args, model), folder) as target:
                yield target


def standing(slow_rounds: int | None) -> list[str]:
    """Notes that belong to every such result."""
    if slow_rounds is None:
        return [*STANDING]
    slow = (
        f"An arm that takes more than {SLOW:g} times the best of its cell was measured in the first {slow_rounds} "
        "rounds only; `rounds` of each cell says how often each arm was."
    )
    return [*STANDING, slow]


def models_of(args: argparse.Namespace) -> list[str]:
    paced = paced_of(args)
    if paced is not None:
        return [paced.profile.name]
    default = "lab-mha" if shape_of(args).device == "cpu" else "lab-gpu-1b"
    return list(args.models or [default])


def paced_notes(paced: Paced | None) -> list[str]:
    if paced is None:
        return []
    return [
        f"Paced, not computed: forwards, copies and the disk take the time of {paced.modelled}, "
        f"dilation {paced.dilation:g}; times are divided by it. Bytes and bandwidths are "
        f"those of the modelled machine: {paced.bytes_scale:g} times those kept and moved here.",
        "A trial that lost more than 10 % of the time to its first token because this machine was too slow is made again. `pace` has "
        "the forwards up to the first token; every row of every prefix was checked.",
    ]


def _foreign(args: argparse.Namespace) -> float:
    usual = PACED_FOREIGN_CORES if is_paced(args.device) else FOREIGN_CORES
    return usual if args.foreign is None else float(args.foreign)


def rounds_of(args: argparse.Namespace) -> int:
    return args.rounds or (_QUICK_ROUNDS if args.quick else 5)


def _options(args: argparse.Namespace, model: str, page: int, chunk: int) -> GridOptions:
    quick, paced = args.quick, is_paced(args.device)
    chosen = args.load_over_compute or (_QUICK_RATIOS if quick else RATIOS)
    usual = (PACED_LENGTHS, _PACED_QUICK_LENGTHS) if paced else (LENGTHS, _QUICK_LENGTHS)
    return GridOptions(
        model=model,
        page=page,
        chunk=chunk,
        lengths=args.lengths or usual[quick],
        ratios=() if args.no_grid else chosen,
        arms=args.arms or DEFAULT_RESTORE_ARMS,
        rounds=rounds_of(args),
        slow_rounds=args.slow_rounds,
        seed=args.seed,
        always_store=bool(args.fluctuate),
        hole=args.hole is not None,
        curve_step=min(chunk, _PACED_CURVE_STEP) if paced else None,
    )


def _decision_log(args: argparse.Namespace, model: str) -> str:
    if args.decision_log is None:
        return ""
    path: Path = args.decision_log.absolute()
    if len(args.models or ()) > 1:
        path = path.with_name(f"{path.stem}-{Path(model).name}{path.suffix}")
    return str(path)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that trials of one log have in common. Models, lengths, ratios, arms and rounds
    are not in it: a log may get more.
    """
    shape, paced = shape_of(args, ""), paced_of(args)
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
        "strict": args.strict,
        "server_args": args.server_arg,
        **({"hole": args.hole} if args.hole else {}),
        **({} if paced is None else {"paced": paced.document()}),
    }
