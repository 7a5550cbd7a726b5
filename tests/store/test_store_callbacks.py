"""What a reader's callback may do: whatever it does, its job and those of others end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from store_pages import aligned, content, key, put, read

from sgl_kvtier.store.base import PageRead, PutOutcome, ReadJob, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

LONG_S = 30.0


class Stop(BaseException):
    """No Exception, and none that Python knows."""


def raising(error: type[BaseException]) -> Callable[[int, ReadOutcome], None]:
    def on_page(index: int, outcome: ReadOutcome) -> None:
        raise error(3)

    return on_page


def begin(store: DiskStore, names: list[object], **how: Any) -> ReadJob:
    return store.read([PageRead(key(name), [aligned(5000)]) for name in names], **how)


def ends_well(store: DiskStore, job: ReadJob, names: list[object]) -> None:
    assert job.wait(LONG_S)
    assert job.outcomes == [ReadOutcome.OK] * len(names)
    assert job.in_flight == 0
    after = begin(store, names, on_page=lambda index, outcome: None)
    assert after.wait(LONG_S), "the thread of the callbacks lives on"
    assert read(store, {key(name): 5000 for name in names}) == [
        (ReadOutcome.OK, content(name, 5000)) for name in names
    ]


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
    store: DiskStore, error: type[BaseException]
) -> None:
    names = list(range(8))
    put(store, {key(name): content(name, 5000) for name in names})
    ends_well(store, begin(store, names, on_page=raising(error)), names)


def test_a_callback_may_delete_put_read_and_look_up(store: DiskStore) -> None:
    names = list(range(8))
    put(store, {key(name): content(name, 5000) for name in names})
    found: dict[int, Any] = {}

    def on_page(index: int, outcome: ReadOutcome) -> None:
        deleted = store.delete([key(index)])
        stored = put(store, {key(("new", index)): content(("new", index), 5000)})
        again = begin(store, [("new", index)], on_page=lambda i, o: None)
        found[index] = (deleted, stored, again, store.lookup([key(index)]))

    job = begin(store, names, on_page=on_page)
    assert job.wait(LONG_S)
    assert sorted(found) == names
    for index, (deleted, stored, again, looked_up) in found.items():
        assert (deleted, stored, looked_up) == (1, [PutOutcome.STORED], [Lookup.MISS]), index
        assert again.wait(LONG_S) and again.outcomes == [ReadOutcome.OK]


@pytest.mark.parametrize("how", ["clear", "sync", "stats", "cancel"])
def test_a_callback_may_call_everything_else(store: DiskStore, how: str) -> None:
    names = list(range(8))
    put(store, {key(name): content(name, 5000) for name in names})
    known: list[ReadJob] = []
    begun = threading.Event()

    def on_page(index: int, outcome: ReadOutcome) -> None:
        assert begun.wait(LONG_S)
        known[0].cancel() if how == "cancel" else getattr(store, how)()

    known.append(begin(store, names, on_page=on_page))
    begun.set()
    assert known[0].wait(LONG_S)
    assert None not in known[0].outcomes


def test_a_callback_may_close_the_store(opened: Callable[..., DiskStore]) -> None:
    store = opened()
    names = list(range(8))
    put(store, {key(name): content(name, 5000) for name in names})
    job = begin(store, names, on_page=lambda index, outcome: store.close())
    assert job.wait(LONG_S)
    assert set(job.outcomes) <= {ReadOutcome.OK, ReadOutcome.CANCELLED}
    again = opened()
    assert read(again, {key(0): 5000}) == [(ReadOutcome.OK, content(0, 5000))]


def test_callbacks_of_many_threads_may_close_the_store_at_once(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened(io_threads=4)
    put(store, {key(name): content(name, 5000) for name in range(8)})
    jobs = [begin(store, [name], on_page=lambda index, outcome: store.close()) for name in range(8)]
    assert all(job.wait(LONG_S) for job in jobs)


def test_a_callback_that_waits_for_its_own_read_is_told_not_to(
    store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, {key(1): content(1, 5000)})
    known: list[ReadJob] = []
    begun = threading.Event()

    def on_page(index: int, outcome: ReadOutcome) -> None:
        assert begun.wait(LONG_S)
        known[0].wait()

    known.append(begin(store, [1], on_page=on_page))
    begun.set()
    assert known[0].wait(LONG_S)
    assert known[0].outcomes == [ReadOutcome.OK]
    assert "must not wait for a read" in caplog.text


@pytest.mark.parametrize("error", [SystemExit, Stop])
def test_pages_that_are_late_or_cancelled_end_although_their_callback_raises(
    store: DiskStore, error: type[BaseException]
) -> None:
    put(store, {key(1): content(1, 5000)})
    late = begin(store, [1], deadline_s=-1.0, on_page=raising(error))
    assert late.wait(LONG_S)
    assert late.outcomes == [ReadOutcome.LATE]
    cancelled = begin(store, list(range(300)), on_page=raising(error))
    cancelled.cancel()
    assert cancelled.wait(LONG_S)
    assert begin(store, [1], on_page=lambda index, outcome: None).wait(LONG_S)


@pytest.mark.parametrize("error", [SystemExit, Stop])
def test_a_store_closes_although_callbacks_raise(
    opened: Callable[..., DiskStore], error: type[BaseException]
) -> None:
    store = opened()
    put(store, {key(name): content(name, 5000) for name in range(8)})
    jobs = [begin(store, list(range(8)), on_page=raising(error)) for _ in range(20)]
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert all(job.wait(LONG_S) for job in jobs)
