"""A request that would take the pages of a session that is about to return waits for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from named_parts import AHEAD

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    HeldBack,
    PagesPlaced,
    RequestArrived,
    RequestFinished,
    RunOrder,
    StepView,
    Waiter,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import PageKey, Span, Tier

ENGINE = EngineShape(page_tokens=16, page_bytes=1 << 16, chunk_tokens=1 << 20)
PROFILE = {
    "prefill": {"fixed_s": 0.0, "per_token_s": 0.001, "per_token_position_s": 0.0},
    "links": {"host-device": 1e12, "storage-device": 1e9},
}
PAGES = 20
NEW = Waiter("new", 16 * PAGES)
"""It takes 0.32 s to compute."""


def keys_of(session: int) -> tuple[PageKey, ...]:
    return tuple(PageKey(bytes([session, n]).ljust(32, b"\0")) for n in range(PAGES))


def server(
    gap_s: float,
    turns: int = 8,
    sessions: int = 2,
    config: PolicyConfig | None = None,
    **rules: Any,
) -> tuple[Planner, float]:
    """A planner that has seen sessions return after this gap, all their pages on the device, and
    when their last turns ended.
    """
    planner, now = make_planner(config or AHEAD, ENGINE, PROFILE, Rules(**rules)), 0.0
    for turn in range(turns):
        now += gap_s
        for session in range(sessions):
            rid, keys = f"{session} {turn}", keys_of(session)
            planner.observe(RequestArrived(rid, now, 16 * PAGES + 1, keys, str(session)))
            planner.observe(ChunkStarted(rid, Span(0, 16 * PAGES), now))
            planner.observe(PagesPlaced(keys, Tier.DEVICE, now))
            planner.observe(RequestFinished(rid, now, keys=keys))
    return planner, now


def asked(one: Waiter, now: float, empty: int = 0, sessions: int = 2) -> HeldBack:
    return HeldBack(one, -(-one.prompt_tokens // 16), PAGES * sessions + empty, empty, now)


def test_one_that_would_take_their_pages_waits_for_sessions_that_return_in_a_moment() -> None:
    planner, now = server(0.3)
    assert planner.query(asked(NEW, now + 0.01))


def test_it_does_not_wait_where_there_is_room_beside_them() -> None:
    planner, now = server(0.3)
    assert not planner.query(asked(NEW, now + 0.01, empty=PAGES))


def test_it_takes_the_pages_of_a_session_that_returns_later() -> None:
    planner, now = server(0.3)
    others = keys_of(9)
    planner.observe(PagesPlaced(others, Tier.DEVICE, now))  # nobody's
    assert not planner.query(asked(NEW, now + 0.01, sessions=3))


def test_it_waits_the_longer_the_more_there_is_to_compute_for_it() -> None:
    planner, now = server(2.0)
    assert not planner.query(asked(NEW, now + 0.01))
    assert planner.query(asked(Waiter("long", 16 * PAGES * 8), now + 0.01, empty=PAGES * 7))


@pytest.mark.parametrize(
    ("config", "rules"),
    [({"queue": "arrival"}, {}), ({}, {"holding": 0.0}), ({}, {"overtaking": 0.0})],
)
def test_it_never_waits_where_nobody_overtakes(config: Any, rules: Any) -> None:
    planner, now = server(0.3, config=replace(AHEAD, **config), **rules)
    assert not planner.query(asked(NEW, now + 0.01))


def test_nobody_waits_for_a_session_that_more_probably_stays_away() -> None:
    for passed_s, waits in ((0.2, True), (0.6, False)):
        planner, now = server(0.3)
        now += passed_s
        planner.step(StepView(now, free_pages={Tier.DEVICE: 2 * PAGES, Tier.HOST: 0}))
        assert planner.query(asked(NEW, now)) is waits


def test_it_waits_no_longer_than_others_may_overtake_it() -> None:
    """The bound is the work that stood before it, its own included, from the first time on."""
    planner, now = server(0.3)
    planner.query(RunOrder((Waiter("first", 16 * PAGES), NEW), now))  # 0.32 s before it
    assert planner.query(asked(NEW, now + 0.01))
    for session in range(2):
        again = RequestFinished(f"{session} last", now + 0.31, keys=keys_of(session))
        planner.observe(
            RequestArrived(again.rid, now + 0.3, 16 * PAGES + 1, keys_of(session), str(session))
        )
        planner.observe(ChunkStarted(again.rid, Span(0, 16 * PAGES), now + 0.3))
        planner.observe(again)
    assert planner.query(asked(NEW, now + 0.41))
    assert not planner.query(asked(NEW, now + 0.66))


def test_a_question_that_is_answered_with_no_changes_nothing() -> None:
    one, other = server(0.3)[0], server(0.3)[0]
    now = server(0.3)[1]
    for empty in (PAGES, 2 * PAGES):
        assert not one.query(asked(NEW, now + 0.01, empty=empty))
    waiting = (NEW, Waiter("short", 20))
    assert [one.query(RunOrder(waiting, now + at)) for at in (0.1, 0.5)] == [
        other.query(RunOrder(waiting, now + at)) for at in (0.1, 0.5)
    ]
