"""State that the parts of an open store share: settings, lock, slot table, counters."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.disk.segment import DirectIO
from sgl_kvtier.store.index.slots import SlotTable

logger = logging.getLogger(__name__)

_ADVICE = {
    errno.ENOSPC: "the filesystem is full: free some space or lower store.capacity_bytes",
    errno.EDQUOT: "this user's disk quota is used up: raise it or lower store.capacity_bytes",
    errno.EROFS: "the filesystem is read-only: mount it writable or choose another store.path",
    errno.EACCES: "permission denied: make store.path writable for this user",
    errno.EPERM: "not permitted: look for immutable files (lsattr) below store.path",
    errno.EIO: "the device reports I/O errors: look at the kernel log (dmesg) and replace the disk",
    errno.ENOENT: "the folder was removed under this server: restart the server",
    errno.ESTALE: "the folder or its lock was removed under this server: restart the server",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n) or store.segment_bytes",
    errno.ENFILE: "too many files are open on this host: raise fs.file-max (sysctl)",
    errno.ENOMEM: "there is too little memory: give this process more",
}


@dataclass(slots=True)
class Counters:
    """Counts since the store was opened. Written under the lock, read without it."""

    pages_read: int = 0
    bytes_read: int = 0
    pages_written: int = 0
    bytes_written: int = 0
    bytes_written_to_device: int = 0
    pages_kept: int = 0
    pages_not_admitted: int = 0
    pages_refused: int = 0
    pages_evicted: int = 0
    pages_missed: int = 0
    pages_corrupt: int = 0
    reads_failed: int = 0
    reads_late: int = 0
    reads_cancelled: int = 0
    follow_failures: int = 0
    write_busy_s: float = 0.0


def advice(error: OSError) -> str:
    """What an error of the operating system means for the store and what to do."""
    return _ADVICE.get(error.errno or 0, os.strerror(error.errno or 0))


class Complaints:
    """Logs one warning per kind of error, with what to do; counters say how often it happened."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._said: set[tuple[str, int]] = set()
        self._no_room = False

    def about(self, doing: str, error: OSError) -> None:
        number = error.errno or 0
        if (doing, number) in self._said:
            return
        self._said.add((doing, number))
        logger.warning(
            "%s failed below %s: %s. Serving goes on without (said once)",
            doing,
            self._folder,
            advice(error),
        )

    def unexpected(self, doing: str, error: Exception) -> None:
        """Logs an exception other than OSError, once per kind, with its traceback."""
        kind = (f"{doing}: {type(error).__name__}", 0)
        if kind in self._said:
            return
        self._said.add(kind)
        logger.error(
            "%s failed below %s. Serving goes on without (said once). Please report it: %r",
            doing,
            self._folder,
            error,
            exc_info=error,
        )

    def about_room(self, why: str, *, kept: bool) -> None:
        """Logs a lack of space, once until `room_again`. `kept`: new pages replace older ones."""
        if self._no_room:
            return
        self._no_room = True
        effect = (
            "New pages replace those used longest ago"
            if kept
            else "Every new page is refused, and serving goes on without"
        )
        logger.warning(
            "no room for more pages below %s: %s. %s (said once)", self._folder, why, effect
        )

    def room_again(self) -> None:
        """New space was found: the next time that there is none is logged again."""
        self._no_room = False


@dataclass(slots=True)
class Core:
    """The shared state of an open store. `lock` guards the table, the space accounting, the
    counters and the sequence number; no I/O is done under it.

    `log`'s own lock is taken before `lock`, never inside it.
    """

    env: Env
    config: StoreConfig
    identity: bytes
    folder: str
    io: DirectIO
    log: IndexLog
    complaints: Complaints
    check_owner: Callable[[], None] = lambda: None
    """Raises OSError (ESTALE) once this process has lost the folder, which it must not change then.
    """
    table: SlotTable = field(default_factory=SlotTable)
    counters: Counters = field(default_factory=Counters)
    lock: threading.Condition = field(default_factory=threading.Condition)
    sequence: int = 0
    stamps: bool = False
    """Whether sequence numbers follow the clock, which makes those of several folders comparable.
    """
    closing: bool = False
    """Set once, under the lock. From then on no slot is allocated or dropped, no segment created.
    """

    def failed_once(self, doing: str, error: Exception) -> None:
        """Counts and logs an unexpected exception in a thread or step that continues. Each kind is
        logged once, with its traceback.
        """
        with self.lock:
            self.counters.follow_failures += 1
        self.complaints.unexpected(doing, error)

    def next_sequence(self, count: int) -> int:
        """Locked. The first of `count` sequence numbers that were never used before."""
        if self.stamps:
            self.sequence = max(self.sequence, self.env.wall_ns())
        first = self.sequence + 1
        self.sequence += count
        return first
