"""Options that several commands share, and the objects they are parsed to.

`Options` has what commands share, each command's own class adds what only it has. This module
decides the device, page and chunk of a server for all commands (`shape_of`, `setup_of`).
`arms.prepare` makes the server's command line.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from sgl_kvtier.arguments import above_nought, any_device, count, not_negative, positive, seed, size
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import Setup
from sgl_kvtier.lab.experiment.load import Load, LoadOptions
from sgl_kvtier.lab.outside import smollm2
from sgl_kvtier.lab.outside.lab_model import NAMES, write_named
from sgl_kvtier.lab.outside.model_shapes import DRAWN, SHAPES, serving_dtype
from sgl_kvtier.lab.outside.openai import ROUTES
from sgl_kvtier.lab.outside.replay import FEEDBACK, ReplayOptions
from sgl_kvtier.lab.paced.launching import CHUNK_TOKENS, is_paced, parse
from sgl_kvtier.lab.workload.catalogue import FOLDER_HELP
from sgl_kvtier.lab.workload.source import BLOCK_TOKENS
from sgl_kvtier.launch import detect_device, host_of
from sgl_kvtier.outside import shown

_T = TypeVar("_T", bound="Options")


@dataclass(frozen=True)
class Options:
    """What was given, by the names of the options; None where the command decides. A command that
    does not offer an option has the default here.
    """

    # of a run
    quick: bool = False
    rounds: int | None = None
    json: str | None = None
    html: str | None = None
    log: Path | None = None
    minutes: float | None = None
    seed: int = 0
    # of servers that are started, or the one that is there
    url: str | None = None
    device: str | None = None
    dilation: float | None = None
    model: str | None = None
    dtype: str | None = None
    threads: int | None = None
    tp: int | None = None
    page_size: int | None = None
    chunk: int | None = None
    storage_size: int | None = None
    server_arg: Sequence[str] = ()
    folder: Path | None = None
    # of sessions
    trace: str | None = None
    traces_dir: Path | None = None
    skip: int = 0
    sessions: int | None = None
    turns: int | None = None
    divisor: int | None = None
    max_prompt_tokens: int | None = None
    min_prompt_tokens: int | None = None
    block_tokens: int | None = None
    max_output_tokens: int | None = None
    # of how they are replayed
    concurrency: int | None = None
    rate: float | None = None
    route: str = "generate"
    feedback: str = "recorded"
    pause: float | None = None
    gap_scale: float | None = None
    gap_cap: float | None = None

    @classmethod
    def of(cls: type[_T], args: argparse.Namespace) -> _T:
        """Those that a parser found."""
        given = vars(args)
        return cls(**{one.name: given[one.name] for one in fields(cls) if one.name in given})


T = TypeVar("T")

_Options = Mapping[str, Mapping[str, Any]]

RUN: _Options = {
    "quick": {"action": "store_true", "help": "a small load and few rounds"},
    "rounds": {"type": positive, "metavar": "N", "help": "rounds (default 3)"},
    "json": {
        "metavar": "FILE",
        "help": "write the result with everything that was measured (- for standard output)",
    },
    "html": {"metavar": "FILE", "help": "write one self-contained page with tables and plots"},
    "log": {
        "type": Path,
        "metavar": "FILE",
        "help": "keep every trial in FILE, and go on from those that are in it: a comparison in pieces",
    },
    "minutes": {
        "type": not_negative,
        "metavar": "M",
        "help": "begin no trial after so long; with --log the next run goes on",
    },
    "seed": {"type": seed, "default": 0, "help": "of prompts, sessions and weights (default 0)"},
}
"""Options of a run."""

SERVER: _Options = {
    "model": {
        "metavar": "NAME",
        "help": f"a model of `kvtier model`, which is written first ({smollm2.NAME} has real weights), or a model's folder or "
        "ORGANIZATION/NAME (default %(default)s)",
    },
    "device": {
        "type": any_device,
        "metavar": "cpu|cuda|paced:PROFILE[@GB/s]",
        "help": "paced: an emulated GPU, which takes the GPU's time and computes nothing; its disk reads 6.4 GB/s or what "
        "follows the @ (default %(default)s)",
    },
    "dilation": {
        "type": above_nought,
        "default": 1.0,
        "metavar": "D",
        "help": "of an emulated GPU: everything takes D times as long, and results are divided by it "
        "(default %(default)g)",
    },
    "dtype": {"help": "of the weights and the KV cache, as SGLang's (default %(default)s)"},
    "threads": {"type": positive, "help": "torch threads per server (default %(default)s)"},
    "tp": {"type": positive, "help": "tensor-parallel size (default %(default)s)"},
    "page-size": {"type": positive, "help": "tokens per page (default %(default)s)"},
    "chunk": {"type": positive, "help": "chunked prefill size (default %(default)s)"},
    "storage-size": {"type": size, "help": "storage per configuration (default %(default)s)"},
    "server-arg": {
        "action": "append",
        "default": [],
        "metavar": "ARG",
        "help": "one more argument for every server; repeat as needed, as in --server-arg=--pp-size --server-arg=2",
    },
    "folder": {
        "type": Path,
        "metavar": "DIR",
        "help": "keep logs and storage in DIR/CONFIGURATION (default: a temporary folder, kept when something fails)",
    },
}
"""Options of the servers that are started. `server_shown` has the defaults that help names."""
LAB_MODEL: Mapping[str, Any] = {
    "choices": (*SHAPES, *DRAWN),
    "metavar": None,
    "help": "which one (default %(default)s)",
}
"""The option `model` of a command that knows its own models alone."""


def add_options(
    parser: argparse._ActionsContainer,
    options: _Options,
    names: str = "",
    **changed: Mapping[str, Any],
) -> None:
    """Some of the shared options, by their names; without names all. `changed` says what is other
    for this command: a help text, a default.
    """
    for name in names.split() or options:
        own = changed.get(name.replace("-", "_"), {})
        parser.add_argument(f"--{name}", **{**options[name], **own})


@dataclass(frozen=True)
class Shape:
    """The kind of server that is started, in all commands alike. Sizes are in tokens."""

    device: str
    page: int
    chunk: int
    dtype: str


def shape_of(args: Options, model: str | None = None) -> Shape:
    """The shape given by the options; an option not given follows the machine and the model.

    Without `model` that is the lab model of the options, if it is one of ours.
    """
    device = args.device or detect_device()
    page, chunk = (16, 512) if device == "cpu" else (64, CHUNK_TOKENS if is_paced(device) else 4096)
    if model is None:
        model = args.model if args.model in NAMES else ""
    return Shape(
        device,
        args.page_size or page,
        args.chunk or chunk,
        args.dtype or serving_dtype(host_of(device), model),
    )


def setup_of(args: Options, shape: Shape, model: str | Path, **more: Any) -> Setup:
    """The servers' common settings; `more` are those that the command decides itself. Raises
    BenchError where the storage is too small.
    """
    storage = more.pop("storage_bytes", None) or args.storage_size or 4 << 30
    if storage < 1 << 26:
        raise BenchError(f"--storage-size {storage}: must be at least 64MiB")
    return Setup(
        model_path=str(model),
        served_name=Path(model).name,
        device=shape.device,
        page_size=shape.page,
        chunk_tokens=shape.chunk,
        dtype=shape.dtype,
        storage_bytes=storage,
        seed=args.seed,
        threads=args.threads or max((os.cpu_count() or 2) // 2, 1),
        tp=args.tp or 1,
        dilation=args.dilation or 1.0,
        **{"extra": tuple(args.server_arg), **more},
    )


def thresholds(chosen: Load, page: int) -> dict[str, Any]:
    """The least tokens of a prefix that is read back, at the scale of the load.

    SGLang asks storage only for 256 tokens or more. Restoration by default leaves shorter prefixes
    to SGLang. At a reduced scale both would be shut out.
    """
    least = max(256 // chosen.encoder.divisor, page)
    return {"prefetch_threshold": least, "sections": {"policy": {"min_restore_tokens": least}}}


def model_of(args: Options, device: str = "") -> str:
    """The model's folder or name; one of `kvtier model` is written first. Raises BenchError for a
    name that is neither, and where an emulated GPU is given another than its own.
    """
    if is_paced(device):
        refuse_other(args, device)
        return str(parse(device, args.dilation or 1.0).model())
    name = args.model or "lab-mha"
    if name in NAMES:
        return str(write_named(name, seed=args.seed))
    if "/" not in name and not Path(name).is_dir():
        raise BenchError(
            f"--model {name}: no folder, no ORGANIZATION/NAME, and none of {', '.join(NAMES)}"
        )
    return name


def refuse_other(args: Options, device: str) -> None:
    """Raises BenchError where an emulated GPU is given another model than its own."""
    if args.model:
        raise BenchError(f"--model: {device} brings a model of its own")


def deadline_of(args: Options) -> float | None:
    """When --minutes are over, in seconds of the monotonic clock; None without a limit."""
    return None if args.minutes is None else time.monotonic() + 60 * args.minutes


def each_once(
    what: str, number: Callable[[str], T], good: Callable[[T], bool]
) -> Callable[[str], list[T]]:
    """The type of values with commas between, each `good` and none of them twice. `what` says so."""

    def parse(text: str) -> list[T]:
        try:
            found = [number(part) for part in text.split(",")]
        except ValueError:
            found = []
        if not found or not all(map(good, found)) or len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{shown(text)}: must be {what}")
        return found

    return parse


def words(text: str) -> list[str]:
    """Names with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Which sessions to replay. `load_shown` has the defaults that its help names."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace",
        metavar="SOURCE",
        help="a trace file, a trace's short name, or generated:PRESET (default: swe_mini_deepseek if found, else "
        "generated:swe-mini; `kvtier trace list` shows what there is)",
    )
    group.add_argument("--traces-dir", type=Path, metavar="DIR", help=FOLDER_HELP)
    group.add_argument(
        "--skip", type=count, default=0, metavar="N", help="pass over the trace's first N sessions"
    )
    for name, letter, about in (
        ("sessions", "N", "sessions (default %(default)s)"),
        ("turns", "N", "cut sessions after N calls (default %(default)s)"),
        (
            "divisor",
            "D",
            "lab models: divide all token counts by D, keep the structure (default %(default)s)",
        ),
        ("max-prompt-tokens", "N", "cut sessions before a longer prompt"),
        ("block-tokens", "N", BLOCK_TOKENS),
    ):
        group.add_argument(f"--{name}", type=positive, metavar=letter, help=about)
    group.add_argument(
        "--min-prompt-tokens",
        type=count,
        metavar="N",
        help="pass over sessions without a prompt of N tokens (default %(default)s)",
    )
    group.add_argument(
        "--max-output-tokens",
        type=_most_tokens,
        metavar="N|recorded",
        help="generate at most N tokens a call; recorded, or 0: as many as the trace says, without a limit "
        "(default %(default)s)",
    )


def _most_tokens(text: str) -> int:
    """A limit of output tokens; 0 is none."""
    if text == "recorded":
        return 0
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or recorded") from error


def load_shown(usual: LoadOptions) -> dict[str, object]:
    """The defaults of `add_load_arguments` as its help names them, by option."""
    return {
        "sessions": usual.sessions,
        "turns": "all" if usual.turns is None else usual.turns,
        "divisor": usual.divisor,
        "min_prompt_tokens": usual.least_prompt_tokens,
        "max_output_tokens": usual.most_output_tokens or "recorded",
    }


def server_shown(args: Options) -> dict[str, object]:
    """The defaults of `SERVER` as help names them on the device of these options, by option."""
    shape = shape_of(replace(args, page_size=None, chunk=None, dtype=None))
    emulated = is_paced(shape.device)
    return {
        "device": shape.device,
        "model": "the device's own" if emulated else args.model or "lab-mha",
        "dtype": shape.dtype,
        "threads": 1 if emulated else "half of the cores",
        "tp": 1,
        "page_size": shape.page,
        "chunk": shape.chunk,
        "storage_size": "4GiB",
    }


def load_options(args: Options, defaults: LoadOptions) -> LoadOptions:
    """The options that `add_load_arguments` parsed; `defaults` fill those not given."""
    most, least = args.max_output_tokens, args.min_prompt_tokens
    return LoadOptions(
        source=args.trace,
        traces_dir=args.traces_dir,
        sessions=args.sessions or defaults.sessions,
        skip=args.skip,
        turns=args.turns or defaults.turns,
        divisor=args.divisor or defaults.divisor,
        most_prompt_tokens=args.max_prompt_tokens or defaults.most_prompt_tokens,
        least_prompt_tokens=defaults.least_prompt_tokens if least is None else least,
        most_output_tokens=defaults.most_output_tokens if most is None else most or None,
        seed=args.seed,
        begin=defaults.begin,
        block_tokens=args.block_tokens,
    )


def add_replay_arguments(parser: argparse.ArgumentParser, defaults: ReplayOptions) -> None:
    """How to replay them."""
    group = parser.add_argument_group("replay")
    how_many = group.add_mutually_exclusive_group()
    # No default: argparse does not take an option for given where it has its default's value.
    how_many.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"sessions at a time: the next begins when one ends (default {defaults.concurrency})",
    )
    how_many.add_argument(
        "--rate",
        type=above_nought,
        metavar="R",
        help="open loop instead: R sessions arrive a second on average, at random times that follow from the seed",
    )
    add_session_arguments(group, defaults)


def add_session_arguments(group: argparse._ArgumentGroup, defaults: ReplayOptions) -> None:
    """How each session is replayed, however many there are at a time."""
    group.add_argument(
        "--route",
        choices=tuple(ROUTES),
        default=defaults.route,
        help="how servers are asked: SGLang's /generate, or /v1/completions as OpenAI's API has it, with token ids as prompts "
        "and text as answers (default %(default)s)",
    )
    group.add_argument(
        "--feedback",
        choices=FEEDBACK,
        default=defaults.feedback,
        help="what the next prompt continues with: the trace's own output, so that every server gets the same prompts, or "
        "the server's (default %(default)s)",
    )
    group.add_argument(
        "--pause",
        type=not_negative,
        metavar="S",
        help="every tool gap lasts S seconds, whatever was recorded (default: %(default)s)",
    )
    group.add_argument(
        "--gap-scale",
        type=not_negative,
        metavar="X",
        help=f"recorded tool gaps times X (default {defaults.gap_scale:g}; 0 = no waiting)",
    )
    group.add_argument(
        "--gap-cap",
        type=not_negative,
        metavar="S",
        help="no recorded gap longer than S seconds (default: "
        + ("none)" if defaults.gap_cap_s is None else f"{defaults.gap_cap_s:g})"),
    )
    add_options(group, RUN, "seed")


def replay_options(
    args: Options, defaults: ReplayOptions, most_output_tokens: int | None = None
) -> ReplayOptions:
    """The options that `add_replay_arguments` parsed; `defaults` fill those not given. The load
    says how many tokens are generated. Raises BenchError.
    """
    recorded = args.gap_scale is not None or args.gap_cap is not None
    if recorded and args.pause is not None:
        raise BenchError("--pause is instead of the recorded gaps: leave --gap-scale and --gap-cap")
    return ReplayOptions(
        concurrency=None if args.rate is not None else args.concurrency or defaults.concurrency,
        rate=args.rate,
        seed=args.seed,
        route=args.route,
        feedback=args.feedback,
        gap_scale=defaults.gap_scale if args.gap_scale is None else args.gap_scale,
        gap_cap_s=defaults.gap_cap_s if args.gap_cap is None else args.gap_cap,
        pause_s=None if recorded else defaults.pause_s if args.pause is None else args.pause,
        most_output_tokens=most_output_tokens,
    )
