"""`kvtier bench restore`, also `kvtier compare restore`: the grid of a restoration's arms, lengths
and bandwidths.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier import __version__
from sgl_kvtier.arguments import not_negative, positive, seed, size
from sgl_kvtier.console import (
    Progress,
    check_target,
    format_bytes,
    print_table,
    progress,
    write_json,
    write_text,
)
from sgl_kvtier.console.environment import planner_build
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.compare_command import early_end, undisturbed
from sgl_kvtier.lab.experiment.restore.arms import (
    DEFAULT_RESTORE_ARMS,
    OURS,
    RESTORE_ARMS,
    check_restore_arms,
)
from sgl_kvtier.lab.experiment.restore.fluctuate import AIM, Fluctuation, FluctuationOptions
from sgl_kvtier.lab.experiment.restore.grid import (
    LENGTHS,
    RATIOS,
    Grid,
    GridOptions,
    planned,
    prompt,
)
from sgl_kvtier.lab.experiment.restore.log import RestoreLog
from sgl_kvtier.lab.experiment.restore.result import is_sound, make_result, standard_notes
from sgl_kvtier.lab.experiment.restore.server import LabServer, Target, started
from sgl_kvtier.lab.experiment.restore.trial import UNWATCHED_S, ServerCpu, Trials
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.lab_model import DRAWN, SHAPES, UNWEIGHTED, kv_bytes, serving_dtype
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.lab.pages.restore_html import restore_html
from sgl_kvtier.lab.pages.restore_tables import restore_tables
from sgl_kvtier.launch import detect_device, missing_packages
from sgl_kvtier.outside import is_number, is_whole, shown

_COUNTED = "kvtier:restore_"
"""What the server counts of restorations: its growth over a run is in the result."""

_LEAST_STORAGE = 4 << 30
_QUICK_LENGTHS, _QUICK_RATIOS, _QUICK_ROUNDS = (2048,), (0.25, 0.5, 1.0, 2.0, 4.0), 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one length, five bandwidths, two rounds: about 3 minutes on 2 cores",
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
        "--rounds",
        type=positive,
        metavar="N",
        help="rounds, every second one backwards (default 5)",
    )
    parser.add_argument(
        "--slow-rounds",
        type=positive,
        metavar="N",
        help="measure arms that take over 3 times the best of their cell in the first N rounds only (default: in all)",
    )
    parser.add_argument(
        "--arms",
        type=_words,
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
        "--log",
        type=Path,
        metavar="FILE",
        help="keep every trial in FILE and continue from what is in it; models, lengths, ratios, arms and rounds may be others then, nothing else",
    )
    parser.add_argument(
        "--foreign",
        type=not_negative,
        default=0.1,
        metavar="CORES",
        help="repeat trials during which others used more (default %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result with every trial (- for standard output)"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one self-contained page with tables and plots"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="of prompts, weights and traces (default 0)"
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--models",
        type=_words,
        metavar="A,B",
        help=f"lab models ({', '.join(SHAPES)}), for an accelerator drawn ones ({', '.join(DRAWN)}) and shapes without weights "
        f"({', '.join(UNWEIGHTED)}), folders or names (default lab-mha on a CPU, else lab-gpu-1b)",
    )
    server.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is an NVIDIA device"
    )
    server.add_argument(
        "--dtype",
        help="default: float32 on a CPU, bfloat16 for models of ours elsewhere, else the model's",
    )
    server.add_argument(
        "--storage-size",
        type=size,
        metavar="SIZE",
        help="of the store (default: 4GiB, or more where all prompts of a model of ours need it)",
    )
    server.add_argument(
        "--threads",
        type=positive,
        default=1,
        help="torch threads on a CPU (default 1: a core is left for I/O)",
    )
    server.add_argument("--page-size", type=positive, help="default 16 on a CPU, else 64")
    server.add_argument(
        "--chunk", type=positive, help="chunked prefill size (default 512 on a CPU, else 4096)"
    )
    server.add_argument(
        "--strict",
        action="store_true",
        help="with SGLang's own memory checks in every step; slower",
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
        help="for its log and store (default: a temporary folder)",
    )
    server.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="let the server write down its planner's decisions, for kvtier bench restore-timeline; with several models one file each, the model in its name",
    )
    server.add_argument(
        "--url",
        help="measure a running server instead: kvtier backend, a section lab.throttle (and policy.rules = sgl_kvtier.lab.rules:FixedSplit for --fluctuate), --enable-metrics, --enable-cache-report, --admin-api-key; policy.restore = both where auto stands aside (an accelerator, several ranks)",
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
    for target in (args.json, args.html):
        if target is not None:
            check_target(target)
    check_restore_arms(args.arms or DEFAULT_RESTORE_ARMS)
    _check(args)
    log = RestoreLog.open(args.log, _about(args))
    interrupted = False
    failure: BenchError | None = None
    commands: dict[str, Sequence[str]] = {}
    counters: dict[str, dict[str, float]] = {}
    with end_on_signals():
        try:
            for model in _models(args):
                with _target(args, model) as target:
                    commands[model] = target.command
                    _measure(args, target, log, counters.setdefault(model, {}))
        except KeyboardInterrupt:
            interrupted = True
        except BenchError as error:
            if not log.trials:
                raise
            failure = error
        with undisturbed():
            result = _result(args, log, commands, interrupted, failure) | {"counters": counters}
            _report(args, result)
    if failure is not None:
        raise failure
    if interrupted:
        return 130
    return 0 if is_sound(result["summary"]) else 1


def lengths(text: str) -> list[int]:
    """Tokens as 2k,4k,6000."""
    try:
        found = [
            int(part[:-1]) * 1024 if part.lower().endswith("k") else int(part)
            for part in text.split(",")
        ]
    except ValueError:
        found = []
    if (
        not found
        or not all(is_whole(tokens, 256) for tokens in found)
        or len(set(found)) < len(found)
    ):
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: must be lengths of at least 256 tokens, as 2k,4k"
        )
    return found


def ratios(text: str) -> list[float]:
    """Ratios as 1/4,1,4."""
    try:
        found = [
            float(a) / float(b or 1)
            for a, _, b in (part.partition("/") for part in text.split(","))
        ]
    except (ValueError, ZeroDivisionError):
        found = []
    if (
        not found
        or not all(is_number(ratio) and ratio > 0 for ratio in found)
        or len(set(found)) < len(found)
    ):
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be ratios above 0, as 1/4,1,4")
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _check(args: argparse.Namespace) -> None:
    if args.no_grid and not args.fluctuate:
        raise BenchError("--no-grid leaves nothing to measure: add --fluctuate N")
    if args.url is None and missing_packages():
        raise BenchError(
            f"SGLang is not installed for {sys.executable}. Install it with: pip install 'sgl-kvtier[sglang]'"
        )
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
    default = "lab-mha" if (args.device or detect_device()) == "cpu" else "lab-gpu-1b"
    return list(args.models or [default])


def storage_bytes(wanted: int | None, model: str, dtype: str, tokens: int) -> int:
    """The size of the store for prompts of so many tokens together. Raises BenchError where the one
    asked for is known to be too small: loading would be measured on pages that are not there.
    """
    per_token = kv_bytes(model, dtype)
    # A quarter more: headers, padding, and the pages behind a prompt that answers make.
    need = 0 if per_token is None else tokens * per_token * 5 // 4
    if wanted is not None and wanted < need:
        raise BenchError(
            f"--storage-size {format_bytes(wanted)}: {model} needs {format_bytes(need)} for prompts of {tokens:,} tokens together"
        )
    return wanted or max(_LEAST_STORAGE, need)


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
        rounds=args.rounds or (_QUICK_ROUNDS if quick else 5),
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


def _shape(args: argparse.Namespace, model: str) -> tuple[str, int, int, str]:
    """The server's device, page size, chunk size and number type."""
    device = args.device or detect_device()
    cpu = device == "cpu"
    page, chunk = args.page_size or (16 if cpu else 64), args.chunk or (512 if cpu else 4096)
    return device, page, chunk, args.dtype or serving_dtype(device, model)


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """What trials of one log have to have in common. Models, lengths, ratios, arms and rounds are
    not in it: a log may get more.
    """
    device, page, chunk, dtype = _shape(args, "")
    return {
        "kvtier": __version__,
        "seed": args.seed,
        "url": args.url is not None,
        "device": device,
        "dtype": dtype,
        "threads": args.threads,
        "page_size": page,
        "chunk": chunk,
        "strict": args.strict,
        "server_args": args.server_arg,
    }


@contextlib.contextmanager
def _target(args: argparse.Namespace, model: str) -> Iterator[Target]:
    device, page, chunk, dtype = _shape(args, model)
    if args.url is not None:
        yield Target(model, args.url, args.admin_key, args.pid, page, chunk)
        return
    lengths = _options(args, model, page, chunk).lengths
    lab = LabServer(
        model=model,
        longest=max(lengths),
        device=device,
        page=page,
        chunk=chunk,
        threads=args.threads,
        dtype=dtype,
        strict=args.strict,
        seed=args.seed,
        extra=tuple(args.server_arg),
        decision_log=_decision_log(args, model),
        storage_bytes=storage_bytes(args.storage_size, model, dtype, sum(lengths)),
        fixed_splits=bool(args.fluctuate),
    )
    own = args.folder or Path(tempfile.mkdtemp(prefix="kvtier-restore-"))
    folder = own / Path(model).name
    shutil.rmtree(folder / "storage", ignore_errors=True)
    try:
        print(
            f"{model}: starting a server, planner {planner_build()}, its log is {folder / 'server.log'}",
            file=sys.stderr,
        )
        with started(lab, folder) as target:
            yield target
    finally:
        if args.folder is None:
            shutil.rmtree(own, ignore_errors=True)


def _measure(
    args: argparse.Namespace, target: Target, log: RestoreLog, counters: dict[str, float]
) -> None:
    options = _options(args, target.model, target.page, target.chunk)
    traces = args.fluctuate or 0
    wanted = FluctuationOptions(traces=traces, rounds=min(options.rounds, 3), seed=args.seed)
    steps = sum(
        len(list(planned(options, length))) + len(wanted.kinds) * traces
        for length in options.lengths
    )
    with progress("restoring", steps, "steps") as shown:
        asyncio.run(_Work(args, target, options, wanted, log, shown, counters).run())


@dataclass
class _Work:
    args: argparse.Namespace
    target: Target
    options: GridOptions
    fluctuation: FluctuationOptions
    log: RestoreLog
    shown: Progress
    counters: dict[str, float]

    async def run(self) -> None:
        async with Client(self.target.url, admin_key=self.target.admin_key) as client:
            before = (await client.metrics()).sums(_COUNTED)
            try:
                await self._measure(client)
            finally:
                after = (await client.metrics()).sums(_COUNTED)
                self.counters |= {
                    name: value - before.get(name, 0.0) for name, value in after.items()
                }

    async def _measure(self, client: Client) -> None:
        trials = Trials(
            client,
            ServerCpu(self.target.pid),
            quiet_foreign=self.args.foreign,
            discard=self.log.keep,
        )
        grid = Grid(self.options, trials, self.log, self.shown.advance, self.shown.describe)
        await grid.run()
        if not self.fluctuation.traces:
            return
        for length in self.options.lengths:
            scale = self.log.scale(self.options.model, length)
            assert scale is not None, "the grid has measured it"
            self.shown.describe(f"{scale.model} {length:,} tokens: fluctuating")
            ids = prompt(self.options, length)
            await Fluctuation(
                self.fluctuation, trials, self.log, scale, ids, self.shown.advance
            ).run()


def _result(
    args: argparse.Namespace,
    log: RestoreLog,
    commands: dict[str, Sequence[str]],
    interrupted: bool,
    failure: BenchError | None,
) -> dict[str, Any]:
    settings = {
        "threads": args.threads,
        "rounds": args.rounds or (_QUICK_ROUNDS if args.quick else 5),
        "slow_rounds": args.slow_rounds,
        "seed": args.seed,
        "foreign_cores_limit": args.foreign,
        "cores": os.cpu_count(),
        "server_commands": commands,
    }
    notes = [f"{log.continued} trials were in the log before this run."] if log.continued else []
    if interrupted:
        notes.append("Interrupted: figures are from the trials that had ended.")
    notes += early_end(failure)
    if args.url is not None and args.pid is None:
        notes.append(
            "Without --pid the server's processor use is not told from that of others: `foreign_cores` is null, no trial was made "
            f"again for it, and the server was left alone for {UNWATCHED_S:g} s before each."
        )
    extra = {"fluctuation": {"cells": log.fluctuations, "aim": AIM}} if log.fluctuations else {}
    return make_result(log, settings, interrupted=interrupted, notes=notes, extra=extra)


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    shown = sys.stderr if args.json == "-" else sys.stdout
    for table in restore_tables(result):
        print_table(table, shown)
        print(file=shown)
    if not result["cells"]:
        print(f"Nothing of {OURS} was measured.", file=shown)
    always = standard_notes(result["settings"])
    for note in result["notes"]:
        if note not in always:
            print(note, file=shown)
    if args.json is not None:
        write_json(result, args.json)
    if args.html is not None:
        write_text(restore_html(result), args.html)
