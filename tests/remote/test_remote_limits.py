"""A host without memory, descriptors or processes left: for the store, and for its child."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import until
from remote_pages import IDENTITY, outcomes, stored
from store_pages import key, named, put

from sgl_kvtier.errors import StoreError
from sgl_kvtier.remote import breaker
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.store import RemoteStore, open_remote
from sgl_kvtier.store.base import PutOutcome, ReadOutcome

OK, MISS, FAILED = ReadOutcome.OK, ReadOutcome.MISS, ReadOutcome.FAILED
Opened = Callable[..., RemoteStore]


@pytest.fixture(autouse=True)
def probes_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_S", 0.1)


@contextmanager
def limited(what: int, most: int, pid: int = 0) -> Iterator[None]:
    """A process may have this much, until the block ends."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (min(most, before[1]) if before[1] >= 0 else most, before[1]))
    try:
        yield
    finally:
        try:
            resource.prlimit(pid, what, before)
        except ProcessLookupError:
            assert pid, "only a child may be gone by now"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_without_memory_for_the_ring_the_store_is_refused_by_the_setting_to_change(
    folder: Path,
) -> None:
    gc.collect()  # what other tests left to be closed
    before = descriptors()
    with (
        limited(resource.RLIMIT_FSIZE, 1 << 20),  # of shared memory too
        pytest.raises(StoreError, match=r"no shared memory of remote\.ring_bytes = 4194304"),
    ):
        open_remote(RemoteSettings("memory", str(folder), ring_bytes=4 << 20), IDENTITY, "tp0")
    gc.collect()
    until(lambda: descriptors() <= before)


@pytest.mark.parametrize("more", range(3))
def test_without_descriptors_the_store_is_refused_or_waits_and_leaves_none_behind(
    folder: Path, more: int
) -> None:
    gc.collect()  # what other tests left to be closed
    before = descriptors()
    short_of_descriptors(folder, more)
    gc.collect()
    until(lambda: descriptors() <= before)


def short_of_descriptors(folder: Path, more: int) -> None:
    """Opens a store where this process may have only so many more."""
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    gaps = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 2 - descriptors())]
    try:
        with limited(resource.RLIMIT_NOFILE, highest + 1 + more):
            try:
                settings = RemoteSettings("memory", str(folder), ring_bytes=1 << 20)
                store = open_remote(settings, IDENTITY, "tp0")
            except StoreError:
                return
            until(lambda: "no process can be started" in store.condition().trouble)
            assert outcomes(store, {key(1): b"x"}) == [MISS]
        until(lambda: store.usable)
        store.close()
    finally:
        for fd in gaps:
            os.close(fd)


@pytest.mark.parametrize(
    ("what", "most"),
    [(resource.RLIMIT_AS, 1 << 20), (resource.RLIMIT_NOFILE, 3), (resource.RLIMIT_FSIZE, 0)],
    ids=["memory", "descriptors", "room"],
)
def test_a_child_without_anything_left_costs_its_pages_and_works_again_afterwards(
    opened: Opened, what: int, most: int
) -> None:
    store = opened(deadline_s=1.0, hang_s=2.0)
    pages = stored(store, range(16), 100_000)
    with limited(what, most, store.condition().child):
        for turn in range(8):
            if not store.wait_usable(5):
                break
            store._presence.clear()
            assert set(outcomes(store, pages)) <= {OK, FAILED, MISS, ReadOutcome.LATE}
            put(store, named(((turn, n) for n in range(4)), 100_000))
    until(lambda: store.usable)
    store._presence.clear()
    assert outcomes(store, pages) == [OK] * 16
    new = named(["after"], 100_000)
    until(lambda: put(store, new) != [PutOutcome.REFUSED])
    assert outcomes(store, new) == [OK]
    until(lambda: store.condition().ring_taken_bytes == 0)
