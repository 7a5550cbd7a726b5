"""Clients' hints: what may be sent, how it reaches the planner, and what the planner answers."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.sim.replay import replay
from sgl_kvtier.policy.decision_log import Header, Query, decode, encode, encode_header
from sgl_kvtier.policy.messages import (
    Hint,
    Hinted,
    PagesPlaced,
    RequestArrived,
    RequestFinished,
    StepView,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime.hints.message import (
    MOST_BYTES,
    MOST_TEXT_BYTES,
    MOST_TOKENS,
    HintError,
    Sent,
    pack,
    read,
    unpack,
)
from sgl_kvtier.runtime.hints.requests import MOST, known, together
from sgl_kvtier.runtime.hints.route import ANSWER, _address, ask, best
from sgl_kvtier.runtime.hints.scheduler import MOST_SESSIONS, take
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.records.cost_profile import Learning, Profile
from sgl_kvtier.runtime.records.decision_file import Recorded
from sgl_kvtier.runtime.scheduler.notes import RestoreNotes
from sgl_kvtier.runtime.step.page_names import from_hex
from sgl_kvtier.runtime.step.session_name import MOST_CHARACTERS, known_as, session_of
from sgl_kvtier.runtime.step.tracked import Requests
from sgl_kvtier.types import PageKey, Tier

ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
KEYS = tuple(PageKey(bytes([n]) * 32) for n in range(1, 9))


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


# --- what a client may send -----------------------------------------------------------------------------------------


def test_a_whole_hint_is_read():
    asked = read(
        body(session="a", expected_delay_s=2, priority=-1, ttl_s=9.5, tool="pytest", extra_key=None)
    )
    assert asked.session == "a"
    assert asked.hint == Hint(2.0, -1, 9.5, "pytest")
    assert (asked.tokens, asked.text, asked.extra_key) == (None, None, None)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "an object, not [1]"),
        (b"7" * 5000, "not JSON"),
        (b'{"\\ud800": 1, "session": "a", "priority": 1}', 'unknown: "\\ud800". A hint may have'),
        (body(**{"x" * 100_000: 1}), "…. A hint may have"),
        (body(**{str(n): n for n in range(1000)}), '"4" and more. A hint'),
        (body(session="\ud800", priority=1), 'session = "\\ud800": must be a text'),
        (body(text="a\udfffb", priority=1), 'text = "a\\udfffb": must be a text'),
        (
            body(tokens=[1], cache_salt="\ud800", priority=1),
            'cache_salt = "\\ud800": must be a text',
        ),
        (body(tokens=[1], extra_key="\udfff", priority=1), 'extra_key = "\\udfff": must be a text'),
        (body(session="a", tool="\ud800"), 'tool = "\\ud800": must be a text'),
        (body(text="x" * MOST_TEXT_BYTES, priority=1), "send the text's beginning"),
        (
            b'{"priority":1,"tokens":[' + b"1," * (2 * MOST_TOKENS) + b"1]}",
            f"{MOST_TOKENS} tokens are read",
        ),
        (
            b'{"priority":1,"tokens":[' + b"1," * MOST_TOKENS + b"1]}",
            f"a list of at most {MOST_TOKENS} token ids",
        ),
        (body(tokens=10**400, priority=1), "tokens = a whole number of 1329 bits"),
        (b'{"session": "a", "ttl_s": 1e999}', "ttl_s = Infinity"),
        (body(session="a", priority=10**400), "priority = a whole number of 1329 bits"),
        (b" " * (MOST_BYTES + 1), "name the session instead"),
        (body(session="a", delay=3), 'unknown: "delay". A hint may have session'),
        (body(expected_delay_s=3), "exactly one of session, tokens, text"),
        (body(session="a", text="b", ttl_s=1), "it has 2"),
        (body(session="a"), "says nothing"),
        (body(session="", ttl_s=1), 'session = "": must be a text'),
        (body(session=7, ttl_s=1), "session = 7: must be a text"),
        (
            body(session="a", expected_delay_s=-1),
            "expected_delay_s = -1: must be a number of seconds of at least 0",
        ),
        (b'{"session": "a", "ttl_s": NaN}', "ttl_s = NaN"),
        (body(session="a", ttl_s=True), "ttl_s = true"),
        (body(session="a", priority=1.5), "priority = 1.5: must be a whole number"),
        (body(tokens=[], ttl_s=1), "token ids, the beginning of"),
        (body(tokens=[1, "2"], ttl_s=1), "token ids, the beginning of"),
        (body(tokens=[True], ttl_s=1), "token ids, the beginning of"),
        (body(tokens=[*range(1000), -1], ttl_s=1), "…: must be a list"),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_what_is_wrong_is_said_with_what_to_send(sent, says):
    with pytest.raises(HintError) as found:
        read(sent)
    assert says in str(found.value)
    assert len(str(found.value).encode()) < 400
    assert isinstance(found.value, KVTierError)


def test_a_prefix_of_a_million_tokens_is_read():
    sent = json.dumps(
        {"tokens": [999_999] * MOST_TOKENS, "extra_key": "tenant", "priority": 1}
    ).encode()
    assert len(read(sent).tokens or ()) == MOST_TOKENS


def test_of_a_tools_name_the_beginning_counts():
    assert read(body(session="a", tool="x" * 100_000)).hint.tool == "x" * 64


class Body(bytes):
    """A request's body that knows which threads looked at it."""

    threads: set[int]

    def count(self, *what: Any) -> int:
        self.threads.add(threading.get_ident())
        return super().count(*what)

    def decode(self, *how: Any) -> str:
        self.threads.add(threading.get_ident())
        return super().decode(*how)


def test_a_body_is_read_outside_the_http_servers_event_loop():
    sent = Body(body(session="a", priority=1))
    sent.threads = set()

    async def answered(question: Any) -> list[Any]:
        return [SimpleNamespace(internal_state={ANSWER: {"result": "accepted"}})]

    manager = SimpleNamespace(
        auto_create_handle_loop=lambda: None, get_internal_state_communicator=answered
    )
    assert asyncio.run(ask(manager, sent)) == {"result": "accepted"}
    assert sent.threads
    assert threading.get_ident() not in sent.threads


@pytest.mark.parametrize(("draft", "pairs"), [(None, False), ("EAGLE", True), ("NEXTN", True)])
def test_a_prefix_is_named_as_the_server_names_its_pages(draft, pairs):
    config = {"page_size": 4, "speculative_algorithm": draft}
    manager = SimpleNamespace(config_value=config.get, tokenizer=None)
    sent = _address(manager, read(body(tokens=list(range(9)), priority=1, extra_key="x")))
    key = RadixKey(array("q", range(8 + pairs)), "x", is_bigram=pairs)
    assert sent.page == from_hex(get_storage_hash_str(key, page_size=4))[-1]
    few = list(range(3 + pairs))
    with pytest.raises(HintError, match=f"less than one page, which {4 + pairs} tokens name"):
        _address(manager, read(body(tokens=few, priority=1)))


def test_a_priority_of_nought_is_a_hint():
    assert read(body(session="a", priority=0)).hint == Hint(priority=0) != Hint()


def test_a_number_beyond_all_floats_is_as_good_as_any_that_is_too_large():
    assert (
        read(b'{"session": "a", "expected_delay_s": 1' + b"0" * 400 + b"}").hint.expected_delay_s
        == 1e12
    )


@pytest.mark.parametrize(
    "sent",
    [
        Sent(Hint(0.1 + 0.2, 2, None, "ü"), 3.3, session="s"),
        Sent(Hint(ttl_s=0.0), 0.0, page=KEYS[0]),
    ],
)
def test_a_hint_arrives_as_it_was_sent(sent):
    assert unpack(pack(sent)) == sent


# --- what becomes of it -----------------------------------------------------------------------------------------------


class Lab:
    """A scheduler with a real planner and notes, and an engine that only has what is looked at."""

    def __init__(self, config: PolicyConfig | None = None) -> None:
        config = config or PolicyConfig(restore="both")
        self.lines: list[str] = [encode_header(Header(config, ENGINE))]
        self.inner: Planner = make_planner(config, ENGINE)
        recorded = Recorded(self.inner, lambda record: self.lines.append(encode(record)))
        self.planner = Learning(
            recorded, self.inner.profile, None, Profile({}, {}, {}, 0, {}), ENGINE
        )
        offers = SimpleNamespace(is_on=True, min_tokens=0)
        self.engine = SimpleNamespace(offers=offers, proof=Proof())
        self.context = SimpleNamespace(now=0.0)
        notes = RestoreNotes(config, self.engine, self.planner, SimpleNamespace(reductions=0), None)
        self.parts = SimpleNamespace(
            notes=notes, planner=self.planner, context=self.context, ahead=object()
        )
        self.scheduler = SimpleNamespace(
            tree_cache=SimpleNamespace(kvtier=self.parts),
            server_args=SimpleNamespace(nnodes=1, dp_size=1),
        )

    def turn(self, session: str | None, keys: tuple[PageKey, ...], at: float) -> None:
        """One request of a session, over after a second; its pages stay in HBM."""
        rid = f"{session}-{at}"
        self.planner.observe(RequestArrived(rid, at, len(keys) * 16, keys, session))
        self.planner.observe(PagesPlaced(keys, Tier.DEVICE, at))
        self.planner.observe(RequestFinished(rid, at + 1, keys=keys))

    def next_use(self, key: PageKey) -> float:
        page = self.inner.pages.page(key)
        assert page is not None
        return page.next_use

    def hint(self, hint: Hint, at: float, **whose: Any) -> dict[str, Any]:
        return take(self.scheduler, Sent(hint, at, **whose))


@pytest.mark.parametrize(
    ("hint", "result", "reason", "expected_in_s"),
    [
        (Hint(expected_delay_s=30.0), "accepted", "", 30.0),
        (Hint(expected_delay_s=5000.0), "clipped", "expected_delay_s 5000 cut to 60", 60.0),
        (Hint(ttl_s=0.0), "accepted", "", None),
    ],
    ids=["within the limit", "beyond it", "not expected any more"],
)
def test_a_hint_for_a_known_session_says_when_it_is_expected(hint, result, reason, expected_in_s):
    lab = Lab(PolicyConfig(restore="both", hint_limit_s=60.0))
    lab.turn("a", KEYS[:4], 0.0)
    answer = lab.hint(hint, 3.0, session="a")
    assert answer == {
        "result": result,
        "reason": reason,
        "sessions": 1,
        "expected_in_s": None if expected_in_s is None else pytest.approx(expected_in_s),
    }
    assert lab.next_use(KEYS[0]) == pytest.approx(3.0 + (expected_in_s or math.inf))


def test_an_unknown_session_is_refused_and_says_why():
    answer = Lab().hint(Hint(ttl_s=1.0), 0.0, session="nobody")
    assert answer["result"] == "refused"
    assert "send the hint after its first request" in answer["reason"]
    assert answer["expected_in_s"] is None


def test_a_prefix_means_every_session_that_begins_so():
    lab = Lab()
    lab.turn("a", KEYS[:4], 0.0)
    lab.turn("b", (*KEYS[:2], *KEYS[5:7]), 0.0)
    lab.turn(None, KEYS[:2], 0.0)
    both = lab.hint(Hint(expected_delay_s=5.0), 2.0, page=KEYS[1])
    assert (both["result"], both["sessions"]) == ("accepted", 2)
    one = lab.hint(Hint(expected_delay_s=7.0), 2.0, page=KEYS[6])
    assert (one["result"], one["sessions"]) == ("accepted", 1)
    assert one["expected_in_s"] == pytest.approx(7.0)
    assert lab.hint(Hint(expected_delay_s=7.0), 2.0, page=KEYS[7])["result"] == "refused"


def test_a_prefix_of_too_many_sessions_is_refused():
    lab = Lab()
    for number in range(MOST_SESSIONS + 1):
        lab.turn(f"s{number}", KEYS[:2], float(number))
    answer = lab.hint(Hint(expected_delay_s=5.0), 50.0, page=KEYS[0])
    assert answer["result"] == "refused"
    assert "send more of the prompt" in answer["reason"]


def test_time_never_goes_back_behind_the_last_step():
    lab = Lab()
    lab.turn("a", KEYS[:4], 0.0)
    lab.context.now = 100.0
    answer = lab.hint(Hint(expected_delay_s=10.0), 40.0, session="a")
    assert answer["expected_in_s"] == pytest.approx(10.0)
    assert lab.next_use(KEYS[0]) == pytest.approx(110.0)


def test_servers_that_cannot_use_hints_say_what_they_lack():
    stock = SimpleNamespace(cache_controller=None)
    backend = SimpleNamespace(begin_read=None)
    ours = SimpleNamespace(cache_controller=SimpleNamespace(storage_backend=backend))
    blind, no_sessions = Lab(), Lab(PolicyConfig(restore="both", sessions=False))
    blind.parts.ahead = None
    for scheduler, says in (
        (SimpleNamespace(tree_cache=stock), "--hicache-storage-backend kvtier"),
        (SimpleNamespace(tree_cache=ours), "policy.restore"),
        (blind.scheduler, "does not look ahead"),
        (no_sessions.scheduler, "policy.sessions is off"),
    ):
        assert says in take(scheduler, Sent(Hint(ttl_s=1.0), 0.0, session="a"))["reason"]


def test_a_log_with_hints_is_decided_again_identically():
    lab = Lab()
    lab.turn("a", KEYS[:4], 0.0)
    lab.turn("b", KEYS[4:8], 0.0)
    view = StepView(2.0, (), free_pages={Tier.DEVICE: 4, Tier.HOST: 4})
    lab.planner.step(view)
    lab.hint(Hint(expected_delay_s=0.5), 2.0, session="a")
    lab.planner.step(StepView(2.1, (), free_pages={Tier.DEVICE: 0, Tier.HOST: 8}))
    asked = [one for one in map(decode, lab.lines[1:]) if isinstance(one, Query)]
    assert [(type(one.question), one.answer.accepted) for one in asked] == [(Hinted, True)]
    done = replay(lab.lines)
    assert (done.steps, done.difference) == (2, None)


def test_of_several_replicas_the_one_that_knows_the_session_answers():
    no, yes = {"result": "refused", "reason": "x"}, {"result": "clipped", "reason": "y"}
    assert best([no, yes]) is yes
    assert best([no, no]) is no


# --- what is known of requests ----------------------------------------------------------------------------------------


def test_each_request_is_shown_with_what_the_runtime_and_the_planner_know_of_it():
    requests, planner = Requests(), make_planner(PolicyConfig(), ENGINE)
    requests.record("a").sglang_loads = 64
    requests.record("b").arrived = 2
    planner.observe(RequestArrived("b", 0.0, 64, KEYS[:4]))
    parts = SimpleNamespace(context=SimpleNamespace(requests=requests), planned=planner.known)
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(kvtier=parts))
    (a, b) = known(scheduler, "")["requests"]
    shown = "request a: left to SGLang: its first 64 tokens"
    assert a == {"rid": "a", "runtime": shown, "planner": {}}
    assert b["runtime"] == "request b: arrived as number 2"
    assert b["planner"] == {"lookahead": "prompt of 64 tokens, 4 pages owned as request b, waiting"}
    assert known(scheduler, "b") == {"requests": [b], "omitted": 0}
    assert known(scheduler, "c") == {"requests": [], "omitted": 0}
    for n in range(MOST):
        requests.record(f"more-{n}")
    found = known(scheduler, "")
    assert (len(found["requests"]), found["omitted"]) == (MOST, 2)


def test_replicas_answer_together_and_one_that_restores_nothing_has_none():
    falls_back = known(SimpleNamespace(tree_cache=SimpleNamespace()), "")
    one = {"requests": [{"rid": "a", "runtime": "", "planner": {}}], "omitted": 3}
    assert together([falls_back, None, one]) == one


# Which session a request belongs to, asked of SGLang's own request objects.


def request(**more: Any) -> Req:
    return Req("rid", "", [1, 2, 3], SamplingParams(max_new_tokens=1), vocab_size=16, **more)


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({}, None),
        ({"session_id": "", "routing_key": ""}, None),
        ({"session_id": "agent-7"}, "agent-7"),
        ({"routing_key": "agent-7"}, "agent-7"),
        ({"session_id": "a", "routing_key": "b"}, "a"),
    ],
)
def test_a_request_belongs_to_the_session_that_it_names(fields, session):
    assert session_of(request(**fields)) == session


def test_a_session_of_sglangs_own_is_named_by_its_id():
    req = request(routing_key="b")
    req.session = SimpleNamespace(session_id="own")
    assert session_of(req) == "own"


def test_long_names_are_told_apart_and_kept_short():
    one, other = "x" * 5000, "x" * 4999 + "y"
    assert known_as(one) != known_as(other)
    assert len(known_as(one)) < MOST_CHARACTERS
    assert known_as("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS
