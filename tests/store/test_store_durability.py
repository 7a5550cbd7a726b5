"""What was said to be stored is found again: although the index log could not be written, and with
`durable` once it is said.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_pages import IDENTITY, content, key, open_at, put, read

from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk import index_log
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import PUT
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup, PageKey

STORED = PutOutcome.STORED


def pages(name: str) -> dict[PageKey, bytes]:
    return {key((name, i)): content((name, i), 5000) for i in range(5)}


class FullEnv(Env):
    """While `full`, slots can be written, which have their space, and no index log grows or is
    made.
    """

    def __init__(self) -> None:
        self.full = False
        self._logs: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        (self._logs.add if os.path.basename(path).startswith("index.log") else self._logs.discard)(
            fd
        )
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.full and fd in self._logs:
            raise OSError(errno.ENOSPC, "no space left")
        return super().pwritev(fd, buffers, offset)


def killed(store: DiskStore, to: Path) -> DiskStore:
    """The store that is found after its owner is killed now."""
    shutil.copytree(Path(store.folder).parent.parent, to)
    return open_at(to)


def test_a_killed_process_loses_no_page_although_the_log_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_log, "_AGAIN_S", 0.0)
    env = FullEnv()
    store = open_at(tmp_path / "root", env=env)
    kept = pages("before") | pages("full") | pages("still full")
    assert put(store, pages("before") | {key("deleted"): content(0, 5000)}) == [STORED] * 6
    env.full = True
    assert store.delete([key("deleted")]) == 1
    assert put(store, pages("full")) == put(store, pages("still full")) == [STORED] * 5
    again = killed(store, tmp_path / "full")
    assert read(again, dict.fromkeys(kept, 5000)) == [
        (ReadOutcome.OK, data) for data in kept.values()
    ]
    assert again.lookup([key("deleted")]) == [Lookup.MISS]
    again.close()
    env.full = False
    assert put(store, pages("after")) == [STORED] * 5
    records, whole = IndexLog(Env(), store.folder, IDENTITY.fingerprint).load(slots=100)
    assert whole and (records["kind"] == PUT).sum() == 20
    store.close()


def test_a_log_that_cannot_be_made_is_not_tried_with_every_put(tmp_path: Path) -> None:
    env = FullEnv()
    store = open_at(tmp_path, env=env)
    env.full = True
    put(store, pages("lost"))
    opened: list[str] = []
    monitored = env.open
    env.open = lambda path, flags: (opened.append(path), monitored(path, flags))[1]  # type: ignore[method-assign]
    for i in range(5):
        put(store, pages(f"full {i}"))
    assert [os.path.basename(path) for path in opened if "index" in os.path.basename(path)] == [
        "index.log.new"
    ]
    assert not Path(store.folder, "index.log.new").exists()
    env.full = False
    store.close()
    assert Path(store.folder, "index.log").exists()


def test_with_durable_a_page_without_its_record_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_log, "_AGAIN_S", 0.0)
    env = FullEnv()
    store = open_at(tmp_path / "root", env=env, durable=True)
    assert put(store, pages("before")) == [STORED] * 5
    env.full = True
    for _ in range(2):
        assert put(store, pages("full")) == [PutOutcome.REFUSED] * 5
        assert store.lookup(list(pages("full"))) == [Lookup.MISS] * 5
        assert not store.sync()
    env.full = False
    assert put(store, pages("full")) == [STORED] * 5
    assert store.sync()
    again = killed(store, tmp_path / "copy")
    assert again.stats().pages == 10
    again.close()
    store.close()


def test_a_page_is_synced_after_it_was_written_whoever_syncs_beside_it(tmp_path: Path) -> None:
    synced: list[str] = []

    class Slow(Env):
        native = False
        gate = threading.Event()
        entered = threading.Event()

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if threading.current_thread().name == "slow" and sum(map(len, buffers)) > 4096:
                self.entered.set()
                self.gate.wait(60)
            return super().pwritev(fd, buffers, offset)

        def sync(self, fd: int) -> None:
            synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            super().sync(fd)

    env = Slow()
    store = open_at(tmp_path, env=env, durable=True)
    put(store, pages("before"))
    outcomes: list[PutOutcome] = []
    slow = threading.Thread(target=lambda: outcomes.extend(put(store, pages("slow"))), name="slow")
    slow.start()
    assert env.entered.wait(60)
    assert put(store, pages("beside")) == [STORED] * 5
    synced.clear()
    env.gate.set()
    slow.join(60)
    assert outcomes == [STORED] * 5
    assert synced == ["seg-00000001", "index.log"]
    store.close()


def test_a_sync_that_leaves_it_to_another_ends_after_it(tmp_path: Path) -> None:
    ended: list[int] = []

    class Slow(Env):
        gate = threading.Event()
        entered = threading.Event()

        def sync(self, fd: int) -> None:
            if "seg-" in os.readlink(f"/proc/self/fd/{fd}"):
                self.entered.set()
                self.gate.wait(60)
                ended.append(fd)
            super().sync(fd)

    env = Slow()
    store = open_at(tmp_path, env=env)
    put(store, pages("all"))
    other = threading.Thread(target=store.sync)
    other.start()
    assert env.entered.wait(60)
    threading.Timer(0.1, env.gate.set).start()
    assert store.sync() and len(ended) == 1
    other.join(60)
    store.close()
