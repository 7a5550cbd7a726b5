"""`kv_hints` of requests: which actions are carried out, when, and what is said of the others."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import (
    Hint,
    HintAnswer,
    RequestArrived,
    RequestFinished,
    SessionsWith,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.sessions import Sessions
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime.hints import scheduler as hints
from sgl_kvtier.runtime.hints.actions import (
    ARRIVAL,
    COMPLETION,
    MOST_ACTIONS,
    Action,
    Refused,
    carry_out,
    read,
)
from sgl_kvtier.runtime.hints.scheduler import refuse_kv_hints, result_of
from sgl_kvtier.runtime.step.tracked import Asking
from sgl_kvtier.types import PageKey

kv_hints = pytest.importorskip("sglang.srt.managers.kv_hints")
ENGINE = EngineShape(page_tokens=16, page_bytes=4096, chunk_tokens=256)
KEYS = tuple(PageKey(bytes([n]) * 32) for n in range(1, 9))
BLOCKS = [key.hex() for key in KEYS]


def action(kind: str, payload: Any = None, version: str = "1.0") -> Any:
    return kv_hints.KvHintAction(
        action_id="a", action_type=kind, action_version=version, payload=payload or {}
    )


def envelope(*actions: Any) -> Any:
    return kv_hints.KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=list(actions))


def carried(
    planner: Planner,
    sent: Any,
    session: str,
    when: str,
    now: float,
    *,
    keys: Sequence[PageKey] = (),
    room: int = 99,
    others: bool = True,
    retained: list[tuple[str, Sequence[PageKey], float]] | None = None,
) -> list[HintAnswer]:
    """The effect of an envelope beside a store that can retain `room` pages, and is told `retained`."""

    def retain(owner: str, kept: Sequence[PageKey], seconds: float) -> int:
        if retained is not None:
            retained.append((owner, kept, seconds))
        return min(len(kept), room)

    asking = Asking(when, sent, session, keys)
    return carry_out(planner, asking, now, others=others, retain=retain)


# --- what an action asks for


@pytest.mark.parametrize(
    ("kind", "payload", "wanted"),
    [
        # vLLM's proposal
        (
            "kv.retain",
            {"directives": [{"covers_output": True, "priority": 100, "duration": 60}]},
            Action(Hint(priority=3, ttl_s=60.0)),
        ),
        (
            "kv.retain",
            {
                "scope": "request",
                "directives": [
                    {"start": 0, "end": 512, "priority": 80, "duration": 30},
                    {"start": 512, "end": 900, "priority": 20},
                ],
            },
            Action(Hint(priority=3), clipped="taken for the whole session"),
        ),
        # NVIDIA's Dynamo
        (
            "kv.retain",
            {
                "execute_at": "request_completion",
                "include_current_request": False,
                "block_hashes": BLOCKS[:2],
                "priority": 50,
                "ttl_seconds": 600,
            },
            Action(Hint(priority=2, ttl_s=600.0), own=False, pages=KEYS[:2]),
        ),
        ("kv.evict", {}, Action(Hint(priority=-3, ttl_s=0.0))),
        (
            "kv.demote",
            {"session_id": "other"},
            Action(Hint(priority=-3), own=False, session="other"),
        ),
        (
            "kv.prefetch",
            {"execute_at": ARRIVAL, "session_id": "s", "expected_delay_s": 2},
            Action(Hint(expected_delay_s=2.0), at=ARRIVAL, own=False, session="s"),
        ),
        (
            "kv.evict",
            {"block_hashes": [BLOCKS[0], "12", 7], "include_current_request": True},
            Action(
                Hint(priority=-3, ttl_s=0.0), pages=KEYS[:1],
                clipped="2 of 3 block_hashes are unknown",
            ),
        ),
    ],
)  # fmt: skip
def test_an_action_is_read_in_both_payloads_that_there_are(kind, payload, wanted):
    assert read(action(kind, payload)) == wanted


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        ("kv.retain", {}, "neither a priority nor a time"),
        ("kv.retain", {"priority": 101}, "from 0 to 100"),
        ("kv.retain", {"priority": True}, "from 0 to 100"),
        ("kv.retain", {"priority": 1, "ttl_seconds": -1}, "ttl_seconds must be a number"),
        ("kv.retain", {"priority": 1, "ttl_seconds": float("nan")}, "ttl_seconds must be"),
        ("kv.retain", {"directives": [3]}, "directives must be objects"),
        ("kv.retain", {"directives": "all"}, "directives must be a list"),
        ("kv.evict", {"block_hashes": ["x"] * 3}, "no page hashes of SGLang's"),
        ("kv.evict", {"block_hashes": BLOCKS[:1] * 65}, "at most 64"),
        ("kv.evict", {"execute_at": "soon"}, "execute_at is"),
        ("kv.evict", {"session_id": 5}, "session_id must be a text"),
        ("kv.evict", {"session_id": "\ud800"}, "session_id must be a text"),
        ("kv.evict", {"include_current_request": "no"}, "include_current_request is"),
        ("kv.evict", {"include_current_request": False}, "names no session and no block"),
        ("kv.prefetch", {"expected_delay_s": "1"}, "expected_delay_s must be"),
    ],
)
def test_a_payload_that_cannot_be_carried_out_is_refused_with_the_reason(kind, payload, why):
    found = read(action(kind, payload))
    assert isinstance(found, Refused)
    assert why in found.why and len(found.why) < 1000


def test_other_actions_and_versions_are_not_ours():
    assert read(action("kv.fetch", {"anything": 1})) is None
    assert isinstance(read(action("kv.retain", {"priority": 1}, version="2.0")), Refused)
    assert isinstance(read(action("kv.retain", {"priority": 1}, version="1.3")), Action)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "directives", "priority", "ttl_seconds", "duration", "execute_at", "session_id",
        "block_hashes", "include_current_request", "expected_delay_s", "start", "end",
    ]
)  # fmt: skip


@given(
    st.sampled_from(["kv.retain", "kv.evict", "kv.demote", "kv.prefetch", "kv.none"]),
    st.dictionaries(
        FIELDS | st.text(max_size=4), JSON | st.sampled_from([BLOCKS, 50, 1.5, ARRIVAL])
    ),
)
def test_no_payload_raises(kind, payload):
    read(action(kind, payload))
    carried(known_sessions(), envelope(action(kind, payload)), "a", ARRIVAL, 1.0)


# --- their effect


def known_sessions() -> Planner:
    """A planner that knows the idle sessions `a`, of four pages, and `b`, of the others."""
    planner = make_planner(PolicyConfig(prefetch="on", eviction="next-use"), ENGINE)
    for name, keys in (("a", KEYS[:4]), ("b", KEYS[4:])):
        planner.observe(RequestArrived(f"of {name}", 0.0, 64, keys, name))
        planner.observe(RequestFinished(f"of {name}", 1.0, keys=keys))
    return planner


def results(
    planner: Planner, *actions: Any, when: str = COMPLETION, others: bool = True
) -> list[str]:
    answers = carried(planner, envelope(*actions), "a", when, 2.0, others=others)
    return [result_of(answer) for answer in answers]


@pytest.mark.parametrize(
    ("kind", "payload", "seconds"),
    [
        ("kv.retain", {"priority": 50, "ttl_seconds": 60}, [60.0]),
        ("kv.retain", {"priority": 50}, []),
        ("kv.retain", {"priority": 50, "ttl_seconds": 60, "session_id": "b"}, []),
        ("kv.evict", {}, [0.0]),
        ("kv.demote", {}, []),
        ("kv.prefetch", {}, []),
    ],
)
def test_an_action_with_a_time_reaches_the_disk_on_the_pages_of_its_own_request(
    kind, payload, seconds
):
    told: list[tuple[str, Sequence[PageKey], float]] = []
    sent = envelope(action(kind, payload))
    (answer,) = carried(known_sessions(), sent, "a", COMPLETION, 2.0, keys=KEYS[:4], retained=told)
    assert answer.accepted and told == [("a", KEYS[:4], one) for one in seconds]


def test_pages_that_the_disk_has_no_room_to_retain_are_said():
    sent = envelope(action("kv.retain", {"priority": 50, "ttl_seconds": 60}))
    (answer,) = carried(known_sessions(), sent, "a", COMPLETION, 2.0, keys=KEYS[:4], room=3)
    assert result_of(answer) == "clipped" and "keeps 3 of 4 pages" in answer.reason


def test_actions_reach_their_own_session_a_named_one_and_those_with_a_block():
    planner = known_sessions()
    retain = {"priority": 100, "ttl_seconds": 60}
    assert results(planner, action("kv.retain", retain)) == ["accepted"]
    assert results(planner, action("kv.evict", {"session_id": "b"})) == ["accepted"]
    assert results(planner, action("kv.demote", {"block_hashes": BLOCKS[5:6]})) == ["accepted"]
    assert results(planner, action("kv.evict", {"session_id": "c"})) == ["refused"]
    assert results(planner, action("kv.evict", {"block_hashes": ["ff" * 32]})) == ["refused"]
    much = {"priority": 100, "ttl_seconds": 1e9}
    assert results(planner, action("kv.retain", much)) == ["clipped"]


def test_where_an_admin_key_keeps_sessions_apart_actions_are_on_their_own_alone():
    planner = known_sessions()
    own = action("kv.evict")
    foreign = [
        action("kv.evict", whose) for whose in ({"session_id": "b"}, {"block_hashes": BLOCKS})
    ]
    assert results(planner, own, *foreign, others=False) == ["accepted", "refused", "refused"]


def test_an_action_is_carried_out_at_its_time_and_refusals_are_told_once():
    planner = known_sessions()
    actions = [
        action("kv.retain", {"priority": 60}),
        action("kv.demote", {"execute_at": ARRIVAL}),
        action("kv.retain", {"priority": "high"}),
        action("kv.fetch"),
    ]
    assert results(planner, *actions, when=ARRIVAL) == ["accepted", "refused"]
    assert results(planner, *actions, when=COMPLETION) == ["accepted"]
    many = [action("kv.evict")] * (MOST_ACTIONS + 3)
    assert results(planner, *many, when=ARRIVAL) == ["refused"]
    assert len(results(planner, *many)) == MOST_ACTIONS


def test_a_server_that_can_follow_no_hint_refuses_each_action_once_and_says_why_once(
    monkeypatch, caplog
):
    counted: list[str] = []
    monkeypatch.setattr(hints, "count", lambda scheduler, result: counted.append(result))
    hints._say_refused.cache_clear()
    sent = [action("kv.evict"), action("kv.fetch"), action("kv.retain", version="2.0")]
    many = [action("kv.demote")] * (MOST_ACTIONS + 3)
    older = SimpleNamespace()  # of an SGLang without kv_hints
    waiting = [older, *(SimpleNamespace(kv_hints=one) for one in (None, envelope(*sent)))]
    tree = SimpleNamespace(cache_controller=None)
    scheduler = SimpleNamespace(tree_cache=tree, waiting_queue=waiting)
    for _ in range(2):
        refuse_kv_hints(scheduler, None)
    assert counted == ["refused"] * 2
    waiting.append(SimpleNamespace(kv_hints=envelope(*many)))
    refuse_kv_hints(scheduler, None)
    assert counted == ["refused"] * (2 + MOST_ACTIONS + 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"kvtier: kv_hints of requests are refused: {hints.unable(tree, None)}"
    ]


@pytest.mark.parametrize("sessions", [True, False])
def test_a_server_that_looks_ahead_follows_them_unless_it_knows_no_sessions(sessions, monkeypatch):
    counted: list[str] = []
    monkeypatch.setattr(hints, "count", lambda scheduler, result: counted.append(result))
    parts = SimpleNamespace(
        ahead=object(), notes=SimpleNamespace(config=PolicyConfig(sessions=sessions))
    )
    waiting = [SimpleNamespace(kv_hints=envelope(action("kv.evict")))]
    refuse_kv_hints(SimpleNamespace(tree_cache=object(), waiting_queue=waiting), parts)
    assert counted == ["refused"] * (not sessions)


class OnlySessions:
    """Of a planner what hints are for: when each session returns."""

    def __init__(self) -> None:
        self.sessions = Sessions(hint_limit_s=60.0)

    def query(self, question: Any) -> Any:
        if isinstance(question, SessionsWith):
            return ()
        return self.sessions.hint(question.session, question.hint, question.now)


WRONG: list[tuple[str, Any, str]] = [
    ("kv.retain", {"priority": 101}, "1.0"),
    ("kv.retain", {"priority": math.nan}, "1.0"),
    ("kv.retain", {"ttl_seconds": 10**400}, "1.0"),
    ("kv.retain", {"directives": [[]]}, "1.0"),
    ("kv.retain", {}, "1.0"),
    ("kv.retain", {"priority": 50}, "2.0"),
    ("kv.demote", {"session_id": "nobody"}, "1.0"),
    ("kv.demote", {"execute_at": "never"}, "1.0"),
    ("kv.evict", {"block_hashes": ["12"]}, "1.0"),
    ("kv.evict", {"block_hashes": ["ff" * 32]}, "1.0"),
    ("kv.evict", {"include_current_request": False}, "1.0"),
    ("kv.prefetch", {"expected_delay_s": -1}, "1.0"),
]
FOREIGN = [("kv.fetch", {}, "1.0"), ("", {"priority": 101}, "1.0"), ("kv.retain\0", {}, "1.0")]


def test_of_a_thousand_envelopes_each_action_counts_once_and_each_lifetime_is_kept():
    chance = random.Random(2)
    planner: Any = OnlySessions()
    counts: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    ends = {}
    for number in range(1000):
        own = f"session {number}"
        planner.sessions.returned(own, 0.0)
        planner.sessions.left(own, 1.0)
        wrong, foreign = (chance.choices(rows, k=chance.randrange(9)) for rows in (WRONG, FOREIGN))
        sent = [action(kind, payload, version) for kind, payload, version in [*wrong, *foreign]]
        chance.shuffle(sent)
        lifetime_s = chance.randrange(1, 160) / 2
        retain = action("kv.retain", {"priority": 100, "ttl_seconds": lifetime_s})
        sent.insert(chance.randrange(min(len(sent), MOST_ACTIONS - 1) + 1), retain)
        left_out = sent[MOST_ACTIONS:]
        for when in (ARRIVAL, COMPLETION):
            answers = carried(planner, envelope(*sent), own, when, 2.0)
            counts.update(map(result_of, answers))
        lost = sum((one.action_type, one.payload, one.action_version) in WRONG for one in left_out)
        wanted["refused"] += len(wrong) - lost + bool(left_out)
        wanted["clipped" if lifetime_s > 60 else "accepted"] += 1
        ends[own] = 2.0 + min(lifetime_s, 60.0)
    assert counts == wanted and min(wanted.values()) > 100
    for own, end in ends.items():
        expected = [planner.sessions.expected(own, now).at for now in (end - 0.25, end)]
        assert [at < math.inf for at in expected] == [True, False]


def test_ranks_with_the_same_facts_take_the_same_actions_alike():
    chance = random.Random(1)
    kinds = ("kv.retain", "kv.evict", "kv.demote", "kv.prefetch")
    ranks = [known_sessions(), known_sessions()]
    for number in range(50):
        sent = envelope(
            *(
                action(chance.choice(kinds), {"priority": chance.randrange(120), "session_id": s})
                for s in chance.choices("abc", k=3)
            )
        )
        one, other = (carried(rank, sent, "a", COMPLETION, 2.0 + number) for rank in ranks)
        assert one == other
    for name in ("a", "b"):
        one, other = (rank._ahead.sessions.expected(name, 60.0) for rank in ranks)
        assert one == other
