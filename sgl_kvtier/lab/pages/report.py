"""`kvtier report`: a result that a comparison wrote, drawn again as tables and as its page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sgl_kvtier.console import check_target, print_table, write_text
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.pages import compare, lookahead, restore
from sgl_kvtier.outside import parse_json

KINDS = {
    compare.SCHEMA: (compare.compare_tables, compare.compare_page),
    lookahead.SCHEMA: (lookahead.lookahead_tables, lookahead.lookahead_page),
    restore.SCHEMA: (restore.restore_tables, restore.restore_page),
}
"""How the result of each schema is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "file",
        type=Path,
        help="what --json of kvtier compare, compare restore or compare lookahead wrote",
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write one self-contained page with tables and plots"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the tables and notes, and writes the page. Raises KVTierError."""
    if args.html is not None:
        check_target(args.html)
    result = read_result(args.file)
    tables_of, page_of = KINDS[result["schema"]]
    try:
        tables = tables_of(result)
        page = None if args.html is None else page_of(result)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise KVTierError(
            f"{args.file}: not a whole {result['schema']} result ({type(error).__name__}: {error!s:.100}). "
            "Give the file that --json wrote"
        ) from error
    shown = sys.stderr if args.html == "-" else sys.stdout
    for table in tables:
        print_table(table, shown)
        print(file=shown)
    for note in result.get("notes") or []:
        print(note, file=shown)
    if page is not None:
        write_text(page, args.html)
    return 0


def read_result(path: Path) -> dict[str, Any]:
    """A result of one of `KINDS`. Raises KVTierError on any other file."""
    try:
        result = parse_json(path.read_bytes())
    except OSError as error:
        raise KVTierError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise KVTierError(f"{path} is not JSON: {error!s:.100}") from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if not isinstance(schema, str) or schema not in KINDS:
        there = ", ".join(KINDS)
        raise KVTierError(
            f"{path}: no result that can be drawn. Its schema must be one of: {there}"
        )
    return result
