"""`kvtier compare lookahead`: what each part of looking ahead brings, against stock and against a
server that never evicts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import not_negative, positive, seed
from sgl_kvtier.console import check_target, envelope, print_table, write_json, write_text
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    add_load_arguments,
    add_server_arguments,
    load_options,
)
from sgl_kvtier.lab.experiment.arms import OURS, Setup
from sgl_kvtier.lab.experiment.compare import CompareOptions, Comparison
from sgl_kvtier.lab.experiment.compare_command import (
    model_of,
    need_sglang,
    undisturbed,
    work_folder,
)
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, choose_encoder, load
from sgl_kvtier.lab.experiment.lookahead.arms import (
    AUTO,
    LOOKAHEAD_ARMS,
    ORACLE,
    arm_names,
    arm_setup,
    pools,
)
from sgl_kvtier.lab.experiment.lookahead.log import LookaheadLog, Trial
from sgl_kvtier.lab.experiment.lookahead.occupancy import watch
from sgl_kvtier.lab.experiment.lookahead.result import Cell, make_results
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.lab_model import serving_dtype
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.lab.paced.launching import is_paced
from sgl_kvtier.lab.pages.lookahead_html import lookahead_html
from sgl_kvtier.lab.pages.lookahead_tables import lookahead_tables
from sgl_kvtier.launch import detect_device
from sgl_kvtier.outside import is_number, shown

SCHEMA = "kvtier.compare.lookahead/1"
_GAPS = (0.0, 0.1, 0.5, 1.0, 3.0)
_QUICK_GAPS = (0.5,)
_CPU = LoadOptions(sessions=8, turns=8, most_output_tokens=16)
_QUICK = LoadOptions(sessions=6, turns=4, most_output_tokens=8)
_GPU = LoadOptions(sessions=16, turns=40, divisor=1)
_START_S = 900.0
"""A trial is long, so a machine that is busy with other things is waited for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small load, one pause, one round: about 8 minutes on 2 cores",
    )
    parser.add_argument(
        "--arms", type=_words, metavar="A,B", help=f"of {', '.join(LOOKAHEAD_ARMS)} (default: all)"
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
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="N",
        help="rounds, each with every arm at every pause (default 3)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result with every request (- for standard output)"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one self-contained page with tables and plots"
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="keep every trial in FILE, and pass over those that are in it: a comparison in pieces. The oracle is measured once per pause",
    )
    parser.add_argument(
        "--minutes",
        type=not_negative,
        metavar="M",
        help="begin no trial after so long; with --log the next run goes on",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="keep logs, requests.jsonl and storage in DIR (default: a temporary folder)",
    )
    servers = add_server_arguments(parser)
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
    add_load_arguments(parser, _CPU)
    replaying = parser.add_argument_group("replay")
    replaying.add_argument(
        "--concurrency", type=positive, metavar="N", help="sessions at a time (default: all)"
    )
    replaying.add_argument(
        "--seed", type=seed, default=0, help="for generated sessions and weights (default 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    for target in (args.json, args.html):
        if target is not None:
            check_target(target)
    if is_paced(args.device):
        raise BenchError(f"--device {args.device}: so far kvtier compare and kvtier serve have it")
    need_sglang()
    arms = arm_names(args.arms, args.lookahead)
    cells: list[Cell] = []
    with (
        end_on_signals(),
        work_folder(args.folder, lambda: any(cell.outcome.failures for cell in cells)) as folder,
    ):
        device = args.device or detect_device()
        model = model_of(args)
        wanted = load_options(args, _QUICK if args.quick else _CPU if device == "cpu" else _GPU)
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        cells += _cells(
            args,
            _setup(args, device, model, chosen),
            chosen,
            arms,
            wanted.most_output_tokens,
            folder,
        )
        log = LookaheadLog.open(args.log, _about(cells[0].options, chosen))
        print(_announcement(cells, chosen, arms), file=sys.stderr)
        interrupted = _measure(cells, chosen, log)
        result = _result(cells, chosen, arms, interrupted)
        with undisturbed():
            _report(args, result)
    if interrupted:
        return 130
    return 1 if any(cell.outcome.failures for cell in cells) else 0


def _cells(
    args: argparse.Namespace,
    setup: Setup,
    chosen: Load,
    arms: Sequence[str],
    most_output: int | None,
    folder: Path,
) -> list[Cell]:
    rounds = args.rounds or (1 if args.quick else 3)
    restore = args.restore or ("auto" if setup.device == "cpu" and setup.tp == 1 else "both")
    cells: list[Cell] = []
    began = time.monotonic()
    for oversubscription in args.oversubscription:
        sizes = pools(chosen, oversubscription, setup.page_size)
        for gap_s in args.gaps or (_QUICK_GAPS if args.quick else _GAPS):
            replaying = ReplayOptions(
                concurrency=args.concurrency or len(chosen.sessions),
                most_output_tokens=most_output,
                pause_s=gap_s,
                named=True,
            )
            options = CompareOptions(
                arms=arms,
                setup=arm_setup(setup, sizes, restore, args.lookahead),
                replay=replaying,
                folder=folder / f"{oversubscription:g}x-{gap_s:g}s",
                rounds=rounds,
                together=False,
                start_timeout_s=_START_S,
                beside=_watching(setup.page_size),
                first_round=len(cells) * rounds + 1,
                until=None if args.minutes is None else began + args.minutes * 60,
            )
            cells.append(Cell(oversubscription, gap_s, sizes, options))
    return cells


def _watching(page_tokens: int) -> Any:
    def beside(client: Client, one: Round) -> Coroutine[Any, Any, None]:
        return watch(client, one, page_tokens)

    return beside


def _setup(args: argparse.Namespace, device: str, model: str, chosen: Load) -> Setup:
    cpu = device == "cpu"
    page = args.page_size or (16 if cpu else 64)
    if args.storage_size < 1 << 26:
        raise BenchError(f"--storage-size {args.storage_size}: must be at least 64MiB")
    # SGLang asks storage only for 256 tokens or more; at a reduced scale that would shut it out.
    # The same for restoration.
    threshold = max(256 // chosen.encoder.divisor, page)
    sections: dict[str, dict[str, Any]] = {"policy": {"min_restore_tokens": threshold}}
    if args.read_gbps:
        sections["lab"] = {"throttle": {"read_gbps": args.read_gbps}}
    return Setup(
        model_path=model,
        served_name=Path(model).name,
        device=device,
        page_size=page,
        chunk_tokens=args.chunk or (512 if cpu else 4096),
        dtype=args.dtype or serving_dtype(device, "" if args.model_path else args.lab_model),
        storage_bytes=args.storage_size,
        prefetch_threshold=threshold,
        context_tokens=chosen.longest_tokens + 2 * page if cpu else None,
        max_running=8 if cpu else None,
        seed=args.seed,
        threads=args.threads or max((os.cpu_count() or 2) // 2, 1),
        tp=args.tp,
        extra=tuple(args.server_arg),
        sections=sections,
    )


def _about(options: CompareOptions, chosen: Load) -> dict[str, Any]:
    """What trials of one log have to have in common: the load and the servers, but for the pools
    and the arms' settings.
    """
    setup = options.setup
    names = (
        "served_name",
        "device",
        "page_size",
        "chunk_tokens",
        "dtype",
        "storage_bytes",
        "seed",
        "threads",
        "tp",
        "extra",
        "sections",
    )
    work = {
        name: value
        for name, value in chosen.to_json().items()
        if name not in ("description", "rows")
    }
    replaying = {
        "concurrency": options.replay.concurrency,
        "most_output_tokens": options.replay.most_output_tokens,
    }
    ours = setup.variants[
        OURS
    ].policy  # of a sweep: the arm with K from measured speeds; the others are named by theirs
    same = {name: ours[name] for name in ("restore", "lookahead")}
    return {"workload": work, **{name: getattr(setup, name) for name in names}, **replaying, **same}


def _go_on(cell: Cell, log: LookaheadLog) -> None:
    """Takes over what the log has of a cell, and has the rest put there. An oracle's pool holds
    everything, whatever the oversubscription, so its trials are those of every cell with the same
    pause.
    """
    options, outcome = cell.options, cell.outcome

    def place(arm: str) -> str:
        return f"pause {cell.gap_s:g} s" if arm == ORACLE else cell.name

    def take_over(arm: str, number: int) -> bool:
        trial = log.find(place(arm), arm, number)
        if trial is None:
            return False
        outcome.rounds.append(replace(trial.one, number=options.first_round + number - 1))
        outcome.commands.setdefault(arm, list(trial.command))
        if trial.start_s is not None:
            outcome.start_s.setdefault(arm, trial.start_s)
        return True

    def keep(one: Round, number: int) -> None:
        kept = replace(one, number=number)
        log.keep(
            Trial(
                place(one.arm),
                one.arm,
                number,
                kept,
                outcome.start_s.get(one.arm),
                tuple(outcome.commands[one.arm]),
            )
        )

    cell.options = replace(options, take_over=take_over, keep=keep)


def _measure(cells: Sequence[Cell], chosen: Load, log: LookaheadLog) -> bool:
    """Every cell in turn; whether Ctrl-C ended it. A cell in which every arm failed is noted, and
    the next one is tried.
    """
    failed = 0
    for cell in cells:
        _go_on(cell, log)
        cell.options.folder.mkdir(parents=True, exist_ok=True)
        print(
            f"{cell.name}: device pool {cell.sizes.device:,} tokens, host pool {cell.sizes.host:,}",
            file=sys.stderr,
        )
        try:
            Comparison(cell.options, chosen, cell.outcome).run()
        except BenchError as error:
            failed += 1
            if failed == len(cells):
                raise
            cell.outcome.notes.append(str(error).splitlines()[0])
        finally:
            for storage in cell.options.folder.glob("*/storage"):
                shutil.rmtree(storage, ignore_errors=True)
        if cell.outcome.interrupted:
            return True
    return False


def _result(
    cells: Sequence[Cell], chosen: Load, arms: Sequence[str], interrupted: bool
) -> dict[str, Any]:
    first = cells[0].options
    found = make_results(cells, arms)
    settings = {
        **asdict(replace(first.setup, variants={})),
        "arms": {name: asdict(variant) for name, variant in first.setup.variants.items()},
        "concurrency": first.replay.concurrency,
        "most_output_tokens": first.replay.most_output_tokens,
        "feedback": first.replay.feedback,
        "cores": os.cpu_count(),
    }
    results = {
        "workload": chosen.to_json(),
        "settings": settings,
        "rounds": first.rounds,
        **found,
        "interrupted": interrupted,
        "notes": [*chosen.notes, *_NOTES, *found["notes"]],
    }
    return envelope(SCHEMA, ["kvtier", *sys.argv[1:]], results)


_NOTES = (
    "Every trial has a fresh server process; its pools and its storage are empty at the first request.",
    "Pauses between the turns of a session are fixed; the trace's own are not used. A session's first request does not wait.",
    "The trace's own outputs are fed back, so all arms get the same prompts. Every request names its session.",
    "The arms with the kvtier backend differ in kvtier.json's policy section only. oracle is recompute with a device pool for everything.",
    "The host pool has copies of what is on the device, as SGLang keeps it, beside half of what is not.",
    "Hits are where tokens lay when their request was scheduled: by the server's own count where it has one, else by its responses.",
    "The operating system's page cache is not emptied: hicache-file may read from it, kvtier goes round it where it can.",
)


def _announcement(cells: Sequence[Cell], chosen: Load, arms: Sequence[str]) -> str:
    trials = sum(cell.options.rounds * len(arms) for cell in cells)
    return (
        f"{chosen.description}\n"
        f"{chosen.requests} requests a trial, prompts up to {chosen.longest_tokens:,} tokens, all contexts together "
        f"{chosen.context_tokens:,}\n"
        f"arms: {', '.join(arms)}; {trials} trials, each with a server of its own; logs in {cells[0].options.folder.parent}"
    )


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    shown = sys.stderr if args.json == "-" else sys.stdout
    for table in lookahead_tables(result):
        print_table(table, shown)
        print(file=shown)
    for note in result["notes"]:
        if note not in _NOTES:
            print(note, file=shown)
    for arm, figures in result["arms"].items():
        if figures["failure"]:
            print(f"{arm} failed: {figures['failure'].splitlines()[0]}", file=shown)
    if args.json is not None:
        write_json(result, args.json)
    if args.html is not None:
        write_text(lookahead_html(result), args.html)
    for what, target in (("result", args.json), ("page", args.html)):
        if target is not None and target != "-":
            print(f"The {what} is in {target}", file=shown)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str, least: float, what: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if (
        not found
        or not all(is_number(value, least) for value in found)
        or len(set(found)) < len(found)
    ):
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be {what}")
    return found


def _ratios(text: str) -> list[float]:
    return _numbers(text, 1.0, "ratios of at least 1, each once, as 1.5,3")


def _seconds(text: str) -> list[float]:
    return _numbers(text, 0.0, "seconds of at least 0, each once, as 0,0.5")


def _lookaheads(text: str) -> list[int]:
    try:
        found = [AUTO if part.strip() == "auto" else int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if (
        not found
        or min(found) < AUTO
        or max(found) > 4096
        or len(set(found)) < len(found)
        or "-" in text
    ):
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: must be auto or whole numbers from 0 to 4096, each once, as 0,1,auto"
        )
    return found
