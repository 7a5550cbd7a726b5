"""An engine in trouble: pages are misses, nothing waits long, and it is used again afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import until
from remote_pages import alive, outcomes, stored
from store_pages import begin, key, named, put

from sgl_kvtier.remote import breaker
from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PageRead, PutOutcome, ReadOutcome
from sgl_kvtier.types import Lookup

OK, MISS, FAILED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.FAILED
CORRUPT, LATE = ReadOutcome.CORRUPT, ReadOutcome.LATE
REFUSED = PutOutcome.REFUSED
Opened = Callable[..., RemoteStore]


@pytest.fixture(autouse=True)
def probes_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_S", 0.1)


@pytest.fixture
def hasty(opened: Opened) -> RemoteStore:
    """A store that gives a call up after 0.3 s, and a child after 0.6 s."""
    return opened(deadline_s=0.3, hang_s=0.6)


def comes_back(store: RemoteStore, folder: Path) -> None:
    """The trouble is over: pages are written and read again, and all of the ring is free."""
    set_faults(folder, {})
    until(lambda: store.usable)
    pages = stored(store, ["after"])
    assert outcomes(store, pages) == [OK]
    until(lambda: store.condition().ring_taken_bytes == 0)
    assert store.condition().trouble == ""


def test_a_get_that_hangs_fails_at_its_deadline_and_its_child_is_killed(
    hasty: RemoteStore, folder: Path
) -> None:
    pages = stored(hasty, range(8))
    child = hasty.condition().child
    set_faults(folder, {"hang": ["get"]})
    assert outcomes(hasty, pages) == [FAILED] * 8
    assert hasty.condition().ring_taken_bytes > 0, "the child may still write there"
    assert "longer than 0.3 s" in hasty.condition().trouble
    assert outcomes(hasty, pages) == [MISS] * 8
    until(lambda: not alive(child))
    comes_back(hasty, folder)
    assert hasty.condition().starts == 2


@pytest.mark.parametrize("method", ["exists", "put"])
def test_a_put_that_hangs_is_refused(hasty: RemoteStore, folder: Path, method: str) -> None:
    set_faults(folder, {"hang": [method]})
    assert put(hasty, {key(1): b"x"}) == [REFUSED]
    until(lambda: not hasty.usable)
    comes_back(hasty, folder)


def test_a_question_that_hangs_is_not_waited_for(hasty: RemoteStore, folder: Path) -> None:
    set_faults(folder, {"hang": ["exists"]})
    assert not hasty.ask([key(1)], timeout_s=0.01)
    assert hasty.condition().exists_late == 1
    until(lambda: not hasty.usable)
    comes_back(hasty, folder)


def test_an_answer_that_is_late_is_kept_for_the_next_look_up(opened: Opened, folder: Path) -> None:
    pages = stored(opened(), range(3))
    other = opened()
    set_faults(folder, {"slow_s": 0.1})
    assert not other.ask(list(pages), timeout_s=0.001)
    until(lambda: other.lookup(list(pages)) == [Lookup.HIT] * 3)


@pytest.mark.parametrize("method", ["get", "put", "exists", "remove"])
def test_a_child_that_crashes_is_replaced(hasty: RemoteStore, folder: Path, method: str) -> None:
    pages = stored(hasty, range(8))
    set_faults(folder, {"crash": [method]})
    if method == "get":
        assert outcomes(hasty, pages) == [FAILED] * 8
    elif method == "remove":
        assert hasty.delete([key(1)]) == 0
    else:
        assert put(hasty, {key("new"): b"x"}) == [REFUSED]
    until(lambda: not hasty.usable)
    comes_back(hasty, folder)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_is_killed_or_stopped_is_replaced(
    hasty: RemoteStore, folder: Path, how: signal.Signals
) -> None:
    pages = stored(hasty, range(64), 50_000)
    child = hasty.condition().child
    job = begin(hasty, pages, 50_000)
    os.kill(child, how)
    assert job.wait(30)
    assert set(job.outcomes) <= {OK, FAILED, MISS, LATE}
    until(lambda: not alive(child))
    comes_back(hasty, folder)


def test_a_child_that_is_killed_while_it_starts_is_replaced(opened: Opened, folder: Path) -> None:
    store = opened(wait=False)
    until(lambda: store.condition().child)
    os.kill(store.condition().child, signal.SIGKILL)
    comes_back(store, folder)
    assert store.condition().starts == 2


def test_a_store_opens_without_its_engine_and_finds_it_later(opened: Opened, folder: Path) -> None:
    later = folder / "later"
    store = opened(wait=False, master=str(later))
    assert outcomes(store, {key(1): b"x"}) == [MISS]
    until(lambda: "there is no folder" in store.condition().trouble)
    later.mkdir()
    until(lambda: store.usable)
    assert outcomes(store, stored(store, [1])) == [OK]


def test_a_master_that_does_not_answer_makes_all_pages_misses(opened: Opened, folder: Path) -> None:
    store = opened()
    pages = stored(store, range(8))
    set_faults(folder, {"unreachable": True})
    assert outcomes(store, pages) == [FAILED] * 8
    assert not store.usable
    assert store.condition().trouble == "its master does not answer"
    assert store.lookup(list(pages)) == [Lookup.MISS] * 8
    assert outcomes(store, pages) == [MISS] * 8
    assert put(store, {key("new"): b"x"}) == [REFUSED]
    assert not store.ask([key("other")])
    comes_back(store, folder)
    assert store.condition().starts == 1
    assert outcomes(store, pages) == [OK] * 8


def test_a_full_engine_refuses_pages_and_goes_on_reading(opened: Opened, folder: Path) -> None:
    store = opened()
    pages = stored(store, range(3))
    set_faults(folder, {"refuse": True})
    assert put(store, named(range(100, 120))) == [REFUSED] * 20
    assert store.stats().pages_refused == 20
    assert outcomes(store, pages) == [OK] * 3


def test_a_page_whose_owner_is_gone_is_not_tried_again_at_once(
    opened: Opened, folder: Path
) -> None:
    store = opened()
    pages = stored(store, range(3))
    set_faults(folder, {"get": {"fail": 1.0}})
    assert outcomes(store, pages) == [FAILED] * 3
    set_faults(folder, {})
    assert store.lookup(list(pages)) == [Lookup.MISS] * 3
    assert outcomes(store, pages) == [MISS] * 3
    assert outcomes(store, stored(store, ["other"])) == [OK]


def test_most_calls_failing_opens_the_breaker(opened: Opened, folder: Path) -> None:
    store = opened()
    pages = stored(store, range(20))
    set_faults(folder, {"get": {"fail": 1.0}})
    assert {outcomes(store, {k: data})[0] for k, data in pages.items()} == {FAILED, MISS}
    until(lambda: not store.usable)
    assert store.condition().trouble == "most of its calls fail"


@pytest.mark.parametrize(
    "fault", ["flip", "flip_head", "swap", "other_identity", "torn", "truncate"]
)
def test_a_damaged_page_is_noticed_and_removed(opened: Opened, folder: Path, fault: str) -> None:
    store, other = opened(), opened()
    pages = stored(store, range(2))
    set_faults(folder, {"get": {fault: 1.0}})
    assert outcomes(store, pages) == [CORRUPT] * 2
    assert store.stats().pages_corrupt == 2
    set_faults(folder, {})
    assert outcomes(store, pages) == [MISS] * 2
    until(lambda: not list(folder.glob("kvt1*")))
    assert outcomes(other, pages) == [MISS] * 2


def test_bytes_that_come_after_a_failure_reach_no_page(opened: Opened, folder: Path) -> None:
    store = opened()
    pages = stored(store, range(64), 20_000)
    set_faults(folder, {"get": {"late": 0.03}, "late_s": 0.05})
    for _ in range(2):
        store._presence.clear()
        until(lambda: store.usable)
        buffers = [bytearray(20_000) for _ in pages]
        job = store.read(
            [PageRead(k, [memoryview(b)]) for k, b in zip(pages, buffers, strict=True)]
        )
        assert job.wait(30)
        copies = [bytes(b) for b in buffers]
        for copy, data, outcome in zip(copies, pages.values(), job.outcomes, strict=True):
            assert outcome is not OK or copy == data
        outcomes(store, pages)
        assert [bytes(b) for b in buffers] == copies


def test_pages_not_begun_at_the_deadline_are_late_and_begun_ones_failed(
    opened: Opened, folder: Path
) -> None:
    store = opened(deadline_s=5.0, hang_s=5.0, ring_bytes=1 << 20)
    pages = stored(store, range(20), 100_000)
    set_faults(folder, {"hang": ["get"]})
    job = begin(store, pages, 100_000, deadline_s=0.1)
    assert job.wait(30)
    assert job.in_flight == 0
    assert job.outcomes == [FAILED] * 6 + [LATE] * 14
    assert store.usable, "the caller was in a hurry: that says nothing of the engine"
    set_faults(folder, {})


def test_a_job_behind_a_hanging_one_ends_at_its_own_deadline(opened: Opened, folder: Path) -> None:
    store = opened(deadline_s=5.0, hang_s=5.0, ring_bytes=1 << 20)
    pages = stored(store, range(12), 50_000)
    set_faults(folder, {"hang": ["get"]})
    first = begin(store, pages, 50_000)
    second = begin(store, pages, 50_000, deadline_s=0.1)
    assert second.wait(30)
    assert second.outcomes == [LATE] * 12
    assert not first.done


def test_a_batch_that_the_links_own_thread_begins_fails_at_its_deadline_too(
    opened: Opened, folder: Path
) -> None:
    """The engine hangs from the first page on: the rest is begun as room becomes free."""
    store = opened(deadline_s=0.3, hang_s=0.6, ring_bytes=1 << 20)
    pages = stored(store, range(40), 100_000)

    def hang(index: int, outcome: ReadOutcome) -> None:
        set_faults(folder, {"hang": ["get"]})

    job = begin(store, pages, 100_000, on_page=hang)
    assert job.wait(10)
    assert FAILED in job.outcomes
    comes_back(store, folder)
