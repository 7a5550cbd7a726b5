"""Several owners of folders with the same pages: each finds what the others wrote, and never a
wrong page; a delete holds for all of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted import Scripted, once, only
from store_pages import (
    IO_KINDS,
    Open,
    begin,
    found,
    io_settings,
    key,
    named,
    open_at,
    put,
    segments,
)
from test_store_forks import in_child

from sgl_kvtier.store.base import PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.format import PUT, RECORD
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.siblings import following
from sgl_kvtier.store.siblings.gone import Deletes, gone_records
from sgl_kvtier.types import Lookup

NBYTES = 5000
PAGES, MORE = named(range(20)), named(range(20, 40))
HIT, MISS = Lookup.HIT, Lookup.MISS
pytestmark = pytest.mark.usefixtures("only_when_told")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")


@pytest.fixture
def owner(
    tmp_path: Path, stores: list[DiskStore], request: pytest.FixtureRequest
) -> Iterator[Open]:
    """Opens one more owner of the same pages. No look at siblings may fail."""
    kind = io_settings(request.param) if hasattr(request, "param") else {}
    yield partial(open_at, **{"path": tmp_path, "alike": "tp0", **kind})
    assert not any(store.stats().follow_failures for store in stores)


every_kind = pytest.mark.parametrize("owner", IO_KINDS, indirect=True)
"""With every kind of I/O threads."""


# Finding


@every_kind
def test_a_second_owner_finds_what_the_first_wrote_before_and_writes_later(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    second = owner()
    assert Path(second.folder).parent == Path(first.folder).parent
    assert second.folder != first.folder
    assert found(second, PAGES) == 20
    put(first, MORE)
    second.follow()
    assert second.lookup(list(MORE)) == [HIT] * 20 and found(second, MORE) == 20
    assert second.lengths(list(MORE)) == [NBYTES] * 20
    first.follow()
    put(second, {key("back"): b"x" * 100})
    first.follow()
    assert found(first, {key("back"): b"x" * 100}) == 1


def test_a_page_that_a_sibling_has_is_kept_and_not_written_again(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    second = owner()
    assert put(second, PAGES) == [PutOutcome.KEPT] * 20
    assert put(second, PAGES | MORE) == [PutOutcome.KEPT] * 20 + [PutOutcome.STORED] * 20
    assert second.stats().pages == 20 and second.stats().pages_written == 20
    assert len(segments(second)) == 1


def bytes_from_disk() -> int:
    """What this process had the disks read so far, without what was in the page cache."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@every_kind
def test_through_the_page_cache_what_two_owners_read_comes_from_the_disk_once(owner: Open) -> None:
    pages = named(range(16), 1 << 20)
    roomy = {"direct_io": "off", "capacity_bytes": 64 << 20, "segment_bytes": 32 << 20}
    first = owner(**roomy)
    put(first, pages)
    files = [Path(first.folder) / name for name in segments(first)]
    first.close()
    before = bytes_from_disk()
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            opened.read(1 << 16)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if bytes_from_disk() == before:
        pytest.skip("this file system reads from no disk")
    owners = [owner(**roomy) for _ in range(2)]
    before = bytes_from_disk()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(found, owners, [pages] * 2)) == [16, 16]
    nbytes = sum(map(len, pages.values()))
    assert 0.9 * nbytes < bytes_from_disk() - before < 1.1 * nbytes


def test_folders_of_other_ranks_are_not_read(tmp_path: Path, owner: Open) -> None:
    for name in ("tp1", "tp0-pp1", "tp0.x", "tp01"):
        put(open_at(tmp_path, rank=name), PAGES)
    assert owner().lookup(list(PAGES)) == [MISS] * 20


def test_pages_of_another_identity_are_not_read(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    second = owner()
    # The same file under another identity's fingerprint, as a person may copy it.
    (segment,) = segments(first)
    data = bytearray(segment.read_bytes())
    data[16:48] = bytes(32)
    segment.write_bytes(data)
    assert found(second, PAGES) == 20, "what was opened before is the same file"
    assert owner().lookup(list(PAGES)) == [MISS] * 20


@every_kind
def test_a_page_read_unchecked_could_be_half_written_so_siblings_are_left_alone(
    owner: Open,
) -> None:
    put(owner(), PAGES)
    second = owner(verify_reads=False)
    assert second.lookup(list(PAGES)) == [MISS] * 20
    assert put(second, PAGES) == [PutOutcome.STORED] * 20


# What changes meanwhile


@every_kind
def test_an_entry_that_is_not_true_any_more_is_a_miss_and_forgotten(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    second = owner()
    first.delete(list(PAGES)[:10])
    put(first, MORE)
    assert second.lookup(list(PAGES)) == [HIT] * 20, "it has not looked"
    assert found(second, PAGES) == 10
    assert second.lookup(list(PAGES)) == [MISS] * 10 + [HIT] * 10
    assert second.stats().pages_corrupt == 0 and second.stats().pages_missed == 10
    assert put(second, PAGES) == [PutOutcome.STORED] * 10 + [PutOutcome.KEPT] * 10
    second.follow()
    assert found(second, PAGES) == 20 and found(second, MORE) == 20


@every_kind
def test_a_page_evicted_by_its_owner_is_a_miss_before_and_after_the_next_look(owner: Open) -> None:
    small = {"capacity_bytes": 2 << 20, "segment_bytes": 256 << 10}
    first = owner(**small)
    put(first, PAGES)
    second = owner(**small)
    for i in range(100, 400, 20):
        put(first, named(range(i, i + 20)))
    assert first.lookup(list(PAGES)) == [MISS] * 20
    assert found(second, dict(list(PAGES.items())[:10])) == 0
    second.follow()
    assert found(second, PAGES) == 0
    assert found(second, named(range(380, 400))) == 20


def test_a_log_that_is_made_anew_is_followed_from_its_beginning(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    second = owner()
    log = Path(first.folder, "index.log")
    before = log.stat().st_ino
    for i in range(20):
        names = {key(("gone", i, n)): b"y" * 100 for n in range(40)}
        put(first, names)
        first.delete(list(names))
    put(first, MORE)
    assert log.stat().st_ino != before
    second.follow()
    assert found(second, PAGES) == 20 and found(second, MORE) == 20


def test_a_log_that_ends_in_the_middle_of_a_frame_is_followed_up_to_there(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    with Path(first.folder, "index.log").open("ab") as file:
        file.write(b"KVTF\x05\x00")
    second = owner()
    assert found(second, PAGES) == 20
    put(first, MORE)
    second.follow()
    first.close()
    assert found(owner(), PAGES | MORE) == 40
    second.follow()
    assert found(second, PAGES | MORE) == 40


def test_a_segment_that_its_owner_removed_is_closed(owner: Open) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    second.follow()
    assert second.lookup([key(0)]) == [HIT]

    removed = os.path.realpath(segments(first)[0]) + " (deleted)"
    first.clear()
    second.follow()
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert removed not in links and second.lookup([key(0)]) == [MISS]
    put(first, MORE)
    second.follow()
    assert found(second, MORE) == 20


def test_a_segment_that_its_owner_removes_while_one_looks_is_closed(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    removed = os.path.realpath(segments(first)[0]) + " (deleted)"
    owner(env=once(f"open {first.folder}/index.log", first.clear))
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not segments(first) and removed not in links


def test_a_slot_that_its_owner_fills_anew_while_it_is_read_is_a_miss_and_then_the_new_page(
    owner: Open,
) -> None:
    first = owner()
    put(first, PAGES)
    env = Scripted()
    second = owner(env=env)
    env.holds = only("read")
    job = begin(second, [key(0)])
    assert env.entered.wait(60)
    first.delete([key(0)])
    # The slots that were never used come first: a segment has 85.
    put(first, named(("next", i) for i in range(65)))
    put(first, named(["new"]))
    assert len(segments(first)) == 1
    env.holds = only()
    second.follow()
    assert second.lookup([key(0), key("new")]) == [MISS, MISS]
    env.gate.set()
    assert job.wait(60) and job.outcomes == [ReadOutcome.MISS]
    second.follow()
    assert found(second, named(["new"])) == 1


def test_a_folder_that_is_removed_takes_only_its_own_pages_along(owner: Open) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    put(second, MORE)
    second.follow()
    first.close()
    shutil.rmtree(first.folder)
    second.follow()
    assert second.lookup(list(PAGES)) == [MISS] * 20 and found(second, MORE) == 20


# Taking over


def test_a_folder_without_an_owner_goes_to_the_next_one_who_writes(owner: Open) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    put(second, MORE)
    first.close()
    second.follow()
    assert found(second, PAGES) == 20
    third = owner()
    assert third.folder == first.folder and third.stats().pages == 20
    assert found(third, PAGES | MORE) == 40


def test_one_who_only_reads_takes_no_folder_with_pages(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    first.close()
    reader = owner(writes=False)
    assert reader.folder != first.folder and found(reader, PAGES) == 20
    writer = owner()
    assert writer.folder == first.folder


@every_kind
def test_a_forked_child_finds_no_page_of_siblings_and_keeps_nothing_open(owner: Open) -> None:
    first = owner()
    put(first, PAGES)
    second = owner()

    def work() -> None:
        assert second.lookup([key(0)]) == [MISS]
        second.follow()
        assert second.delete([key(0)]) == second.clear() == 0
        second.close()
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not [link for link in links if link.startswith(first.folder)]

    assert in_child(work) == ""
    assert found(second, PAGES) == 20 and found(first, PAGES) == 20


# Deleting


def test_a_delete_holds_for_every_owner_and_says_how_many_pages_there_were(owner: Open) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    assert second.delete(list(PAGES)[:5]) == 5
    assert second.lookup(list(PAGES)) == [MISS] * 5 + [HIT] * 15
    first.follow()
    assert first.lookup(list(PAGES)) == [MISS] * 5 + [HIT] * 15
    first.close()
    second.close()
    again = owner()
    assert again.lookup(list(PAGES)) == [MISS] * 5 + [HIT] * 15


def test_a_delete_reaches_the_copy_that_this_owner_does_not_know_of(owner: Open) -> None:
    first, second = owner(), owner()
    for store in (first, second):
        put(store, {key(store.folder): b"z" * NBYTES})
    put(first, PAGES)
    assert put(second, PAGES) == [PutOutcome.STORED] * 20, "it has not looked"
    second.follow()
    assert second.delete(list(PAGES)) == 20
    for _ in range(2):
        first.follow()
        second.follow()
    assert first.lookup(list(PAGES)) == second.lookup(list(PAGES)) == [MISS] * 20


def test_a_delete_of_all_pages_reaches_what_was_written_up_to_its_number() -> None:
    deletes = Deletes(gone_records([], "kv", 5))
    pages = np.array([(key(n), b"kv", n, 0, 0, NBYTES, PUT) for n in (5, 6)], RECORD)
    assert deletes.hit(pages).tolist() == [True, False]
    assert [len(deletes.needed_for(pages[i : i + 1])) for i in (0, 1)] == [1, 0]


@pytest.mark.parametrize("all_of_them", [False, True], ids=["delete", "clear"])
def test_what_was_deleted_in_a_folder_without_an_owner_stays_so_in_every_later_life(
    owner: Open, *, all_of_them: bool
) -> None:
    first, second = owner(), owner()
    put(first, PAGES)
    first.close()
    assert (second.clear() if all_of_them else second.delete(list(PAGES))) == 20
    second.close()
    reader = owner(writes=False)
    assert reader.lookup(list(PAGES)) == [MISS] * 20
    reader.close()
    again = owner()
    assert again.folder == first.folder and again.lookup(list(PAGES)) == [MISS] * 20
    # And once those pages are gone, nothing is left to remember.
    other = owner()
    other.close()
    assert not list(Path(first.folder).parent.glob("*/gone"))


# Whose files these are


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def given_away(path: Path) -> None:
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("spoil", [link, fifo, pytest.param(given_away, marks=needs_root)])
@pytest.mark.parametrize("name", ["index.log", "seg-00000001"])
def test_a_siblings_file_that_is_no_regular_one_of_this_user_is_not_read(
    owner: Open, name: str, spoil: Callable[[Path], None]
) -> None:
    first = owner()
    put(first, PAGES)
    spoil(Path(first.folder, name))
    second = owner()
    assert second.lookup(list(PAGES)) == [MISS] * 20
    assert put(second, PAGES) == [PutOutcome.STORED] * 20 and found(second, PAGES) == 20


@pytest.mark.parametrize(
    "spoil", [link, pytest.param(given_away, marks=needs_root), lambda path: path.chmod(0o777)]
)
def test_a_siblings_folder_that_others_could_have_filled_is_not_read(
    owner: Open, spoil: Callable[[Path], None]
) -> None:
    first, second = owner(), owner()
    put(second, PAGES)
    spoil(Path(second.folder))
    first.follow()
    assert first.lookup(list(PAGES)) == [MISS] * 20
    assert put(first, PAGES) == [PutOutcome.STORED] * 20


# What it costs one server alone


def test_an_owner_without_siblings_needs_no_further_system_call_to_read_and_write(
    tmp_path: Path,
) -> None:
    def calls(**how: Any) -> list[str]:
        env, made = Scripted(), []
        store = open_at(tmp_path / str(len(how)), env=env, io_threads=1, **how)
        put(store, PAGES)
        env.before = made.append
        put(store, MORE)
        found(store, MORE)
        store.lookup(list(PAGES))
        env.before = only()
        return made

    assert calls(alike="tp0") == calls()


# Two copies


def twice(first: DiskStore, second: DiskStore) -> None:
    for store in (first, second):
        # A segment: it looks at the other one before it makes one.
        put(store, {key(store.folder): b"z" * NBYTES})
    put(first, PAGES)
    assert put(second, PAGES) == [PutOutcome.STORED] * 20, "it has not looked"


def both(owner: Open) -> tuple[DiskStore, DiskStore, DiskStore]:
    """Two owners that wrote the same pages, and a third one that knows them."""
    first, second = owner(), owner()
    twice(first, second)
    third = owner()
    assert found(third, PAGES) == 20
    return first, second, third


@every_kind
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("read_first", [False, True])
def test_of_two_copies_of_a_page_the_other_is_found_when_one_goes(
    owner: Open, which: int, *, read_first: bool
) -> None:
    *owners, third = both(owner)
    # Evicted: no other owner is told.
    owners[which]._room.give_back_idle()
    if read_first:
        found(third, PAGES)
    third.follow()
    assert found(third, PAGES) == 20


def test_a_siblings_copy_is_found_when_the_own_one_was_evicted(owner: Open) -> None:
    second = both(owner)[1]
    second.follow()
    second._room.give_back_idle()
    second.follow()
    assert found(second, PAGES) == 20


@pytest.mark.parametrize("all_of_them", [False, True], ids=["delete", "clear"])
def test_a_page_written_anew_after_a_delete_is_found_beside_the_copy_that_was_deleted(
    owner: Open, *, all_of_them: bool
) -> None:
    first, second, third = both(owner)
    _ = second.clear() if all_of_them else second.delete(list(PAGES))
    assert put(second, PAGES) == [PutOutcome.STORED] * 20
    # The first one has not looked, so that its copies are still there.
    third.follow()
    assert found(third, PAGES) == 20
    assert found(owner(), PAGES) == 20
    first.follow()
    third.follow()
    assert found(third, PAGES) == found(first, PAGES) == 20


def test_many_copies_are_tried_once_a_second(owner: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_FEW", 10)
    env = Scripted()
    monkeypatch.setattr(Scripted, "now", lambda self: 1000.0 + self.seconds)
    first, second = owner(), owner()
    twice(first, second)
    third = owner(env=env)
    put(third, {key("own"): b"x"})
    third.delete([key("own")])
    third.follow()
    first._room.give_back_idle()
    third.follow()
    assert found(third, PAGES) == 0
    env.seconds = 1
    third.follow()
    assert found(third, PAGES) == 20


@every_kind
def test_a_siblings_file_stays_open_while_one_reads_it_although_its_owner_removed_it(
    owner: Open,
) -> None:
    first = owner()
    put(first, PAGES)
    second = owner()
    (segment,) = second._room.theirs.values()
    with second._core.lock:
        rows = second._core.table.find(list(PAGES), "kv")[:1]
        second._core.table.pin(rows)  # as a read does
    assert first.clear() == 20
    second.follow()
    assert second.lookup(list(PAGES)) == [MISS] * 20
    os.fstat(segment.fd)
    assert list(second._room.theirs.values()) == [segment]
    with second._core.lock:
        second._core.table.unpin(rows)
    second.follow()
    with pytest.raises(OSError):
        os.fstat(segment.fd)
    assert not second._room.theirs


def test_a_new_folder_gets_no_number_of_one_whose_files_are_still_read() -> None:
    per_folder = following.NUMBER_MASK + 1
    known: Any = SimpleNamespace(
        folders={"a": SimpleNamespace(number=3)},
        _leaving=[SimpleNamespace(number=2 * per_folder + 5)],
        _last_number=1,
    )
    assert following.Following._new_number(known) == 4


@pytest.mark.parametrize("deleter", [0, 1])
def test_a_page_deleted_in_one_pool_stays_in_the_others_for_all(owner: Open, deleter: int) -> None:
    # A store that opens reads the folders in their order: the deletes before the pages, or behind.
    owners = owner(), owner()
    holder = owners[1 - deleter]
    for pool in ("kv", "draft"):
        put(holder, PAGES, pool)
    owners[deleter].follow()
    assert owners[deleter].delete(list(PAGES), "kv") == 20
    for one in (owner(), *owners):
        one.follow()
        assert one.lookup(list(PAGES), "kv") == [MISS] * 20
        assert one.lookup(list(PAGES), "draft") == [HIT] * 20
