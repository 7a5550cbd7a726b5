"""Digests of whole files that determine a server's pages: weights, their configuration, adapters
and code. Every byte is read once and the digest is kept.

A kept digest is valid for a file with the same path, device, inode, size, modification time and
change time. A file changed in place has another change time, which no program can set, whatever its
modification time is. Digests are kept in the store's folder, in `files.json`, which is replaced
atomically and may be lost at any time.

Of several servers and ranks that start at the same time, one reads, holding `files.lock`, and the
others wait for the digests it keeps. The kernel releases the lock however its holder ends. A
process that has waited for as long as a slow disk would take reads the files itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from sgl_kvtier.outside import is_whole, parse_json
from sgl_kvtier.sizes import format_bytes
from sgl_kvtier.store.disk.env import Env, read_file, write_file
from sgl_kvtier.store.disk.namespace import DIGESTS, DIGESTS_LOCK

logger = logging.getLogger(__name__)

KEPT: Final = DIGESTS
LOCK: Final = DIGESTS_LOCK
_SCHEMA = 1
_MOST_FILES = 4096
_MOST_BYTES = 8 << 20
_PART_BYTES = 64 << 20
"""What one thread reads at a time. The digest of a file is computed from its parts' digests."""
_READ_BYTES = 1 << 20
_MOST_THREADS = 8
_SETTLED_S = 2.0
"""A file changed within this many seconds is read again the next time, since a second change could
have the same change time.
"""
_SLOWEST_BYTES_S = 50e6
_LEAST_WAIT_S = 60.0
_PAUSE_S = 0.1
_TELL_S = 5.0
_TRIES = 3


class Stamp(NamedTuple):
    """What is known of a file without reading it. Times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file, following symbolic links. Raises OSError."""
    found = path.stat()
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FileDigests:
    """SHA-256 digests of files by content. Any thread."""

    def __init__(self, folder: str | None = None, *, now: Callable[[], float] = time.time) -> None:
        """`folder` keeps the digests; without one, every call reads the files."""
        self._folder = Path(folder) if folder else None
        self._now = now
        self._env = Env()

    def of(self, paths: Sequence[Path]) -> dict[Path, str]:
        """The digest of each file, as 64 hexadecimal digits. A file that cannot be read gets a
        digest of its stamp, which changes when anything about the file changes.
        """
        stamps: dict[Path, Stamp] = {}
        digests: dict[Path, str] = {}
        for path in paths:
            try:
                stamps[path] = stamp_of(path)
            except OSError:
                digests[path] = _of_text(f"missing {path.name}")
        digests |= self._kept(stamps)
        missing = {path: stamps[path] for path in stamps if path not in digests}
        if not missing:
            return digests
        with self._turn(sum(stamp.size for stamp in missing.values())):
            found = self._kept(missing)  # a process that held the lock before may have kept some
            read = _read({path: missing[path] for path in missing if path not in found})
            self._keep({path: (missing[path], digest) for path, digest in read.items()})
        return digests | found | read

    def _kept(self, stamps: Mapping[Path, Stamp]) -> dict[Path, str]:
        kept = self._load()
        found = {}
        for path, stamp in stamps.items():
            entry = kept.get(os.path.realpath(path))
            if entry is not None and entry[0] == stamp:
                found[path] = entry[1]
        return found

    def _load(self) -> dict[str, tuple[Stamp, str]]:
        """The kept digests. Damaged entries are ignored."""
        if self._folder is None:
            return {}
        try:
            # opened for writing to check that the file is this user's; it is made private
            path = str(self._folder / KEPT)
            data = parse_json(read_file(self._env, path, _MOST_BYTES, os.O_RDWR))
            if data["schema"] != _SCHEMA:
                return {}
            entries = dict(data["files"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}
        return {
            path: (Stamp(*entry[:5]), entry[5]) for path, entry in entries.items() if _fits(entry)
        }

    def _keep(self, read: Mapping[Path, tuple[Stamp, str]]) -> None:
        settled = int((self._now() - _SETTLED_S) * 1e9)
        fresh = {
            os.path.realpath(path): (stamp, digest)
            for path, (stamp, digest) in read.items()
            if stamp.changed < settled and _stamp_or_none(path) == stamp
        }
        if self._folder is None or not fresh:
            return
        entries = {path: entry for path, entry in self._load().items() if path not in fresh}
        last = dict(list((entries | fresh).items())[-_MOST_FILES:])
        files = {path: [*stamp, digest] for path, (stamp, digest) in last.items()}
        try:
            data = json.dumps({"schema": _SCHEMA, "files": files}, indent=1).encode()
            write_file(self._env, str(self._folder / KEPT), data)
        except OSError as error:
            logger.warning(
                "kvtier: the digests of weights cannot be kept in %s: %s. Every start of a server "
                "reads the weights until this user can write there", self._folder, error,
            )  # fmt: skip

    @contextlib.contextmanager
    def _turn(self, nbytes: int) -> Iterator[None]:
        """Holds the lock of processes that read files. After a timeout, or if there is no lock,
        continues without it.
        """
        fd = self._open_lock()
        try:
            if fd is not None:
                self._wait_for(fd, _LEAST_WAIT_S + nbytes / _SLOWEST_BYTES_S)
            yield
        finally:
            if fd is not None:
                self._env.close(fd)

    def _open_lock(self) -> int | None:
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._env.open(str(self._folder / LOCK), os.O_RDWR | os.O_CREAT)
        except OSError:  # opening the store will report what is wrong with its folder
            return None

    def _wait_for(self, fd: int, limit_s: float) -> None:
        ends = time.monotonic() + limit_s
        told = False
        while time.monotonic() < ends:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not told:
                    logger.info("kvtier: another process reads weights; waiting for its digests")
                told = True
                time.sleep(_PAUSE_S)
            except OSError:  # a filesystem without locks
                return
        logger.warning("kvtier: another process reads weights too slowly; reading them here too")


def _fits(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == len(Stamp._fields) + 1
        and all(is_whole(number, 0, 1 << 64) for number in entry[:-1])
        and isinstance(entry[-1], str)
        and is_hexadecimal(entry[-1])
    )


def is_hexadecimal(text: str) -> bool:
    """Whether a text is a SHA-256 in the form that hub caches and this module use."""
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _stamp_or_none(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(stamps: Mapping[Path, Stamp]) -> dict[Path, str]:
    if not stamps:
        return {}
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    progress = _Progress(sum(stamp.size for stamp in stamps.values()))
    with ThreadPoolExecutor(threads, "kvtier-weights") as pool:
        return {path: _digest(path, stamp, pool, progress) for path, stamp in stamps.items()}


def _digest(path: Path, stamp: Stamp, pool: ThreadPoolExecutor, progress: _Progress) -> str:
    """The digest of a file that does not change while it is read. A file that keeps changing gets a
    random digest, which matches no other.
    """
    for _ in range(_TRIES):
        starts = range(0, stamp.size, _PART_BYTES)
        try:
            parts = list(pool.map(lambda at: _part(path, at, progress), starts))
            after = stamp_of(path)
        except OSError as error:
            logger.warning("kvtier: %s cannot be read: %s", path, error)
            return _of_text(f"unread {path.name} {stamp}")
        if after == stamp:
            return hashlib.sha256(b"".join(parts)).hexdigest()
        stamp = after
    logger.warning(
        "kvtier: %s changes while it is read, so the pages of this server are not shared with "
        "others. Start the server when the model's files are complete", path,
    )  # fmt: skip
    return _of_text(uuid.uuid4().hex)


def _part(path: Path, start: int, progress: _Progress) -> bytes:
    digest = hashlib.sha256()
    room = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = _PART_BYTES
        while left:
            count = file.readinto(room[: min(left, _READ_BYTES)])
            if not count:
                break
            digest.update(room[:count])
            left -= count
            progress.add(count)
    return digest.digest()


class _Progress:
    """Logs the progress of reading every five seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._read = 0
        self._lock = threading.Lock()
        self._tell_at = time.monotonic() + _TELL_S

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._read += nbytes
            if time.monotonic() < self._tell_at:
                return
            self._tell_at = time.monotonic() + _TELL_S
            logger.info(
                "kvtier: reading the weights to identify their KV cache, once for this model: "
                "%s of %s", format_bytes(self._read), format_bytes(self._total),
            )  # fmt: skip
