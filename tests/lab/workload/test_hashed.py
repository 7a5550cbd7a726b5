"""The formats that hold hashes or lengths, rule by rule, on hand-written lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_records import claude_record, request

from sgl_kvtier.lab.workload.catalogue import Origin
from sgl_kvtier.lab.workload.hashed import ClaudeCodeReader
from sgl_kvtier.lab.workload.lines import BadRecord
from sgl_kvtier.lab.workload.reader import Setting
from sgl_kvtier.lab.workload.session import Call, Context, Edit, Prompt, Session

ORIGIN = Origin("owner/repo", "MIT")


def claude(record: dict[str, Any]) -> list[Session]:
    return ClaudeCodeReader(Setting(Path("cc.jsonl"), ORIGIN)).sessions(1, record)


def ids_of(prompt: Prompt) -> list[int]:
    return [int(i) for message in prompt if message.blocks for i in message.blocks.ids()]


def prompts(session: Session) -> list[list[int]]:
    return [ids_of(prompt) for _, prompt in Context(session).calls()]


def calls(session: Session) -> list[Call]:
    return [event for event in session.events if isinstance(event, Call)]


def test_keeping_less_than_there_was_is_an_edit_that_may_cut_a_run() -> None:
    (session,) = claude(
        claude_record(request(0, 1, 4), request(4, 5, 4), request(6, 50, 1), request(0, 70, 1))
    )
    assert prompts(session) == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 50],
        [70],
    ]
    assert [e.why for e in session.events if isinstance(e, Edit)] == [
        "prefix dropped",
        "prefix dropped",
    ]


def test_losing_the_last_block_alone_is_told_from_dropping_a_prefix() -> None:
    (session,) = claude(claude_record(request(0, 1, 3), request(2, 9, 2)))
    assert [e.why for e in session.events if isinstance(e, Edit)] == ["last block rewritten"]


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_decoding_gives_the_ids_that_were_encoded(steps: list[tuple[float, list[int]]]) -> None:
    fresh = iter(range(0, 10_000, 10))
    expected: list[list[int]] = []
    requests = []
    for share, counts in steps:
        before = expected[-1] if expected else []
        keep = round(share * len(before))
        runs = [(next(fresh), count) for count in counts]
        expected.append(before[:keep] + [start + i for start, count in runs for i in range(count)])
        requests.append(request(keep, *(n for run in runs for n in run)))
    assert prompts(claude(claude_record(*requests))[0]) == expected


def test_a_sub_agent_is_a_session_of_its_own_behind_its_owner_with_shared_ids() -> None:
    agent = {"t": 30.0, "agent_id": "agent_001", "requests": [request(0, 1, 2, t=1.0)]}
    owner, helper = claude(claude_record(request(0, 1, 3), agent, request(3, 4, 1)))
    assert prompts(owner) == [[1, 2, 3], [1, 2, 3, 4]]
    assert (helper.session_id, helper.parent) == (
        "claude-code:trace_1/agent_001",
        "claude-code:trace_1",
    )
    assert (helper.start_s, prompts(helper)) == (30.0, [[1, 2]])
    blocks = [next(p for _, p in Context(s).calls())[0].blocks for s in (owner, helper)]
    assert len({b.scope for b in blocks if b}) == 1


def test_a_sub_agent_whose_requests_were_not_recorded_is_left_out_and_counted() -> None:
    reader = ClaudeCodeReader(Setting(Path("cc.jsonl"), ORIGIN))
    (owner,) = reader.sessions(1, claude_record(request(0, 1, 3), {"t": 3.0, "agent_id": "a"}))
    assert prompts(owner) == [[1, 2, 3]]
    assert reader.left_out == {"sub-agents without recorded requests": 1}


def test_think_time_is_the_gap_and_the_server_time_the_latency() -> None:
    session = claude(
        claude_record(request(0, 1, 1, t=0.0), request(1, t=9.0, api_time=4.0, think_time=7.0))
    )[0]
    assert [(c.gap_s, c.latency_s, c.arrival_s, c.output_tokens) for c in calls(session)] == [
        (1.0, 2.0, 0.0, 10),
        (7.0, 4.0, 9.0, 10),
    ]


def test_a_missing_think_time_is_what_the_clock_leaves_of_the_interval() -> None:
    untimed = {"api_time": None, "think_time": None}
    session = claude(
        claude_record(request(0, 1, 1), request(1, t=9.0, **untimed), request(1, t=8.0, **untimed))
    )[0]
    assert [(c.gap_s, c.latency_s) for c in calls(session)] == [
        (1.0, 2.0),
        (7.0, None),
        (0.0, None),
    ]


CLAUDE_BAD = [
    (claude_record(request(1, 1, 1)), "request 0: 'keep' = 1, but the request before had 0 blocks"),
    (claude_record(request(0, 1, 2), request(0)), "request 1: a request without a whole block"),
    (claude_record(request(0, 1)), "request 0: 'new' must be pairs"),
    (claude_record(request(0, 1, 0)), "request 0: 'new' must be pairs"),
    (claude_record(request(0, 1, -1)), "request 0: an entry of 'new' must be a whole number"),
    (claude_record(request(0, 1, 1, out=None)), "request 0: 'out' must be a whole number"),
    (claude_record(), "makes no request"),
    (claude_record("x"), "request 0: must be an object"),  # type: ignore[arg-type]
    (claude_record(request(0, 1, 1), hash_id_scope="global"), "'hash_id_scope' must be 'local'"),
    (claude_record(request(0, 1, 1), block_size=0), "'block_size' must be at least 1"),
]


@pytest.mark.parametrize(("record", "reason"), CLAUDE_BAD)
def test_a_bad_claude_code_line_says_what_is_wrong(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        claude(record)
