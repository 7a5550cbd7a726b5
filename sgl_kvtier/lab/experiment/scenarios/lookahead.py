"""`kvtier compare lookahead`: what each part of looking ahead brings, against stock and against a
server that never evicts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import not_negative, positive
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    RUN,
    SERVER,
    add_load_arguments,
    add_options,
    deadline_of,
    each_once,
    load_options,
    model_of,
    setup_of,
    shape_of,
    thresholds,
    words,
)
from sgl_kvtier.lab.experiment.arms import OURS, Setup
from sgl_kvtier.lab.experiment.frame import Experiment, check, work_folder
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, choose_encoder, load
from sgl_kvtier.lab.experiment.lookahead.arms import (
    AUTO,
    LOOKAHEAD_ARMS,
    ORACLE,
    arm_names,
    arm_setup,
    pools,
)
from sgl_kvtier.lab.experiment.lookahead.result import Cell, make_results, notes_of
from sgl_kvtier.lab.experiment.rounds import Plan, Replaying, RoundLog, Rounds
from sgl_kvtier.lab.experiment.scenarios.compare import about
from sgl_kvtier.lab.experiment.timeline import watch
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.pages.lookahead import SCHEMA, lookahead_page, lookahead_tables
from sgl_kvtier.outside import is_number

_GAPS = (0.0, 0.1, 0.5, 1.0, 3.0)
_QUICK_GAPS = (0.5,)
_CPU = LoadOptions(sessions=8, turns=8, most_output_tokens=16)
_QUICK = LoadOptions(sessions=6, turns=4, most_output_tokens=8)
_GPU = LoadOptions(sessions=16, turns=40, divisor=1)


_ratios = each_once(
    "ratios of at least 1, each once, as 1.5,3", float, lambda value: is_number(value, 1.0)
)
_seconds = each_once(
    "seconds of at least 0, each once, as 0,0.5", float, lambda value: is_number(value, 0.0)
)


def _iterations(part: str) -> int:
    if part.strip() == "auto":
        return AUTO
    found = int(part)
    if not 0 <= found <= 4096:
        raise ValueError(found)
    return found


_lookaheads = each_once(
    "auto or whole numbers from 0 to 4096, each once, as 0,1,auto", _iterations, lambda _: True
)

_STANDING = (
    "Every trial has a fresh server process; its pools and its storage are empty at the first request.",
    "Pauses between the turns of a session are fixed; the trace's own are not used. A session's first request does not wait.",
    "The trace's own outputs are fed back, so all arms get the same prompts. Every request names its session.",
    "The arms with the kvtier backend differ in kvtier.json's policy section only. oracle is recompute with a device pool for everything.",
    "The host pool has copies of what is on the device, as SGLang keeps it, beside half of what is not.",
    "Hits are where tokens lay when their request was scheduled: by the server's own count where it has one, else by its responses.",
    "The operating system's page cache is not emptied: hicache-file may read from it, kvtier goes round it where it can.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    quick = "a small load, one pause, one round: about 8 minutes on 2 cores"
    rounds = "rounds, each with every arm at every pause (default 3)"
    add_options(
        parser,
        RUN,
        "quick rounds json html log minutes",
        quick={"help": quick},
        rounds={"help": rounds},
    )
    parser.add_argument(
        "--arms", type=words, metavar="A,B", help=f"of {', '.join(LOOKAHEAD_ARMS)} (default: all)"
    )
    parser.add_argument(
        "--oversubscription",
        type=_ratios,
        default=[3.0],
        metavar="X,X",
        help="all contexts over the device pool, as 1.5,3,5 (default 3); host memory holds half of the rest",
    )
    parser.add_argument(
        "--gaps",
        type=_seconds,
        metavar="S,S",
        help="pauses between the turns of a session, in seconds (default 0,0.1,0.5,1,3)",
    )
    parser.add_argument(
        "--lookahead",
        type=_lookaheads,
        default=[AUTO],
        metavar="K,K",
        help="iterations ahead, or auto; several make one arm of kvtier each, as 0,1,2,4,8,auto (default auto)",
    )
    servers = parser.add_argument_group("servers")
    add_options(servers, SERVER)
    servers.add_argument(
        "--restore",
        choices=("auto", "both", "load"),
        help="policy.restore of the kvtier arms (default auto on one CPU rank, else both)",
    )
    servers.add_argument(
        "--read-gbps",
        type=not_negative,
        metavar="X",
        help="storage of the kvtier arms no faster than X gigabits per second",
    )
    add_load_arguments(parser, _CPU, {"on a GPU": _GPU, "with --quick": _QUICK})
    replaying = parser.add_argument_group("replay")
    replaying.add_argument(
        "--concurrency", type=positive, metavar="N", help="sessions at a time (default: all)"
    )
    add_options(replaying, RUN, "seed")


def run(args: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    check(args)
    arms = arm_names(args.arms, args.lookahead)
    cells: list[Cell] = []
    with work_folder(args.folder, lambda: _failed(cells)) as folder:
        shape = shape_of(args)
        wanted = load_options(
            args, _QUICK if args.quick else _CPU if shape.device == "cpu" else _GPU
        )
        model = model_of(args)
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        setup = _setup(args, model, chosen)
        replaying = ReplayOptions(
            concurrency=args.concurrency or len(chosen.sessions),
            most_output_tokens=wanted.most_output_tokens,
            named=True,
            seed=args.seed,
        )
        one = _Run(args, arms, setup, chosen, replaying, folder)
        cells += one.cells()
        log = RoundLog.open(args.log, one.about(cells))
        print(one.announcement(cells), file=sys.stderr)
        return Experiment(
            args,
            SCHEMA,
            measure=lambda: one.measure(cells, log),
            results=lambda: one.results(cells),
            tables=lookahead_tables,
            page=lookahead_page,
            standing=[*chosen.notes, *_STANDING],
            notes=lambda: notes_of(cells, arms),
            measured=lambda: any(r.samples for cell in cells for r in cell.outcome.rounds),
            sound=lambda _: not _failed(cells),
        ).run()


@dataclass(frozen=True)
class _Run:
    args: argparse.Namespace
    arms: Sequence[str]
    setup: Setup
    chosen: Load
    replaying: ReplayOptions
    folder: Path

    def cells(self) -> list[Cell]:
        """Every oversubscription with every pause."""
        args, setup = self.args, self.setup
        rounds = args.rounds or (1 if args.quick else 3)
        restore = args.restore or ("auto" if setup.device == "cpu" and setup.tp == 1 else "both")
        until = deadline_of(args)
        found: list[Cell] = []
        for oversubscription in args.oversubscription:
            sizes = pools(self.chosen, oversubscription, setup.page_size)
            for gap_s in args.gaps or (_QUICK_GAPS if args.quick else _GAPS):
                plan = Plan(
                    arms=self.arms,
                    setup=arm_setup(setup, sizes, restore, args.lookahead),
                    folder=self.folder / f"{oversubscription:g}x-{gap_s:g}s",
                    rounds=rounds,
                    together=False,
                    first_round=len(found) * rounds + 1,
                    place=partial(_place, oversubscription, gap_s),
                    until=until,
                )
                found.append(Cell(oversubscription, gap_s, sizes, plan))
        return found

    def about(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """The settings that trials of one log have in common, but for the pools and the pauses. Of
        a sweep the arm with K from measured speeds counts; the others are named by theirs.
        """
        ours = cells[0].plan.setup.variants[OURS].policy
        same = {name: ours[name] for name in ("restore", "rules")}
        return {**about(self.setup, self.chosen, self.replaying), **same}

    def announcement(self, cells: Sequence[Cell]) -> str:
        """The plan of the run as text for people."""
        trials = sum(cell.plan.rounds * len(self.arms) for cell in cells)
        return (
            f"{self.chosen.describe('trial')}\n"
            f"arms: {', '.join(self.arms)}; {trials} trials, each with a server of its own; "
            f"logs in {self.folder}"
        )

    def measure(self, cells: Sequence[Cell], log: RoundLog) -> None:
        """Every cell in turn. One in which every arm failed is noted, and the next one is tried."""
        failed = 0
        for cell in cells:
            plan, sizes = cell.plan, cell.sizes
            print(
                f"{cell.name}: device pool {sizes.device:,} tokens, host pool {sizes.host:,}",
                file=sys.stderr,
            )
            options = replace(self.replaying, pause_s=cell.gap_s)
            path, beside = (
                plan.folder / "requests.jsonl",
                partial(watch, page_tokens=plan.setup.page_size),
            )
            work = Replaying(self.chosen, options, plan.setup, path, beside)
            try:
                Rounds(plan, work, cell.outcome, log).run()
            except BenchError as error:
                failed += 1
                if failed == len(cells):
                    raise
                cell.outcome.notes.append(str(error).splitlines()[0])
            finally:
                for storage in plan.folder.glob("*/storage"):
                    shutil.rmtree(storage, ignore_errors=True)

    def results(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """The result of the cells, schema kvtier.compare.lookahead/1 (docs/manual/json.md)."""
        first = cells[0].plan
        settings = {
            **asdict(replace(first.setup, variants={})),
            "arms": {name: asdict(variant) for name, variant in first.setup.variants.items()},
            "concurrency": self.replaying.concurrency,
            "most_output_tokens": self.replaying.most_output_tokens,
            "feedback": self.replaying.feedback,
            "cores": os.cpu_count(),
        }
        return {
            "workload": self.chosen.to_json(),
            "settings": settings,
            "rounds": first.rounds,
            **make_results(cells, self.arms),
        }


def _failed(cells: Sequence[Cell]) -> bool:
    return any(cell.outcome.failures for cell in cells)


def _place(oversubscription: float, gap_s: float, arm: str) -> str:
    """Where the log keeps an arm's rounds. An oracle's pool holds everything, whatever the
    oversubscription, so its rounds are those of every cell with the same pause.
    """
    pause = f"pause {gap_s:g} s"
    return pause if arm == ORACLE else f"{oversubscription:g}x, {pause}"


def _setup(args: argparse.Namespace, model: str, chosen: Load) -> Setup:
    shape = shape_of(args)
    cpu = shape.device == "cpu"
    setup = setup_of(
        args,
        shape,
        model,
        context_tokens=chosen.longest_tokens + 2 * shape.page if cpu else None,
        max_running=8 if cpu else None,
        **thresholds(chosen, shape.page),
    )
    if not args.read_gbps:
        return setup
    return replace(
        setup, sections={**setup.sections, "lab": {"throttle": {"read_gbps": args.read_gbps}}}
    )
