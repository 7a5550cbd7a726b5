"""`kvtier compare`: stock HiCache and kvtier side by side, as a table, JSON and one HTML page."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_kvtier.console import check_target, envelope, print_table, write_json, write_text
from sgl_kvtier.console.environment import planner_build
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    add_load_arguments,
    add_replay_arguments,
    add_server_arguments,
    load_options,
    not_negative,
    positive,
    replay_options,
)
from sgl_kvtier.lab.experiment.arms import ARMS, DEFAULT_ARMS, Setup, check_arms
from sgl_kvtier.lab.experiment.compare import CompareOptions, Comparison, Outcome
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, choose_encoder, load
from sgl_kvtier.lab.experiment.measures import arm_figures, left_out, ratios, sample_rows
from sgl_kvtier.lab.outside.lab_model import serving_dtype, write_named
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.lab.paced.launching import CHUNK_TOKENS, Paced, is_paced, parse
from sgl_kvtier.lab.pages.compare import compare_tables
from sgl_kvtier.lab.pages.compare_html import compare_html
from sgl_kvtier.launch import detect_device, host_of, missing_packages

SCHEMA = "kvtier.compare/1"

_QUICK_ARMS = ("recompute", "hicache-file", "kvtier")
# One core computes about 1,800 prompt tokens a second of lab-mha: these loads keep the promised
# times on two cores.
_CPU = LoadOptions(turns=8, most_output_tokens=16)
_QUICK = LoadOptions(sessions=6, turns=4, most_output_tokens=12)
_GPU = LoadOptions(turns=40, divisor=1)
# Nothing is computed there, so sessions have their full length; what came before they were entered
# is one cold prompt each.
_PACED = LoadOptions(turns=8, divisor=1, most_output_tokens=16, begin=0.6)
_PACED_QUICK = LoadOptions(sessions=6, turns=5, divisor=1, most_output_tokens=16, begin=0.6)
_PACED_ARMS = ("hicache-file", "kvtier")
_LOOKAHEAD = {"prefetch": "kvtier", "eviction": "next-use", "sessions": True}
"""kvtier.json's policy of the paced arm: both engines."""
# Three to six agents worked at a time when the default trace was recorded.
_REPLAY = ReplayOptions(concurrency=4, gap_cap_s=2.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small load, two rounds, without the arm hicache: under 3 minutes",
    )
    parser.add_argument(
        "--arms",
        metavar="A,B",
        help=f"what to compare, of {','.join(ARMS)} (default: all but kvtier-off)",
    )
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="rounds, each with every arm (default 3)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result with every request (- for standard output)"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one self-contained page with tables and plots"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="keep logs, requests.jsonl and storage in DIR/<arm> (default: a temporary folder)",
    )
    servers = add_server_arguments(parser)
    servers.add_argument(
        "--device-tokens",
        type=positive,
        help="tokens in the device pool (default: a fifth of all contexts, and at least the longest request)",
    )
    servers.add_argument(
        "--host-ratio",
        type=not_negative,
        default=1.5,
        help="host pool as a multiple of it (default %(default)s)",
    )
    servers.add_argument(
        "--servers",
        choices=("auto", "together", "fresh"),
        default="auto",
        help="all up at once and flushed between rounds, or a fresh one per arm and round",
    )
    add_load_arguments(parser, _CPU)
    add_replay_arguments(parser, _REPLAY)


def run(args: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    for target in (args.json, args.html):
        if target is not None:
            check_target(target)
    need_sglang()
    arms = _arms(args)
    outcome = Outcome()
    with end_on_signals(), work_folder(args.folder, lambda: bool(outcome.failures)) as folder:
        device = args.device or detect_device()
        model = model_of(args, device)
        wanted = load_options(args, _load_defaults(args, device))
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        setup = make_setup(args, device, model, chosen)
        options = CompareOptions(
            arms=arms,
            setup=setup,
            replay=replay_options(args, wanted.most_output_tokens),
            folder=folder,
            rounds=args.rounds or (2 if args.quick else 3),
            together={"auto": None, "together": True, "fresh": False}[args.servers],
        )
        print(_announcement(options, chosen), file=sys.stderr)
        Comparison(options, chosen, outcome).run()
        result = make_result(options, chosen, outcome)
        with undisturbed():
            _report(args, result)
    if outcome.interrupted:
        return 130
    return 1 if outcome.failures else 0


def make_setup(args: argparse.Namespace, device: str, model: str, chosen: Load) -> Setup:
    """The servers' common settings. The device pool holds the longest request and about a fifth of
    all contexts.
    """
    paced = parse(device, args.dilation) if is_paced(device) else None
    cpu = host_of(device) == "cpu"
    page = args.page_size or (16 if cpu and paced is None else 64)
    share = 5 if paced is None else 3
    tokens = (
        args.device_tokens
        or max(chosen.longest_tokens * 9 // 8, chosen.context_tokens // share) + 2 * page
    )
    tokens = -(-tokens // page) * page
    if tokens < chosen.longest_tokens + page:
        raise BenchError(
            f"--device-tokens {tokens} is less than the longest request needs ({chosen.longest_tokens} tokens and a page)"
        )
    if args.storage_size < 1 << 26:
        raise BenchError(f"--storage-size {args.storage_size}: must be at least 64MiB")
    return Setup(
        model_path=model,
        served_name=Path(model).name,
        device=device,
        page_size=page,
        chunk_tokens=args.chunk or (CHUNK_TOKENS if paced is not None else 512 if cpu else 4096),
        dtype=args.dtype
        or serving_dtype(host_of(device), "" if args.model_path else args.lab_model),
        device_tokens=tokens,
        host_ratio=args.host_ratio,
        storage_bytes=args.storage_size,
        # SGLang asks storage only for 256 tokens or more; at a reduced scale that would shut it
        # out.
        prefetch_threshold=max(256 // chosen.encoder.divisor, page),
        context_tokens=tokens if cpu else None,
        max_running=max(args.concurrency, 8) if cpu else None,
        seed=args.seed,
        threads=args.threads or max((os.cpu_count() or 2) // 2, 1),
        tp=args.tp,
        extra=tuple(args.server_arg),
        sections=_sections(paced, max(256 // chosen.encoder.divisor, page)),
        dilation=args.dilation,
    )


def _sections(paced: Paced | None, least_tokens: int) -> dict[str, dict[str, Any]]:
    """What our arms have in kvtier.json. Restoration by default leaves prefixes of less than 256
    tokens to SGLang, and SGLang those to nobody: the same for both.
    """
    if paced is None:
        return {"policy": {"min_restore_tokens": least_tokens}}
    found = paced.sections()
    found["policy"] |= {"min_restore_tokens": least_tokens, **_LOOKAHEAD}
    return found


def make_result(options: CompareOptions, chosen: Load, outcome: Outcome) -> dict[str, Any]:
    """The whole result, schema kvtier.compare/1 (docs/manual/json.md)."""
    rows = sample_rows(outcome.rounds)
    figures = {arm: arm_figures(arm, outcome.rounds, rows) for arm in options.arms}
    for arm, figure in figures.items():
        figure["server_start_s"] = outcome.start_s.get(arm)
        figure["failure"] = outcome.failures.get(arm)
    settings = {
        **asdict(options.setup),
        "host_tokens": options.setup.host_tokens,
        **asdict(options.replay),
        "commands": outcome.commands,
    }
    results = {
        **_device_of(options.setup),
        "workload": chosen.to_json(),
        "settings": settings,
        "rounds": options.rounds,
        "arms": figures,
        "ratios": ratios(outcome.rounds, rows, options.arms),
        "interrupted": outcome.interrupted,
        "samples": rows,
        "notes": [
            *_paced_notes(options, figures),
            *chosen.notes,
            *_notes(options),
            *outcome.notes,
            *left_out(outcome.rounds),
        ],
    }
    return envelope(SCHEMA, ["kvtier", *sys.argv[1:]], results)


def _device_of(setup: Setup) -> dict[str, Any]:
    """`device`: what was paced, with its source; nothing where everything was computed."""
    return {} if setup.paced is None else {"device": {"paced": setup.paced.document()}}


def _paced_notes(options: CompareOptions, figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    paced = options.setup.paced
    if paced is None:
        return []
    notes = [
        f"Paced, not computed: forwards, copies and the disk take the time of profile {paced.profile.name} "
        f"({paced.profile.source['database']}), dilation {paced.dilation:g}; times are divided by it.",
        "The arm kvtier looks ahead (policy: prefetch kvtier, eviction next-use, sessions).",
    ]
    for arm, figure in figures.items():
        pace = figure.get("pace")
        if pace is not None and pace["valid"] is False:
            notes.append(
                f"INVALID: {arm} lost {pace['overrun']:.0%} of its steps' time (10 % are allowed), "
                f"{pace['mismatches']} mismatches."
            )
    return notes


def _notes(options: CompareOptions) -> list[str]:
    scale, cap = options.replay.gap_scale, options.replay.gap_cap_s
    gaps = f"Tool gaps are the trace's times {scale:g}" + (
        "." if cap is None else f", at most {cap:g} s."
    )
    fed_back = {
        "recorded": "The trace's own outputs are fed back, so all arms get the same prompts.",
        "server": "The server's own outputs are fed back, so arms whose answers differ get different prompts.",
    }
    most = options.replay.most_output_tokens
    lengths = "Outputs are as long as the trace's" + (
        "." if most is None else f", at most {most} tokens."
    )
    return [
        gaps,
        lengths,
        fed_back[options.replay.feedback],
        "Every round starts cold: device and host pools flushed, storage emptied. The operating system's page cache is not.",
        "The arm recompute has no host pool; the others have the same one.",
        "equal_tokens_fraction of recompute compares its later rounds with its first: what repeating alone changes.",
        "bytes: tokens that the server counts to and from storage, times its bytes per token. disk_bytes: block-device traffic "
        "of the server's processes as the kernel counts it; reads served from the page cache are not in it.",
    ]


def _arms(args: argparse.Namespace) -> list[str]:
    if args.arms is None and is_paced(args.device):
        return list(_PACED_ARMS)
    if args.arms is None:
        return [arm for arm in DEFAULT_ARMS if arm in _QUICK_ARMS or not args.quick]
    arms = [arm.strip() for arm in args.arms.split(",") if arm.strip()]
    check_arms(arms)
    return [arm for arm in ARMS if arm in arms]


def _load_defaults(args: argparse.Namespace, device: str) -> LoadOptions:
    if is_paced(device):
        return _PACED_QUICK if args.quick else _PACED
    if args.quick:
        return _QUICK
    return _CPU if device == "cpu" else _GPU


def model_of(args: argparse.Namespace, device: str = "") -> str:
    """The model's folder or name; a lab model is written first. Raises BenchError where a paced
    device is given another than its own.
    """
    if is_paced(device):
        if args.model_path is not None:
            raise BenchError(f"--model-path: {device} brings a model of its own")
        return str(parse(device, args.dilation).model())
    if args.model_path is not None:
        return str(args.model_path)
    return str(write_named(args.lab_model, seed=args.seed))


def need_sglang() -> None:
    """Raises BenchError where no server can be started."""
    if missing_packages():
        raise BenchError(
            f"SGLang is not installed for {sys.executable}. Install it with: pip install 'sgl-kvtier[sglang]' "
            "(about 10 GB), or run scripts/compare, which does that in an environment of its own"
        )


def _announcement(options: CompareOptions, chosen: Load) -> str:
    setup = options.setup
    return (
        f"{chosen.description}\n"
        f"{chosen.requests} requests a round and arm, prompts up to {chosen.longest_tokens:,} tokens, all contexts together "
        f"{chosen.context_tokens:,}; device pool {setup.device_tokens:,} tokens, host pool {setup.host_tokens:,}\n"
        f"arms: {', '.join(options.arms)}; {options.rounds} rounds; planner {planner_build()}; logs in {options.folder}"
    )


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    shown = sys.stderr if args.json == "-" else sys.stdout
    for table in compare_tables(result):
        print_table(table, shown)
        print(file=shown)
    for arm, figures in result["arms"].items():
        if figures["failure"]:
            print(f"{arm} failed: {figures['failure'].splitlines()[0]}", file=shown)
    if args.json is not None:
        write_json(result, args.json)
    if args.html is not None:
        write_text(compare_html(result), args.html)
    for what, target in (("result", args.json), ("page", args.html)):
        if target is not None and target != "-":
            print(f"The {what} is in {target}", file=shown)


@contextlib.contextmanager
def work_folder(wanted: Path | None, failed: Callable[[], bool]) -> Iterator[Path]:
    """The given folder, or a temporary one. That is removed unless an arm `failed`: then its logs
    are what is needed.
    """
    if wanted is not None:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"--folder {wanted}: {error.strerror}") from error
        yield wanted.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="kvtier-compare-"))
    try:
        yield folder
    finally:
        if failed():
            for storage in folder.glob("**/storage"):
                shutil.rmtree(storage, ignore_errors=True)
            print(f"The servers' logs are kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def early_end(failure: BenchError | None) -> list[str]:
    """What a result says of the failure that ended its run, if one did: without the end of the
    server's log.
    """
    if failure is None:
        return []
    what = str(failure).splitlines()[0].split(" Last lines of ")[0].rstrip(".")
    return [f"Ended by a failure: {what}. Figures are from what had been measured."]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP do nothing inside: the results of many minutes are being written."""
    before = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
