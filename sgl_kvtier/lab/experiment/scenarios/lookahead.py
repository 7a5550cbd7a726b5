"""`kvtier compare lookahead`: what each part of looking ahead brings, against stock and against a
server that never evicts.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import positive
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
from sgl_kvtier.lab.experiment.comparison import Cell, Comparison, failed
from sgl_kvtier.lab.experiment.frame import check, work_folder
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, choose_encoder, load
from sgl_kvtier.lab.experiment.lookahead.arms import (
    AUTO,
    LOOKAHEAD_ARMS,
    ORACLE,
    Pools,
    arm_names,
    arm_setup,
    pools,
)
from sgl_kvtier.lab.experiment.lookahead.result import make_results, notes_of
from sgl_kvtier.lab.experiment.options import Options
from sgl_kvtier.lab.experiment.rounds import Plan, Replaying, RoundLog
from sgl_kvtier.lab.experiment.scenarios.compare import about
from sgl_kvtier.lab.experiment.timeline import watch
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.pages.kinds import LOOKAHEAD
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


@dataclass(frozen=True)
class LookaheadOptions(Options):
    """The command's options."""

    arms: Sequence[str] | None = None
    oversubscription: Sequence[float] = (3.0,)
    gaps: Sequence[float] | None = None
    lookahead: Sequence[int] = (AUTO,)
    restore: str | None = None


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
    add_load_arguments(parser, _CPU, {"on a GPU": _GPU, "with --quick": _QUICK})
    replaying = parser.add_argument_group("replay")
    replaying.add_argument(
        "--concurrency", type=positive, metavar="N", help="sessions at a time (default: all)"
    )
    add_options(replaying, RUN, "seed")


def run(given: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    args = LookaheadOptions.of(given)
    check(args)
    arms = arm_names(args.arms, args.lookahead)
    cells: list[Cell] = []
    with work_folder(args.folder, lambda: failed(cells)) as folder:
        shape = shape_of(args)
        usual = _QUICK if args.quick else _CPU if shape.device == "cpu" else _GPU
        wanted = load_options(args, usual)
        model = model_of(args)
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        setup = _setup(args, model, chosen)
        replaying = ReplayOptions(
            concurrency=args.concurrency or len(chosen.sessions),
            most_output_tokens=wanted.most_output_tokens,
            named=True,
            seed=args.seed,
        )
        sizes = {over: pools(chosen, over, setup.page_size) for over in args.oversubscription}
        cells += _cells(args, arms, setup, sizes, chosen, replaying, folder)
        log = RoundLog.open(args.log, _about(cells[0], setup, chosen, replaying))
        trials = sum(cell.plan.rounds * len(arms) for cell in cells)
        print(
            f"{chosen.describe('trial')}\n"
            f"arms: {', '.join(arms)}; {trials} trials, each with a server of its own; logs in {folder}",
            file=sys.stderr,
        )
        compared = Comparison(cells, log, keeps_storage=False)
        return compared.experiment(
            args,
            LOOKAHEAD.schema,
            results=lambda: make_results(cells, sizes, chosen, replaying),
            tables=LOOKAHEAD.tables,
            page=LOOKAHEAD.page,
            standing=[*chosen.notes, *_STANDING],
            notes=lambda: notes_of(cells, arms),
        ).run()


def _cells(
    args: LookaheadOptions,
    arms: Sequence[str],
    setup: Setup,
    sizes: Mapping[float, Pools],
    chosen: Load,
    replaying: ReplayOptions,
    folder: Path,
) -> list[Cell]:
    """Every oversubscription with every pause."""
    rounds = args.rounds or (1 if args.quick else 3)
    restore = args.restore or ("auto" if setup.device == "cpu" and setup.tp == 1 else "both")
    until = deadline_of(args)
    found: list[Cell] = []
    gaps = args.gaps or (_QUICK_GAPS if args.quick else _GAPS)
    for over, gap_s in itertools.product(args.oversubscription, gaps):
        name, own, pool = (
            f"{over:g}x, pause {gap_s:g} s",
            folder / f"{over:g}x-{gap_s:g}s",
            sizes[over],
        )
        plan = Plan(
            arms=arms,
            setup=arm_setup(setup, pool, restore, args.lookahead),
            folder=own,
            rounds=rounds,
            together=False,
            first_round=len(found) * rounds + 1,
            place=partial(_place, over, gap_s),
            until=until,
        )
        axes = {"oversubscription": over, "gap_s": gap_s}
        about = f"{name}: device pool {pool.device:,} tokens, host pool {pool.host:,}"
        asked, path = replace(replaying, pause_s=gap_s), own / "requests.jsonl"
        beside = partial(watch, page_tokens=setup.page_size)
        work = Replaying(chosen, asked, plan.setup, path, beside)
        found.append(Cell(axes, name, plan, work, about))
    return found


def _about(cell: Cell, setup: Setup, chosen: Load, replaying: ReplayOptions) -> dict[str, Any]:
    """The settings that trials of one log have in common, but for the pools and the pauses. Of
    a sweep the arm with K from measured speeds counts; the others are named by theirs.
    """
    ours = cell.plan.setup.variants[OURS].policy
    return {
        **about(setup, chosen, replaying),
        **{name: ours[name] for name in ("restore", "rules")},
    }


def _place(oversubscription: float, gap_s: float, arm: str) -> str:
    """Where the log keeps an arm's rounds. An oracle's pool holds everything, whatever the
    oversubscription, so its rounds are those of every cell with the same pause.
    """
    pause = f"pause {gap_s:g} s"
    return pause if arm == ORACLE else f"{oversubscription:g}x, {pause}"


def _setup(args: LookaheadOptions, model: str, chosen: Load) -> Setup:
    shape = shape_of(args)
    cpu = shape.device == "cpu"
    return setup_of(
        args,
        shape,
        model,
        context_tokens=chosen.longest_tokens + 2 * shape.page if cpu else None,
        max_running=8 if cpu else None,
        **thresholds(chosen, shape.page),
    )
