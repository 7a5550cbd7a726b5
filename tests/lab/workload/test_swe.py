"""The swe_*.jsonl format, rule by rule, on hand-written lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_records import assistant, swe_record, tool, user

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.catalogue import Origin
from sgl_kvtier.lab.workload.lines import BadRecord
from sgl_kvtier.lab.workload.reader import Setting
from sgl_kvtier.lab.workload.session import Call, Context, Edit, Message, Session
from sgl_kvtier.lab.workload.swe import SweReader
from sgl_kvtier.types import Span


def read(record: dict[str, Any], folder: Path = Path()) -> Session:
    (session,) = SweReader(Setting(folder / "swe_x.jsonl", Origin("", ""))).sessions(1, record)
    return session


def prompts(session: Session) -> list[list[str | None]]:
    return [[message.text for message in prompt] for _, prompt in Context(session).calls()]


def calls(session: Session) -> list[Call]:
    return [event for event in session.events if isinstance(event, Call)]


def test_an_assistant_turn_is_a_call_whose_output_joins_the_context() -> None:
    session = read(swe_record(user("fix it"), assistant("looking"), tool("42"), assistant("done")))
    assert prompts(session) == [["fix it"], ["fix it", "looking", "42"]]
    assert calls(session)[0].output == Message("assistant", "looking")


def test_reasoning_content_and_tool_calls_all_stand_in_later_prompts() -> None:
    made = [
        {"name": "bash", "arguments": '{"command": "ls"}'},
        {"name": "finish", "arguments": "{}"},
    ]
    session = read(
        swe_record(
            user("a"),
            assistant("text", reasoning="thought", tool_calls=made),
            tool("b"),
            assistant("c"),
        )
    )
    assert prompts(session)[1][1] == 'thought\ntext\nbash {"command": "ls"}\nfinish {}'


def test_an_edit_takes_ranges_of_the_present_context_and_new_messages() -> None:
    edit = {
        "role": "context_edit",
        "why": "condensation",
        "parts": [[0, 1], user("summary"), [3, 4]],
    }
    session = read(
        swe_record(
            user("a"),
            assistant("b"),
            tool("c"),
            user("d"),
            edit,
            assistant("e"),
            tool("f"),
            assistant("g"),
        )
    )
    assert prompts(session) == [["a"], ["a", "summary", "d"], ["a", "summary", "d", "e", "f"]]
    assert (
        Edit((Span(0, 1), Message("user", "summary"), Span(3, 4)), "condensation") in session.events
    )


@pytest.mark.parametrize(
    "part", [[0, 3], [2, 1], [-1, 1], [0], [0, 1, 2], [0.0, 1], "0-1", [True, 1]]
)
def test_an_edit_with_a_wrong_range_is_a_bad_line_that_names_its_turn(part: object) -> None:
    edit = {"role": "context_edit", "parts": [part]}
    with pytest.raises(BadRecord, match="turn 2: "):
        read(swe_record(user("a"), assistant("b"), edit, assistant("c")))


def test_tool_schemas_come_first_and_are_one_object_for_all_sessions(tmp_path: Path) -> None:
    (tmp_path / "swe_tools.json").write_text(json.dumps({"kit": [{"name": "bash"}]}))
    record = swe_record(user("a"), assistant("b"), tools_ref="kit")
    reader = SweReader(Setting(tmp_path / "swe_x.jsonl", Origin("", "")))
    first, second = (reader.sessions(n, record)[0] for n in (1, 2))
    assert prompts(first) == [['[{"name": "bash"}]', "a"]]
    assert first.tools is second.tools


def test_schemas_that_are_nowhere_say_which_file_to_put_where(tmp_path: Path) -> None:
    record = swe_record(user("a"), assistant("b"), tools_ref="kit")
    with pytest.raises(TraceError, match=r"need swe_tools\.json in the trace's folder"):
        read(record, tmp_path)
    (tmp_path / "swe_tools.json").write_text("{}")
    with pytest.raises(BadRecord, match='tools_ref "kit" is not in'):
        read(record, tmp_path)
    for content in (b"not json", b"[" * 200_000, b'{"kit": "\\ud800"}', b"\xff"):
        (tmp_path / "swe_tools.json").write_bytes(content)
        with pytest.raises(TraceError, match=r"swe_tools\.json"):
            read(record, tmp_path)


EDIT = {"role": "context_edit", "parts": [[0, 1]], "t_offset_s": 9.0}
# what: the turns, and the gap, the latency and the arrival of each call.
TIMES: dict[str, tuple[list[dict[str, Any]], list[tuple[float, float | None, float | None]]]] = {
    "latency runs from the turn before, the gap from the response before": (
        [user("a"), assistant("b", 3.0), tool("c", 3.5), tool("d", 4.25), assistant("e", 10.0)],
        [(0.0, 3.0, 0.0), (1.25, 5.75, 4.25)],
    ),
    "condensing counts to the client's wait": (
        [user("a"), assistant("b", 3.0), tool("c", 4.0), EDIT, assistant("d", 11.0)],
        [(0.0, 3.0, 0.0), (6.0, 2.0, 9.0)],
    ),
    "times that run backwards are waits of zero": (
        [user("a"), assistant("b", 5.0), tool("c", 4.0), assistant("d", 3.5)],
        [(0.0, 5.0, 0.0), (0.0, 0.0, 4.0)],
    ),
    "an untimed turn leaves the whole interval to the server": (
        [user("a"), assistant("b", 0.0), user("c"), assistant("d", 2.5)],
        [(0.0, None, 0.0), (0.0, 2.5, 0.0)],
    ),
    "without offsets the tool's run time is the gap": (
        [
            *(user("a"), assistant("b"), tool("c", tool_exec_s=0.5)),
            *(tool("d", tool_exec_s=1), assistant("e")),
        ],
        [(0.0, None, None), (1.5, None, None)],
    ),
}


@pytest.mark.parametrize("what", TIMES)
def test_times_of_turns_are_waits_of_the_client_and_of_the_server(what: str) -> None:
    turns, times = TIMES[what]
    found = calls(read(swe_record(*turns)))
    assert [(c.gap_s, c.latency_s, c.arrival_s) for c in found] == times


def test_the_providers_counts_and_clipped_results_are_kept() -> None:
    turns = (user("a"), assistant("b", usage={"in": 9, "out": 7}))
    clipped = tool("c", clipped_from_chars=99_999)
    session = read(swe_record(*turns, clipped, assistant("d")))
    assert [c.output_tokens for c in calls(session)] == [7, None]
    assert session.clipped_messages == 1


BAD_LINES = [
    (swe_record(user("a")), "makes no request"),
    (swe_record("turn"), "turn 0: a turn must be an object"),  # type: ignore[arg-type]
    (swe_record({"role": "robot", "content": "a"}), 'turn 0: unknown role "robot"'),
    (swe_record({"content": "a"}), "turn 0: 'role' must be a text"),
    (
        swe_record(user("a"), assistant("b", usage={"out": -1})),
        "turn 1: 'out' must be a whole number",
    ),
    (
        swe_record(user("a"), assistant("b", tool_calls=["ls"])),
        "turn 1: a tool call must be an object",
    ),
    (
        swe_record(user("a", t_offset_s="soon"), assistant("b")),
        "turn 0: 't_offset_s' must be a number",
    ),
    (swe_record(user("a"), {"role": "context_edit"}), "turn 1: 'parts' must be a list"),
    ({"session_id": "s", "turns": {}}, "'turns' must be a list"),
    ({"turns": [user("a"), assistant("b")]}, "'session_id' must be a text"),
]


@pytest.mark.parametrize(("record", "reason"), BAD_LINES)
def test_a_bad_line_says_what_is_wrong_and_where(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        read(record)
