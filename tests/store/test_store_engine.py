"""Pages go in and come out; what is not there is a miss; order, deadlines and cancellation of
reads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from store_pages import aligned, content, key, open_at, put, read

from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.index.hashtable import EMPTY
from sgl_kvtier.types import Lookup

STORED, KEPT, REFUSED = PutOutcome.STORED, PutOutcome.KEPT, PutOutcome.REFUSED


@pytest.mark.parametrize("nbytes", [1, 511, 512, 4095, 4096, 4097, 65536, 300_001])
def test_a_page_comes_back_as_it_was_put(store: DiskStore, nbytes: int) -> None:
    pages = {key(i): content(i, nbytes) for i in range(5)}
    assert put(store, pages) == [STORED] * 5
    assert read(store, dict.fromkeys(pages, nbytes)) == [
        (ReadOutcome.OK, data) for data in pages.values()
    ]


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_pages_scatter_over_several_buffers_aligned_or_not(
    opened: Callable[..., DiskStore], direct_io: str
) -> None:
    store = opened(direct_io=direct_io)
    data = content("page", 12_288)
    assert store.put([PageWrite(key(1), [memoryview(data)[:5000], memoryview(data)[5000:]])]) == [
        STORED
    ]
    even = [aligned(4096), aligned(8192)]
    odd = [aligned(5001)[1:], aligned(7300)[12:]]
    for into in (even, odd):
        job = store.read([PageRead(key(1), into)])
        assert job.wait(60) and job.outcomes == [ReadOutcome.OK]
        assert b"".join(into) == data


def test_time_in_which_several_threads_read_counts_once(opened: Callable[..., DiskStore]) -> None:
    store = opened(io_threads=8, capacity_bytes=64 << 20, segment_bytes=32 << 20)
    pages = {key(i): content(i, 1 << 20) for i in range(16)}
    put(store, pages)
    into = [PageRead(k, [aligned(1 << 20)]) for k in pages]
    began = time.monotonic()
    job = store.read(into)
    assert job.wait(60) and job.outcomes == [ReadOutcome.OK] * 16
    assert 0 < store.stats().read_busy_s <= time.monotonic() - began


def test_an_existing_page_is_not_written_again(store: DiskStore) -> None:
    put(store, {key(1): content(1, 4096)})
    written = store.stats().bytes_written_to_device
    assert put(store, {key(1): content("other", 4096)}) == [KEPT]
    assert store.stats().bytes_written_to_device == written
    assert read(store, {key(1): 4096}) == [(ReadOutcome.OK, content(1, 4096))]


def test_a_key_twice_in_one_batch_is_written_once(store: DiskStore) -> None:
    page = PageWrite(key(1), [memoryview(content(1, 4096))])
    assert store.put([page, page]) == [STORED, KEPT]
    assert store.stats().pages == 1


def test_a_page_of_another_length_is_a_miss(store: DiskStore) -> None:
    put(store, {key(1): content(1, 4096)})
    assert [o for o, _ in read(store, {key(1): 4095})] == [ReadOutcome.MISS]
    assert [o for o, _ in read(store, {key(1): 4096})] == [ReadOutcome.OK]


def test_an_empty_page_is_refused(store: DiskStore) -> None:
    assert store.put([PageWrite(key(1), [])]) == [REFUSED]


def test_a_page_larger_than_the_capacity_is_refused(store: DiskStore) -> None:
    assert put(store, {key(1): bytes(16 << 20)}) == [REFUSED]
    assert put(store, {key(2): bytes(4096)}) == [STORED]


def test_keys_and_pools_that_cannot_be_are_a_callers_mistake(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        store.lookup([b"short"])  # type: ignore[list-item]
    for pool in ("", "x" * 33, "k\0v", "ключ"):
        with pytest.raises(ValueError, match="pool"):
            put(store, {key(1): b"x"}, pool=pool)


class GatedEnv(Env):
    """Page reads wait until the gate opens; every read is recorded."""

    native = False

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.offsets: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if sum(map(len, buffers)) > 4096:
            self.offsets.append(offset)
            self.entered.release()
            self.gate.wait(60)
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def gated(opened: Callable[..., DiskStore]) -> tuple[DiskStore, GatedEnv]:
    env = GatedEnv()
    return opened(env=env, io_threads=1, segment_bytes=64 << 10), env


def scattered(count: int) -> dict:
    """Pages so large that no two of them are read in one go."""
    return {key(i): content(i, 600_000) for i in range(count)}


def test_pages_are_begun_in_the_order_given(gated: tuple[DiskStore, GatedEnv]) -> None:
    store, _ = gated
    pages = scattered(4)
    put(store, pages)
    ended: list[int] = []
    backwards = list(pages)[::-1]
    job = store.read(
        [PageRead(k, [aligned(600_000)]) for k in backwards], on_page=lambda i, _: ended.append(i)
    )
    assert job.wait(60)
    assert ended == [0, 1, 2, 3]
    assert [i for i, _ in job.drain()] == [0, 1, 2, 3]
    assert job.drain() == []


def test_a_more_urgent_job_overtakes_what_has_not_begun(gated: tuple[DiskStore, GatedEnv]) -> None:
    store, env = gated
    pages = scattered(5)
    put(store, pages)
    order: list[str] = []
    env.gate.clear()

    def ask(name: str, keys: list, priority: int):
        pages = [PageRead(k, [aligned(600_000)]) for k in keys]
        return store.read(pages, priority=priority, on_page=lambda i, _: order.append(f"{name}{i}"))

    keys = list(pages)
    jobs = [ask("a", keys[:3], 5)]
    env.entered.acquire()
    jobs += [ask("b", keys[3:4], 5), ask("c", keys[4:], 1)]
    env.gate.set()
    assert all(job.wait(60) for job in jobs)
    assert order == ["a0", "c0", "a1", "a2", "b0"]


def test_a_cancelled_job_keeps_its_memory_until_the_io_has_ended(
    gated: tuple[DiskStore, GatedEnv],
) -> None:
    store, env = gated
    pages = scattered(3)
    put(store, pages)
    env.gate.clear()
    job = store.read([PageRead(k, [aligned(600_000)]) for k in pages])
    env.entered.acquire()
    job.cancel()
    assert job.outcomes == [None, ReadOutcome.CANCELLED, ReadOutcome.CANCELLED]
    assert job.in_flight == 1
    assert not job.done
    env.gate.set()
    assert job.wait(60)
    assert job.outcomes[0] is ReadOutcome.OK
    assert job.in_flight == 0


def test_a_stalled_device_does_not_hold_the_caller_past_the_deadline(
    gated: tuple[DiskStore, GatedEnv],
) -> None:
    store, env = gated
    pages = scattered(3)
    put(store, pages)
    env.gate.clear()
    late = threading.Event()
    canary = aligned(600_000)
    into = [aligned(600_000), canary, aligned(600_000)]
    asked = [PageRead(k, [b]) for k, b in zip(pages, into, strict=True)]
    job = store.read(
        asked, deadline_s=0.05, on_page=lambda i, o: late.set() if o is ReadOutcome.LATE else None
    )
    assert late.wait(60)
    assert [o for o in job.outcomes if o] == [ReadOutcome.LATE, ReadOutcome.LATE]
    assert job.in_flight == 1
    canary[:] = b"\xaa" * len(canary)
    env.gate.set()
    assert job.wait(60)
    assert bytes(canary) == b"\xaa" * len(canary)


def test_a_deadline_that_never_comes_does_not_keep_others_from_coming(
    gated: tuple[DiskStore, GatedEnv],
) -> None:
    store, env = gated
    pages = scattered(3)
    put(store, pages)
    env.gate.clear()
    first, second, third = [PageRead(k, [aligned(600_000)]) for k in pages]
    forever = store.read([first, second], deadline_s=math.inf)
    env.entered.acquire()
    late = threading.Event()
    job = store.read([third], deadline_s=0.01, on_page=lambda i, o: late.set())
    told = late.wait(10)
    env.gate.set()
    assert told and job.wait(60) and job.outcomes == [ReadOutcome.LATE]
    assert forever.wait(60) and forever.outcomes == [ReadOutcome.OK] * 2


def test_closing_cancels_what_has_not_begun_and_later_calls_are_harmless(tmp_path: Path) -> None:
    env = GatedEnv()
    store = open_at(tmp_path, env=env, io_threads=1)
    pages = scattered(3)
    put(store, pages)
    env.gate.clear()
    job = store.read([PageRead(k, [aligned(600_000)]) for k in pages])
    env.entered.acquire()
    threading.Timer(0.05, env.gate.set).start()
    store.close()
    assert job.outcomes == [ReadOutcome.OK, ReadOutcome.CANCELLED, ReadOutcome.CANCELLED]
    store.close()
    assert put(store, {key("x"): b"x"}) == [REFUSED]
    after = store.read([PageRead(key(0), [aligned(600_000)])])
    assert after.done and after.outcomes == [ReadOutcome.CANCELLED]


def test_neighbouring_pages_are_read_in_one_call_in_either_direction(
    gated: tuple[DiskStore, GatedEnv],
) -> None:
    store, env = gated
    pages = {key(i): content(i, 4096) for i in range(6)}
    put(store, pages)
    for order in (list(pages), list(pages)[::-1]):
        env.offsets.clear()
        assert read(store, dict.fromkeys(order, 4096)) == [
            (ReadOutcome.OK, pages[k]) for k in order
        ]
        assert len(env.offsets) == 1


def test_two_threads_that_put_the_same_pages_write_each_once(store: DiskStore) -> None:
    pages = {key(i): content(i, 20_000) for i in range(50)}
    outcomes: list[list[PutOutcome]] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(put(store, pages))) for _ in range(4)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert store.stats().pages_written == 50
    assert sorted(o.value for os_ in outcomes for o in os_) == ["kept"] * 150 + ["stored"] * 50
    assert read(store, dict.fromkeys(pages, 20000)) == [(ReadOutcome.OK, d) for d in pages.values()]


def test_memory_that_cannot_be_written_is_a_callers_mistake_and_pins_nothing(
    store: DiskStore,
) -> None:
    put(store, {key(1): content(1, 4096)})
    with pytest.raises(ValueError, match="can be written"):
        store.read([PageRead(key(1), [memoryview(bytes(4096))])])
    with pytest.raises((TypeError, BufferError, ValueError)):
        store.read([PageRead(key(1), [aligned(8192)[::2]])])
    assert store.clear() == 1
    store.close()  # would wait for a page that stayed pinned


def test_clearing_gives_the_disk_space_back(store: DiskStore) -> None:
    put(store, {key(i): content(i, 30_000) for i in range(100)})
    before = store.stats().bytes_on_disk
    assert store.clear() == 100
    assert store.stats().bytes_on_disk < before // 10


def test_a_store_that_is_closing_under_load_ends_every_call(
    opened: Callable[..., DiskStore],
) -> None:
    for _ in range(5):
        store = opened(io_threads=2)
        stop = threading.Event()
        wrong: list[BaseException] = []

        def work(
            worker: int, store: DiskStore = store, stop: threading.Event = stop, wrong: list = wrong
        ) -> None:
            n = 0
            try:
                while not stop.is_set():
                    n += 1
                    names = [key((worker, n, i)) for i in range(4)]
                    put(store, {k: content(n, 5000) for k in names})
                    found = [o for o, _ in read(store, dict.fromkeys(names, 5000))]
                    store.delete(names[:2])
                    assert set(found) <= {ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.CANCELLED}
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        threading.Event().wait(0.05)
        store.close()
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert wrong == []


# A put that finds its page being written by another, or there already while room is made.


NBYTES = 30_000


@pytest.mark.parametrize(("written_over", "outcome"), [(False, "KEPT"), (True, "REFUSED")])
def test_a_page_that_another_was_writing_is_kept_only_if_it_is_what_its_slot_holds_now(
    opened: Callable[..., DiskStore], written_over: bool, outcome: str
) -> None:
    store = opened()
    put(store, {key("page"): content("page", NBYTES)})
    table = store._core.table
    with store._core.lock:
        (row,) = table.find([key("page")], "kv").tolist()
    assert row != EMPTY
    sequence = int(table.sequence[row]) - written_over
    outcomes = [PutOutcome.REFUSED]
    store._writer._await_others([(0, row, sequence)], outcomes)
    assert outcomes == [PutOutcome[outcome]]
    assert np.all(table.sequence[row] >= sequence)


def test_a_page_that_is_put_again_is_used_and_leaves_later_than_those_put_before_it(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened(capacity_bytes=1 << 20)
    count = 0
    while store.stats().pages_evicted == 0:
        put(store, {key(count): content(count, NBYTES)})
        count += 1
    # Page 0 has left; page 1 is the next, if it is not used.
    assert put(store, {key(1): content(1, NBYTES)}) == [PutOutcome.KEPT]
    for name in ("new", "newer"):
        assert put(store, {key(name): content(name, NBYTES)}) == [PutOutcome.STORED]
    there = store.lookup([key(n) for n in range(4)])
    assert there == [Lookup.MISS, Lookup.HIT, Lookup.MISS, Lookup.MISS]
