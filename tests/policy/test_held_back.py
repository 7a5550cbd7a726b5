"""A request waits for a session that is about to return, where host memory is short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from named_parts import AHEAD, named

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    HeldBack,
    PagesDropped,
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
    return named(PAGES, PAGES * session)


def server(
    gap_s: float,
    config: PolicyConfig = AHEAD,
    tiers: tuple[Tier, ...] = (Tier.DEVICE, Tier.HOST),
    **rules: Any,
) -> tuple[Planner, float]:
    """A planner that has seen two sessions return after this gap, all their pages in these tiers,
    and when their last turns ended.
    """
    rules = {"overtaking": 1.0, "holding": 2.0, **rules}
    planner, now = make_planner(config, ENGINE, PROFILE, Rules(**rules)), 0.0
    for turn in range(8):
        now += gap_s
        for session in range(2):
            take_turn(planner, now, session, turn)
            for tier in tiers:
                planner.observe(PagesPlaced(keys_of(session), tier, now))
    return planner, now


def take_turn(planner: Planner, now: float, session: int, turn: int) -> None:
    rid, keys = f"{session} {turn}", keys_of(session)
    planner.observe(RequestArrived(rid, now, 16 * PAGES + 1, keys, str(session)))
    planner.observe(ChunkStarted(rid, Span(0, 16 * PAGES), now))
    planner.observe(RequestFinished(rid, now, keys=keys))


def asked(now: float, one: Waiter = NEW, host_empty: int = 0) -> HeldBack:
    return HeldBack(one, host_empty, now)


def test_it_waits_where_a_session_that_comes_soon_would_lose_its_pages() -> None:
    planner, now = server(0.2)
    assert planner.query(asked(now + 0.01))


def test_it_waits_the_longer_the_more_there_is_to_compute_for_it() -> None:
    planner, now = server(2.0)
    assert not planner.query(asked(now + 0.01))
    assert planner.query(asked(now + 0.01, Waiter("long", 16 * PAGES * 9), host_empty=PAGES * 8))


def test_it_does_not_wait_where_host_memory_has_room_for_all_of_them() -> None:
    """The session then comes back from there, which costs next to nothing."""
    planner, now = server(0.2)
    assert not planner.query(asked(now + 0.01, host_empty=PAGES))
    assert planner.query(asked(now + 0.01, host_empty=PAGES - 1))


def test_a_session_that_is_back_in_host_memory_does_not_wait_for_another() -> None:
    planner, now = server(0.2)
    back = Waiter("back", 16 * PAGES + 320, host_tokens=16 * PAGES)  # 20 new pages
    assert planner.query(asked(now + 0.01, back, host_empty=PAGES - 1))
    assert not planner.query(asked(now + 0.01, back, host_empty=PAGES))


def test_host_pages_that_nobody_is_known_to_need_are_room_as_well() -> None:
    planner, now = server(0.2)
    old = keys_of(9)
    planner.observe(PagesPlaced(old[1:], Tier.HOST, now))
    assert planner.query(asked(now + 0.01))
    planner.observe(PagesPlaced(old[:1], Tier.HOST, now))
    assert not planner.query(asked(now + 0.01))


def test_it_takes_the_pages_of_a_session_that_returns_later() -> None:
    planner, now = server(0.2)
    for turn in range(10):  # it comes every 20 s
        take_turn(planner, now - 20 * (9 - turn), 2, turn)
    planner.observe(PagesPlaced(keys_of(2), Tier.HOST, now))
    assert not planner.query(asked(now + 0.01))
    planner.observe(PagesDropped(keys_of(2), Tier.HOST, now))
    assert planner.query(asked(now + 0.01))


def test_but_not_where_the_queue_takes_until_that_one_returns_as_well() -> None:
    """It runs behind the queue, and its pages would have to be read from storage by then."""
    planner, now = server(0.2)
    for turn in range(10):  # it comes every 2 s
        take_turn(planner, now - 2 * (9 - turn), 2, turn)
    planner.observe(PagesPlaced(keys_of(2), Tier.HOST, now))
    planner.step(StepView(now, free_pages={Tier.DEVICE: 0, Tier.HOST: 0}))
    assert not planner.query(asked(now + 0.01))
    for waiting in range(3):
        planner.observe(RequestArrived(str(waiting), now, 16 * 500, ()))
    planner.step(
        StepView(
            now, ("0", "1", "2"), prefill_tokens=1000, fresh_tokens=24_000,
            fresh=(8000, 8000, 8000), free_pages={Tier.DEVICE: 0, Tier.HOST: 0},
        )
    )  # fmt: skip
    assert planner.query(asked(now + 0.01))


def test_nobody_waits_for_a_session_that_has_nothing_in_memory() -> None:
    """What it would take belongs to one that waits."""
    planner, now = server(0.2)
    for tier in (Tier.DEVICE, Tier.HOST):
        for session in range(2):
            assert planner.query(asked(now + 0.01)), "one has pages in the other tier"
            planner.observe(PagesPlaced(keys_of(session), Tier.STORAGE, now))
            planner.observe(PagesDropped(keys_of(session), tier, now))
    planner.observe(RequestArrived("w", now, 16 * PAGES + 1, keys_of(5)))
    planner.observe(ChunkStarted("w", Span(0, 16 * PAGES), now))
    planner.observe(PagesPlaced(keys_of(5), Tier.HOST, now))
    assert not planner.query(asked(now + 0.01))


def test_nobody_waits_where_no_waiting_makes_room() -> None:
    """The request has more pages than host memory."""
    planner, now = server(0.2)
    assert planner.query(asked(now + 0.01, Waiter("whole", 16 * 2 * PAGES)))
    assert not planner.query(asked(now + 0.01, Waiter("more", 16 * 2 * PAGES + 1)))


@pytest.mark.parametrize(
    ("config", "rules"),
    [
        ({"queue": "arrival"}, {}),
        ({"eviction": "lru"}, {}),
        ({"sessions": False}, {}),
        ({}, {"holding": 0.0}),
        ({}, {"overtaking": 0.0}),
    ],
)
def test_it_never_waits_where_nobody_overtakes_or_is_expected(config: Any, rules: Any) -> None:
    planner, now = server(0.2, config=replace(AHEAD, **config), **rules)
    assert not planner.query(asked(now + 0.01))


def test_nobody_waits_for_a_session_that_more_probably_stays_away() -> None:
    for passed_s, waits in ((0.1, True), (0.45, False)):
        planner, now = server(0.2)
        now += passed_s
        planner.step(StepView(now, free_pages={Tier.DEVICE: 2 * PAGES, Tier.HOST: 0}))
        assert planner.query(asked(now)) is waits


def test_the_session_that_was_waited_for_runs_first() -> None:
    planner, now = server(0.2)
    assert planner.query(asked(now + 0.01))
    back = Waiter("back", 16 * PAGES + 60, device_tokens=16 * PAGES)
    assert planner.query(RunOrder((NEW, back), now + 0.2)) == ("back", "new")


def test_it_waits_no_longer_than_others_may_overtake_it() -> None:
    """The bound is the work that stood before it, its own included, from the first time on."""
    planner, now = server(0.2)
    planner.query(RunOrder((Waiter("first", 16 * PAGES), NEW), now))  # 0.32 s before it
    assert planner.query(asked(now + 0.01))
    for turn in (100, 101):
        now += 0.2
        for session in range(2):
            take_turn(planner, now, session, turn)
        assert planner.query(asked(now + 0.01)) is (turn == 100)


def test_a_question_that_is_answered_with_no_changes_nothing() -> None:
    (one, now), (other, _) = server(0.2), server(0.2)
    for empty in (PAGES, 2 * PAGES):
        assert not one.query(asked(now + 0.01, host_empty=empty))
    waiting = (NEW, Waiter("short", 20))
    assert [one.query(RunOrder(waiting, now + at)) for at in (0.1, 0.5)] == [
        other.query(RunOrder(waiting, now + at)) for at in (0.1, 0.5)
    ]
