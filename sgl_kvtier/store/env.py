"""Every operating-system call of the store, behind one object, so that a test can make call number N fail.

No other module of this room opens a file, moves bytes, asks for the time or takes a lock on a directory.
Methods raise OSError as the system does; `read_fully` and `write_fully` hide short transfers, EINTR and EAGAIN.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

_RETRIES = 100
"""Times in a row that EINTR or EAGAIN is tried again before it counts as an error."""


class Env:
    """The operating system as the store uses it. Stateless, any thread. Subclass it to inject faults.

    Paths are never followed through a symbolic link in their last part, and files are closed on exec.
    """

    native = True
    """Whether the native lanes may bypass this object. False in subclasses that want to see every call."""

    def open(self, path: str, flags: int) -> int:
        """A descriptor. New files get mode 0600 whatever the umask says."""
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        if flags & os.O_CREAT:
            os.fchmod(fd, FILE_MODE)
        return fd

    def close(self, fd: int) -> None:
        """Closes a descriptor; an error at this point has no remedy and is passed over."""
        with contextlib.suppress(OSError):
            os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, list(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, list(buffers), offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserves disk space for a file of `nbytes`; only sets its length where the filesystem cannot reserve."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.ftruncate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def bytes_on_disk(self, path: str) -> int:
        """Bytes that a file occupies, which is less than its length where it is sparse."""
        return os.lstat(path).st_blocks * 512

    def modified_ns(self, path: str) -> int:
        return os.lstat(path).st_mtime_ns

    def touch(self, path: str) -> None:
        os.utime(path, follow_symlinks=False)

    def is_directory(self, path: str) -> bool:
        """True for a directory that is not a symbolic link."""
        return os.path.isdir(path) and not os.path.islink(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        """A directory with mode 0700; one that exists already is left as it is."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def free_bytes(self, path: str) -> int:
        """Bytes that an ordinary user may still write on the filesystem of `path`."""
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def lock(self, fd: int) -> None:
        """Takes the exclusive lock of an open file, or raises BlockingIOError at once. Ends with the descriptor."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def now(self) -> float:
        """Seconds that only go forward."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()


def read_fully(env: Env, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fills the buffers from `offset` on; returns the bytes read, fewer only where the file ends. Raises OSError."""
    done = 0
    rest = list(buffers)
    for _ in _attempts():
        if not rest:
            return done
        try:
            moved = env.preadv(fd, rest, offset + done)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN):
                continue
            raise
        if moved == 0:
            return done
        done += moved
        rest = _after(rest, moved)
    raise OSError(errno.EIO, "the device keeps answering with short reads")


def write_fully(env: Env, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes the buffers from `offset` on. Raises OSError, after which any part of the range may have been written."""
    done = 0
    rest = list(buffers)
    for _ in _attempts():
        if not rest:
            return
        try:
            moved = env.pwritev(fd, rest, offset + done)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN):
                continue
            raise
        done += moved
        rest = _after(rest, moved)
    raise OSError(errno.EIO, "the device keeps answering with short writes")


def read_file(env: Env, path: str) -> bytes:
    """The whole of a small file. Raises OSError."""
    return bytes(read_large_file(env, path))


def read_large_file(env: Env, path: str) -> memoryview:
    """The whole of a file, not copied once more. Raises OSError."""
    fd = env.open(path, os.O_RDONLY)
    try:
        buffer = np.empty(env.size(fd), np.uint8).data
        return buffer[: read_fully(env, fd, [buffer] if len(buffer) else [], 0)]
    finally:
        env.close(fd)


def write_file(env: Env, path: str, data: bytes) -> None:
    """A small file that is either the old one or the new one, also after a crash. Raises OSError."""
    fresh = f"{path}.{os.getpid()}.new"  # several ranks settle the same folder at once
    fd = env.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(env, fd, [memoryview(data)], 0)
        env.sync(fd)
    finally:
        env.close(fd)
    env.rename(fresh, path)


def address(buffer: memoryview) -> int:
    """Where a buffer lies in memory."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data) if len(buffer) else 0


def _attempts() -> Iterator[int]:
    return iter(range(_RETRIES))


def _after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    for i, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[i + 1 :]]
        moved -= len(buffer)
    return []
