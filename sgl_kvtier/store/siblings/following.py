"""Finds and reads pages in the folders of other owners (siblings) in addition to this store's own.

Their slots are rows of the same table, in the state THEIRS: they are looked up, pinned, read and
verified like all pages. Nothing in those folders is written. An entry that is outdated is a miss.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.disk.env import SHORT
from sgl_kvtier.store.disk.format import PUT, key_words
from sgl_kvtier.store.disk.index_log import INDEX_BYTES_PER_SLOT
from sgl_kvtier.store.disk.namespace import GONE_LIST, PATIENT, RankFolder, is_left_over, list_alike
from sgl_kvtier.store.disk.segment import NUMBER_MASK, NotASegmentError, Segment
from sgl_kvtier.store.index.core import Core
from sgl_kvtier.store.index.room import Room
from sgl_kvtier.store.index.slots import EMPTY, Rows, State
from sgl_kvtier.store.recovery import latest, newest_sequence, places, pool_codes
from sgl_kvtier.store.siblings.folder import NOTHING, SiblingFolder
from sgl_kvtier.store.siblings.gone import Deletes, gone_records, read_gone, write_gone
from sgl_kvtier.tenants import NOBODY

_CHUNK = 256
"""Rows changed at a time, so that the core's lock is held for microseconds."""
_RECENT_NS = 1_000_000_000
_MOST_NUMBER = 2047
_MOST_FOLDERS = 1024
_PAUSE_S = 0.02
_AGAIN_S = 1.0
"""Seconds until a list of deletes is written, or many pages are entered, again after a failure."""
_FEW = 4096
"""Up to this many waiting pages are tried again at every poll."""
_LONG = 256
"""Entries of the own list of deletes from which on it is pruned whenever it has doubled."""


class Following:
    """The folders of a store's siblings. Any thread.

    Its lock is taken after `Room.changing` and before the core's.
    """

    def __init__(self, core: Core, room: Room, own: RankFolder, alike: str) -> None:
        """`alike`: a regular expression for the folders with these pages (`list_alike`)."""
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
        self._own_read = False
        self._unwritten = False
        """Whether the own list of deletes in memory is not on disk yet."""
        self._write_again_at = 0.0
        self._listed = False
        self._incomplete = False
        """Whether the last poll missed something for lack of descriptors or memory."""
        self._deletes = Deletes(NOTHING)
        self._long = _LONG
        self.told = 0
        """Counts changes of lists of deletes that this process did not make."""
        self.folders: dict[str, SiblingFolder] = {}

    def open(self) -> None:
        """Finds the siblings' pages, and prunes the own list of deletes. Called before any other
        thread runs. Never raises OSError.
        """
        core = self._core
        try:
            for name in filter(is_left_over, core.env.list(self._own.path)):
                core.env.unlink(os.path.join(self._own.path, name))
        except OSError as error:
            core.complaints.about("removing what an earlier server left", error)
        with self._lock:
            self._prune_own_list()
            if self._unwritten:
                self._write_own_list()
            for _ in range(PATIENT):
                if not self._incomplete:
                    break
                # Until then, pages that a sibling has deleted may be found.
                core.env.pause(_PAUSE_S)
                self._look(None)

    def look(self) -> None:
        """Updates the table from the siblings' folders. Never raises OSError."""
        with self._lock:
            if not self._closed:
                self._look(None)

    def deleted(self, pages: np.ndarray) -> NDArray[np.bool_]:
        """For each page record, whether a sibling or this process deleted the page."""
        return self._deletes.hit(pages)

    def deleted_rows(self) -> Rows:
        """With the core's lock held. The rows of pages that a list of deletes names."""
        table, deletes = self._core.table, self._deletes
        found = [np.empty(0, np.int64)]
        if deletes.all_until:
            there = (table.state >= State.LIVE) | (table.state == State.WRITING)
            found.append(np.flatnonzero(there & (table.sequence <= deletes.all_until)))
        for digest, until in deletes.tenants.items():
            tenant = table.known_tenant(digest)
            if tenant is not None:
                there = (table.state >= State.LIVE) | (table.state == State.WRITING)
                mine = there & (table.tenant == tenant) & (table.sequence <= until)
                found.append(np.flatnonzero(mine))
        pools = pool_codes(deletes.named)
        for code, pool in enumerate(pools.names):
            entries = deletes.named[pools.codes == code]
            rows = table.find_words(key_words(entries), pool)
            # Filtered first, because a table without rows has no row 0 that EMPTY could be mapped
            # to.
            until, rows = entries["sequence"][rows != EMPTY], rows[rows != EMPTY]
            found.append(rows[table.sequence[rows] <= until])
        return np.unique(np.concatenate(found))

    def delete(self, keys: list[bytes], pool: str, tenant: str = NOBODY) -> bool:
        """Deletes pages in siblings' folders, for this process, the siblings and later opens: those
        of `keys`; without keys all pages, or all of a `tenant`. The caller deletes the store's own.
        Returns False if siblings could not be notified yet; that is retried until it works. Never
        raises OSError.
        """
        self.look()
        core = self._core
        with self._lock:
            if self._closed:
                return False
            if not self.folders and self._listed and self._own_read:
                return True
            with core.lock:
                core.sequence = max(core.env.wall_ns(), core.sequence)
                until = core.sequence
            new = gone_records(keys, pool, until, tenant)
            # A clear replaces all earlier entries, but not those of a list that was not read yet.
            everything = not keys and tenant == NOBODY
            self._own_list = new if everything else np.concatenate([self._own_list, new])
            self._merge_deletes()
            if len(self._own_list) > self._long:
                self._prune_own_list()
                self._long = max(_LONG, 2 * len(self._own_list))
            self._unwritten = True
            self._write_own_list()
            return not self._unwritten

    def close(self) -> None:
        """Ends the polling. Segments that have rows are closed by `Room.close`."""
        with self._lock:
            if self._unwritten and not self._closed:
                self._write_own_list()
            self._closed = True
            for folder in self.folders.values():
                folder.close()
                for segment in folder.segments.values():
                    if segment.base < 0:
                        self._core.env.close(segment.fd)

    def leave_to_parent(self) -> None:
        """`close` in a forked child, where the thread that holds the lock may not exist."""
        self._lock = threading.Lock()
        self._unwritten = False
        self.close()

    # All methods below need `_lock`.

    def _look(self, seen: dict[str, np.ndarray] | None) -> None:
        """Polls all folders. If a log is read from its start, its page records, including deleted
        pages, are put into `seen` under its folder.
        """
        core = self._core
        self._listed = self._incomplete = False
        if not self._read_own_list():
            # Pages deleted by an earlier process would be found again.
            return
        try:
            self._list()
            self._listed = True
        except OSError as error:
            self._failed("looking for other servers' folders", error)
        for folder in list(self.folders.values()):
            try:
                self._follow(folder, seen)
                if folder.unread is not None and not isinstance(folder.unread, NotASegmentError):
                    core.complaints.about("opening another server's segments", folder.unread)
            except FileNotFoundError:
                self._drop_folder(folder)
                # Another folder may have replaced it.
                self._listed = False
            except OSError as error:
                self._failed("following another server's pages", error)
            except Exception as error:
                # A bug: its log is read from the start at the next poll, and the other folders are
                # followed meanwhile.
                folder.begin_anew()
                core.failed_once("following another server's pages", error)
        self._close_removed()
        self._count()
        if self._unwritten and core.env.now() >= self._write_again_at:
            self._write_own_list()

    def _read_own_list(self) -> bool:
        if self._own_read:
            return True
        core = self._core
        try:
            path = os.path.join(self._own.path, GONE_LIST)
            found = read_gone(core.env, path, core.identity)
        except OSError as error:
            self._failed("reading the list of deletes", error)
            return False
        self._own_list = np.concatenate([found, self._own_list])
        self._own_read = True
        self._merge_deletes()
        # The process that wrote it may have been killed before it erased its own pages.
        self.told += len(found) > 0
        return True

    def _failed(self, doing: str, error: OSError) -> None:
        self._incomplete = self._incomplete or error.errno in SHORT
        self._core.complaints.about(doing, error)

    def _write_own_list(self) -> None:
        """Writes the own list of deletes to disk. Never raises OSError."""
        core = self._core
        if not self._own_read:
            return
        self._write_again_at = core.env.now() + _AGAIN_S
        try:
            core.check_owner()
            path = os.path.join(self._own.path, GONE_LIST)
            write_gone(core.env, path, core.identity, self._own_list)
            if core.config.durable:
                self._sync_names()
            self._unwritten = False
        except OSError as error:
            core.complaints.about("telling other servers what was deleted", error)

    def _prune_own_list(self) -> None:
        """Reads all logs from the start, and removes own deletes that match no page any more."""
        seen: dict[str, np.ndarray] = {}
        for folder in self.folders.values():
            folder.begin_anew()
        self._look(seen)
        if (
            self._own_read
            and self._listed
            and all(f.empty or (f.whole and f.path in seen) for f in self.folders.values())
        ):
            before = len(self._own_list)
            named = np.concatenate([self._own_deleted(), *seen.values()])
            self._own_list = Deletes(self._own_list).needed_for(named)
            if len(self._own_list) < before:
                self._unwritten = True
                self._merge_deletes()

    def _own_deleted(self) -> np.ndarray:
        """Records of the own pages that a list names and that are not erased yet."""
        table = self._core.table
        with self._core.lock:
            rows = self.deleted_rows()
            own = (table.state[rows] == State.LIVE) | (table.state[rows] == State.WRITING)
            return np.concatenate([self._room.aside, self._room.records(rows[own], PUT)])

    def _sync_names(self) -> None:
        env = self._core.env
        fd = env.open(self._own.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            env.sync(fd)
        finally:
            env.close(fd)

    def _list(self) -> None:
        """Finds new and removed folders. On OSError the folders known before are polled."""
        core, env, namespace = self._core, self._core.env, self._own.namespace
        changed = env.modified_ns(namespace)
        if changed == self._listed_ns:
            return
        self._listed_ns = -1
        paths = [p for p in list_alike(env, namespace, self._alike) if p != self._own.path]
        for path in self.folders.keys() - set(paths):
            self._drop_folder(self.folders[path])
        for path in paths:
            if path not in self.folders and len(self.folders) < _MOST_FOLDERS:
                number = self._new_number()
                self.folders[path] = SiblingFolder(env, path, core.identity, core.io, number)
        if env.wall_ns() - changed >= _RECENT_NS:
            self._listed_ns = changed

    def _new_number(self) -> int:
        used = {folder.number for folder in self.folders.values()}
        used |= {segment.number // (NUMBER_MASK + 1) for segment in self._leaving}
        while True:
            self._last_number = self._last_number % _MOST_NUMBER + 1
            if self._last_number not in used:
                return self._last_number

    def _follow(self, folder: SiblingFolder, seen: dict[str, np.ndarray] | None) -> None:
        gone = b"" if folder.gone is None else folder.gone.tobytes()
        self._forget(folder.look())
        anew, records = folder.news()
        if len(records):
            try:
                # Opens new segments again: each is created before the first record about it.
                self._forget(folder.look())
            except OSError:
                folder.close()
                raise
        if folder.gone is not None and folder.gone.tobytes() != gone:
            self._merge_deletes()
            self.told += 1
        self._add_rows(folder)
        waiting = NOTHING
        if not anew and len(folder.waiting):
            waiting = folder.waiting[~np.isin(places(folder.waiting), places(records))]
            if self._may_enter(folder):
                records, waiting = np.concatenate([waiting, records]), NOTHING
        folder.waiting = waiting
        if anew or len(records):
            self._apply(folder, anew, records, seen)

    def _may_enter(self, folder: SiblingFolder) -> bool:
        """Whether waiting pages may find a free row and key now. Many are tried less often."""
        losses, now = self._core.table.losses, self._core.env.now()
        if losses == folder.tried or (len(folder.waiting) > _FEW and now < folder.again_at):
            return False
        folder.tried, folder.again_at = losses, now + _AGAIN_S
        return True

    def _apply(
        self,
        folder: SiblingFolder,
        anew: bool,
        records: np.ndarray,
        seen: dict[str, np.ndarray] | None,
    ) -> None:
        newest = newest_sequence(self._core.env)
        named = None if anew else set(records["segment"].tolist())
        segments = folder.as_numbered_there(named)
        live = latest(records, segments, newest)
        known = records["sequence"][records["sequence"] <= newest]
        if len(known):
            self._raise_sequence(int(known.max()))
        if seen is not None and anew:
            # Including segments that could not be opened: a later process may open them.
            seen[folder.path] = folder.named_by(records)
        deleted = self._deletes.hit(live)
        if deleted.any():
            live = live[~deleted]
        if not self._core.config.verify_reads:
            # Unlike an own slot, a sibling's may be rewritten while it is read, so reads must be
            # verified.
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
        waiting = self._enter(live, _rows_of(live, segments))
        folder.waiting = np.concatenate([folder.waiting, waiting])

    def _drop_stale(self, touched: Rows, rows: Rows, live: np.ndarray) -> None:
        """Drops the pages of touched rows that the log no longer names."""
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
        """Enters pages whose keys have no row yet. Returns those that have to wait: until another
        copy is dropped, or until their row, which is being read, becomes free.
        """
        table, waiting = self._core.table, [NOTHING]
        pools = pool_codes(live)
        for code, pool in enumerate(pools.names):
            mine = np.flatnonzero(pools.codes == code)
            keys = key_words(live[mine])
            for part in _chunks(len(mine)):
                some, where = live[mine[part]], rows[mine[part]]
                with self._core.lock:
                    if self._core.closing:
                        return NOTHING
                    state = table.state[where]
                    here = table.find_words(keys[part], pool)
                    absent = here == EMPTY
                    new = absent & (state == State.FREE)
                    if new.any():
                        ids = np.full(int(new.sum()), table.pool_id(pool))
                        whose = pools.tenants[mine[part]][new].tolist()
                        table.enter(
                            where[new], keys[part][new], ids, some["length"][new],
                            some["sequence"][new], theirs=True,
                            tenants=table.tenant_ids([pools.digests[i] for i in whose]),
                        )  # fmt: skip
                wait = np.where(absent, state == State.DOOMED, here != where)
                if wait.any():
                    waiting.append(some[wait])
        return np.concatenate(waiting)

    def _add_rows(self, folder: SiblingFolder) -> None:
        table, new = self._core.table, [s for s in folder.segments.values() if s.base < 0]
        if new:
            with self._core.lock:
                table.reserve(sum(segment.slots for segment in new))
        for segment in new:
            if segment.number in self._room.theirs:
                # An earlier file of this name is still being read: read the log again afterwards.
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

    def _close_removed(self) -> None:
        """Closes removed segments that no read uses any more."""
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

    def _drop_folder(self, folder: SiblingFolder) -> None:
        self._forget(list(folder.segments.values()))
        folder.close()
        del self.folders[folder.path]
        self._listed_ns = -1

    def _merge_deletes(self) -> None:
        """Merges all lists of deletes. Pages written from now on get larger sequence numbers."""
        core = self._core
        lists = [folder.gone for folder in self.folders.values() if folder.gone is not None]
        self._deletes = Deletes(np.concatenate([self._own_list, *lists]))
        self._raise_sequence(self._deletes.until(newest_sequence(core.env)))

    def _raise_sequence(self, sequence: int) -> None:
        """Raises the own sequence number to the largest of all folders, whatever the clock says."""
        with self._core.lock:
            self._core.sequence = max(self._core.sequence, sequence)

    def _count(self) -> None:
        held = 0
        for folder in self.folders.values():
            segments = folder.segments.values()
            held += sum(s.nbytes + INDEX_BYTES_PER_SLOT * s.slots for s in segments)
            held += self._room.fixed_bytes if segments else 0
        self._room.held_by_siblings = held


def _rows_of(records: np.ndarray, segments: list[Segment]) -> Rows:
    """The row of each record's slot, EMPTY if it has none."""
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
