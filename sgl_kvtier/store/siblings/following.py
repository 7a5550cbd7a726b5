"""Pages in the folders of other owners, found and read beside those of this store's own.

Their slots are rows of the same table, in the state THEIRS: looked up, pinned, read and checked as
every page is. Nothing in those folders is written. An entry that is not true any more is a miss.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np

from sgl_kvtier.store.disk.format import key_words
from sgl_kvtier.store.disk.index_log import INDEX_BYTES_PER_SLOT
from sgl_kvtier.store.disk.namespace import GONE_LIST, RankFolder, is_left_over, list_alike
from sgl_kvtier.store.disk.segment import NUMBER_MASK, Segment
from sgl_kvtier.store.index.core import Core
from sgl_kvtier.store.index.room import Room
from sgl_kvtier.store.index.slots import EMPTY, Rows, State
from sgl_kvtier.store.recovery import latest, newest_sequence, pool_codes
from sgl_kvtier.store.siblings.folder import NOTHING, SiblingFolder
from sgl_kvtier.store.siblings.gone import Deletes, gone_records, read_gone, write_gone

_CHUNK = 256
"""Rows changed at a time: the core's lock is held for microseconds."""
_RECENT_NS = 1_000_000_000
_MOST_FOLDERS = 2047
_LONG = 256
"""Entries of the own list of deletes from which on it is shortened whenever it has doubled."""


class Following:
    """The folders beside one store's own, as the store sees them. Any thread.

    Its lock is taken after `Room.changing` and before the core's.
    """

    def __init__(self, core: Core, room: Room, own: RankFolder, alike: str) -> None:
        """`alike`: which folders hold the same pages (`namespace.list_alike`)."""
        self._core = core
        self._room = room
        self._own = own
        self._alike = alike
        self._lock = threading.Lock()
        self._closed = False
        self._listed_ns = -1
        self._last_number = 0
        self._leaving: list[Segment] = []
        self._own_list = NOTHING
        self._deletes = Deletes(NOTHING)
        self._long = _LONG
        self._told = 0
        self._obeyed = 0
        self._newest = 0
        self.folders: dict[str, SiblingFolder] = {}

    def open(self) -> None:
        """Finds what siblings hold, and keeps of the own list of deletes what is still needed.
        Before any other thread runs. Never raises OSError.
        """
        core, path = self._core, os.path.join(self._own.path, GONE_LIST)
        try:
            for name in filter(is_left_over, core.env.list(self._own.path)):
                core.env.unlink(os.path.join(self._own.path, name))
            self._own_list = read_gone(core.env, path, core.identity)
            with self._lock:
                before = len(self._own_list)
                self._shorten()
                if len(self._own_list) < before:
                    write_gone(core.env, path, core.identity, self._own_list)
        except OSError as error:
            core.complaints.about("shortening the list of deletes", error)

    def look(self) -> None:
        """Brings the table up to what the siblings' folders say now. Never raises OSError."""
        with self._lock:
            if not self._closed:
                self._look(None)

    def told(self) -> bool:
        """Whether a sibling deleted pages since the last call."""
        with self._lock:
            news, self._obeyed = self._told != self._obeyed, self._told
            return news

    def deleted_rows(self) -> Rows:
        """With the core's lock held. The rows of pages that a sibling deleted."""
        table, deletes = self._core.table, self._deletes
        found = [np.empty(0, np.int64)]
        if deletes.all_until:
            there = (table.state >= State.LIVE) | (table.state == State.WRITING)
            found.append(np.flatnonzero(there & (table.sequence <= deletes.all_until)))
        pools, codes = pool_codes(deletes.named)
        for code, pool in enumerate(pools):
            entries = deletes.named[codes == code]
            rows = table.find_words(key_words(entries), pool)
            old = table.sequence[np.maximum(rows, 0)] <= entries["sequence"]
            found.append(rows[(rows != EMPTY) & old])
        return np.unique(np.concatenate(found))

    def delete(self, keys: list[bytes], pool: str) -> None:
        """Makes pages impossible to find in all folders, also for siblings and in later lives; all
        pages without `keys`. Those of this store's own are the caller's. Never raises OSError.
        """
        self.look()
        core = self._core
        with self._lock:
            if self._closed or not self.folders:
                return
            with core.lock:
                core.sequence = max(core.env.wall_ns(), core.sequence, self._newest)
                until = core.sequence
            new = gone_records(keys, pool, until)
            self._own_list = np.concatenate([self._own_list, new]) if keys else new
            self._gather()
            if len(self._own_list) > self._long:
                self._shorten()
                self._long = max(_LONG, 2 * len(self._own_list))
            try:
                path = os.path.join(self._own.path, GONE_LIST)
                core.check_owner()
                write_gone(core.env, path, core.identity, self._own_list)
                if core.config.durable:
                    self._sync_names()
            except OSError as error:
                core.complaints.about("telling other servers what was deleted", error)

    def close(self) -> None:
        """Ends the following. The segments' files are the room's."""
        with self._lock:
            self._closed = True
            for folder in self.folders.values():
                folder.close()

    def leave_to_parent(self) -> None:
        """`close` in a forked child, where the thread that holds the lock may not exist."""
        self._lock = threading.Lock()
        self.close()

    # Below: with `_lock` held.

    def _look(self, seen: list[np.ndarray] | None) -> None:
        """Records of pages that are there, deleted ones too, are added to `seen`."""
        self._list()
        for folder in list(self.folders.values()):
            try:
                self._follow(folder, seen)
            except FileNotFoundError:
                self._leave(folder)
            except OSError as error:
                self._core.complaints.about("following another server's pages", error)
        self._close_left()
        self._count()

    def _shorten(self) -> None:
        """Reads all logs from their beginning, and forgets the own deletes that delete nothing."""
        seen = [NOTHING]
        for folder in self.folders.values():
            folder.begin_anew()
        self._gather()
        self._look(seen)
        if all(folder.whole for folder in self.folders.values()):
            self._own_list = Deletes(self._own_list).needed_for(np.concatenate(seen))
            self._gather()

    def _sync_names(self) -> None:
        env = self._core.env
        fd = env.open(self._own.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            env.sync(fd)
        finally:
            env.close(fd)

    def _list(self) -> None:
        env, namespace = self._core.env, self._own.namespace
        try:
            changed = env.modified_ns(namespace)
        except OSError:
            return
        if changed == self._listed_ns:
            return
        paths = list_alike(env, namespace, self._alike)
        for path in self.folders.keys() - set(paths):
            self._leave(self.folders[path])
        for path in paths:
            if path != self._own.path and path not in self.folders:
                core = self._core
                self.folders[path] = SiblingFolder(
                    env, path, core.identity, core.io, self._new_number()
                )
        recent = env.wall_ns() - changed < _RECENT_NS
        self._listed_ns = -1 if recent else changed

    def _new_number(self) -> int:
        used = {folder.number for folder in self.folders.values()}
        used |= {segment.number // (NUMBER_MASK + 1) for segment in self._leaving}
        while True:
            self._last_number = self._last_number % _MOST_FOLDERS + 1
            if self._last_number not in used:
                return self._last_number

    def _follow(self, folder: SiblingFolder, seen: list[np.ndarray] | None) -> None:
        gone = folder.gone
        self._forget(folder.look())
        anew, records = folder.news()
        if len(records):
            # A segment is made before the first record about it.
            self._forget(folder.look())
        if folder.gone.tobytes() != gone.tobytes():
            self._gather()
            self._told += 1
        self._add_rows(folder)
        if not anew:
            records = np.concatenate([folder.waiting, records])
        folder.waiting = NOTHING
        if anew or len(records):
            self._apply(folder, anew, records, seen)

    def _apply(
        self, folder: SiblingFolder, anew: bool, records: np.ndarray, seen: list[np.ndarray] | None
    ) -> None:
        newest = newest_sequence(self._core.env)
        named = None if anew else set(records["segment"].tolist())
        segments = folder.as_numbered_there(named)
        live = latest(records, segments, newest)
        known = records["sequence"][records["sequence"] <= newest]
        self._newest = max(self._newest, int(known.max()) if len(known) else 0)
        if seen is not None:
            seen.append(live)
        deleted = self._deletes.hit(live)
        if deleted.any():
            live = live[~deleted]
        if not self._core.config.verify_reads:
            # Unlike an own slot, theirs may be written while it is read.
            live = live[:0]
        if anew:
            touched = np.concatenate(
                [np.empty(0, np.int64), *(np.arange(s.base, s.base + s.slots) for s in segments)]
            )
            touched.sort()
        else:
            rows = _rows_of(records, segments)
            touched = np.unique(rows[rows >= 0])
        self._drop_stale(touched, _rows_of(live, segments), live)
        folder.waiting = self._enter(live, _rows_of(live, segments))

    def _drop_stale(self, touched: Rows, rows: Rows, live: np.ndarray) -> None:
        """Forgets the pages of touched rows that are not there any more."""
        true = np.zeros(len(touched), np.uint64)
        true[np.searchsorted(touched, rows)] = live["sequence"]
        table = self._core.table
        for part in _chunks(len(touched)):
            some = touched[part]
            with self._core.lock:
                stale = (table.state[some] == State.THEIRS) & (table.sequence[some] != true[part])
                if stale.any():
                    table.drop(some[stale])

    def _enter(self, live: np.ndarray, rows: Rows) -> np.ndarray:
        """Enters pages that nothing else holds; returns those whose rows are still being read."""
        table, waiting = self._core.table, [NOTHING]
        pools, codes = pool_codes(live)
        for code, pool in enumerate(pools):
            mine = np.flatnonzero(codes == code)
            keys = key_words(live[mine])
            for part in _chunks(len(mine)):
                some, where = live[mine[part]], rows[mine[part]]
                with self._core.lock:
                    if self._core.closing:
                        return NOTHING
                    state = table.state[where]
                    absent = table.find_words(keys[part], pool) == EMPTY
                    new = absent & (state == State.FREE)
                    if new.any():
                        ids = np.full(int(new.sum()), table.pool_id(pool))
                        table.enter(
                            where[new], keys[part][new], ids, some["length"][new],
                            some["sequence"][new],
                        )  # fmt: skip
                        table.borrow(where[new])
                read = absent & (state == State.DOOMED)
                if read.any():
                    waiting.append(some[read])
        return np.concatenate(waiting)

    def _add_rows(self, folder: SiblingFolder) -> None:
        table, new = self._core.table, [s for s in folder.segments.values() if s.base < 0]
        if new:
            with self._core.lock:
                table.reserve(sum(segment.slots for segment in new))
        for segment in new:
            if segment.number in self._room.theirs:
                # An earlier file of this name is still being read: the log is read again then.
                folder.close()
                continue
            with self._core.lock:
                segment.base = table.add_rows(segment.slots, segment.number)
                self._room.theirs[segment.number] = segment

    def _forget(self, segments: list[Segment]) -> None:
        table = self._core.table
        for segment in segments:
            if segment.base < 0:
                self._core.env.close(segment.fd)
                continue
            for part in _chunks(segment.slots):
                rows = np.arange(segment.base, segment.base + segment.slots)[part]
                with self._core.lock:
                    table.drop(rows[table.state[rows] == State.THEIRS])
            self._leaving.append(segment)

    def _close_left(self) -> None:
        """Closes the segments that are gone and not read any more."""
        table, leaving = self._core.table, self._leaving
        self._leaving = []
        for segment in leaving:
            with self._core.lock:
                read = table.pins[segment.base : segment.base + segment.slots].any()
                if not read:
                    table.remove_rows(segment.base, segment.slots)
                    del self._room.theirs[segment.number]
            if read:
                self._leaving.append(segment)
            else:
                self._core.env.close(segment.fd)

    def _leave(self, folder: SiblingFolder) -> None:
        self._forget(list(folder.segments.values()))
        folder.close()
        del self.folders[folder.path]
        self._listed_ns = -1

    def _gather(self) -> None:
        """All lists of deletes together."""
        lists = [folder.gone for folder in self.folders.values()]
        self._deletes = Deletes(np.concatenate([self._own_list, *lists]))

    def _count(self) -> None:
        held = 0
        for folder in self.folders.values():
            segments = folder.segments.values()
            held += sum(s.nbytes + INDEX_BYTES_PER_SLOT * s.slots for s in segments)
            held += self._room.fixed_bytes if segments else 0
        self._room.held_by_siblings = held


def _rows_of(records: np.ndarray, segments: list[Segment]) -> Rows:
    """The row of each record's slot, EMPTY where it has none."""
    highest = max((s.number for s in segments), default=0)
    base, slots = np.full(highest + 1, EMPTY, np.int64), np.zeros(highest + 1, np.int64)
    for segment in segments:
        base[segment.number], slots[segment.number] = segment.base, segment.slots
    numbers = np.minimum(records["segment"], highest)
    known = (records["segment"] <= highest) & (records["slot"] < slots[numbers])
    rows: Rows = np.where(known, base[numbers] + records["slot"], EMPTY)
    return rows


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, count, _CHUNK))
