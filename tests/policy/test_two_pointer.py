"""Which end delivers which unit, one restoration at a time."""

from __future__ import annotations

import pytest

from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.types import Span


def loaded(pointer: TwoPointer, span: Span) -> TwoPointer:
    """The units of `span` are in flight."""
    assert pointer.take_back(len(span), span) == span
    return pointer


def test_compute_stops_before_landed_units_that_lie_below_units_in_flight() -> None:
    pointer = loaded(loaded(TwoPointer(0, 10), Span(8, 10)), Span(4, 6))
    pointer.land(Span(4, 6))
    assert pointer.barrier() == 4
    assert pointer.take_front(10) == Span(0, 4)


def test_compute_stops_before_units_in_flight_that_lie_below_landed_ones() -> None:
    pointer = loaded(loaded(TwoPointer(0, 10), Span(8, 10)), Span(4, 6))
    pointer.land(Span(8, 10))
    assert pointer.take_front(10) == Span(0, 4)


def test_nothing_below_the_floor_or_outside_the_source_is_loaded() -> None:
    pointer = TwoPointer(0, 10)
    assert pointer.take_back(9, Span(2, 8), floor=5) == Span(5, 8)
    assert pointer.take_back(9, Span(2, 8), floor=5).stop == pointer.front
    assert pointer.take_back(9, Span(2, 8)) == Span(2, 5)


def test_a_load_has_neighbours_only() -> None:
    pointer = loaded(TwoPointer(0, 10), Span(4, 6))
    assert pointer.take_back(9, floor=1) == Span(6, 10)
    assert pointer.take_back(9, floor=1) == Span(1, 4)


def test_units_that_have_not_landed_are_not_attached() -> None:
    pointer = loaded(TwoPointer(0, 4), Span(0, 4))
    pointer.land(Span(0, 2))
    with pytest.raises(ValueError, match=r"\[0, 3\) has not landed"):
        pointer.attach(Span(0, 3))
    pointer.attach(Span(0, 2))
    assert (pointer.front, pointer.loading) == (2, 2)


def test_lost_units_at_the_front_are_no_hole_and_those_behind_landed_ones_there_are_none() -> None:
    pointer = TwoPointer(0, 10)
    pointer.lack(Span(0, 2))
    pointer.lack(Span(5, 7))
    assert pointer.lost_runs(0) == [(5, 7)]
    loaded(pointer, Span(2, 5))
    pointer.land(Span(2, 5))
    assert pointer.lost_runs(2) == []
    assert (pointer.lost_run(0), pointer.first_lost(2)) == (2, 5)


def test_what_a_transfer_lost_is_the_fronts_and_is_not_loaded_again() -> None:
    pointer = loaded(TwoPointer(0, 6), Span(2, 6))
    assert pointer.lose(Span(4, 6)) == 2
    assert pointer.give_back(Span(2, 4)) == 2
    assert pointer.take_back(9) == Span(0, 4)
    assert pointer.lost_in(Span(0, 6)) == 2
