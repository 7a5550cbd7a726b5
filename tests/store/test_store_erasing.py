"""A delete or clear that was answered holds: no later opening of the folder finds what was deleted,
however the process ended.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from store_pages import content, key, open_at, put, read, segments

from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import BLOCK
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup, PageKey

NBYTES = 5000
SMALL = {"capacity_bytes": 1 << 20, "segment_bytes": 1 << 20}
"""Room for about a hundred pages."""


class GatedEnv(Env):
    """Calls that `holds` names wait until the gate is open; those that `fails` names fail."""

    native = False

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.holds: Callable[[str], bool] = lambda call: False
        self.fails: Callable[[str], bool] = lambda call: False
        self.before: Callable[[str], None] = lambda call: None
        self._names: dict[int, str] = {}

    def _pass(self, call: str) -> None:
        self.before(call)
        if self.holds(call):
            self.entered.set()
            self.gate.wait(60)
        if self.fails(call):
            raise OSError(errno.EIO, "no such luck")

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._names[fd] = os.path.basename(path)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        name = self._names[fd][:3]
        whole = sum(map(len, buffers)) > BLOCK
        self._pass(
            ("log" if name == "ind" else "page" if whole else "head" if offset else "segment")
            if name in ("ind", "seg")
            else ""
        )
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._pass("sync " + self._names[fd][:3])
        super().sync(fd)

    def unlink(self, path: str) -> None:
        self._pass("unlink " + os.path.basename(path)[:3])
        super().unlink(path)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._pass("truncate")
        super().truncate(fd, nbytes)

    def rename(self, old: str, new: str) -> None:
        self._pass("rename")
        super().rename(old, new)


def only(*calls: str) -> Callable[[str], bool]:
    return lambda call: call in calls


def fill(store: DiskStore) -> list[PageKey]:
    """As many pages as fit; the first to go first."""
    names: list[PageKey] = []
    while store.stats().pages_evicted == 0:
        names.append(key(len(names)))
        put(store, {names[-1]: content(names[-1], NBYTES)})
    return [name for name in names if store.lookup([name]) == [Lookup.HIT]]


def found(store: DiskStore, names: Sequence[PageKey]) -> int:
    return [outcome for outcome, _ in read(store, dict.fromkeys(names, NBYTES))].count(
        ReadOutcome.OK
    )


def killed(store: DiskStore, to: Path) -> Path:
    """The root of the folder as it is left when the process is killed now."""
    shutil.copytree(Path(store.folder).parent.parent, to)
    return to


def lose_the_index(store_root: Path) -> None:
    """Lets the log end in the middle of a frame, as a process leaves it that is killed while it
    writes there.
    """
    (log,) = store_root.glob("*/*/index.log")
    with log.open("ab") as file:
        file.write(b"KVTF")


def test_pages_evicted_for_writes_that_failed_stay_deleted(tmp_path: Path) -> None:
    env = GatedEnv()
    store = open_at(tmp_path, env=env, **SMALL)
    names = fill(store)
    env.fails = only("page")
    assert set(put(store, {key(("new", i)): content(i, NBYTES) for i in range(20)})) == {
        PutOutcome.REFUSED
    }
    env.fails = only()
    gone = [name for name in names if store.lookup([name]) == [Lookup.MISS]]
    assert len(gone) == 20 and store.delete(gone) == 0
    store.close()
    store = open_at(tmp_path, **SMALL)
    assert found(store, gone) == 0 and found(store, names) == len(names) - 20
    store.close()


@pytest.mark.parametrize("torn", [False, True], ids=["log whole", "log torn"])
@pytest.mark.parametrize("how", ["delete", "clear"])
def test_a_page_whose_slot_is_being_written_over_stays_deleted_when_the_process_is_killed(
    tmp_path: Path, how: str, torn: bool
) -> None:
    env = GatedEnv()
    store = open_at(tmp_path / "root", env=env, **SMALL)
    names = fill(store)
    env.holds = only("page")
    writer = threading.Thread(target=lambda: put(store, {key("new"): content("new", NBYTES)}))
    writer.start()
    assert env.entered.wait(60)
    (gone,) = [name for name in names if store.lookup([name]) == [Lookup.MISS]]
    threading.Timer(0.1, env.gate.set).start()
    removed = store.delete([gone]) if how == "delete" else store.clear()
    assert removed == (
        0 if how == "delete" else len(names)
    )  # with `clear` the new page, without the one it replaced
    root = killed(store, tmp_path / "copy")
    if torn:
        lose_the_index(root)
    again = open_at(root, **SMALL)
    assert found(again, [gone]) == 0
    assert found(again, names) == (len(names) - 1 if how == "delete" else 0)
    again.close()
    writer.join(60)
    store.close()


def test_a_page_that_is_being_written_is_deleted_as_soon_as_it_is_there(tmp_path: Path) -> None:
    env = GatedEnv()
    store = open_at(tmp_path, env=env)
    env.holds = only("page")
    outcomes: list[PutOutcome] = []
    writer = threading.Thread(
        target=lambda: outcomes.extend(put(store, {key("new"): content("new", NBYTES)}))
    )
    writer.start()
    assert env.entered.wait(60) and store.lookup([key("new")]) == [Lookup.PENDING]
    threading.Timer(0.1, env.gate.set).start()
    assert store.delete([key("new")]) == 1
    writer.join(60)
    assert outcomes == [PutOutcome.STORED] and store.lookup([key("new")]) == [Lookup.MISS]
    store.close()
    store = open_at(tmp_path)
    assert found(store, [key("new")]) == 0
    store.close()


def test_a_page_refused_because_nobody_knows_whether_it_reached_the_device_stays_deleted(
    tmp_path: Path,
) -> None:
    env = GatedEnv()
    store = open_at(tmp_path, env=env, durable=True)
    env.fails = only("sync seg")
    assert put(store, {key("new"): content("new", NBYTES)}) == [PutOutcome.REFUSED]
    env.fails = only()
    assert store.delete([key("new")]) == 0
    store.close()
    lose_the_index(tmp_path)
    store = open_at(tmp_path)
    assert found(store, [key("new")]) == 0
    store.close()


def test_a_delete_is_not_answered_before_another_one_has_erased_the_page(tmp_path: Path) -> None:
    env = GatedEnv()
    store = open_at(tmp_path / "root", env=env)
    put(store, {key("page"): content("page", NBYTES)})
    env.holds = only("head")
    first = threading.Thread(target=lambda: store.delete([key("page")]))
    first.start()
    assert env.entered.wait(60)
    threading.Timer(0.1, env.gate.set).start()
    assert store.delete([key("page")]) == 0
    again = open_at(killed(store, tmp_path / "copy"))
    assert found(again, [key("page")]) == 0
    again.close()
    first.join(60)
    store.close()


def test_a_delete_is_not_answered_before_the_segment_of_an_evicted_page_is_removed(
    tmp_path: Path,
) -> None:
    env = GatedEnv()
    store = open_at(tmp_path / "root", env=env, capacity_bytes=1 << 20, segment_bytes=1 << 19)
    names = fill(store)
    env.holds = only("unlink seg")
    writer = threading.Thread(target=lambda: put(store, {key("larger"): content(0, 60_000)}))
    writer.start()
    assert env.entered.wait(60)
    gone = [name for name in names if store.lookup([name]) == [Lookup.MISS]]
    threading.Timer(0.1, env.gate.set).start()
    assert gone and store.delete(gone) == 0
    again = open_at(killed(store, tmp_path / "copy"))
    assert found(again, gone) == 0
    again.close()
    writer.join(60)
    store.close()


@pytest.mark.parametrize("torn", [False, True], ids=["log whole", "log torn"])
def test_pages_stay_deleted_whose_segment_can_neither_be_removed_nor_spoiled(
    tmp_path: Path, torn: bool
) -> None:
    env = GatedEnv()
    store = open_at(tmp_path / "root", env=env)
    names = [key(i) for i in range(10)]
    put(store, {name: content(name, NBYTES) for name in names})
    env.fails = only("unlink seg", "segment")
    assert store.clear() == 10 and len(segments(store)) == 1
    root = killed(store, tmp_path / "copy")
    if torn:
        lose_the_index(root)
    again = open_at(root)
    assert found(again, names) == 0
    again.close()
    store.close()


def test_a_page_stays_deleted_although_neither_its_slot_nor_the_log_took_it(tmp_path: Path) -> None:
    env = GatedEnv()
    store = open_at(tmp_path / "root", env=env)
    names = [key(i) for i in range(10)]
    put(store, {name: content(name, NBYTES) for name in names})
    tried: list[str] = []

    def once(call: str) -> bool:
        tried.append(call)
        return call == "head" or (call == "log" and tried.count("log") == 1)

    env.fails = once
    assert store.delete(names[:1]) == 1
    again = open_at(killed(store, tmp_path / "copy"))
    assert found(again, names) == 9 and found(again, names[:1]) == 0
    again.close()
    store.close()


def test_what_a_killed_process_wrote_last_and_another_deleted_does_not_come_back_with_the_slots_headers(
    tmp_path: Path,
) -> None:
    env = GatedEnv()
    store = open_at(tmp_path / "root", env=env)
    kept = [key(i) for i in range(10)]
    put(store, {name: content(name, NBYTES) for name in kept})

    def kill(call: str) -> None:
        if call == "log" and not (tmp_path / "copy").exists():
            killed(store, tmp_path / "copy")  # the page is written, its record not

    env.before = kill
    put(store, {key("late"): content("late", NBYTES)})
    store.close()
    after = open_at(tmp_path / "copy")
    assert after.lookup([key("late")]) == [Lookup.MISS] and after.delete([key("late")]) == 0
    more = content("more", 20_000)  # in a segment of its own
    put(after, {key("more"): more})
    root = killed(after, tmp_path / "again")
    after.close()
    lose_the_index(root)
    again = open_at(root)
    assert found(again, kept) == 10 and found(again, [key("late")]) == 0
    assert read(again, {key("more"): 20_000}) == [(ReadOutcome.OK, more)]
    again.close()


def test_a_page_dropped_because_it_could_not_be_read_stays_deleted(tmp_path: Path) -> None:
    class Unreadable(GatedEnv):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.gate.is_set():
                raise OSError(errno.EIO, "bad sector")
            return super().preadv(fd, buffers, offset)

    env = Unreadable()
    store = open_at(tmp_path / "root", env=env)
    put(store, {key("page"): content("page", NBYTES)})
    env.gate.set()
    assert [read(store, {key("page"): NBYTES})[0][0] for _ in range(3)] == [
        ReadOutcome.FAILED,
        ReadOutcome.FAILED,
        ReadOutcome.MISS,
    ]
    env.gate.clear()
    env.fails = only("log")
    assert store.delete([key("page")]) == 0
    root = killed(store, tmp_path / "copy")
    lose_the_index(root)
    again = open_at(root)
    assert found(again, [key("page")]) == 0
    again.close()
    store.close()


def test_a_log_that_cannot_grow_still_rules_out_what_it_says_is_gone(tmp_path: Path) -> None:
    env = GatedEnv()
    store = open_at(tmp_path / "root", env=env)
    names = [key(i) for i in range(10)]
    put(store, {name: content(name, NBYTES) for name in names})
    env.fails = only("head")
    assert store.delete(names[:1]) == 1
    env.fails = only("log")
    assert put(store, {key("new"): content("new", NBYTES)}) == [PutOutcome.STORED]
    again = open_at(killed(store, tmp_path / "copy"))
    assert found(again, [*names[1:], key("new")]) == 10 and found(again, names[:1]) == 0
    again.close()
    store.close()


def test_a_page_deleted_while_it_is_read_is_right_or_a_miss_and_stays_deleted(
    tmp_path: Path,
) -> None:
    class SlowReads(GatedEnv):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset and self.holds("read"):
                self.entered.set()
                self.gate.wait(60)
            return super().preadv(fd, buffers, offset)

    env = SlowReads()
    store = open_at(tmp_path / "root", env=env)
    put(store, {key("page"): content("page", NBYTES)})
    env.holds = only("read")
    seen: list[tuple[ReadOutcome, bytes]] = []
    reader = threading.Thread(target=lambda: seen.extend(read(store, {key("page"): NBYTES})))
    reader.start()
    assert env.entered.wait(60)
    assert store.delete([key("page")]) == 1  # does not wait for readers
    again = open_at(killed(store, tmp_path / "copy"))
    assert found(again, [key("page")]) == 0
    again.close()
    env.gate.set()
    reader.join(60)
    assert seen[0][0] is ReadOutcome.MISS
    store.close()


def test_with_durable_a_delete_is_synced_before_it_is_answered(tmp_path: Path) -> None:
    env = GatedEnv()
    store = open_at(tmp_path, env=env, durable=True)
    put(store, {key(i): content(i, NBYTES) for i in range(3)})
    calls: list[str] = []
    env.before = calls.append
    assert store.delete([key(0)]) == 1
    assert calls.index("head") < calls.index("sync seg") and calls.index("log") < calls.index(
        "sync ind"
    )
    calls.clear()
    assert store.clear() == 2
    assert "unlink seg" in calls and calls[-1] == "sync tp0"
    store.close()


def test_slots_of_deleted_pages_are_written_again(tmp_path: Path) -> None:
    store = open_at(tmp_path, **SMALL)
    names = fill(store)
    evicted = store.stats().pages_evicted
    for turn in range(3):
        gone = names[:10]
        assert store.delete(gone) == 10
        fresh = {key((turn, i)): content((turn, i), NBYTES) for i in range(10)}
        assert put(store, fresh) == [PutOutcome.STORED] * 10
        names = [*names[10:], *fresh]
        assert found(store, names) == len(names)
    assert store.stats().pages_evicted == evicted
    store.close()
