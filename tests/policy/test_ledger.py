"""What may be brought on a guess: paid for by what was used, and bounded whatever comes of it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.policy.ahead.budget import reads_due
from sgl_kvtier.policy.ahead.moves import _MOST, _START, _TRIED, Ledger
from sgl_kvtier.policy.messages import Queued, ReadsDue
from sgl_kvtier.types import PageKey, Tier

CAPACITY = 1000


def pages(name: int, count: int) -> list[PageKey]:
    return [PageKey(b"%d/%d" % (name, n)) for n in range(count)]


moves = st.tuples(
    st.sampled_from(("used", "wasted", "failed", "kept")),
    st.integers(1, 60),
    st.floats(0.5, 0.99) | st.just(1.0),
    st.sampled_from((Tier.DEVICE, Tier.HOST)),
    st.integers(0, 50),
)


@given(st.lists(moves, max_size=80), st.sampled_from((0.0, 0.1, 0.3)))
def test_what_is_wasted_is_bounded_whatever_happens(
    steps: list[tuple[str, int, float, Tier, int]], share: float
) -> None:
    ledger = Ledger(share)
    ledger.capacity(CAPACITY)
    wasted, used, ran = {False: 0, True: 0}, {False: 0, True: 0}, 0
    waiting = 0.0  # what is charged for pages that wait
    largest = 0
    for number, (end, count, chance, tier, more) in enumerate(steps):
        ledger.ran(more)
        ran += more
        if not ledger.allows(chance):
            continue
        keys = pages(number, count)
        ledger.prefetched(keys, tier, chance)
        largest = max(largest, count)
        for key in keys:
            if end == "used":
                ledger.used(key, tier)
            elif end == "wasted":
                ledger.wasted(key, tier)
            elif end == "failed":
                ledger.failed(key, tier)
        certain = chance == 1
        used[certain] += count * (end == "used")
        wasted[certain] += count * (end == "wasted")
        waiting += count * (1 - chance) * (end == "kept")
        for kind, balance in ledger.balances.items():
            charged = 0 if kind else waiting
            earned = _START * CAPACITY + share / (1 - share) * used[kind] + _TRIED * ran
            assert balance <= _MOST * CAPACITY + 1e-6
            assert balance <= earned - wasted[kind] - charged + 1e-6
            assert wasted[kind] <= earned - charged + largest + 1e-6


@given(st.integers(0, 2**32))
def test_where_chances_are_true_and_pages_wait_for_long_the_share_is_kept(seed: int) -> None:
    rng, share = random.Random(seed), 0.1
    ledger = Ledger(share)
    ledger.capacity(CAPACITY)
    open_moves: list[tuple[list[PageKey], bool]] = []
    brought = wasted = 0
    for number in range(2000):
        chance = rng.choice((0.5, 0.7, 0.9, 0.95))
        if ledger.allows(chance):
            keys = pages(number, 10)
            ledger.prefetched(keys, Tier.DEVICE, chance)
            open_moves.append((keys, rng.random() < chance))
            brought += 10
        if len(open_moves) > 8:
            keys, comes = open_moves.pop(0)
            for key in keys:
                (ledger.used if comes else ledger.wasted)(key, Tier.DEVICE)
            wasted += 0 if comes else 10
    assert brought >= 100
    assert wasted <= share * brought + _START * CAPACITY + 100


def test_after_wasted_moves_nothing_is_brought_until_something_was_used_or_ran() -> None:
    ledger = Ledger(0.1)
    ledger.capacity(CAPACITY)
    keys = pages(0, 200)
    assert ledger.allows(0.9)
    ledger.prefetched(keys, Tier.DEVICE, 0.9)
    for key in keys:
        ledger.wasted(key, Tier.DEVICE)
    assert not ledger.allows(0.99)
    assert ledger.allows(1.0)  # a request that waits has a balance of its own
    ledger.ran(int((200 - _START * CAPACITY) / _TRIED) + 1)
    assert ledger.allows(0.9)


def test_waiting_requests_whose_pages_leave_again_get_no_more_for_a_while() -> None:
    ledger = Ledger(0.1)
    ledger.capacity(CAPACITY)
    keys = pages(0, 200)
    ledger.prefetched(keys, Tier.DEVICE, 1.0)
    assert ledger.allows(1.0)
    for key in keys:
        ledger.wasted(key, Tier.DEVICE)
    assert not ledger.allows(1.0)
    assert ledger.allows(0.9)
    more = pages(1, 2000)
    ledger.prefetched(more, Tier.DEVICE, 1.0)
    for key in more:
        ledger.used(key, Tier.DEVICE)
    assert ledger.allows(1.0)


def test_a_page_is_charged_once_and_its_end_is_taken_once() -> None:
    ledger = Ledger(0.1)
    ledger.capacity(CAPACITY)
    (key,) = pages(0, 1)
    before = dict(ledger.balances)
    ledger.prefetched([key, key], Tier.DEVICE, 0.75)
    ledger.prefetched([key], Tier.DEVICE, 0.75)
    assert ledger.balances == {**before, False: before[False] - 0.25}
    ledger.prefetched([key], Tier.DEVICE, 1.0)
    assert ledger.balances == before
    ledger.failed(key, Tier.DEVICE)
    ledger.wasted(key, Tier.DEVICE)
    ledger.used(key, Tier.DEVICE)
    assert ledger.balances == before


def test_a_share_of_one_is_no_limit() -> None:
    ledger = Ledger(1.0)
    ledger.prefetched(pages(0, 5000), Tier.HOST, 0.5)
    for key in pages(0, 5000):
        ledger.wasted(key, Tier.HOST)
    assert ledger.allows(0.5)


def test_saying_the_capacity_again_gives_no_new_balance() -> None:
    ledger = Ledger(0.1)
    ledger.capacity(1000)
    given = dict(ledger.balances)
    assert given == {False: 50.0, True: 50.0}
    ledger.prefetched([PageKey(b"a" * 32)], Tier.DEVICE, 0.5)
    for _ in range(3):
        ledger.capacity(1000)
    assert ledger.balances == {False: 49.5, True: 50.0}


# Whose stored pages are read before their turn.


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
