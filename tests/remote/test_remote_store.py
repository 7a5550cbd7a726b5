"""The remote store over an engine that works: what is put comes back, in order, to all."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import until
from remote_pages import alive, outcomes, stored
from store_pages import begin, content, key, put, read

from sgl_kvtier.remote import channel
from sgl_kvtier.remote.child.memory import FAULTS
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.types import Lookup, PageKey

OK, MISS, KEPT, REFUSED = ReadOutcome.OK, ReadOutcome.MISS, PutOutcome.KEPT, PutOutcome.REFUSED
Opened = Callable[..., RemoteStore]


def test_pages_of_many_sizes_come_back(store: RemoteStore) -> None:
    pages = {key(n): content(n, n) for n in (1, 100, 4096, 70_001, 1 << 20)}
    assert put(store, pages) == [PutOutcome.STORED] * 5
    assert outcomes(store, pages) == [OK] * 5


def test_without_the_extension_module_pages_come_back_too(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_native", None)
    store = opened()
    assert outcomes(store, stored(store, range(20), 5000)) == [OK] * 20


def test_a_page_of_several_buffers_is_one_page(store: RemoteStore) -> None:
    data = content(1, 3000)
    parts = [memoryview(data)[:1000], memoryview(data)[1000:1001], memoryview(data)[1001:]]
    assert store.put([PageWrite(key(1), parts)]) == [PutOutcome.STORED]
    into = [bytearray(2999), bytearray(1)]
    job = store.read([PageRead(key(1), [memoryview(part) for part in into])])
    assert job.wait(10) and b"".join(into) == data


def test_another_server_finds_what_one_wrote(opened: Opened) -> None:
    pages = stored(opened(), range(30))
    other = opened()
    assert other.lookup(list(pages)) == [Lookup.MISS] * 30
    assert other.ask(list(pages), timeout_s=10)
    assert other.lookup(list(pages)) == [Lookup.HIT] * 30
    assert outcomes(other, pages) == [OK] * 30


@pytest.mark.parametrize(
    "other", [{"identity": Identity({"model": "b"})}, {"rank": "tp1"}], ids=["identity", "rank"]
)
def test_another_identity_or_rank_finds_nothing(opened: Opened, other: dict[str, object]) -> None:
    pages = stored(opened(), range(3))
    stranger = opened(**other)
    assert stranger.ask(list(pages), timeout_s=10)
    assert stranger.lookup(list(pages)) == [Lookup.MISS] * 3
    assert outcomes(stranger, pages) == [MISS] * 3
    assert stranger.clear() == 0


def test_a_page_that_is_there_is_kept(opened: Opened) -> None:
    store = opened()
    pages = stored(store, range(3))
    assert put(store, pages) == [KEPT] * 3
    assert put(opened(), pages) == [KEPT] * 3


def test_one_read_takes_pages_of_several_pools(store: RemoteStore) -> None:
    put(store, {key(1): b"kv"}, "kv")
    put(store, {key(1): b"window"}, "swa")
    into = [bytearray(2), bytearray(6), bytearray(2)]
    which = ["kv", "swa", "kv"]
    pages = [PageRead(key(1), [memoryview(b)], pool) for b, pool in zip(into, which, strict=True)]
    job = store.read(pages)
    assert job.wait(10) and into == [b"kv", b"window", b"kv"]


def test_another_length_is_not_this_page(store: RemoteStore) -> None:
    stored(store, [1], 100)
    for length in (99, 101):
        ((outcome, _),) = read(store, {key(1): length})
        assert outcome in (ReadOutcome.CORRUPT, MISS)


@pytest.mark.parametrize("pool", ["", "x" * 33, "\0", "é"])
def test_a_pool_that_no_name_can_hold_is_a_miss(store: RemoteStore, pool: str) -> None:
    assert put(store, {key(1): b"x"}, pool) == [REFUSED]
    assert read(store, {key(1): 1}, pool) == [(MISS, b"\0")]
    assert not store.ask([key(1)], pool)
    assert store.delete([key(1)], pool) == 0


@pytest.mark.parametrize("name", [b"", b"x" * 31, b"x" * 33])
def test_a_key_of_another_length_is_a_miss(store: RemoteStore, name: bytes) -> None:
    wrong = PageKey(name)
    pages = {key(1): b"before", wrong: b"wrong", key(2): b"after"}
    assert put(store, pages) == [PutOutcome.STORED, REFUSED, PutOutcome.STORED]
    assert outcomes(store, pages) == [OK, MISS, OK]
    assert not store.ask([key(1), wrong])
    assert store.delete([wrong]) == 0


def test_empty_pages_and_pages_larger_than_the_ring_are_refused(store: RemoteStore) -> None:
    sizes = (0, 3 << 20, 5 << 20)
    assert put(store, {key(n): bytes(n) for n in sizes}) == [REFUSED] * 3
    assert [outcome for outcome, _ in read(store, {key(n): n for n in sizes})] == [MISS] * 3
    until(lambda: store.condition().ring_taken_bytes == 0)


def test_the_ring_has_room_for_the_largest_page(opened: Opened) -> None:
    store = opened(ring_bytes=1 << 20, page_bytes=3 << 20)
    assert store.most_page_bytes >= 3 << 20
    pages = stored(store, range(4), 3 << 20)
    assert outcomes(store, pages) == [OK] * 4


def test_the_largest_page_that_is_taken_is_known(store: RemoteStore) -> None:
    sizes = (store.most_page_bytes, store.most_page_bytes + 1)
    assert put(store, {key(n): bytes(n) for n in sizes}) == [PutOutcome.STORED, REFUSED]


def test_reads_of_more_than_the_ring_go_through_it(store: RemoteStore) -> None:
    pages = stored(store, range(100), 100_000)
    assert outcomes(store, pages) == [OK] * 100
    assert store.condition().ring_taken_bytes == 0


def test_an_urgent_job_overtakes_one_that_waits(opened: Opened, folder: Path) -> None:
    store = opened()
    pages = stored(store, range(64), 200_000)
    (folder / FAULTS).write_text('{"slow_s": 0.02}')  # so that the first job is still under way
    order: list[str] = []
    jobs = []
    for name, priority in (("idle", 5), ("urgent", 0)):

        def told(index: int, outcome: ReadOutcome, name: str = name) -> None:
            order.append(name)

        jobs.append(begin(store, pages, 200_000, priority=priority, on_page=told))
    assert all(job.wait(30) for job in jobs)
    assert order[-1] == "idle" and order.count("urgent") == 64


def test_a_cancelled_job_ends_and_leaves_no_memory_behind(store: RemoteStore) -> None:
    pages = stored(store, range(64), 200_000)
    job = begin(store, pages, 200_000)
    job.cancel()
    assert job.wait(30)
    assert set(job.outcomes) <= {OK, ReadOutcome.CANCELLED}
    until(lambda: store.condition().ring_taken_bytes == 0)


def test_each_page_is_told_once(store: RemoteStore) -> None:
    pages = stored(store, range(40))
    told: list[int] = []
    job = begin(store, pages, on_page=lambda i, o: told.append(i))
    assert job.wait(10)
    until(lambda: len(job.outcomes) == 40)
    assert sorted(told) == list(range(40))
    assert sorted(i for i, _ in job.drain()) == list(range(40))
    assert job.drain() == []


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_that_fails_stops_nothing(
    store: RemoteStore, error: type[BaseException]
) -> None:
    pages = stored(store, range(20))

    def fail(index: int, outcome: ReadOutcome) -> None:
        raise error("mistake of a caller")

    job = begin(store, pages, on_page=fail)
    assert job.wait(10) and set(job.outcomes) == {OK}
    assert outcomes(store, pages) == [OK] * 20


def test_a_callback_may_use_the_store(store: RemoteStore) -> None:
    pages = stored(store, range(3))
    inner: list[object] = []
    job = begin(store, pages, on_page=lambda i, o: inner.append(store.lookup(list(pages))))
    assert job.wait(10) and len(inner) == 3


def test_a_read_of_nothing_is_done(store: RemoteStore) -> None:
    assert store.read([]).done
    assert store.put([]) == []
    assert store.ask([])


def test_deleted_pages_are_gone_for_all(opened: Opened) -> None:
    store, other = opened(), opened()
    pages = stored(store, range(6))
    assert store.delete(list(pages)[:2]) == 2
    assert store.lookup(list(pages)) == [Lookup.MISS] * 2 + [Lookup.HIT] * 4
    assert outcomes(other, pages) == [MISS] * 2 + [OK] * 4


def test_clear_takes_this_rank_and_no_other(opened: Opened) -> None:
    store, other = opened(rank="tp0"), opened(rank="tp01")
    mine, theirs = stored(store, range(5)), stored(other, range(5))
    assert store.clear() == 5
    assert outcomes(store, mine) == [MISS] * 5
    assert outcomes(other, theirs) == [OK] * 5


def test_a_question_is_asked_once_while_its_answer_holds(opened: Opened) -> None:
    store = opened()
    pages = stored(store, range(3))
    assert store.ask(list(pages))
    assert store.condition().exists_calls == 0
    assert store.ask([key("other")], timeout_s=10)
    assert store.ask([key("other")], timeout_s=10)
    assert store.condition().exists_calls == 1


def test_a_question_about_a_long_prompt_is_answered(store: RemoteStore) -> None:
    pages = stored(store, range(10))
    keys = [key(n) for n in range(5000)]
    assert store.ask(keys, timeout_s=20)
    assert store.lookup(keys).count(Lookup.HIT) == len(pages)


def test_a_store_that_only_reads_refuses_pages(opened: Opened) -> None:
    pages = stored(opened(), range(3))
    reader = opened(write="off")
    assert put(reader, {key("new"): b"x"}) == [REFUSED]
    assert outcomes(reader, pages) == [OK] * 3


def test_the_counters_add_up(opened: Opened) -> None:
    store = opened()
    pages = stored(store, range(4))
    outcomes(store, pages | {key("none"): bytes(1000)})
    put(store, pages)
    stats = store.stats()
    assert (stats.pages_written, stats.bytes_written, stats.pages_kept) == (4, 20_000, 4)
    assert (stats.pages_read, stats.bytes_read, stats.pages_missed) == (4, 20_000, 1)


def test_a_closed_store_misses_and_its_child_is_gone(opened: Opened) -> None:
    store = opened()
    pages = stored(store, range(3))
    child = store.condition().child
    store.close()
    store.close()
    assert not alive(child)
    assert store.lookup(list(pages)) == [Lookup.MISS] * 3
    assert outcomes(store, pages) == [MISS] * 3
    assert put(store, pages) == [REFUSED] * 3
    assert not store.ask(list(pages))
    assert (store.delete(list(pages)), store.clear()) == (0, 0)


def test_a_store_can_be_closed_from_a_callback(opened: Opened) -> None:
    store = opened()
    pages = stored(store, range(3))
    job = begin(store, pages, on_page=lambda i, o: store.close())
    assert job.wait(10)


def test_a_child_dies_with_its_parent(opened: Opened) -> None:
    """A process that opens a store and is killed leaves no child behind."""
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            child = opened().condition().child
            os.write(writing, str(child).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    child = int(os.read(reading, 100))
    os.close(reading)
    assert alive(child)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: not alive(child))


def test_a_forked_process_sees_a_closed_store_and_waits_for_nothing(store: RemoteStore) -> None:
    """Another thread may have been in the store when it was forked."""
    pages = stored(store, range(3))
    with store._link.lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            right = store.lookup(list(pages)) == [Lookup.MISS] * 3
            right = right and put(store, pages) == [REFUSED] * 3
            right = right and (store.delete(list(pages)), store.clear()) == (0, 0)
            gc.collect()
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert outcomes(store, pages) == [OK] * 3
