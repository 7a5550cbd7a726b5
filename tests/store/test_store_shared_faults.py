"""Siblings' folders that are empty, half made, or change while they are looked at: no open fails
because of them, following goes on, and the numbers stay right.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import all_of, beside, until
from scripted import Scripted, only
from store_pages import Open, found, key, killed, named, open_at, put, stored_at

from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.index.hashtable import HashTable
from sgl_kvtier.store.index.slots import SlotTable, State
from sgl_kvtier.store.siblings import sharing
from sgl_kvtier.store.siblings.folder import SiblingFolder
from sgl_kvtier.types import Lookup

NBYTES = 5000
PAGES, MORE = named(range(20)), named(range(20, 40))
pytestmark = pytest.mark.usefixtures("only_when_told")


# Nothing there


def test_a_store_without_a_page_opens_beside_one_that_deleted_what_nobody_had(owner: Open) -> None:
    first, second = owner(), owner()
    second.follow()
    assert second.delete([key("nobody's")]) == 0
    third = owner()
    assert third.stats().follow_failures == 0
    for store in (first, second, third):
        store.close()
    again = owner()
    assert put(again, PAGES) == [PutOutcome.STORED] * 20 and found(again, PAGES) == 20


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_store_without_a_page_follows_a_sibling_that_deletes(owner: Open, how: str) -> None:
    first, second = owner(), owner()
    second.follow()
    _ = second.clear() if how == "clear" else second.delete(list(PAGES))
    first.follow()
    put(second, PAGES)
    first.follow()
    assert found(first, PAGES) == 20 and first.stats().follow_failures == 0


@pytest.mark.parametrize("name", ["gone", "index.log", "seg-00000001", "wanted", "lock"])
@pytest.mark.parametrize(
    "data", [b"", b"\0" * 64, b"kvtindx\x01", b"\xff" * 9000], ids=["empty", "zeros", "cut", "ones"]
)
def test_an_open_does_not_fail_because_of_what_a_sibling_holds(
    owner: Open, name: str, data: bytes
) -> None:
    first = owner()
    put(first, PAGES)
    first.delete([key(0)])
    first.close()
    Path(first.folder, name).write_bytes(data)
    second = owner(writes=False)
    assert second.folder != first.folder
    assert put(second, MORE) == [PutOutcome.STORED] * 20
    second.follow()
    assert found(second, MORE) == 20 and second.stats().follow_failures == 0


# What nobody expected


class MistakeError(Exception):
    pass


def test_an_unexpected_exception_about_one_folder_leaves_the_others_and_is_tried_again(
    owner: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    put(second, MORE)
    news = SiblingFolder.news
    bad = {first.folder}

    def fails(folder: SiblingFolder) -> tuple[bool, np.ndarray]:
        records = news(folder)
        if folder.path in bad:
            raise MistakeError("of ours")
        return records

    monkeypatch.setattr(SiblingFolder, "news", fails)
    third = owner()
    third.follow()
    assert found(third, MORE) == 20 and found(third, PAGES) == 0
    assert third.stats().follow_failures == 2
    assert caplog.text.count("Please report it") == 1 and "MistakeError" in caplog.text
    bad.clear()
    third.follow()
    assert found(third, PAGES | MORE) == 40


def test_the_following_thread_outlives_an_unexpected_exception(
    owner: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_TICK_S", 0.005)
    monkeypatch.setattr(sharing, "_ALONE_S", 0.005)
    first, second = owner(), owner()
    look, failed = second._sharing._following.look, threading.Event()  # type: ignore[union-attr]

    def fails() -> None:
        if not failed.is_set():
            failed.set()
            raise MistakeError("of ours")
        look()

    monkeypatch.setattr(second._sharing._following, "look", fails)  # type: ignore[union-attr]
    assert failed.wait(60)
    put(first, PAGES)
    until(lambda: second.lookup(list(PAGES)) == [Lookup.HIT] * 20)
    assert found(second, PAGES) == 20 and second.stats().follow_failures == 1


def test_a_delete_that_failed_to_be_carried_out_is_carried_out_at_the_next_look(
    owner: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    second.delete(list(PAGES))
    following = first._sharing._following  # type: ignore[union-attr]
    rows = following.deleted_rows

    def fails() -> np.ndarray:
        raise MistakeError("of ours")

    monkeypatch.setattr(following, "deleted_rows", fails)
    first.follow()
    assert first.stats().follow_failures == 1
    monkeypatch.setattr(following, "deleted_rows", rows)
    first.follow()
    assert found(first, PAGES) == 0


# Numbers


def test_the_number_of_own_pages_is_right_at_every_moment_while_siblings_pages_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, seen = SlotTable(), []
    for name in ("insert", "remove"):
        change = getattr(HashTable, name)

        def looks(self: HashTable, *args: Any, change: Any = change) -> None:
            change(self, *args)
            seen.append(len(table))

        monkeypatch.setattr(HashTable, name, looks)
    table.add_rows(10, 1)
    rows = np.arange(8)
    keys, ones = np.arange(32, dtype=np.uint64).reshape(8, 4), np.ones(8, np.int64)
    pools = ones * table.pool_id("kv")
    table.enter(rows, keys, pools, ones, ones.astype(np.uint64), theirs=True)
    table.drop(rows)
    assert seen == [0, 0]


def test_the_counters_say_what_the_table_does_after_puts_deletes_clears_and_evictions_at_once(
    owner: Open,
) -> None:
    settings = {"capacity_bytes": 4 << 20, "segment_bytes": 256 << 10}
    stores = [owner(**settings) for _ in range(3)]
    stop = threading.Event()

    def work(number: int, store: DiskStore) -> None:
        step = 0
        while not stop.is_set():
            step += 1
            names = [key((number, step, i)) for i in range(60)]
            put(store, dict.fromkeys(names, b"x" * (500 if step % 2 else 5000)))
            store.follow()
            store.delete(names[::7])
            if step % 9 == number:
                store.clear()

    def watch(store: DiskStore) -> None:
        while not stop.is_set():
            stats = store.stats()
            assert stats.pages >= 0 and stats.bytes_on_disk >= 0
            put(store, {})

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        working = [beside(partial(work, i, store)) for i, store in enumerate(stores)]
        working += [beside(partial(watch, store)) for store in stores]
        stop.wait(1.5)
        stop.set()
        all_of(working)
    finally:
        sys.setswitchinterval(interval)
    for store in stores:
        table = store._core.table
        table.check()
        own = (table.state == State.LIVE) | (table.state == State.WRITING)
        assert store.stats().pages == int(own.sum())
        assert store.stats().follow_failures == 0
        free = [row for rows in store._room._free.values() for row in rows]
        mine = [
            row
            for segment in store._room.segments.values()
            for row in range(segment.base, segment.base + segment.slots)
        ]
        assert sorted(free) == sorted(row for row in mine if table.state[row] == State.FREE)


# A folder half made


def test_a_folder_that_was_made_before_its_lock_is_followed_once_it_has_an_owner(
    owner: Open,
) -> None:
    first = owner()
    other = Path(first.folder).parent / "tp0.2"
    other.mkdir(mode=0o700)
    hour = 3600
    # As if it had been made long ago: nothing tells of it when its owner fills it.
    os.utime(other.parent, (hour, hour))
    first.follow()
    second = owner()
    assert Path(second.folder) == other
    put(second, PAGES)
    os.utime(other.parent, (hour, hour))
    first.follow()
    assert found(first, PAGES) == 20
    assert first.delete(list(PAGES)) == 20
    second.follow()
    assert found(second, PAGES) == 0


# Telling


def gone(call: str) -> bool:
    """A list of deletes is written."""
    return call.startswith("open") and "/gone." in call


@pytest.mark.parametrize("all_of_them", [False, True], ids=["delete", "clear"])
def test_a_delete_that_siblings_could_not_be_told_does_not_count_their_pages_and_is_told_later(
    owner: Open, caplog: pytest.LogCaptureFixture, *, all_of_them: bool
) -> None:
    env = Scripted(native=True)
    first, second = owner(), owner(env=env)
    put(first, PAGES)
    put(second, MORE)
    second.follow()
    env.fails, env.error = gone, errno.ENOSPC
    wanted = PAGES | MORE
    assert (second.clear() if all_of_them else second.delete(list(wanted))) == 20
    assert found(second, wanted) == 0
    assert "telling other servers what was deleted failed" in caplog.text
    for _ in range(2):
        second.follow()
        first.follow()
    assert found(first, PAGES) == 20 and found(second, wanted) == 0
    env.fails = only()
    env.seconds = 60
    second.follow()
    first.follow()
    assert found(first, PAGES) == found(second, wanted) == 0


def test_a_delete_before_the_own_list_could_be_read_is_told_beside_the_earlier_ones(
    owner: Open,
) -> None:
    first, second = owner(), owner()
    put(first, PAGES | MORE)
    assert second.delete(list(PAGES)) == 20
    second.close()
    env = Scripted(native=True)
    env.fails = lambda call: call == f"open {second.folder}/gone"
    again = owner(env=env)
    assert again.folder == second.folder and again.delete(list(MORE)) == 0
    env.fails = only()
    again.follow()
    first.follow()
    assert found(first, PAGES | MORE) == 0


def test_what_could_not_be_told_is_told_at_the_latest_when_the_store_is_closed(owner: Open) -> None:
    env = Scripted(native=True)
    first, second = owner(), owner(env=env)
    put(first, PAGES)
    second.follow()
    env.fails, env.error = gone, errno.ENOSPC
    assert second.delete(list(PAGES)) == 0
    env.fails = only()
    second.close()
    first.follow()
    assert found(first, PAGES) == 0


# Clocks


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("all_of_them", [False, True], ids=["delete", "clear"])
def test_a_page_written_after_a_delete_is_found_although_the_clock_was_set_back_before(
    owner: Open, *, all_of_them: bool, restarted: bool
) -> None:
    env = Scripted(native=True)
    first, second = owner(env=env), owner(env=env)
    env.ahead_s = 3600
    put(first, PAGES)
    second.follow()
    env.ahead_s = 0
    if restarted:
        second.close()
        second = owner(env=env)
    _ = first.clear() if all_of_them else first.delete(list(PAGES))
    second.follow()
    assert put(second, PAGES | MORE) == [PutOutcome.STORED] * 40
    first.follow()
    assert found(first, PAGES | MORE) == found(second, PAGES | MORE) == 40
    third = owner(env=env)
    assert found(third, PAGES | MORE) == 40
    second.close()
    assert found(owner(env=env), PAGES | MORE) == 40


@pytest.mark.parametrize("deleter", [0, 1])
@pytest.mark.parametrize("all_of_them", [False, True], ids=["delete", "clear"])
def test_the_last_page_written_by_a_clock_that_was_ahead_is_deleted_with_the_others(
    owner: Open, deleter: int, *, all_of_them: bool
) -> None:
    env = Scripted(native=True)
    owners = owner(env=env), owner(env=env)
    holder = owners[1 - deleter]
    env.ahead_s = 3600
    put(holder, PAGES)
    env.ahead_s = 0
    owners[deleter].follow()
    _ = owners[deleter].clear() if all_of_them else owners[deleter].delete(list(PAGES))
    assert found(owner(env=env), PAGES) == found(owners[deleter], PAGES) == 0
    holder.follow()
    assert found(holder, PAGES) == 0


def test_a_page_that_the_log_lacks_is_found_although_the_clock_was_set_back(tmp_path: Path) -> None:
    env = Scripted()
    env.ahead_s = 3600
    stored_at(tmp_path / "root", PAGES, env=env)
    env.ahead_s = 0
    store = open_at(tmp_path / "root", env=env)
    env.fails = only("log")
    assert put(store, MORE) == [PutOutcome.STORED] * 20
    again = open_at(killed(store, tmp_path / "copy"))
    assert found(again, PAGES | MORE) == 40


def test_pages_from_a_time_that_cannot_be_do_not_come_back_when_the_clock_is_right_again(
    tmp_path: Path,
) -> None:
    env = Scripted(native=True)
    env.ahead_s = 400 * 24 * 3600
    stored_at(tmp_path, PAGES, env=env)
    env.ahead_s = 0
    store = open_at(tmp_path, env=env)
    assert found(store, PAGES) == 0
    store.delete(list(PAGES))
    store.close()
    env.ahead_s = 400 * 24 * 3600
    assert found(open_at(tmp_path, env=env), PAGES) == 0


# Owners that stop, and folders that move


@contextmanager
def child(code: str, path: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process with an owner of the same pages. It is killed at the end."""
    begin = f"""
import sys, time
sys.path[:0] = [{os.path.dirname(__file__)!r}]
from pathlib import Path
from store_pages import key, named, open_at, put
from sgl_kvtier.types import Lookup
store = open_at(Path(sys.argv[1]), alike="tp0", capacity_bytes=256 << 20)
"""
    command = [sys.executable, "-c", begin + code, str(path), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


OWNER = """
put(store, named(range(20)))
print("ready", flush=True)
while Lookup.HIT in store.lookup([key(i) for i in range(20)]):
    time.sleep(0.01)
print("all gone", flush=True)
store.close()
"""


def test_a_stopped_owner_hinders_nobody_and_deletes_hold_for_it_once_it_goes_on(
    tmp_path: Path, owner: Open
) -> None:
    with child(OWNER, tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        second = owner()
        assert Path(second.folder).name == "tp0.2", "its folder is still its own"
        assert found(second, PAGES) == 20 and put(second, MORE) == [PutOutcome.STORED] * 20
        assert second.delete(list(PAGES)) == 20
        third = owner()
        assert found(third, PAGES) == 0 and found(third, MORE) == 20
        assert put(third, dict(list(PAGES.items())[:5])) == [PutOutcome.STORED] * 5
        second.follow()
        assert found(second, PAGES) == 5
        second.delete(list(PAGES))
        third.follow()
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "all gone\n"
        assert process.wait(60) == 0
        assert found(owner(), PAGES) == 0


WRITER = """
n = int(sys.argv[2])
while True:
    put(store, named(range(n, n + 8)))
    n += 8
    print(n, flush=True)
"""


def test_what_a_killed_owner_was_told_was_stored_is_found_by_siblings_open_and_opened_later(
    tmp_path: Path, owner: Open
) -> None:
    settings = {"capacity_bytes": 256 << 20}
    reader = owner(writes=False, **settings)
    kept = 0
    for _ in range(2):
        with child(WRITER, tmp_path, kept) as process:
            assert process.stdout is not None
            until_ = kept + 200
            while kept < until_:
                kept = int(process.stdout.readline())
        reader.follow()
        assert found(reader, named(range(kept))) == kept
        later = owner(writes=False, **settings)
        assert found(later, named(range(kept))) == kept
        later.close()


def test_a_process_id_that_is_used_again_keeps_no_folder_locked(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    first.close()
    # The process that had it has ended, and another one has its number by now.
    Path(first.folder, "lock").write_text(f"{os.getppid()}\n")
    second = owner()
    assert second.folder == first.folder and found(second, PAGES) == 20


def test_deletes_while_the_folder_was_moved_away_hold_once_it_is_back(
    tmp_path: Path, owner: Open
) -> None:
    env = Scripted(native=True)
    first, second = owner(env=env), owner()
    put(first, PAGES)
    put(second, MORE)
    first.follow()
    namespace = Path(first.folder).parent
    namespace.rename(tmp_path / "elsewhere")
    wanted = PAGES | MORE
    assert first.delete(list(wanted)) == 20, "its own ones, which it has open"
    put(first, {key("new"): b"x" * NBYTES})
    assert not namespace.exists()
    (tmp_path / "elsewhere").rename(namespace)
    env.seconds = 60
    first.follow()
    second.follow()
    assert found(first, wanted) == found(second, wanted) == 0
    assert found(second, {key("new"): b"x" * NBYTES}) == 1


def test_a_folder_that_takes_the_place_of_one_moved_away_is_not_touched_by_its_owner(
    tmp_path: Path, owner: Open
) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    namespace = Path(first.folder).parent
    namespace.rename(tmp_path / "elsewhere")
    third = owner()
    assert third.folder == first.folder
    put(third, MORE)
    for store in (first, second):
        store.follow()
        store.clear()
        put(store, PAGES)
        store.follow()
        assert found(third, MORE) == 20
    assert sorted(path.name for path in Path(third.folder).iterdir()) == [
        "index.log",
        "lock",
        "seg-00000001",
    ]


# Pages put while everything is deleted


@pytest.mark.parametrize("all_of_them", [False, True], ids=["delete", "clear"])
def test_a_page_that_a_sibling_puts_after_a_delete_was_told_is_found_by_the_deleter_too(
    owner: Open, monkeypatch: pytest.MonkeyPatch, *, all_of_them: bool
) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    second.follow()
    assert second._sharing is not None
    tell = second._sharing.delete

    def tell_and_look(keys: list[bytes], pool: str) -> bool:
        told = tell(keys, pool)
        first.follow()
        put(first, PAGES | MORE)
        second.follow()
        return told

    monkeypatch.setattr(second._sharing, "delete", tell_and_look)
    _ = second.clear() if all_of_them else second.delete(list(PAGES | MORE))
    second.follow()
    assert found(second, PAGES | MORE) == found(owner(), PAGES | MORE) == 40


@pytest.mark.parametrize("all_of_them", [False, True], ids=["delete", "clear"])
def test_a_delete_whose_process_was_killed_half_way_holds_for_all_or_for_none(
    tmp_path: Path, owner: Open, *, all_of_them: bool
) -> None:
    first, second = owner(path=tmp_path / "root"), owner(path=tmp_path / "root")
    put(first, PAGES)
    put(second, MORE)
    first.follow()
    assert first._sharing is not None
    # Its list is written, and none of its own pages is erased yet.
    first._sharing.delete([] if all_of_them else list(PAGES), "kv")
    killed(first, tmp_path / "killed")
    for store in (first, second):
        store.close()
    third, fourth = owner(path=tmp_path / "killed"), owner(path=tmp_path / "killed")
    assert Path(third.folder).name == "tp0"
    third.follow()
    fourth.follow()
    assert found(third, PAGES) == found(fourth, PAGES)
    put(third, PAGES)
    fourth.follow()
    assert found(third, PAGES) == found(fourth, PAGES) == 20
