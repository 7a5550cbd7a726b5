"""Restoration and lookahead together: what one tells the other, and when lookahead ends."""

from __future__ import annotations

from dataclasses import fields, replace

from named_parts import AHEAD, named

from sgl_kvtier.policy.messages import (
    Hint,
    Hinted,
    LeftToEngine,
    Load,
    LookaheadEnded,
    PagesPlaced,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    SessionsWith,
    StepPlan,
    StepView,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

ENGINE = EngineShape(page_tokens=16, page_bytes=1000, chunk_tokens=512)


def test_lookahead_sees_the_whole_view_after_loads_have_taken_their_pages() -> None:
    free, empty = {Tier.DEVICE: 9}, {Tier.DEVICE: 5}
    view = StepView(
        1.0, ("a", "b"), "c", False, 512, 300, 2, free, empty, 3, 400, (200, 100), True, True
    )
    assert all(getattr(view, field.name) for field in fields(view) if field.name != "slot_open")
    load = Load("a", Span(0, 4), Tier.STORAGE, Link.STORAGE_TO_DEVICE, 1.0)
    left = make_planner(AHEAD, ENGINE)._left(view, StepPlan(loads=(load,)))
    assert left == replace(view, free_pages={Tier.DEVICE: 5}, empty_pages={Tier.DEVICE: 1})


def running(planner: Planner, pages: int) -> None:
    """A request has this many pages on the device, which are needed now."""
    keys = named(pages)
    planner.observe(RequestArrived("runs", 0.0, pages * 16 + 8, keys, "s"))
    planner.observe(PagesPlaced(keys, Tier.DEVICE, 0.0))


def test_planners_whose_maps_differ_decide_alike_once_lookahead_has_ended() -> None:
    ranks = [make_planner(AHEAD, ENGINE) for _ in range(2)]
    offer = RestoreOffered("new", 1.0, 400 * 16, 0, 400, ((Span(0, 400), Tier.STORAGE),))
    question = LeftToEngine(offer, StepView(1.0, ("new",), free_pages={Tier.DEVICE: 1000}))
    for planner, pages in zip(ranks, (900, 1), strict=True):  # of one rank's map pages were lost
        running(planner, pages)
    assert len({planner.query(question) for planner in ranks}) == 2
    for planner in ranks:
        planner.observe(LookaheadEnded(1.0))
        assert not planner.looks_ahead
    (answer,) = {planner.query(question) for planner in ranks}
    assert answer != "no room", "the device is free"


def test_abandoned_sessions_are_found_by_any_of_their_pages_until_they_are_back() -> None:
    planner = make_planner(AHEAD, ENGINE)
    shared, own = named(2), named(1, start=9)
    for session, keys in (("a", shared), ("b", shared + own)):
        planner.observe(RequestArrived(session, 0.0, len(keys) * 16 + 8, keys, session))
        planner.observe(PagesPlaced(keys, Tier.DEVICE, 0.0))
        planner.observe(RequestFinished(session, 1.0, False, keys))
        planner.query(Hinted(session, Hint(priority=-3, ttl_s=0.0), 1.0))
    planner.step(StepView(2.0, free_pages={Tier.DEVICE: 10}))
    assert planner.query(SessionsWith(shared[1])) == ("a", "b")
    assert planner.query(SessionsWith(own[0])) == ("b",)
    planner.observe(RequestArrived("again", 3.0, 40, shared, "a"))
    assert planner.query(SessionsWith(own[0])) == ("b",)
    assert set(planner.query(SessionsWith(shared[1]))) == {"a", "b"}
    assert planner.query(SessionsWith(named(1, start=77)[0])) == ()
