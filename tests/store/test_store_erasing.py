"""A delete or clear that was answered holds: no later opening of the folder finds what was deleted,
however the process ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest
from patience import beside
from scripted import Scripted, only
from store_pages import found, key, killed, lose_the_end, named, open_at, put, read, segments

from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup, PageKey

T = TypeVar("T")
PAGES, NEW = named(range(10)), named(["new"])
SMALL = {"capacity_bytes": 1 << 20, "segment_bytes": 1 << 20}
"""Room for about a hundred pages."""


def fill(store: DiskStore) -> dict[PageKey, bytes]:
    """As many pages as fit; the first to go first."""
    pages: dict[PageKey, bytes] = {}
    while store.stats().pages_evicted == 0:
        page = named([len(pages)])
        put(store, page)
        pages |= page
    return {name: data for name, data in pages.items() if store.lookup([name]) == [Lookup.HIT]}


def missing(store: DiskStore, pages: dict[PageKey, bytes]) -> dict[PageKey, bytes]:
    return {name: pages[name] for name in pages if store.lookup([name]) == [Lookup.MISS]}


def held(env: Scripted, call: str, work: Callable[[], T]) -> Future[T]:
    """Begins something that waits at this call for 0.1 s from now on."""
    env.holds = only(call)
    working = beside(work)
    assert env.entered.wait(60)
    threading.Timer(0.1, env.gate.set).start()
    return working


def test_pages_evicted_for_writes_that_failed_stay_deleted(tmp_path: Path) -> None:
    env = Scripted()
    store = open_at(tmp_path, env=env, **SMALL)
    pages = fill(store)
    env.fails = only("page")
    assert set(put(store, named(("new", i) for i in range(20)))) == {PutOutcome.REFUSED}
    env.fails = only()
    gone = missing(store, pages)
    assert len(gone) == 20 and store.delete(list(gone)) == 0
    store.close()
    store = open_at(tmp_path, **SMALL)
    assert found(store, gone) == 0 and found(store, pages) == len(pages) - 20


@pytest.mark.parametrize("torn", [False, True], ids=["log whole", "log torn"])
@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_page_whose_slot_is_being_written_over_stays_deleted_when_the_process_is_killed(
    tmp_path: Path, how: str, torn: bool
) -> None:
    env = Scripted()
    store = open_at(tmp_path / "root", env=env, **SMALL)
    pages = fill(store)
    writing = held(env, "page", lambda: put(store, NEW))
    gone = missing(store, pages)
    assert len(gone) == 1
    if how == "delete":
        assert store.delete(list(gone)) == 0
    else:  # the new page too, without the one it replaced
        assert store.clear() == len(pages)
    root = killed(store, tmp_path / "copy")
    if torn:
        lose_the_end(root)
    again = open_at(root, **SMALL)
    assert found(again, gone) == 0
    assert found(again, pages) == (len(pages) - 1 if how == "delete" else 0)
    writing.result(60)


def test_a_page_that_is_being_written_is_deleted_as_soon_as_it_is_there(tmp_path: Path) -> None:
    env = Scripted()
    store = open_at(tmp_path, env=env)
    writing = held(env, "page", lambda: put(store, NEW))
    assert store.lookup(list(NEW)) == [Lookup.PENDING]
    assert store.delete(list(NEW)) == 1
    assert writing.result(60) == [PutOutcome.STORED]
    assert store.lookup(list(NEW)) == [Lookup.MISS]
    store.close()
    assert found(open_at(tmp_path), NEW) == 0


def test_a_page_refused_because_nobody_knows_whether_it_reached_the_device_stays_deleted(
    tmp_path: Path,
) -> None:
    env = Scripted()
    store = open_at(tmp_path, env=env, durable=True)
    env.fails = only("sync seg")
    assert put(store, NEW) == [PutOutcome.REFUSED]
    env.fails = only()
    assert store.delete(list(NEW)) == 0
    store.close()
    lose_the_end(tmp_path)
    assert found(open_at(tmp_path), NEW) == 0


def test_a_delete_is_not_answered_before_another_one_has_erased_the_page(tmp_path: Path) -> None:
    env = Scripted()
    store = open_at(tmp_path / "root", env=env)
    put(store, NEW)
    first = held(env, "head", lambda: store.delete(list(NEW)))
    assert store.delete(list(NEW)) == 0
    assert found(open_at(killed(store, tmp_path / "copy")), NEW) == 0
    assert first.result(60) == 1


def test_a_delete_is_not_answered_before_the_segment_of_an_evicted_page_is_removed(
    tmp_path: Path,
) -> None:
    env = Scripted()
    store = open_at(tmp_path / "root", env=env, capacity_bytes=1 << 20, segment_bytes=1 << 19)
    pages = fill(store)
    writing = held(env, "unlink seg", lambda: put(store, named(["larger"], 60_000)))
    gone = missing(store, pages)
    assert gone and store.delete(list(gone)) == 0
    assert found(open_at(killed(store, tmp_path / "copy")), gone) == 0
    writing.result(60)


# What could not be written or removed.


@pytest.fixture
def env() -> Scripted:
    return Scripted()


@pytest.fixture
def filled(tmp_path: Path, env: Scripted) -> DiskStore:
    store = open_at(tmp_path / "root", env=env)
    put(store, PAGES)
    return store


@pytest.mark.parametrize("torn", [False, True], ids=["log whole", "log torn"])
def test_pages_stay_deleted_whose_segment_can_neither_be_removed_nor_spoiled(
    tmp_path: Path, env: Scripted, filled: DiskStore, torn: bool
) -> None:
    env.fails = only("unlink seg", "segment")
    assert filled.clear() == 10 and len(segments(filled)) == 1
    root = killed(filled, tmp_path / "copy")
    if torn:
        lose_the_end(root)
    assert found(open_at(root), PAGES) == 0


def test_a_page_stays_deleted_although_neither_its_slot_nor_the_log_took_it(
    tmp_path: Path, env: Scripted, filled: DiskStore
) -> None:
    tried: list[str] = []

    def once(call: str) -> bool:
        tried.append(call)
        return call == "head" or (call == "log" and tried.count("log") == 1)

    env.fails = once
    assert filled.delete([key(0)]) == 1
    again = open_at(killed(filled, tmp_path / "copy"))
    assert found(again, PAGES) == 9 and found(again, named([0])) == 0


def test_a_log_that_cannot_grow_still_rules_out_what_it_says_is_gone(
    tmp_path: Path, env: Scripted, filled: DiskStore
) -> None:
    env.fails = only("head")
    assert filled.delete([key(0)]) == 1
    env.fails = only("log")
    assert put(filled, NEW) == [PutOutcome.STORED]
    again = open_at(killed(filled, tmp_path / "copy"))
    assert found(again, PAGES | NEW) == 10 and found(again, named([0])) == 0


def test_what_a_killed_process_wrote_last_and_another_deleted_does_not_come_back_with_the_slots_headers(
    tmp_path: Path, env: Scripted, filled: DiskStore
) -> None:
    def kill(call: str) -> None:
        if call == "log" and not (tmp_path / "copy").exists():
            killed(filled, tmp_path / "copy")  # the page is written, its record not

    env.before = kill
    put(filled, NEW)
    filled.close()
    after = open_at(tmp_path / "copy")
    assert after.lookup(list(NEW)) == [Lookup.MISS] and after.delete(list(NEW)) == 0
    more = named(["more"], 20_000)  # in a segment of its own
    put(after, more)
    root = killed(after, tmp_path / "again")
    lose_the_end(root)
    again = open_at(root)
    assert found(again, PAGES | more) == 11 and found(again, NEW) == 0


def test_a_page_dropped_because_it_could_not_be_read_stays_deleted(
    tmp_path: Path, env: Scripted, filled: DiskStore
) -> None:
    page = named([0])
    env.fails = only("read")
    outcomes = [read(filled, {key(0): 5000})[0][0] for _ in range(3)]
    assert outcomes == [ReadOutcome.FAILED, ReadOutcome.FAILED, ReadOutcome.MISS]
    env.fails = only("log")
    assert filled.delete([key(0)]) == 0
    root = killed(filled, tmp_path / "copy")
    lose_the_end(root)
    assert found(open_at(root), page) == 0


def test_a_page_deleted_while_it_is_read_is_right_or_a_miss_and_stays_deleted(
    tmp_path: Path, env: Scripted, filled: DiskStore
) -> None:
    env.holds = only("read")
    reading = beside(lambda: read(filled, {key(0): 5000}))
    assert env.entered.wait(60)
    assert filled.delete([key(0)]) == 1  # does not wait for readers
    assert found(open_at(killed(filled, tmp_path / "copy")), named([0])) == 0
    env.gate.set()
    assert reading.result(60)[0][0] is ReadOutcome.MISS


def test_with_durable_a_delete_is_synced_before_it_is_answered(tmp_path: Path) -> None:
    env, calls = Scripted(), []
    store = open_at(tmp_path, env=env, durable=True)
    put(store, named(range(3)))
    env.before = calls.append
    assert store.delete([key(0)]) == 1
    at = calls.index
    assert at("head") < at("sync seg-00000001") and at("log") < at("sync index.log")
    calls.clear()
    assert store.clear() == 2
    assert "unlink seg-00000001" in calls and calls[-1] == "sync tp0"


def test_slots_of_deleted_pages_are_written_again(tmp_path: Path) -> None:
    store = open_at(tmp_path, **SMALL)
    pages = fill(store)
    evicted = store.stats().pages_evicted
    for turn in range(3):
        gone = list(pages)[:10]
        assert store.delete(gone) == 10
        fresh = named((turn, i) for i in range(10))
        assert put(store, fresh) == [PutOutcome.STORED] * 10
        pages = {name: data for name, data in (pages | fresh).items() if name not in gone}
        assert found(store, pages) == len(pages)
    assert store.stats().pages_evicted == evicted
