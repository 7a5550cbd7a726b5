"""One capacity for all owners of the same pages: together they stay within it, and none of them is
left without room.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from store_pages import Open, found, named, on_disk, open_at, put, segments

from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.siblings import sharing
from sgl_kvtier.types import PageKey

CAPACITY = 4 << 20
SEGMENT = 512 << 10
BATCH = 30


@pytest.fixture(autouse=True)
def only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at siblings but those of the test; an owner asks for room as often as it likes."""
    monkeypatch.setattr(sharing, "_TICK_S", 3600.0)
    monkeypatch.setattr(sharing, "_ALONE_S", 3600.0)
    monkeypatch.setattr(sharing, "_AGAIN_S", 0.0)


@pytest.fixture
def owner(tmp_path: Path) -> Open:
    return partial(open_at, tmp_path, alike="tp0", capacity_bytes=CAPACITY, segment_bytes=SEGMENT)


def pages(name: object) -> dict[PageKey, bytes]:
    return named((name, i) for i in range(BATCH))


def fill(store: DiskStore, name: object, rounds: int = 30) -> None:
    for i in range(rounds):
        put(store, pages((name, i)))


def test_two_owners_that_write_all_the_time_stay_within_the_capacity_of_one(
    tmp_path: Path, owner: Open
) -> None:
    first, second = owner(), owner()
    for i in range(60):
        put(first, pages(("a", i)))
        put(second, pages(("b", i)))
        assert on_disk(tmp_path) <= CAPACITY
    first.follow()
    second.follow()
    assert on_disk(tmp_path) > CAPACITY // 2


def test_an_owner_that_comes_late_gets_its_part_and_no_more(tmp_path: Path, owner: Open) -> None:
    first = owner()
    fill(first, "a")
    whole = on_disk(Path(first.folder))
    second = owner()
    for i in range(40):
        outcomes = put(second, pages(("b", i)))
        for store in (first, second):
            store.follow()
        put(first, pages(("a again", i)))
        assert on_disk(tmp_path) <= CAPACITY
    assert outcomes == [PutOutcome.STORED] * BATCH
    parts = [on_disk(Path(store.folder)) for store in (first, second)]
    assert min(parts) >= whole // 2 - SEGMENT and sum(parts) >= whole - SEGMENT
    assert found(first, pages(("b", 39))) == BATCH


def test_an_owner_that_wants_nothing_takes_no_room_from_the_others(owner: Open) -> None:
    first = owner()
    fill(first, "a")
    held = len(segments(first))
    second = owner()
    for _ in range(10):
        second.follow()
        first.follow()
    fill(first, "b")
    assert len(segments(first)) == held


def test_what_a_folder_without_an_owner_holds_makes_room_its_coldest_pages_first(
    tmp_path: Path, owner: Open
) -> None:
    first = owner()
    second = owner()
    fill(first, "a")
    held = segments(first)
    names = {path.name for path in held}
    first.close()
    second.follow()
    warm = pages(("a", 29))
    assert found(second, warm) == BATCH
    fill(second, "b", rounds=4)
    left = {path.name for path in segments(first)}
    assert left < names and len(segments(second)) >= 1
    assert found(second, warm) == BATCH
    fill(second, "c", rounds=40)
    assert not segments(first) and len(segments(second)) >= len(held) - 1
    assert on_disk(tmp_path) <= CAPACITY
    # It is an empty folder now, which the next owner takes.
    third = owner()
    assert third.folder == first.folder and third.stats().pages == 0


def test_owners_whose_capacity_was_lowered_shrink_until_they_fit_together(
    tmp_path: Path, owner: Open
) -> None:
    first, second = owner(capacity_bytes=2 * CAPACITY), owner(capacity_bytes=2 * CAPACITY)
    for i in range(40):
        put(first, pages(("a", i)))
        put(second, pages(("b", i)))
    first.close()
    second.close()
    assert on_disk(tmp_path) > CAPACITY
    first, second = owner(), owner()
    for _ in range(20):
        first.follow()
        second.follow()
    assert on_disk(tmp_path) <= CAPACITY
    assert segments(first) and segments(second)


def test_of_two_that_make_a_segment_at_the_same_moment_at_most_one_keeps_it_too_many(
    tmp_path: Path, owner: Open
) -> None:
    class Both(Env):
        """The other owner makes a segment right after this one has reserved its own."""

        def __init__(self) -> None:
            self.meanwhile: list[Callable[[], object]] = []

        def allocate(self, fd: int, nbytes: int) -> None:
            super().allocate(fd, nbytes)
            while self.meanwhile:
                self.meanwhile.pop()()

    env = Both()
    first = owner(env=env)
    second = owner()
    i = 0
    while on_disk(tmp_path) + 2 * SEGMENT <= CAPACITY:
        put(first, pages(("a", i)))
        i += 1
    env.meanwhile.append(lambda: fill(second, "b", rounds=1))
    before = len(segments(first)) + len(segments(second))
    while env.meanwhile:
        put(first, pages(("a", i)))
        i += 1
    assert on_disk(tmp_path) <= CAPACITY
    assert len(segments(first)) + len(segments(second)) <= before + 1
