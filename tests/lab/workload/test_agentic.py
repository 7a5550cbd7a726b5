"""SGLang's data set agentic-trace: read, and written so that SGLang's own loader takes it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from commands import parsed

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload import commands, lines
from sgl_kvtier.lab.workload.agentic import to_document
from sgl_kvtier.lab.workload.encoder import ByteEncoder
from sgl_kvtier.lab.workload.generate import generate, load_preset
from sgl_kvtier.lab.workload.session import (
    Append,
    Blocks,
    Call,
    Context,
    Edit,
    Event,
    Message,
    Session,
)
from sgl_kvtier.lab.workload.source import load_sessions
from sgl_kvtier.types import Span

ENCODER = ByteEncoder((1 << 31) - 1)


def kvtier_trace(*words: str) -> int:
    return commands.run(parsed(commands, *words))


def said(text: str, **fields: Any) -> Call:
    return Call(Message("assistant", text), **fields)


def session(*events: Event, **fields: Any) -> Session:
    head = {"source": "owner/repo", "licence": "MIT", "model": "m", "batch": "b", "start_s": 3.5}
    return Session("s", events=events, **(head | fields))  # type: ignore[arg-type]


FULL = session(
    Append(Message("system", "be brief")),
    Append(Message("user", "fix it, Grüße")),
    said("I look", output_tokens=7, gap_s=0.0, latency_s=2.5, arrival_s=0.0),
    Append(Message("tool", 'ls says "conversations": [')),
    Append(Message("tool", "")),
    said("done", gap_s=1.25),
    said("really done", output_tokens=0, gap_s=0.5),
    tools=Message("tools", '[{"name": "ls"}]'),
    truncated=True,
    clipped_messages=2,
)


def written(path: Path, *sessions: Session) -> Path:
    path.write_text(json.dumps(to_document(sessions, ENCODER)))
    return path


def foreign(path: Path, *conversations: Any, indent: int | None = None) -> Path:
    document = {"metadata": {"made_by": "another"}, "conversations": list(conversations)}
    path.write_text(json.dumps(document, indent=indent))
    return path


def asked(text: str, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text}]}


def test_a_session_that_is_written_is_read_again_as_it_was(tmp_path: Path) -> None:
    (found,) = load_sessions(str(written(tmp_path / "a.json", FULL))).sessions
    assert found == FULL


def test_a_session_is_cut_where_its_context_is_replaced_and_says_so(tmp_path: Path) -> None:
    edited = session(
        Append(Message("user", "a")),
        said("one"),
        Edit((Span(0, 1), Message("user", "summary"))),
        said("two"),
    )
    path = written(tmp_path / "a.json", edited)
    (found,) = load_sessions(str(path)).sessions
    assert (found.calls, found.truncated) == (1, True)


def test_a_session_without_text_is_refused() -> None:
    blocks = Blocks("scope", 64, ((0, 2),), 128)
    hashed = session(Append(Message("user", blocks=blocks)), Call(output_tokens=3))
    with pytest.raises(TraceError, match="no text, only hashes"):
        to_document([hashed], ENCODER)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_of_another_maker_is_known_by_its_content(
    tmp_path: Path, indent: int | None
) -> None:
    turns = [asked("read the file"), asked("its text", "tool")]
    path = foreign(tmp_path / "openhands.jsonl", turns, [asked("hello")], indent=indent)
    first, second = load_sessions(str(path)).sessions
    assert (first.session_id, first.calls, second.calls) == ("openhands-1", 2, 1)
    prompts = [[(m.role, m.text) for m in prompt] for _, prompt in Context(first).calls()]
    assert prompts[1] == [("user", "read the file"), ("assistant", ""), ("tool", "its text")]


def test_an_output_that_is_not_recorded_is_as_long_as_sglang_makes_it(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.json", [asked("hello")])
    (found,) = load_sessions(str(path)).sessions
    assert [call.output_tokens for call, _ in Context(found).calls()] == [220]


def test_the_servers_own_answer_takes_the_place_of_one_that_is_not_recorded(tmp_path: Path) -> None:
    path = foreign(tmp_path / "a.json", [asked("a"), asked("b")])
    context = Context(load_sessions(str(path)).sessions[0])
    assert context.next_call() is not None
    context.answer(Message("assistant", "the server's"))
    assert context.next_call() is not None
    assert [message.text for message in context.prompt] == ["a", "the server's", "b"]


@pytest.mark.parametrize(
    "bad",
    [
        7,
        [],
        [7],
        [{"messages": 7}],
        [{"messages": ["text"]}],
        [{"messages": [{"role": "user", "content": 7}]}],
        [{"messages": [{"role": "user", "content": ["text"]}]}],
        [{"messages": [{"content": "no role"}]}],
        [{"messages": [], "gap_s": -1}],
        [{"messages": [], "output": 3}],
        [{"messages": [], "output_tokens": 1 << 40}],
    ],
)
def test_a_damaged_conversation_is_noted_and_passed_over(tmp_path: Path, bad: Any) -> None:
    path = foreign(tmp_path / "a.json", [asked("a")], bad, [asked("c")])
    loaded = load_sessions(str(path))
    assert [one.session_id for one in loaded.sessions] == ["a-1", "a-3"]
    assert [line.line for line in loaded.bad_lines] == [2]


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_DOCUMENT_BYTES", 1 << 10)
    path = foreign(tmp_path / "a.json", [asked("a" * (1 << 11))])
    with pytest.raises(TraceError, match="has more than 0 MiB"):
        load_sessions(str(path))


def test_the_command_writes_what_is_read_as_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.json")
    words = ("generated:swe-mini", "--sessions", "3", "--turns", "4", "--seed", "2")
    assert kvtier_trace("export", *words, "--out", out) == 0
    assert "3 sessions, 12 calls written to" in capsys.readouterr().out
    made = load_sessions("generated:swe-mini", limit=3, max_calls=4, seed=2).sessions
    found = load_sessions(out).sessions
    # the message behind the last call is nobody's prompt
    pairs = zip(made, found, strict=True)
    ends = [dataclasses.replace(one, events=one.events[: len(two.events)]) for one, two in pairs]
    assert list(found) == ends


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_sglangs_own_loader_takes_what_is_written(tmp_path: Path) -> None:
    from sglang.benchmark.datasets.agentic_trace import AgenticTraceDataset

    path = written(tmp_path / "a.json", FULL, generate(load_preset("chat"), 0, 0))
    dataset = AgenticTraceDataset(str(path), 0, 16, 0, None)
    first, second = dataset.load(None)
    assert [[m["role"] for m in turn] for turn in first.prompt] == [
        ["system", "system", "user"],
        ["tool", "tool"],
    ]
    assert first.prompt_len == to_document([FULL], ENCODER)["conversations"][0][0]["prompt_tokens"]
    assert second.prompt
