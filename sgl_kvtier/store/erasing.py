"""Erases pages on disk, so that no later open finds them: deleted pages, damaged ones, and what a
failed write left.

A page that lookups no longer find may still be in a slot: it was evicted for a write in flight, or
another thread is deleting it. A delete returns only after the slots of all such pages were
rewritten or erased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.disk.format import DROP
from sgl_kvtier.store.index.core import Core
from sgl_kvtier.store.index.room import Room
from sgl_kvtier.store.index.slots import Rows, State
from sgl_kvtier.store.io.transfer import Mover
from sgl_kvtier.store.recovery import snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Gone:
    """Pages that lookups no longer find, while their slots still hold them. Their rows stay pinned
    until `Eraser.erase`.
    """

    rows: Rows
    records: np.ndarray


@dataclass(frozen=True, slots=True)
class Unsaid:
    """Rows being written and pages being erased at one moment: their slots may hold pages that the
    table no longer has.
    """

    rows: Rows
    sequences: np.ndarray
    gone: list[Gone]


class Eraser:
    """Erases pages of one open store. Any thread. "Locked" methods need the core's lock."""

    def __init__(self, core: Core, room: Room) -> None:
        self._core = core
        self._room = room
        self._under_way: list[Gone] = []
        self._left = False
        """True while a slot holds a deleted page, since neither its header nor the log could be
        written.
        """

    def forget(self, rows: Rows) -> Gone:
        """Locked. Drops pages from the table. `erase` must follow, without the lock."""
        gone = Gone(rows, self._room.records(rows, DROP))
        self._core.table.pin(rows)
        self._core.table.drop(rows)
        self._under_way.append(gone)
        return gone

    def erase(self, gone: Gone) -> None:
        """Erases the slots of pages after `forget`. Does I/O; never raises OSError."""
        core = self._core
        try:
            self.wipe(gone.records)
        finally:
            with core.lock:
                self._under_way.remove(gone)
                self._room.release(core.table.unpin(gone.rows))
                core.lock.notify_all()

    def wipe(self, records: np.ndarray) -> None:
        """Zeroes the headers of slots, which no other thread may write, and logs that they are
        empty. Never raises OSError.
        """
        if not len(records):
            return
        said = failed = False
        try:
            mover = Mover(self._core.env, self._core.io, self._core.config.verify_reads)
            for number, slot in zip(
                records["segment"].tolist(), records["slot"].tolist(), strict=True
            ):
                segment = self._room.segments[number]
                try:
                    mover.erase(segment, slot)
                except OSError as error:
                    self._core.complaints.about("deleting pages", error)
                    failed = True
                segment.dirty = True
            said = self._core.log.append(records) or not failed
        finally:
            if not said:
                self._left = True

    def forget_aside(self, which: Callable[[np.ndarray], NDArray[np.bool_]]) -> None:
        """Deletes pages in segments that could not be opened by logging that their slots are empty.
        Never raises OSError.
        """
        core, room = self._core, self._room
        with core.lock:
            if not len(room.aside):
                return
            gone = which(room.aside)
            records, room.aside = room.aside[gone].copy(), room.aside[~gone]
        records["kind"] = DROP
        if not core.log.append(records):
            self._left = True

    def unsaid(self) -> Unsaid:
        """Locked. What `settle` has to wait for until everything dropped so far is off the disk."""
        table = self._core.table
        rows = np.flatnonzero(table.state == State.WRITING)
        return Unsaid(rows, table.sequence[rows], list(self._under_way))

    def settle(self, unsaid: Unsaid) -> None:
        """Waits until those writes, erasures and removals of segments have ended. Never raises
        OSError.
        """
        core = self._core
        with core.lock:
            core.lock.wait_for(lambda: not self._open(unsaid))
        # A thread that removes a segment holds this lock until the file is gone.
        with self._room.changing:
            left = self._left
        # Neither the slot nor the log could be written: in a rewritten log, a page that it does not
        # name is gone.
        if left and core.log.rewrite(lambda: snapshot(core, self._room)):
            self._left = False

    def _open(self, unsaid: Unsaid) -> bool:
        table = self._core.table
        writing = (table.state[unsaid.rows] == State.WRITING) & (
            table.sequence[unsaid.rows] == unsaid.sequences
        )
        return bool(writing.any()) or any(gone in self._under_way for gone in unsaid.gone)
