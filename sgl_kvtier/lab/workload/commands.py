"""`kvtier trace`: what traces there are, what is in one, and writing sessions for SGLang's own
benchmark.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import count, positive, seed
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    print_table,
    write_json,
    write_text,
)
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.workload.agentic import FORMAT, to_document
from sgl_kvtier.lab.workload.catalogue import (
    DOCUMENT_SUFFIXES,
    FOLDER_HELP,
    VARIABLE,
    default_folder,
    known_traces,
    trace_files,
)
from sgl_kvtier.lab.workload.describe import describe
from sgl_kvtier.lab.workload.encoder import Encoder, wide_encoder
from sgl_kvtier.lab.workload.formats import is_trace
from sgl_kvtier.lab.workload.generate import presets
from sgl_kvtier.lab.workload.source import BLOCK_TOKENS, GENERATED, LoadResult, load_sessions

SCHEMA_DESCRIBE = "kvtier.trace.describe/1"
SCHEMA_LIST = "kvtier.trace.list/1"

_BAD_LINES_SHOWN = 10
_GENERATED_SESSIONS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `list`, `describe` and `export` with their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,describe,export}")

    listing = actions.add_parser(
        "list", help="the trace files found, and the presets for generated sessions"
    )
    _add_folder(listing)
    listing.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )

    describing = actions.add_parser(
        "describe", help="lengths, waits and prefix reuse of a workload"
    )
    _add_source(describing)
    describing.add_argument(
        "--divisor",
        type=positive,
        default=1,
        metavar="D",
        help="scale tokens down by D (default 1)",
    )
    describing.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )

    exporting = actions.add_parser(
        "export",
        help=f"write a workload for the benchmark of SGLang (--dataset-name {FORMAT}), and read it "
        "again as a trace",
    )
    _add_source(exporting)
    exporting.add_argument(
        "--out", required=True, metavar="FILE", help="a .json file, or - for standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Carries out one `kvtier trace` command; the exit status. Raises KVTierError."""
    if args.action == "export":
        return _export(args)
    if args.json is not None:
        check_target(args.json)
    return _list(args) if args.action == "list" else _describe(args)


def _list(args: argparse.Namespace) -> int:
    known = known_traces()
    rows: list[dict[str, Any]] = []
    for name, path in trace_files(args.traces).items():
        if path.name.endswith(DOCUMENT_SUFFIXES) and not is_trace(path):
            continue
        origin = known.get(name)
        rows.append(
            {
                "name": name,
                "bytes": path.stat().st_size,
                "licence": origin.licence if origin else None,
                "source": origin.source if origin else None,
                "about": origin.about if origin else None,
                "path": str(path),
            }
        )
    made = [
        {"name": GENERATED + p.name, "source": p.source, "licence": p.licence}
        for p in presets().values()
    ]
    if args.json is not None:
        write_json(envelope(SCHEMA_LIST, _command(), {"traces": rows, "presets": made}), args.json)
        if args.json == "-":
            return 0
    names = [
        Column("name", "trace"),
        Column("licence", "licence"),
        Column("source", "from"),
        Column("about", "what it is"),
    ]
    if rows:
        print_table(Table("Traces found", names, rows))
    else:
        place = args.traces or default_folder()
        print(f"No trace files were found in {place}; name it: --traces-dir, or {VARIABLE}.")
    print()
    print_table(Table("Generated from published statistics", names[:3], made))
    return 0


def _describe(args: argparse.Namespace) -> int:
    encoder = wide_encoder(args.divisor)
    loaded = _load(args, encoder)
    stats = describe(loaded.sessions, encoder)
    _report_bad_lines(loaded)
    if args.json is not None:
        results = {
            "source": args.source,
            "description": loaded.description,
            "totals": stats.totals(),
            "distributions": stats.rows(),
            "bad_lines": [str(line) for line in loaded.bad_lines],
            "left_out": dict(loaded.left_out),
            "sessions_cut": loaded.sessions_cut,
            "sessions_dropped": loaded.sessions_dropped,
            "calls_cut": loaded.calls_cut,
        }
        write_json(envelope(SCHEMA_DESCRIBE, _command(), results), args.json)
        if args.json == "-":
            return 0
    totals = [
        {"quantity": key.replace("_", " "), "value": value} for key, value in stats.totals().items()
    ]
    print(loaded.description)
    print()
    print_table(Table("Totals", [Column("quantity", "quantity"), Column("value", "value")], totals))
    print()
    columns = [Column("quantity", "quantity"), Column("unit", "unit")]
    columns += [Column(key, key) for key in ("min", "p10", "p50", "p90", "p99", "max", "mean", "n")]
    note = "Tokens are estimates at 4 characters each" + (
        f", divided by {args.divisor}." if args.divisor > 1 else "."
    )
    print_table(Table("Distributions", columns, stats.rows(), notes=(note,)))
    return 0


def _export(args: argparse.Namespace) -> int:
    check_target(args.out)
    encoder = wide_encoder()
    loaded = _load(args, encoder)
    document = to_document(loaded.sessions, encoder)
    _report_bad_lines(loaded)
    turns = sum(len(turns) for turns in document["conversations"])
    if not turns:
        raise KVTierError(
            f"{args.source}: every session replaces its context before its first call"
        )
    write_text(json.dumps(document) + "\n", args.out)
    count = len(document["conversations"])
    said = f"{loaded.description}\n{count} sessions, {turns} calls written to {args.out}"
    if turns < loaded.calls:
        said += f"; {loaded.calls - turns} calls behind a replaced context cannot be written"
    print(said, file=sys.stderr if args.out == "-" else sys.stdout)
    return 0


def _load(args: argparse.Namespace, encoder: Encoder) -> LoadResult:
    sessions = args.sessions
    if sessions is None and args.source.startswith(GENERATED):
        sessions = _GENERATED_SESSIONS
    return load_sessions(
        args.source,
        limit=sessions,
        skip=args.skip,
        seed=args.seed,
        traces_dir=args.traces,
        encoder=encoder,
        max_calls=args.turns,
        max_prompt_tokens=args.max_prompt_tokens,
        block_tokens=args.block_tokens,
    )


def _report_bad_lines(loaded: LoadResult) -> None:
    for line in loaded.bad_lines[:_BAD_LINES_SHOWN]:
        print(f"bad line: {line}", file=sys.stderr)
    if len(loaded.bad_lines) > _BAD_LINES_SHOWN:
        print(f"... and {len(loaded.bad_lines) - _BAD_LINES_SHOWN} more bad lines", file=sys.stderr)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a trace file, a trace's short name, or generated:PRESET")
    parser.add_argument(
        "--sessions",
        type=positive,
        metavar="N",
        help="read N sessions (default: all; 20 generated)",
    )
    parser.add_argument(
        "--skip", type=count, default=0, metavar="N", help="pass over the first N sessions"
    )
    parser.add_argument("--seed", type=seed, default=0, help="for generated sessions (default 0)")
    parser.add_argument("--turns", type=positive, metavar="N", help="cut sessions after N calls")
    parser.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="N",
        help="cut before a longer prompt, at 4 characters a token and after scaling",
    )
    parser.add_argument("--block-tokens", type=positive, metavar="N", help=BLOCK_TOKENS)
    _add_folder(parser)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces-dir", dest="traces", type=Path, metavar="DIR", help=FOLDER_HELP)


def _command() -> list[str]:
    return ["kvtier", *sys.argv[1:]]
