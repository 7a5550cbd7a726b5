"""Every format that is read, and every one that is refused: small files of each, made here."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_records import assistant, claude_record, mooncake_record, request, swe_record, tool, user

from sgl_kvtier.errors import ConfigError, KVTierError, TraceError
from sgl_kvtier.lab.workload.describe import describe
from sgl_kvtier.lab.workload.encoder import ByteEncoder
from sgl_kvtier.lab.workload.session import Call, Context, Session
from sgl_kvtier.lab.workload.source import load_sessions

REAL_FORMATS = Path(__file__).resolve().parents[3].parent / "shared" / "traces" / "formats"


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def from_(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


def capture(name: str = "t1", *requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A Claude Code capture as it is published."""
    head = {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return {**head, **fields, "requests": list(requests or (asked(0.0, 1, 2), asked(9.0, 1, 2, 3)))}


def asked(t: float, *ids: int, **fields: Any) -> dict[str, Any]:
    """A request of a capture. Its prompt is 5 tokens longer than its whole blocks."""
    made = {"t": t, "type": "s", "model": "m", "in": 64 * len(ids) + 5, "out": 10}
    return {**made, "api_time": 2.0, "think_time": 1.0, "hash_ids": list(ids), **fields}


def agent(t: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"t": t, "agent_id": "a1", "requests": list(requests)}


def chat(number: int, parent: int, at_s: float, tokens: int, *ids: int) -> dict[str, Any]:
    """A row of Qwen-Bailian."""
    head = {"chat_id": number, "parent_chat_id": parent, "timestamp": at_s, "type": "text"}
    return {**head, "turn": 1, "input_length": tokens, "output_length": 4, "hash_ids": list(ids)}


def of_session(name: str, tokens: int, *ids: int, **times: float) -> dict[str, Any]:
    """A row of a session as dynamo and aiperf write it."""
    head = {"session_id": name, "input_length": tokens, "output_length": 3, "hash_ids": list(ids)}
    return {**head, **times}


TALK = [from_("human", "a question"), from_("gpt", "an answer"), from_("human", "another")]
TALK += [from_("gpt", "the end")]
WHOLE = [said("user", "one"), said("assistant", "two"), said("user", "three")]
AGENTIC = {"metadata": {}, "conversations": [[{"messages": [said("user", "look")]}]]}
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def lines(*records: Any) -> str:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)


def document(value: Any) -> str:
    return json.dumps(value, indent=2)


# sessions and calls: by name the texts of files that have so many.
FILES: dict[tuple[int, int], dict[str, str]] = {
    (1, 2): {
        "a capture in one line": lines(capture()),
        "a capture, indented": document(capture()),
        "Mooncake, sessions": lines(
            of_session("s", 600, 0, 1, timestamp=1.0), of_session("s", 700, 0, 1, delay=250.0)
        ),
        "Mooncake, messages": lines(
            {"session_id": "s", "messages": WHOLE[:1], "output_length": 9, "timestamp": 0},
            {"session_id": "s", "messages": WHOLE, "output_length": 9, "timestamp": 500},
        ),
        "Qwen-Bailian": lines(chat(7, -1, 61.5, 20, 4, 5), chat(8, 7, 70.0, 40, 4, 5, 6)),
        "a capture with a byte order mark": "\ufeff" + document(capture()),
        "ShareGPT, a list": document([{"id": "c", "conversations": TALK}]),
        "ShareGPT, one line": json.dumps([{"id": "c", "conversations": TALK}]),
        "vLLM multi-turn": document([{"id": "c", "messages": [*WHOLE, said("assistant", "four")]}]),
        "aiperf's file of inputs": document(
            {
                "data": [
                    {
                        "session_id": "s",
                        "payloads": [
                            {"messages": WHOLE[:1], "max_tokens": 5},
                            {"messages": WHOLE, "max_tokens": 5},
                        ],
                    }
                ]
            }
        ),
        "aiperf's multi-turn sessions": lines(
            {"session_id": "s", "turns": [{"text": "one"}, {"text": "two", "delay": 1500}]}
        ),
        "agent sessions": lines(
            swe_record(
                user("a", t_offset_s=0.0),
                assistant(
                    "b",
                    1.0,
                    usage={"out": 7},
                    reasoning="r",
                    tool_calls=[{"name": "ls", "arguments": "-l"}],
                ),
                tool("c", 2.0, tool_exec_s=0.5),
                {"role": "context_edit", "parts": [[0, 1], user("d")], "why": "w"},
                assistant("e", 3.0),
                truncated=False,
                model="m",
            )
        ),
    },
    (2, 4): {
        "captures, one a line": lines(capture("t1"), capture("t2")),
        "a list of captures": document([capture("t1"), capture("t2")]),
        "ShareGPT, lines": lines(*[{"id": f"c{i}", "conversations": TALK} for i in (1, 2)]),
    },
    (1, 1): {
        "Mooncake": lines(mooncake_record(1100, 0, 7, 8)),
        "Mooncake, float times": lines(mooncake_record(9, 0, timestamp=105.5)),
        "Mooncake without hashes": lines(
            {"timestamp": 0, "input_length": 1200, "output_length": 52}
        ),
        "BurstGPT": lines(BURST, "5,ChatGPT,472,18,490,Conversation log"),
        "BurstGPT with sessions": lines(
            BURST_SESSIONS, "5,0,3.1,ChatGPT,472,18,490,Conversation log"
        ),
        "Azure": lines(AZURE, "2023-11-16 18:17:03.97,100,5"),
        "Azure with a byte order mark": "\ufeff" + lines(AZURE, "2023-11-16 18:17:03,9,5"),
        "OpenAI's batch": lines(
            {
                "custom_id": "r",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": WHOLE, "max_tokens": 20},
            }
        ),
        "requests of messages": lines({"messages": WHOLE}),
        "agentic-trace": document(AGENTIC),
        "agentic-trace behind long metadata": json.dumps(
            {**AGENTIC, "metadata": {"notes": "x" * 80_000}}
        ),
    },
    (2, 3): {
        "blocks that are kept and new": lines(
            claude_record(
                request(0, 1, 2),
                {"agent_id": "g", "t": 1.0, "requests": [request(0, 5, 1)]},
                request(1, 7, 2),
            )
        )
    },
}
READ = {name: (text, *counts) for counts, files in FILES.items() for name, text in files.items()}
# name: the file's text or bytes, and what its one line of refusal says.
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "vLLM's generator": (
        document({"filetype": "generate_conversations", "num_conversations": 4}),
        "vLLM's settings for generated conversations.*--output-file",
    ),
    "blocks of another size": (
        lines(mooncake_record(700, 0, 1, 2)),
        r":1: 3 hash_ids for 'input_length' = 700 .* 512 tokens: say with --block-tokens .*234 to 349",
    ),
    "Bailian's blocks under Mooncake's fields": (
        lines(mooncake_record(40, 0, 1, 2, timestamp=61.5)),
        "say with --block-tokens",
    ),
    "a session of which only the new part stands in each row": (
        lines(of_session("s", 600, 0, 1, timestamp=0.0), of_session("s", 600, 5, 6, delay=1.0)),
        "do not begin alike.*write whole prompts",
    ),
    "a session without hashes": (
        lines({"session_id": "s", "input_length": 9, "output_length": 1, "delay": 5}),
        "a session without hash_ids",
    ),
    "times in nanoseconds as texts": (
        lines(mooncake_record(9, 0, timestamp="1753780607550317897")),
        "'timestamp' must be a number of milliseconds",
    ),
    "no time at all": (
        lines({"input_length": 9, "output_length": 1, "hash_ids": [0]}),
        "needs 'timestamp', in milliseconds",
    ),
    "messages that are deltas": (
        lines({"session_id": "s", "message_mode": "delta", "messages": WHOLE}),
        "'message_mode' = \"delta\" is not read: write each request's whole prompt",
    ),
    "embeddings in a batch": (
        lines({"custom_id": "r", "url": "/v1/embeddings", "body": {"input": "x"}}),
        "only bodies of /v1/chat/completions and /v1/completions are read",
    ),
    "an unsorted Azure trace": (
        lines(AZURE, "2023-11-16 18:17:05,100,5", "2023-11-16 18:17:03,100,5"),
        ":3: an Azure trace .* Sort the rows",
    ),
    "an empty file": ("", "in no format this reads"),
    "an unknown CSV": (lines("when,how long", "1,2"), "in no format this reads"),
    "an unknown object": (lines({"prompt": "x", "n": 1}), 'its first object has "prompt", "n"'),
    "a list of numbers": ("[1, 2]", "in no format this reads"),
    "a torn document": (document(capture())[:-9], "not JSON: .*Copy the file again"),
    "Zstandard": (b"\x28\xb5\x2f\xfd rest", "unpack it with `zstd -d`"),
    "a Parquet table": (b"PAR1 rest", "Parquet table: write its rows as lines of JSON"),
    "UTF-16": ("[]".encode("utf-16"), "write it as UTF-8"),
    "a capture whose ids do not fit its block size": (
        lines(capture("t", asked(0.0, 1, 2, **{"in": 900}))),
        "2 hash_ids for 'in' = 900 do not fit blocks of 64",
    ),
    "an unknown kind of request in a capture": (
        lines(capture("t", asked(0.0, 1, type="x"))),
        "'type' = \"x\" is no known kind of request",
    ),
    "an unknown speaker": (
        lines({"conversations": [from_("narrator", "x"), *TALK]}),
        "'from' = \"narrator\" is no known speaker",
    ),
}
# name: the file's text, its calls, and what is counted as left out.
LEFT_OUT: dict[str, tuple[str, int, dict[str, int]]] = {
    "requests of a capture that hold no whole block": (
        lines(capture("t", asked(0.0, 1), asked(1.0, **{"in": 8}))),
        1,
        {"requests shorter than one block": 1},
    ),
    "requests without hashes": (
        lines(*[{"timestamp": 0, "input_length": 1200, "output_length": 52}] * 2),
        2,
        {"requests without hash_ids, which share no prefix": 2},
    ),
    "fields that mean nothing to the reader": (
        lines(mooncake_record(9, 0, priority=3)),
        1,
        {'"priority" fields of rows': 1},
    ),
    "failed requests of BurstGPT": (
        lines(BURST, "5,GPT-4,472,18,490,Chat log", "7.5,GPT-4,100,0,100,Chat log"),
        1,
        {"failed requests, which have no response tokens": 1},
    ),
    "a question that nobody answers": (
        lines({"conversations": [from_("gpt", "hello"), *TALK, from_("human", "and?")]}),
        2,
        {"messages behind the last answer": 1},
    ),
}


def written(folder: Path, text: str | bytes, name: str = "mine.dat") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def prompts(session: Session) -> list[list[tuple[str, str | None]]]:
    return [[(m.role, m.text) for m in prompt] for _, prompt in Context(session).calls()]


def ids(session: Session) -> list[list[int]]:
    return [
        [int(i) for message in prompt if message.blocks for i in message.blocks.ids()]
        for _, prompt in Context(session).calls()
    ]


def lengths(session: Session) -> list[int]:
    return [
        sum(message.blocks.tokens for message in prompt if message.blocks)
        for _, prompt in Context(session).calls()
    ]


def calls(session: Session) -> list[Call]:
    return [event for event in session.events if isinstance(event, Call)]


def only(folder: Path, *records: Any, **options: Any) -> Session:
    (session,) = load_sessions(written(folder, lines(*records)), **options).sessions
    return session


@pytest.mark.parametrize("name", READ)
def test_a_file_of_each_format_is_read_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    text, sessions, requests = READ[name]
    for made in (text, gzip.compress(text.encode())):
        loaded = load_sessions(written(tmp_path, made))
        assert (len(loaded.sessions), loaded.calls, loaded.bad_lines) == (sessions, requests, ())
        describe(loaded.sessions, ByteEncoder(512, 8))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content, line = REFUSED[name]
    with pytest.raises(TraceError, match=line) as found:
        load_sessions(written(tmp_path, content))
    assert "\n" not in str(found.value) and "mine" in str(found.value)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_counted(tmp_path: Path, name: str) -> None:
    text, requests, counted = LEFT_OUT[name]
    loaded = load_sessions(written(tmp_path, text))
    assert (loaded.calls, loaded.left_out) == (requests, counted)


PUBLISHED = {
    "agentic.jsonl": (3, 3),
    "agentic_bigmeta.json": (3, 9),
    "agentic_image.json": (1, 3),
    "agentic_toolcalls.json": (1, 3),
    "aiperf_doc_example.jsonl": "say with --block-tokens",
    "aiperf_inputs.json": (3, 6),
    "aiperf_multi_turn.jsonl": (3, 6),
    "azure2023_bom.csv": (6, 6),
    "azure_sorted_not.csv": "Sort the rows",
    "bailian.jsonl": (6, 18),
    "burstgpt.csv": (6, 6),
    "burstgpt_sessions.csv": (6, 6),
    "dynamo_mooncake.jsonl": (3, 9),
    "generate_multi_turn.json": "--output-file",
    "mooncake_float_ts.jsonl": (4, 4),
    "mooncake_messages.jsonl": (3, 6),
    "mooncake_nohash.jsonl": (4, 4),
    "openai_batch.jsonl": (3, 3),
    "sharegpt.json": (5, 15),
    "sharegpt.jsonl": (5, 15),
    "trace_0001.json": (2, 6),
    "vllm_multiturn.json": (4, 12),
    "weka_rows.jsonl": (6, 18),
}


@pytest.mark.skipif(not REAL_FORMATS.is_dir(), reason="no files in ../shared/traces/formats")
def test_the_files_of_each_format_beside_the_checkout_are_read_or_refused() -> None:
    found: dict[str, Any] = {}
    for path in sorted(REAL_FORMATS.iterdir()):
        if path.name == "README.md":
            continue
        try:
            loaded = load_sessions(str(path))
            found[path.name] = (len(loaded.sessions), loaded.calls)
            assert loaded.bad_lines == ()
        except KVTierError as error:
            expected = PUBLISHED.get(path.name)
            found[path.name] = expected if str(expected) in str(error) else str(error)
    assert found == PUBLISHED


def test_a_folder_of_captures_is_one_trace(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(document(capture("b")))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines(capture("a")).encode()))
    (tmp_path / "README.md").write_text("about")
    names = [s.session_id for s in load_sessions(str(tmp_path)).sessions]
    assert names == ["claude-code:a", "claude-code:b"]
    (later,) = load_sessions(str(tmp_path), skip=1, limit=1).sessions
    assert later.session_id == "claude-code:b"


def test_a_folder_with_another_trace_in_it_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(mooncake_record(9, 0)))
    with pytest.raises(TraceError, match=r"a\.jsonl in it is Mooncake.*name one of its files"):
        load_sessions(str(tmp_path))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(TraceError, match="a folder without a trace"):
        load_sessions(str(tmp_path))


def test_a_captures_requests_share_the_ids_they_begin_with_alike(tmp_path: Path) -> None:
    session = only(
        tmp_path,
        capture("t", asked(0.0, 1, 2), asked(5.0, 1, 2, 3), asked(9.0, 1, 8), asked(10.0, 1)),
    )
    assert ids(session) == [[1, 2], [1, 2, 3], [1, 8], [1]]
    assert session.edits == 2


@pytest.mark.parametrize(
    ("first_s", "second_s"), [(0.5, 3.0), (30.5, 33.0)], ids=["from its own start", "absolute"]
)
def test_both_ways_of_counting_a_sub_agents_time_are_read_alike(
    tmp_path: Path, first_s: float, second_s: float
) -> None:
    inner = agent(30.0, asked(first_s, 7, 8), asked(second_s, 7, 8, 9))
    text = lines(capture("t", asked(0.0, 1), inner, asked(40.0, 1, 2)))
    _, helper = load_sessions(written(tmp_path, text)).sessions
    assert helper.start_s == 30.0
    assert [call.arrival_s for call in calls(helper)] == [0.5, 3.0]


def test_a_sub_agent_of_a_sub_agent_starts_at_the_same_time_either_way(tmp_path: Path) -> None:
    starts = []
    for inner in (
        agent(10.0, asked(1.0, 5), agent(4.0, asked(2.0, 6))),
        agent(10.0, asked(11.0, 5), agent(14.0, asked(16.0, 6))),
    ):
        found = load_sessions(written(tmp_path, lines(capture("t", asked(0.0, 1), inner)))).sessions
        starts.append([(s.start_s, calls(s)[0].arrival_s) for s in found])
    assert starts == [[(0.0, 0.0), (10.0, 1.0), (14.0, 2.0)]] * 2


def test_mooncakes_times_are_milliseconds_and_bailians_seconds(tmp_path: Path) -> None:
    assert only(tmp_path, mooncake_record(9, 0, timestamp=1500.5)).start_s == 1.5005
    assert only(tmp_path, chat(1, -1, 1500.5, 9, 0)).start_s == 1500.5


def test_rows_of_a_session_are_one_session_with_its_delays(tmp_path: Path) -> None:
    rows = [
        of_session("a", 600, 0, 1, timestamp=1000.0),
        of_session("b", 100, 50, timestamp=1200.0),
        of_session("a", 1100, 0, 1, 2, delay=250.0),
        of_session("a", 500, 9, delay=0.0),
    ]
    rows[3]["hash_ids"] = [0]
    one, other = load_sessions(written(tmp_path, lines(*rows))).sessions
    assert (one.start_s, other.start_s, one.session_id) == (1.0, 1.2, "mine:a")
    assert ids(one) == [[0, 1], [0, 1, 2], [0]]
    assert lengths(one) == [600, 1100, 500]
    assert [call.gap_s for call in calls(one)] == [0.0, 0.25, 0.0]
    assert one.edits == 1  # what only fills up a block that was cut is none


def test_a_session_goes_on_where_its_last_block_was_cut(tmp_path: Path) -> None:
    session = only(tmp_path, of_session("a", 600, 0, 1, timestamp=0), of_session("a", 900, 0, 1))
    stats = describe([session], ByteEncoder((1 << 31) - 1))
    assert stats.kept_tokens_total == 600


def test_chats_follow_their_parents_and_a_second_child_is_a_session_of_its_own(
    tmp_path: Path,
) -> None:
    rows = [
        chat(1, -1, 0.0, 32, 10, 11),
        chat(2, -1, 1.0, 16, 20),
        chat(3, 1, 4.5, 48, 10, 11, 12),
        chat(4, 1, 9.0, 48, 10, 11, 13),
        chat(5, 3, 10.0, 20, 30, 31),
        chat(6, 99, 11.0, 16, 40),
    ]
    found = load_sessions(written(tmp_path, lines(*rows))).sessions
    assert [ids(s) for s in found] == [
        [[10, 11], [10, 11, 12], [30, 31]],
        [[20]],
        [[10, 11, 13]],
        [[40]],
    ]
    assert [call.gap_s for call in calls(found[0])] == [0.0, 4.5, 5.5]
    assert [s.start_s for s in found] == [0.0, 1.0, 9.0, 11.0]


def test_a_bailian_row_whose_last_tokens_have_no_id_loses_them_and_says_so(tmp_path: Path) -> None:
    loaded = load_sessions(written(tmp_path, lines(chat(1, -1, 0.0, 37, 4, 5))))
    assert lengths(loaded.sessions[0]) == [32]
    assert "Left out: 5 tokens behind a prompt's last whole block" in loaded.description


def test_the_block_size_is_given_or_stands_in_the_rows(tmp_path: Path) -> None:
    assert lengths(only(tmp_path, mooncake_record(40, 0, 1, 2), block_tokens=16)) == [40]
    assert lengths(only(tmp_path, mooncake_record(40, 0, 1, 2, block_size=16))) == [40]
    with pytest.raises(TraceError, match=r"'block_size' = 16\. Leave --block-tokens out"):
        only(tmp_path, mooncake_record(40, 0, 1, 2, block_size=16), block_tokens=64)


@pytest.mark.parametrize("name", ["a capture in one line", "ShareGPT, a list", "BurstGPT"])
def test_a_block_size_that_a_format_has_no_room_for_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="leave --block-tokens out"):
        load_sessions(written(tmp_path, READ[name][0]), block_tokens=16)
    with pytest.raises(ConfigError, match="leave --block-tokens out"):
        load_sessions("generated:chat", limit=1, block_tokens=16)


@pytest.mark.parametrize(
    "row", [mooncake_record, lambda *a, **b: of_session("s", *a, timestamp=0, **b)]
)
def test_a_row_whose_blocks_are_of_another_size_than_those_before_is_a_bad_line(
    tmp_path: Path, row: Callable[..., dict[str, Any]]
) -> None:
    rows = [row(60, 0, block_size=64), row(9, 0), row(30, 0, 1, block_size=16)]
    loaded = load_sessions(written(tmp_path, lines(*rows)))
    assert (loaded.calls, [bad.line for bad in loaded.bad_lines]) == (1, [2, 3])
    assert "blocks of 512 tokens, and of 64 in the rows before" in loaded.description


def test_what_is_no_object_in_a_list_of_records_is_a_bad_line(tmp_path: Path) -> None:
    loaded = load_sessions(written(tmp_path, document([None, {"conversations": TALK}, 3])))
    assert (loaded.calls, [bad.line for bad in loaded.bad_lines]) == (2, [1, 3])
    assert "a record must be an object, not null" in loaded.description


def test_azure_rows_arrive_at_their_times_and_share_nothing(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:17:03.9799600,4808,10\r", "2023-11-16 18:17:04.0319600,3180,8\r")
    first, second = load_sessions(written(tmp_path, lines(AZURE, *rows))).sessions
    assert (first.start_s, round(second.start_s, 6)) == (0.0, 0.052)
    assert lengths(first) + lengths(second) == [4808, 3180]
    assert calls(second)[0].output_tokens == 8
    assert describe([first, second], ByteEncoder((1 << 31) - 1)).cached_tokens_total == 0


def test_what_burst_gpt_took_is_the_latency_and_its_sessions_share_nothing(tmp_path: Path) -> None:
    rows = (f"{at},0,3.5,ChatGPT,40,18,58,Conversation log" for at in (5, 50))
    loaded = load_sessions(written(tmp_path, lines(BURST_SESSIONS, *rows)))
    assert [(s.start_s, s.model) for s in loaded.sessions] == [(5.0, "ChatGPT"), (50.0, "ChatGPT")]
    assert [calls(s)[0].latency_s for s in loaded.sessions] == [3.5, 3.5]
    assert "2 session ids" in loaded.description


def test_a_conversations_answers_are_the_outputs_of_its_calls(tmp_path: Path) -> None:
    before = [from_("gpt", "hello"), from_("system", "be brief")]
    session = only(tmp_path, {"id": "c", "conversations": [*before, *TALK]})
    assert [call.output and call.output.text for call in calls(session)] == ["an answer", "the end"]
    assert prompts(session)[1] == [
        ("assistant", "hello"),
        ("system", "be brief"),
        ("user", "a question"),
        ("assistant", "an answer"),
        ("user", "another"),
    ]


def test_a_list_of_messages_that_ends_with_the_clients_is_one_request(tmp_path: Path) -> None:
    loaded = load_sessions(written(tmp_path, lines({"messages": WHOLE})))
    assert (loaded.calls, calls(loaded.sessions[0])[0].output_tokens) == (1, 220)
    assert "1 lengths of answers, which the file lacks: 220 tokens are asked" in loaded.description


def test_an_answer_that_a_later_prompt_holds_is_the_output_of_the_call_before(
    tmp_path: Path,
) -> None:
    rows = [{"session_id": "s", "messages": m, "output_length": 7} for m in (WHOLE[:1], WHOLE)]
    session = only(tmp_path, *rows)
    first, second = calls(session)
    assert (first.output and first.output.text, first.output_tokens) == ("two", 7)
    assert (second.output, session.edits) == (None, 0)
    assert prompts(session)[1] == [("user", "one"), ("assistant", "two"), ("user", "three")]


def test_a_bound_is_the_length_only_where_the_answer_is_not_known(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "messages": m, "max_tokens": 4096} for m in (WHOLE[:1], WHOLE)]
    first, second = calls(only(tmp_path, *rows))
    assert (first.output and first.output.text, first.output_tokens) == ("two", None)
    assert (second.output, second.output_tokens) == (None, 4096)


def test_a_prompt_that_leaves_messages_away_is_an_edit(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "messages": m} for m in (WHOLE, [WHOLE[0], WHOLE[2]])]
    session = only(tmp_path, *rows)
    assert (session.edits, prompts(session)[1]) == (1, [("user", "one"), ("user", "three")])


def test_the_time_between_two_requests_is_the_wait_where_no_server_time_is_known(
    tmp_path: Path,
) -> None:
    rows = [{"session_id": "s", "messages": WHOLE[:1], "timestamp": 2000}]
    rows += [{"session_id": "s", "messages": WHOLE, "timestamp": 2500.5}]
    session = only(tmp_path, *rows)
    assert session.start_s == 2.0
    assert [call.arrival_s for call in calls(session)] == pytest.approx([0.0, 0.5005])
    assert [call.gap_s for call in calls(session)] == [0.0, 0.5005]


def test_a_batchs_completions_and_tools_are_part_of_the_prompts(tmp_path: Path) -> None:
    body = {"model": "m", "messages": WHOLE, "max_completion_tokens": 9, "tools": [{"name": "ls"}]}
    rows = [
        {"custom_id": "a", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "go", "max_tokens": 3}},
    ]
    first, second = load_sessions(written(tmp_path, lines(*rows))).sessions
    assert prompts(first)[0][0] == ("tools", '[{"name": "ls"}]')
    assert (prompts(second), calls(second)[0].output_tokens) == ([[("user", "go")]], 3)


def test_turns_of_aiperf_wait_their_delays_and_take_the_servers_answers(tmp_path: Path) -> None:
    turns = [{"texts": ["a", "b"], "output_length": 4}, {"text": "c", "delay": 1500, "image": "x"}]
    loaded = load_sessions(written(tmp_path, lines({"session_id": "s", "turns": turns})))
    first, second = calls(loaded.sessions[0])
    assert (first.output_tokens, second.output_tokens, second.gap_s) == (4, 220, 1.5)
    assert prompts(loaded.sessions[0])[1] == [
        ("user", "a"),
        ("user", "b"),
        ("assistant", ""),
        ("user", "c"),
    ]
    assert loaded.left_out['"image" fields of turns'] == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda message: {"conversations": [[{"messages": [message]}]]},
        lambda message: {"messages": [message, said("user", "go on")]},
    ],
    ids=["agentic-trace", "messages"],
)
def test_tool_calls_are_text_of_the_prompt_and_images_are_counted(
    tmp_path: Path, wrap: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]
    function = {"name": "bash", "arguments": '{"cmd": "ls"}'}
    call = {"id": "c1", "type": "function", "function": function}
    message = said("assistant", parts, tool_calls=[call], reasoning_content="hm")
    loaded = load_sessions(written(tmp_path, lines(wrap(message))))
    assert prompts(loaded.sessions[0])[0][0] == ("assistant", 'look\nbash {"cmd": "ls"}')
    assert loaded.left_out['"image_url" parts of messages'] == 1
    assert loaded.left_out['"reasoning_content" fields of messages'] == 1


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceError, match=r"is no file.*save it to a file"):
        load_sessions(str(tmp_path / "pipe"))


def test_sessions_of_several_rows_are_skipped_and_limited_as_sessions(tmp_path: Path) -> None:
    rows = [of_session(name, 9, 0, timestamp=1.0) for name in "abcabc"]
    found = load_sessions(written(tmp_path, lines(*rows)), skip=1, limit=1).sessions
    assert [(s.session_id, s.calls) for s in found] == [("mine:b", 2)]


GONE = object()
"""In place of a value: the field is taken away."""
HOSTILE = [float("inf"), float("nan"), -1, 10**400, "", [], {}, True, None, [[]], 1 << 60, "\ud800"]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a record."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [path, *(one for key, item in inner for one in places(item, (*path, key)))]


def with_value(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = dict(record) if isinstance(record, dict) else list(record)
    if value is GONE and len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = with_value(record[path[0]], path[1:], value)
    return copied


@pytest.mark.parametrize("name", [name for name in READ if READ[name][0].startswith("{")])
def test_a_hostile_value_anywhere_is_an_error_a_bad_line_or_harmless(
    tmp_path: Path, name: str
) -> None:
    try:
        records = [json.loads(line) for line in READ[name][0].splitlines()]
    except ValueError:
        records = [json.loads(READ[name][0])]
    if "metadata" in records[0]:
        records[0]["metadata"] = {}
    for path in places(records[-1]):
        for value in HOSTILE if not path else [*HOSTILE, GONE]:
            spoiled = [*records[:-1], with_value(records[-1], path, value)]
            try:
                loaded = load_sessions(written(tmp_path, lines(*map(json.dumps, spoiled))))
            except TraceError as error:
                assert len(str(error)) < 1500
                continue
            assert all(len(bad.reason) < 300 for bad in loaded.bad_lines)
            rows = describe(loaded.sessions, ByteEncoder(500, 1000)).rows()
            assert all(abs(row["max"]) < 1e12 for row in rows)
