"""The cap holds, the oldest pages go first, and a disk that takes no more costs hits, nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from patience import all_of, beside
from scripted import Scripted, once, only
from store_pages import Open, found, key, named, on_disk, open_at, put, read, segments, stored_at
from volumes import in_memory

from sgl_kvtier.errors import StoreError
from sgl_kvtier.lab.stress.store.faults import FailingEnv, Fault
from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup, PageKey

CAP = 4 << 20


def pages(name: object, count: int, nbytes: int = 30_000) -> dict[PageKey, bytes]:
    return named(((name, i) for i in range(count)), nbytes)


def fill(store: DiskStore, name: object, count: int = 100) -> DiskStore:
    put(store, pages(name, count))
    return store


def test_the_cap_holds_while_writing_and_after_a_restart(opened: Open, tmp_path: Path) -> None:
    store = opened(capacity_bytes=CAP, segment_bytes=512 << 10)
    for batch in range(30):
        assert set(put(store, pages(batch, 20))) == {PutOutcome.STORED}
        assert on_disk(tmp_path) <= CAP
    assert store.stats().pages_evicted > 400
    store.close()
    again = opened(capacity_bytes=CAP, segment_bytes=512 << 10)
    assert again.stats().pages > 80
    fill(again, "more", 20)
    assert on_disk(tmp_path) <= CAP
    again.close()
    smaller = opened(capacity_bytes=CAP // 2)
    assert on_disk(tmp_path) <= CAP // 2
    assert 0 < smaller.stats().pages < 60


def test_ranks_share_the_capacity(tmp_path: Path) -> None:
    stores = [open_at(tmp_path, rank=f"tp{i}", ranks=2, capacity_bytes=CAP) for i in range(2)]
    for n, store in enumerate(stores):
        fill(store, n, 200)
    assert on_disk(tmp_path) <= CAP
    assert all(store.stats().pages > 30 for store in stores)


def filled_up(store: DiskStore) -> int:
    """Puts pages named by numbers until the first is evicted; how many."""
    count = 0
    while store.stats().pages_evicted == 0:
        put(store, named([count], 30_000))
        count += 1
    return count


def test_the_page_used_longest_ago_goes_first(opened: Open) -> None:
    store = opened(capacity_bytes=2 << 20, segment_bytes=2 << 20)
    count = filled_up(store)
    full = store.stats().pages
    read(store, {key(5): 30_000})
    store.lookup([key(6)])
    assert put(store, named([7], 30_000)) == [PutOutcome.KEPT]
    fill(store, "new", full - 3)
    assert store.lookup([key(5), key(6), key(7)]) == [Lookup.HIT] * 3
    assert set(store.lookup([key(i) for i in range(count) if i not in (5, 6, 7)])) == {Lookup.MISS}


def test_one_slot_size_takes_room_that_another_uses_less(opened: Open, tmp_path: Path) -> None:
    store = opened(capacity_bytes=CAP, segment_bytes=256 << 10)
    put(store, pages("small", 1000, 4000), pool="swa")
    big = pages("big", 10, 200_000)
    assert PutOutcome.REFUSED not in put(store, big)
    assert store.lookup(list(big)) == [Lookup.HIT] * 10
    assert on_disk(tmp_path) <= CAP


def test_a_page_evicted_for_its_own_batch_is_written_again(opened: Open) -> None:
    store = opened(capacity_bytes=1 << 20, segment_bytes=128 << 10)
    put(store, named([0], 100))
    put(store, pages("a", 1, 5000))
    put(store, pages("b", 11, 20_000))
    assert PutOutcome.REFUSED not in put(store, named(range(6), 70_000))


def test_pages_of_one_batch_do_not_give_way_to_each_other(opened: Open) -> None:
    store = opened(capacity_bytes=1 << 20)
    count = filled_up(store)
    # Those there, the first of which is the next to go.
    wanted = named(["new", *range(1, count)], 30_000)
    assert put(store, dict(list(wanted.items())[:2])) == [PutOutcome.STORED, PutOutcome.KEPT]
    there = store.lookup(list(wanted))
    assert there == [Lookup.HIT, Lookup.HIT, Lookup.MISS] + [Lookup.HIT] * (count - 3)
    del wanted[key(2)]
    outcomes = put(store, wanted | named(["one too many"], 30_000))
    assert outcomes == [PutOutcome.KEPT] * (count - 1) + [PutOutcome.REFUSED]
    assert found(store, wanted) == count - 1


def model(root: Path, name: str, **settings: object) -> DiskStore:
    """A store of another model in the same folder."""
    chosen = {"capacity_bytes": CAP, "segment_bytes": 512 << 10, **settings}
    return open_at(root, Identity({"model": name}, name), **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_use_at_first", [False, True])
def test_folders_of_other_models_that_somebody_else_removed_are_room_again(
    tmp_path: Path, in_use_at_first: bool
) -> None:
    other = fill(model(tmp_path, "other"), "other")
    if not in_use_at_first:
        other.close()
    store = model(tmp_path, "this")
    alone = open_at(tmp_path / "alone", capacity_bytes=CAP)
    assert store.stats().capacity_bytes < alone.stats().capacity_bytes
    if in_use_at_first:
        fill(store, "in vain")
        other.close()
    shutil.rmtree(Path(other.folder).parent)
    fill(store, "more")
    assert store.stats().capacity_bytes == alone.stats().capacity_bytes


def test_the_folders_of_other_models_make_room_unless_they_are_open(tmp_path: Path) -> None:
    first = fill(model(tmp_path, "first"), "first", 150)
    first.close()
    second = fill(model(tmp_path, "second"), "second", 150)
    assert not Path(first.folder).parent.exists()
    third = fill(model(tmp_path, "third"), "third", 150)
    assert second.stats().pages > 0 and Path(second.folder).exists()
    assert on_disk(tmp_path) <= CAP + (512 << 10)  # two servers at once: within one segment
    second.close()
    fill(third, "more", 150)
    assert on_disk(tmp_path) <= CAP


def fill_in_turn(stores: list[DiskStore], batches: int = 40) -> None:
    for batch in range(batches):
        for n, store in enumerate(stores):
            fill(store, (n, batch), 5)


def test_two_models_that_grow_beside_each_other_share_the_capacity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = model(tmp_path, "one"), model(tmp_path, "two")
    fill_in_turn([one, two])
    assert on_disk(tmp_path) <= CAP
    before = one.stats().pages
    assert before > 30 and two.stats().pages > 30
    one.close()
    again = model(tmp_path, "one")
    assert again.stats().pages == before
    fill_in_turn([again, two])
    assert on_disk(tmp_path) <= CAP
    assert again.stats().pages > 30 and two.stats().pages > 30
    assert "were removed" not in caplog.text


def test_ranks_that_hold_unlike_much_leave_another_model_no_more_than_there_is(
    tmp_path: Path,
) -> None:
    first, second = (model(tmp_path, "one", rank=f"tp{i}", ranks=2) for i in range(2))
    two = model(tmp_path, "two")
    for store in (first, two, second):
        fill_in_turn([store])
    assert on_disk(tmp_path) <= CAP


def test_models_that_grow_at_the_same_moment_stay_below_the_capacity(tmp_path: Path) -> None:
    """Each makes its first segment at the moment when the other one does."""
    made = threading.Barrier(2)
    meet = partial(made.wait, 30)
    fill_in_turn([model(tmp_path, "most")], 17)
    stores = [model(tmp_path, name, env=once("allocate", meet)) for name in ("one", "two")]
    all_of([beside(partial(fill_in_turn, [store], 1)) for store in stores])
    assert not made.broken
    assert on_disk(tmp_path) <= CAP


def test_room_that_another_model_gives_back_is_found_while_both_are_open(tmp_path: Path) -> None:
    env = Scripted()
    one, two = model(tmp_path, "one", env=env), model(tmp_path, "two")
    fill_in_turn([two])
    fill_in_turn([one])
    assert one.stats().pages < 20
    two.clear()
    env.seconds = 2.0
    fill_in_turn([one])
    assert one.stats().pages > 60


def test_a_start_that_removes_pages_for_another_model_in_use_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = model(tmp_path, "one"), model(tmp_path, "two")
    fill_in_turn([one, two])
    one.close()
    again = model(tmp_path, "one", capacity_bytes=CAP * 3 // 4)
    said = [r.getMessage() for r in caplog.records if "were removed" in r.getMessage()]
    assert len(said) == 1 and again.folder in said[0]


def test_pages_being_read_are_not_evicted(tmp_path: Path) -> None:
    env = Scripted()
    store = open_at(tmp_path, capacity_bytes=2 << 20, env=env, io_threads=1)
    wanted = named(range(10), 30_000)
    put(store, wanted)
    env.holds = only("read")
    reading = beside(partial(read, store, dict.fromkeys(wanted, 30_000)))
    assert env.entered.wait(60)
    fill(store, "new", 200)
    env.gate.set()
    assert reading.result(60) == [(ReadOutcome.OK, data) for data in wanted.values()]


def test_trouble_is_reported_once_with_what_to_do(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    env = FailingEnv()
    store = opened(env=env)
    env.arm(Fault(0, errno.ENOSPC, forever=True))
    for i in range(5):
        put(store, {key(i): b"page"})
    env.arm(None)
    about = [r.getMessage() for r in caplog.records if "full" in r.getMessage()]
    assert len(about) == len(set(about)) > 0
    assert all("lower store.capacity_bytes" in message for message in about)
    assert store.stats().pages_refused == 5


def test_growth_stops_at_the_free_space_floor(opened: Open) -> None:
    class Scarce(Env):
        left = 3 << 20

        def free_bytes(self, path: str) -> int:
            return self.left

    store = opened(env=Scarce(), min_free_bytes=2 << 20, segment_bytes=512 << 10)
    fill(store, "a", 20)
    Scarce.left = 2 << 20
    used = store.stats().bytes_on_disk
    assert PutOutcome.REFUSED not in put(store, pages("b", 15))
    assert store.stats().bytes_on_disk < used + 65_536
    assert PutOutcome.STORED not in put(store, named(["other size"], 100_000))


def sticky() -> Scripted:
    """Segments cannot be removed."""
    env = Scripted(native=True)
    env.fails, env.error = only("unlink seg"), errno.EPERM
    return env


@pytest.mark.parametrize("log", ["kept", "lost"])
def test_cleared_pages_do_not_come_back_with_a_segment_that_cannot_be_removed(
    opened: Open, log: str
) -> None:
    store = opened(env=sticky())
    wanted = named(range(10))
    put(store, wanted)
    assert store.clear() == 10
    store.close()
    assert segments(store)
    if log == "lost":
        Path(store.folder, "index.log").unlink()
    for env in (sticky(), Env()):
        again = opened(env=env)
        assert set(again.lookup(list(wanted))) == {Lookup.MISS} and again.stats().pages == 0
        again.close()
    assert not segments(store)


def test_a_segment_that_cannot_be_removed_still_counts(opened: Open, tmp_path: Path) -> None:
    store = opened(env=sticky(), capacity_bytes=CAP, segment_bytes=512 << 10)
    for size in (4_000, 60_000, 9_000, 200_000):
        put(store, pages(size, 40, size))
        assert on_disk(tmp_path) <= CAP
    assert read(store, {key((4_000, 39)): 4_000})[0][0] in (ReadOutcome.OK, ReadOutcome.MISS)


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    with in_memory(mount, "3m", "700"):
        yield mount


def test_a_full_filesystem_refuses_writes_and_serves_reads(small_filesystem: Path) -> None:
    store = open_at(small_filesystem, capacity_bytes=64 << 20, segment_bytes=1 << 20)
    for i in range(200):
        assert put(store, named([i], 30_000)) == [PutOutcome.STORED]
    assert store.stats().pages_evicted > 0
    Path(small_filesystem, "fill").write_bytes(bytes(os.statvfs(small_filesystem).f_bavail * 4096))
    assert PutOutcome.REFUSED not in put(store, named(["last"], 30_000))
    assert put(store, named(["other size"], 100_000)) == [PutOutcome.REFUSED]
    assert found(store, named(["last"], 30_000)) == 1
    store.close()


def test_a_read_only_filesystem_is_refused_at_the_start(small_filesystem: Path) -> None:
    stored_at(small_filesystem, named([1]), direct_io="off", capacity_bytes=2 << 20)
    remount = ["mount", "-o", "remount,ro", str(small_filesystem)]
    if subprocess.run(remount, capture_output=True, check=False).returncode:
        pytest.skip("this mount cannot be made read-only")
    with pytest.raises(StoreError, match=r"Mount the filesystem writable"):
        open_at(small_filesystem)
