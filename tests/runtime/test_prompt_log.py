"""A log of prompts: which requests are compared, and what a difference between them cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sgl_kvtier.runtime.tools.prompt_log import Logged, Pair, causes, pairs, read, summary

PAGE = 16


def lines(*requests: Any) -> list[bytes]:
    return [json.dumps(one).encode() for one in requests]


def logged(*requests: Any) -> list[Logged]:
    return list(read(lines(*requests), 1 << 20))


def compared(*requests: Any) -> list[Pair]:
    return list(pairs(logged(*requests), PAGE))


def ids(*other: int, length: int, session: str | None = None) -> dict[str, Any]:
    """A request whose tokens are their place, but for those at the places given."""
    tokens = [999 if place in other else place for place in range(length)]
    return {"input_ids": tokens, "session_id": session}


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({"session_id": "a"}, "a"),
        ({"session_params": {"id": "a"}}, "a"),
        ({"routing_key": "a"}, "a"),
        ({"session_id": "a", "routing_key": "b"}, "a"),
        ({"session_id": None, "session_params": None}, None),
        ({"session_id": ""}, None),
        ({"session_id": 7}, "7"),
    ],
)
def test_the_session_is_found_where_a_server_finds_it(fields, session):
    assert [one.session for one in logged({"prompt": "Go on.", **fields})] == [session]


def test_requests_without_a_session_follow_each_other():
    found = compared(
        {"prompt": "a"}, {"prompt": "b", "session_id": "s"}, {"prompt": "c"}, {"prompt": "d"}
    )
    assert [(one.earlier_line, one.line) for one in found] == [(1, 3), (3, 4)]


def test_empty_lines_count_and_are_no_requests():
    log = [b'{"prompt": "a"}\n', b"\n", b'{"prompt": "a"}']
    assert [one.line for one in read(log, 100)] == [1, 3]


def test_a_log_of_sglangs_is_read_once_for_each_request():
    def event(name, prompt):
        said = {"timestamp": "2026-11-28T10:00:00", "event": name, "rid": "1", "obj": prompt}
        said["headers"] = {"x-smg-routing-key": "agent-7"}
        return b"[2026-11-28 10:00:00] " + json.dumps(said).encode()

    log = [
        event("request.received.openai", {"messages": [{"role": "user", "content": "Go on."}]}),
        event("request.received", {"text": None, "input_ids": [1, 2, 3], "extra_key": None}),
        event("request.finished", {"text": "Go on.", "input_ids": [1, 2, 3]}),
    ]
    (one,) = read(log, 1 << 20)
    assert (one.line, one.session, one.prompt.tokens) == (2, "agent-7", (1, 2, 3))


def test_what_sglangs_own_logger_writes_is_read(tmp_path):
    pytest.importorskip("sglang")
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.utils.request_logger import RequestLogger

    logger = RequestLogger(True, 3, "json", [str(tmp_path)])
    asked = [{"input_ids": [1, 2, 3], "session_id": "a"}, {"text": "Gehe über los."}]
    for fields in asked:
        logger.log_received_request(GenerateReqInput(**fields))
    (file,) = tmp_path.iterdir()
    first, second = read(file.read_bytes().splitlines(), 1 << 20)
    assert (first.session, first.prompt.tokens) == ("a", (1, 2, 3))
    assert (second.session, second.prompt.parts[0].text) == (None, "Gehe über los.")


def test_brackets_in_a_prompt_are_no_time_stamp():
    (one,) = logged({"prompt": "[12:30] {x}"})
    assert one.prompt.parts[0].text == "[12:30] {x}"


def test_a_line_that_is_too_long_is_named():
    with pytest.raises(ValueError, match="line 2: it has more than 20 bytes"):
        list(read([b"{}"[:0], b'{"prompt": "aaaaaaaaaaaaaa"}'], 20))


@pytest.mark.parametrize(
    ("earlier", "later", "hit", "lost"),
    [
        (ids(length=40), ids(length=80), 32, 0),
        (ids(length=40), ids(20, length=80), 16, 16),
        (ids(length=80), ids(20, length=40), 16, 16),
        (ids(length=80), ids(length=64), 48, 0),
        (ids(length=40), {**ids(length=80), "cache_salt": "s"}, 0, 32),
        (ids(length=10), ids(2, length=80), 0, 0),
    ],
)
def test_a_difference_costs_the_pages_that_the_later_prompt_could_have_had(
    earlier, later, hit, lost
):
    (one,) = compared(earlier, later)
    assert (one.hit_tokens, one.lost_tokens) == (hit, lost)
    assert one.lost_fraction == (lost / (hit + lost) if hit + lost else None)


def test_the_most_frequent_cause_is_named_and_of_equals_the_most_costly():
    found = compared(
        ids(length=80, session="a"),
        ids(70, length=80, session="a"),
        ids(length=80, session="b"),
        {**ids(length=80, session="b"), "lora_path": "l"},
    )
    assert [(one.kind, one.pairs, one.lost_tokens) for one in causes(found)] == [
        ("namespace", 1, 64), ("other", 1, 0),
    ]  # fmt: skip
    assert "2 of 2 later prompts do not go on" in summary(found)
    assert "namespace" in summary(found) and "64 tokens, 100 % of their hits" in summary(found)
    once_more = [*found, found[0]]
    assert "cause is other" in summary(once_more) and "2 of 3" in summary(once_more)


def test_a_log_in_which_nothing_follows_says_so():
    found = compared({"prompt": "a", "session_id": "a"}, {"prompt": "b", "session_id": "b"})
    assert found == [] and "nothing to compare" in summary(found)
