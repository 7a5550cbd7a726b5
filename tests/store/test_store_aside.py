"""Segments that cannot be opened for a while, for want of descriptors or because of the device:
their pages are neither lost nor, once deleted, found again.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripted import Scripted
from store_pages import (
    Open,
    found,
    key,
    killed,
    lose_the_end,
    named,
    open_at,
    put,
    segments,
    stored_at,
)

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.engine import DiskStore

NBYTES = 5000
PAGES, MORE = named(range(10)), named(range(10, 20))
pytestmark = pytest.mark.usefixtures("only_when_told")


def failing(*files: str, error: int = errno.EMFILE) -> Scripted:
    """Opening a file fails whose path has one of these in it."""
    env = Scripted(native=True)
    env.error = error
    env.fails = lambda call: call.startswith("open") and any(name in call for name in files)
    return env


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
    stored_at(tmp_path / "root", PAGES, alike=alike)
    store = open_at(tmp_path / "root", alike=alike, env=failing("seg-", error=error))
    assert found(store, PAGES) == 0
    delete(store)
    copy = killed(store, tmp_path / "copy")
    store.close()
    for root in (copy, tmp_path / "root"):
        for _ in range(2):
            again = open_at(root, alike=alike)
            assert found(again, PAGES) == 0
            again.close()
            if torn:
                lose_the_end(again.folder)


@pytest.mark.parametrize("torn", [False, True], ids=["log whole", "log torn"])
def test_pages_of_a_segment_that_could_not_be_opened_are_there_again_when_it_can(
    tmp_path: Path, torn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stored_at(tmp_path, PAGES)
    if torn:
        lose_the_end(tmp_path)
    store = open_at(tmp_path, env=failing("seg-00000001"))
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


def test_a_clear_frees_the_room_of_segments_that_could_not_be_opened(tmp_path: Path) -> None:
    stored_at(tmp_path, PAGES)
    store = open_at(tmp_path, env=failing("seg-"))
    assert store.stats().bytes_on_disk > NBYTES * 10
    store.clear()
    assert not segments(store) and store.stats().bytes_on_disk < NBYTES


@pytest.mark.parametrize("delete", [by_key, all_of_them])
def test_a_sibling_deletes_pages_of_a_segment_that_its_owner_cannot_open(
    owner: Open, tmp_path: Path, delete: Callable[[DiskStore], None]
) -> None:
    stored_at(tmp_path, PAGES, alike="tp0")
    first = owner(env=failing("tp0/seg-"))
    other = owner()
    assert found(other, PAGES) == 10
    delete(other)
    first.follow()
    first.close()
    other.close()
    again = owner()
    assert again.folder == first.folder and found(again, PAGES) == 0


@pytest.mark.parametrize("alike", ["", "tp0"], ids=["alone", "shared"])
def test_a_start_without_a_descriptor_for_the_log_is_refused_and_brings_nothing_back(
    tmp_path: Path, alike: str
) -> None:
    stored_at(tmp_path, PAGES, alike=alike)
    # Deleted in the log alone: the slots still hold the pages.
    store = open_at(tmp_path, alike=alike, env=failing("seg-"))
    store.delete(list(PAGES))
    store.close()
    before = descriptors()
    with pytest.raises(StoreError, match=r"raise the limit \(ulimit -n\)"):
        open_at(tmp_path, alike=alike, env=failing("index.log"))
    assert descriptors() == before
    assert found(open_at(tmp_path, alike=alike), PAGES) == 0


def test_a_torn_log_that_cannot_be_made_anew_still_says_what_was_deleted(tmp_path: Path) -> None:
    stored_at(tmp_path / "root", PAGES)
    store = open_at(tmp_path / "root", env=failing("seg-"))
    store.delete(list(PAGES))
    store.close()
    lose_the_end(tmp_path)
    store = open_at(tmp_path / "root", env=failing("index.log.new", error=errno.ENOSPC))
    assert found(store, PAGES) == 0
    put(store, {key("new"): b"x"})  # which the log cannot take
    assert found(open_at(killed(store, tmp_path / "killed")), PAGES) == 0


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("what", ["tp0/seg-", "tp0/index.log", "/tp0/gone"])
@pytest.mark.parametrize("delete", [by_key, all_of_them])
def test_a_list_of_deletes_is_not_shortened_while_something_of_a_sibling_cannot_be_opened(
    owner: Open, tmp_path: Path, delete: Callable[[DiskStore], None], what: str
) -> None:
    before = descriptors()
    stored_at(tmp_path, PAGES, alike="tp0")
    reader = owner(writes=False)
    put(reader, {key("own"): b"x"})
    assert found(reader, PAGES) == 10
    delete(reader)
    reader.close()
    for env in (failing(what), None, None):
        reader = owner(writes=False, env=env)
        assert found(reader, PAGES) == 0
        reader.close()
    assert descriptors() == before


@pytest.mark.parametrize("failing_", [1, 2], ids=["first listing", "second listing"])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOENT])
@pytest.mark.parametrize("delete", [by_key, all_of_them])
def test_a_list_of_deletes_is_not_shortened_by_a_look_that_failed_half_way(
    owner: Open, delete: Callable[[DiskStore], None], error: int, failing_: int
) -> None:
    first = owner()
    put(first, PAGES)
    reader = owner()
    put(reader, {key("own"): b"x"})
    delete(reader)
    reader.close()
    env, listings = Scripted(native=True), []

    def fails(call: str) -> bool:
        if call.endswith("config.json"):
            listings.clear()  # The folder is not looked at while it is chosen.
        if call == f"list {first.folder}":
            listings.append(call)
            return len(listings) == failing_
        return False

    env.fails, env.error = fails, error
    reader = owner(env=env)
    assert found(reader, PAGES) == 0
    reader.close()
    first.follow()
    assert found(first, PAGES) == 0


@pytest.mark.parametrize("what", ["gone", "gone.new"])
def test_deletes_hold_although_the_own_list_of_deletes_could_not_be_opened(
    owner: Open, tmp_path: Path, what: str
) -> None:
    stored_at(tmp_path, PAGES | MORE, alike="tp0")
    env = Scripted(native=True)
    env.error = errno.EMFILE
    reader = owner(writes=False, env=env)
    assert reader.delete(list(PAGES)[:5]) == 5
    env.fails = lambda call: (
        call.startswith("open") and (call.endswith("/gone") if what == "gone" else "/gone." in call)
    )
    reader.close()
    reader = owner(writes=False, env=env)
    assert found(reader, dict(list(PAGES.items())[:5])) == 0
    reader.delete(list(PAGES))
    env.fails = lambda call: False
    reader.follow()
    assert found(reader, PAGES) == 0 and found(reader, MORE) == 10
    reader.close()
    reader = owner(writes=False)
    assert found(reader, PAGES) == 0 and found(reader, MORE) == 10


def test_pages_of_a_siblings_segment_are_found_as_soon_as_it_can_be_opened(owner: Open) -> None:
    first = owner(segment_bytes=64 << 10)
    env = failing(f"{first.folder}/seg-")
    other = owner(env=env)
    for pages in (PAGES, MORE):
        put(first, pages)
        other.follow()
    assert found(other, PAGES | MORE) == 0
    env.fails = lambda call: False
    other.follow()
    assert found(other, PAGES | MORE) == 20


def test_siblings_are_still_followed_after_a_look_for_want_of_descriptors_found_none(
    owner: Open,
) -> None:
    env = Scripted(native=True)
    env.error = errno.EMFILE
    first, second = owner(env=env), owner()
    put(second, PAGES)
    first.follow()
    env.fails = lambda call: call.startswith("list")
    first.follow()
    put(second, MORE)
    first.follow()
    env.fails = lambda call: False
    first.follow()
    assert found(first, PAGES | MORE) == 20


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
    pages = named((i, n) for i in range(rounds) for n in range(5))
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


def test_a_sibling_opens_segments_as_far_as_descriptors_go_and_the_rest_once_there_are_more(
    owner: Open, few_descriptors: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    few_descriptors(1024)
    first = owner(**SMALL)
    pages = fill(first, 300)
    first.close()
    few_descriptors(160)
    reader = owner(writes=False, **SMALL)
    assert spare_descriptors() >= 50 and 0 < found(reader, pages) < len(pages)
    assert put(reader, MORE) == [PutOutcome.STORED] * 10, "some are left for its own"
    assert caplog.text.count("opening another server's segments failed") == 1
    few_descriptors(1024)
    reader.follow()
    assert found(reader, pages) == len(pages) and found(reader, MORE) == 10
