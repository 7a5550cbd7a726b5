"""`kvtier compare restore`, also `kvtier bench restore`: the grid of a restoration's arms, lengths
and bandwidths.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier import __version__
from sgl_kvtier.arguments import not_negative, positive
from sgl_kvtier.console import Progress, check_target, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import RUN, SERVER, add_options, shape_of, words
from sgl_kvtier.lab.experiment.frame import Experiment, check, work_folder
from sgl_kvtier.lab.experiment.machine import made_with
from sgl_kvtier.lab.experiment.restore.arms import (
    DEFAULT_RESTORE_ARMS,
    RESTORE_ARMS,
    check_restore_arms,
)
from sgl_kvtier.lab.experiment.restore.cells import (
    LOGPROB_TOLERANCE,
    failures,
    is_sound,
    results_of,
)
from sgl_kvtier.lab.experiment.restore.fluctuate import Fluctuation, FluctuationOptions
from sgl_kvtier.lab.experiment.restore.grid import (
    LENGTHS,
    RATIOS,
    SLOW,
    Grid,
    GridOptions,
    planned,
    prompt,
)
from sgl_kvtier.lab.experiment.restore.log import RestoreLog
from sgl_kvtier.lab.experiment.restore.server import Target, started
from sgl_kvtier.lab.experiment.restore.trial import UNWATCHED_S, ServerCpu, Trials
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.lab_model import DRAWN, SHAPES, UNWEIGHTED
from sgl_kvtier.lab.pages.restore import SCHEMA, restore_page, restore_tables
from sgl_kvtier.outside import is_number, is_whole, shown

_COUNTED = "kvtier:restore_"
"""Prefix of the server's counters of restorations. Their growth over a run is in the result."""

_QUICK_LENGTHS, _QUICK_RATIOS, _QUICK_ROUNDS = (2048,), (0.25, 0.5, 1.0, 2.0, 4.0), 2

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_options(
        parser,
        RUN,
        "quick rounds json html log seed",
        quick={"help": "one length, five bandwidths, two rounds: about 3 minutes on 2 cores"},
        rounds={"help": "rounds, every second one backwards (default 5)"},
        log={
            "help": "keep every trial in FILE and continue from what is in it; models, lengths, ratios, arms and rounds may be others then, nothing else"
        },
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        metavar="N,N",
        help="prefixes in tokens, k = 1024 (default 2k,4k,8k,16k)",
    )
    parser.add_argument(
        "--load-over-compute",
        type=ratios,
        metavar="X,X",
        help="loading over computing, as 1/4,1,4: the bandwidth is derived from the measured time of computing (default 1/16 to 16)",
    )
    parser.add_argument(
        "--slow-rounds",
        type=positive,
        metavar="N",
        help="measure arms that take over 3 times the best of their cell in the first N rounds only (default: in all)",
    )
    parser.add_argument(
        "--arms",
        type=words,
        metavar="A,B",
        help=f"of {', '.join(RESTORE_ARMS)} (default {','.join(DEFAULT_RESTORE_ARMS)})",
    )
    parser.add_argument(
        "--fluctuate",
        type=positive,
        metavar="N",
        help="also N traces of each kind of fluctuation per length",
    )
    parser.add_argument(
        "--no-grid", action="store_true", help="with --fluctuate: only what its bound needs"
    )
    parser.add_argument(
        "--foreign",
        type=not_negative,
        default=0.1,
        metavar="CORES",
        help="repeat trials during which others used more (default %(default)s)",
    )
    _add_server_arguments(parser.add_argument_group("server"))


def _add_server_arguments(server: argparse._ArgumentGroup) -> None:
    add_options(
        server,
        SERVER,
        "device dtype threads page-size chunk storage-size server-arg folder",
        storage_size={
            "default": None,
            "help": "of the store (default: 4GiB, or more where all prompts of a model of ours need it)",
        },
        threads={
            "default": 1,
            "help": "torch threads on a CPU (default 1: a core is left for I/O)",
        },
    )
    server.add_argument(
        "--models",
        type=words,
        metavar="A,B",
        help=f"lab models ({', '.join(SHAPES)}), for an accelerator drawn ones ({', '.join(DRAWN)}) and shapes without weights "
        f"({', '.join(UNWEIGHTED)}), folders or names (default lab-mha on a CPU, else lab-gpu-1b)",
    )
    server.add_argument(
        "--strict",
        action="store_true",
        help="with SGLang's own memory checks in every step; slower",
    )
    server.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="let the server write down its planner's decisions, for kvtier bench restore-timeline; with several models one file each, the model in its name",
    )
    server.add_argument(
        "--url",
        help="measure a running server instead: kvtier backend, a section lab.throttle (and policy.rules = sgl_kvtier.lab.rules:FixedSplit for --fluctuate), --enable-metrics, --enable-cache-report, --admin-api-key; policy.restore = both where auto is off (an accelerator, several ranks)",
    )
    server.add_argument("--admin-key", help="with --url: its admin key")
    server.add_argument(
        "--pid",
        type=positive,
        help="with --url: its process, to tell its processor use from that of others",
    )


def run(args: argparse.Namespace) -> int:
    """Measures and reports. The exit status: 0, 1 when tokens or log-probs of an answer differed or
    a request failed, 130 after Ctrl-C. Raises KVTierError; where the bench could not go on, after
    what had been measured is reported.
    """
    check(args, starts_servers=args.url is None)
    check_restore_arms(args.arms or DEFAULT_RESTORE_ARMS)
    _check(args)
    one = Restoring(args, RestoreLog.open(args.log, _about(args)))
    return Experiment(
        args,
        SCHEMA,
        measure=one.measure,
        results=one.results,
        tables=restore_tables,
        page=restore_page,
        standing=standing(args.slow_rounds),
        notes=one.notes,
        measured=lambda: bool(one.log.trials),
        sound=lambda result: is_sound(result["summary"]),
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
        for model in _models(self.args):
            with _target(self.args, model) as target:
                self.commands[model] = target.command
                self.measure_on(target, self.counters.setdefault(model, {}))

    def measure_on(self, target: Target, counters: dict[str, float]) -> None:
        """One model's grid and fluctuation; the growth of the server's counters is added."""
        args = self.args
        options = _options(args, target.model, target.page, target.chunk)
        traces = args.fluctuate or 0
        wanted = FluctuationOptions(traces=traces, rounds=min(options.rounds, 3), seed=args.seed)
        steps = sum(
            len(list(planned(options, length))) + len(wanted.kinds) * traces
            for length in options.lengths
        )

        async def go(shown: Progress) -> None:
            async with Client(target.url, admin_key=target.admin_key) as client:
                before = (await client.metrics()).sums(_COUNTED)
                try:
                    await self._measure(client, target, options, wanted, shown)
                finally:
                    after = (await client.metrics()).sums(_COUNTED)
                    counters.update({name: n - before.get(name, 0.0) for name, n in after.items()})

        with progress("restoring", steps, "steps") as shown:
            asyncio.run(go(shown))

    async def _measure(
        self,
        client: Client,
        target: Target,
        options: GridOptions,
        wanted: FluctuationOptions,
        shown: Progress,
    ) -> None:
        log = self.log
        cpu = ServerCpu(target.pid)
        trials = Trials(client, cpu, quiet_foreign=self.args.foreign, discard=log.keep)
        await Grid(options, trials, log, shown.advance, shown.describe).run()
        for length in options.lengths if wanted.traces else ():
            scale = log.scale(options.model, length)
            assert scale is not None, "the grid has measured it"
            shown.describe(f"{scale.model} {length:,} tokens: fluctuating")
            ids = prompt(options, length)
            await Fluctuation(wanted, trials, log, scale, ids, shown.advance).run()

    def results(self) -> dict[str, Any]:
        """The result of the trials, schema kvtier.restore/1 (docs/manual/json.md)."""
        args = self.args
        settings = {
            "threads": args.threads,
            "rounds": _rounds(args),
            "slow_rounds": args.slow_rounds,
            "seed": args.seed,
            "foreign_cores_limit": args.foreign,
            "cores": os.cpu_count(),
            "server_commands": self.commands,
        }
        return {"settings": settings, **results_of(self.log), "counters": self.counters}

    def notes(self) -> list[str]:
        """Notes that this run has to be read with."""
        log, args = self.log, self.args
        found = results_of(log)
        notes = failures(log, found["summary"]["errors"])
        if log.continued:
            notes.append(f"{log.continued} trials were in the log before this run.")
        if not found["cells"]:
            notes.append("No cell of the grid was measured.")
        if args.url is not None and args.pid is None:
            notes.append(
                "Without --pid the server's processor use is not told from that of others: `foreign_cores` is null, no trial was made "
                f"again for it, and the server was left alone for {UNWATCHED_S:g} s before each."
            )
        return notes


def standing(slow_rounds: int | None) -> list[str]:
    """Notes that belong to every such result."""
    if slow_rounds is None:
        return [*STANDING]
    slow = (
        f"An arm that takes more than {SLOW:g} times the best of its cell was measured in the first {slow_rounds} "
        "rounds only; `rounds` of each cell says how often each arm was."
    )
    return [*STANDING, slow]


def lengths(text: str) -> list[int]:
    """Tokens as 2k,4k,6000."""
    try:
        found = [
            int(part[:-1]) * 1024 if part.lower().endswith("k") else int(part)
            for part in text.split(",")
        ]
    except ValueError:
        found = []
    if not all(is_whole(n, 256) for n in found) or not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: must be lengths of at least 256 tokens, as 2k,4k"
        )
    return found


def ratios(text: str) -> list[float]:
    """Ratios as 1/4,1,4."""
    try:
        parts = (part.partition("/") for part in text.split(","))
        found = [float(a) / float(b or 1) for a, _, b in parts]
    except (ValueError, ZeroDivisionError):
        found = []
    above = all(is_number(ratio) and ratio > 0 for ratio in found)
    if not above or not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be ratios above 0, as 1/4,1,4")
    return found


def _check(args: argparse.Namespace) -> None:
    if args.no_grid and not args.fluctuate:
        raise BenchError("--no-grid leaves nothing to measure: add --fluctuate N")
    if args.decision_log is not None:
        if args.url is not None:
            raise BenchError(
                "--decision-log: the server at --url names its own, policy.decision_log of its settings"
            )
        check_target(str(args.decision_log))
    page = args.page_size or 16
    if any(length % page for length in args.lengths or ()):
        raise BenchError(f"--lengths: must be whole pages of {page} tokens")


def _models(args: argparse.Namespace) -> list[str]:
    default = "lab-mha" if shape_of(args).device == "cpu" else "lab-gpu-1b"
    return list(args.models or [default])


def _rounds(args: argparse.Namespace) -> int:
    return args.rounds or (_QUICK_ROUNDS if args.quick else 5)


def _options(args: argparse.Namespace, model: str, page: int, chunk: int) -> GridOptions:
    quick = args.quick
    chosen = args.load_over_compute or (_QUICK_RATIOS if quick else RATIOS)
    return GridOptions(
        model=model,
        page=page,
        chunk=chunk,
        lengths=args.lengths or (_QUICK_LENGTHS if quick else LENGTHS),
        ratios=() if args.no_grid else chosen,
        arms=args.arms or DEFAULT_RESTORE_ARMS,
        rounds=_rounds(args),
        slow_rounds=args.slow_rounds,
        seed=args.seed,
        always_store=bool(args.fluctuate),
    )


def _decision_log(args: argparse.Namespace, model: str) -> str:
    if args.decision_log is None:
        return ""
    path: Path = args.decision_log.absolute()
    if len(args.models or ()) > 1:
        path = path.with_name(f"{path.stem}-{Path(model).name}{path.suffix}")
    return str(path)


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that trials of one log have in common. Models, lengths, ratios, arms and rounds
    are not in it: a log may get more.
    """
    shape = shape_of(args, "")
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
    }


@contextlib.contextmanager
def _target(args: argparse.Namespace, model: str) -> Iterator[Target]:
    shape = shape_of(args, model)
    if args.url is not None:
        yield Target(model, args.url, args.admin_key, args.pid, shape.page, shape.chunk)
        return
    prefixes = _options(args, model, shape.page, shape.chunk).lengths
    with work_folder(args.folder, lambda: False) as own:
        folder = own / Path(model).name
        shutil.rmtree(folder / "storage", ignore_errors=True)
        print(f"{model}: starting a server, its log is {folder / 'server.log'}", file=sys.stderr)
        with started(args, shape, model, prefixes, _decision_log(args, model), folder) as target:
            yield target
