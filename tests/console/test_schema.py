"""Tables of keys become JSON Schemas; results are compared with them to the letter."""

from __future__ import annotations

import json

import pytest
from json_results import wrong_in

from sgl_kvtier import cli
from sgl_kvtier.console import envelope, to_json
from sgl_kvtier.console.schema import Schema
from sgl_kvtier.runtime.tools.schema_command import schemas


def keys_of(table: str, **parts: str) -> dict:
    """What a schema says of the keys of a table."""
    made = Schema("kvtier.x/1", "kvtier x", "an example", table, parts).json_schema()
    own = {name: node for name, node in made["properties"].items() if name not in ENVELOPE}
    return {**own, **({"$defs": made["$defs"]} if "$defs" in made else {})}


ENVELOPE = ("schema", "command", "environment")
NUMBER = {"type": ["number", "null"]}


def test_a_row_is_a_key_with_its_type_and_meaning():
    assert keys_of("pages: integer; pages stored") == {
        "pages": {"type": "integer", "description": "pages stored"}
    }


def test_keys_of_one_type_share_a_row():
    assert list(keys_of("a, b: integer\nc.{d,e}: string")) == ["a", "b", "c"]
    assert list(keys_of("c.{d,e}: string")["c"]["properties"]) == ["d", "e"]


def test_rows_that_are_indented_are_keys_of_the_row_above():
    cells = keys_of("""
        cells: list of objects; one per size
          size: integer
          time.p50: number or null
        rounds: integer
    """)
    assert list(cells) == ["cells", "rounds"]
    assert cells["cells"]["items"]["properties"] == {
        "size": {"type": "integer"},
        "time": {"type": "object", "properties": {"p50": NUMBER}},
    }


def test_a_meaning_may_have_several_lines():
    found = keys_of("a: object; one\n    two\n  b: string; three\n      four\nc: string")
    assert found["a"]["description"] == "one two"
    assert found["a"]["properties"]["b"]["description"] == "three four"


def test_a_name_in_angle_brackets_stands_for_every_other_key():
    found = keys_of("arms.<name>.ms: number\nsettings: object\n  <setting>: any\n  seed: integer")
    below = {"type": "object", "properties": {"ms": {"type": "number"}}}
    assert found["arms"] == {"type": "object", "additionalProperties": below}
    assert found["settings"]["additionalProperties"] == {}
    assert list(found["settings"]["properties"]) == ["seed"]


@pytest.mark.parametrize(
    ("kind", "node"),
    [
        ("list of lists of numbers or null", {
            "type": ["array", "null"],
            "items": {"type": "array", "items": {"type": "number"}},
        }),
        ('"yes" or "no" or null', {"enum": ["yes", "no", None]}),
        ("list of figures", {"type": "array", "items": {"$ref": "#/$defs/figures"}}),
        ("figures or null", {"anyOf": [{"$ref": "#/$defs/figures"}, {"type": "null"}]}),
        ("any", {}),
    ],
)  # fmt: skip
def test_types(kind: str, node: dict):
    assert keys_of(f"a: {kind}", figures="p50: number")["a"] == node


def test_only_parts_that_are_used_are_defined():
    found = keys_of("a: outer", outer="b: inner", inner="c: string", unused="d: string")
    assert sorted(found["$defs"]) == ["inner", "outer"]


@pytest.mark.parametrize("table", ["a", "a: word", "a: string\n    b: string", "a: string\na: any"])
def test_a_table_that_is_none_is_refused(table: str):
    with pytest.raises(ValueError, match="a"):
        keys_of(table)


def test_every_declaration_is_a_json_schema():
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    for schema in schemas():
        validator.check_schema(schema.json_schema())


def test_a_later_key_is_allowed_and_another_type_is_not():
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    (schema,) = (one for one in schemas() if one.name == "kvtier.settings/1")
    result = json.loads(to_json(envelope(schema.name, ["kvtier"], {"settings": []})))
    assert validator(schema.json_schema()).is_valid({**result, "later": 1})
    assert not validator(schema.json_schema()).is_valid({**result, "settings": 1})


def test_the_comparison_notices_keys_types_and_names():
    def wrong(**results: object) -> list[str]:
        return wrong_in(json.dumps({"command": [], "environment": {}, **results}))

    purge = {"schema": "kvtier.purge/1"}
    assert wrong(**purge, path="/x", namespaces=[{"name": "n", "removed": "yes"}]) == []
    assert wrong(**purge, later=1) == [".later is not declared"]
    assert wrong(**purge, namespaces=[{"later": 1}]) == [".namespaces[].later is not declared"]
    assert wrong(**purge, path=None) == [".path is None, not string"]
    assert wrong(schema="kvtier.none/1") == ["no schema kvtier.none/1 is declared"]
    assert wrong_in('{"schema": "kvtier.purge/1", "command": []}') == ["environment is missing"]


def test_the_command_lists_them_and_prints_one(capsys, tmp_path):
    assert cli.main(["schema"]) == 0
    assert "kvtier compare" in capsys.readouterr().out
    assert cli.main(["schema", "kvtier.stat/1"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "kvtier.stat/1"
    assert cli.main(["schema", "--json", str(tmp_path / "list.json")]) == 0
    listed = json.loads((tmp_path / "list.json").read_text())["schemas"]
    assert {"kvtier.stat/1", "kvtier.compare/1"} <= {row["name"] for row in listed}


def test_an_unknown_name_says_which_may_be_meant(capsys):
    assert cli.main(["schema", "kvtier.stat"]) == 1
    assert "Did you mean kvtier.stat/1?" in capsys.readouterr().err
