"""The keys of a JSON result, declared as a table of text, and the JSON Schema made from it.

A row is `KEYS: TYPE; MEANING`. A row that is indented by two more is a key of the row above it, and
a line that is indented by four or more goes on with that row's meaning:

    cells: list of objects; one for each value of --rate
      rate: number; sessions that arrive per second
      arms.<name>.ttft_ms.{p50,p99}: number or null; time from sending a request to its first
          token, in milliseconds

`a, b` and `{a,b}` name several keys of one type and meaning. A dot goes down into an object.
`<name>` stands for every key that is not named. Types are `string`, `integer`, `number`, `boolean`,
`object`, `null`, `any`, a quoted word, the name of a part (a table that several rows share),
`list of` a type in the plural, and several of them with `or` between.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE = ("string", "integer", "number", "boolean", "object", "null")
_ROW = re.compile(r"([^:;]+): ([^;]+)(?:; (.+))?")

_Node = dict[str, Any]

ENVELOPE = """
schema: string; name and version of the schema that the result follows
command: list of strings; command line that made the result, word by word
environment: object; machine and software that the result was measured on
  date: string; when the result was put together, ISO 8601, UTC
  kvtier: string; version of this package
  git_commit: string or null; commit of the checkout, with -dirty for local changes; null when
      installed
  planner: "compiled" or "source"; form of the planner that this installation runs
  python: string; version of Python
  platform: string; operating system, kernel and C library
  cpu.model: string or null; name of the processor
  cpu.count: integer or null; logical processors of the machine
  cpu.usable: number or null; processors that the process may use, by affinity and control group
  memory_bytes: integer; memory of the machine
  memory_limit_bytes: integer or null; limit of the control group
  packages.<name>: string or null; version of an installed package; null where it is not installed
  gpus: list of objects; NVIDIA GPUs, as nvidia-smi prints them
    name, memory, driver: string; name, memory with its unit, version of the driver
"""
"""The keys that each result has in addition to its own (`console.document.envelope`)."""


@dataclass(frozen=True)
class Schema:
    """One kind of result: its name and version (`kvtier.stat/1`), the command that writes it, a
    description in one line, and its table of keys. `parts`: further tables, by the names that rows
    use as types.
    """

    name: str
    command: str
    about: str
    keys: str
    parts: Mapping[str, str] = field(default_factory=dict)

    def json_schema(self) -> dict[str, Any]:
        """The JSON Schema (draft 2020-12). It allows keys that it does not name, since keys may be
        added to a version. Raises ValueError if the table is malformed.
        """
        root: _Node = {
            "$schema": _DIALECT,
            "title": self.name,
            "description": f"Written by {self.command}: {self.about}.",
            "type": "object",
            "required": ["schema", "command", "environment"],
            "properties": {},
        }
        used: set[str] = set()
        for table in (ENVELOPE, self.keys):
            used |= _add_rows(root, table, self.parts)
        root["properties"]["schema"]["const"] = self.name
        definitions: dict[str, Any] = {}
        while missing := sorted(used - definitions.keys()):
            for name in missing:
                definitions[name] = {"type": "object", "properties": {}}
                used |= _add_rows(definitions[name], self.parts[name], self.parts)
        if definitions:
            root["$defs"] = definitions
        return root


def _add_rows(root: _Node, table: str, parts: Mapping[str, str]) -> set[str]:
    """Adds the keys of a table to an object's schema. Returns the parts that the rows use."""
    used: set[str] = set()
    above: list[list[_Node]] = [[root]]
    for depth, row in _rows(table):
        found = _ROW.fullmatch(row)
        if found is None or depth >= len(above):
            raise ValueError(f"not a row of a schema: {row}")
        paths, kind, meaning = found.groups()
        del above[depth + 1 :]
        nodes = []
        for path in _paths(paths):
            for parent in above[depth]:
                node, named = _type_of(kind.strip(), parts)
                used |= named
                if meaning:
                    node["description"] = meaning
                nodes.append(_place(parent, path.split("."), node))
        above.append(nodes)
    return used


def _rows(table: str) -> Iterator[tuple[int, str]]:
    """The rows of a table, each as (depth of nesting, its lines joined)."""
    depth, row = 0, ""
    for line in textwrap.dedent(table).splitlines():
        spaces = len(line) - len(line.lstrip())
        if row and line.strip() and spaces >= 2 * depth + 4:
            row += f" {line.strip()}"
        elif line.strip():
            if row:
                yield depth, row
            depth, row = spaces // 2, line.strip()
    if row:
        yield depth, row


def _paths(text: str) -> Iterator[str]:
    """`a, b.{c,d}` as a, b.c, b.d."""
    for path in text.split(", "):
        before, brace, rest = path.partition("{")
        inner, _, after = rest.partition("}")
        for word in inner.split(",") if brace else [""]:
            if "{" in after:
                yield from _paths(f"{before}{word}{after}")
            else:
                yield f"{before}{word}{after}"


def _type_of(text: str, parts: Mapping[str, str]) -> tuple[_Node, set[str]]:
    """The schema of a type, and the parts that it names."""
    node: _Node = {}
    used: set[str] = set()
    kinds: list[str] = []
    for word in text.split(" or "):
        if word == "any":
            return {}, set()
        if word.startswith("list of "):
            kinds.append("array")
            inner = word.removeprefix("list of ")
            one = inner if inner in parts or inner == "any" else re.sub(r"s\b", "", inner, count=1)
            node["items"], used = _type_of(one, parts)
        elif word.startswith('"'):
            node.setdefault("enum", []).append(word.strip('"'))
        elif word in _SIMPLE:
            kinds.append(word)
        elif word in parts:
            node["$ref"] = f"#/$defs/{word}"
            used = {word}
        else:
            raise ValueError(f"no type of a schema: {text}")
    if "enum" in node and kinds == ["null"]:
        node["enum"].append(None)
    elif "$ref" in node and kinds:
        return {"anyOf": [node, *({"type": kind} for kind in kinds)]}, used
    elif kinds:
        node = {"type": kinds[0] if len(kinds) == 1 else kinds, **node}
    return node, used


def _place(parent: _Node, path: list[str], node: _Node) -> _Node:
    """Puts a node below an object, or below the objects of a list, and returns it."""
    within = parent.get("items", parent)
    first, *rest = path
    if "<" in first:
        if rest:
            node, below = within.setdefault("additionalProperties", {"type": "object"}), node
            return _place(node, rest, below)
        within["additionalProperties"] = node
        return node
    known = within.setdefault("properties", {})
    if rest:
        return _place(known.setdefault(first, {"type": "object"}), rest, node)
    if first in known:
        raise ValueError(f"two rows for one key: {first}")
    known[first] = node
    return node
