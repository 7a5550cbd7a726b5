"""Loading sessions from files, names and presets."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from trace_records import WriteTrace, assistant, claude_record, request, swe_record, tool, user

from sgl_kvtier.errors import ConfigError, TraceError
from sgl_kvtier.lab.workload.catalogue import find_trace, known_traces, origin_of, trace_files
from sgl_kvtier.lab.workload.encoder import ByteEncoder
from sgl_kvtier.lab.workload.session import Append, Call, Context, Edit, Message, Session
from sgl_kvtier.lab.workload.source import cut_session, enter_late, load_sessions


def numbered(count: int, calls: int = 1) -> list[dict[str, Any]]:
    turns = [turn for _ in range(calls) for turn in (tool("x" * 400), assistant("y" * 40))]
    return [swe_record(*turns, session_id=f"s{i}") for i in range(count)]


def test_bad_lines_are_counted_with_file_and_number_and_the_rest_is_read(
    write_trace: WriteTrace,
) -> None:
    good = numbered(3)
    path = write_trace(
        "a.jsonl", "{oops", good[0], good[1], {"session_id": "x", "turns": []}, "", good[2]
    )
    loaded = load_sessions(str(path))
    assert [s.session_id for s in loaded.sessions] == ["s0", "s1", "s2"]
    assert [(line.path, line.line) for line in loaded.bad_lines] == [(str(path), 1), (str(path), 4)]
    assert f"2 bad lines were passed over, the first: {path}:1: not JSON" in loaded.description


def test_no_line_beyond_those_wanted_is_decoded(write_trace: WriteTrace) -> None:
    loaded = load_sessions(str(write_trace("a.jsonl", *numbered(2), "{oops")), limit=2)
    assert (len(loaded.sessions), loaded.bad_lines) == (2, ())


def test_no_byte_far_beyond_those_wanted_is_read(tmp_path: Path) -> None:
    filler = swe_record(
        user("".join(random.Random(1).choices("abcdefgh", k=500_000))), assistant("b")
    )
    packed = gzip.compress("".join(json.dumps(r) + "\n" for r in [*numbered(2), filler]).encode())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    assert not load_sessions(str(path), limit=2).bad_lines
    assert "breaks off" in load_sessions(str(path)).bad_lines[0].reason


def test_skipping_passes_over_sessions(write_trace: WriteTrace) -> None:
    path = str(write_trace("a.jsonl", *numbered(5)))
    assert [s.session_id for s in load_sessions(path, skip=2, limit=2).sessions] == ["s2", "s3"]
    with pytest.raises(TraceError, match="no session to replay"):
        load_sessions(path, skip=5)


def test_sub_agents_come_with_their_owner_and_are_not_counted(write_trace: WriteTrace) -> None:
    agent = {"t": 3.0, "agent_id": "a1", "requests": [request(0, 1, 2)]}
    lines = [claude_record(request(0, 1, 3), agent, id=f"t{i}") for i in range(3)]
    loaded = load_sessions(str(write_trace("c.jsonl", *lines)), limit=2)
    assert [s.session_id for s in loaded.sessions] == [
        "claude-code:t0",
        "claude-code:t0/a1",
        "claude-code:t1",
        "claude-code:t1/a1",
    ]


def test_sessions_of_one_name_are_told_apart(write_trace: WriteTrace) -> None:
    agent = {"t": 3.0, "agent_id": "a1", "requests": [request(0, 1, 2)]}
    lines = [claude_record(request(0, 1, 3), agent, id=name) for name in ("t", "t", "t#2")]
    loaded = load_sessions(str(write_trace("c.jsonl", *lines)))
    assert [(s.session_id, s.parent) for s in loaded.sessions] == [
        ("claude-code:t", None),
        ("claude-code:t/a1", "claude-code:t"),
        ("claude-code:t#2", None),
        ("claude-code:t/a1#2", "claude-code:t#2"),
        ("claude-code:t#2#2", None),
        ("claude-code:t#2/a1", "claude-code:t#2#2"),
    ]


def test_sessions_are_cut_after_so_many_calls_and_it_is_said(write_trace: WriteTrace) -> None:
    loaded = load_sessions(str(write_trace("a.jsonl", *numbered(2, calls=5))), max_calls=3)
    assert [s.calls for s in loaded.sessions] == [3, 3]
    assert isinstance(loaded.sessions[0].events[-1], Call)
    assert (loaded.sessions_cut, loaded.calls_cut) == (2, 4)
    assert "2 sessions were cut and 0 dropped, 4 calls in all (max_calls = 3)" in loaded.description


def test_a_session_ends_before_the_first_prompt_that_is_too_long(write_trace: WriteTrace) -> None:
    # Prompts of 101, 213, 325, ... tokens: 1 + 400 / 4 for the input, 1 + 40 / 4 for the output
    # before it.
    path = str(write_trace("a.jsonl", *numbered(1, calls=5)))
    kept = {
        n: load_sessions(path, encoder=ByteEncoder(512), max_prompt_tokens=n).calls
        for n in (101, 212, 213, 325, 9999)
    }
    assert kept == {101: 1, 212: 1, 213: 2, 325: 3, 9999: 5}
    assert load_sessions(path, encoder=ByteEncoder(512, 4), max_prompt_tokens=213).calls == 5


def test_a_session_whose_first_prompt_is_too_long_is_dropped_and_the_next_one_taken(
    write_trace: WriteTrace,
) -> None:
    long = swe_record(user("x" * 4000), assistant("b"), session_id="long")
    path = str(write_trace("a.jsonl", long, *numbered(2)))
    loaded = load_sessions(path, limit=2, encoder=ByteEncoder(512), max_prompt_tokens=200)
    assert [s.session_id for s in loaded.sessions] == ["s0", "s1"]
    assert loaded.sessions_dropped == 1


def test_sessions_that_stay_short_are_passed_over_for_longer_ones(write_trace: WriteTrace) -> None:
    turns = user("x" * 400), assistant("b"), user("y" * 4000), assistant("c")
    long = swe_record(*turns, session_id="long")
    path = str(write_trace("a.jsonl", *numbered(2, calls=2), long))
    loaded = load_sessions(path, limit=1, encoder=ByteEncoder(512), min_prompt_tokens=1000)
    assert [s.session_id for s in loaded.sessions] == ["long"]
    assert loaded.sessions_dropped == 2
    assert "(min_prompt_tokens = 1000)" in loaded.description


def test_a_prompt_that_an_edit_makes_longer_is_seen() -> None:
    events = (Append(Message("user", "a")), Call(), Edit((Message("user", "x" * 4000),)), Call())
    cut = cut_session(Session("s", "t", events), encoder=ByteEncoder(512), max_prompt_tokens=100)
    assert cut.events == events[:2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"skip": -1},
        {"max_calls": 0},
        {"max_prompt_tokens": 5},
        {"min_prompt_tokens": 5},
    ],
)
def test_wrong_limits_are_named(write_trace: WriteTrace, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        load_sessions(str(write_trace("a.jsonl", *numbered(1))), **wrong)


def test_generated_sessions_need_a_number_of_them() -> None:
    assert len(load_sessions("generated:swe-mini", limit=3).sessions) == 3
    with pytest.raises(ConfigError, match="say how many"):
        load_sessions("generated:swe-mini")
    with pytest.raises(TraceError, match="no preset 'nope'; there are swe-mini"):
        load_sessions("generated:nope", limit=1)


def test_generated_sessions_that_do_not_fit_are_replaced_by_the_next() -> None:
    loaded = load_sessions(
        "generated:claude-code", limit=5, encoder=ByteEncoder(512, 16), max_prompt_tokens=2000
    )
    assert len(loaded.sessions) == 5
    assert loaded.sessions_dropped > 0
    with pytest.raises(TraceError, match="no session to replay"):
        load_sessions(
            "generated:swe-openhands-sdk", limit=1, encoder=ByteEncoder(512), max_prompt_tokens=10
        )


def test_traces_are_found_by_name_or_its_beginning(write_trace: WriteTrace, tmp_path: Path) -> None:
    for name in ("swe_mini.jsonl.gz", "swe_other.jsonl", "swe_other_two.jsonl", "azure.csv"):
        write_trace(name, *numbered(1))
    write_trace("notes.txt", "x")
    assert list(trace_files(tmp_path)) == ["azure", "swe_mini", "swe_other", "swe_other_two"]
    assert find_trace("swe_other", tmp_path).name == "swe_other.jsonl"
    assert (
        find_trace("swe_mini", tmp_path)
        == find_trace("swe_m", tmp_path)
        == tmp_path / "swe_mini.jsonl.gz"
    )
    with pytest.raises(TraceError, match="'swe_' could be any of swe_mini, swe_other,"):
        find_trace("swe_", tmp_path)


def test_a_name_that_is_nowhere_lists_what_there_is_and_offers_generated_sessions(
    write_trace: WriteTrace, tmp_path: Path
) -> None:
    write_trace("swe_mini.jsonl", *numbered(1))
    with pytest.raises(
        TraceError, match=r"no trace 'nope'.*Traces found: swe_mini.*generated:swe-mini"
    ):
        find_trace("nope", tmp_path)
    with pytest.raises(TraceError, match="is not a folder"):
        find_trace("nope", tmp_path / "missing")


def test_traces_are_looked_for_in_the_folder_that_the_variable_names_or_in_the_users_cache(
    write_trace: WriteTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace("mine.jsonl", *numbered(1))
    monkeypatch.setenv("KVTIER_TRACES", str(tmp_path))
    assert list(trace_files()) == ["mine"]
    monkeypatch.delenv("KVTIER_TRACES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert trace_files() == {}
    with pytest.raises(
        TraceError, match=rf"No traces were found in {tmp_path}/cache/kvtier/traces"
    ):
        find_trace("mine")
    (tmp_path / "cache" / "kvtier").mkdir(parents=True)
    (tmp_path / "cache" / "kvtier" / "traces").symlink_to(tmp_path)
    assert list(trace_files()) == ["mine"]
    monkeypatch.setenv("KVTIER_TRACES", str(tmp_path / "none"))
    with pytest.raises(TraceError, match=r"KVTIER_TRACES = .* is not a folder"):
        trace_files()


def test_only_known_files_are_given_a_source_and_a_licence(tmp_path: Path) -> None:
    assert origin_of(tmp_path / "mooncake_synthetic_trace.jsonl.gz").licence == "Apache-2.0"
    assert origin_of(tmp_path / "mine.jsonl").licence == ""
    assert all(
        origin.source.count("/") == 1 and origin.licence for origin in known_traces().values()
    )


AZURE_BAD = [
    "yesterday,3,1",
    "2023-11-16 18:17:04,3",
    "2023-11-16 18:17:04,0,5",
    "2023-11-16 18:17:04+00:00,3,1",  # with a time zone after rows without
    "9999-11-16 18:17:02,3,1",
    "2023-11-16 18:17:04,inf,1",
    "2023-11-16 18:17:04," + "9" * 400 + ",1",
    "2023-11-16 18:17:04,3," + "9" * 400,
    "2023-11-16 18:17:04," + "9" * 5000 + ",1",
    "2023-11-16 18:17:04," + "9" * 200_000 + ",1",
    '"' + "x" * 200_000,
    "2023-11-16 18:17:04,3,1\rx",
    "\u2003",
    "\0",
]


@pytest.mark.parametrize("row", AZURE_BAD, ids=range(len(AZURE_BAD)))
def test_a_hostile_row_of_an_azure_trace_is_a_bad_line(write_trace: WriteTrace, row: str) -> None:
    head = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,3,1"]
    loaded = load_sessions(str(write_trace("a.csv", *head, row)))
    assert len(loaded.sessions) == 1
    (bad,) = loaded.bad_lines
    assert bad.line == 3
    assert len(bad.reason) < 300


@pytest.mark.parametrize("levels", [40, 400, 100_000])
def test_sub_agents_nested_without_end_are_a_bad_line(write_trace: WriteTrace, levels: int) -> None:
    inner = '{"agent_id": "g", "t": 0, "requests": [' * levels + "]}" * levels
    good = json.dumps(claude_record(request(0, 1, 2)))
    loaded = load_sessions(
        str(write_trace("a.jsonl", good, good.replace('"requests": [', f'"requests": [{inner}, ')))
    )
    assert len(loaded.bad_lines) == 1
    assert "nested" in loaded.bad_lines[0].reason


def test_a_file_that_is_one_endless_line_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(bytes((64 << 20) + 1), 1))
    with pytest.raises(TraceError, match=r"first bad line: .*a\.jsonl\.gz:1: longer than 64 MiB"):
        load_sessions(str(path))


def test_a_session_entered_late_has_what_came_before_in_its_first_prompt():
    session = Session(
        "s", "made up",
        (
            Append(Message("user", "a")), Call(Message("assistant", "1"), gap_s=3.0),
            Append(Message("tool", "b")), Call(Message("assistant", "2"), gap_s=4.0),
            Append(Message("tool", "c")), Call(Message("assistant", "3"), gap_s=5.0),
        ),
    )  # fmt: skip
    late = enter_late(session, 0.4)
    calls = [(call.gap_s, [m.text for m in prompt]) for call, prompt in Context(late).calls()]
    assert calls == [(0.0, ["a", "1", "b"]), (5.0, ["a", "1", "b", "2", "c"])]
    assert enter_late(session, 1.0).calls == 1
