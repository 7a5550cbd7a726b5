"""The options of `kvtier compare restore`."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_kvtier.arguments import above_nought, count, not_negative, positive
from sgl_kvtier.console import check_target
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import PACED_SERVER, RUN, add_options, shape_of, words
from sgl_kvtier.lab.experiment.restore.arms import (
    BATCH_ARMS,
    DEFAULT_BATCH_ARMS,
    DEFAULT_RESTORE_ARMS,
    RESTORE_ARMS,
    SHORTEST_FIRST,
)
from sgl_kvtier.lab.experiment.restore.plan import DECODERS, RestoreOptions
from sgl_kvtier.lab.outside.model_shapes import DRAWN, SHAPES, UNWEIGHTED
from sgl_kvtier.lab.paced.launching import CHUNK_TOKENS, is_paced
from sgl_kvtier.outside import is_number, is_whole, shown

FOREIGN_CORES, PACED_FOREIGN_CORES = 0.1, 0.5
"""Defaults of --foreign: a paced server leaves most of its cores to others."""
_NOT_PACED = {
    "models": "brings a model of its own",
    "url": "is started by this command, which reads the device's own log; leave one of the two out",
}
"""Options that a paced device has no use for, and why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_options(
        parser,
        RUN,
        "quick rounds json html log seed",
        quick={
            "help": "one length (two on a paced device), five bandwidths, two rounds: about 3 minutes on 2 cores"
        },
        rounds={"help": "rounds, every second one backwards (default 5)"},
        log={
            "help": "keep every trial in FILE and continue from what is in it; models, lengths, ratios, arms and rounds may be others then, nothing else"
        },
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        metavar="N,N",
        help="prefixes in tokens, k = 1024 (default 2k,4k,8k,16k; 8k,16k,32k,64k on a paced device)",
    )
    parser.add_argument(
        "--load-over-compute",
        type=ratios,
        metavar="X,X",
        help="loading over computing, as 1/4,1,4: the bandwidth is derived from the measured time of computing (default 1/16 to 16)",
    )
    parser.add_argument(
        "--slow-rounds",
        type=positive,
        metavar="N",
        help="measure arms that take over 3 times the best of their cell in the first N rounds only (default: in all)",
    )
    parser.add_argument(
        "--arms",
        type=words,
        metavar="A,B",
        help=f"of {', '.join(RESTORE_ARMS)} (default {','.join(DEFAULT_RESTORE_ARMS)}); with --at-once of {', '.join(BATCH_ARMS)} "
        f"(default {','.join(DEFAULT_BATCH_ARMS)})",
    )
    parser.add_argument(
        "--hole",
        choices=("first",),
        help="the first page of every prefix is deleted whenever the store is asked for it: SGLang's own load reads nothing",
    )
    _add_batch_arguments(parser.add_argument_group("several at once"))
    parser.add_argument(
        "--foreign",
        type=not_negative,
        metavar="CORES",
        help=f"repeat trials during which others used more (default {FOREIGN_CORES:g}; {PACED_FOREIGN_CORES:g} on a paced "
        "device, where those that lost over 10 %% of their time to the first token are repeated too)",
    )
    _add_server_arguments(parser.add_argument_group("server"))


def _add_batch_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--at-once",
        type=sizes,
        metavar="N,N",
        help="ask for this many stored prefixes together, mixed of --lengths (then by default 1k,2k,3k,4k; 4k,8k,16k,32k on a paced "
        "device), beside requests that decode; --load-over-compute is that of the mix (default 1)",
    )
    group.add_argument(
        "--poisson",
        type=above_nought,
        metavar="LOAD",
        help="they arrive at random instead: a load of 1 is one in the time that compute and link together need for it",
    )
    group.add_argument(
        "--decoders",
        type=count,
        metavar="N",
        help=f"requests that decode beside, begun before and ended after a batch (default {DECODERS})",
    )


def _add_server_arguments(server: argparse._ArgumentGroup) -> None:
    add_options(
        server,
        PACED_SERVER,
        "device dilation dtype threads page-size chunk storage-size server-arg folder",
        dtype={
            "help": "default: float32 on a CPU and a paced device, bfloat16 for models of ours elsewhere, else the model's"
        },
        page_size={
            "help": "tokens per page (default 16 on a CPU, else 64, which a paced device has alone)"
        },
        chunk={
            "help": f"chunked prefill size (default 512 on a CPU, 4096 on a GPU, {CHUNK_TOKENS} on a paced device)"
        },
        storage_size={
            "default": None,
            "help": "of the store (default: 4GiB, or more where all prompts of a model of ours need it)",
        },
        threads={
            "default": 1,
            "help": "torch threads on a CPU (default 1: a core is left for I/O; a paced device has 1 alone)",
        },
    )
    server.add_argument(
        "--models",
        type=words,
        metavar="A,B",
        help=f"lab models ({', '.join(SHAPES)}), for an accelerator drawn ones ({', '.join(DRAWN)}) and shapes without weights "
        f"({', '.join(UNWEIGHTED)}), folders or names (default lab-mha on a CPU, else lab-gpu-1b; a paced device brings its own)",
    )
    server.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="let the server write down its planner's decisions, for kvtier bench restore-timeline; with several models one file each, the model in its name",
    )
    server.add_argument(
        "--url",
        help="measure a running server instead: kvtier backend, a section lab.throttle, --enable-metrics, --enable-cache-report, --admin-api-key; policy.restore = both where auto is off (several ranks, an AMD GPU)",
    )
    server.add_argument("--admin-key", help="with --url: its admin key")
    server.add_argument(
        "--pid",
        type=positive,
        help="with --url: its process, to tell its processor use from that of others",
    )


def check_arguments(args: RestoreOptions) -> None:
    """Raises BenchError for options that do not go together."""
    if is_paced(args.device):
        _check_paced(args)
    _check_batches(args)
    for name in ("url", "at_once"):
        if args.hole and getattr(args, name):
            raise BenchError(f"--hole: not with --{name.replace('_', '-')}; leave one of them out")
    if args.decision_log is not None:
        if args.url is not None:
            raise BenchError(
                "--decision-log: the server at --url names its own, policy.decision_log of its settings"
            )
        check_target(str(args.decision_log))
    page = shape_of(args, "").page
    if any(length % page for length in args.lengths or ()):
        raise BenchError(f"--lengths: must be whole pages of {page} tokens")


def _check_batches(args: RestoreOptions) -> None:
    if not args.at_once:
        for name in ("poisson", "decoders"):
            if getattr(args, name) is not None:
                raise BenchError(f"--{name}: add --at-once N, which it is about")
        return
    for name in ("url", "slow_rounds"):
        if getattr(args, name):
            raise BenchError(
                f"--at-once: not with --{name.replace('_', '-')}; leave one of them out"
            )
    for arm in args.arms or ():
        if args.poisson is not None and arm.endswith(SHORTEST_FIRST):
            raise BenchError(f"--poisson: the arm {arm} sends all together; leave one of them out")


def _check_paced(args: RestoreOptions) -> None:
    for name, why in _NOT_PACED.items():
        if getattr(args, name):
            raise BenchError(f"--{name}: {args.device} {why}")


def lengths(text: str) -> list[int]:
    """Tokens as 2k,4k,6000."""
    try:
        found = [
            int(part[:-1]) * 1024 if part.lower().endswith("k") else int(part)
            for part in text.split(",")
        ]
    except ValueError:
        found = []
    if not all(is_whole(n, 256) for n in found) or not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: must be lengths of at least 256 tokens, as 2k,4k"
        )
    return found


def sizes(text: str) -> list[int]:
    """Numbers as 2,4,8."""
    found = [positive(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{shown(text)}: each number once, as 2,4,8")
    return found


def ratios(text: str) -> list[float]:
    """Ratios as 1/4,1,4."""
    try:
        parts = (part.partition("/") for part in text.split(","))
        found = [float(a) / float(b or 1) for a, _, b in parts]
    except (ValueError, ZeroDivisionError):
        found = []
    above = all(is_number(ratio) and ratio > 0 for ratio in found)
    if not above or not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be ratios above 0, as 1/4,1,4")
    return found
