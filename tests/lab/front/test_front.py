"""A slower device takes its time and keeps the order; an unreliable one fails as its seed says."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from store_pages import aligned, content, key, put, read

from sgl_kvtier.config import FaultConfig, ThrottleConfig
from sgl_kvtier.errors import StoreError
from sgl_kvtier.lab.front.wrappers import Faulty, LayerParts, Throttled, cut, pool_of
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

NBYTES = 50_000
PAGES = {key(i): content(i, NBYTES) for i in range(20)}


@pytest.fixture
def filled(store: DiskStore) -> DiskStore:
    put(store, PAGES)
    return store


def ask(store: Throttled, keys: list, **how):  # type: ignore[no-untyped-def]
    return store.read([PageRead(k, [aligned(NBYTES)]) for k in keys], **how)


def test_a_throttled_store_returns_the_same_pages(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig(read_gbps=1.0, latency_ms=1))
    assert read(slow, dict.fromkeys(PAGES, NBYTES)) == [(ReadOutcome.OK, d) for d in PAGES.values()]
    assert put(slow, {key("new"): b"new"}) == [PutOutcome.STORED]
    assert slow.lookup([key("new"), key("none")]) == [Lookup.HIT, Lookup.MISS]
    slow.close()


def test_a_link_is_never_faster_than_its_bandwidth_whoever_shares_it(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig(read_gbps=0.05))
    keys = list(PAGES)
    started = time.monotonic()
    jobs = [ask(slow, keys[:5]), ask(slow, keys[5:10])]
    assert all(job.wait(60) for job in jobs)
    # A lower bound holds on any machine, however busy.
    assert time.monotonic() - started >= 10 * NBYTES * 8 / 0.05e9 * 0.99
    slow.close()


def test_pages_come_over_a_link_in_order_and_urgent_jobs_overtake(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig(read_gbps=0.01))
    order: list[str] = []
    keys = list(PAGES)
    first = threading.Event()

    def note(name: str) -> Callable[[int, ReadOutcome], None]:
        return lambda i, _: (order.append(f"{name}{i}"), first.set())[0]

    jobs = [ask(slow, keys[:4], priority=1, on_page=note("a"))]
    assert first.wait(60)
    jobs += [ask(slow, keys[4:6], priority=0, on_page=note("b"))]
    assert all(job.wait(60) for job in jobs)
    assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert order.index("b1") < order.index("a3")
    slow.close()


def test_pages_that_are_not_there_do_not_stop_a_link(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig(read_gbps=1.0))
    job = ask(slow, [key("none"), key(0)])
    assert job.wait(60)
    assert job.outcomes == [ReadOutcome.MISS, ReadOutcome.OK]
    slow.close()


def test_a_link_keeps_deadlines_and_cancels(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig(read_gbps=0.002))
    late = ask(slow, list(PAGES), deadline_s=0.3)
    assert late.wait(60)
    assert late.outcomes[0] is ReadOutcome.OK
    assert late.outcomes[-1] is ReadOutcome.LATE
    cancelled = ask(slow, list(PAGES))
    cancelled.cancel()
    assert cancelled.wait(60)
    assert cancelled.outcomes[-1] is ReadOutcome.CANCELLED
    slow.close()
    assert ask(slow, list(PAGES)).outcomes == [ReadOutcome.CANCELLED] * 20


def test_a_store_that_raises_fails_its_pages_and_the_link_goes_on(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig())
    job = slow.read([PageRead(key(0), [memoryview(bytes(NBYTES))])])
    assert job.wait(10) and job.outcomes == [ReadOutcome.FAILED]
    assert read(slow, dict.fromkeys(PAGES, NBYTES)) == [(ReadOutcome.OK, d) for d in PAGES.values()]
    slow.close()


def test_a_link_lives_through_a_deadline_that_never_comes() -> None:
    class Patient:
        """A store whose pages end when the test says so."""

        asked: queue.Queue[tuple[int, Callable[[int, ReadOutcome], None]]] = queue.Queue()

        def read(
            self, pages: list[PageRead], *, on_page: Callable[[int, ReadOutcome], None]
        ) -> None:
            self.asked.put((len(pages), on_page))

        def close(self) -> None:
            pass

    store: Any = Patient()
    slow = Throttled(store, ThrottleConfig())
    job = ask(
        slow, [key(i) for i in range(100)], deadline_s=math.inf
    )  # more than a link has under way
    left = 100
    while left:
        count, on_page = store.asked.get(timeout=10)
        threading.Event().wait(0.05)  # the link has nothing to do meanwhile but to wait
        for i in range(count):
            on_page(i, ReadOutcome.OK)
        left -= count
    assert job.wait(10) and job.outcomes == [ReadOutcome.OK] * 100
    slow.close()


def test_latency_delays_a_job_and_not_its_neighbours(filled: DiskStore) -> None:
    slow = Throttled(filled, ThrottleConfig(latency_ms=50))
    started = time.monotonic()
    jobs = [ask(slow, [k]) for k in PAGES]
    assert all(job.wait(60) for job in jobs)
    assert time.monotonic() - started >= 0.05
    assert [job.outcomes for job in jobs] == [[ReadOutcome.OK]] * 20
    slow.close()


def test_a_faulty_store_fails_the_pages_its_seed_says(filled: DiskStore) -> None:
    config = FaultConfig(read_error_rate=0.3, write_error_rate=0.3, seed=5)
    runs = []
    for _ in range(2):
        faulty = Faulty(filled, config)
        outcomes = [o for o, _ in read(faulty, dict.fromkeys(PAGES, NBYTES))]
        refused = put(faulty, {key(("w", i)): content(i, 100) for i in range(20)})
        filled.delete([key(("w", i)) for i in range(20)])
        runs.append((outcomes, refused))
    assert runs[0] == runs[1]
    assert 0 < runs[0][0].count(ReadOutcome.FAILED) < 20
    assert 0 < runs[0][1].count(PutOutcome.REFUSED) < 20


def test_flipped_bits_are_written_to_disk_and_found_by_the_store(store: DiskStore) -> None:
    faulty = Faulty(store, FaultConfig(corrupt_rate=0.5, seed=1))
    put(faulty, PAGES)
    outcomes = [o for o, _ in read(faulty, dict.fromkeys(PAGES, NBYTES))]
    assert set(outcomes) == {ReadOutcome.OK, ReadOutcome.CORRUPT}
    assert store.stats().pages_corrupt == outcomes.count(ReadOutcome.CORRUPT)


def test_bits_can_only_be_flipped_right_at_the_disk(store: DiskStore) -> None:
    slow = Throttled(store, ThrottleConfig())
    with pytest.raises(StoreError, match="directly around"):
        Faulty(slow, FaultConfig(corrupt_rate=0.1))
    slow.close()


def test_a_stalled_page_ends_later_and_whole(filled: DiskStore) -> None:
    faulty = Faulty(filled, FaultConfig(stall_ms=50, seed=0))
    started = time.monotonic()
    jobs = [faulty.read([PageRead(k, [aligned(NBYTES)])]) for k in list(PAGES) * 25]
    assert all(job.wait(60) for job in jobs)
    assert {job.outcomes[0] for job in jobs} == {ReadOutcome.OK}
    assert time.monotonic() - started >= 0.05


def test_pages_are_gone_when_they_are_looked_up(filled: DiskStore) -> None:
    keys = list(PAGES)
    assert Faulty(filled, FaultConfig(lose_first=2)).lookup(keys[3:8]) == [
        *[Lookup.MISS] * 2,
        *[Lookup.HIT] * 3,
    ]
    assert filled.lookup(keys[3:5]) == [Lookup.MISS] * 2, "deleted, not hidden"
    answers = Faulty(filled, FaultConfig(lose_rate=0.5, seed=1)).lookup(keys)
    assert filled.lookup(keys) == answers
    assert 3 < answers.count(Lookup.HIT) < 15


# Pages kept in parts: whole to SGLang, and readable part by part.

PARTS, PAGE_BYTES = 4, 8192
PARTED = {key(i): content(i, PAGE_BYTES) for i in range(5)}


@pytest.fixture
def parts(store: DiskStore) -> LayerParts:
    return LayerParts(store, PARTS)


def test_whole_pages_come_back_and_are_counted_as_pages(parts: LayerParts) -> None:
    assert set(put(parts, PARTED)) == {PutOutcome.STORED}
    assert set(put(parts, PARTED)) == {PutOutcome.KEPT}
    assert read(parts, dict.fromkeys(PARTED, PAGE_BYTES)) == [
        (ReadOutcome.OK, d) for d in PARTED.values()
    ]
    assert parts.lookup([*PARTED, key("none")]) == [Lookup.HIT] * len(PARTED) + [Lookup.MISS]
    found = parts.stats()
    assert (found.pages, found.pages_written, found.bytes_written) == (5, 5, 5 * PAGE_BYTES)
    assert parts.delete(list(PARTED)) == len(PARTED)
    assert parts.stats().pages == 0


def test_a_part_alone_is_these_layers_of_keys_and_of_values(parts: LayerParts) -> None:
    keys, values = (memoryview(content(name, PAGE_BYTES)) for name in "kv")
    parts.put([PageWrite(key("page"), [keys, values])])
    into = [aligned(PAGE_BYTES // PARTS), aligned(PAGE_BYTES // PARTS)]
    job = parts.read([PageRead(key("page"), into, pool_of(2))])
    assert job.wait(10)
    assert job.outcomes == [ReadOutcome.OK]
    assert [bytes(one) for one in into] == [
        bytes(one[PAGE_BYTES // 2 : PAGE_BYTES * 3 // 4]) for one in (keys, values)
    ]
    assert [len(one) for one in cut([keys, values], 2, PARTS)] == [PAGE_BYTES // PARTS] * 2


def test_a_page_with_a_damaged_part_is_corrupt_and_then_missing(
    store: DiskStore, parts: LayerParts
) -> None:
    put(parts, PARTED)
    one, other = list(PARTED)[:2]
    assert store.damage(one, pool_of(3), bit=77)
    ended: list[tuple[int, ReadOutcome]] = []
    job = parts.read(
        [PageRead(name, [aligned(PAGE_BYTES)]) for name in (one, other)],
        on_page=lambda index, outcome: ended.append((index, outcome)),
    )
    assert job.wait(10)
    assert job.outcomes == [ReadOutcome.CORRUPT, ReadOutcome.OK]
    assert sorted(ended) == sorted(job.drain()) == list(enumerate(job.outcomes))
    assert parts.lookup([one, other]) == [Lookup.MISS, Lookup.HIT]
    part = parts.read([PageRead(one, [aligned(PAGE_BYTES // PARTS)], pool_of(0))])
    assert part.wait(10)
    assert part.outcomes == [ReadOutcome.OK]
