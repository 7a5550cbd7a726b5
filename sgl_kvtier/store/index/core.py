"""What the parts of one open store share: settings, lock, slot table, counters."""

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
}


@dataclass(slots=True)
class Counters:
    """Counts since the store was opened. Changed under the lock, read without."""

    pages_read: int = 0
    bytes_read: int = 0
    pages_written: int = 0
    bytes_written: int = 0
    bytes_written_to_device: int = 0
    pages_kept: int = 0
    pages_refused: int = 0
    pages_evicted: int = 0
    pages_missed: int = 0
    pages_corrupt: int = 0
    reads_failed: int = 0
    reads_late: int = 0
    reads_cancelled: int = 0
    write_busy_s: float = 0.0


class Complaints:
    """One warning per kind of trouble, with what to do; the counters say how often."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._said: set[tuple[str, int]] = set()

    def about(self, doing: str, error: OSError) -> None:
        number = error.errno or 0
        if (doing, number) in self._said:
            return
        self._said.add((doing, number))
        advice = _ADVICE.get(number, os.strerror(number))
        logger.warning(
            "%s failed below %s: %s. Serving goes on without (said once)",
            doing,
            self._folder,
            advice,
        )


@dataclass(slots=True)
class Core:
    """The shared part of an open store. `lock` guards the table, the room's books, the counters and
    the sequence; no I/O under it.

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
    """Raises OSError (ESTALE) once the folder is no longer this process's: it stays untouched."""
    table: SlotTable = field(default_factory=SlotTable)
    counters: Counters = field(default_factory=Counters)
    lock: threading.Condition = field(default_factory=threading.Condition)
    sequence: int = 0
    stamps: bool = False
    """Sequence numbers follow the clock, so that those of several folders can be compared."""
    closing: bool = False
    """Set once, under the lock: from then on nothing is claimed, doomed or made."""

    def next_sequence(self, count: int) -> int:
        """The first of `count` sequence numbers never used before. Under the lock."""
        if self.stamps:
            self.sequence = max(self.sequence, self.env.wall_ns())
        first = self.sequence + 1
        self.sequence += count
        return first
