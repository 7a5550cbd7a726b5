"""Pages go in and come out; what is not there is a miss; order, deadlines and cancellation of
reads.
"""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from patience import all_of, beside
from scripted import Scripted, only
from store_pages import Open, aligned, begin, content, found, key, named, open_at, put, read

from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadJob, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.index.hashtable import EMPTY
from sgl_kvtier.types import PageKey

STORED, KEPT, REFUSED = PutOutcome.STORED, PutOutcome.KEPT, PutOutcome.REFUSED


@pytest.mark.parametrize("nbytes", [1, 511, 512, 4095, 4096, 4097, 65536, 300_001])
def test_a_page_comes_back_as_it_was_put(store: DiskStore, nbytes: int) -> None:
    pages = named(range(5), nbytes)
    assert put(store, pages) == [STORED] * 5
    assert found(store, pages) == 5


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_pages_scatter_over_several_buffers_aligned_or_not(opened: Open, direct_io: str) -> None:
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


def test_time_in_which_several_threads_read_counts_once(opened: Open) -> None:
    store = opened(io_threads=8, capacity_bytes=64 << 20, segment_bytes=32 << 20)
    pages = named(range(16), 1 << 20)
    put(store, pages)
    began = time.monotonic()
    job = begin(store, pages, 1 << 20)
    assert job.wait(60) and job.outcomes == [ReadOutcome.OK] * 16
    assert 0 < store.stats().read_busy_s <= time.monotonic() - began


def test_an_existing_page_is_not_written_again(store: DiskStore) -> None:
    page = PageWrite(key(1), [memoryview(content(1, 4096))])
    assert store.put([page, page]) == [STORED, KEPT], "twice in one batch"
    written = store.stats().bytes_written_to_device
    assert put(store, {key(1): content("other", 4096)}) == [KEPT]
    assert store.stats().bytes_written_to_device == written and store.stats().pages == 1
    assert found(store, named([1], 4096)) == 1


def test_a_page_of_another_length_is_a_miss(store: DiskStore) -> None:
    put(store, named([1], 4096))
    assert [o for o, _ in read(store, {key(1): 4095})] == [ReadOutcome.MISS]
    assert [o for o, _ in read(store, {key(1): 4096})] == [ReadOutcome.OK]


def test_an_empty_page_is_refused(store: DiskStore) -> None:
    assert store.put([PageWrite(key(1), [])]) == [REFUSED]


def test_keys_and_pools_that_cannot_be_are_a_callers_mistake(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        store.lookup([b"short"])  # type: ignore[list-item]
    for pool in ("", "x" * 33, "k\0v", "ключ"):
        with pytest.raises(ValueError, match="pool"):
            put(store, {key(1): b"x"}, pool=pool)


# Order, deadlines and cancellation, with pages so large that no two of them are read in one go.


LARGE = 600_000


@pytest.fixture
def env() -> Scripted:
    return Scripted()


@pytest.fixture
def gated(tmp_path: Path, env: Scripted) -> DiskStore:
    """Page reads wait where the test says; one thread makes them."""
    return open_at(tmp_path, env=env, io_threads=1, segment_bytes=64 << 10)


def scattered(store: DiskStore, count: int) -> list[PageKey]:
    put(store, named(range(count), LARGE))
    return [key(i) for i in range(count)]


def test_pages_are_begun_in_the_order_given(gated: DiskStore) -> None:
    ended: list[int] = []
    backwards = scattered(gated, 4)[::-1]
    job = begin(gated, backwards, LARGE, on_page=lambda i, _: ended.append(i))
    assert job.wait(60)
    assert ended == [0, 1, 2, 3]
    assert [i for i, _ in job.drain()] == [0, 1, 2, 3]
    assert job.drain() == []


def test_a_more_urgent_job_overtakes_what_has_not_begun(gated: DiskStore, env: Scripted) -> None:
    keys = scattered(gated, 5)
    order: list[str] = []

    def ask(name: str, keys: list[PageKey], priority: int) -> ReadJob:
        def told(index: int, outcome: ReadOutcome) -> None:
            order.append(f"{name}{index}")

        return begin(gated, keys, LARGE, priority=priority, on_page=told)

    env.holds = only("read")
    jobs = [ask("a", keys[:3], 5)]
    assert env.entered.wait(60)
    jobs += [ask("b", keys[3:4], 5), ask("c", keys[4:], 1)]
    env.gate.set()
    assert all(job.wait(60) for job in jobs)
    assert order == ["a0", "c0", "a1", "a2", "b0"]


def test_a_cancelled_job_keeps_its_memory_until_the_io_has_ended(
    gated: DiskStore, env: Scripted
) -> None:
    keys = scattered(gated, 3)
    env.holds = only("read")
    job = begin(gated, keys, LARGE)
    assert env.entered.wait(60)
    job.cancel()
    assert job.outcomes == [None, ReadOutcome.CANCELLED, ReadOutcome.CANCELLED]
    assert job.in_flight == 1
    assert not job.done
    env.gate.set()
    assert job.wait(60)
    assert job.outcomes[0] is ReadOutcome.OK
    assert job.in_flight == 0


def test_a_stalled_device_does_not_hold_the_caller_past_the_deadline(
    gated: DiskStore, env: Scripted
) -> None:
    keys = scattered(gated, 3)
    env.holds = only("read")
    late = threading.Event()
    into = [aligned(LARGE) for _ in keys]
    job = gated.read(
        [PageRead(k, [b]) for k, b in zip(keys, into, strict=True)],
        deadline_s=0.05,
        on_page=lambda i, o: late.set() if o is ReadOutcome.LATE else None,
    )
    assert late.wait(60)
    assert [o for o in job.outcomes if o] == [ReadOutcome.LATE, ReadOutcome.LATE]
    assert job.in_flight == 1
    into[1][:] = b"\xaa" * LARGE
    env.gate.set()
    assert job.wait(60)
    assert bytes(into[1]) == b"\xaa" * LARGE


def test_a_deadline_that_never_comes_does_not_keep_others_from_coming(
    gated: DiskStore, env: Scripted
) -> None:
    keys = scattered(gated, 3)
    env.holds = only("read")
    forever = begin(gated, keys[:2], LARGE, deadline_s=math.inf)
    assert env.entered.wait(60)
    late = threading.Event()
    job = begin(gated, keys[2:], LARGE, deadline_s=0.01, on_page=lambda i, o: late.set())
    told = late.wait(10)
    env.gate.set()
    assert told and job.wait(60) and job.outcomes == [ReadOutcome.LATE]
    assert forever.wait(60) and forever.outcomes == [ReadOutcome.OK] * 2


def test_closing_cancels_what_has_not_begun_and_later_calls_are_harmless(
    gated: DiskStore, env: Scripted
) -> None:
    keys = scattered(gated, 3)
    env.holds = only("read")
    job = begin(gated, keys, LARGE)
    assert env.entered.wait(60)
    threading.Timer(0.05, env.gate.set).start()
    gated.close()
    assert job.outcomes == [ReadOutcome.OK, ReadOutcome.CANCELLED, ReadOutcome.CANCELLED]
    gated.close()
    assert put(gated, {key("x"): b"x"}) == [REFUSED]
    after = begin(gated, keys[:1], LARGE)
    assert after.done and after.outcomes == [ReadOutcome.CANCELLED]


def test_neighbouring_pages_are_read_in_one_call_in_either_direction(
    gated: DiskStore, env: Scripted
) -> None:
    pages = named(range(6), 4096)
    put(gated, pages)
    calls: list[str] = []
    env.before = calls.append
    for order in (list(pages), list(pages)[::-1]):
        calls.clear()
        assert found(gated, {name: pages[name] for name in order}) == 6
        assert calls.count("read") == 1


def test_a_page_asked_for_twice_beside_its_neighbour_comes_twice(store: DiskStore) -> None:
    pages = named(range(2), 4096)
    put(store, pages)
    first, second = pages
    job = begin(store, [first, second, first], 4096)
    assert job.wait(60) and job.outcomes == [ReadOutcome.OK] * 3


def test_two_threads_that_put_the_same_pages_write_each_once(store: DiskStore) -> None:
    pages = named(range(50), 20_000)
    putting = [beside(lambda: put(store, pages)) for _ in range(4)]
    outcomes = [outcome for each in all_of(putting) for outcome in each]
    assert store.stats().pages_written == 50
    assert (outcomes.count(STORED), outcomes.count(KEPT)) == (50, 150)
    assert found(store, pages) == 50


def test_memory_that_cannot_be_written_is_a_callers_mistake_and_pins_nothing(
    store: DiskStore,
) -> None:
    put(store, named([1], 4096))
    with pytest.raises(ValueError, match="can be written"):
        store.read([PageRead(key(1), [memoryview(bytes(4096))])])
    with pytest.raises((TypeError, BufferError, ValueError)):
        store.read([PageRead(key(1), [aligned(8192)[::2]])])
    assert store.clear() == 1
    store.close()  # would wait for a page that stayed pinned


def test_clearing_gives_the_disk_space_back(store: DiskStore) -> None:
    put(store, named(range(100), 30_000))
    before = store.stats().bytes_on_disk
    assert store.clear() == 100
    assert store.stats().bytes_on_disk < before // 10


def test_a_store_that_is_closing_under_load_ends_every_call(opened: Open) -> None:
    def work(worker: int, store: DiskStore, stop: threading.Event) -> None:
        n = 0
        while not stop.is_set():
            n += 1
            pages = named((worker, n, i) for i in range(4))
            put(store, pages)
            outcomes = {o for o, _ in read(store, dict.fromkeys(pages, 5000))}
            store.delete(list(pages)[:2])
            assert outcomes <= {ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.CANCELLED}

    for _ in range(3):
        store, stop = opened(io_threads=2), threading.Event()
        working = [beside(partial(work, i, store, stop)) for i in range(3)]
        time.sleep(0.05)
        store.close()
        stop.set()
        all_of(working)


@pytest.mark.parametrize(("written_over", "outcome"), [(False, "KEPT"), (True, "REFUSED")])
def test_a_page_that_another_was_writing_is_kept_only_if_it_is_what_its_slot_holds_now(
    opened: Open, written_over: bool, outcome: str
) -> None:
    store = opened()
    put(store, named(["page"]))
    table = store._core.table
    with store._core.lock:
        (row,) = table.find([key("page")], "kv").tolist()
    assert row != EMPTY
    sequence = int(table.sequence[row]) - written_over
    outcomes = [PutOutcome.REFUSED]
    store._writer._await_others([(0, row, sequence)], outcomes)
    assert outcomes == [PutOutcome[outcome]]
    assert np.all(table.sequence[row] >= sequence)
