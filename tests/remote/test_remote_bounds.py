"""How long calls wait for an engine that stands still, and what holds meanwhile.

The limits here are hundreds of milliseconds, and every test allows seconds: a call without a bound
lasts as long as the engine stands still, which here is until the test ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import beside, until
from remote_pages import IDENTITY, alive, outcomes, stored
from store_pages import begin, key, named, put

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.remote import breaker, removals
from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.store.tiered.store import TieredStore
from sgl_kvtier.types import Lookup

OK, MISS, FAILED, LATE = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.FAILED, ReadOutcome.LATE
STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED
HIT, GONE = Lookup.HIT, Lookup.MISS
BOUND_S = 0.5
Opened = Callable[..., RemoteStore]
ALL = ["exists", "get", "put", "remove"]


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and repeated removals come at once."""
    monkeypatch.setattr(breaker, "FIRST_S", 0.05)
    monkeypatch.setattr(breaker, "LONGEST_S", 0.2)
    monkeypatch.setattr(removals, "RETRY_S", 0.05)


@pytest.fixture
def remote(opened: Opened) -> RemoteStore:
    """A store whose calls wait for half a second, with a child that may hang for a minute."""
    return opened(deadline_s=BOUND_S, hang_s=60.0)


@pytest.fixture
def tiered(remote: RemoteStore, tmp_path: Path) -> Iterator[TieredStore]:
    """A local store before it."""
    config = StoreConfig(path=str(tmp_path), capacity_bytes=64 << 20, min_free_bytes=0)
    store = TieredStore(open_store(config, IDENTITY, "tp0"), remote)
    yield store
    store.close()


@pytest.fixture
def stopped(remote: RemoteStore) -> Iterator[Callable[[], int]]:
    """Stops the child; it goes on when the test ends, or is dead by then."""
    children: list[int] = []

    def stop() -> int:
        children.append(remote.condition().child)
        os.kill(children[-1], signal.SIGSTOP)
        return children[-1]

    yield stop
    for child in children:
        if alive(child):
            os.kill(child, signal.SIGCONT)


def filled(opened: Opened, count: int, nbytes: int) -> None:
    """Pages in the engine, by a store that has time."""
    writer = opened(deadline_s=30.0, hang_s=30.0)
    stored(writer, range(count), nbytes)
    writer.close()


def bounded(call: Callable[[], object]) -> object:
    """What a call returns; fails where it lasts many times its bound."""
    begun = time.monotonic()
    found = call()
    assert time.monotonic() - begun < 10 * BOUND_S, "it waited for an engine that stands still"
    return found


def test_a_delete_beside_a_stopped_child_returns_and_its_pages_are_not_used_any_more(
    remote: RemoteStore, stopped: Callable[[], int]
) -> None:
    pages = stored(remote, range(4))
    child = stopped()
    assert bounded(lambda: remote.delete([key(0), key(1)])) == 0
    condition = remote.condition()
    assert (remote.calls_late, condition.removals_waiting) == (1, 2)
    os.kill(child, signal.SIGCONT)
    until(lambda: remote.removals_waiting == 0)
    until(lambda: remote.ask(list(pages), timeout_s=5))
    assert remote.lookup(list(pages)) == [GONE, GONE, HIT, HIT]
    assert outcomes(remote, pages) == [MISS, MISS, OK, OK]


def test_deleted_pages_stay_hidden_for_as_long_as_the_engine_does_not_remove_them(
    remote: RemoteStore, opened: Opened, folder: Path
) -> None:
    pages = stored(remote, range(4))
    set_faults(folder, {"ignore": ["remove"]})
    bounded(lambda: remote.delete([key(0)]))
    assert remote.usable and not remote.ask(list(pages), timeout_s=5)
    assert remote.lookup(list(pages))[0] is GONE
    assert outcomes(remote, pages)[0] is MISS
    assert put(remote, {key(0): pages[key(0)]}) == [REFUSED]
    other = opened()
    assert outcomes(other, pages) == [OK] * 4, "the engine has them still"


def test_a_clear_beside_a_stopped_child_holds_here_at_once_and_for_all_when_it_goes_on(
    remote: RemoteStore, opened: Opened, stopped: Callable[[], int]
) -> None:
    pages = stored(remote, range(4))
    child = stopped()
    bounded(remote.clear)
    assert remote.removals_waiting == 1
    os.kill(child, signal.SIGCONT)
    until(lambda: remote.removals_waiting == 0)
    until(lambda: remote.usable)
    assert outcomes(remote, pages) == [MISS] * 4
    other = opened()
    assert other.ask(list(pages), timeout_s=5)
    assert other.lookup(list(pages)) == [GONE] * 4
    assert stored(remote, range(4)) == pages, "pages are taken again"


def test_a_removal_is_sent_to_the_next_child_where_the_first_one_is_killed(
    opened: Opened, folder: Path
) -> None:
    store = opened(deadline_s=0.3, hang_s=0.6)
    pages = stored(store, range(3))
    set_faults(folder, {"hang": ["remove"]})
    child = store.condition().child
    bounded(store.clear)
    until(lambda: not alive(child))
    set_faults(folder, {})
    until(lambda: store.removals_waiting == 0)
    assert not list(folder.glob("kvt1*"))
    assert store.wait_usable(20) and outcomes(store, pages) == [MISS] * 3


def test_a_clear_that_the_master_did_not_take_is_sent_again(
    remote: RemoteStore, folder: Path
) -> None:
    pages = stored(remote, range(3))
    set_faults(folder, {"unreachable": True})
    bounded(remote.clear)
    assert remote.removals_waiting == 1
    set_faults(folder, {})
    until(lambda: remote.removals_waiting == 0)
    assert remote.wait_usable(20) and outcomes(remote, pages) == [MISS] * 3
    assert not list(folder.glob("kvt1*"))


def test_a_delete_while_the_engine_is_not_usable_returns_at_once_and_is_done_later(
    remote: RemoteStore, folder: Path
) -> None:
    pages = stored(remote, range(3))
    set_faults(folder, {"unreachable": True})
    outcomes(remote, pages)
    until(lambda: not remote.usable)
    assert remote.delete([key(0)]) == 0
    assert remote.removals_waiting == 1
    set_faults(folder, {})
    until(lambda: remote.removals_waiting == 0)
    assert len(list(folder.glob("kvt1*"))) == 2


def test_what_a_closed_store_has_not_removed_the_next_one_of_this_process_removes(
    remote: RemoteStore, opened: Opened, folder: Path
) -> None:
    pages = stored(remote, range(3))
    set_faults(folder, {"ignore": ["remove"]})
    bounded(lambda: remote.delete([key(0)]))
    bounded(remote.close)
    other = opened(rank="tp1")
    assert other.removals_waiting == 0, "another rank's pages are not its own"
    again = opened()
    assert again.removals_waiting == 1
    assert outcomes(again, pages) == [MISS, OK, OK]
    set_faults(folder, {})
    until(lambda: again.removals_waiting == 0)
    assert len(list(folder.glob("kvt1*"))) == 2


def test_a_put_beside_a_stopped_child_is_refused_in_time_and_counted(
    remote: RemoteStore, stopped: Callable[[], int]
) -> None:
    stopped()
    assert bounded(lambda: put(remote, {key(0): b"x"})) == [REFUSED]
    assert remote.calls_late == 1


def test_a_store_closes_beside_a_stopped_child(
    remote: RemoteStore, stopped: Callable[[], int]
) -> None:
    stored(remote, range(3))
    child = stopped()
    job = begin(remote, named(range(3)))
    bounded(remote.close)
    assert job.wait(5)
    until(lambda: not alive(child))


def test_a_read_without_a_deadline_ends_where_the_ring_has_no_room_and_nothing_comes(
    opened: Opened, folder: Path
) -> None:
    """Failed transfers keep their part of the ring for as long as a child may hang."""
    store = opened(deadline_s=BOUND_S, hang_s=60.0, ring_bytes=1 << 20)
    filled(opened, 40, 100_000)
    set_faults(folder, {"get": {"fail": 1.0}})
    job = begin(store, named(range(40)), 100_000)
    assert job.wait(20 * BOUND_S), "it waited for room in the ring"
    assert set(job.outcomes) <= {FAILED, LATE, MISS} and FAILED in job.outcomes
    assert job.in_flight == 0


def test_reads_one_behind_the_other_end_when_nothing_comes_for_any_of_them(
    remote: RemoteStore, opened: Opened, stopped: Callable[[], int]
) -> None:
    filled(opened, 64, 200_000)
    stopped()
    jobs = [begin(remote, named(range(64)), 200_000, priority=priority) for priority in (0, 3, 1)]
    for job in jobs:
        assert job.wait(20 * BOUND_S)
        assert OK not in job.outcomes


def test_a_long_read_is_not_ended_while_its_pages_come(opened: Opened, folder: Path) -> None:
    store = opened(deadline_s=1.0, hang_s=60.0, ring_bytes=1 << 20)
    filled(opened, 24, 100_000)
    set_faults(folder, {"slow_s": 0.2})
    begun = time.monotonic()
    job = begin(store, named(range(24)), 100_000)
    assert job.wait(30) and job.outcomes == [OK] * 24
    assert time.monotonic() - begun > 1.0, "it lasted longer than nothing may come"


def test_a_tiered_delete_and_clear_beside_a_stopped_child_return_while_pages_are_sent(
    tiered: TieredStore, remote: RemoteStore, stopped: Callable[[], int]
) -> None:
    """Another thread writes all the time, so that there is always something to send."""
    child = stopped()
    over = threading.Event()

    def write() -> None:
        for n in range(1000, 100_000):
            if over.is_set():
                return
            put(tiered, named([n]))

    writing = beside(write)
    try:
        until(lambda: tiered.tiered_stats().uploads_waiting > 200)
        for n in (1000, 1001):
            assert bounded(lambda n=n: tiered.delete([key(n)])) == 1
        bounded(tiered.clear)
    finally:
        over.set()
        writing.result(60)
    assert tiered.lookup([key(n) for n in (1000, 1001, 1002)]) == [GONE] * 3
    stats = tiered.tiered_stats()
    assert stats.calls_late >= 1 and stats.removals_waiting >= 1
    os.kill(child, signal.SIGCONT)
    until(lambda: tiered.tiered_stats().removals_waiting == 0)


def test_a_tiered_store_closes_while_the_engine_stands_still_and_pages_wait(
    tiered: TieredStore, stopped: Callable[[], int]
) -> None:
    put(tiered, named([0]))
    assert tiered.settle(20)
    stopped()
    put(tiered, named(range(1, 300)))
    bounded(tiered.close)


def test_pages_cleared_while_the_engine_hangs_are_neither_found_nor_read_nor_sent_afterwards(
    tiered: TieredStore, remote: RemoteStore, opened: Opened, folder: Path
) -> None:
    pages = named(range(20))
    put(tiered, pages)
    assert tiered.settle(20)
    child = remote.condition().child
    set_faults(folder, {"hang": ALL})
    assert bounded(tiered.clear) == 20
    assert tiered.find(list(pages)) == [GONE] * 20
    os.kill(child, signal.SIGKILL)
    set_faults(folder, {"ignore": ["remove"]})
    until(lambda: remote.condition().child not in (0, child) and remote.usable)
    assert tiered.find(list(pages), timeout_s=1) == [GONE] * 20
    assert outcomes(tiered, pages) == [MISS] * 20  # type: ignore[arg-type]
    put(tiered, named(["new"]))
    assert not tiered.settle(0.3), "nothing is sent before the clear is done"
    set_faults(folder, {})
    assert tiered.settle(30)
    other = opened()
    assert other.ask([*pages, key("new")], timeout_s=5)
    assert other.lookup([*pages, key("new")]) == [GONE] * 20 + [HIT]
