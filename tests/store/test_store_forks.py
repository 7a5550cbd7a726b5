"""A process forked from one with an open store: its store is closed and empty, hangs nowhere, and
keeps the folder from nobody.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from effort import examples
from patience import all_of, beside
from store_pages import begin, found, key, named, open_at, put, read

from sgl_kvtier.config import ThrottleConfig
from sgl_kvtier.lab.front.wrappers import Throttled
from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

PAGES = named(range(20))


def in_child(work: Callable[[], None]) -> str:
    """How a child ended that did this: nothing when it went well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(0)
        except BaseException:
            os.write(writing, traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return said if status else ""


@pytest.fixture
def filled(store: DiskStore) -> DiskStore:
    put(store, PAGES)
    return store


def test_in_the_child_every_page_is_a_miss_and_every_put_refused(filled: DiskStore) -> None:
    told: list[ReadOutcome] = []

    def work() -> None:
        assert filled.lookup([key(0)]) == [Lookup.MISS]
        filled.retain("a", [key(0)], 1.0)
        job = begin(
            filled, [key(0)], deadline_s=1.0, on_page=lambda _, outcome: told.append(outcome)
        )
        assert job.wait() and job.outcomes == told == [ReadOutcome.MISS] and job.in_flight == 0
        assert put(filled, named([0, "new"])) == [PutOutcome.REFUSED] * 2
        assert filled.delete([key(0)]) == filled.clear() == 0
        assert not filled.sync() and not filled.damage(key(0))
        assert filled.stats().pages == 0 and filled.index_bytes >= 0 and filled.io
        filled.close()
        filled.close()

    assert in_child(work) == ""
    assert found(filled, PAGES) == 20
    assert put(filled, named(["new"])) == [PutOutcome.STORED]


def test_a_child_that_goes_on_keeps_the_folder_from_nobody(
    filled: DiskStore, tmp_path: Path
) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)
        os._exit(0)
    filled.close()
    assert open_at(tmp_path).stats().pages == 20
    os.close(tell)
    os.waitpid(child, 0)
    os.close(told)


def test_a_child_may_drop_a_read_that_its_parent_began_and_end_by_itself(filled: DiskStore) -> None:
    jobs = [begin(filled, PAGES)]

    def work() -> None:
        jobs.clear()
        gc.collect()
        filled.close()

    assert in_child(work) == ""
    assert jobs[0].wait(60) and jobs[0].outcomes == [ReadOutcome.OK] * 20


def test_a_child_forked_while_other_threads_are_busy_hangs_nowhere(filled: DiskStore) -> None:
    stop = threading.Event()

    def work(thread: int) -> None:
        pages = named((thread, i) for i in range(8))
        while not stop.is_set():
            put(filled, pages)
            read(filled, dict.fromkeys(pages, 5000))
            filled.delete(list(pages))

    def child() -> None:
        assert filled.lookup([key(0)]) == [Lookup.MISS]
        assert put(filled, named(["child"])) == [PutOutcome.REFUSED]
        assert filled.delete([key(0)]) == filled.clear() == 0 and not filled.sync()
        filled.close()

    working = [beside(partial(work, thread)) for thread in range(4)]
    try:
        tries = examples(6)
        assert [in_child(child) for _ in range(tries)] == [""] * tries
    finally:
        stop.set()
        all_of(working)


def test_a_slower_device_hangs_nowhere_in_the_child_either(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig(read_gbps=1.0))

    def work() -> None:
        job = begin(slow, [key(0)])
        assert job.wait() and job.outcomes == [ReadOutcome.MISS]
        slow.close()

    assert in_child(work) == ""
    slow.close()
