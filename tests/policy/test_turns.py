"""Whose stored pages are read before their turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.policy.ahead.budget import reads_due
from sgl_kvtier.policy.messages import Queued, ReadsDue

QUEUES = st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=12).map(
    lambda entries: tuple(
        Queued(f"r{place}", pages, unread) for place, (pages, unread) in enumerate(entries)
    )
)


@given(QUEUES, st.integers(0, 400))
def test_what_is_due_fits_with_all_before_it_and_nothing_that_fits_is_kept_back(
    queue: tuple[Queued, ...], room: int
):
    found = reads_due(ReadsDue(queue, room))
    taken, fits = 0, True
    for place, request in enumerate(queue):
        taken += request.pages
        fits = fits and (taken <= room or place == 0)
        assert (request.rid in found) == (fits and request.unread)
    assert found == tuple(request.rid for request in queue if request.rid in found), (
        "the queue's order"
    )


@given(QUEUES, st.integers(0, 400), st.integers(0, 100))
def test_more_room_never_takes_a_turn_away(queue: tuple[Queued, ...], room: int, more: int):
    assert set(reads_due(ReadsDue(queue, room))) <= set(reads_due(ReadsDue(queue, room + more)))


def test_the_first_in_the_queue_is_never_kept_waiting():
    small = Queued("small", 1, True)
    assert reads_due(ReadsDue((Queued("large", 50, True), small), 0)) == ("large",)
    assert reads_due(ReadsDue((Queued("running soon", 50, False), small), 0)) == ()
    assert reads_due(ReadsDue((), 10)) == ()


@given(QUEUES, st.integers(0, 400))
def test_who_waits_behind_the_first_that_does_not_fit_need_not_be_named(
    queue: tuple[Queued, ...], room: int
):
    taken, named = 0, 0
    while named < len(queue) and (taken <= room or named == 1):
        taken += queue[named].pages
        named += 1
    assert reads_due(ReadsDue(queue[:named], room)) == reads_due(ReadsDue(queue, room))
