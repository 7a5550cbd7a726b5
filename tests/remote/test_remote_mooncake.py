"""The remote store over the real Mooncake: its binaries, killed, stopped, full and damaged."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from patience import until
from remote_pages import IDENTITY, STARTED_S, alive, outcomes, stored
from store_pages import begin, content, key, named, put, read

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.remote.far import Far
from sgl_kvtier.launch import free_port
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.servers import Servers, owner_command
from sgl_kvtier.remote.store import RemoteStore, open_remote
from sgl_kvtier.store.base import PageRead, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.types import Lookup, PageKey

pytestmark = [
    pytest.mark.mooncake,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None,
        reason="Mooncake is not installed: pip install 'sgl-kvtier[remote]'",
    ),
    pytest.mark.skipif(
        ctypes.util.find_library("ibverbs") is None,
        reason="Mooncake needs libibverbs: apt-get install libibverbs1",
    ),
]
OK, MISS, FAILED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.FAILED
STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED
Opened = Callable[..., RemoteStore]
PAGE = 256 << 10


class Cluster(Servers):
    """A master and an owner whose processes a test may kill and stop."""

    def __enter__(self) -> Cluster:
        self.master_process = self.start_master()
        self.owner_process = self.start_owner()
        return self


class Hidden(Servers):
    """A master, and an owner that calls itself by an address that nothing has."""

    @property
    def commands(self) -> list[list[str]]:
        return [
            super().commands[0],
            owner_command("192.0.2.1", free_port(self.host), self.master, 64 << 20),
        ]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(128 << 20, lease_ms=500)
    try:
        yield cluster.__enter__()
    finally:
        cluster.stop()


@pytest.fixture
def connected() -> Iterator[Opened]:
    """Opens stores of a cluster; `connected(cluster, hang_s=2.0)`."""
    stores: list[RemoteStore] = []

    def open_(
        cluster: Servers, identity: Identity = IDENTITY, wait: bool = True, **settings: Any
    ) -> RemoteStore:
        chosen = {"engine": "mooncake", "master": cluster.master, "ring_bytes": 16 << 20}
        store = open_remote(RemoteSettings(**(chosen | settings)), identity, "tp0")
        stores.append(store)
        assert not wait or store.wait_usable(STARTED_S), store.condition().trouble
        return store

    yield open_
    for store in stores:
        store.close()


def works(store: RemoteStore, name: object) -> None:
    """New pages are written and read again, once the trouble is over."""
    until(lambda: store.usable, 40)
    page = named([name], PAGE)
    until(lambda: put(store, page)[0] is not REFUSED, 40)
    assert outcomes(store, page) == [OK]


def test_a_server_finds_what_another_wrote(cluster: Cluster, connected: Opened) -> None:
    store, other = connected(cluster), connected(cluster)
    pages = stored(store, range(40), PAGE)
    assert put(other, pages) == [PutOutcome.KEPT] * 40
    asking = connected(cluster)
    assert asking.ask([*pages, key("none")], timeout_s=10)
    assert asking.lookup([*pages, key("none")]) == [Lookup.HIT] * 40 + [Lookup.MISS]
    assert outcomes(asking, pages) == [OK] * 40


def test_deletes_and_clears_are_of_one_identity(cluster: Cluster, connected: Opened) -> None:
    store = connected(cluster)
    other = connected(cluster, Identity({"model": "other"}))
    mine, theirs = stored(store, range(10), 5000), stored(other, range(10), 5000)
    assert store.delete(list(mine)[:3]) == 3
    assert store.clear() == 7
    assert outcomes(store, mine) == [MISS] * 10
    assert outcomes(other, theirs) == [OK] * 10


def test_an_owner_that_wakes_up_late_writes_into_no_page(
    cluster: Cluster, connected: Opened
) -> None:
    store = connected(cluster, deadline_s=1.0, hang_s=2.0)
    pages = stored(store, range(32), PAGE)
    child = store.condition().child
    cluster.owner_process.send_signal(signal.SIGSTOP)
    buffers = [bytearray(PAGE) for _ in pages]
    job = store.read([PageRead(k, [memoryview(b)]) for k, b in zip(pages, buffers, strict=True)])
    assert job.wait(20)
    assert OK not in job.outcomes and FAILED in job.outcomes
    assert job.in_flight == 0
    for buffer in buffers:
        buffer[:] = b"\7" * PAGE
    cluster.owner_process.send_signal(signal.SIGCONT)
    time.sleep(3.0)  # after one second an engine on this memory had written megabytes
    assert sum(PAGE - buffer.count(7) for buffer in buffers) == 0
    until(lambda: store.condition().ring_taken_bytes == 0, 40)
    works(store, "after")
    store._presence.clear()
    assert outcomes(store, pages) == [OK] * 32
    assert store.condition().starts == 2 or alive(child)


def test_a_master_that_is_killed_makes_all_pages_misses_until_there_is_another(
    cluster: Cluster, connected: Opened
) -> None:
    store = connected(cluster, hang_s=10.0)
    pages = stored(store, range(8), PAGE)
    cluster.master_process.kill()
    cluster.master_process.wait()
    assert OK not in outcomes(store, {key("none"): b"x"})
    until(lambda: not store.usable, 40)
    assert outcomes(store, pages) == [MISS] * 8
    assert put(store, {key("new"): b"x"}) == [REFUSED]
    assert not store.ask([key("other")])
    cluster.start_master()
    works(store, "after")


def test_a_master_that_is_stopped_loses_no_page(cluster: Cluster, connected: Opened) -> None:
    store = connected(cluster, hang_s=10.0)
    pages = stored(store, range(8), PAGE)
    cluster.master_process.send_signal(signal.SIGSTOP)
    assert not store.ask([key("other")], timeout_s=0.02)
    until(lambda: not store.usable, 40)
    assert outcomes(store, pages) == [MISS] * 8
    cluster.master_process.send_signal(signal.SIGCONT)
    until(lambda: store.usable, 40)
    store._presence.clear()
    assert outcomes(store, pages) == [OK] * 8


def test_an_owner_that_is_killed_costs_its_pages_only(cluster: Cluster, connected: Opened) -> None:
    store = connected(cluster)
    pages = stored(store, range(16), PAGE)
    cluster.owner_process.kill()
    cluster.owner_process.wait()
    assert OK not in outcomes(store, pages)
    assert store.lookup(list(pages)) == [Lookup.MISS] * 16
    cluster.start_owner()
    works(store, "after")


def test_a_full_engine_refuses_pages_and_returns_no_wrong_one(
    cluster: Cluster, connected: Opened
) -> None:
    store = connected(cluster)
    found: list[PutOutcome] = []
    names = range(1200)
    for start in range(0, len(names), 200):
        found += put(store, named(names[start : start + 200], PAGE))
    assert STORED in found
    assert found.count(STORED) * PAGE > 100 << 20
    store._presence.clear()
    until(lambda: store.usable, 40)
    ended = outcomes(store, named(names[:1200:7], PAGE))
    assert set(ended) <= {OK, MISS} and OK in ended
    assert REFUSED in found or MISS in ended, "more was kept than there is memory"
    assert store.usable


def test_bytes_that_change_in_the_owners_memory_are_noticed(
    cluster: Cluster, connected: Opened
) -> None:
    store = connected(cluster)
    pages = stored(store, range(4), PAGE)
    victim = content(2, PAGE)
    assert flip(cluster.owner_process.pid, victim[1000:1100]) == 1
    ended = outcomes(store, pages)
    assert ended == [OK, OK, ReadOutcome.CORRUPT, OK]
    other = connected(cluster)
    until(lambda: other.ask([key(2)], timeout_s=5) and not here(other, key(2)))
    assert outcomes(other, pages) == [OK, OK, MISS, OK]


def here(store: RemoteStore, name: PageKey) -> bool:
    """What a store knows of a page, which it then forgets."""
    found = store.lookup([name]) == [Lookup.HIT]
    store._presence.clear()
    return found


def flip(pid: int, needle: bytes) -> int:
    """Flips a bit of each place in a process's memory where these bytes are."""
    flipped = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if found is None or int(found[2], 16) - int(found[1], 16) > 1 << 30:
                continue
            start, stop = int(found[1], 16), int(found[2], 16)
            try:
                held = os.pread(memory.fileno(), stop - start, start)
            except OSError:
                continue
            at = held.find(needle)
            while at >= 0:
                os.pwrite(memory.fileno(), bytes([needle[0] ^ 1]), start + at)
                flipped += 1
                at = held.find(needle, at + 1)
    return flipped


def test_a_store_opens_without_a_master_and_finds_it_later(
    cluster: Cluster, connected: Opened
) -> None:
    late = Servers(64 << 20)
    store = connected(late, wait=False)
    assert read(store, {key(1): 1}) == [(MISS, b"\0")]
    until(lambda: "no Mooncake master answers" in store.condition().trouble)
    try:
        late.start_master()
        late.start_owner()
        works(store, "after")
    finally:
        store.close()
        late.stop()


def test_only_the_child_has_the_library(cluster: Cluster, connected: Opened) -> None:
    store = connected(cluster)
    with open(f"/proc/{store.condition().child}/maps") as maps:
        assert "mooncake" in maps.read()
    with open("/proc/self/maps") as maps:
        assert "mooncake" not in maps.read()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_crashes_or_stands_still_is_replaced(
    cluster: Cluster, connected: Opened, number: signal.Signals
) -> None:
    store = connected(cluster, deadline_s=1.0, hang_s=2.0)
    pages = stored(store, range(8), PAGE)
    child = store.condition().child
    os.kill(child, number)
    outcomes(store, pages)  # the engine is asked: what stands still is noticed by its calls
    until(lambda: store.condition().starts == 2, 40)
    until(lambda: store.usable, 40)
    store._presence.clear()
    assert outcomes(store, pages) == [OK] * 8
    until(lambda: not alive(child))


def test_a_ring_that_is_smaller_than_what_is_asked_for_is_filled_again_and_again(
    cluster: Cluster, connected: Opened
) -> None:
    store = connected(cluster, ring_bytes=1 << 20)
    pages = named(range(40), PAGE)
    assert put(store, pages) == [STORED] * 40
    jobs = [begin(store, pages, PAGE) for _ in range(4)]
    for job in jobs:
        assert job.wait(60)
        assert set(job.outcomes) == {OK}
    assert outcomes(store, pages) == [OK] * 40
    assert put(store, named(["large"], 2 << 20)) == [REFUSED]
    assert store.stats().pages_refused == 1
    assert store.condition().ring_taken_bytes == 0


def test_an_owner_under_a_name_that_others_cannot_reach_costs_its_pages_only(
    connected: Opened,
) -> None:
    """Its memory is known to the master. The address is kept for documentation: no host has it."""
    hidden = Hidden(64 << 20, lease_ms=500)
    try:
        hidden.start_master()
        hidden.start_owner()
        store = connected(hidden, deadline_s=1.0, hang_s=2.0)
        begun = time.monotonic()
        assert STORED not in put(store, named(range(4), PAGE))
        assert OK not in outcomes(store, named(range(4), PAGE))
        assert time.monotonic() - begun < 30
        stats = store.stats()
        assert stats.pages_refused == 4
        assert stats.pages_missed + stats.reads_failed == 4
    finally:
        hidden.stop()


def test_a_link_that_is_too_slow_fails_at_its_deadline_and_serves_again_when_it_is_fast(
    connected: Opened,
) -> None:
    slow = Servers(128 << 20, lease_ms=500)
    far = None
    try:
        slow.start_master()
        far = Far(slow.commands[1], slow.master)
        until(slow.segments)
        store = connected(slow, deadline_s=1.0, hang_s=4.0)
        pages = stored(store, range(32), PAGE)
        far.speed(0.002)
        store._presence.clear()
        begun = time.monotonic()
        assert FAILED in outcomes(store, pages)
        assert time.monotonic() - begun < 20
        assert store.stats().reads_failed + store.stats().reads_late > 0
        far.speed(0)
        works(store, "after")
    except BenchError as error:
        pytest.skip(str(error))
    finally:
        if far is not None:
            far.stop()
        slow.stop()


def test_a_master_that_is_started_again_has_forgotten_all_and_takes_pages_again(
    cluster: Cluster, connected: Opened
) -> None:
    store = connected(cluster)
    pages = stored(store, range(8), PAGE)
    cluster.master_process.kill()
    cluster.master_process.wait()
    cluster.start_master()
    works(store, "after")
    store._presence.clear()
    assert OK not in outcomes(store, pages)
    store._presence.clear()
    until(lambda: put(store, pages) == [STORED] * 8, 40)
    assert outcomes(store, pages) == [OK] * 8


@pytest.mark.parametrize("who", ["child", "owner", "master"])
def test_deletes_and_clears_beside_a_process_that_is_stopped_return_and_hold(
    cluster: Cluster, connected: Opened, who: str
) -> None:
    store = connected(cluster, hang_s=60.0)
    pages = stored(store, range(8), PAGE)
    processes = {"owner": cluster.owner_process.pid, "master": cluster.master_process.pid}
    stopped = processes.get(who, store.condition().child)
    os.kill(stopped, signal.SIGSTOP)
    try:
        for call in (lambda: store.delete(list(pages)[:4]), store.clear):
            begun = time.monotonic()
            call()
            assert time.monotonic() - begun < 8, "2 s, and a machine that is busy"
        assert outcomes(store, pages) == [MISS] * 8
    finally:
        os.kill(stopped, signal.SIGCONT)
    until(lambda: store.removals_waiting == 0, 60)
    other = connected(cluster)
    assert other.ask(list(pages), timeout_s=10)
    assert other.lookup(list(pages)) == [Lookup.MISS] * 8
    works(store, "after")


def test_a_read_without_a_deadline_ends_beside_a_stopped_owner_with_a_small_ring(
    cluster: Cluster, connected: Opened
) -> None:
    store = connected(cluster, ring_bytes=1 << 20)
    pages = stored(store, range(40), 60_000)
    store._presence.clear()
    cluster.owner_process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            begun = time.monotonic()
            assert OK not in outcomes(store, pages)
            assert time.monotonic() - begun < 8, "2 s, and a machine that is busy"
            store._presence.clear()
    finally:
        cluster.owner_process.send_signal(signal.SIGCONT)
    works(store, "after")
