"""`kvtier trace`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import parsed
from trace_records import WriteTrace, assistant, swe_record, user

from sgl_kvtier.errors import KVTierError, TraceError
from sgl_kvtier.lab.workload import commands


def kvtier_trace(*words: str) -> int:
    return commands.run(parsed(commands, *words))


def test_generated_sessions_can_be_described_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.json"
    made = ("generated:swe-mini", "--sessions", "4", "--seed", "3")
    assert kvtier_trace("export", *made, "--out", str(out)) == 0
    assert "4 sessions, " in capsys.readouterr().out
    found = []
    for source in ((str(out),), made):
        assert kvtier_trace("describe", *source, "--json", str(tmp_path / "found.json")) == 0
        found.append(json.loads((tmp_path / "found.json").read_text()))
    assert found[0]["totals"] == found[1]["totals"]
    assert found[0]["distributions"] == found[1]["distributions"]
    assert found[0]["schema"] == "kvtier.trace.describe/1"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KVTierError, match="cannot write"):
        kvtier_trace("export", "generated:chat", "--out", str(tmp_path / "file" / "x.json"))


def test_describe_shows_bad_lines_beside_the_table(
    write_trace: WriteTrace, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace("a.jsonl", swe_record(user("a"), assistant("b")), *["{oops"] * 12)
    assert kvtier_trace("describe", str(path)) == 0
    shown = capsys.readouterr()
    assert f"bad line: {path}:2: not JSON" in shown.err
    assert "and 2 more bad lines" in shown.err
    assert "calls per session" in shown.out


def test_describe_to_standard_output_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    kvtier_trace("describe", "generated:chat", "--divisor", "8", "--turns", "2", "--json", "-")
    result = json.loads(capsys.readouterr().out)
    assert (result["totals"]["divisor"], result["totals"]["sessions"]) == (8, 20)
    assert {row["quantity"] for row in result["distributions"]} >= {
        "calls per session",
        "prompt per call",
    }


def test_list_names_the_traces_of_a_folder_and_the_presets(
    write_trace: WriteTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace("mooncake_synthetic_trace.jsonl", "x")
    write_trace("mine.jsonl", "x")
    kvtier_trace("list", "--traces-dir", str(tmp_path), "--json", str(tmp_path / "list.json"))
    shown = capsys.readouterr().out
    assert "mooncake_synthetic_trace" in shown and "generated:swe-mini" in shown
    result = json.loads((tmp_path / "list.json").read_text())
    assert {t["name"]: t["licence"] for t in result["traces"]} == {
        "mine": None,
        "mooncake_synthetic_trace": "Apache-2.0",
    }


def test_an_unwritable_json_target_is_found_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(KVTierError, match="cannot write"):
        kvtier_trace("describe", "nope", "--json", str(tmp_path))


@pytest.mark.parametrize(
    "words",
    [["describe", "nope"], ["describe", "generated:nope"], ["export", "nope", "--out", "-"]],
)
def test_unknown_names_are_errors_that_list_the_known(words: list[str]) -> None:
    with pytest.raises(TraceError, match="swe-mini"):
        kvtier_trace(*words)
