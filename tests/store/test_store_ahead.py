"""Reading ahead: every page once and in order, what is under way at any time, and memory that is
the caller's again at the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from store_pages import aligned, begin, key, named, open_at, put

from sgl_kvtier.store.base import PageRead, ReadJob, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.io import read_ahead as ahead
from sgl_kvtier.store.io.jobs import OrderedJob
from sgl_kvtier.store.io.read_ahead import ReadAhead

NBYTES = 4096


class Asked:
    """Jobs that end when the test says so."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.jobs: list[OrderedJob] = []

    def begin(self, first: int, last: int) -> ReadJob:
        self.spans.append((first, last))
        self.jobs.append(OrderedJob(last - first, None, None))
        return self.jobs[-1]

    def end_all(self) -> None:
        for job in self.jobs:
            job.end_rest(ReadOutcome.OK)


@pytest.mark.parametrize("pages_ahead", [1, 3, 8, 20, 1000])
@pytest.mark.parametrize("batch", [1, 8, 33])
def test_every_page_is_begun_once_in_order_and_so_many_are_ahead(
    batch: int, pages_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "AHEAD_BYTES", pages_ahead * NBYTES)
    asked = Asked()

    def begin(first: int, last: int) -> ReadJob:
        job = asked.begin(first, last)
        asked.end_all()
        return job

    reading = ReadAhead(begin, 100, NBYTES)
    while reading.collected < 100:
        before = reading.collected
        found = reading.collect(batch)
        assert found == [ReadOutcome.OK] * min(batch, 100 - before)
        assert asked.spans[-1][1] == min(100, reading.collected + pages_ahead)
    starts, stops = zip(*asked.spans, strict=True)
    assert starts == (0, *stops[:-1]) and stops[-1] == 100
    assert reading.collect(batch) == []
    reading.close()


def test_what_follows_is_under_way_before_the_present_pages_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 2 * NBYTES)
    asked = Asked()

    def begin(first: int, last: int) -> ReadJob:
        job = asked.begin(first, last)
        if len(asked.jobs) == 3:
            asked.end_all()
        return job

    reading = ReadAhead(begin, 10, NBYTES)
    # It would wait for ever, had nothing been begun beyond it.
    assert reading.collect(1) == [ReadOutcome.OK]
    assert asked.spans == [(0, 1), (1, 2), (2, 3)]
    reading.close()


def test_after_cancel_pages_asked_for_later_are_cancelled_too() -> None:
    asked = Asked()
    reading = ReadAhead(asked.begin, 4, 1 << 30)
    asked_for = []
    reading.cancel()
    for _ in range(4):
        asked_for += reading.collect(1)
    assert asked_for == [ReadOutcome.CANCELLED] * 4
    reading.close()


def test_pages_that_nobody_collects_are_left_alone_after_close(store: DiskStore) -> None:
    pages = named(range(60), NBYTES)
    put(store, pages)
    names, into = list(pages), [aligned(NBYTES) for _ in pages]

    def begin(first: int, last: int) -> ReadJob:
        return store.read([PageRead(names[i], [into[i]]) for i in range(first, last)])

    reading = ReadAhead(begin, len(names), NBYTES)
    assert reading.collect(8) == [ReadOutcome.OK] * 8
    reading.close()
    assert [bytes(into[i]) for i in range(8)] == [pages[name] for name in names[:8]]
    for buffer in into:
        buffer[:] = b"\x5a" * NBYTES
    store.close()  # waits for every read: what was still under way would have written by now
    assert all(bytes(buffer) == b"\x5a" * NBYTES for buffer in into)


def test_a_page_that_is_not_there_is_a_miss_among_the_others(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, named((i for i in range(20) if i != 7), NBYTES))
    keys = [key(i) for i in range(20)]
    reading = ReadAhead(lambda a, b: begin(store, keys[a:b], NBYTES), 20, NBYTES)
    found = reading.collect(6) + reading.collect(6) + reading.collect(20)
    assert found == [ReadOutcome.MISS if i == 7 else ReadOutcome.OK for i in range(20)]
    reading.close()


def test_pages_whose_outcomes_could_not_be_had_are_not_taken_for_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forgetful(OrderedJob):
        forgets = True

        @property
        def outcomes(self) -> list[ReadOutcome | None]:
            if self.forgets:
                self.forgets = False
                raise MemoryError
            return super().outcomes

    def begin(first: int, last: int) -> ReadJob:
        job = Forgetful(last - first, None, None)
        job.end_rest(ReadOutcome.MISS if first == 0 else ReadOutcome.OK)
        return job

    monkeypatch.setattr(ahead, "AHEAD_BYTES", 2 * NBYTES)
    reading = ReadAhead(begin, 4, NBYTES)
    with pytest.raises(MemoryError):
        reading.collect(2)
    assert reading.collect(2) == [ReadOutcome.MISS] * 2
    reading.close()
