"""Opening files: at once or not at all, nothing but regular files, and never more of them than can
be of use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted import Scripted, only

from sgl_kvtier.lab.stress.store.faults import FailingEnv, Fault
from sgl_kvtier.store.disk.env import Env, create_file, read_file, write_file


def make_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


def link_to_file(path: Path) -> None:
    path.with_name("target").write_text("kept")
    path.symlink_to(path.with_name("target"))


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, make_socket, link_to_file])
def test_only_regular_files_are_opened_and_without_waiting(
    tmp_path: Path, make: Callable[[Path], None], flags: int
) -> None:
    make(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        Env().open(str(tmp_path / "x"), flags)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_opened_may_be_waited_for(tmp_path: Path) -> None:
    fd = Env().open(str(tmp_path / "x"), os.O_RDWR | os.O_CREAT)
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
    os.close(fd)


def test_a_file_longer_than_asked_for_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    assert read_file(Env(), str(path), 100) == bytes(100)
    os.truncate(path, 8 << 40)
    with pytest.raises(OSError, match="at most 100") as caught:
        read_file(Env(), str(path), 100)
    assert caught.value.errno == errno.EFBIG


@contextmanager
def linked_twice(path: Path) -> Iterator[None]:
    """A file that has another name elsewhere, under which it must stay as it is."""
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_text("kept")
    path.hardlink_to(elsewhere)
    yield
    assert elsewhere.read_text() == "kept"


def test_a_new_file_does_not_cut_the_one_whose_name_it_takes(tmp_path: Path) -> None:
    with linked_twice(tmp_path / "x"):
        os.close(create_file(Env(), str(tmp_path / "x"), os.O_WRONLY))
        assert (tmp_path / "x").read_bytes() == b""
    with linked_twice(tmp_path / "y"):
        write_file(Env(), str(tmp_path / "y"), b"new")
        assert (tmp_path / "y").read_bytes() == b"new"


def test_a_draft_that_cannot_be_written_is_not_left_behind(tmp_path: Path) -> None:
    env = Scripted()
    env.fails = only("file")
    (tmp_path / "y").write_bytes(b"old")
    with pytest.raises(OSError, match="error"):
        write_file(env, str(tmp_path / "y"), b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
    assert (tmp_path / "y").read_bytes() == b"old"


@pytest.mark.parametrize(
    "call",
    [
        lambda env, path: env.status(path),
        lambda env, path: env.same_file(0, path),
        lambda env, path: env.make_private(path),
        lambda env, path: env.lock_shared(0),
    ],
)
def test_every_call_can_be_made_to_fail(tmp_path: Path, call: Callable[[Env, str], object]) -> None:
    env = FailingEnv(Fault(0, errno.EIO))
    with pytest.raises(OSError) as caught:
        call(env, str(tmp_path))
    assert (caught.value.errno, env.calls, env.failed) == (errno.EIO, 1, 1)
