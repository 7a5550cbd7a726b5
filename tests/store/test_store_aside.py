"""Segments that cannot be opened for a while, for want of descriptors or because of the device:
their pages are neither lost nor, once deleted, found again.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_pages import content, found, key, open_at, put, segments

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.engine import DiskStore

NBYTES = 5000
PAGES = {key(i): content(i, NBYTES) for i in range(10)}
MORE = {key(i): content(i, NBYTES) for i in range(10, 20)}
pytestmark = pytest.mark.usefixtures("only_when_told")


class FailingOpen(Env):
    """Opening a file fails whose path has one of `fails` in it."""

    def __init__(self, *fails: str, error: int = errno.EMFILE) -> None:
        self.fails: tuple[str, ...] = fails
        self.error = error

    def open(self, path: str, flags: int) -> int:
        if any(name in path for name in self.fails):
            raise OSError(self.error, "not now", path)
        return super().open(path, flags)

    def pause(self, seconds: float) -> None:
        """Nothing changes while a test waits."""


def lose_the_end(store: DiskStore) -> None:
    """As a process leaves its log that is killed while it writes there."""
    with Path(store.folder, "index.log").open("ab") as file:
        file.write(b"KVTF")


def by_key(store: DiskStore) -> None:
    store.delete(list(PAGES))


def all_of_them(store: DiskStore) -> None:
    store.clear()


@pytest.mark.parametrize("alike", ["", "tp0"], ids=["alone", "shared"])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("torn", [False, True], ids=["log whole", "log torn"])
@pytest.mark.parametrize("delete", [by_key, all_of_them])
def test_pages_deleted_while_their_segment_could_not_be_opened_stay_deleted(
    tmp_path: Path, delete: Callable[[DiskStore], None], alike: str, error: int, torn: bool
) -> None:
    store = open_at(tmp_path / "root", alike=alike)
    put(store, PAGES)
    store.close()
    store = open_at(tmp_path / "root", alike=alike, env=FailingOpen("seg-", error=error))
    assert found(store, PAGES) == 0
    delete(store)
    # The process is killed now.
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    store.close()
    for root in (tmp_path / "copy", tmp_path / "root"):
        for _ in range(2):
            again = open_at(root, alike=alike)
            assert found(again, PAGES) == 0
            again.close()
            if torn:
                lose_the_end(again)


@pytest.mark.parametrize("torn", [False, True], ids=["log whole", "log torn"])
def test_pages_of_a_segment_that_could_not_be_opened_are_there_again_when_it_can(
    tmp_path: Path, torn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_at(tmp_path)
    put(store, PAGES)
    store.close()
    if torn:
        lose_the_end(store)
    store = open_at(tmp_path, env=FailingOpen("seg-00000001"))
    assert caplog.text.count("cannot be used until the next start") == 1
    assert "raise the limit (ulimit -n)" in caplog.text
    assert found(store, PAGES) == 0
    # So much that the log is made anew.
    for i in range(40):
        names = {key((i, n)): b"short-lived" for n in range(20)}
        put(store, names)
        store.delete(list(names))
    put(store, MORE)
    assert store.delete([key(0)]) == 0
    store.close()
    again = open_at(tmp_path)
    assert found(again, PAGES) == 9 and found(again, MORE) == 10
    again.close()


def test_a_clear_frees_the_room_of_segments_that_could_not_be_opened(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, PAGES)
    store.close()
    store = open_at(tmp_path, env=FailingOpen("seg-"))
    assert store.stats().bytes_on_disk > NBYTES * 10
    store.clear()
    assert not segments(store) and store.stats().bytes_on_disk < NBYTES
    store.close()


@pytest.mark.parametrize("delete", [by_key, all_of_them])
def test_a_sibling_deletes_pages_of_a_segment_that_its_owner_cannot_open(
    tmp_path: Path, delete: Callable[[DiskStore], None]
) -> None:
    owner = open_at(tmp_path, alike="tp0")
    put(owner, PAGES)
    owner.close()
    owner = open_at(tmp_path, alike="tp0", env=FailingOpen("tp0/seg-"))
    other = open_at(tmp_path, alike="tp0")
    assert found(other, PAGES) == 10
    delete(other)
    owner.follow()
    owner.close()
    other.close()
    again = open_at(tmp_path, alike="tp0")
    assert again.folder == owner.folder and found(again, PAGES) == 0
    again.close()


@pytest.mark.parametrize("alike", ["", "tp0"], ids=["alone", "shared"])
def test_a_start_without_a_descriptor_for_the_log_is_refused_and_brings_nothing_back(
    tmp_path: Path, alike: str
) -> None:
    store = open_at(tmp_path, alike=alike)
    put(store, PAGES)
    store.close()
    # Deleted in the log alone: the slots still hold the pages.
    store = open_at(tmp_path, alike=alike, env=FailingOpen("seg-"))
    store.delete(list(PAGES))
    store.close()
    before = descriptors()
    with pytest.raises(StoreError, match=r"raise the limit \(ulimit -n\)"):
        open_at(tmp_path, alike=alike, env=FailingOpen("index.log"))
    assert descriptors() == before
    store = open_at(tmp_path, alike=alike)
    assert found(store, PAGES) == 0
    store.close()


def test_a_torn_log_that_cannot_be_made_anew_still_says_what_was_deleted(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, PAGES)
    store.close()
    store = open_at(tmp_path, env=FailingOpen("seg-"))
    store.delete(list(PAGES))
    store.close()
    lose_the_end(store)
    store = open_at(tmp_path, env=FailingOpen("index.log.new", error=errno.ENOSPC))
    assert found(store, PAGES) == 0
    put(store, {key("new"): b"x"})  # which the log cannot take
    shutil.copytree(tmp_path, tmp_path.with_name("killed"))
    store.close()
    again = open_at(tmp_path.with_name("killed"))
    assert found(again, PAGES) == 0
    again.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("what", ["seg-", "index.log", "/tp0/gone"])
@pytest.mark.parametrize("delete", [by_key, all_of_them])
def test_a_list_of_deletes_is_not_shortened_while_something_of_a_sibling_cannot_be_opened(
    tmp_path: Path, delete: Callable[[DiskStore], None], what: str
) -> None:
    before = descriptors()
    owner = open_at(tmp_path, alike="tp0")
    put(owner, PAGES)
    owner.close()
    reader = open_at(tmp_path, alike="tp0", writes=False)
    put(reader, {key("own"): b"x"})
    assert found(reader, PAGES) == 10
    delete(reader)
    reader.close()
    theirs = owner.folder if what != "/tp0/gone" else ""
    env = FailingOpen(f"{theirs}/{what}" if theirs else what)
    reader = open_at(tmp_path, alike="tp0", writes=False, env=env)
    assert found(reader, PAGES) == 0
    reader.close()
    for _ in range(2):
        reader = open_at(tmp_path, alike="tp0", writes=False)
        assert found(reader, PAGES) == 0
        reader.close()
    assert descriptors() == before


@pytest.mark.parametrize("failing", [1, 2], ids=["first listing", "second listing"])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOENT])
@pytest.mark.parametrize("delete", [by_key, all_of_them])
def test_a_list_of_deletes_is_not_shortened_by_a_look_that_failed_half_way(
    tmp_path: Path, delete: Callable[[DiskStore], None], error: int, failing: int
) -> None:
    class Listing(Env):
        calls = 0

        def list(self, path: str) -> list[str]:
            if path == owner.folder:
                self.calls += 1
                if self.calls == failing:
                    raise OSError(error, "not now", path)
            return super().list(path)

        def open(self, path: str, flags: int) -> int:
            # The folder is not looked at while it is chosen.
            self.calls = 0 if path.endswith("config.json") else self.calls
            return super().open(path, flags)

        def pause(self, seconds: float) -> None:
            """Nothing changes while a test waits."""

    owner = open_at(tmp_path, alike="tp0")
    put(owner, PAGES)
    reader = open_at(tmp_path, alike="tp0")
    put(reader, {key("own"): b"x"})
    delete(reader)
    reader.close()
    reader = open_at(tmp_path, alike="tp0", env=Listing())
    assert found(reader, PAGES) == 0
    reader.close()
    owner.follow()
    assert found(owner, PAGES) == 0
    owner.close()


@pytest.mark.parametrize("what", ["gone", "gone.new"])
def test_deletes_hold_although_the_own_list_of_deletes_could_not_be_opened(
    tmp_path: Path, what: str
) -> None:
    class Short(FailingOpen):
        on = False

        def open(self, path: str, flags: int) -> int:
            if self.on and what == "gone" and path.endswith("/gone"):
                raise OSError(errno.EMFILE, "not now", path)
            if self.on and what == "gone.new" and "/gone." in path:
                raise OSError(errno.EMFILE, "not now", path)
            return super().open(path, flags)

    owner = open_at(tmp_path, alike="tp0")
    put(owner, PAGES)
    put(owner, MORE)
    owner.close()
    env = Short()
    reader = open_at(tmp_path, alike="tp0", writes=False, env=env)
    assert reader.delete(list(PAGES)[:5]) == 5
    env.on = True
    reader.close()
    reader = open_at(tmp_path, alike="tp0", writes=False, env=env)
    assert found(reader, dict(list(PAGES.items())[:5])) == 0
    reader.delete(list(PAGES))
    env.on = False
    reader.follow()
    assert found(reader, PAGES) == 0 and found(reader, MORE) == 10
    reader.close()
    reader = open_at(tmp_path, alike="tp0", writes=False)
    assert found(reader, PAGES) == 0 and found(reader, MORE) == 10
    reader.close()


def test_pages_of_a_siblings_segment_are_found_as_soon_as_it_can_be_opened(tmp_path: Path) -> None:
    owner = open_at(tmp_path, alike="tp0", segment_bytes=64 << 10)
    env = FailingOpen(f"{owner.folder}/seg-")
    other = open_at(tmp_path, alike="tp0", env=env)
    put(owner, PAGES)
    other.follow()
    put(owner, MORE)
    other.follow()
    assert found(other, PAGES | MORE) == 0
    env.fails = ()
    other.follow()
    assert found(other, PAGES | MORE) == 20
    owner.close()
    other.close()


def test_siblings_are_still_followed_after_a_look_for_want_of_descriptors_found_none(
    tmp_path: Path,
) -> None:
    class NoLists(Env):
        on = False

        def list(self, path: str) -> list[str]:
            if self.on:
                raise OSError(errno.EMFILE, "not now", path)
            return super().list(path)

    env = NoLists()
    first = open_at(tmp_path, alike="tp0", env=env)
    second = open_at(tmp_path, alike="tp0")
    put(second, PAGES)
    first.follow()
    env.on = True
    first.follow()
    put(second, MORE)
    first.follow()
    env.on = False
    first.follow()
    assert found(first, PAGES | MORE) == 20
    first.close()
    second.close()


# Too few descriptors


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit(count: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def fill(store: DiskStore, rounds: int) -> dict:
    """Two rounds fill a segment."""
    pages = {key((i, n)): content((i, n), NBYTES) for i in range(rounds) for n in range(5)}
    names = list(pages)
    for at in range(0, len(names), 5):
        some = {name: pages[name] for name in names[at : at + 5]}
        assert set(put(store, some)) == {PutOutcome.STORED}
    return pages


def spare_descriptors() -> int:
    """How many more files this process can open, of a hundred."""
    opened = []
    try:
        for _ in range(100):
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for fd in opened:
        os.close(fd)
    return len(opened)


SMALL = {"capacity_bytes": 64 << 20, "segment_bytes": 64 << 10}


def test_a_store_leaves_descriptors_for_the_rest_of_the_process_and_stores_on(
    tmp_path: Path, few_descriptors: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    few_descriptors(160)
    store = open_at(tmp_path, **SMALL)
    fill(store, 300)
    assert spare_descriptors() >= 50 and 10 < len(segments(store)) < 110
    assert caplog.text.count("too many open files") == 1
    store.close()


def test_pages_in_segments_beyond_the_limit_are_one_line_and_there_with_a_higher_one(
    tmp_path: Path, few_descriptors: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    few_descriptors(1024)
    store = open_at(tmp_path, **SMALL)
    pages = fill(store, 300)
    count = len(segments(store))
    store.close()
    few_descriptors(160)
    caplog.clear()
    store = open_at(tmp_path, **SMALL)
    assert count > 110 and len(caplog.records) == 1 and "ulimit -n" in caplog.text
    assert spare_descriptors() >= 50
    some = found(store, pages)
    assert 0 < some < len(pages)
    assert put(store, MORE) == [PutOutcome.STORED] * 10
    deleted = dict(list(pages.items())[-100:])
    store.delete(list(deleted))
    store.close()
    few_descriptors(1024)
    store = open_at(tmp_path, **SMALL)
    assert found(store, deleted) == 0
    # For each one of more at most one was evicted.
    assert found(store, pages) >= len(pages) - 100 - 10 and found(store, MORE) == 10
    store.close()


def test_a_sibling_opens_segments_as_far_as_descriptors_go_and_the_rest_once_there_are_more(
    tmp_path: Path, few_descriptors: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    few_descriptors(1024)
    owner = open_at(tmp_path, alike="tp0", **SMALL)
    pages = fill(owner, 300)
    owner.close()
    few_descriptors(160)
    reader = open_at(tmp_path, alike="tp0", writes=False, **SMALL)
    assert spare_descriptors() >= 50 and 0 < found(reader, pages) < len(pages)
    assert put(reader, MORE) == [PutOutcome.STORED] * 10, "some are left for its own"
    assert caplog.text.count("opening another server's segments failed") == 1
    few_descriptors(1024)
    reader.follow()
    assert found(reader, pages) == len(pages) and found(reader, MORE) == 10
    reader.close()
