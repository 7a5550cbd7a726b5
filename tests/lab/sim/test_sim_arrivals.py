"""Traces as requests: who shares which pages with whom, and when they come."""

from __future__ import annotations

from sgl_kvtier.lab.sim.arrivals import Pace, from_sessions
from sgl_kvtier.lab.workload.session import Append, Call, Edit, Message, Session
from sgl_kvtier.lab.workload.source import load_sessions
from sgl_kvtier.types import Span

PAGE = 16


def _text(letter: str, tokens: int) -> Message:
    return Message("user", letter * (4 * tokens))


def test_a_turn_begins_with_the_pages_of_the_one_before_and_its_output() -> None:
    session = Session(
        "a",
        "test",
        (
            Append(_text("a", 100)),
            Call(_text("b", 60), 60),
            Append(_text("c", 40)),
            Call(_text("d", 10), 10, gap_s=7.0),
        ),
    )
    first, second = from_sessions([session], PAGE, Pace())
    assert second.keys[: len(first.keys)] == first.keys
    assert second.keys[: len(first.final_keys)] == first.final_keys
    assert len(first.final_keys) > len(first.keys)
    assert (second.after, second.arrival_s) == (first.rid, 7.0)
    assert len(second.keys) == second.prompt_tokens // PAGE


def test_an_edit_keeps_the_pages_before_it_and_changes_all_behind() -> None:
    session = Session(
        "a",
        "test",
        (
            Append(_text("a", 100)),
            Append(_text("b", 100)),
            Call(None, 1),
            Edit((Span(0, 1), _text("z", 100))),
            Call(None, 1),
        ),
    )
    first, second = from_sessions([session], PAGE, Pace())
    shared = 101 // PAGE
    assert second.keys[:shared] == first.keys[:shared]
    assert not set(second.keys[shared:]) & set(first.keys[shared:])


def test_sessions_with_the_same_beginning_share_its_pages() -> None:
    sessions = [
        Session(n, "t", (Append(_text("s", 200)), Append(_text(n, 50)), Call(None, 1)))
        for n in "xy"
    ]
    x, y = from_sessions(sessions, PAGE, Pace())
    same = sum(a == b for a, b in zip(x.keys, y.keys, strict=True))
    assert same == 201 // PAGE
    assert x.session != y.session


def test_starts_are_drawn_from_the_seed() -> None:
    sessions = load_sessions("generated:swe-mini", limit=5).sessions
    starts = [
        [
            r.arrival_s
            for r in from_sessions(sessions, 64, Pace(mean_start_s=3.0), seed)
            if r.after is None
        ]
        for seed in (1, 1, 2)
    ]
    assert starts[0] == starts[1] != starts[2]
    assert starts[0] == sorted(starts[0])


def test_long_waits_and_outputs_are_cut() -> None:
    session = Session(
        "a", "t", (Append(_text("a", 20)), Call(_text("b", 90), 90), Call(None, 5, gap_s=900.0))
    )
    first, second = from_sessions([session], PAGE, Pace(most_gap_s=10.0, most_output_tokens=32))
    assert first.output_tokens == 32
    assert second.arrival_s == 10.0


def test_a_pause_takes_the_place_of_recorded_ones_and_differs_by_a_fifth_at_most() -> None:
    calls = [Call(None, 5, gap_s=900.0) for _ in range(8)]
    session = Session("a", "t", (Append(_text("a", 20)), *calls))
    first, *others = from_sessions([session], PAGE, Pace(gap_s=20.0))
    waits = {one.arrival_s for one in others}
    assert first.arrival_s == 0.0
    assert len(waits) > 1 and 16.0 <= min(waits) <= max(waits) <= 24.0
