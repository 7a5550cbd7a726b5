"""What is under way when a store is closed ends before its folder can be another owner's."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import beside, until, waits
from scripted import Scripted, only
from store_pages import (
    IDENTITY,
    IO_KINDS,
    aligned,
    begin,
    found,
    io_settings,
    key,
    named,
    open_at,
    put,
    stored_at,
)

from sgl_kvtier import open_store
from sgl_kvtier.errors import StoreBusyError
from sgl_kvtier.store.base import PageRead, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import RECORD
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.io import jobs, native_threads
from sgl_kvtier.types import Lookup

PAGE = named([0])


def put_one(store: DiskStore) -> object:
    return put(store, named(["other size"], 50_000))


@pytest.mark.parametrize(
    ("call", "work", "answer"),
    [("allocate", put_one, [PutOutcome.REFUSED]), ("unlink", lambda store: store.clear(), 3)],
    ids=["a segment is made", "a segment is removed"],
)
def test_segments_are_made_and_removed_before_the_folder_is_given_back(
    tmp_path: Path, call: str, work: Callable[[DiskStore], object], answer: object
) -> None:
    env = Scripted(native=True)
    store = open_at(tmp_path, env=env)
    put(store, named(range(3)))
    env.holds = only(call)
    working = beside(partial(work, store))
    assert env.entered.wait(60)
    closing = beside(store.close)
    assert waits(closing)
    with pytest.raises(StoreBusyError):
        open_at(tmp_path, env=Scripted())
    env.gate.set()
    assert working.result(60) == answer
    closing.result(60)
    open_at(tmp_path)


def test_a_log_that_was_closed_is_not_written_to_whatever_came_too_late(tmp_path: Path) -> None:
    log = IndexLog(Env(), str(tmp_path), IDENTITY.fingerprint)
    records = np.zeros(1, RECORD)
    assert log.rewrite(lambda: records) and log.append(records)
    log.close()
    before = (tmp_path / "index.log").read_bytes()
    assert not log.rewrite(lambda: records[:0]) and not log.append(records)
    assert (tmp_path / "index.log").read_bytes() == before
    assert not log.lost


class Forgetful(Scripted):
    """Runs out of memory at one kind of call, while it is told to; `full`: no log can grow."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.full = "", False
        self.error = errno.ENOSPC
        self.before = self.forget
        self.fails = lambda call: self.full and call == "log"

    def forget(self, call: str) -> None:
        if self.at and (call == self.at or call.endswith(f"/{self.at}")):
            raise MemoryError(call)


def closes(store: DiskStore) -> bool:
    beside(store.close).result(30)
    return True


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, KeyboardInterrupt])
def test_a_read_that_could_not_begin_leaves_nothing_to_wait_for(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    put(store, PAGE)

    def fail(*_: object) -> None:
        raise error("no more")

    for module, name in ((native_threads.NativeReadJob, "begin"), (jobs.DiskReadJob, "__init__")):
        monkeypatch.setattr(module, name, fail)
    with pytest.raises(error):
        found(store, PAGE)
    monkeypatch.undo()
    assert found(store, PAGE) == 1
    assert store.delete(list(PAGE)) == 1 and closes(store)


@pytest.mark.parametrize("priority", [1 << 70, "urgent", 1.5])
def test_a_priority_that_is_no_whole_number_leaves_nothing_to_wait_for(
    store: DiskStore, priority: Any
) -> None:
    put(store, PAGE)
    with pytest.raises((TypeError, ValueError), match="priority of a read is a whole number"):
        begin(store, PAGE, priority=priority)
    assert found(store, PAGE) == 1
    assert closes(store)


@pytest.mark.parametrize("at", ["page", "log", "seg-00000002", "segment", "index.log.new"])
def test_a_put_that_runs_out_of_memory_leaves_nothing_to_wait_for(tmp_path: Path, at: str) -> None:
    env = Forgetful()
    store = open_at(tmp_path, env=env)
    put(store, PAGE)
    if at == "index.log.new":
        env.full = True
        put(store, named([1]))
        env.full = False
    env.at = at
    pages = named(["small"]) | named(["large"], 50_000)
    with pytest.raises(MemoryError):
        put(store, pages)
    env.at = ""
    assert store.lookup(list(pages)) == [Lookup.MISS] * 2
    assert put(store, pages) == [PutOutcome.STORED] * 2
    assert found(store, pages) == 2
    assert closes(store)
    open_at(tmp_path)


def test_a_damaged_page_that_cannot_be_dropped_for_lack_of_memory_ends_all_the_same(
    tmp_path: Path,
) -> None:
    env = Forgetful()
    store = open_at(tmp_path, env=env)
    put(store, PAGE)
    assert store.damage(key(0))
    env.at = "head"
    job = begin(store, PAGE)
    assert job.wait(60) and job.outcomes[0] in (ReadOutcome.CORRUPT, ReadOutcome.FAILED)
    env.at = ""
    assert closes(store)


@pytest.mark.parametrize("at", ["rename index.log", "index.log.new"])
def test_a_folder_is_given_back_although_its_log_could_not_be_written_for_lack_of_memory(
    tmp_path: Path, at: str
) -> None:
    env = Forgetful()
    store = open_at(tmp_path, env=env)
    env.full = True
    put(store, PAGE)
    env.at, env.full = at, False
    with pytest.raises(MemoryError):
        store.close()
    store.close()
    assert found(open_at(tmp_path), PAGE) == 1


# A store that is dropped without close: its folder is free again, for this process too.


def threads_of_stores() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("kvtier-")}


@pytest.mark.parametrize("alike", ["", "tp0"], ids=["alone", "shared"])
@pytest.mark.parametrize("kind", IO_KINDS)
def test_a_dropped_store_can_be_opened_again_with_its_pages(
    tmp_path: Path, stores: list[DiskStore], caplog: pytest.LogCaptureFixture, kind: str, alike: str
) -> None:
    before = threads_of_stores()
    for turn in range(3):
        store = open_at(tmp_path, alike=alike, **io_settings(kind))
        assert os.path.basename(store.folder) == "tp0"
        put(store, named([turn]))
        assert found(store, PAGE) == 1
        del store
        stores.clear()
        gc.collect()
        until(lambda: not threads_of_stores() - before, 30)
    assert caplog.text.count("was dropped without close()") == 3


def test_a_read_in_flight_keeps_a_dropped_store_open_until_it_has_ended(
    tmp_path: Path, stores: list[DiskStore]
) -> None:
    store = open_at(tmp_path)
    pages = named(range(100))
    put(store, pages)
    buffers = [aligned(5000) for _ in pages]
    job = store.read([PageRead(name, [b]) for name, b in zip(pages, buffers, strict=True)])
    del store
    stores.clear()
    gc.collect()
    assert job.wait(30)
    assert set(job.outcomes) == {ReadOutcome.OK}
    assert [bytes(b) for b in buffers] == list(pages.values())


def test_a_closed_store_is_dropped_without_a_word(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, stores: list[DiskStore]
) -> None:
    open_at(tmp_path).close()
    stores.clear()
    gc.collect()
    assert f"{tmp_path}/" not in caplog.text


def test_the_pages_beneath_stay_open_when_the_mapping_is_dropped(tmp_path: Path) -> None:
    pages = open_store(tmp_path, identity={"m": 1}, capacity_bytes=8 << 20).pages
    gc.collect()
    put(pages, PAGE)
    assert found(pages, PAGE) == 1
    pages.close()


def test_an_owner_in_another_container_with_the_same_process_id_is_not_taken_for_this_one(
    tmp_path: Path,
) -> None:
    folder = stored_at(tmp_path, PAGE)
    held = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").write_text(f"{os.getpid()}\n")
        with pytest.raises(StoreBusyError, match="which is still running"):
            open_at(tmp_path)
    finally:
        os.close(held)


def test_a_store_dropped_at_the_end_of_a_process_ends_it_without_a_word(tmp_path: Path) -> None:
    code = (
        "from sgl_kvtier import open_store, page_key\n"
        f"s = open_store({str(tmp_path)!r}, identity={{'m': 1}}, capacity_bytes=8 << 20)\n"
        "s.put({page_key('a'): b'x'})\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
