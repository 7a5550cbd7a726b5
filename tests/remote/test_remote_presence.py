"""What is believed of pages, and for how long, with a clock of the test's own."""

from __future__ import annotations

from remote_pages import key

from sgl_kvtier.remote.presence import GONE_S, HERE_S, UNREADABLE_S, Presence
from sgl_kvtier.types import Lookup

A, B, C = key("a"), key("b"), key("c")


def test_answers_are_believed_for_a_while() -> None:
    presence = Presence()
    presence.found("kv", [A, B], [True, False], 0.0)
    assert presence.lookup("kv", [A, B, C], 0.0) == [Lookup.HIT, Lookup.MISS, Lookup.MISS]
    assert presence.unknown("kv", [A, B, C], 0.0) == [C]
    assert presence.unknown("kv", [A, B], GONE_S) == [B]
    assert presence.unknown("kv", [A], HERE_S) == [A]
    assert presence.lookup("kv", [A], HERE_S) == [Lookup.MISS]


def test_pools_are_apart() -> None:
    presence = Presence()
    presence.stored("kv", [A], 0.0)
    assert presence.lookup("swa", [A], 0.0) == [Lookup.MISS]


def test_an_unreadable_page_stays_a_miss_whatever_the_engine_says() -> None:
    presence = Presence()
    presence.distrust("kv", [A], UNREADABLE_S, 0.0)
    presence.found("kv", [A], [True], 1.0)
    assert presence.gone("kv", A, UNREADABLE_S - 1)
    presence.found("kv", [A], [True], UNREADABLE_S)
    assert presence.lookup("kv", [A], UNREADABLE_S) == [Lookup.HIT]


def test_a_page_written_anew_is_there_again() -> None:
    presence = Presence()
    presence.distrust("kv", [A], UNREADABLE_S, 0.0)
    presence.stored("kv", [A], 1.0)
    assert presence.lookup("kv", [A], 1.0) == [Lookup.HIT]


def test_the_oldest_answers_go_first() -> None:
    presence = Presence(most=2)
    for name in (A, B, A, C):
        presence.stored("kv", [name], 0.0)
    assert len(presence) == 2
    assert presence.lookup("kv", [A, B, C], 0.0) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]
