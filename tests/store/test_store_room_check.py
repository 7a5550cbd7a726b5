"""A store that could write no page says so when it is opened, and again while it serves: once, with
the free and the needed bytes, until there is room.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from store_pages import IDENTITY, content, found, key, named, open_at, put, stored_at

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.disk.space import no_room

MIB = 1 << 20
PAGE = named([1], 3000)
OTHER = Identity({**IDENTITY.fields, "model": "another"}, "another")


class Filesystem(Env):
    """A filesystem of a given size and fullness."""

    def __init__(self, total: int, free: int, *, read_only: bool = False) -> None:
        self.total, self.free, self.read_only = total, free, read_only

    def filesystem_bytes(self, path: str) -> int:
        return self.total

    def free_bytes(self, path: str) -> int:
        return self.free

    def is_read_only(self, path: str) -> bool:
        return self.read_only


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "no room for more pages" in r.getMessage()]


def test_a_filesystem_smaller_than_the_floor_is_refused_until_another_setting_is_given(
    tmp_path: Path,
) -> None:
    small = Filesystem(300 * MIB, 299 * MIB)
    both = r"299\.0 MiB free of 300\.0 MiB.*1\.0 GiB.*min_free_bytes"
    with pytest.raises(StoreError, match=both):
        open_at(tmp_path, env=small, min_free_bytes=1 << 30)
    store = open_at(tmp_path, env=small, min_free_bytes=MIB)
    assert put(store, PAGE) == [PutOutcome.STORED]


def test_a_small_filesystem_with_pages_is_opened_and_read_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Filesystem(300 * MIB, 299 * MIB)
    stored_at(tmp_path, PAGE, env=small)
    store = open_at(tmp_path, env=small, min_free_bytes=1 << 30)
    assert found(store, PAGE) == 1
    put(store, named(range(20), 90_000))
    assert len(said(caplog)) == 1
    assert "New pages replace those used longest ago" in said(caplog)[0]


def test_a_filesystem_that_is_full_now_is_opened_with_a_warning_and_used_once_it_has_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Filesystem(100 << 30, 500 * MIB)
    store = open_at(tmp_path, env=full, min_free_bytes=1 << 30)
    (line,) = said(caplog)
    assert "500.0 MiB free of 100.0 GiB" in line and "1.0 GiB" in line
    assert "Every new page is refused" in line
    assert put(store, PAGE) == [PutOutcome.REFUSED]
    assert len(said(caplog)) == 1
    full.free = 50 << 30
    assert put(store, PAGE) == [PutOutcome.STORED]
    assert len(said(caplog)) == 1


def test_a_filesystem_that_fills_up_while_serving_is_said_once_until_it_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Filesystem(100 << 30, 50 << 30)
    store = open_at(tmp_path, env=disk, min_free_bytes=1 << 30, capacity_bytes=64 * MIB)
    assert said(caplog) == []
    for size in (3_000, 30_000):
        disk.free = 100 * MIB
        for i in range(3):
            assert put(store, {key((size, i)): content(i, size)}) == [PutOutcome.REFUSED]
        disk.free = 50 << 30
        assert put(store, {key((size, 0)): content(0, size)}) == [PutOutcome.STORED]
    assert len(said(caplog)) == 2


def test_a_filesystem_that_reports_no_size_is_refused_unless_no_floor_is_set(
    tmp_path: Path,
) -> None:
    silent = Filesystem(0, 0)
    with pytest.raises(StoreError, match=r"does not say how much is free.*min_free_bytes.*to 0"):
        open_at(tmp_path, env=silent, min_free_bytes=1 << 30)
    store = open_at(tmp_path, env=silent, min_free_bytes=0)
    assert put(store, PAGE) == [PutOutcome.STORED]


def test_a_filesystem_that_became_read_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="read-only: mount it writable"):
        open_at(tmp_path, env=Filesystem(100 << 30, 50 << 30, read_only=True))


def test_a_store_that_never_writes_opens_whatever_the_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Filesystem(300 * MIB, 0)
    open_at(tmp_path, env=full, alike="tp0", writes=False, min_free_bytes=1 << 30)
    assert said(caplog) == []


def test_a_page_larger_than_the_capacity_is_said_with_both_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_at(tmp_path, capacity_bytes=2 * MIB)
    with caplog.at_level(logging.WARNING):
        assert put(store, named(range(2), 3 * MIB)) == [PutOutcome.REFUSED] * 2
        assert put(store, PAGE) == [PutOutcome.STORED]
    (line,) = said(caplog)
    assert "store.capacity_bytes leaves" in line and "needs 3.0 MiB" in line


def test_a_capacity_without_room_for_one_page_is_known_before_any_write(tmp_path: Path) -> None:
    config = StoreConfig(path=str(tmp_path), capacity_bytes=8 * MIB)
    found = no_room(Env(), str(tmp_path), config, ranks=8, page_bytes=2 * MIB)
    assert found is not None and found.lasting
    assert "each of 8 ranks" in found.why
    store = open_at(tmp_path, capacity_bytes=2 * MIB)
    with pytest.raises(StoreError, match="raise store"):
        store.check_room(3 * MIB)


def test_less_than_a_whole_segment_of_free_space_is_used(tmp_path: Path) -> None:
    disk = Filesystem(100 << 30, (1 << 30) + 300_000)
    store = open_at(tmp_path, env=disk, min_free_bytes=1 << 30, segment_bytes=MIB)
    assert put(store, named([1], 30_000)) == [PutOutcome.STORED]
    assert store.stats().bytes_on_disk <= 300_000


def test_pages_of_another_model_make_room_on_a_full_filesystem(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Shared(Filesystem):
        """What the store frees is free afterwards."""

        def free_bytes(self, path: str) -> int:
            held = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("seg-*"))
            return self.free - held

    stored_at(tmp_path, named(range(60), 60_000), identity=OTHER)
    held = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("seg-*"))
    disk = Shared(100 << 30, (1 << 30) + held)
    store = open_at(tmp_path, env=disk, min_free_bytes=1 << 30, capacity_bytes=64 * MIB)
    assert put(store, PAGE) == [PutOutcome.STORED]
    assert said(caplog) == []


def test_pages_of_another_model_stay_where_removing_them_would_not_make_room(
    tmp_path: Path,
) -> None:
    stored_at(tmp_path, named(range(60), 60_000), identity=OTHER)
    kept = sorted(tmp_path.rglob("seg-*"))
    store = open_at(tmp_path, env=Filesystem(100 << 30, MIB), min_free_bytes=1 << 30)
    assert put(store, PAGE) == [PutOutcome.REFUSED]
    assert sorted(tmp_path.rglob("seg-*")) == kept


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent_and_not_made(
    tmp_path: Path,
) -> None:
    config = StoreConfig(path=str(tmp_path / "a" / "b"), min_free_bytes=1 << 50)
    found = no_room(Env(), config.path, config)
    assert found is not None and found.lasting
    assert not (tmp_path / "a").exists()


def test_a_roomy_folder_has_nothing_to_say(tmp_path: Path) -> None:
    assert no_room(Env(), str(tmp_path), StoreConfig(min_free_bytes=0)) is None
