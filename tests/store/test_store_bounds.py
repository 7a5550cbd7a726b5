"""The cap holds, the oldest pages go first, and a disk that takes no more costs hits, nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_pages import aligned, content, key, open_at, put, read, segments

from sgl_kvtier.errors import StoreError
from sgl_kvtier.lab.stress.store.faults import FailingEnv, Fault
from sgl_kvtier.store.base import PageRead, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

CAP = 4 << 20


def occupied(root: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in root.rglob("*") if p.is_file())


def test_the_cap_holds_while_writing_and_after_a_restart(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    store = opened(capacity_bytes=CAP, segment_bytes=512 << 10)
    for batch in range(30):
        assert set(
            put(store, {key((batch, i)): content((batch, i), 30_000) for i in range(20)})
        ) == {PutOutcome.STORED}
        assert occupied(tmp_path) <= CAP
    assert store.stats().pages_evicted > 400
    store.close()
    again = opened(capacity_bytes=CAP, segment_bytes=512 << 10)
    assert again.stats().pages > 80
    put(again, {key(("more", i)): content(i, 30_000) for i in range(20)})
    assert occupied(tmp_path) <= CAP


def test_a_smaller_capacity_is_reached_at_the_next_start(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    store = opened(capacity_bytes=CAP, segment_bytes=512 << 10)
    put(store, {key(i): content(i, 30_000) for i in range(100)})
    store.close()
    again = opened(capacity_bytes=CAP // 2)
    assert occupied(tmp_path) <= CAP // 2
    assert 0 < again.stats().pages < 60


def test_ranks_share_the_capacity(tmp_path: Path) -> None:
    stores = [open_at(tmp_path, rank=f"tp{i}", ranks=2, capacity_bytes=CAP) for i in range(2)]
    for n, store in enumerate(stores):
        put(store, {key((n, i)): content(i, 30_000) for i in range(200)})
    assert occupied(tmp_path) <= CAP
    assert all(store.stats().pages > 30 for store in stores)
    for store in stores:
        store.close()


def test_the_page_used_longest_ago_goes_first(opened: Callable[..., DiskStore]) -> None:
    store = opened(capacity_bytes=2 << 20, segment_bytes=2 << 20)
    n = 0
    while store.stats().pages_evicted == 0:
        put(store, {key(n): content(n, 30_000)})
        n += 1
    full = store.stats().pages
    read(store, {key(5): 30_000})
    store.lookup([key(6)])
    put(store, {key(("new", i)): content(i, 30_000) for i in range(full - 2)})
    assert store.lookup([key(5), key(6)]) == [Lookup.HIT, Lookup.HIT]
    assert set(store.lookup([key(i) for i in range(n) if i not in (5, 6)])) == {Lookup.MISS}


def test_one_slot_size_takes_room_that_another_uses_less(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    store = opened(capacity_bytes=CAP, segment_bytes=256 << 10)
    put(store, {key(("small", i)): content(i, 4000) for i in range(1000)}, pool="swa")
    assert PutOutcome.REFUSED not in put(
        store, {key(("big", i)): content(i, 200_000) for i in range(10)}
    )
    hits = store.lookup([key(("big", i)) for i in range(10)])
    assert hits.count(Lookup.HIT) == 10
    assert occupied(tmp_path) <= CAP


def test_a_page_evicted_for_its_own_batch_is_written_again(
    opened: Callable[..., DiskStore],
) -> None:
    store = opened(capacity_bytes=1 << 20, segment_bytes=128 << 10)
    put(store, {key(0): content(0, 100)})
    put(store, {key(("a", 0)): content("a", 5000)})
    put(store, {key(("b", i)): content(i, 20_000) for i in range(11)})
    assert PutOutcome.REFUSED not in put(store, {key(i): content(i, 70_000) for i in range(6)})


def test_pages_of_one_batch_do_not_give_way_to_each_other(opened: Callable[..., DiskStore]) -> None:
    store = opened(capacity_bytes=1 << 20)
    n = 0
    while store.stats().pages_evicted == 0:
        put(store, {key(n): content(n, 30_000)})
        n += 1
    pages = {
        key(i): content(i, 30_000) for i in ("new", *range(1, n))
    }  # those there, the first of which is the next to go
    assert put(store, dict(list(pages.items())[:2])) == [PutOutcome.STORED, PutOutcome.KEPT]
    assert store.lookup(list(pages)) == [Lookup.HIT, Lookup.HIT, Lookup.MISS] + [Lookup.HIT] * (
        n - 3
    )
    del pages[key(2)]
    assert put(store, pages | {key("one too many"): content(0, 30_000)}) == [PutOutcome.KEPT] * (
        n - 1
    ) + [PutOutcome.REFUSED]
    assert read(store, dict.fromkeys(pages, 30_000)) == [
        (ReadOutcome.OK, data) for data in pages.values()
    ]


@pytest.mark.parametrize("in_use_at_first", [False, True])
def test_folders_of_other_models_that_somebody_else_removed_are_room_again(
    tmp_path: Path, in_use_at_first: bool
) -> None:
    def fill(store: DiskStore, name: str) -> DiskStore:
        put(store, {key((name, i)): content(i, 30_000) for i in range(100)})
        return store

    other = fill(
        open_at(
            tmp_path,
            Identity({"model": "other"}, "other"),
            capacity_bytes=CAP,
            segment_bytes=512 << 10,
        ),
        "other",
    )
    if not in_use_at_first:
        other.close()
    store = open_at(tmp_path, capacity_bytes=CAP, segment_bytes=512 << 10)
    alone = open_at(tmp_path / "alone", capacity_bytes=CAP)
    assert store.stats().capacity_bytes < alone.stats().capacity_bytes
    if in_use_at_first:
        fill(store, "in vain")
        other.close()
    shutil.rmtree(Path(other.folder).parent)
    fill(store, "more")
    assert store.stats().capacity_bytes == alone.stats().capacity_bytes
    store.close()
    alone.close()


def test_the_folders_of_other_models_make_room_unless_they_are_open(tmp_path: Path) -> None:
    def fill(name: str) -> DiskStore:
        store = open_at(
            tmp_path,
            identity=Identity({"model": name}, name),
            capacity_bytes=CAP,
            segment_bytes=512 << 10,
        )
        put(store, {key((name, i)): content(i, 30_000) for i in range(150)})
        return store

    first = fill("first")
    first.close()
    second = fill("second")
    assert not Path(first.folder).parent.exists()
    third = fill("third")
    assert second.stats().pages > 0 and Path(second.folder).exists()
    assert occupied(tmp_path) <= CAP + (512 << 10)  # two servers at once: within one segment
    second.close()
    put(third, {key(("more", i)): content(i, 30_000) for i in range(150)})
    assert occupied(tmp_path) <= CAP
    third.close()


def model(root: Path, name: str, **settings: object) -> DiskStore:
    """A store of another model in the same folder."""
    chosen = {"capacity_bytes": CAP, "segment_bytes": 512 << 10, **settings}
    return open_at(root, Identity({"model": name}, name), **chosen)  # type: ignore[arg-type]


def fill_in_turn(stores: list[DiskStore], batches: int = 40) -> None:
    for batch in range(batches):
        for n, store in enumerate(stores):
            put(store, {key((n, batch, i)): content(i, 30_000) for i in range(5)})


def test_two_models_that_grow_beside_each_other_share_the_capacity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = model(tmp_path, "one"), model(tmp_path, "two")
    fill_in_turn([one, two])
    assert occupied(tmp_path) <= CAP
    before = one.stats().pages
    assert before > 30 and two.stats().pages > 30
    one.close()
    again = model(tmp_path, "one")
    assert again.stats().pages == before
    fill_in_turn([again, two])
    assert occupied(tmp_path) <= CAP
    assert again.stats().pages > 30 and two.stats().pages > 30
    assert "were removed" not in caplog.text
    again.close()
    two.close()


def test_ranks_that_hold_unlike_much_leave_another_model_no_more_than_there_is(
    tmp_path: Path,
) -> None:
    first, second = (model(tmp_path, "one", rank=f"tp{i}", ranks=2) for i in range(2))
    two = model(tmp_path, "two")
    for store in (first, two, second):
        fill_in_turn([store])
    assert occupied(tmp_path) <= CAP
    for store in (first, second, two):
        store.close()


def test_models_that_grow_at_the_same_moment_stay_below_the_capacity(tmp_path: Path) -> None:
    class Together(Env):
        native = False

        def __init__(self) -> None:
            self.first = True

        def allocate(self, fd: int, nbytes: int) -> None:
            if self.first:
                self.first = False
                made.wait(30)
            super().allocate(fd, nbytes)

    made = threading.Barrier(2)
    most = model(tmp_path, "most")
    fill_in_turn([most], 17)
    stores = [model(tmp_path, name, env=Together()) for name in ("one", "two")]
    threads = [threading.Thread(target=fill_in_turn, args=([store], 1)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not made.broken
    assert occupied(tmp_path) <= CAP
    for store in (most, *stores):
        store.close()


def test_room_that_another_model_gives_back_is_found_while_both_are_open(tmp_path: Path) -> None:
    class Clock(Env):
        native = False
        later = 0.0

        def now(self) -> float:
            return super().now() + self.later

    env = Clock()
    one, two = model(tmp_path, "one", env=env), model(tmp_path, "two")
    fill_in_turn([two])
    fill_in_turn([one])
    assert one.stats().pages < 20
    two.clear()
    env.later = 2.0
    fill_in_turn([one])
    assert one.stats().pages > 60
    one.close()
    two.close()


def test_a_start_that_removes_pages_for_another_model_in_use_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = model(tmp_path, "one"), model(tmp_path, "two")
    fill_in_turn([one, two])
    one.close()
    again = model(tmp_path, "one", capacity_bytes=CAP * 3 // 4)
    said = [r.getMessage() for r in caplog.records if "were removed" in r.getMessage()]
    assert len(said) == 1 and again.folder in said[0]
    again.close()
    two.close()


def test_pages_being_read_are_not_evicted(opened: Callable[..., DiskStore]) -> None:
    class Gate(Env):
        native = False
        open_ = threading.Event()
        entered = threading.Event()

        def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]
            if sum(map(len, buffers)) > 30_000:
                self.entered.set()
                self.open_.wait(60)
            return super().preadv(fd, buffers, offset)

    env = Gate()
    store = opened(capacity_bytes=2 << 20, env=env, io_threads=1)
    put(store, {key(i): content(i, 30_000) for i in range(10)})
    into = [aligned(30_000) for _ in range(10)]
    job = store.read([PageRead(key(i), [b]) for i, b in enumerate(into)])
    assert env.entered.wait(60)
    put(store, {key(("new", i)): content(i, 30_000) for i in range(200)})
    env.open_.set()
    assert job.wait(60)
    assert job.outcomes == [ReadOutcome.OK] * 10
    assert [bytes(b) for b in into] == [content(i, 30_000) for i in range(10)]


def test_trouble_is_reported_once_with_what_to_do(
    opened: Callable[..., DiskStore], caplog: pytest.LogCaptureFixture
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


def test_growth_stops_at_the_free_space_floor(opened: Callable[..., DiskStore]) -> None:
    class Scarce(Env):
        left = 3 << 20

        def free_bytes(self, path: str) -> int:
            return self.left

    store = opened(env=Scarce(), min_free_bytes=2 << 20, segment_bytes=512 << 10)
    put(store, {key(i): content(i, 30_000) for i in range(20)})
    Scarce.left = 2 << 20
    used = store.stats().bytes_on_disk
    assert PutOutcome.REFUSED not in put(
        store, {key(("b", i)): content(i, 30_000) for i in range(15)}
    )
    assert store.stats().bytes_on_disk < used + 65_536
    assert PutOutcome.STORED not in put(store, {key("other size"): content(1, 100_000)})


class Sticky(Env):
    """Segments cannot be removed."""

    def unlink(self, path: str) -> None:
        if "seg-" in path:
            raise PermissionError(errno.EPERM, "immutable")
        super().unlink(path)


@pytest.mark.parametrize("log", ["kept", "lost"])
def test_cleared_pages_do_not_come_back_with_a_segment_that_cannot_be_removed(
    opened: Callable[..., DiskStore], log: str
) -> None:
    store = opened(env=Sticky())
    pages = {key(i): content(i, 5000) for i in range(10)}
    put(store, pages)
    assert store.clear() == 10
    store.close()
    assert segments(store)
    if log == "lost":
        Path(store.folder, "index.log").unlink()
    for env in (Sticky(), Env()):
        again = opened(env=env)
        assert set(again.lookup(list(pages))) == {Lookup.MISS} and again.stats().pages == 0
        again.close()
    assert not segments(store)


def test_a_segment_that_cannot_be_removed_still_counts(
    opened: Callable[..., DiskStore], tmp_path: Path
) -> None:
    store = opened(env=Sticky(), capacity_bytes=CAP, segment_bytes=512 << 10)
    for size in (4_000, 60_000, 9_000, 200_000):
        put(store, {key((size, i)): content(i, size) for i in range(40)})
        assert occupied(tmp_path) <= CAP
    assert read(store, {key((4_000, 39)): 4_000})[0][0] in (ReadOutcome.OK, ReadOutcome.MISS)


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_filesystem_refuses_writes_and_serves_reads(small_filesystem: Path) -> None:
    store = open_at(small_filesystem, capacity_bytes=64 << 20, segment_bytes=1 << 20)
    stored = [
        i for i in range(200) if put(store, {key(i): content(i, 30_000)}) == [PutOutcome.STORED]
    ]
    assert len(stored) == 200
    assert store.stats().pages_evicted > 0
    Path(small_filesystem, "fill").write_bytes(bytes(os.statvfs(small_filesystem).f_bavail * 4096))
    assert PutOutcome.REFUSED not in put(store, {key("last"): content("last", 30_000)})
    assert put(store, {key("other size"): content("x", 100_000)}) == [PutOutcome.REFUSED]
    assert read(store, {key("last"): 30_000}) == [(ReadOutcome.OK, content("last", 30_000))]
    store.close()


def test_a_read_only_filesystem_is_refused_at_the_start(small_filesystem: Path) -> None:
    store = open_at(small_filesystem, direct_io="off", capacity_bytes=2 << 20)
    put(store, {key(1): content(1, 30_000)})
    store.close()
    done = subprocess.run(
        ["mount", "-o", "remount,ro", str(small_filesystem)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("this mount cannot be made read-only")
    with pytest.raises(StoreError, match=r"Mount the filesystem writable"):
        open_at(small_filesystem)
