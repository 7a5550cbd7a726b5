"""`kvtier replay`: agent sessions against a server that is already running."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import url
from sgl_kvtier.console import Column, Table, format_bytes, progress
from sgl_kvtier.errors import BenchError, KVTierError
from sgl_kvtier.lab.experiment.argtypes import (
    RUN,
    Options,
    add_load_arguments,
    add_options,
    add_replay_arguments,
    load_options,
    load_shown,
    replay_options,
)
from sgl_kvtier.lab.experiment.frame import Experiment, check
from sgl_kvtier.lab.experiment.load import Load, LoadOptions, choose_encoder, load
from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.measures import Round, arm_figures, sample_rows
from sgl_kvtier.lab.experiment.rounds import settled_metrics
from sgl_kvtier.lab.outside.openai import ROUTES
from sgl_kvtier.lab.outside.replay import ReplayOptions, SampleLog, replay
from sgl_kvtier.lab.paced.launching import Paced, of_server
from sgl_kvtier.lab.pages.html import marked

SCHEMA = "kvtier.replay/1"

_ARM = "server"
_TIMEOUT_S = 600.0
"""After which a request is given up."""
_LOAD = LoadOptions(turns=None, divisor=1)
_REPLAY = ReplayOptions(concurrency=8)


@dataclass(frozen=True)
class ReplayedOptions(Options):
    """The command's options."""

    url: str = ""
    tokenizer: Path | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "url",
        type=url,
        help="the server, such as http://127.0.0.1:30000; with --route openai of any kind that has /v1/completions. One on an emulated "
        "GPU says so itself, and times are divided by its dilation",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="the model's folder or tokenizer.json, where the server's own path is not on this machine",
    )
    every = "append every finished request to this JSON Lines file"
    add_options(parser, RUN, "log json", log={"help": every})
    add_load_arguments(parser)
    add_replay_arguments(parser, _REPLAY)


def defaults(_: argparse.Namespace) -> dict[str, object]:
    """The defaults that help shows: they follow from the options that are given."""
    return {**load_shown(_LOAD), "pause": "as recorded"}


def run(given: argparse.Namespace) -> int:
    """Replays and reports. The exit status: 0, 1 when requests failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    args = ReplayedOptions.of(given)
    check(args, starts_servers=False)
    wanted = load_options(args, _LOAD)
    options = replay_options(args, _REPLAY, wanted.most_output_tokens)
    path, paced = asyncio.run(_server(args))
    one = Round(_ARM, 1, dilation=1.0 if paced is None else paced.dilation)
    model = args.tokenizer or Path(path)
    encoder = choose_encoder(_folder(model), args.divisor or _LOAD.divisor)
    chosen = load(wanted, encoder)
    print(chosen.description, file=sys.stderr)
    return Experiment(
        args,
        SCHEMA,
        measure=lambda: asyncio.run(_measure(args, options, chosen, one)),
        results=lambda: _results(args, options, chosen, one, paced),
        tables=lambda result: [marked(_table(result), result)],
        standing=[*_paced_notes(paced), *chosen.notes],
        measured=lambda: bool(one.samples),
        sound=lambda result: not result["figures"]["errors"],
    ).run()


async def _server(args: ReplayedOptions) -> tuple[str, Paced | None]:
    """Its model's path, and the paced device that it is on."""
    async with ROUTES[args.route](args.url, timeout_s=30) as client:
        path = str((await client.model_info()).get("model_path", ""))
        return path, of_server((await client.metrics()).to_json())


def _paced_notes(paced: Paced | None) -> list[str]:
    if paced is None:
        return []
    return [
        f"Paced, not computed: the server says that it has profile {paced.profile.name} and dilation {paced.dilation:g}. Gaps and "
        "time-outs are that many times as long, and times are divided by it. Whether it kept pace is in its own log, "
        "pace.jsonl in the folder of its store."
    ]


def _folder(model: Path) -> Path:
    if not model.exists():
        raise BenchError(
            f"the server's model {str(model)!r} is not on this machine: give its tokenizer with --tokenizer"
        )
    return model if model.is_dir() else model.parent


async def _measure(args: ReplayedOptions, options: ReplayOptions, chosen: Load, one: Round) -> None:
    async with ROUTES[args.route](args.url, timeout_s=_TIMEOUT_S, dilation=one.dilation) as client:
        one.before = await client.metrics()
        watch = CpuWatch(lambda: 0.0)
        with progress("replaying", chosen.requests, "requests") as shown:
            try:
                await replay(
                    chosen.sessions,
                    client,
                    chosen.encoder,
                    options,
                    one.samples,
                    log=SampleLog(_log_path(args.log), url=args.url),
                    on_done=lambda _: shown.advance(),
                )
                one.complete = True
            finally:
                one.wall_s = watch.stop().wall_s / one.dilation
                one.after = await settled_metrics(client)


def _log_path(path: Path | None) -> Path | None:
    if path is None:
        return None
    try:
        with path.open("a"):
            return path
    except OSError as error:
        raise KVTierError(f"--log {path}: {error.strerror}") from error


def _results(
    args: ReplayedOptions, options: ReplayOptions, chosen: Load, one: Round, paced: Paced | None
) -> dict[str, Any]:
    rows = sample_rows([one])
    return {
        **({} if paced is None else {"device": {"paced": paced.document()}}),
        "workload": chosen.to_json(),
        "settings": {"url": args.url, **asdict(options)},
        "figures": arm_figures(_ARM, [one], rows),
        "samples": rows,
    }


def _table(result: dict[str, Any]) -> Table:
    figures = result["figures"]
    rows: list[dict[str, Any]] = [
        {"what": name, **figures[key]}
        for name, key in (
            ("TTFT (ms)", "ttft_ms"),
            ("TPOT (ms)", "tpot_ms"),
            ("End to end (ms)", "e2e_ms"),
        )
    ]
    columns = (
        Column("what", "Measure"),
        Column("p50", "p50"),
        Column("p90", "p90"),
        Column("p99", "p99"),
        Column("mean", "mean"),
    )
    rate = figures["throughput_tokens_per_s"]
    notes = [
        f"{figures['requests']:,} requests, {figures['errors']:,} of them failed"
        + (": " + "; ".join(figures["error_messages"]) if figures["errors"] else ""),
        f"{figures['prompt_tokens']:,} prompt tokens: {_sources(result)}",
        "storage "
        + ", ".join(
            f"{name} {'not known' if nbytes is None else format_bytes(nbytes)}"
            for name, nbytes in figures["bytes"].items()
        ),
    ]
    if rate is not None:
        notes.append(f"{rate:,.1f} output tokens per second")
    return Table("Replay", columns, rows, notes)


def _sources(result: dict[str, Any]) -> str:
    """Where prompt tokens came from, in words."""
    cached = result["figures"]["cached_tokens"]
    good = [row for row in result["samples"] if row["error"] is None and row["cached"]]
    untold = sum(row["cached"]["total"] - sum(row["cached"][t] for t in cached) for row in good)
    named = [f"{tokens:,} from {tier}" for tier, tokens in cached.items() if tokens is not None]
    if untold > 0:
        named.append(f"{untold:,} from a cache that the server does not name")
    return ", ".join(named) or "how many came from a cache is not known"
