"""What is under way when a store is closed ends before its folder can be another owner's."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_pages import IDENTITY, IO_KINDS, aligned, content, io_settings, key, open_at, put, read

from sgl_kvtier import open_store
from sgl_kvtier.errors import StoreBusyError
from sgl_kvtier.store.base import PageRead, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import RECORD
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.io import jobs, native_threads
from sgl_kvtier.types import Lookup


class SlowEnv(Env):
    """One kind of call on segments waits at a gate, once it is told to; what ended is noted, as is
    the end of the lock.
    """

    def __init__(self, slow: str) -> None:
        self._slow = slow
        self._lock_fd = -1
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.order: list[str] = []

    def _pass(self, call: str, act: Callable[[], None]) -> None:
        if call != self._slow or self.gate.is_set():
            return act()
        self.entered.set()
        self.gate.wait(60)
        act()
        self.order.append(call)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._pass("allocate", lambda: super(SlowEnv, self).allocate(fd, nbytes))

    def unlink(self, path: str) -> None:
        self._pass("unlink", lambda: super(SlowEnv, self).unlink(path))

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        if os.path.basename(path) == "lock":
            self._lock_fd = fd
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        if fd == self._lock_fd:
            self.order.append("given back")


def put_one(store: DiskStore) -> object:
    return put(store, {key("other size"): content(1, 50_000)})


@pytest.mark.parametrize(
    ("call", "work", "answer"),
    [("allocate", put_one, [PutOutcome.REFUSED]), ("unlink", lambda store: store.clear(), 3)],
    ids=["a segment is made", "a segment is removed"],
)
def test_segments_are_made_and_removed_before_the_folder_is_given_back(
    tmp_path: Path, call: str, work: Callable[[DiskStore], object], answer: object
) -> None:
    env = SlowEnv(call)
    store = open_at(tmp_path, env=env)
    put(store, {key(i): content(i, 5000) for i in range(3)})
    answers: list[object] = []
    worker = threading.Thread(target=lambda: answers.append(work(store)))
    env.gate.clear()
    worker.start()
    assert env.entered.wait(60)
    threading.Timer(0.1, env.gate.set).start()
    store.close()
    worker.join(60)
    assert env.order == [call, "given back"] and answers == [answer]
    open_at(tmp_path).close()


def test_a_log_that_was_closed_is_not_written_to_whatever_came_too_late(tmp_path: Path) -> None:
    log = IndexLog(Env(), str(tmp_path), IDENTITY.fingerprint)
    records = np.zeros(1, RECORD)
    assert log.rewrite(lambda: records) and log.append(records)
    log.close()
    before = (tmp_path / "index.log").read_bytes()
    assert not log.rewrite(lambda: records[:0]) and not log.append(records)
    assert (tmp_path / "index.log").read_bytes() == before
    assert not log.lost


class ForgetfulEnv(Env):
    """Runs out of memory at one kind of call, while it is told to."""

    native = False

    def __init__(self) -> None:
        self.at = ""
        self._logs: set[int] = set()

    def _call(self, call: str) -> None:
        if call == self.at:
            raise MemoryError(call)

    def open(self, path: str, flags: int) -> int:
        self._call(os.path.basename(path))
        fd = super().open(path, flags)
        (self._logs.add if os.path.basename(path).startswith("index.log") else self._logs.discard)(
            fd
        )
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in self._logs and self.at == "full log":
            raise OSError(errno.ENOSPC, "no space left")
        self._call(
            "append"
            if fd in self._logs
            else "page"
            if sum(map(len, buffers)) > 4096
            else "head"
            if offset
            else "segment"
        )
        return super().pwritev(fd, buffers, offset)

    def rename(self, old: str, new: str) -> None:
        self._call("rename")
        super().rename(old, new)


def closes(store: DiskStore) -> bool:
    closer = threading.Thread(target=store.close, daemon=True)
    closer.start()
    closer.join(30)
    return not closer.is_alive()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, KeyboardInterrupt])
def test_a_read_that_could_not_begin_leaves_nothing_to_wait_for(
    opened: Callable[..., DiskStore], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    store = opened()
    put(store, {key(0): content(0, 5000)})

    def fail(*_: object) -> None:
        raise error("no more")

    for module, name in ((native_threads.NativeReadJob, "begin"), (jobs.DiskReadJob, "__init__")):
        monkeypatch.setattr(module, name, fail)
    with pytest.raises(error):
        read(store, {key(0): 5000})
    monkeypatch.undo()
    assert read(store, {key(0): 5000}) == [(ReadOutcome.OK, content(0, 5000))]
    assert store.delete([key(0)]) == 1 and closes(store)


@pytest.mark.parametrize("priority", [1 << 70, "urgent", 1.5])
def test_a_priority_that_is_no_whole_number_leaves_nothing_to_wait_for(
    opened: Callable[..., DiskStore], priority: Any
) -> None:
    store = opened()
    put(store, {key(0): content(0, 5000)})
    with pytest.raises((TypeError, ValueError), match="priority of a read is a whole number"):
        read(store, {key(0): 5000}, priority=priority)
    assert read(store, {key(0): 5000}) == [(ReadOutcome.OK, content(0, 5000))]
    assert closes(store)


@pytest.mark.parametrize("at", ["page", "append", "seg-00000002", "segment", "index.log.new"])
def test_a_put_that_runs_out_of_memory_leaves_nothing_to_wait_for(tmp_path: Path, at: str) -> None:
    env = ForgetfulEnv()
    store = open_at(tmp_path, env=env)
    put(store, {key(0): content(0, 5000)})
    if at == "index.log.new":
        env.at = "full log"
        put(store, {key(1): content(1, 5000)})
    env.at = at
    pages = {key("small"): content("small", 5000), key("large"): content("large", 50_000)}
    with pytest.raises(MemoryError):
        put(store, pages)
    env.at = ""
    assert store.lookup(list(pages)) == [Lookup.MISS] * 2
    assert put(store, pages) == [PutOutcome.STORED] * 2
    assert read(store, {k: len(data) for k, data in pages.items()}) == [
        (ReadOutcome.OK, data) for data in pages.values()
    ]
    assert closes(store)
    open_at(tmp_path).close()


def test_a_damaged_page_that_cannot_be_dropped_for_lack_of_memory_ends_all_the_same(
    tmp_path: Path,
) -> None:
    env = ForgetfulEnv()
    store = open_at(tmp_path, env=env)
    put(store, {key(0): content(0, 5000)})
    assert store.damage(key(0))
    env.at = "head"
    assert read(store, {key(0): 5000})[0][0] in (ReadOutcome.CORRUPT, ReadOutcome.FAILED)
    env.at = ""
    assert closes(store)


@pytest.mark.parametrize("at", ["rename", "index.log.new"])
def test_a_folder_is_given_back_although_its_log_could_not_be_written_for_lack_of_memory(
    tmp_path: Path, at: str
) -> None:
    env = ForgetfulEnv()
    store = open_at(tmp_path, env=env)
    env.at = "full log"
    put(store, {key(0): content(0, 5000)})
    env.at = at
    with pytest.raises(MemoryError):
        store.close()
    store.close()
    again = open_at(tmp_path)
    assert read(again, {key(0): 5000}) == [(ReadOutcome.OK, content(0, 5000))]
    again.close()


# A store that is dropped without close: its folder is free again, for this process too.


def threads_of_stores() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("kvtier-")}


@pytest.mark.parametrize("alike", ["", "tp0"], ids=["alone", "shared"])
@pytest.mark.parametrize("kind", IO_KINDS)
def test_a_dropped_store_can_be_opened_again_with_its_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, alike: str
) -> None:
    settings = io_settings(kind)
    before = threads_of_stores()
    for turn in range(3):
        store = open_at(tmp_path, alike=alike, **settings)
        assert os.path.basename(store.folder) == "tp0"
        put(store, {key(turn): content(turn, 5000)})
        assert read(store, {key(0): 5000}) == [(ReadOutcome.OK, content(0, 5000))]
        del store
        gc.collect()
        end = time.monotonic() + 30
        while threads_of_stores() - before and time.monotonic() < end:
            time.sleep(0.01)
    assert not threads_of_stores() - before, "no thread of a dropped store is left"
    assert caplog.text.count("was dropped without close()") == 3


def test_a_read_in_flight_keeps_a_dropped_store_open_until_it_has_ended(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, {key(i): content(i, 5000) for i in range(100)})
    buffers = [aligned(5000) for _ in range(100)]
    job = store.read([PageRead(key(i), [b]) for i, b in enumerate(buffers)])
    del store
    gc.collect()
    assert job.wait(30)
    assert set(job.outcomes) == {ReadOutcome.OK}
    assert [bytes(b) for b in buffers] == [content(i, 5000) for i in range(100)]


def test_a_closed_store_is_dropped_without_a_word(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store = open_at(tmp_path)
    store.close()
    del store
    gc.collect()
    assert f"{tmp_path}/" not in caplog.text


def test_the_pages_beneath_stay_open_when_the_mapping_is_dropped(tmp_path: Path) -> None:
    pages = open_store(tmp_path, identity={"m": 1}, capacity_bytes=8 << 20).pages
    gc.collect()
    put(pages, {key(1): content(1, 5000)})
    assert read(pages, {key(1): 5000}) == [(ReadOutcome.OK, content(1, 5000))]
    pages.close()


def test_an_owner_in_another_container_with_the_same_process_id_is_not_taken_for_this_one(
    tmp_path: Path,
) -> None:
    store = open_at(tmp_path)
    folder = Path(store.folder)
    store.close()
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
