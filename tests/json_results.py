"""Whether results are what their schemas say, to the letter: no key that is not declared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from sgl_kvtier.runtime.tools.schema_command import schemas

_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def wrong_in(text: str) -> list[str]:
    """What is wrong with the text of a result; nothing of a document that names no schema."""
    document = json.loads(text)
    if not isinstance(document, dict) or "schema" not in document:
        return []
    schema = _schemas().get(document["schema"])
    if schema is None:
        return [f"no schema {document['schema']} is declared"]
    missing = [f"{key} is missing" for key in schema["required"] if key not in document]
    return [*missing, *_wrong("", document, schema, schema.get("$defs", {}))]


@cache
def _schemas() -> dict[str, Any]:
    return {one.name: one.json_schema() for one in schemas()}


def _wrong(place: str, value: Any, node: dict[str, Any], parts: dict[str, Any]) -> Iterator[str]:
    if "anyOf" in node and value is None:
        return
    nodes = [node, *(one for one in node.get("anyOf", ()) if "$ref" in one)]
    nodes += [parts[one["$ref"].rpartition("/")[2]] for one in nodes if "$ref" in one]
    for one in nodes:
        if "type" in one and not _is(value, one["type"]):
            yield f"{place} is {value!r:.60}, not {one['type']}"
        if ("const" in one and value != one["const"]) or (
            "enum" in one and value not in one["enum"]
        ):
            yield f"{place} is {value!r:.60}"
    if isinstance(value, list):
        for item in value:
            yield from _wrong(f"{place}[]", item, node.get("items", {}), parts)
    if not isinstance(value, dict):
        return
    named = [one["properties"] for one in nodes if "properties" in one]
    others = [one["additionalProperties"] for one in nodes if "additionalProperties" in one]
    for key, item in value.items():
        found = [keys[key] for keys in named if key in keys] or others
        if not found and named:
            yield f"{place}.{key} is not declared"
        for one in found:
            yield from _wrong(f"{place}.{key}", item, one, parts)


def _is(value: Any, types: str | list[str]) -> bool:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as in JSON Schema
    names = [types] if isinstance(types, str) else types
    return any(
        isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in names
    )
