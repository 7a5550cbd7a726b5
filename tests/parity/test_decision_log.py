"""The log's form: every message survives it, and damage is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import TraceError
from sgl_kvtier.policy import messages as m
from sgl_kvtier.policy.decision_log import (
    NUMBERED,
    Header,
    Query,
    Reader,
    Record,
    Writer,
    decode,
    decode_header,
    encode,
    encode_header,
)
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, PageKey, Span, Tier

_WORDS = st.text(max_size=8)
_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_SPANS = st.tuples(st.integers(0, 99), st.integers(0, 99)).map(
    lambda pair: Span(min(pair), max(pair))
)
_KEYS = st.lists(st.binary(min_size=32, max_size=32).map(PageKey), max_size=3).map(tuple)
_TIERS = st.sampled_from(Tier)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "str": _WORDS,
    "str | None": st.none() | _WORDS,
    "int": st.integers(0, 1 << 60),
    "int | None": st.none() | st.integers(0, 99),
    "float": _NUMBERS,
    "float | None": st.none() | _NUMBERS,
    "bool": st.booleans(),
    "Span": _SPANS,
    "Tier": _TIERS,
    "Link": st.sampled_from(Link),
    "Mode": st.sampled_from(m.Mode),
    "tuple[int, ...]": st.lists(st.integers(0, 99), max_size=3).map(tuple),
    "tuple[str, ...]": st.lists(_WORDS, max_size=3).map(tuple),
    "tuple[PageKey, ...]": _KEYS,
    "tuple[tuple[Span, Tier], ...]": st.lists(st.tuples(_SPANS, _TIERS), max_size=3).map(tuple),
    "PolicyConfig": st.builds(PolicyConfig, restore=st.sampled_from(("auto", "load"))),
    "PageKey": st.binary(min_size=32, max_size=32).map(PageKey),
    "dict[Tier, int]": st.dictionaries(_TIERS, st.integers(0, 99)),
}


def _messages(kind: type) -> st.SearchStrategy[Any]:
    fields = {}
    for field in dataclasses.fields(kind):
        annotation = str(field.type)
        if annotation not in _FIELDS:
            inner = _messages(getattr(m, annotation.removeprefix("tuple[").removesuffix(", ...]")))
            several = annotation.startswith("tuple[")
            fields[field.name] = st.lists(inner, max_size=2).map(tuple) if several else inner
        else:
            fields[field.name] = _FIELDS[annotation]
    return st.builds(kind, **fields)


_FACTS = (
    m.RequestArrived,
    m.RequestFinished,
    m.RestoreOffered,
    m.TransferDone,
    m.PagesLost,
    m.ChunkStarted,
    m.ChunkDone,
    m.StepDone,
    m.PagesPlaced,
    m.PagesDropped,
    m.PolicyChanged,
    m.LookaheadEnded,
)


def test_every_fact_of_the_protocol_is_tried_here() -> None:
    assert set(_FACTS) == set(m.Fact.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [*_FACTS, m.StepView, m.StepPlan])
def test_every_message_survives_the_log(kind: type) -> None:
    @given(_messages(kind))
    def survives(message: Any) -> None:
        line = encode(message)
        assert "\n" not in line
        assert decode(line) == message
        assert encode(decode(line)) == line

    survives()


_QUESTIONS = (
    m.LeftToEngine,
    m.ReadsDue,
    m.RunOrder,
    m.ChunkBeside,
    m.HeldBack,
    m.Hinted,
    m.SessionsWith,
    m.RulesTuned,
)
_ANSWERS = (
    st.none()
    | _WORDS
    | st.integers()
    | st.lists(_WORDS, max_size=3).map(tuple)
    | _messages(m.HintAnswer)
)


def test_every_question_of_the_protocol_is_tried_here() -> None:
    assert set(_QUESTIONS) == set(m.Question.__subclasses__())


@pytest.mark.parametrize("kind", _QUESTIONS)
def test_every_question_survives_the_log_with_its_answer(kind: type) -> None:
    @given(_messages(kind), _ANSWERS)
    def survives(question: Any, answer: Any) -> None:
        record = Query(question, answer)
        assert decode(encode(record)) == record

    survives()


def test_a_header_survives_the_log() -> None:
    header = Header(
        PolicyConfig(rules="sgl_kvtier.lab.rules:Cake"),
        EngineShape(16, 4096, 512, 32, accelerator=True),
        {"links": {"storage-device": 1e9}},
    )
    assert decode_header(encode_header(header)) == header


_FEW = [PageKey(bytes([k]) * 32) for k in range(12)]
_FEW_KEYS = st.lists(st.sampled_from(_FEW), max_size=8).map(tuple)
_NAMING: st.SearchStrategy[Record] = st.one_of(
    st.builds(m.PagesPlaced, _FEW_KEYS, _TIERS, st.just(1.0)),
    st.builds(lambda keys: m.StepPlan(evictions=(m.Evict(keys, Tier.HOST),)), _FEW_KEYS),
    st.builds(lambda key, said: Query(m.SessionsWith(key), (said,)), st.sampled_from(_FEW), _WORDS),
)


@given(st.lists(_NAMING, max_size=30), st.integers(1, 12))
def test_a_log_with_numbers_for_keys_reads_as_what_was_written(
    records: list[Record], most: int
) -> None:
    writer, reader = Writer(most), Reader(most)
    lines = [writer.encode(record) for record in records]
    assert [reader.decode(line) for line in lines] == records


def _placed(*keys: PageKey) -> m.PagesPlaced:
    return m.PagesPlaced(keys, Tier.HOST, 1.0)


def test_a_key_is_written_out_once_and_runs_of_keys_by_their_ends() -> None:
    writer = Writer()
    texts = [key.hex() for key in _FEW[:4]]
    lines = [writer.encode(_placed(*keys)) for keys in (_FEW[:4], _FEW[2::-1], _FEW[1:4:2])]
    assert [json.loads(line)["keys"] for line in lines] == [texts, [[2, 0]], [1, 3]]


def test_a_key_that_was_forgotten_is_written_out_again() -> None:
    writer = Writer(2)
    lines = [writer.encode(_placed(_FEW[k])) for k in (0, 1, 2, 0, 2)]
    written = [json.loads(line)["keys"][0] for line in lines]
    assert written == [*(_FEW[k].hex() for k in (0, 1, 2, 0)), 0]


@pytest.mark.parametrize("value", ["2", "-1", "[0,2]", "[2,0]", "true", "[0]", "1e9", "null"])
def test_a_number_that_no_key_has_is_damage(value: str) -> None:
    reader = Reader()
    reader.decode(encode(_placed(_FEW[0], _FEW[1])))
    with pytest.raises(TraceError, match="PagesPlaced of the decision log is damaged"):
        reader.decode(f'{{"type":"PagesPlaced","keys":[{value}],"tier":"host","now":1.0}}')


def test_a_log_with_keys_in_full_is_read_as_before() -> None:
    reader, records = Reader(), [_placed(*_FEW[:3]), _placed(*_FEW[1:4])]
    assert [reader.decode(encode(record)) for record in records] == records
    header = Header(PolicyConfig(), EngineShape(16, 4096, 512, 32))
    assert decode_header(encode_header(header)) == header
    assert decode_header(encode_header(header, NUMBERED)) == header


def _without(line: str, name: str) -> str:
    data = json.loads(line)
    del data[name]
    return json.dumps(data)


_HEAD = '{"log":"kvtier.decisions","version":3,"config":%s,"engine":%s,"profile":%s}'


@pytest.mark.parametrize(
    ("read", "line", "complaint"),
    [
        (decode, "{", "not JSON"),
        (decode, "[]", "not an object"),
        (decode, '{"type":"Rumour"}', "known are RequestArrived"),
        (decode, '{"type":"StepDone","seconds":1.0}', "StepDone of the decision log is damaged"),
        (
            decode,
            '{"type":"StepView","now":1.0,"weather":"fine"}',
            "fields of another version: weather",
        ),
        (
            decode,
            '{"type":"PagesPlaced","keys":["zz"],"tier":"device","now":0.0}',
            "PagesPlaced of the decision log is damaged",
        ),
        (decode, "[" * 200_000, "not JSON: JSON nested too deeply"),
        (decode, '{"type":"' + "x" * 1_000_000 + '"}', "known are RequestArrived"),
        (decode, '{"type":"StepView","now":NaN}', "NaN: must be of type float"),
        (decode, '{"type":"StepView","now":1.0,"prefill_tokens":1.5}', "must be of type int"),
        (
            decode,
            '{"type":"PagesLost","rid":"a","span":[0,true],"reason":"x","now":1.0}',
            "must be of type int",
        ),
        (
            decode,
            '{"type":"PolicyChanged","now":1.0,"config":{"load_deadline_s":NaN}}',
            r"policy\.load_deadline_s = NaN",
        ),
        (decode, '{"type":"Query","question":{"type":"Rumour"}}', "no question is of the type"),
        (
            decode,
            '{"type":"Query","question":{"type":"ReadsDue","queue":[],"room":1},"answer":[7]}',
            "must be of type str",
        ),
        (decode_header, _HEAD % ('{"map_pages": 0}', "{}", "null"), r"policy\.map_pages = 0"),
        (
            decode_header,
            _HEAD % ("{}", '{"page_tokens": 0, "page_bytes": 1, "chunk_tokens": 1}', "null"),
            "page_tokens = 0",
        ),
        (decode_header, _HEAD % ("5", "{}", "null"), "first line is damaged"),
        (
            decode_header,
            _HEAD
            % (
                "{}",
                '{"page_tokens": 1, "page_bytes": 1, "chunk_tokens": 1}',
                '{"links": {"storage-device": NaN}}',
            ),
            "links.storage-device = NaN",
        ),
        (decode_header, '{"log":"something"}', "not a decision log"),
        (decode_header, '{"log":"kvtier.decisions","version":99}', "version 99"),
        (decode_header, '{"log":"kvtier.decisions","version":3}', "first line is damaged"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[-20:]),
)
def test_damage_is_named(read: Callable[[str], object], line: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint) as found:
        read(line)
    assert len(str(found.value)) < 600
