"""The index on disk: an append-only log that says which slot holds which page. It is a hint; every
page is verified when it is read.

It is a log of our own and not a database: the tests that inject I/O faults into pages do the same
to it, a million entries are opened with two numpy calls, and it never syncs unless told to.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable

import numpy as np

from sgl_kvtier.store.disk.env import SHORT, Env, create_file, read_large_file, write_fully
from sgl_kvtier.store.disk.format import (
    FRAME_HEAD_BYTES,
    RECORD,
    pack_frame,
    pack_log_head,
    unpack_log,
)

logger = logging.getLogger(__name__)

NAME = "index.log"
_SLACK = 512
"""The log is rewritten when it has this many records more than twice the number of live pages."""
_AGAIN_S = 10.0
"""Minimum seconds between two rewrites if one failed, or if records were lost again right after it:
each rewrite takes a pass over all pages.
"""
INDEX_BYTES_PER_SLOT = 3 * RECORD.itemsize
"""Log bytes reserved per slot: two records, and one in the new log while it replaces the old."""
_READ_BYTES_PER_SLOT = 4 * (RECORD.itemsize + FRAME_HEAD_BYTES)
_READ_FIXED_BYTES = 1 << 20


def most_bytes(slots: int) -> int:
    """The longest log that is read for this many slots, twice what the store writes."""
    return _READ_FIXED_BYTES + slots * _READ_BYTES_PER_SLOT


class Frame:
    """Records packed into a frame in advance, before they are valid."""

    def __init__(self, records: np.ndarray) -> None:
        self.count = len(records)
        self.data = pack_frame(records)


class IndexLog:
    """The index log of one folder. Any thread; its own lock is held during writes. A read waits for
    it only if a page turns out to be damaged.

    A failed append loses index records, never pages: `append` and `rewrite` return False and do not
    raise. A log that lacks records gets a torn last frame, so that no reader takes it for complete,
    until `rewrite` replaces it. With `durable` a new log is synced before it replaces the old one.
    """

    def __init__(
        self,
        env: Env,
        folder: str,
        identity: bytes,
        check_owner: Callable[[], None] = lambda: None,
        *,
        durable: bool = False,
    ) -> None:
        """`check_owner` raises OSError once the folder no longer belongs to this process: from then
        on no file in it is created, replaced or removed.
        """
        self._env = env
        self._check_owner = check_owner
        self._path = os.path.join(folder, NAME)
        self._identity = identity
        self._durable = durable
        self._lock = threading.Lock()
        self._fd = -1
        self._end = 0
        self._records = 0
        self._lost = 0
        self._looks_complete = True
        """Whether a reader would take the log on disk for complete."""
        self._again_at = 0.0
        self._mended_at = -_AGAIN_S
        self._closed = False
        self.bytes_written = 0
        """Bytes written since the store was opened."""

    @property
    def nbytes(self) -> int:
        return self._end

    @property
    def lost(self) -> bool:
        """Whether records are missing on disk: the next open would scan all slot headers."""
        return self._lost != 0

    def load(self, slots: int) -> tuple[np.ndarray, bool]:
        """(records in written order, whether the log is complete) for a folder with this many
        slots. Raises OSError only if descriptors or memory are short: without the log, deleted
        pages would come back.
        """
        try:
            # Opened for writing, because `Env.open` then refuses another user's file.
            data = read_large_file(self._env, self._path, most_bytes(slots), os.O_RDWR)
        except FileNotFoundError:
            return np.empty(0, RECORD), False
        except OSError as error:
            if error.errno in SHORT:
                raise
            logger.warning("the index log is passed over: %s", error)
            return np.empty(0, RECORD), False
        records, self._looks_complete = unpack_log(data, self._identity)
        return records, self._looks_complete

    def resume(self, records: int) -> bool:
        """Opens the complete log that `load` read, with this number of records, for appending.
        Raises OSError as `load` does.
        """
        with self._lock:
            try:
                self._fd = self._env.open(self._path, os.O_WRONLY)
                self._end = self._env.size(self._fd)
            except OSError as error:
                if error.errno in SHORT:
                    raise
                logger.debug("the index log cannot be written: %s", error)
                return False
            self._records = records
            return True

    def rewrite(self, snapshot: Callable[[], np.ndarray]) -> bool:
        """Replaces the log by one with only the records that `snapshot` returns. If that fails, or
        after `close`, the old one stays.

        `snapshot` is called with appends blocked, so no record is lost between the two logs.
        """
        with self._lock:
            # After close the folder may belong to another process.
            if self._closed:
                return False
            live = snapshot()
            fresh = self._path + ".new"
            fd = -1
            try:
                self._check_owner()
                fd = create_file(self._env, fresh, os.O_WRONLY)
                data = pack_log_head(self._identity) + pack_frame(live)
                write_fully(self._env, fd, [memoryview(data)], 0)
                if self._durable:
                    self._env.sync(fd)
                self._check_owner()
                self._env.rename(fresh, self._path)
            except BaseException as error:
                self._again_at = self._env.now() + _AGAIN_S
                if fd >= 0:
                    self._env.close(fd)
                    with contextlib.suppress(OSError):
                        self._check_owner()
                        # Free the space: the disk may be full.
                        self._env.unlink(fresh)
                if not isinstance(error, OSError):
                    raise
                logger.debug("the index log was not rewritten: %s", error)
                return False
            self._drop_descriptor()
            self._looks_complete = True
            if self._lost:
                self._mended_at = self._env.now()
            self._fd, self._end, self._records, self._lost = fd, len(data), len(live), 0
            self.bytes_written += len(data)
            return True

    def append(self, records: np.ndarray) -> bool:
        """Appends records. False if they were not written."""
        return self.append_frame(Frame(records)) if len(records) else True

    def append_frame(self, frame: Frame) -> bool:
        """`append` for records that are packed already."""
        data = frame.data
        with self._lock:
            if self._closed or self._lost:
                return False
            try:
                if self._fd < 0:
                    raise OSError(errno.EBADF, "the index log could not be opened")
                write_fully(self._env, self._fd, [memoryview(data)], self._end)
            except OSError as error:
                self._lose(error)
                return False
            self._end += len(data)
            self.bytes_written += len(data)
            self._records += frame.count
            return True

    def worth_rewriting(self, live: int) -> bool:
        """Whether most records are obsolete, or some missing. False for a while after a failure."""
        return (
            self.lost or self._records > 2 * live + _SLACK
        ) and self._env.now() >= self._again_at

    def sync(self) -> None:
        """Makes all records survive a power loss. Raises OSError, also if records are missing."""
        with self._lock:
            if self._lost:
                raise OSError(self._lost, "index records were lost")
            if self._fd >= 0:
                self._env.sync(self._fd)

    def close(self) -> None:
        """Stops all writes. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop_descriptor()

    def leave_to_parent(self) -> None:
        """`close` in a forked child, where the thread that holds the lock may not exist."""
        self._lock = threading.Lock()
        self.close()

    def _lose(self, error: OSError) -> None:
        """Locked. Marks a log that lacks records as incomplete: lengthens it by a torn frame, or
        removes it. A full disk allows both. Its earlier records stay valid for the time before.
        """
        logger.debug("index records were lost: %s", error)
        self._lost = error.errno or errno.EIO
        # The disk may be full again right after a rewrite.
        self._again_at = max(self._again_at, self._mended_at + _AGAIN_S)
        try:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the index log could not be opened")
            self._env.truncate(self._fd, self._end + 1)
            self._looks_complete = False
        except OSError as whole:
            logger.debug("the index log does not grow: %s", whole)
            try:
                if self._looks_complete:
                    self._check_owner()
                    self._env.unlink(self._path)
            except OSError as stays:
                logger.debug("the index log cannot be removed: %s", stays)
        self._drop_descriptor()
        self._end = self._records = 0

    def _drop_descriptor(self) -> None:
        if self._fd >= 0:
            self._env.close(self._fd)
            self._fd = -1
