"""Arguments that several bench commands share, and what they were parsed to."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_kvtier.arguments import (
    above_nought,
    count,
    device,
    not_negative,
    number_from,
    positive,
    seed,
    size,
)
from sgl_kvtier.lab.experiment.load import LoadOptions
from sgl_kvtier.lab.outside.lab_model import DRAWN, SHAPES
from sgl_kvtier.lab.outside.replay import FEEDBACK, ReplayOptions


def add_server_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What every server of a comparison is started with; returns the group, for what a command has
    of its own.
    """
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--model-path",
        metavar="DIR",
        help="a model's folder or name (default: a lab model is written)",
    )
    group.add_argument(
        "--lab-model",
        choices=(*SHAPES, *DRAWN),
        default="lab-mha",
        help="which one (default %(default)s)",
    )
    group.add_argument(
        "--device",
        type=device,
        metavar="cpu|cuda|paced:PROFILE",
        help="default: cuda where there is an NVIDIA device. paced: computes nothing and takes the time of an accelerator "
        "(sgl_kvtier/lab/paced)",
    )
    group.add_argument(
        "--dilation",
        type=above_nought,
        default=1.0,
        metavar="D",
        help="of a paced device: everything takes D times as long, and results are divided by it (default 1)",
    )
    group.add_argument("--dtype", help="default: float32 on a CPU, else the model's")
    group.add_argument(
        "--threads",
        type=positive,
        help="torch threads per server on a CPU (default: half of the cores)",
    )
    group.add_argument("--tp", type=positive, default=1, help="tensor-parallel size (default 1)")
    group.add_argument(
        "--page-size", type=positive, help="tokens per page (default 16 on a CPU, else 64)"
    )
    group.add_argument(
        "--chunk", type=positive, help="chunked prefill size (default 512 on a CPU, else 4096)"
    )
    group.add_argument(
        "--storage-size", type=size, default=4 << 30, help="storage per arm (default 4GiB)"
    )
    group.add_argument(
        "--server-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for every server; repeat as needed, as in --server-arg=--pp-size --server-arg=2",
    )
    return group


def add_load_arguments(parser: argparse.ArgumentParser, defaults: LoadOptions) -> None:
    """Which sessions to replay."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace",
        metavar="SOURCE",
        help="a trace file, a trace's short name, or generated:PRESET (default: swe_mini_deepseek if found, else "
        "generated:swe-mini; `kvtier trace list` shows what there is)",
    )
    group.add_argument(
        "--traces-dir",
        type=Path,
        metavar="DIR",
        help="where traces are (default: ../shared/traces)",
    )
    group.add_argument(
        "--sessions", type=positive, metavar="N", help=f"sessions (default {defaults.sessions})"
    )
    group.add_argument(
        "--skip", type=count, default=0, metavar="N", help="pass over the trace's first N sessions"
    )
    group.add_argument(
        "--turns",
        type=positive,
        metavar="N",
        help=f"cut sessions after N calls (default {defaults.turns or 'all'})",
    )
    group.add_argument(
        "--begin",
        type=number_from(0, 1),
        metavar="SHARE",
        help="enter sessions after this share of their calls: what came before is context of the first "
        f"(default {defaults.begin:g})",
    )
    group.add_argument(
        "--divisor",
        type=positive,
        metavar="D",
        help=f"lab models: divide all token counts by D, keep the structure (default {defaults.divisor})",
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="N",
        help="cut sessions before a longer prompt",
    )
    group.add_argument(
        "--max-output-tokens",
        type=positive,
        metavar="N",
        help=f"generate at most N tokens a call (default {defaults.most_output_tokens or 'all'})",
    )


def load_options(args: argparse.Namespace, defaults: LoadOptions) -> LoadOptions:
    """What `add_load_arguments` parsed; `defaults` fill what was not given."""
    return LoadOptions(
        source=args.trace,
        traces_dir=args.traces_dir,
        sessions=args.sessions or defaults.sessions,
        skip=args.skip,
        turns=args.turns or defaults.turns,
        divisor=args.divisor or defaults.divisor,
        most_prompt_tokens=args.max_prompt_tokens,
        most_output_tokens=args.max_output_tokens or defaults.most_output_tokens,
        seed=args.seed,
        begin=defaults.begin if args.begin is None else args.begin,
    )


def add_replay_arguments(parser: argparse.ArgumentParser, defaults: ReplayOptions) -> None:
    """How to replay them."""
    group = parser.add_argument_group("replay")
    group.add_argument(
        "--concurrency",
        type=positive,
        default=defaults.concurrency,
        metavar="N",
        help="sessions at a time (default %(default)s)",
    )
    group.add_argument(
        "--feedback",
        choices=FEEDBACK,
        default=defaults.feedback,
        help="what the next prompt continues with: the trace's own output, so that every server gets the same prompts, or "
        "the server's (default %(default)s)",
    )
    group.add_argument(
        "--gap-scale",
        type=not_negative,
        default=defaults.gap_scale,
        metavar="X",
        help="recorded tool gaps times X (default %(default)s; 0 = no waiting)",
    )
    group.add_argument(
        "--gap-cap",
        type=not_negative,
        default=defaults.gap_cap_s,
        metavar="S",
        help="no gap longer than S seconds (default: "
        + ("none)" if defaults.gap_cap_s is None else "%(default)s)"),
    )
    group.add_argument(
        "--seed", type=seed, default=0, help="for generated sessions and weights (default 0)"
    )


def replay_options(
    args: argparse.Namespace, most_output_tokens: int | None = None
) -> ReplayOptions:
    """What `add_replay_arguments` parsed."""
    return ReplayOptions(
        concurrency=args.concurrency,
        feedback=args.feedback,
        gap_scale=args.gap_scale,
        gap_cap_s=args.gap_cap,
        most_output_tokens=args.max_output_tokens or most_output_tokens,
    )
