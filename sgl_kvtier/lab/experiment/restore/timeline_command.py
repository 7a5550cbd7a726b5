"""`kvtier bench restore-timeline`: restorations of a server's decision log as a table, and one of
them drawn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_kvtier.arguments import positive
from sgl_kvtier.console import Column, Table, check_target, print_table
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.pages.plots import save_plot
from sgl_kvtier.lab.pages.restore_timeline import Timeline, log_lines, read_timelines, timeline_plot

_SHOWN = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("log", type=Path, help="the file that policy.decision_log names")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw one as SVG: the two pointers over time"
    )
    parser.add_argument(
        "--number",
        type=positive,
        metavar="N",
        help="which one (default: the longest of those that used both)",
    )


def run(args: argparse.Namespace) -> int:
    """Lists and draws. Raises KVTierError."""
    if args.plot is not None:
        check_target(args.plot)
    try:
        with args.log.open(encoding="utf-8") as file:
            found = read_timelines(log_lines(file))
    except OSError as error:
        raise BenchError(f"cannot read {args.log}: {error.strerror}") from error
    if not found:
        raise BenchError(f"{args.log} has no restoration")
    rows = [
        {"number": number, **vars(one), "ms": 1000 * one.seconds}
        for number, one in enumerate(found, 1)
    ]
    columns = (
        Column("number", "Number"),
        Column("prompt_tokens", "Prompt", "tokens"),
        Column("first", "In device", "tokens"),
        Column("mode", "Mode"),
        Column("reason", "Why"),
        Column("computed_tokens", "Computed", "tokens"),
        Column("loaded_tokens", "Loaded", "tokens"),
        Column("lost_tokens", "Lost", "tokens"),
        Column("ms", "Took", "ms", decimals=0),
    )
    left = len(rows) - _SHOWN
    note = (f"The last {_SHOWN}; {left} before them are not shown.",) if left > 0 else ()
    print_table(Table("Restorations", columns, rows[-_SHOWN:], notes=note))
    if args.plot is not None:
        save_plot(timeline_plot(_chosen(found, args.number)), args.plot)
    return 0


def _chosen(found: list[Timeline], number: int | None) -> Timeline:
    if number is not None:
        if not 1 <= number <= len(found):
            raise BenchError(f"--number {number}: there are 1 to {len(found)}")
        return found[number - 1]
    return max(found, key=lambda one: (min(one.computed_tokens, one.loaded_tokens), one.stop))
