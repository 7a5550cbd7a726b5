"""What the hands of looking ahead keep of sessions between their turns, over fakes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sgl_kvtier.policy.messages import RequestFinished
from sgl_kvtier.policy.pages.owners import owner_of
from sgl_kvtier.runtime.ahead import engine as lookahead_engine
from sgl_kvtier.runtime.ahead.engine import LookaheadEngine
from sgl_kvtier.runtime.ahead.host_pins import MOST_PINS
from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.page_names import PageNames, SessionNames
from sgl_kvtier.runtime.step.tracked import Announced, Path, Requests
from sgl_kvtier.types import PageKey

PAGE = 4
KEYS = tuple(PageKey(bytes([n]) * 32) for n in range(3))


class Turns:
    """Sessions named by their turns; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def turn_of(self, owner: str) -> float | None:
        self.asked += 1
        return float(owner.removeprefix(owner_of("")))


def made() -> LookaheadEngine:
    """Hands that know of no request yet."""
    hands = object.__new__(LookaheadEngine)
    hands.context = SimpleNamespace(page=PAGE, facts=[])
    hands.promotions = SimpleNamespace(claiming_for=None)
    hands.victims = SimpleNamespace()
    hands.pages = Turns()
    hands._config = SimpleNamespace(eviction="next-use", sessions=True)
    hands._requests, hands._idle, hands._idle_tokens = Requests(), {}, 0
    hands._next, hands._expected = None, 0
    return hands


def path(node: int | None = None) -> Path:
    return Path([0] * PAGE, KEYS[:1], None, None, node)


def test_a_session_whose_waiting_request_is_aborted_keeps_its_path():
    hands, own = made(), path()
    hands._park("7", own)
    req: Any = None
    hands._requests.record("r").announced = Announced(req, KEYS, "7", 12, path=hands._unpark("7"))
    hands.gone("r")
    assert hands._idle == {"7": own} and hands._idle_tokens == PAGE
    assert [(type(fact), fact.rid) for fact in hands.context.facts] == [(RequestFinished, "r")]


def test_a_prompt_behind_a_flush_goes_on_with_no_session_before_it():
    """Rounds of a comparison repeat their prompts: the time between two is no agent's tool call."""
    hands, req = made(), cast(Req, SimpleNamespace(rid="r"))
    hands.promotions = SimpleNamespace(reset=lambda: None)
    hands.facts = SimpleNamespace(cleared=tuple, dropped=lambda keys, tier: None)
    hands.pages = SimpleNamespace(resident=lambda tier: ())
    hands.sessions = SessionNames()
    hands.sessions.ended("7", KEYS)
    assert hands.sessions.of(req, KEYS) == "7"
    hands.reset()
    assert hands.sessions.of(req, KEYS) == "from r"


def test_a_prompt_that_was_asked_before_is_known_to_be_in_the_tree_as_far_as_it_is():
    hands = made()
    req: Any = SimpleNamespace(
        rid="r", kv=SimpleNamespace(cache_protected_len=2 * PAGE), last_node=5
    )
    hands._requests.record("r").announced = known = Announced(req, KEYS, "7", 12)
    hands.checkpointed(req, 2 * PAGE)
    assert (known.kept, known.node) == (2 * PAGE, 5)


def test_a_request_with_anothers_id_does_not_get_its_page_names():
    """Several tokenizer processes may send one id twice. Names of one prompt's pages beside the
    tokens of another would later bring its pages from storage into the tree under these tokens.
    """
    hands = made()
    hands.context.names = names = PageNames(PAGE, pairs=False)
    hands.sessions = SessionNames()
    hands.facts = SimpleNamespace(placed=lambda keys, tier: None)  # type: ignore[assignment]

    def ended(tokens: array[int], salt: str) -> Any:
        return SimpleNamespace(
            rid="r", kv=SimpleNamespace(cache_protected_len=3 * PAGE), last_node=5,
            full_untruncated_fill_ids=tokens, origin_input_ids=tokens, extra_key=None,
            cache_salt=salt, finished=lambda: True, finished_reason=None,
        )  # fmt: skip

    first = ended(array("q", range(3 * PAGE + 1)), "one tenant")
    other = ended(array("q", range(100, 3 * PAGE + 101)), "another tenant")
    keys = names.keys_of(first.origin_input_ids, first)
    hands._requests.record("r").announced = known = Announced(first, keys, "7", 3 * PAGE + 1)
    for req in (other, first):
        hands.checkpointed(req, 0)
        hands.released(req)
        if req is other:
            assert hands._requests.announced("r") is known and known.kept == 0
            assert not hands._idle and not hands.context.facts
    kept = hands._idle["7"]
    assert names.keys_of(kept.tokens, kept) == kept.keys == keys


@pytest.mark.parametrize("pairs", [False, True])
def test_an_idle_session_keeps_the_tokens_that_name_its_pages(pairs):
    hands = made()
    hands.context.names = names = PageNames(PAGE, pairs=pairs)
    hands.sessions = SessionNames()
    hands.facts = SimpleNamespace(placed=lambda keys, tier: None)
    tokens = array("q", range(3 * PAGE + 1))
    req: Any = SimpleNamespace(
        rid="r", kv=SimpleNamespace(cache_protected_len=3 * PAGE), last_node=5,
        full_untruncated_fill_ids=tokens, origin_input_ids=tokens, extra_key=None, cache_salt=None,
        finished=lambda: True, finished_reason=None,
    )  # fmt: skip
    hands._requests.record("r").announced = Announced(req, (), "7", len(tokens))
    hands.checkpointed(req, 0)
    hands.released(req)
    kept = hands._idle["7"]
    assert kept.keys == names.keys_of(tokens, req) and len(kept.keys) == 3
    key = names.radix_key(kept, 0, 3)
    assert (len(key), key.is_bigram) == (3 * PAGE, pairs)


def test_the_order_of_returns_is_looked_up_once_in_a_step_and_as_far_as_it_is_used():
    hands = made()
    for session in range(3 * MOST_PINS, 0, -1):
        hands._park(str(session), path(session))
    turns: Any = hands.pages
    nodes, least = hands.wanted_in_host()
    assert nodes == list(range(1, MOST_PINS + 1)) and least
    asked = turns.asked
    assert hands.wanted_in_host() == (nodes, least) and turns.asked == asked == 3 * MOST_PINS
    hands._unpark("1")
    assert hands.wanted_in_host()[0][0] == 2


def test_half_of_few_sessions_are_held_back_and_all_before_the_one_that_room_is_made_for():
    hands = made()
    for session in range(1, 6):
        hands._park(str(session), path(session))
    assert hands.wanted_in_host() == ([1, 2, 3], True)
    hands.promotions.claiming_for = hands._idle["4"]
    assert hands.wanted_in_host() == ([1, 2, 3, 4], False)


def test_no_more_sessions_are_kept_than_the_planner_keeps(monkeypatch):
    monkeypatch.setattr(lookahead_engine, "MOST_IDLE", 10)
    hands = made()
    for session in range(25):
        hands._park(str(session), path())
    assert list(hands._idle) == [str(session) for session in range(15, 25)]
    assert hands._idle_tokens == 10 * PAGE
