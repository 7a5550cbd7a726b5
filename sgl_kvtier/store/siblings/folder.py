"""One sibling: a folder of another owner with the same pages, polled for its segments, the new
records of its log, and its list of deletes.

Nothing here writes. What is read is a hint: the owner may change all of it at any time.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import replace

import numpy as np

from sgl_kvtier.store.disk.env import SHORT, Env, check_private, read_fully
from sgl_kvtier.store.disk.format import (
    LOG_HEAD_BYTES,
    RECORD,
    pack_log_head,
    slot_bytes,
    unpack_frames,
)
from sgl_kvtier.store.disk.index_log import NAME, most_bytes
from sgl_kvtier.store.disk.namespace import GONE_LIST, WANTED
from sgl_kvtier.store.disk.segment import (
    NUMBER_MASK,
    DirectIO,
    Segment,
    named_apart,
    open_to_read,
    segment_name,
    segment_number,
)
from sgl_kvtier.store.recovery import named_in
from sgl_kvtier.store.siblings.gone import read_gone

NOTHING = np.empty(0, RECORD)
_RECENT_NS = 1_000_000_000
"""A folder that changed within this time before it was listed is listed again: file timestamps
advance in steps of some milliseconds and may hide a second change.
"""


class SiblingFolder:
    """The content of another owner's folder. One thread at a time."""

    def __init__(self, env: Env, path: str, identity: bytes, io: DirectIO, number: int) -> None:
        """`number`, from 1 on, distinguishes this folder's segments from those of others."""
        self._env = env
        self._identity = identity
        self._io = io
        self.path = path
        self.number = number
        self.segments: dict[int, Segment] = {}
        """By their numbers in this folder; `Segment.number` also has the folder's number."""
        self.waiting = NOTHING
        """Records of pages that could not be entered into the table yet: their rows are still being
        read, or their keys have other rows.
        """
        self.tried = -1
        """`SlotTable.losses` at the last attempt to enter them."""
        self.again_at = 0.0
        self.gone: np.ndarray | None = None
        """The owner's list of deletes; None until it was read."""
        self.wanted_ns = 0
        """The last time its owner found no space, in nanoseconds since 1970."""
        self.unread: OSError | None = None
        """Why a segment could not be opened at the last poll."""
        self.whole = False
        """Whether its current log was read to the end."""
        self._numbers: set[int] | None = None
        self._unread: set[int] = set()
        self._changed_ns = -1
        self._inode = -1
        self._fd = -1
        self._at = 0

    def look(self) -> list[Segment]:
        """Opens new segments. Returns segments whose files are gone; the caller closes them. Raises
        OSError, FileNotFoundError if the folder is gone.
        """
        env = self._env
        found = env.status(self.path)
        if found.st_mtime_ns == self._changed_ns:
            return []
        if self._inode not in (-1, found.st_ino):
            raise FileNotFoundError(errno.ENOENT, "another folder by now", self.path)
        check_private(self.path, found)
        self._inode = found.st_ino
        self._changed_ns, self._numbers = -1, None
        names = env.list(self.path)
        listed = GONE_LIST in names
        path = os.path.join(self.path, GONE_LIST)
        self.gone = read_gone(env, path, self._identity) if listed else NOTHING
        self.wanted_ns = 0
        if WANTED in names:
            with contextlib.suppress(OSError):
                self.wanted_ns = env.modified_ns(os.path.join(self.path, WANTED))
        if self._fd >= 0 and not env.same_file(self._fd, os.path.join(self.path, NAME)):
            self.close()
        numbers = {n for name in names if (n := segment_number(name)) is not None}
        self._numbers = numbers
        gone = [s for n, s in self.segments.items() if n not in numbers or self._replaced(s)]
        # Nothing raises from here on, because the caller must get the segments to close.
        for segment in gone:
            del self.segments[segment.number & NUMBER_MASK]
        self._open(sorted(numbers - self.segments.keys()))
        recent = env.wall_ns() - found.st_mtime_ns < _RECENT_NS
        self._changed_ns = -1 if recent or self._unread else found.st_mtime_ns
        return gone

    def news(self) -> tuple[bool, np.ndarray]:
        """(whether the log was replaced, its records since the last call). Raises OSError."""
        env = self._env
        anew = False
        if self._fd < 0:
            try:
                self._fd = env.open_to_read(os.path.join(self.path, NAME))
            except FileNotFoundError:
                return False, NOTHING
            anew, self._at = True, 0
        size = env.size(self._fd)
        if size <= self._at or size > most_bytes(self._slots()):
            return anew, NOTHING
        buffer = np.empty(size - self._at, np.uint8).data
        data = buffer[: read_fully(env, self._fd, [buffer], self._at)]
        if self._at == 0:
            if data[:LOG_HEAD_BYTES] != pack_log_head(self._identity):
                return anew, NOTHING
            data, self._at = data[LOG_HEAD_BYTES:], LOG_HEAD_BYTES
        records, used = unpack_frames(data)
        self._at += used
        self.whole = self.whole or used == len(data)
        return anew, records

    @property
    def empty(self) -> bool:
        """Whether the folder had no segment at the last poll."""
        return self._numbers == set()

    def named_by(self, records: np.ndarray) -> np.ndarray:
        """The pages that a complete log names, in all existing segments, opened or not."""
        return named_in(records, self._numbers or set())

    def as_numbered_there(self, among: set[int] | None = None) -> list[Segment]:
        """Segments that have rows, with their numbers in this folder; all, or those in `among`."""
        return [
            replace(segment, number=number)
            for number, segment in self.segments.items()
            if segment.base >= 0 and (among is None or number in among)
        ]

    def begin_anew(self) -> None:
        """Makes the next `news` return the whole log."""
        self.close()
        self.whole = False

    def close(self) -> None:
        """Closes the log; the segments are the caller's."""
        if self._fd >= 0:
            self._env.close(self._fd)
            self._fd = -1

    def _replaced(self, segment: Segment) -> bool:
        return not self._env.same_file(segment.fd, segment.path)

    def _slots(self) -> int:
        """Number of slots of all segments; for one that is not open, the most it can have."""
        slots = sum(segment.slots for segment in self.segments.values())
        for number in self._unread:
            with contextlib.suppress(OSError):
                path = os.path.join(self.path, segment_name(number))
                slots += self._env.bytes_on_disk(path) // slot_bytes(1)
        return slots

    def _open(self, numbers: list[int]) -> None:
        """Opens segments, and remembers those without a head yet or with an error."""
        before, self._unread, self.unread = self._unread, set(), None
        for number in numbers:
            try:
                segment = open_to_read(self._env, self.path, number, self._identity, self._io)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._unread.add(number)
                self.unread = error
                if error.errno in SHORT:
                    # The others would fail too.
                    self._unread.update(n for n in numbers if n > number)
                    break
                continue
            self.segments[number] = named_apart(segment, self.number)
        if before & self.segments.keys():
            # Records about their pages were read already: read the log again.
            self.close()
