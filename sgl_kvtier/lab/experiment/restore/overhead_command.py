"""`kvtier bench restore-overhead`: decoding and prefill where nothing is restored, stock and ours
in paired rounds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import positive, seed
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
from sgl_kvtier.lab.experiment.arms import ARMS, Setup, check_arms
from sgl_kvtier.lab.experiment.compare_command import early_end, undisturbed
from sgl_kvtier.lab.experiment.restore.overhead import (
    OVERHEAD_ARMS,
    OVERHEAD_VARIANTS,
    Overhead,
    OverheadOptions,
    OverheadRound,
    overhead_figures,
)
from sgl_kvtier.lab.outside.lab_model import DRAWN, SHAPES, serving_dtype, write_named
from sgl_kvtier.lab.outside.server import end_on_signals
from sgl_kvtier.launch import detect_device, missing_packages

SCHEMA = "kvtier.restore-overhead/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    there = ", ".join((*ARMS, *OVERHEAD_VARIANTS))
    parser.add_argument(
        "--arms",
        default=",".join(OVERHEAD_ARMS),
        metavar="A,B",
        help=f"servers, of {there} (default %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=7,
        help="rounds, every second one backwards (default %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=positive,
        default=4,
        metavar="N",
        help="requests at a time (default %(default)s)",
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=256, help="of each, all new (default %(default)s)"
    )
    parser.add_argument(
        "--output-tokens", type=positive, default=64, help="of each (default %(default)s)"
    )
    parser.add_argument(
        "--lab-model", choices=(*SHAPES, *DRAWN), default="lab-mha", help="default %(default)s"
    )
    parser.add_argument(
        "--threads", type=positive, default=1, help="torch threads per server on a CPU (default 1)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="for logs and stores (default: a temporary folder)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the prompts (default 0)")
    parser.add_argument(
        "--json", metavar="FILE", help="write the result with every round (- for standard output)"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and reports. The exit status: 0, 130 after Ctrl-C. Raises KVTierError; where the
    bench could not go on, after what had been measured is reported.
    """
    if args.json is not None:
        check_target(args.json)
    arms = [arm.strip() for arm in args.arms.split(",") if arm.strip()]
    check_arms(arms, OVERHEAD_VARIANTS)
    if missing_packages():
        raise BenchError(
            f"SGLang is not installed for {sys.executable}. Install it with: pip install 'sgl-kvtier[sglang]'"
        )
    options = OverheadOptions(
        arms, args.rounds, args.requests, args.prompt_tokens, args.output_tokens, seed=args.seed
    )
    setup = make_setup(args)
    rounds: list[OverheadRound] = []
    interrupted = False
    failure: BenchError | None = None
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kvtier-overhead-"))
    with end_on_signals():
        try:
            with progress("measuring", options.rounds * len(arms), "rounds") as shown:
                Overhead(options, setup, folder, rounds, shown.advance).run()
        except KeyboardInterrupt:
            interrupted = True
        except BenchError as error:
            if not rounds:
                raise
            failure = error
        finally:
            if args.folder is None:
                shutil.rmtree(folder, ignore_errors=True)
        with undisturbed():
            _report(args, make_result(options, setup, rounds, interrupted, failure))
    if failure is not None:
        raise failure
    return 130 if interrupted else 0


def make_result(
    options: OverheadOptions,
    setup: Setup,
    rounds: Sequence[OverheadRound],
    interrupted: bool,
    failure: BenchError | None,
) -> dict[str, Any]:
    """The whole result, schema kvtier.restore-overhead/1 (docs/manual/json.md)."""
    rows = [one.to_json() for one in rounds]
    results = {
        "settings": {**asdict(options), **asdict(setup)},
        **overhead_figures(rows, options.arms),
        "rounds": rows,
        "interrupted": interrupted,
        "notes": early_end(failure),
    }
    return envelope(SCHEMA, ["kvtier", *sys.argv[1:]], results)


def make_setup(args: argparse.Namespace) -> Setup:
    """Room for all requests at once, so that nothing is evicted or waits."""
    page = 16
    tokens = (
        (args.prompt_tokens + args.output_tokens + 4 * page) * (args.requests + 1) // page * page
    )
    path = write_named(args.lab_model)
    device = detect_device()
    return Setup(
        model_path=str(path),
        served_name=path.name,
        device=device,
        page_size=page,
        chunk_tokens=512,
        dtype=serving_dtype(device, args.lab_model),
        device_tokens=tokens,
        context_tokens=tokens,
        max_running=max(args.requests, 8),
        threads=args.threads,
        variants=OVERHEAD_VARIANTS,
    )


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    shown = sys.stderr if args.json == "-" else sys.stdout
    rows = [{"arm": arm, **figures} for arm, figures in result["arms"].items()]
    columns = (
        Column("arm", "Arm"),
        Column("tpot_ms", "TPOT", "ms", decimals=2),
        Column("ttft_ms", "TTFT", "ms", decimals=1),
        Column("cached_tokens", "Cached", "tokens"),
    )
    print_table(Table("Nothing to restore", columns, rows), shown)
    ratios = [
        {"pair": pair, "metric": name, **ratio}
        for pair, metrics in result["ratios"].items()
        for name, ratio in metrics.items()
    ]
    ratio_columns = (
        Column("pair", "Arms"),
        Column("metric", "Metric"),
        Column("median", "Median", "ratio", decimals=3),
        Column("p25", "p25", decimals=3),
        Column("p75", "p75", decimals=3),
        Column("n", "Rounds"),
    )
    print_table(
        Table("Paired ratios", ratio_columns, ratios, notes=("Below 1 the first arm is faster.",)),
        shown,
    )
    for note in result["notes"]:
        print(note, file=shown)
    if args.json is not None:
        write_json(result, args.json)
