"""What is believed of pages, and for how long, with a clock of the test's own."""

from __future__ import annotations

import pytest
from store_pages import key

from sgl_kvtier.remote.breaker import LONGEST_S, Breaker
from sgl_kvtier.remote.presence import GONE_S, HERE_S, UNREADABLE_S, Presence
from sgl_kvtier.types import Lookup

A, B, C = key("a"), key("b"), key("c")


@pytest.fixture
def presence() -> Presence:
    return Presence()


def test_answers_are_believed_for_a_while(presence: Presence) -> None:
    presence.found("kv", [A, B], [True, False], 0.0, presence.epoch)
    assert presence.lookup("kv", [A, B, C], 0.0) == [Lookup.HIT, Lookup.MISS, Lookup.MISS]
    assert presence.unknown("kv", [A, B, C], 0.0) == [C]
    assert presence.unknown("kv", [A, B], GONE_S) == [B]
    assert presence.unknown("kv", [A], HERE_S) == [A]
    assert presence.lookup("kv", [A], HERE_S) == [Lookup.MISS]


def test_pools_are_apart(presence: Presence) -> None:
    presence.stored("kv", [A], 0.0, presence.epoch)
    assert presence.lookup("swa", [A], 0.0) == [Lookup.MISS]


def test_an_unreadable_page_stays_a_miss_whatever_the_engine_says(presence: Presence) -> None:
    presence.distrust("kv", [A], UNREADABLE_S, 0.0)
    presence.found("kv", [A], [True], 1.0, presence.epoch)
    assert presence.gone("kv", A, UNREADABLE_S - 1)
    presence.found("kv", [A], [True], UNREADABLE_S, presence.epoch)
    assert presence.lookup("kv", [A], UNREADABLE_S) == [Lookup.HIT]


def test_a_page_written_anew_is_there_again(presence: Presence) -> None:
    presence.distrust("kv", [A], UNREADABLE_S, 0.0)
    presence.stored("kv", [A], 1.0, presence.epoch)
    assert presence.lookup("kv", [A], 1.0) == [Lookup.HIT]


def test_the_oldest_answers_go_first() -> None:
    presence = Presence(most=2)
    for name in (A, B, A, C):
        presence.stored("kv", [name], 0.0, presence.epoch)
    assert len(presence) == 2
    assert presence.lookup("kv", [A, B, C], 0.0) == [Lookup.HIT, Lookup.MISS, Lookup.HIT]


def test_hidden_pages_are_misses_whatever_is_found_out(presence: Presence) -> None:
    presence.stored("kv", [A, B], 0.0, presence.epoch)
    presence.hide("kv", [A])
    presence.found("kv", [A, B], [True, True], 0.0, presence.epoch)
    presence.stored("kv", [A], 0.0, presence.epoch)
    assert presence.lookup("kv", [A, B], 0.0) == [Lookup.MISS, Lookup.HIT]
    assert presence.gone("kv", A, 0.0) and not presence.gone("kv", B, 0.0)
    assert presence.unknown("kv", [A], 0.0) == []
    assert presence.hides("kv", [B, A]) and not presence.hides("kv", [B])


def test_pages_of_another_pool_are_not_hidden(presence: Presence) -> None:
    presence.hide("swa", [A])
    assert presence.hides("swa", [A]) and not presence.hides("kv", [A])


def test_a_page_is_shown_when_each_removal_that_hid_it_is_done(presence: Presence) -> None:
    presence.hide("kv", [A, B])
    presence.hide("kv", [A])
    presence.show("kv", [A, B])
    assert presence.hides("kv", [A]) and not presence.hides("kv", [B])
    presence.show("kv", [A])
    assert not presence.hides("kv", [A])
    assert presence.unknown("kv", [A], 0.0) == [A]


def test_all_pages_are_hidden_until_each_clear_is_done(presence: Presence) -> None:
    presence.hide("", None)
    presence.hide("", None)
    presence.hide("kv", [A])
    presence.show("", None)
    assert presence.hides("swa", [C])
    presence.show("", None)
    assert presence.hides("kv", [A]) and not presence.hides("kv", [C])


def test_what_was_found_out_before_pages_were_hidden_does_not_count(presence: Presence) -> None:
    before = presence.epoch
    presence.hide("kv", [A])
    presence.show("kv", [A])
    presence.found("kv", [A], [True], 0.0, before)
    presence.stored("kv", [A], 0.0, before)
    assert presence.lookup("kv", [A], 0.0) == [Lookup.MISS]


def test_what_is_forgotten_stays_hidden(presence: Presence) -> None:
    presence.hide("kv", [A])
    presence.clear()
    assert presence.hides("kv", [A])


# When the engine is used, with a clock of the test's own.


@pytest.fixture
def breaker() -> Breaker:
    breaker = Breaker()
    breaker.close()
    return breaker


def test_probes_that_fail_come_less_and_less_often(breaker: Breaker) -> None:
    waits = []
    now = 0.0
    for _ in range(9):
        breaker.trip(now)
        waits.append(breaker.due - now)
        now = breaker.due
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_after_a_success_the_next_trouble_is_probed_soon(breaker: Breaker) -> None:
    for _ in range(9):
        breaker.trip(0.0)
    breaker.close()
    breaker.trip(100.0)
    assert breaker.due == 101.0


def test_one_probe_is_under_way_at_a_time(breaker: Breaker) -> None:
    breaker.trip(0.0)
    breaker.probing(1.0)
    assert breaker.due == 1.0 + LONGEST_S


def test_more_than_half_of_the_last_calls_failed_opens_it(breaker: Breaker) -> None:
    for good in [True, False] * 10:
        breaker.ended(good, 0.0)
    assert breaker.closed
    breaker.ended(False, 0.0)
    breaker.ended(False, 0.0)
    assert not breaker.closed


def test_a_single_failure_after_a_quiet_time_does_not(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.ended(False, 0.0)
    assert breaker.closed


def test_calls_that_failed_while_it_was_open_do_not_count_afterwards(breaker: Breaker) -> None:
    breaker.trip(0.0)
    for _ in range(6):
        breaker.ended(False, 0.5)
    breaker.close()
    breaker.ended(False, 1.0)
    assert breaker.closed
