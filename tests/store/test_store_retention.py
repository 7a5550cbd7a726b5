"""Pages that clients asked to keep: other pages leave first, until the time is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted import Scripted
from store_pages import key, named, open_at, put

from sgl_kvtier.store.base import KV
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

SIZE = 30_000
STATE = 120_000
"""Bytes of a page of another pool, in segments of their own."""


@pytest.fixture
def clock() -> Scripted:
    """Time stands still until it is moved."""
    env = Scripted(native=True)
    env.now = lambda: 100.0 + env.seconds  # type: ignore[method-assign]
    return env


@pytest.fixture
def store(tmp_path: Path, clock: Scripted) -> DiskStore:
    """Room for some 60 pages."""
    return open_at(tmp_path, env=clock, capacity_bytes=2 << 20, segment_bytes=512 << 10)


def stored(store: DiskStore, *names: object) -> None:
    put(store, named(names, SIZE))


def there(store: DiskStore, *names: object) -> int:
    return store.lookup([key(name) for name in names]).count(Lookup.HIT)


def pressed(store: DiskStore, name: str, pages: int = 200) -> None:
    """Stores more than there is room for."""
    for first in range(0, pages, 10):
        stored(store, *((name, i) for i in range(first, first + 10)))


OWN = [("own", i) for i in range(12)]
KEYS = [key(name) for name in OWN]


def test_retained_pages_outlive_all_others_until_their_time_is_over(
    store: DiskStore, clock: Scripted
) -> None:
    stored(store, *OWN)
    assert store.retain("a", KEYS, 60.0) == 12 == store.stats().pages_retained
    pressed(store, "x")
    assert there(store, *OWN) == 12 and store.stats().pages_evicted > 100
    clock.seconds += 59.9
    pressed(store, "y")
    assert there(store, *OWN) == 12
    clock.seconds += 0.2
    assert store.stats().pages_retained == 0
    pressed(store, "z")
    assert there(store, *OWN) == 0, "their room went to others"


def test_pages_may_be_retained_before_they_are_written(store: DiskStore) -> None:
    pressed(store, "x", 10)
    assert store.retain("a", KEYS, 60.0) == 12
    stored(store, *OWN)
    pressed(store, "y")
    assert there(store, *OWN) == 12


def test_pages_retained_behind_the_back_of_a_queue_of_victims_stay(store: DiskStore) -> None:
    stored(store, *OWN)
    pressed(store, "x", 60)
    assert store.stats().pages_evicted > 0, "the victims to come are chosen already"
    left = [name for name in [("x", i) for i in range(60)] if there(store, name)][:10]
    store.retain("a", [key(name) for name in left], 60.0)
    pressed(store, "y")
    assert there(store, *left) == len(left) == 10


def test_the_next_call_of_an_owner_takes_the_place_of_its_last(store: DiskStore) -> None:
    stored(store, *OWN)
    store.retain("a", KEYS, 60.0)
    assert store.retain("a", KEYS[:4], 60.0) == 4
    pressed(store, "x")
    assert there(store, *OWN) == there(store, *OWN[:4]) == 4
    assert store.retain("a", KEYS, 0.0) == 0 == store.stats().pages_retained
    pressed(store, "y")
    assert there(store, *OWN) == 0


def test_a_page_of_two_owners_stays_as_long_as_one_of_them_keeps_it(
    store: DiskStore, clock: Scripted
) -> None:
    stored(store, *OWN)
    store.retain("a", KEYS[:8], 10.0)
    store.retain("b", KEYS[4:], 60.0)
    store.retain("b", KEYS[4:8], 60.0)
    clock.seconds += 20.0
    pressed(store, "x")
    assert there(store, *OWN) == there(store, *OWN[4:8]) == 4


def test_half_of_the_store_can_be_retained_and_the_first_pages_are(store: DiskStore) -> None:
    pressed(store, "x", 60)
    many = [("many", i) for i in range(50)]
    taken = store.retain("a", [key(name) for name in many], 60.0)
    assert taken == store.stats().capacity_bytes // 2 // SIZE
    assert store.retain("b", KEYS, 60.0) == 0
    stored(store, *many)
    pressed(store, "y")
    assert there(store, *many) == there(store, *many[:taken]) == taken


def test_pages_retained_in_an_empty_store_count_once_pages_have_a_size(store: DiskStore) -> None:
    many = [key(("many", i)) for i in range(40)]
    assert store.retain("a", many, 60.0) == 40
    stored(store, *OWN)
    assert store.retain("b", KEYS, 60.0) == 0


def test_where_nothing_else_can_leave_retained_pages_do(store: DiskStore) -> None:
    stored(store, *OWN)
    store.retain("a", KEYS, 60.0)
    table = store._core.table
    pressed(store, "x")
    rows = table.find([key(("x", i)) for i in range(200)], KV)
    pinned = rows[rows >= 0]
    table.pin(pinned)
    stored(store, "new")
    assert there(store, "new") == 1 and there(store, *OWN) == 11
    table.unpin(pinned)


def test_a_page_is_kept_in_all_pools_and_its_segment_stays(store: DiskStore) -> None:
    states = named(OWN[:2], STATE)
    put(store, states, "state")
    stored(store, *OWN)
    store.retain("a", KEYS, 60.0)
    pressed(store, "x")
    assert there(store, *OWN) == 12
    assert store.lookup(list(states), "state") == [Lookup.HIT] * 2


def test_what_is_cleared_is_not_retained_any_more(store: DiskStore) -> None:
    store.retain("a", KEYS, 60.0)
    stored(store, *OWN)
    store.clear()
    stored(store, *OWN)
    pressed(store, "x")
    assert there(store, *OWN) == 0


def test_a_retained_page_can_be_deleted(store: DiskStore) -> None:
    stored(store, *OWN)
    store.retain("a", KEYS, 60.0)
    assert store.delete(KEYS) == 12 and there(store, *OWN) == 0
