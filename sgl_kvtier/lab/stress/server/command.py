"""`kvtier bench restore-fuzz`: agent sessions against a server in trouble; no hang, no leak, no
other answer, no failure.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import above_nought, not_negative, positive
from sgl_kvtier.console import Table, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    LAB_MODEL,
    RUN,
    SERVER,
    Options,
    add_load_arguments,
    add_options,
    load_options,
    load_shown,
    server_shown,
)
from sgl_kvtier.lab.experiment.arms import BASELINE, OURS, Setup, model_arguments
from sgl_kvtier.lab.experiment.frame import Experiment, check, work_folder
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, choose_encoder, load
from sgl_kvtier.lab.experiment.machine import made_with
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.lab_model import write_named
from sgl_kvtier.lab.paced.launching import Paced, is_paced, parse
from sgl_kvtier.lab.pages.html import marked
from sgl_kvtier.lab.stress.server.chaos import Chaos, parse_kinds
from sgl_kvtier.lab.stress.server.judge import floor_of
from sgl_kvtier.lab.stress.server.log import MUST_BE_ZERO, Attempt, FuzzLog, counts
from sgl_kvtier.lab.stress.server.remote import NAMES, Menace, fuzz_two, halves
from sgl_kvtier.lab.stress.server.run import Asked, FuzzOptions, FuzzRun, calls_of, take_references
from sgl_kvtier.lab.stress.server.scenes import SCENES, parse_scenes, play, scenes_table
from sgl_kvtier.lab.stress.server.server import (
    CHUNK,
    PACED_CHUNK,
    FuzzServer,
    audits,
    fuzzed_model,
    make_setup,
    sections,
)
from sgl_kvtier.lab.stress.trouble import counted

SCHEMA = "kvtier.restore-fuzz/1"
_LOAD = LoadOptions(sessions=16, turns=6, divisor=4, most_output_tokens=8)
_PACED = LoadOptions(sessions=16, turns=6, divisor=1, most_output_tokens=8, begin=0.6)
_PACED_GBPS = 128.0
"""Bandwidths on a paced device over those for a lab model, at the modelled machine: 2 to 512
Gbit/s.
"""
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
        help="end after N requests (default 400, unless another limit is given)",
    )
    parser.add_argument(
        "--restored", type=positive, metavar="N", help="end after N restored requests"
    )
    parser.add_argument("--minutes", type=not_negative, metavar="M", help="end after M minutes")
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
        help="what goes wrong: all, none, or of errors, corrupt, stall, holes, abort, disconnect, "
        "flush, kill, switch, hint, priority (default all, which is all but priority; with "
        "--lookahead neither holes)",
    )
    parser.add_argument(
        "--lookahead",
        action="store_true",
        help="the server looks ahead (docs/manual/lookahead.md): sessions pause between turns, "
        "hints are sent, its map is compared at the end (not with holes: looking all pages up "
        "loses some)",
    )
    parser.add_argument(
        "--remote",
        action="store_true",
        help="two servers on one Mooncake store, whose master and owner are killed, stopped and "
        "started again at random (needs the extra [remote])",
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
        help="a request that takes longer hangs (default %(default)s; times --dilation)",
    )
    add_options(
        parser,
        RUN,
        "log json seed",
        log={
            "help": "keep references and requests in FILE and add to what is in it; model, device, "
            "dtype, card and planner have to be the same"
        },
        seed={"help": "of everything that is decided here (default 0)"},
    )
    parser.add_argument(
        "--floor",
        action="store_true",
        help="for numbers that chunk borders move, as bfloat16 on a GPU: answers may differ as far "
        "as SGLang's own do with two chunk sizes, which is measured first. Without failing reads "
        "loaded pages are also compared bit for bit",
    )
    server = parser.add_argument_group("server")
    add_options(
        server,
        SERVER,
        "model device dilation dtype threads tp chunk page-size storage-size server-arg folder",
        model=LAB_MODEL,
        storage_size={"default": 1 << 30, "help": "of the store (default %(default)s)"},
        threads={"default": 1},
    )
    server.add_argument(
        "--overlap",
        choices=("on", "off"),
        default="on",
        help="SGLang's overlap of scheduling and computing (default on)",
    )
    server.add_argument(
        "--host-ratio",
        type=above_nought,
        default=1.0,
        help="host pool as a multiple of the device pool, which has room for three quarters of the "
        "longest prompts at a time (default %(default)s)",
    )
    add_load_arguments(parser)


def defaults(args: argparse.Namespace) -> dict[str, object]:
    """The defaults that help shows: they follow from the options that are given."""
    emulated, model = is_paced(args.device), fuzzed_model(args)
    return {
        **server_shown(replace(Options.of(args), model=model)),
        **load_shown(_PACED if emulated else _LOAD),
        "threads": args.threads,
        "chunk": PACED_CHUNK if emulated else CHUNK,
        "storage_size": "1GiB",
    }


def run(args: argparse.Namespace) -> int:
    """Fuzzes and reports. The exit status: 0, 1 when something was found, 130 after Ctrl-C. Raises
    KVTierError; where the bench could not go on, after what had been tried is reported.
    """
    check(Options.of(args))
    chaos = Chaos(
        parse_kinds(args.chaos, ahead=args.lookahead), seed=args.seed, kill_every=args.kill_every
    )
    scenes = () if args.scene is None else parse_scenes(args.scene)
    if scenes and (args.requests or args.restored or args.minutes):
        raise BenchError(
            "--scene: scenes end by themselves; --scale says how long they are, not --requests, "
            "--restored or --minutes"
        )
    if args.remote and scenes:
        raise BenchError("--remote: not with --scene; leave one of them out")
    paced = _paced(args)
    if paced is not None and scenes:
        raise BenchError(f"--scene: {args.device} has none; leave --scene or --device out")
    model = write_named(fuzzed_model(args)) if paced is None else paced.model()
    wanted = load_options(Options.of(args), _LOAD if paced is None else _PACED)
    chosen = load(wanted, choose_encoder(model, wanted.divisor))
    sessions = calls_of(chosen, wanted.most_output_tokens)
    setup = make_setup(args, model, chosen)
    log = FuzzLog.open(args.log, about(setup))
    one = Fuzzing(args, chaos, setup, chosen, sessions, log, scenes)
    with work_folder(args.folder, lambda: not one.is_sound()) as folder:
        return Experiment(
            Options.of(args),
            SCHEMA,
            measure=lambda: one.measure(folder),
            results=one.results,
            tables=tables,
            notes=one.notes,
            measured=lambda: bool(log.attempts),
            sound=lambda _: one.is_sound(),
        ).run()


def about(setup: Setup) -> dict[str, Any]:
    """The settings that requests of one log have in common: what answers depend on, and whose
    defects are counted. Trouble, loads and the event loop may be others.
    """
    return {
        "model": setup.served_name,
        "device": setup.device,
        "dtype": setup.dtype,
        **made_with(setup.device),
    }


@dataclass
class Fuzzing:
    """A run's load and its results: in the log, and those of scenes in `played`."""

    args: argparse.Namespace
    chaos: Chaos
    setup: Setup
    chosen: Load
    sessions: Sequence[Sequence[Asked]]
    log: FuzzLog
    scenes: Sequence[str]
    played: list[dict[str, Any]] = field(default_factory=list)
    remote: dict[str, int] = field(default_factory=dict)
    """What the servers counted of a remote store."""

    def measure(self, folder: Path) -> None:
        """The answers to compare with, then the scenes, or sessions in trouble."""
        args, log = self.args, self.log
        if not self.scenes:
            _fuzz(self, folder)
            return
        _reference(self, folder)
        options = _options(args, self.chaos, self.setup, log)
        play(self.scenes, options, args.scale, self.setup, self.sessions, log, folder, self.played)

    def results(self) -> dict[str, Any]:
        """The trials and findings, schema kvtier.restore-fuzz/1."""
        args = self.args
        paced = self.setup.paced
        return {
            **({} if paced is None else {"device": {"paced": paced.document()}}),
            "workload": self.chosen.to_json(),
            "settings": {
                **asdict(self.setup),
                "concurrency": args.concurrency,
                "deadline_s": args.deadline,
                "chaos": asdict(self.chaos),
            },
            "floor": None if self.log.floor is None else self.log.floor.document(),
            "counts": counts(self.log),
            "must_be_zero": list(MUST_BE_ZERO),
            "findings": self.log.findings,
            "scenes": self.played,
            "remote": self.remote,
        }

    def is_sound(self) -> bool:
        """Whether everything that must be 0 is, and answers were compared at all, and restorations
        completed. Scenes compare what they find to compare.
        """
        figures = counts(self.log)
        shown = bool(self.scenes) or (figures["compared"] > 0 and self.log.ends["met"] > 0)
        shown = shown and (self.setup.paced is None or figures["checked_tokens"] > 0)
        audited = not audits(self.args, self.chaos) or figures["audited_pages"].get("equal", 0) > 0
        shown = shown and audited and (not self.args.remote or self.remote.get("pages_read", 0) > 0)
        return shown and not any(figures[name] for name in MUST_BE_ZERO)

    def notes(self) -> list[str]:
        """The counts that no table has, in words."""
        figures = counts(self.log)
        events = ", ".join(f"{count} {name}" for name, count in figures["events"].items())
        ahead = f"Looking ahead, by the servers' counters: {figures['ahead']}"
        compared = "No answer was compared: the run showed nothing. Give it more time."
        met = "kvtier completed no restoration: the run showed nothing. Give it more time."
        floor, audited = self.log.floor, figures["audited_pages"]
        paced = self.setup.paced is not None
        checked = f"Keys and values compared in place: {figures['checked_tokens']:,} tokens."
        return [
            f"Done to the server: {events or 'nothing'}. Restored by mode: "
            f"{figures['restored_by_mode']}",
            "How restorations ended, by the servers' counters: "
            f"{figures['restorations'] or 'none'}",
            *([ahead] if figures["ahead"] else []),
            *(
                [f"The remote store, by the servers' counters: {self.remote}"]
                if self.remote
                else []
            ),
            *([checked] if paced else []),
            *([f"SGLang's own answers with two chunk sizes: {floor}"] if floor else []),
            *([f"Loaded pages, bit for bit: {audited}"] if audited else []),
            *([] if figures["compared"] or self.scenes else [compared]),
            *([] if self.log.ends["met"] or self.scenes or not self.log.knows_ends else [met]),
            *self.log.findings[:10],
            *figures["error_messages"],
        ]


def tables(result: dict[str, Any]) -> list[Table]:
    """Tables of the trials, the scenes, and the counts that must be 0."""
    figures = result["counts"]

    ours = {"restored by kvtier": figures["restorations"].get("met", 0)}
    tried = counted("What was tried", {name: figures[name] for name in _SHOWN} | ours)
    scenes = [scenes_table(result["scenes"])] if result["scenes"] else []
    found = [tried, *scenes, counted("What must be 0", figures, MUST_BE_ZERO)]
    return [marked(table, result) for table in found]


def only_computing(setup: Setup) -> Setup:
    """The setup of the server that computes the answers to compare with: the same model with the
    same kernels, on one rank, without what is fuzzed.
    """
    return replace(setup, tp=1, extra=model_arguments(setup.extra), sections={})


def _reference(of: Fuzzing, folder: Path) -> None:
    """The answers to compare with, and how far they differ with other chunks."""
    plain, log = only_computing(of.setup), of.log
    _compute(plain, of.sessions, log, folder / "computed")
    if of.args.floor and log.floor is None:
        page, others = plain.page_size, FuzzLog()
        chunk = max(page, plain.chunk_tokens * 15 // 64 // page * page)
        _compute(
            replace(plain, chunk_tokens=chunk), of.sessions, others, folder / f"computed-{chunk}"
        )
        log.add("floor", floor_of((log.references[n], a) for n, a in others.references.items()))


def _compute(setup: Setup, sessions: Sequence[Sequence[Asked]], log: FuzzLog, folder: Path) -> None:
    missing = sum(asked.name not in log.references for session in sessions for asked in session)
    if not missing:
        return
    server = FuzzServer(BASELINE, setup, folder, log, {})

    async def take() -> None:
        with progress("computing the answers to compare with", missing, "prompts") as shown:
            async with Client(server.url, admin_key=server.admin_key) as client:
                await take_references(client, sessions, log, shown.advance)

    try:
        server.start()
        asyncio.run(take())
    finally:
        server.stop()


def _fuzz(of: Fuzzing, folder: Path) -> None:
    """Sessions against one server in trouble, or two on one remote store."""
    args, log = of.args, of.log
    options = _options(args, of.chaos, of.setup, log)
    by_restored = options.requests is None and options.restored is not None
    total = options.restored if by_restored else options.requests
    servers: list[FuzzServer] = []
    with Menace(log, args.seed) if args.remote else nullcontext() as menace:
        _reference(of, folder)
        try:
            for name in NAMES if menace else ("fuzzed",):
                found = sections(of.setup, of.chaos, args)
                found = menace.sections(found) if menace else found
                shutil.rmtree(folder / name / "storage", ignore_errors=True)
                servers.append(FuzzServer(OURS, of.setup, folder / name, log, found))
            with ThreadPoolExecutor() as starting:
                list(starting.map(FuzzServer.start, servers))
            with progress("fuzzing", total, "restored" if by_restored else "requests") as shown:

                def advance(attempt: Attempt) -> None:
                    if not by_restored or attempt.restored:
                        shown.advance(note=f"{attempt.mode}, {len(log.findings)} findings")

                runs = [
                    FuzzRun(one, server, of.sessions, log, advance)
                    for one, server in zip(
                        halves(options) if menace else [options], servers, strict=True
                    )
                ]
                if menace:
                    of.remote |= asyncio.run(fuzz_two(runs, servers, menace))
                else:
                    asyncio.run(runs[0].run())
        finally:
            for server in servers:
                server.stop()


def _options(args: argparse.Namespace, chaos: Chaos, setup: Setup, log: FuzzLog) -> FuzzOptions:
    no_limit = args.requests is None and args.restored is None and args.minutes is None
    return FuzzOptions(
        run=f"{args.seed}-{args.overlap}-{len(log.attempts)}",
        chaos=chaos,
        concurrency=args.concurrency,
        requests=400 if no_limit else args.requests,
        restored=args.restored,
        seconds=None if args.minutes is None else args.minutes * 60,
        deadline_s=args.deadline,
        page_tokens=setup.page_size,
        dilation=setup.dilation,
        gbps_scale=1.0 if setup.paced is None else _PACED_GBPS / setup.paced.slower,
        ahead=args.lookahead,
        audited=audits(args, chaos),
    )


def _paced(args: argparse.Namespace) -> Paced | None:
    return parse(args.device, args.dilation, args.server_arg) if is_paced(args.device) else None
