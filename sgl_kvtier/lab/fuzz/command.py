"""`kvtier bench restore-fuzz`: agent sessions against a server in trouble; no hang, no leak, no
other answer, no failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_kvtier import arguments
from sgl_kvtier.arguments import above_nought, not_negative
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.equal.command import read_floor
from sgl_kvtier.lab.experiment.argtypes import add_load_arguments, load_options, positive
from sgl_kvtier.lab.experiment.arms import BASELINE, OURS, Setup
from sgl_kvtier.lab.experiment.compare_command import early_end, undisturbed
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, choose_encoder, load
from sgl_kvtier.lab.fuzz.chaos import Chaos, parse_kinds
from sgl_kvtier.lab.fuzz.log import MUST_BE_ZERO, Attempt, FuzzLog, counts
from sgl_kvtier.lab.fuzz.run import Asked, FuzzOptions, FuzzRun, calls_of, take_references
from sgl_kvtier.lab.fuzz.scenes import SCENES, parse_scenes, play, scenes_table
from sgl_kvtier.lab.fuzz.server import FuzzServer
from sgl_kvtier.lab.fuzz.stage import StageOptions
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.lab_model import DRAWN, SHAPES, check_heads, serving_dtype, write_named
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.launch import detect_device, missing_packages

SCHEMA = "kvtier.restore-fuzz/1"
_LOAD = LoadOptions(sessions=16, turns=6, divisor=4, most_output_tokens=8)
_SETTLED_TOKENS = 64
_AHEAD = {"prefetch": "on", "eviction": "next-use", "sessions": True}
_SHOWN = (
    "requests",
    "completed",
    "restored",
    "restored_from_storage",
    "aborted",
    "disconnected",
    "under_a_kill",
    "compared",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.epilog = (
        "example: kvtier bench restore-fuzz --lookahead --scene storm,stop,restarts "
        "--scale 0.1 --json result.json"
    )
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="end after so many requests (default 400, unless another limit is given)",
    )
    parser.add_argument(
        "--restored", type=positive, metavar="N", help="end after so many that were restored"
    )
    parser.add_argument("--minutes", type=not_negative, metavar="M", help="end after so long")
    parser.add_argument(
        "--scene",
        metavar="A,B",
        help="play scenes instead, load beside each: all, or of "
        f"{'; '.join(f'{name} ({one.about})' for name, one in SCENES.items())}",
    )
    parser.add_argument(
        "--scale",
        type=not_negative,
        default=1.0,
        metavar="X",
        help="share of the scenes' full amounts (default 1: a minute of storm, 50 restarts)",
    )
    parser.add_argument(
        "--chaos",
        default="all",
        metavar="A,B",
        help="what goes wrong: all, none, or of errors, corrupt, stall, abort, disconnect, flush, "
        "kill, switch, hint (default all)",
    )
    parser.add_argument(
        "--lookahead",
        action="store_true",
        help="the server looks ahead (docs/manual/lookahead.md): sessions pause between turns, "
        "hints are sent, its map is compared at the end",
    )
    parser.add_argument(
        "--fault-rank",
        type=int,
        choices=range(64),
        metavar="N",
        help="the device of this tensor-parallel rank alone fails and stalls (default: of all "
        "alike)",
    )
    parser.add_argument(
        "--kill-every",
        type=positive,
        default=400,
        metavar="N",
        help="requests between two kills (default %(default)s)",
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=8,
        metavar="N",
        help="sessions at a time (default %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=above_nought,
        default=60.0,
        metavar="S",
        help="a request that takes longer hangs (default %(default)s)",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="keep references and requests in FILE and add to what is in it",
    )
    parser.add_argument(
        "--floor",
        type=Path,
        metavar="FILE",
        help="judge answers against the noise floor in this result of kvtier bench equal, as on a card",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result (- for standard output)")
    parser.add_argument(
        "--seed",
        type=arguments.seed,
        default=0,
        help="of everything that is decided here (default 0)",
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--lab-model",
        choices=(*SHAPES, *DRAWN),
        help="default tiny-qwen3 on a CPU, else lab-gpu-tiny",
    )
    server.add_argument("--dtype", help="default: float32 on a CPU, else bfloat16")
    server.add_argument(
        "--storage-size",
        type=arguments.size,
        default=1 << 30,
        metavar="SIZE",
        help="of the store (default 1GiB)",
    )
    server.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is an NVIDIA device"
    )
    server.add_argument(
        "--overlap",
        choices=("on", "off"),
        default="on",
        help="SGLang's overlap of scheduling and computing (default on)",
    )
    server.add_argument(
        "--threads", type=positive, default=1, help="torch threads on a CPU (default 1)"
    )
    server.add_argument("--tp", type=positive, default=1, help="tensor-parallel size (default 1)")
    server.add_argument(
        "--chunk", type=positive, default=256, help="chunked prefill size (default %(default)s)"
    )
    server.add_argument(
        "--device-tokens",
        type=positive,
        help="device pool (default: three quarters of the longest prompts at a time)",
    )
    server.add_argument(
        "--host-ratio",
        type=above_nought,
        default=1.0,
        help="host pool as a multiple of it (default %(default)s)",
    )
    server.add_argument(
        "--server-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for the server; repeat as needed",
    )
    server.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="for logs and store (default: a temporary folder, kept when something was found)",
    )
    add_load_arguments(parser, _LOAD)


def run(args: argparse.Namespace) -> int:
    """Fuzzes and reports. The exit status: 0, 1 when something was found, 130 after Ctrl-C. Raises
    KVTierError; where the bench could not go on, after what had been tried is reported.
    """
    if args.json is not None:
        check_target(args.json)
    if missing_packages():
        raise BenchError(
            f"SGLang is not installed for {sys.executable}. Install it with: pip install "
            "'sgl-kvtier[sglang]'"
        )
    chaos = Chaos(parse_kinds(args.chaos), seed=args.seed, kill_every=args.kill_every)
    scenes = None if args.scene is None else parse_scenes(args.scene)
    if scenes and (args.requests or args.restored or args.minutes):
        raise BenchError(
            "--scene: scenes end by themselves; --scale says how long they are, not --requests, "
            "--restored or --minutes"
        )
    model = write_named(fuzzed_model(args))
    wanted = load_options(args, _LOAD)
    chosen = load(wanted, choose_encoder(model, wanted.divisor))
    sessions = calls_of(chosen, wanted.most_output_tokens or 8)
    setup = make_setup(args, model, chosen)
    log = FuzzLog.open(args.log)
    log.floor = None if args.floor is None else read_floor(args.floor)
    interrupted = False
    shown: list[dict[str, Any]] = []
    failure: BenchError | None = None
    with end_on_signals(), _folder(args.folder, log) as folder:
        try:
            _reference(setup, sessions, log, folder)
            if scenes is None:
                _fuzz(args, chaos, setup, sessions, log, folder)
            else:
                play(
                    scenes,
                    _stage_options(args),
                    setup,
                    _AHEAD if args.lookahead else {},
                    sessions,
                    log,
                    folder,
                    shown,
                )
        except KeyboardInterrupt:
            interrupted = True
        except BenchError as error:
            if not log.attempts:
                raise
            failure = error
        with undisturbed():
            result = make_result(args, setup, chosen, chaos, log, interrupted, failure) | {
                "scenes": shown
            }
            _report(args, result)
    if failure is not None:
        raise failure
    if interrupted:
        return 130
    return 1 if any(result["counts"][name] for name in MUST_BE_ZERO) else 0


def fuzzed_model(args: argparse.Namespace) -> str:
    """The name of the model that is fuzzed. Raises BenchError for one the device cannot serve."""
    device = args.device or detect_device()
    name: str = args.lab_model or ("tiny-qwen3" if device == "cpu" else "lab-gpu-tiny")
    check_heads(device, name)
    return name


def make_setup(args: argparse.Namespace, model: Path, chosen: Load) -> Setup:
    """Pools so small that the clients' prompts push each other out of the device, and the host pool
    into the store.
    """
    page = 16
    longest = chosen.longest_tokens + _SETTLED_TOKENS
    at_once = sorted((row["longest_tokens"] for row in chosen.rows), reverse=True)[
        : args.concurrency
    ]
    tokens = args.device_tokens or max(longest * 5 // 4, sum(at_once) * 3 // 4)
    tokens = -(-tokens // page) * page
    if tokens < longest:
        raise BenchError(f"--device-tokens {tokens}: the longest request alone needs {longest}")
    device = args.device or detect_device()
    overlap = () if args.overlap == "on" else ("--disable-overlap-schedule",)
    return Setup(
        model_path=str(model),
        served_name=model.name,
        device=device,
        dtype=args.dtype or serving_dtype(device, fuzzed_model(args)),
        page_size=page,
        chunk_tokens=args.chunk,
        device_tokens=tokens,
        context_tokens=tokens,
        host_ratio=args.host_ratio,
        storage_bytes=args.storage_size,
        prefetch_threshold=32,
        max_running=max(args.concurrency, 8),
        threads=args.threads,
        tp=args.tp,
        extra=(*overlap, *args.server_arg),
    )


def make_result(
    args: argparse.Namespace,
    setup: Setup,
    chosen: Load,
    chaos: Chaos,
    log: FuzzLog,
    interrupted: bool,
    failure: BenchError | None,
) -> dict[str, Any]:
    """The whole result, schema kvtier.restore-fuzz/1 (docs/manual/json.md)."""
    results = {
        "workload": chosen.to_json(),
        "settings": {
            **asdict(setup),
            "concurrency": args.concurrency,
            "deadline_s": args.deadline,
            "chaos": asdict(chaos),
        },
        "counts": counts(log),
        "must_be_zero": list(MUST_BE_ZERO),
        "findings": log.findings,
        "interrupted": interrupted,
        "notes": early_end(failure),
    }
    return envelope(SCHEMA, ["kvtier", *sys.argv[1:]], results)


def _reference(
    setup: Setup, sessions: Sequence[Sequence[Asked]], log: FuzzLog, folder: Path
) -> None:
    missing = sum(asked.name not in log.references for session in sessions for asked in session)
    if not missing:
        return
    plain = Setup(**{**vars(setup), "tp": 1, "extra": (), "sections": {}})
    server = FuzzServer(BASELINE, plain, folder / "computed", log, {})

    async def take() -> None:
        with progress("computing the answers to compare with", missing, "prompts") as shown:
            async with Client(server.url, admin_key=server.admin_key) as client:
                await take_references(client, sessions, log, shown.advance)

    try:
        server.start()
        asyncio.run(take())
    finally:
        server.stop()


def _stage_options(args: argparse.Namespace) -> StageOptions:
    return StageOptions(args.scale, args.concurrency, args.deadline, args.lookahead, args.seed)


def _fuzz(
    args: argparse.Namespace,
    chaos: Chaos,
    setup: Setup,
    sessions: Sequence[Sequence[Asked]],
    log: FuzzLog,
    folder: Path,
) -> None:
    place = folder / "fuzzed"
    shutil.rmtree(place / "storage", ignore_errors=True)
    server = FuzzServer(OURS, setup, place, log, _sections(chaos, args.fault_rank, args.lookahead))
    no_limit = args.requests is None and args.restored is None and args.minutes is None
    options = FuzzOptions(
        run=f"{args.seed}-{args.overlap}-{len(log.attempts)}",
        chaos=chaos,
        concurrency=args.concurrency,
        requests=400 if no_limit else args.requests,
        restored=args.restored,
        seconds=None if args.minutes is None else args.minutes * 60,
        deadline_s=args.deadline,
        ahead=args.lookahead,
    )
    by_restored = options.requests is None and options.restored is not None
    total = options.restored if by_restored else options.requests
    try:
        server.start()
        with progress("fuzzing", total, "restored" if by_restored else "requests") as shown:

            def advance(attempt: Attempt) -> None:
                if not by_restored or attempt.restored:
                    shown.advance(note=f"{attempt.mode}, {len(log.findings)} findings")

            asyncio.run(FuzzRun(options, server, sessions, log, advance).run())
    finally:
        server.stop()


def _sections(chaos: Chaos, rank: int | None, ahead: bool) -> dict[str, dict[str, Any]]:
    faults = chaos.faults() | ({} if rank is None else {"rank": rank})
    # A stall of 0.4 s is past a deadline of 0.1 s.
    policy = {
        "restore": "both",
        "min_restore_tokens": 32,
        "load_deadline_s": 0.1,
        "load_tokens": 32,
    }
    policy |= _AHEAD if ahead else {}
    return {"policy": policy, "lab": {"throttle": {"read_gbps": 1.0}, "faults": faults}}


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    shown = sys.stderr if args.json == "-" else sys.stdout
    figures = result["counts"]
    rows = [{"what": name.replace("_", " "), "count": figures[name]} for name in _SHOWN]
    rows.append({"what": "restored by kvtier", "count": figures["restorations"].get("met", 0)})
    print_table(
        Table("What was tried", (Column("what", "What"), Column("count", "Count")), rows), shown
    )
    rows = [{"what": name.replace("_", " "), "count": figures[name]} for name in MUST_BE_ZERO]
    if result["scenes"]:
        print_table(scenes_table(result["scenes"]), shown)
    print_table(
        Table("What must be 0", (Column("what", "What"), Column("count", "Count")), rows), shown
    )
    events = ", ".join(f"{count} {name}" for name, count in figures["events"].items())
    print(
        f"Done to the server: {events or 'nothing'}. Restored by mode: "
        f"{figures['restored_by_mode']}",
        file=shown,
    )
    print(
        f"How restorations ended, by the servers' counters: {figures['restorations'] or 'none'}",
        file=shown,
    )
    if figures["ahead"]:
        print(f"Looking ahead, by the servers' counters: {figures['ahead']}", file=shown)
    for text in [*result["findings"][:10], *figures["error_messages"], *result["notes"]]:
        print(text, file=shown)
    if args.json is not None:
        write_json(result, args.json)


@contextlib.contextmanager
def _folder(wanted: Path | None, log: FuzzLog) -> Iterator[Path]:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        yield wanted.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="kvtier-fuzz-"))
    try:
        yield folder
    finally:
        figures = counts(log)
        if any(figures[name] for name in MUST_BE_ZERO) and folder.is_dir():
            print(f"The servers' logs are kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
