"""`kvtier schema`: the JSON Schemas of the results that commands write with --json."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import json
import sys

from sgl_kvtier.console import Column, Table, envelope, print_table, write_json, write_text
from sgl_kvtier.console.schema import Schema
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.runtime.tools import schemas as runtime_schemas
from sgl_kvtier.store.tools import schemas as store_schemas

_LAB = "sgl_kvtier.lab"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier schema`."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a schema, as kvtier.stat/1 (default: list them)"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the list, or the schema, to FILE; - for standard output",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the list or a schema. Raises KVTierError when there is no such schema."""
    if args.name is not None:
        schema = _named(args.name).json_schema()
        write_text(json.dumps(schema, indent=2) + "\n", args.json or "-")
        return 0
    rows = [{"name": s.name, "command": s.command, "about": s.about} for s in schemas()]
    if args.json is not None:
        command = ["kvtier", *sys.argv[1:]]
        write_json(envelope(runtime_schemas.SCHEMAS.name, command, {"schemas": rows}), args.json)
        return 0
    columns = (Column("name", "schema"), Column("command", "written by"))
    print_table(Table("JSON results", columns, rows, notes=_missing()))
    return 0


def schemas() -> list[Schema]:
    """Every schema that this installation declares: first the product's, then the laboratory's."""
    modules = [store_schemas, runtime_schemas]
    if not _missing():
        modules.append(importlib.import_module(f"{_LAB}.schemas"))
    return [one for module in modules for one in vars(module).values() if isinstance(one, Schema)]


def _named(name: str) -> Schema:
    known = {schema.name: schema for schema in schemas()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    said = [f"no schema {name!r}. {meant}kvtier schema lists them", *_missing()]
    raise KVTierError(". ".join(said))


def _missing() -> list[str]:
    """What to install if `sgl_kvtier.lab` is missing."""
    if importlib.util.find_spec(_LAB) is not None:
        return []
    return [f"Those of the benchmarks come with them: {how_to_install('bench')}"]
