"""`kvtier compare remote`: sessions that begin on one server and go on at another, over one Mooncake
store, at the speed of a network.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_kvtier import __version__
from sgl_kvtier.arguments import positive, size
from sgl_kvtier.console import progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    PACED_SERVER,
    RUN,
    add_options,
    deadline_of,
    each_once,
    setup_of,
    shape_of,
    words,
)
from sgl_kvtier.lab.experiment.arms import Setup, check_names
from sgl_kvtier.lab.experiment.comparison import paced_notes
from sgl_kvtier.lab.experiment.frame import Experiment, check, work_folder
from sgl_kvtier.lab.experiment.machine import made_with
from sgl_kvtier.lab.experiment.options import Options
from sgl_kvtier.lab.experiment.remote.arms import REMOTE_ARMS, ROUTES
from sgl_kvtier.lab.experiment.remote.figures import about_arms, remote_results
from sgl_kvtier.lab.experiment.remote.run import RemoteOptions, RemoteRun
from sgl_kvtier.lab.experiment.remote.turns import NEW_TOKENS, WARM, Cell, MovedLog
from sgl_kvtier.lab.experiment.scenarios.restore import ratios
from sgl_kvtier.lab.outside.lab_model import write_named
from sgl_kvtier.lab.paced.launching import is_paced, parse
from sgl_kvtier.lab.paced.pace import MOST_OVERRUN
from sgl_kvtier.lab.pages.kinds import REMOTE
from sgl_kvtier.launch import host_of
from sgl_kvtier.outside import is_number
from sgl_kvtier.remote.servers import missing_engine

_RATIOS = (0.25, 1.0, 4.0)
_TURNS = {"moved": 2, "round-robin": 4}
_SPARE_TOKENS = 1024
_ROOM = 3
"""Prompts that fit into the device pool: nothing of a session under way is evicted."""

_speeds = each_once(
    "gigabits per second of at least 0, each once, as 0,1,10", float, lambda x: is_number(x, 0.0)
)

STANDING = (
    "Every arm has two servers A and B of its own, fresh in every round, and a fresh master and owner. A session's first turns "
    "go to A and its next to B, or they take turns; times are of turns whose session was served by the other server before.",
    "Servers reach the owner through one relay with a token bucket for each direction, at every speed and in all arms alike. "
    "What A writes is sent at full speed; then moved turns are asked for one by one at the cell's.",
    f"In every cell {WARM} session is played first and not counted, so that connections are there and a speed is learned.",
    "All arms get the same prompts. Equality: output tokens against those of recompute.",
    "SGLang's own settings (prefetch policy timeout, write-through) are left as they are in all arms.",
)


@dataclass(frozen=True)
class RemoteCommand(Options):
    """The command's options. `tokens` is known when the device is."""

    device: str = "cpu"
    dilation: float = 1.0
    lab_model: str = ""
    tokens: int = 0
    arms: Sequence[str] | None = None
    route: str = "moved"
    gbps: Sequence[float] | None = None
    load_over_compute: Sequence[float] | None = None
    segment: int = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_options(
        parser,
        RUN,
        "quick rounds json html log minutes seed",
        quick={"help": "two sessions, one round, at full speed and balance"},
        log={
            "help": "keep every turn in FILE, and go on from those that are in it: a comparison in pieces"
        },
    )
    parser.add_argument(
        "--arms", type=words, metavar="A,B", help=f"of {', '.join(REMOTE_ARMS)} (default: all)"
    )
    parser.add_argument(
        "--route",
        choices=ROUTES,
        default="moved",
        help="moved: sessions begin on A and go on at B; round-robin: A and B take turns (default %(default)s)",
    )
    parser.add_argument(
        "--gbps",
        type=_speeds,
        metavar="X,X",
        help="speeds of the link between servers and store, in gigabits per second; 0: as fast as the relay goes (default 0)",
    )
    parser.add_argument(
        "--load-over-compute",
        type=ratios,
        metavar="X,X",
        help="and speeds at which loading a prompt takes X times as long as computing it, as 1/4,1,4 (default 1/4,1,4; none "
        "where --gbps is given)",
    )
    sessions = parser.add_argument_group("sessions")
    sessions.add_argument(
        "--tokens", type=positive, help="of a first prompt (default 2048, 16384 on a paced device)"
    )
    sessions.add_argument(
        "--sessions", type=positive, metavar="N", help="of every cell and round (default 4)"
    )
    sessions.add_argument(
        "--turns",
        type=positive,
        metavar="N",
        help=f"of a session, each {NEW_TOKENS} tokens longer (default 2, 4 with round-robin)",
    )
    servers = parser.add_argument_group("servers")
    add_options(
        servers,
        PACED_SERVER,
        "lab-model device dilation dtype threads page-size chunk storage-size server-arg folder",
        lab_model={
            "default": None,
            "help": "which one (default lab-mha; a paced device has its own)",
        },
        device={
            "default": "cpu",
            "help": "default %(default)s; two servers on one card would share it",
        },
        threads={
            "default": 1,
            "help": "torch threads of a server (default 1: a core is left for I/O)",
        },
    )
    servers.add_argument(
        "--segment",
        type=size,
        default=1 << 30,
        metavar="SIZE",
        help="memory for shared pages (default 1GiB)",
    )


def run(given: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed or an answer differs, 130
    after Ctrl-C. Raises KVTierError.
    """
    args = RemoteCommand.of(given)
    if host_of(args.device) != "cpu":
        raise BenchError(
            f"--device {args.device}: two servers on one card would share it; leave it out"
        )
    paced = is_paced(args.device)
    if paced and args.lab_model:
        raise BenchError(f"--lab-model: {args.device} brings a model of its own")
    tokens = args.tokens or (16384 if paced else 2048)
    args = replace(args, tokens=tokens, lab_model=args.lab_model or "lab-mha")
    check(args)
    if reason := missing_engine():
        raise BenchError(reason)
    one = Moving(args)
    log = MovedLog.open(args.log, one.about())
    with work_folder(args.folder, lambda: bool(one.failures)) as folder:
        return Experiment(
            args,
            REMOTE.schema,
            measure=lambda: one.measure(log, folder),
            results=lambda: one.results(log),
            tables=REMOTE.tables,
            page=REMOTE.page,
            standing=[*paced_notes(one.setup.paced), *STANDING],
            notes=lambda: [*one.notes, *lost_pace(one.results(log))],
            measured=lambda: bool(log.turns),
            sound=lambda result: not one.failures and is_sound(result["summary"]),
        ).run()


def is_sound(summary: dict[str, Any]) -> bool:
    """Whether no request failed and no answer differs."""
    return not summary["errors"] and summary["equal_tokens_fraction"] in (None, 1.0)


def lost_pace(result: dict[str, Any]) -> list[str]:
    """A note for every arm and speed at which a paced device could not keep its pace."""
    return [
        f"INVALID: {arm} at {cell['gbps']:.3g} Gbit/s lost {one['lost_fraction']:.0%} of its time to the first token (median)."
        for cell in result["cells"]
        for arm, one in cell["arms"].items()
        if (one["lost_fraction"] or 0.0) > MOST_OVERRUN
    ]


@dataclass
class Moving:
    """One comparison: what its options say, and what came of its arms."""

    args: RemoteCommand

    def __post_init__(self) -> None:
        args = self.args
        self.arms = args.arms or list(REMOTE_ARMS)
        check_names(self.arms, list(REMOTE_ARMS))
        self.arms = [arm for arm in REMOTE_ARMS if arm in self.arms]
        self.cells = _cells(args)
        self.turns = args.turns or _TURNS[args.route]
        if self.turns < 2:
            raise BenchError("--turns 1: a session of one turn is never moved")
        self.setup = _setup(args, self.turns)
        self.failures: dict[str, str] = {}
        self.notes: list[str] = []

    def about(self) -> dict[str, Any]:
        """What turns of one log have in common."""
        args = self.args
        return {
            "kvtier": __version__,
            "model": self.setup.served_name,
            "device": args.device,
            "dilation": args.dilation,
            "tokens": args.tokens,
            "turns": self.turns,
            "route": args.route,
            "seed": args.seed,
            "page": self.setup.page_size,
            "chunk": self.setup.chunk_tokens,
            "dtype": self.setup.dtype,
            **made_with("cpu"),
        }

    def measure(self, log: MovedLog, folder: Path) -> None:
        """All rounds."""
        args = self.args
        options = RemoteOptions(
            model=self.setup.served_name if self.setup.paced else args.lab_model,
            length=args.tokens,
            arms=self.arms,
            cells=self.cells,
            rounds=_rounds(args),
            sessions=args.sessions or (2 if args.quick else 4),
            turns=self.turns,
            route=args.route,
            seed=args.seed,
            segment_bytes=args.segment,
            until=deadline_of(args),
        )
        total = options.rounds * len(self.arms) * len(self.cells)
        with progress("measuring", total, "cells") as shown:
            work = RemoteRun(options, self.setup, log, folder, shown.advance, shown.describe)
            work.failures, work.notes = self.failures, self.notes
            work.run()

    def results(self, log: MovedLog) -> dict[str, Any]:
        """The result, schema kvtier.compare.remote/1 (docs/manual/json.md)."""
        args = self.args
        speeds = [(cell, log.gbps(cell)) for cell in self.cells]
        cells = [(cell, gbps) for cell, gbps in speeds if gbps is not None]
        settings = {
            "model": self.setup.served_name,
            "tokens": args.tokens,
            "turns": self.turns,
            "route": args.route,
            "rounds": _rounds(args),
            "page_size": self.setup.page_size,
            "chunk_tokens": self.setup.chunk_tokens,
            "threads": self.setup.threads,
            "device_tokens": self.setup.device_tokens,
            "segment_bytes": args.segment,
        }
        found = remote_results(log, self.arms, cells)
        if self.setup.paced is not None:
            found["device"] = {"paced": self.setup.paced.document()}
        return {"settings": settings, "arms": about_arms(self.arms), **found}


def _cells(args: RemoteCommand) -> Sequence[Cell]:
    gbps = [0.0] if args.gbps is None else args.gbps
    usual = (1.0,) if args.quick else _RATIOS
    derived = args.load_over_compute or (usual if args.gbps is None else ())
    return [*(Cell(one) for one in gbps), *(Cell(None, ratio) for ratio in derived)]


def _rounds(args: RemoteCommand) -> int:
    found: int = args.rounds or (1 if args.quick else 3)
    return found


def _setup(args: RemoteCommand, turns: int) -> Setup:
    shape = shape_of(args)
    paced = parse(args.device, args.dilation, args.server_arg) if is_paced(args.device) else None
    longest = args.tokens + turns * NEW_TOKENS
    tokens = -(-(_ROOM * longest + _SPARE_TOKENS) // shape.page) * shape.page
    return setup_of(
        args,
        shape,
        write_named(args.lab_model, seed=args.seed) if paced is None else paced.model(),
        device_tokens=tokens,
        context_tokens=tokens,
        max_running=8,
        sections={} if paced is None else paced.sections(),
    )
