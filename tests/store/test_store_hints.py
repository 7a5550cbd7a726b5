"""What is said about a folder that cannot hold a store: the cause, and what to do about it."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

import pytest
from store_pages import content, key, open_at, put

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.tools import offline
from sgl_kvtier.store.tools.commands import Fsck


class Refusing(Env):
    """Opening or locking a rank's lock fails with one error."""

    def __init__(self, number: int, *, when: str) -> None:
        self._number, self._when = number, when

    def open(self, path: str, flags: int) -> int:
        if self._when == "open" and path.endswith("/lock"):
            raise OSError(self._number, os.strerror(self._number), path)
        return super().open(path, flags)

    def lock(self, fd: int) -> None:
        if self._when == "lock":
            raise OSError(self._number, os.strerror(self._number))
        super().lock(fd)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK])
def test_a_filesystem_without_flock_is_named_as_such(tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreError, match=r"takes no locks.*needs flock.*local disk"):
        open_at(tmp_path, env=Refusing(number, when="lock"))


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "Mount the filesystem writable"),
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EMFILE, "ulimit"),
        (errno.EIO, "kernel log"),
        (errno.EACCES, "this user can write"),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else "",
)
def test_an_error_on_the_way_to_the_lock_says_what_mends_it(
    tmp_path: Path, number: int, advice: str
) -> None:
    with pytest.raises(StoreError, match=advice) as found:
        open_at(tmp_path, env=Refusing(number, when="open"))
    assert "[Errno" not in str(found.value)


@pytest.mark.parametrize("below", ["", "store/pages"])
def test_a_dangling_link_is_named_with_where_it_points(tmp_path: Path, below: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "not-there")
    with pytest.raises(StoreError, match=r"link is a symbolic link to .*not-there") as found:
        open_at(link / below)
    assert "Make that folder" in str(found.value)
    (tmp_path / "not-there").mkdir()
    open_at(link / below).close()


@pytest.mark.parametrize("below", ["", "store/pages"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file is not a folder. Remove it"):
        open_at(tmp_path / "file" / below)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "mount the filesystem writable, or check a copy"),
        (errno.EACCES, "Run this as the user who owns the store"),
        (errno.EIO, "Check the disk"),
    ],
    ids=["EROFS", "EACCES", "EIO"],
)
def test_fsck_says_why_it_cannot_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    store = open_at(tmp_path)
    put(store, {key(1): content(1, 5000)})
    store.close()
    (namespace,) = offline.namespaces(Env(), str(tmp_path))
    env = Refusing(number, when="open")
    with pytest.raises(StoreError, match=advice) as found:
        offline.check_rank(env, namespace, store.folder, repair=False)
    assert ("Run this as" in str(found.value)) == (number == errno.EACCES)


def test_fsck_of_a_sound_store_still_finds_nothing(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    put(store, {key(1): content(1, 5000)})
    store.close()
    parser = argparse.ArgumentParser()
    Fsck().add_arguments(parser)
    assert Fsck().run(parser.parse_args([str(tmp_path)])) == 0
