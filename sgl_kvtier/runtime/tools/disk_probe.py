"""Inspects a folder's disk: filesystem, free bytes, direct I/O, and its rough speed by a test."""

from __future__ import annotations

import errno
import mmap
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sgl_kvtier.config import StoreConfig

_BLOCK = 1 << 20
_TEST_BYTES = 128 << 20
READERS = StoreConfig.io_threads
"""Number of reading threads, as in a store."""


@dataclass(frozen=True)
class DiskProbe:
    """A folder's filesystem: type, free bytes for this user, whether O_DIRECT works."""

    filesystem: str
    free_bytes: int
    direct_io: bool


@dataclass(frozen=True)
class DiskSpeed:
    """MB/s (10^6 bytes) with requests of 1 MiB: one thread writes, with fdatasync, and `READERS`
    threads read.
    """

    write_mbps: float
    read_mbps: float
    nbytes: int


def look(folder: Path) -> DiskProbe:
    """Inspects the folder, created if missing. Raises OSError if it cannot be created or
    written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stats = os.statvfs(folder)
    return DiskProbe(_filesystem(folder), stats.f_bavail * stats.f_frsize, _opens_direct(folder))


def measure(folder: Path, *, direct: bool) -> DiskSpeed:
    """Writes and reads one temporary file of at most 128 MiB. Raises OSError, also if less than 4
    MiB are free.
    """
    free = os.statvfs(folder)
    nbytes = min(_TEST_BYTES, free.f_bavail * free.f_frsize // 4) // _BLOCK * _BLOCK
    if not nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    blocks = nbytes // _BLOCK
    block = mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(_BLOCK))
    flag = os.O_DIRECT if direct else 0
    name = _temporary(folder)
    try:
        fd = os.open(name, os.O_WRONLY | flag)
        try:
            started = time.perf_counter()
            for _ in range(blocks):
                os.write(fd, block)
            os.fdatasync(fd)
            wrote = time.perf_counter() - started
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        fd = os.open(name, os.O_RDONLY | flag)
        try:
            with ThreadPoolExecutor(READERS) as pool:
                started = time.perf_counter()
                parts = [range(first, blocks, READERS) for first in range(READERS)]
                list(pool.map(lambda part: _read(fd, part), parts))
                read = time.perf_counter() - started
        finally:
            os.close(fd)
    finally:
        Path(name).unlink()
        block.close()
    return DiskSpeed(nbytes / wrote / 1e6, nbytes / read / 1e6, nbytes)


def _read(fd: int, blocks: range) -> None:
    with mmap.mmap(-1, _BLOCK) as into:
        for block in blocks:
            os.preadv(fd, [into], block * _BLOCK)


def _temporary(folder: Path) -> str:
    fd, name = tempfile.mkstemp(prefix=".kvtier-probe-", dir=folder)
    os.close(fd)
    return name


def _opens_direct(folder: Path) -> bool:
    name = _temporary(folder)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
        return True
    except OSError:
        return False
    finally:
        Path(name).unlink()


def _filesystem(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    path, best, kind = str(folder.resolve()), "", "unknown"
    for line in mounts.read_text(errors="replace").splitlines() if mounts.exists() else ():
        # Spaces in a folder's name are written as octal numbers (proc(5)).
        point, fstype = (
            re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
            for field in line.split(" ")[1:3]
        )
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fstype
    return kind
