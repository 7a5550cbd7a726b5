"""`kvtier top`: what a running server does, one line every few seconds."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

from sgl_kvtier.arguments import above_nought, positive, url
from sgl_kvtier.console import (
    check_target,
    envelope,
    format_bytes,
    format_share,
    format_value,
    write_json,
)
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.runtime.tools import schemas
from sgl_kvtier.runtime.tools.server_figures import Figures, Reading, figures_of, read

_HEADING_EVERY = 20
_WIDTHS = {
    "time": 8,
    "running": 7,
    "queued": 6,
    "req/s": 6,
    "prompt/s": 8,
    "device": 6,
    "host": 6,
    "storage": 7,
    "computed": 8,
    "restored": 8,
    "read/s": 9,
    "written/s": 9,
    "evicted": 7,
    "on disk": 9,
}
"""Columns and their widths. device, host, storage, computed: fractions of the prompt tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier top`."""
    parser.add_argument(
        "url",
        type=url,
        metavar="URL",
        help="address of a running server that was started with --enable-metrics",
    )
    parser.add_argument(
        "--every",
        type=above_nought,
        default=2.0,
        metavar="S",
        help="seconds between two lines (default 2)",
    )
    parser.add_argument(
        "--lines", type=positive, metavar="N", help="end after N lines (default: at Ctrl-C)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's --api-key, if it has one")
    parser.add_argument(
        "--json", metavar="FILE", help="write all lines to FILE at the end; - for stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Prints lines until there are enough, or until Ctrl-C. Raises KVTierError if the server does
    not answer at the start. Later, a missing answer prints a line that says so, and the next answer
    is compared with the last one received.
    """
    if args.json is not None:
        check_target(args.json)
    show = args.json != "-"
    before, began = read(args.url, args.api_key), time.monotonic()
    rows: list[dict[str, Any]] = []
    try:
        for number in itertools.count():
            if number == args.lines:
                break
            time.sleep(args.every)
            try:
                now, moment = read(args.url, args.api_key), time.monotonic()
            except KVTierError:
                line = f"{_clock(time.time())} no answer"
            else:
                row = row_of(now, figures_of(now, before, moment - began), time.time())
                if args.json is not None:
                    rows.append(row)
                line = line_of(row)
                before, began = now, moment
            if show:
                if number % _HEADING_EVERY == 0:
                    print(" ".join(f"{name:>{width}}" for name, width in _WIDTHS.items()))
                print(line, flush=True)
    except KeyboardInterrupt:
        if show:
            print()
    finally:
        if args.json is not None:
            result = {"url": args.url, "every_s": args.every, "rows": rows}
            write_json(envelope(schemas.TOP.name, ["kvtier", *sys.argv[1:]], result), args.json)
    return 0


def row_of(now: Reading, figures: Figures, at: float) -> dict[str, Any]:
    """The values of one line. Rates are per second between two readings."""
    seconds = figures.seconds
    prompt = figures.prompt
    shares = {
        "device": figures.device,
        "host": figures.host,
        "storage": figures.storage,
        "computed": figures.computed,
    }
    return {
        "at": at,
        "seconds": seconds,
        "running": round(now.get("sglang:num_running_reqs") or 0),
        "queued": round(now.get("sglang:num_queue_reqs") or 0),
        "requests_per_s": figures.requests / seconds,
        "prompt_tokens_per_s": prompt / seconds,
        **{
            f"{name}_fraction": count / prompt if prompt else None for name, count in shares.items()
        },
        "restored": sum(figures.ended.values()),
        "read_bytes_per_s": figures.store.bytes_read / seconds,
        "written_bytes_per_s": figures.store.bytes_written / seconds,
        "pages_evicted": figures.store.pages_evicted,
        "bytes_on_disk": figures.store.bytes_on_disk,
    }


def line_of(row: dict[str, Any]) -> str:
    """One line of text."""
    cells = (
        _clock(row["at"]),
        format_value(row["running"]),
        format_value(row["queued"]),
        format_value(row["requests_per_s"], 1),
        format_value(row["prompt_tokens_per_s"], 0),
        *(
            "–" if (share := row[f"{name}_fraction"]) is None else format_share(share)
            for name in ("device", "host", "storage", "computed")
        ),
        format_value(row["restored"]),
        format_bytes(row["read_bytes_per_s"]),
        format_bytes(row["written_bytes_per_s"]),
        format_value(row["pages_evicted"]),
        format_bytes(row["bytes_on_disk"]),
    )
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS.values(), strict=True))


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
