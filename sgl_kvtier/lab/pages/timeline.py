"""`kvtier bench restore-timeline`: restorations of a server's decision log as a table, and a
drawing of one.

The drawing has the front that is computed and the back that is loaded. It is made as Cake's Figure
5: tokens against time, two curves that meet. The log's JSON lines (kvtier.decisions, version 2) are
read by their names alone. So a log can be drawn where nothing else of this package is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from sgl_kvtier.arguments import positive
from sgl_kvtier.console import Column, Table, check_target, print_table
from sgl_kvtier.errors import BenchError, TraceError
from sgl_kvtier.lab.pages.plots import Series, lines, save_plot
from sgl_kvtier.outside import is_number, is_whole, parse_json, refusal
from sgl_kvtier.policy.messages import CANCELLED, NO_ROOM_YET

MOST_LINE = 64 << 20
"""Characters of a log's line: a step of a server with thousands of requests has under a million."""
_SHOWN = 30
COMPUTED, LOADED = "computed from the front", "loaded from the back"


@dataclass
class Timeline:
    """The course of one restoration. Seconds since it was offered, positions in tokens of the
    prompt.
    """

    rid: str
    prompt_tokens: int
    first: int
    stop: int
    mode: str = ""
    reason: str = ""
    computed: list[tuple[float, int]] = field(default_factory=list)
    """When the front had got where; it begins at `first`, which was in device memory already."""
    loaded: list[tuple[float, int]] = field(default_factory=list)
    """When which token was the lowest that had landed; it begins at `stop`."""
    computed_tokens: int = 0
    loaded_tokens: int = 0
    lost_tokens: int = 0
    offered_s: float = 0.0

    @property
    def seconds(self) -> float:
        """From the offer to the last thing that happened."""
        return max(self.computed[-1][0], self.loaded[-1][0])


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


def log_lines(log: TextIO) -> Iterator[str]:
    """The lines of a log, one in memory at a time. Raises TraceError on one that is too long or not
    UTF-8, OSError.
    """
    number = 0
    while True:
        number += 1
        try:
            line = log.readline(MOST_LINE)
        except UnicodeDecodeError as error:
            raise TraceError(
                f"line {number} of the decision log is not UTF-8: {error.reason}"
            ) from error
        if not line:
            return
        if len(line) == MOST_LINE and not line.endswith("\n"):
            raise TraceError(
                f"line {number} of the decision log is longer than {MOST_LINE >> 20} MiB"
            )
        yield line


def whole_lines(log: TextIO) -> Iterator[str]:
    """The same without a last line that its writer had not ended."""
    return (line for line in log_lines(log) if line.strip() and line.endswith("\n"))


def read_timelines(log: Iterable[str]) -> list[Timeline]:
    """All restorations of a log in the order they were offered. Raises TraceError on something else
    than a log.
    """
    found: dict[str, Timeline] = {}
    ended: list[Timeline] = []
    page = 0
    for number, line in enumerate(log):
        try:
            data = parse_json(line)
            if number == 0:
                page = (
                    _whole(data["engine"], "page_tokens")
                    if data["log"] == "kvtier.decisions"
                    else 0
                )
                continue
            if data.get("type") == "RestoreOffered" and data["rid"] in found:
                ended.append(
                    found.pop(data["rid"])
                )  # offered again: what is left is another restoration
            _take(data, page, found)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            if number == 0:
                raise TraceError(
                    "not a decision log: its first line must name kvtier.decisions"
                ) from error
            raise TraceError(
                f"line {number + 1} of the decision log is damaged: {error}"
            ) from error
    return sorted([*ended, *found.values()], key=lambda one: one.offered_s)


def timeline_plot(one: Timeline) -> str:
    """The restoration as SVG. Raises KVTierError without matplotlib."""
    curves = [
        Series(name, [1000 * at for at, _ in points], [float(place) for _, place in points])
        for name, points in ((COMPUTED, one.computed), (LOADED, one.loaded))
    ]
    title = f"{one.stop:,} tokens: {one.computed_tokens:,} computed, {one.loaded_tokens:,} loaded"
    return lines(curves, title, "ms since it was offered", "token of the prompt")


def _chosen(found: list[Timeline], number: int | None) -> Timeline:
    if number is not None:
        if not 1 <= number <= len(found):
            raise BenchError(f"--number {number}: there are 1 to {len(found)}")
        return found[number - 1]
    return max(found, key=lambda one: (min(one.computed_tokens, one.loaded_tokens), one.stop))


def _take(data: dict[str, Any], page: int, found: dict[str, Timeline]) -> None:
    kind = data.get("type")
    if kind == "RestoreOffered":
        first, stop = _whole(data, "resident") * page, _whole(data, "pages") * page
        one = Timeline(
            _text(data, "rid"),
            _whole(data, "prompt_tokens"),
            first,
            stop,
            offered_s=_seconds(data, "now"),
        )
        one.computed.append((0.0, first))
        one.loaded.append((0.0, stop))
        found[one.rid] = one
    elif kind == "StepPlan":
        for start in data.get("starts", ()):
            if start["rid"] in found:
                found[start["rid"]].mode, found[start["rid"]].reason = (
                    _text(start, "mode"),
                    _text(start, "reason"),
                )
    elif data.get("rid") in found:
        _follow(found[data["rid"]], kind, data, page)


def _follow(one: Timeline, kind: str | None, data: dict[str, Any], page: int) -> None:
    if kind == "ChunkStarted":
        place = one.computed[-1][1]
        low, _ = _span(data, "tokens")
        if low > place:  # the front has stepped over what had landed
            one.computed.append((_seconds(data, "now") - one.offered_s, low))
    elif kind == "ChunkDone":
        low, high = _span(data, "tokens")
        one.computed.append((_seconds(data, "now") - one.offered_s, high))
        one.computed_tokens += max(0, min(high, one.stop) - max(low, one.first))
    elif kind == "TransferDone":
        low, high = (place * page for place in _span(data, "span"))
        if low < high:
            one.loaded.append((_seconds(data, "now") - one.offered_s, min(low, one.loaded[-1][1])))
            one.loaded_tokens += high - low
    elif kind == "PagesLost" and data["reason"] not in (CANCELLED, NO_ROOM_YET):
        low, high = _span(data, "span")
        one.lost_tokens += (high - low) * page


def _whole(data: dict[str, Any], name: str) -> int:
    if not is_whole(data[name], 0):
        raise ValueError(refusal(name, data[name], "a whole number of at least 0"))
    return int(data[name])


def _span(data: dict[str, Any], name: str) -> tuple[int, int]:
    low, high = data[name]
    if not (is_whole(low, 0) and is_whole(high, 0)):
        raise ValueError(refusal(name, data[name], "two whole numbers of at least 0"))
    return low, high


def _seconds(data: dict[str, Any], name: str) -> float:
    if not is_number(data[name]):
        raise ValueError(refusal(name, data[name], "a finite number of seconds"))
    return float(data[name])


def _text(data: dict[str, Any], name: str) -> str:
    if not isinstance(data[name], str):
        raise ValueError(refusal(name, data[name], "a text"))
    return str(data[name])
