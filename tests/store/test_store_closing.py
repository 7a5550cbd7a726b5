"""What is under way when a store is closed ends before its folder can be another owner's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_pages import IDENTITY, content, key, open_at, put

from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.env import Env
from sgl_kvtier.store.format import RECORD
from sgl_kvtier.store.index_log import IndexLog


class SlowEnv(Env):
    """One kind of call on segments waits at a gate, once it is told to; what ended is noted, as is the end of the lock."""

    native = False

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
