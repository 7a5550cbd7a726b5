"""`kvtier compare remote`: sessions that begin on one server and go on at another, over one Mooncake
store, at the speed of a network.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import positive
from sgl_kvtier.console import progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import (
    LAB_MODEL,
    RUN,
    SERVER,
    Options,
    add_options,
    deadline_of,
    each_once,
    refuse_other,
    server_shown,
    setup_of,
    shape_of,
    words,
)
from sgl_kvtier.lab.experiment.arms import BASELINE, MOONCAKE, Setup, check_names
from sgl_kvtier.lab.experiment.comparison import device_of, paced_notes
from sgl_kvtier.lab.experiment.frame import Experiment, check, work_folder
from sgl_kvtier.lab.experiment.machine import made_with
from sgl_kvtier.lab.experiment.remote.run import (
    NEW_TOKENS,
    REMOTE,
    REMOTE_ARMS,
    TURNS,
    WARM,
    Cell,
    Moved,
    MovedLog,
    RemoteRun,
)
from sgl_kvtier.lab.outside.lab_model import write_named
from sgl_kvtier.lab.outside.model_shapes import kv_bytes
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.paced.launching import is_paced, parse
from sgl_kvtier.lab.paced.pace import MOST_OVERRUN
from sgl_kvtier.lab.pages import kinds
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary
from sgl_kvtier.launch import host_of
from sgl_kvtier.outside import is_number
from sgl_kvtier.remote.servers import missing_engine

_RATIOS = (0.25, 1.0, 4.0)
_SPARE_TOKENS = 1024
_ROOM = 3
"""Prompts that fit into the device pool: nothing of a session under way is evicted."""
_LEAST_SEGMENT = 1 << 30
_speeds = each_once(
    "gigabits per second of at least 0, each once, as 0,1,10", float, lambda x: is_number(x, 0.0)
)

STANDING = (
    "Every configuration has two servers A and B of its own, fresh in every round, and a fresh master and owner. A session's first turns "
    "go to A and its next to B, or they take turns; times are of turns whose session was served by the other server before.",
    "Servers reach the owner through one relay with a token bucket for each direction, at every speed and in all configurations alike. "
    "What A writes is sent at full speed; then moved turns are asked for one by one at the cell's.",
    f"In every cell {WARM} session is played first and not counted, so that connections are there and a speed is learned.",
    "All configurations get the same prompts. Equality: output tokens against those of recompute.",
    "SGLang's own settings (prefetch policy timeout, write-through) are left as they are in all configurations.",
)


@dataclass(frozen=True)
class RemoteOptions(Options):
    """The command's options. `tokens` is known when the device is."""

    device: str = "cpu"
    dilation: float = 1.0
    threads: int = 1
    model: str = ""
    tokens: int = 0
    arms: Sequence[str] | None = None
    gbps: Sequence[float] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_options(
        parser,
        RUN,
        "quick rounds json html log minutes seed",
        quick={"help": "two sessions, one round, at full speed and balance"},
        rounds={"help": "rounds (default %(default)s)"},
        log={
            "help": "keep every turn in FILE, and go on from those that are in it: a comparison in pieces"
        },
    )
    parser.add_argument(
        "--arms",
        type=words,
        metavar="A,B",
        help=f"configurations, of {', '.join(REMOTE_ARMS)} (default: all)",
    )
    parser.add_argument(
        "--gbps",
        type=_speeds,
        metavar="X,X",
        default=(),
        help="speeds of the link between servers and store, in gigabits per second; 0: as fast as it goes (default 0, and those "
        "at which loading a prompt takes 1/4, 1 and 4 times as long as computing it)",
    )
    sessions = parser.add_argument_group("sessions")
    sessions.add_argument("--tokens", type=positive, help="of a first prompt (default %(default)s)")
    sessions.add_argument(
        "--sessions",
        type=positive,
        metavar="N",
        help="at each speed of every round (default %(default)s)",
    )
    add_options(
        parser.add_argument_group("servers"),
        SERVER,
        "model device dilation page-size chunk storage-size server-arg folder",
        model=LAB_MODEL,
        device={
            "default": "cpu",
            "help": "default %(default)s; two servers on one card would share it",
        },
    )


def defaults(given: argparse.Namespace) -> dict[str, object]:
    """The defaults that help shows: they follow from the options that are given."""
    args = RemoteOptions.of(given)
    return {
        **server_shown(replace(args, model=args.model or "lab-mha")),
        "rounds": _rounds(replace(args, rounds=None)),
        "tokens": _tokens(args),
        "sessions": _sessions(replace(args, sessions=None)),
    }


def run(given: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed or an answer differs, 130
    after Ctrl-C. Raises KVTierError.
    """
    args = RemoteOptions.of(given)
    if host_of(args.device) != "cpu":
        raise BenchError(
            f"--device {args.device}: two servers on one card would share it; leave it out"
        )
    paced = is_paced(args.device)
    if paced:
        refuse_other(args, args.device)
    args = replace(args, tokens=args.tokens or _tokens(args), model=args.model or "lab-mha")
    check(args)
    if reason := missing_engine():
        raise BenchError(reason)
    one = Moving(args)
    log = MovedLog.open(args.log, one.about())
    with work_folder(args.folder, lambda: bool(one.failures)) as folder:
        return Experiment(
            args,
            kinds.REMOTE.schema,
            measure=lambda: one.measure(log, folder),
            results=lambda: one.results(log),
            tables=kinds.REMOTE.tables,
            page=kinds.REMOTE.page,
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

    args: RemoteOptions

    def __post_init__(self) -> None:
        args = self.args
        self.arms = args.arms or list(REMOTE_ARMS)
        check_names(self.arms, list(REMOTE_ARMS))
        self.arms = [arm for arm in REMOTE_ARMS if arm in self.arms]
        self.cells = _cells(args)
        self.setup = _setup(args)
        self.failures: dict[str, str] = {}
        self.notes: list[str] = []

    def about(self) -> dict[str, Any]:
        """What turns of one log have in common."""
        args = self.args
        return {
            "model": self.setup.served_name,
            "device": args.device,
            "dilation": args.dilation,
            "tokens": args.tokens,
            "turns": TURNS,
            "route": "moved",
            "seed": args.seed,
            "page": self.setup.page_size,
            "chunk": self.setup.chunk_tokens,
            "dtype": self.setup.dtype,
            "threads": self.setup.threads,
            "storage_bytes": self.setup.storage_bytes,
            "server_args": args.server_arg,
            **made_with("cpu"),
        }

    def measure(self, log: MovedLog, folder: Path) -> None:
        """All rounds."""
        args = self.args
        rounds, arms, cells = _rounds(args), self.arms, self.cells
        with progress("measuring", rounds * len(arms) * len(cells), "cells") as shown:
            RemoteRun(
                self.setup,
                log,
                folder,
                model=self.setup.served_name if self.setup.paced else args.model,
                length=args.tokens,
                token_bytes=self.token_bytes(),
                arms=arms,
                cells=cells,
                rounds=rounds,
                sessions=self.sessions,
                seed=args.seed,
                segment_bytes=self.segment_bytes(),
                until=deadline_of(args),
                failures=self.failures,
                notes=self.notes,
                advance=shown.advance,
                describe=shown.describe,
            ).run()

    @property
    def sessions(self) -> int:
        """How many count, of every cell and round."""
        return _sessions(self.args)

    def token_bytes(self) -> int:
        """The KV cache of one token, in bytes of the modelled machine."""
        if self.setup.paced is not None:
            return self.setup.paced.profile.kv_bytes_per_token
        return kv_bytes(self.args.model, self.setup.dtype) or 0

    def segment_bytes(self) -> int:
        """Memory for shared pages: twice what a cell's sessions have, so that none is evicted."""
        scale = 1.0 if self.setup.paced is None else self.setup.paced.bytes_scale
        tokens = (WARM + self.sessions) * (self.args.tokens + NEW_TOKENS)
        return max(_LEAST_SEGMENT, round(2 * tokens * self.token_bytes() / scale))

    def results(self, log: MovedLog) -> dict[str, Any]:
        """The result, schema kvtier.compare.remote/1 (docs/manual/json.md)."""
        args = self.args
        speeds = [(cell, log.gbps(cell)) for cell in self.cells]
        cells = [(cell, gbps) for cell, gbps in speeds if gbps is not None]
        settings = {
            "model": self.setup.served_name,
            "tokens": args.tokens,
            "turns": TURNS,
            "route": "moved",
            "rounds": _rounds(args),
            "page_size": self.setup.page_size,
            "chunk_tokens": self.setup.chunk_tokens,
            "threads": self.setup.threads,
            "device_tokens": self.setup.device_tokens,
            "segment_bytes": self.segment_bytes(),
        }
        return {
            **device_of(self.setup.paced),
            "settings": settings,
            **remote_results(log, self.arms, cells),
        }


def _cells(args: RemoteOptions) -> Sequence[Cell]:
    if args.gbps:
        return [Cell(gbps) for gbps in args.gbps]
    return [Cell(0.0), *(Cell(None, ratio) for ratio in ((1.0,) if args.quick else _RATIOS))]


def _tokens(args: RemoteOptions) -> int:
    return 16384 if is_paced(args.device) else 2048


def _sessions(args: RemoteOptions) -> int:
    return args.sessions or (2 if args.quick else 4)


def _rounds(args: RemoteOptions) -> int:
    return args.rounds or (1 if args.quick else 3)


def _setup(args: RemoteOptions) -> Setup:
    shape = shape_of(args)
    paced = parse(args.device, args.dilation, args.server_arg) if is_paced(args.device) else None
    longest = args.tokens + TURNS * NEW_TOKENS
    tokens = -(-(_ROOM * longest + _SPARE_TOKENS) // shape.page) * shape.page
    return setup_of(
        args,
        shape,
        write_named(args.model, seed=args.seed) if paced is None else paced.model(),
        device_tokens=tokens,
        context_tokens=tokens,
        max_running=8,
        sections={} if paced is None else paced.sections(),
    )


def remote_results(
    log: MovedLog, arms: Sequence[str], cells: Sequence[tuple[Cell, float]]
) -> dict[str, Any]:
    """The arms in words, and the cells."""
    reference = answers(log)
    rows = [_cell(log, cell, gbps, arms, reference) for cell, gbps in cells]
    figures = [arm for row in rows for arm in row["arms"].values()]
    equal = [arm["equal_tokens_fraction"] for arm in figures]
    shares = [share for share in equal if share is not None]
    return {
        "arms": {arm: REMOTE_ARMS[arm].about for arm in arms},
        "scale": [
            {"length": one.length, "compute_ms": 1000 * one.compute_s, "bytes": one.prefix_bytes}
            for one in log.scales
        ],
        "cells": rows,
        "summary": {
            "equal_tokens_fraction": min(shares, default=None),
            "errors": sum(arm["errors"] for arm in figures),
        },
        "turns": [_row(one, reference) for one in log.turns],
    }


def answers(log: MovedLog) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """What every answer is compared with: recompute's, by place; without that arm the first."""
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for one in sorted(log.turns, key=lambda one: one.arm != BASELINE):
        if one.error is None:
            found.setdefault(one.place, one.output_ids)
    return found


def _cell(
    log: MovedLog,
    cell: Cell,
    gbps: float,
    arms: Sequence[str],
    reference: Mapping[tuple[Any, ...], tuple[int, ...]],
) -> dict[str, Any]:
    turns = [one for one in log.turns if one.cell == cell.name]
    figures = {arm: _arm([one for one in turns if one.arm == arm], reference) for arm in arms}
    return {
        "gbps": gbps,
        "load_over_compute": cell.load_over_compute,
        "arms": figures,
        "ratios": {f"{arm}/{REMOTE}": _ratio(turns, arm) for arm in arms if arm != REMOTE in arms},
        "vs_better": _vs_better(figures),
    }


def _arm(
    turns: Sequence[Moved], reference: Mapping[tuple[Any, ...], tuple[int, ...]]
) -> dict[str, Any]:
    counting = [one for one in turns if one.moved and one.session >= WARM]
    good = [one for one in counting if one.error is None]
    compared = [one.output_ids == reference[one.place] for one in turns if one.place in reference]
    cached = [one.cached for one in good if one.cached is not None]
    return {
        "ttft_ms": summary(milliseconds(one.ttft_s) for one in good),
        "equal_tokens_fraction": sum(compared) / len(compared) if compared else None,
        "compared": len(compared),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "cached_tokens": {
            tier: sum(getattr(one, tier) for one in cached)
            for tier in ("device", "host", "storage", "total")
        },
        "remote_bytes": sum(one.remote_bytes for one in good),
        "lost_fraction": percentile(
            (one.lost_s / one.ttft_s for one in good if one.lost_s is not None and one.ttft_s), 50
        ),
        "foreign_cores": percentile((one.foreign_cores for one in counting), 50),
        "errors": sum(one.error is not None for one in turns),
        "error_messages": sorted({one.error for one in turns if one.error is not None})[:5],
    }


def _ratio(turns: Sequence[Moved], arm: str) -> dict[str, Any]:
    """Another arm's time to first token over kvtier-remote's, turn by turn: above 1 ours is
    shorter.
    """
    by_place = {
        (one.arm, one.place): one.ttft_s
        for one in turns
        if one.moved and one.session >= WARM and one.error is None
    }
    places = sorted({place for _, place in by_place})
    theirs, ours = ([by_place.get((name, p)) for p in places] for name in (arm, REMOTE))
    return pair_ratios(theirs, ours)


def _vs_better(figures: Mapping[str, Mapping[str, Any]]) -> float | None:
    """How many times as fast as the better of recompute and stock's Mooncake kvtier-remote is."""
    ours = figures.get(REMOTE, {}).get("ttft_ms", {}).get("p50")
    others = [figures[arm]["ttft_ms"]["p50"] for arm in (BASELINE, MOONCAKE) if arm in figures]
    known = [one for one in others if one is not None]
    return min(known) / ours if ours and known else None


def _row(one: Moved, reference: Mapping[tuple[Any, ...], tuple[int, ...]]) -> dict[str, Any]:
    names = ("arm", "round", "cell", "session", "number", "server", "moved", "gbps", "error")
    return {
        **{name: getattr(one, name) for name in names},
        "counts": one.moved and one.session >= WARM,
        "prompt_tokens": one.prompt_tokens,
        "ttft_ms": milliseconds(one.ttft_s),
        "cached_tokens": None if one.cached is None else one.cached.total,
        "remote_bytes": one.remote_bytes,
        "foreign_cores": one.foreign_cores,
        "equal": one.output_ids == reference.get(one.place) if one.error is None else False,
    }
