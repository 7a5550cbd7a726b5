"""All operating-system calls of the store, in one object, so that a test can make call N fail.

No other module of this package opens a file, moves bytes, reads the clock or locks a directory.
Methods raise OSError as the system does. `read_fully` and `write_fully` retry short transfers,
EINTR and EAGAIN.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FOR_OTHERS = 64
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about the file: the process or host lacks descriptors or memory."""
_RETRIES = 100
"""Consecutive EINTR or EAGAIN results that are retried before they count as an error."""


class NotOursError(OSError):
    """A file or folder that other users own or may write. `advice`: one line with what to do."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(errno.EPERM, why, path)

    @property
    def advice(self) -> str:
        return f"{self.filename} {self.strerror}"


class Env:
    """The operating system as the store uses it. Stateless; any thread. Tests inject faults here.

    A symbolic link in the last part of a path is never followed, and files are closed on exec.
    """

    native = True
    """Whether compiled I/O threads may bypass this. False in subclasses that see every call."""
    native_module: Any = None
    """Another build of the compiled I/O threads: the laboratory's, with fault injection."""

    def open(self, path: str, flags: int) -> int:
        """Opens a regular file, or a folder with O_DIRECTORY. Refuses anything else at once.

        A file opened for writing belongs to this user and has mode 0600 afterwards, whatever the
        umask. Raises NotOursError if it belongs to another user.
        """
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE_MODE)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) and not flags & os.O_DIRECTORY:
                raise OSError(errno.EINVAL, "not a regular file: remove it", path)
            if flags & os.O_ACCMODE != os.O_RDONLY:
                check_owned(path, found)
                if found.st_mode & (FILE_MODE | _OTHERS) != FILE_MODE:
                    os.fchmod(fd, FILE_MODE)
            # Non-blocking only during the open: on such files io_uring fails requests that would
            # block.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_to_read(self, path: str, flags: int = 0) -> int:
        """Opens a regular file of this user for reading. Raises NotOursError."""
        fd = self.open(path, os.O_RDONLY | flags)
        try:
            check_owned(path, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def leaves_enough(self, fd: int, share: float = 1.0) -> bool:
        """Whether a new descriptor is within `share` of the descriptors that segments may use. A
        quarter of the process's limit, and at least 64, is reserved for everything else.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return True
        # A new descriptor gets the lowest free number, so all lower ones are in use.
        return fd < share * (limit - min(max(_FOR_OTHERS, limit // 4), limit // 2))

    def close(self, fd: int) -> None:
        """Closes a descriptor; errors are ignored, since nothing can be done about them."""
        with contextlib.suppress(OSError):
            os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, list(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, list(buffers), offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserves disk space for `nbytes`; if that is not supported, sets only the length."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.ftruncate(fd, nbytes)

    def read_exactly(self, fd: int) -> None:
        """Turns read-ahead off: reads through the page cache load only the requested bytes."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def status(self, path: str) -> os.stat_result:
        """The status of a path; a symbolic link is not followed."""
        return os.lstat(path)

    def same_file(self, fd: int, path: str) -> bool:
        """Whether a path still names this open file."""
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(path))
        except FileNotFoundError:
            return False

    def bytes_on_disk(self, path: str) -> int:
        """Disk blocks that a file occupies, in bytes: less than its length if it is sparse."""
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
        """Creates a directory with mode 0700; one that exists is left as it is."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)

    def make_private(self, path: str) -> bool:
        """Sets a directory of this user to mode 0700. Returns whether others could write it before.
        Raises NotOursError if another user owns it, or if the filesystem does not store modes.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError:
            check_owned(path, os.lstat(path))
            raise
        try:
            found = os.fstat(fd)
            check_owned(path, found)
            if found.st_mode & _OTHERS:
                os.fchmod(fd, DIRECTORY_MODE)
                check_private(path, os.fstat(fd))
        finally:
            os.close(fd)
        return bool(found.st_mode & OTHERS_WRITE)

    def make_sticky(self, path: str) -> None:
        """Sets the sticky bit: only an entry's or the directory's owner may move or remove it."""
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_ISVTX)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def free_bytes(self, path: str) -> int:
        """Bytes that an unprivileged user may still write on the filesystem of `path`."""
        info = os.statvfs(path)
        return info.f_bavail * info.f_frsize

    def filesystem_bytes(self, path: str) -> int:
        """Size of the filesystem of `path`; 0 if it reports none, as ramfs."""
        info = os.statvfs(path)
        return info.f_blocks * info.f_frsize

    def is_read_only(self, path: str) -> bool:
        """Whether the filesystem of `path` is mounted read-only."""
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)

    def lock(self, fd: int) -> None:
        """Locks an open file until its descriptor is closed, or raises BlockingIOError at once."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def lock_shared(self, fd: int) -> None:
        """Takes a shared lock, which only `lock` excludes. Raises BlockingIOError at once."""
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def process_exists(self, pid: int) -> bool:
        """Whether a process with this id exists, as far as this process can see."""
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:
            return True
        return True

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()


def read_fully(env: Env, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Reads into the buffers. Returns the bytes read, fewer at the file's end. Raises OSError."""
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
    """Writes the buffers at `offset`. Raises OSError; any part may have been written then."""
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


def read_file(env: Env, path: str, most: int, flags: int = os.O_RDONLY) -> bytes:
    """The whole of a small file, of at most `most` bytes. Raises OSError."""
    return bytes(read_large_file(env, path, most, flags))


def read_large_file(env: Env, path: str, most: int, flags: int = os.O_RDONLY) -> memoryview:
    """A file of at most `most` bytes, copied once. Raises OSError, EFBIG if it is longer."""
    fd = env.open(path, flags)
    try:
        nbytes = env.size(fd)
        if nbytes > most:
            raise OSError(errno.EFBIG, f"{nbytes} bytes long, and can hold at most {most}", path)
        buffer = np.empty(nbytes, np.uint8).data
        return buffer[: read_fully(env, fd, [buffer] if len(buffer) else [], 0)]
    finally:
        env.close(fd)


def create_file(env: Env, path: str, flags: int) -> int:
    """Creates a file. One of the same name from an earlier run is unlinked first, never opened or
    truncated. Raises OSError.
    """
    flags |= os.O_CREAT | os.O_EXCL
    try:
        return env.open(path, flags)
    except FileExistsError:
        env.unlink(path)
        return env.open(path, flags)


def write_file(env: Env, path: str, data: bytes) -> None:
    """Replaces a small file: after a crash it has the old or the new content. Raises OSError."""
    fresh = f"{path}.{unique_number()}.new"
    fd = env.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        try:
            write_fully(env, fd, [memoryview(data)], 0)
            env.sync(fd)
        finally:
            env.close(fd)
        env.rename(fresh, path)
    except BaseException:
        # Free the space: the disk may be full.
        with contextlib.suppress(OSError):
            env.unlink(fresh)
        raise


def unique_number() -> int:
    """A random number for a temporary file's name. Several ranks write the same file at once, and
    in containers their process ids may be equal.
    """
    return secrets.randbits(63)


def check_private(path: str, found: os.stat_result) -> None:
    """Raises NotOursError if other users own a directory or may write it. `ssh` requires the same
    of its folders, for the same reason.
    """
    check_owned(path, found)
    if found.st_mode & OTHERS_WRITE:
        raise NotOursError(
            path, f"may be written by other users (mode {stat.S_IMODE(found.st_mode):04o}): what "
                "they put there would be served. Remove "
            "it, or run chmod go-w on it if no other user has written to it. A filesystem that "
            "keeps no modes must be mounted with umask=077",
        )  # fmt: skip


def check_owned(path: str, found: os.stat_result) -> None:
    """Raises NotOursError if a file or directory belongs to another user."""
    if found.st_uid != os.geteuid():
        raise NotOursError(
            path, f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}. "
                "Run it as that user, remove what "
            "is there, or choose another store.path. A filesystem that keeps no owners cannot hold "
            "a store",
        )  # fmt: skip


def address(buffer: memoryview) -> int:
    """The memory address of a buffer."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data) if len(buffer) else 0


def _attempts() -> Iterator[int]:
    return iter(range(_RETRIES))


def _after(buffers: list[memoryview], moved: int) -> list[memoryview]:
    for i, buffer in enumerate(buffers):
        if moved < len(buffer):
            return [buffer[moved:], *buffers[i + 1 :]]
        moved -= len(buffer)
    return []
