"""What a reader's callback may do: whatever it does, its job and those of others end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from patience import beside
from store_pages import Open, begin, found, key, named, put

from sgl_kvtier.store.base import PutOutcome, ReadJob, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

LONG_S = 30.0


class Stop(BaseException):
    """No Exception, and none that Python knows."""


def raising(error: type[BaseException]) -> Callable[[int, ReadOutcome], None]:
    def on_page(index: int, outcome: ReadOutcome) -> None:
        raise error(3)

    return on_page


NAMES = named(range(8))


def ignore(index: int, outcome: ReadOutcome) -> None:
    pass


@pytest.fixture
def filled(store: DiskStore) -> DiskStore:
    put(store, NAMES)
    return store


@pytest.mark.parametrize(
    "error",
    [
        SystemExit,
        KeyboardInterrupt,
        GeneratorExit,
        Stop,
        MemoryError,
        StopIteration,
        RecursionError,
    ],
)
def test_a_callback_that_raises_leaves_no_page_without_an_answer(
    filled: DiskStore, error: type[BaseException]
) -> None:
    job = begin(filled, NAMES, on_page=raising(error))
    assert job.wait(LONG_S)
    assert job.outcomes == [ReadOutcome.OK] * 8
    assert job.in_flight == 0
    after = begin(filled, NAMES, on_page=ignore)
    assert after.wait(LONG_S), "the thread of the callbacks lives on"
    assert found(filled, NAMES) == 8


def test_a_callback_may_delete_put_read_and_look_up(filled: DiskStore) -> None:
    seen: dict[int, Any] = {}

    def on_page(index: int, outcome: ReadOutcome) -> None:
        new = named([("new", index)])
        deleted, stored = filled.delete([key(index)]), put(filled, new)
        again = begin(filled, new, on_page=ignore)
        seen[index] = (deleted, stored, again, filled.lookup([key(index)]))

    job = begin(filled, NAMES, on_page=on_page)
    assert job.wait(LONG_S)
    assert sorted(seen) == list(range(8))
    for index, (deleted, stored, again, looked_up) in seen.items():
        assert (deleted, stored, looked_up) == (1, [PutOutcome.STORED], [Lookup.MISS]), index
        assert again.wait(LONG_S) and again.outcomes == [ReadOutcome.OK]


@pytest.mark.parametrize("how", ["clear", "sync", "stats", "cancel"])
def test_a_callback_may_call_everything_else(filled: DiskStore, how: str) -> None:
    known: list[ReadJob] = []
    begun = threading.Event()

    def on_page(index: int, outcome: ReadOutcome) -> None:
        assert begun.wait(LONG_S)
        known[0].cancel() if how == "cancel" else getattr(filled, how)()

    known.append(begin(filled, NAMES, on_page=on_page))
    begun.set()
    assert known[0].wait(LONG_S)
    assert None not in known[0].outcomes


def test_a_callback_may_close_the_store(filled: DiskStore, opened: Open) -> None:
    job = begin(filled, NAMES, on_page=lambda index, outcome: filled.close())
    assert job.wait(LONG_S)
    assert set(job.outcomes) <= {ReadOutcome.OK, ReadOutcome.CANCELLED}
    assert found(opened(), NAMES) == 8


def test_callbacks_of_many_threads_may_close_the_store_at_once(opened: Open) -> None:
    store = opened(io_threads=4)
    put(store, NAMES)
    jobs = [begin(store, [name], on_page=lambda index, outcome: store.close()) for name in NAMES]
    assert all(job.wait(LONG_S) for job in jobs)


def test_a_callback_that_waits_for_its_own_read_is_told_not_to(
    filled: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    known: list[ReadJob] = []
    begun = threading.Event()

    def on_page(index: int, outcome: ReadOutcome) -> None:
        assert begun.wait(LONG_S)
        known[0].wait()

    known.append(begin(filled, [key(1)], on_page=on_page))
    begun.set()
    assert known[0].wait(LONG_S)
    assert known[0].outcomes == [ReadOutcome.OK]
    assert "must not wait for a read" in caplog.text


@pytest.mark.parametrize("error", [SystemExit, Stop])
def test_pages_that_are_late_or_cancelled_end_although_their_callback_raises(
    filled: DiskStore, error: type[BaseException]
) -> None:
    late = begin(filled, [key(1)], deadline_s=-1.0, on_page=raising(error))
    assert late.wait(LONG_S)
    assert late.outcomes == [ReadOutcome.LATE]
    cancelled = begin(filled, map(key, range(300)), on_page=raising(error))
    cancelled.cancel()
    assert cancelled.wait(LONG_S)
    assert begin(filled, [key(1)], on_page=ignore).wait(LONG_S)


@pytest.mark.parametrize("error", [SystemExit, Stop])
def test_a_store_closes_although_callbacks_raise(
    filled: DiskStore, error: type[BaseException]
) -> None:
    jobs = [begin(filled, NAMES, on_page=raising(error)) for _ in range(20)]
    beside(filled.close).result(LONG_S)
    assert all(job.wait(LONG_S) for job in jobs)
