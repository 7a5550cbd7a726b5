"""When the engine is used, with a clock of the test's own."""

from __future__ import annotations

from sgl_kvtier.remote.breaker import LONGEST_S, Breaker


def closed() -> Breaker:
    breaker = Breaker()
    breaker.close()
    return breaker


def test_it_begins_open_with_a_probe_due() -> None:
    breaker = Breaker()
    assert not breaker.closed
    assert breaker.due <= 0.0


def test_a_trip_opens_it_for_a_second() -> None:
    breaker = closed()
    breaker.trip(10.0)
    assert not breaker.closed
    assert breaker.due == 11.0


def test_probes_that_fail_come_less_and_less_often() -> None:
    breaker = closed()
    waits = []
    now = 0.0
    for _ in range(9):
        breaker.trip(now)
        waits.append(breaker.due - now)
        now = breaker.due
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_after_a_success_the_next_trouble_is_probed_soon() -> None:
    breaker = closed()
    for _ in range(9):
        breaker.trip(0.0)
    breaker.close()
    breaker.trip(100.0)
    assert breaker.due == 101.0


def test_one_probe_is_under_way_at_a_time() -> None:
    breaker = closed()
    breaker.trip(0.0)
    breaker.probing(1.0)
    assert breaker.due == 1.0 + LONGEST_S


def test_more_than_half_of_the_last_calls_failed_opens_it() -> None:
    breaker = closed()
    for good in [True, False] * 10:
        breaker.ended(good, 0.0)
    assert breaker.closed
    breaker.ended(False, 0.0)
    breaker.ended(False, 0.0)
    assert not breaker.closed


def test_a_single_failure_after_a_quiet_time_does_not() -> None:
    breaker = closed()
    for _ in range(3):
        breaker.ended(False, 0.0)
    assert breaker.closed


def test_calls_that_failed_while_it_was_open_do_not_count_afterwards() -> None:
    breaker = closed()
    breaker.trip(0.0)
    for _ in range(6):
        breaker.ended(False, 0.5)
    breaker.close()
    breaker.ended(False, 1.0)
    assert breaker.closed
