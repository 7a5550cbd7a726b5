"""The page store on local disk: packed segments, an index in memory, verified reads. See README.md
and docs/design/store-format.md.

It gives the guarantee of base.py. A read is a hit only if the slot on disk says, under a checksum,
that it holds this page, of this identity, from the write that the index refers to.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.config import StoreConfig, full_path
from sgl_kvtier.errors import StoreError
from sgl_kvtier.outside import is_whole, refusal, shown
from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageWrite,
    PutOutcome,
    ReadJob,
    ReadOutcome,
    StoreStats,
    Urgency,
    checked_read,
)
from sgl_kvtier.store.disk import forks
from sgl_kvtier.store.disk.env import SHORT, Env
from sgl_kvtier.store.disk.format import MAX_PAYLOAD, POOL_BYTES, RECORD, SlotHead
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.disk.namespace import RankFolder, own_rank_folder, own_shared_folder
from sgl_kvtier.store.disk.segment import probe_direct_io
from sgl_kvtier.store.erasing import Eraser
from sgl_kvtier.store.index.columns import Columns, columns_of
from sgl_kvtier.store.index.core import Complaints, Core, advice
from sgl_kvtier.store.index.located import Located
from sgl_kvtier.store.index.room import Room
from sgl_kvtier.store.index.shares import Holding
from sgl_kvtier.store.index.slots import EMPTY, Rows, SlotTable, State, words
from sgl_kvtier.store.io.jobs import Ended, OrderedJob
from sgl_kvtier.store.io.native_threads import NATIVE, NativeIOThreads, ring_threads
from sgl_kvtier.store.io.threads import IOThreads, PythonIOThreads
from sgl_kvtier.store.io.transfer import Mover
from sgl_kvtier.store.recovery import load_table, snapshot
from sgl_kvtier.store.siblings.gone import ANY_TIME, Deletes, gone_records
from sgl_kvtier.store.siblings.sharing import Sharing
from sgl_kvtier.store.writes import Writer, find_pages, pool_names
from sgl_kvtier.tenants import check_digest, pool_of
from sgl_kvtier.types import Lookup, PageKey

logger = logging.getLogger(__name__)

RETAINED_SHARE = 0.5
"""Fraction of the store's bytes that retained pages may take."""


def open_store(
    config: StoreConfig,
    identity: Identity,
    rank: str,
    ranks: int = 1,
    *,
    alike: str = "",
    writes: bool = True,
    env: Env | None = None,
) -> DiskStore:
    """Opens the store of one rank below `config.path`, and creates it if it does not exist.

    `ranks` stores share `config.capacity_bytes`. With `alike` any number of processes share the
    pages of a rank: each owns one folder, named `rank` or matching this regular expression, and
    reads the folders of the others. Together they count as one of the `ranks`. A process that never
    puts passes `writes=False`.

    Raises StoreBusyError if another process owns this rank's folder, StoreFormatError if the folder
    was not made by a store, and StoreError if it cannot be used. Each message says what to do.
    """
    env = env or Env()
    if ranks < 1:
        raise StoreError(f"a store has at least one rank, not {ranks}")
    try:
        root = config.path and full_path(config.path)
    except ValueError as error:
        raise StoreError(f"store.path = {shown(config.path)}: {error}") from None
    if alike:
        folder = own_shared_folder(env, root, identity, rank, alike, writes=writes)
    else:
        folder = own_rank_folder(env, root, identity, rank)
    forks.owns(folder)
    try:
        store = DiskStore(env, config, identity, folder, ranks, alike)
        forks.owns(folder, store._leave_to_parent)
    except OSError as error:
        forks.release(env, folder)
        raise StoreError(
            f"cannot open the pages in {folder.path}: {error}. " + _what_to_do(error)
        ) from error
    except BaseException:
        forks.release(env, folder)
        raise
    if writes:
        try:
            store.check_room()
        except BaseException:
            store.close()
            raise
    return store


@dataclass(frozen=True, slots=True)
class _Open:
    """What `close` closes. It does not refer to the DiskStore, so that can be garbage-collected."""

    core: Core
    room: Room
    io_threads: IOThreads
    sharing: Sharing | None
    folder: RankFolder

    def close(self) -> None:
        core = self.core
        with core.lock:
            if core.closing:
                return
            core.closing = True
        if self.sharing is not None:
            self.sharing.close()
        self.io_threads.close()
        with core.lock:
            core.lock.wait_for(
                lambda: not (core.table.state == State.WRITING).any() and not core.table.pins.any()
            )
        # Waits for threads that still create or remove a segment: after the release the folder may
        # belong to another process.
        with self.room.changing:
            try:
                if core.log.lost or core.log.worth_rewriting(0):
                    core.log.rewrite(lambda: snapshot(core, self.room))
                with contextlib.suppress(OSError):
                    self.room.sync()
                with contextlib.suppress(OSError):
                    core.log.sync()
            finally:
                core.log.close()
                self.room.close()
                forks.release(core.env, self.folder)

    def close_dropped(self, owner: int) -> None:
        """Closes a garbage-collected store in a new thread: the garbage collector may run in any
        thread, with any lock held. Does nothing in a process forked from the process `owner`.
        """
        if os.getpid() != owner or self.core.closing:
            return
        logger.warning(
            "the page store in %s was dropped without close(), and is closed now. Call close(), "
            "or use it in a with block",
            self.folder.path,
        )
        threading.Thread(target=self.close, name="kvtier-close", daemon=True).start()


def _what_to_do(error: OSError) -> str:
    if error.errno in SHORT:
        return advice(error).capitalize()
    return "Check the disk, set store.direct_io to auto if it is on, or choose another store.path"


class DiskStore:
    """A `PageStore` in a folder that this process owns. Created by `open_store`.

    If it is dropped without `close`, the garbage collector closes it, with a warning. A process
    forked from the one that opened it sees a closed, empty store: every page is a miss and every
    put is refused. The child must not wait for a read begun before the fork, because its pages
    arrive in the parent's memory.
    """

    def __init__(
        self,
        env: Env,
        config: StoreConfig,
        identity: Identity,
        folder: RankFolder,
        ranks: int,
        alike: str,
    ) -> None:
        io = probe_direct_io(env, folder.path, config.direct_io)
        check_owner = functools.partial(folder.check, env)
        log = IndexLog(env, folder.path, identity.fingerprint, check_owner, durable=config.durable)
        self._folder = folder
        self._forked = False
        self._core = Core(
            env,
            config,
            identity.fingerprint,
            folder.path,
            io,
            log,
            Complaints(folder.path),
            check_owner,
        )
        self._room = Room(self._core, folder.namespace, ranks)
        try:
            older = load_table(self._core, self._room)
        except BaseException:
            log.close()
            self._room.close()
            raise
        self._io_threads = self._open_io_threads()
        self._eraser = Eraser(self._core, self._room)
        self._eraser.wipe(older)
        self._writer = Writer(self._core, self._room, self._io_threads, self._eraser)
        self._suspects: dict[int, int] = {}
        self._opened_at = env.now()
        self._sharing: Sharing | None = None
        if alike:
            remove = weakref.WeakMethod(self._remove)
            self._sharing = Sharing(
                self._core,
                self._room,
                folder,
                alike,
                lambda find: 0 if (method := remove()) is None else method(find),
                self._eraser.forget_aside,
            )
            self._sharing.open()
        self._open = _Open(self._core, self._room, self._io_threads, self._sharing, folder)
        self._dropped = weakref.finalize(self, self._open.close_dropped, os.getpid())
        # When the process exits, the kernel releases the folder's lock.
        self._dropped.atexit = False
        logger.info(
            "page store %s: %d pages, %s",
            folder.path,
            len(self._core.table),
            "O_DIRECT" if io.flags else "page cache",
        )

    @property
    def folder(self) -> str:
        """The folder of this rank's pages."""
        return self._core.folder

    @property
    def direct_io(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return bool(self._core.io.flags)

    @property
    def io(self) -> str:
        """How pages are read: `io_uring`, `threads` (compiled), or `python` (not compiled)."""
        if not isinstance(self._io_threads, NativeIOThreads):
            return "python"
        return "io_uring" if self._io_threads.rings else "threads"

    @property
    def index_bytes(self) -> int:
        """Bytes of memory that the index takes, over all slots."""
        return self._core.table.nbytes

    def check_room(self, page_bytes: int = 1) -> None:
        """Logs why no page of `page_bytes` could be written now. Raises StoreError if the reason
        lasts whatever files other programs remove, and the store has no page to read either.
        """
        if not is_whole(page_bytes, 1, MAX_PAYLOAD):
            raise ValueError(refusal("page_bytes", page_bytes, f"from 1 to {MAX_PAYLOAD}"))
        found = self._room.no_room(page_bytes)
        if found is None:
            return
        with self._core.lock:
            any_page = bool((self._core.table.state >= State.LIVE).any())
        if found.lasting and not any_page:
            raise StoreError(f"no page can be kept in {self._core.folder}: {found.why}")
        self._core.complaints.about_room(found.why, kept=bool(self._room.segments))

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        with self._core.lock:
            table = self._core.table
            rows = table.find(keys, pool)
            # A page that is looked up is about to be read, so it should not be evicted next.
            table.touch(rows[rows != EMPTY])
            states = np.where(
                rows == EMPTY, State.NONE, table.state[rows] if len(table.state) else State.NONE
            )
        return [_ANSWERS[state] for state in states.tolist()]

    def lengths(self, keys: Sequence[PageKey], pool: str = KV) -> list[int]:
        """Payload bytes of each page, 0 if it cannot be read now; from memory."""
        with self._core.lock:
            table = self._core.table
            rows = table.find(keys, pool)
            if not len(table.state):
                return [0] * len(rows)
            any_row = np.maximum(rows, 0)
            there = (rows != EMPTY) & (table.state[any_row] >= State.LIVE)
            return list(np.where(there, table.length[any_row], 0).tolist())

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        if not isinstance(owner, str):
            raise TypeError(
                f"whose pages are retained is said by a text, not {type(owner).__name__}"
            )
        if not isinstance(seconds, (int, float)):
            raise TypeError(f"a time is a number of seconds, not {type(seconds).__name__}")
        if seconds != seconds:
            raise ValueError("a time is a number of seconds, not NaN")
        words(keys)
        most = int(RETAINED_SHARE * self._room.allowance)
        with self._core.lock:
            return self._room.retention.retain(
                owner, keys, min(seconds, threading.TIMEOUT_MAX), most
            )

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> ReadJob:
        if self._forked:
            nothing = OrderedJob(len(pages), None, on_page)
            nothing.end_rest(ReadOutcome.MISS)
            return nothing
        priority, deadline_s = checked_read(priority, deadline_s, on_page)
        deadline = None if deadline_s is None else self._core.env.now() + deadline_s
        columns = columns_of(pages)
        names = pool_names(columns)
        with self._core.lock:
            located = self._locate(columns, names, used=priority != Urgency.LAST)
        try:
            return self._io_threads.read(
                columns, located, priority, deadline, on_page, self._settle
            )
        except BaseException as error:
            # Read-only or non-contiguous destinations, or out of memory: unpin the pages.
            self._unpin(located.rows[located.rows != EMPTY])
            if isinstance(error, BufferError):
                raise ValueError(
                    f"a page is read into contiguous memory that can be written: {error}"
                ) from None
            raise

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        # Before the write, because with `durable` no page counts as stored while the log misses
        # records.
        if not self._core.closing and self._core.log.worth_rewriting(len(self._core.table)):
            self._core.log.rewrite(self._snapshot)
        return self._writer.put(pages)

    def follow(self) -> None:
        """Finds what siblings have written so far, without waiting for the next poll. Does I/O."""
        if self._sharing is not None and not self._core.closing:
            self._sharing.follow()

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        named = list(keys)
        # Raises for an invalid pool or key before siblings are notified.
        self.lengths(named[:1], pool)
        words(named)
        if not named:
            return 0
        told = self._sharing is None or self._sharing.delete([*named], pool)

        def here() -> Rows:
            rows = self._core.table.find(named, pool)
            return self._without_younger(np.unique(rows[rows != EMPTY]))

        self._eraser.forget_aside(Deletes(gone_records([*named], pool, ANY_TIME)).hit)
        return self._remove(here, theirs_too=told)

    def delete_tenant(self, digest: str) -> int:
        """Drops all pages of a tenant, in all pools, as `delete` does. Raises TypeError or
        ValueError for an invalid digest.
        """
        check_digest(digest)
        table = self._core.table
        told = self._sharing is None or self._sharing.delete([], KV, digest)

        def here() -> Rows:
            tenant = table.known_tenant(digest)
            if tenant is None:
                return np.empty(0, np.int64)
            there = (table.state >= State.LIVE) | (table.state == State.WRITING)
            return self._without_younger(np.flatnonzero(there & (table.tenant == tenant)))

        self._eraser.forget_aside(Deletes(gone_records([], KV, ANY_TIME, digest)).hit)
        return self._remove(here, theirs_too=told)

    def tenants(self) -> list[Holding]:
        """What each tenant of `store.tenants` and all others hold; empty if none is named."""
        with self._core.lock:
            return self._room.holdings()

    def clear(self) -> int:
        table = self._core.table
        with self._core.lock:
            self._room.retention.clear()
        told = self._sharing is None or self._sharing.delete([], KV)
        self._eraser.forget_aside(Deletes(gone_records([], KV, ANY_TIME)).hit)
        removed = self._room.give_back_idle()

        def here() -> Rows:
            there = (table.state >= State.LIVE) | (table.state == State.WRITING)
            return self._without_younger(np.flatnonzero(there))

        return removed + self._remove(here, theirs_too=told)

    def sync(self) -> bool:
        """Makes every page stored so far survive a power loss. False if the device did not confirm
        it, or after `close`.
        """
        if self._core.closing:
            return False
        try:
            self._room.sync()
            self._core.log.sync()
        except OSError as error:
            self._core.complaints.about("syncing pages", error)
            return False
        return True

    def stats(self) -> StoreStats:
        with self._core.lock:
            counters = {
                name: getattr(self._core.counters, name) for name in self._core.counters.__slots__
            }
            pages, retained = len(self._core.table), len(self._room.retention.rows())
        counters["bytes_written_to_device"] += self._core.log.bytes_written
        return StoreStats(
            pages=pages,
            pages_retained=retained,
            bytes_on_disk=self._room.bytes_used + self._core.log.nbytes,
            capacity_bytes=self._room.allowance,
            read_busy_s=self._io_threads.busy_s,
            open_s=self._core.env.now() - self._opened_at,
            **counters,
        )

    def close(self) -> None:
        self._dropped.detach()
        self._open.close()

    def damage(self, key: PageKey, pool: str = KV, *, bit: int = 0) -> bool:
        """Flips one bit of a page's payload on disk, for fault injection. False if there is no such
        page of this store's own.
        """
        core = self._core
        with core.lock:
            rows = self._core.table.find([key], pool)
            if core.closing or rows[0] == EMPTY or core.table.state[rows[0]] != State.LIVE:
                return False
            head = self._head(int(rows[0]))
            core.table.pin(rows)
        try:
            self._mover().flip(self._room.segments[head.segment], head, bit % (8 * head.length))
        finally:
            self._unpin(rows)
        return True

    def _open_io_threads(self) -> IOThreads:
        core = self._core
        if core.config.native_io and core.env.native and NATIVE:
            rings = ring_threads(core.config.io, self.direct_io, core.config.io_threads)
            return NativeIOThreads(
                core.config.io_threads,
                core.config.verify_reads,
                core.io.alignment,
                rings,
                core.env.native_module,
            )
        # Not a bound method: it would keep a store alive that nobody closed.
        mover = functools.partial(Mover, core.env, core.io, core.config.verify_reads)
        return PythonIOThreads(core.env, mover, core.config.io_threads)

    def _leave_to_parent(self) -> None:
        """In a forked child: forgets the pages and closes the files. Takes no lock, because the
        thread that holds it does not exist in the child.
        """
        core = self._core
        self._forked = True
        core.lock = threading.Condition()
        core.closing = True
        core.table = SlotTable()
        core.log.leave_to_parent()
        if self._sharing is not None:
            self._sharing.leave_to_parent()
        self._room.leave_to_parent()

    def _mover(self) -> Mover:
        return Mover(self._core.env, self._core.io, self._core.config.verify_reads)

    def _locate(self, asked: Columns, names: NDArray[np.bytes_], used: bool) -> Located:
        """Locked. Finds pages of the given lengths and pins their rows until `_settle`. With `used`
        it marks them as most recently used.
        """
        table = self._core.table
        if not len(table.state):
            return Located.nothing(self._core.identity, len(asked.lengths))
        rows = find_pages(self._core, asked)
        # Row 0 is a placeholder for pages that are not there, so that all columns have one entry
        # per page. Those entries are never read.
        any_row = np.maximum(rows, 0)
        lengths = table.length[any_row]
        hit = (rows != EMPTY) & (table.state[any_row] >= State.LIVE) & (lengths == asked.lengths)
        rows[~hit] = EMPTY
        found = rows[hit]
        if len(table.tenants) > 1 and table.tenant[any_row].any():
            names = table.names_of(any_row)
        segment = table.segment[any_row]
        located = Located(
            self._core.identity, rows, table.keys[any_row], names, table.sequence[any_row], lengths,
            *self._room.slots_of(any_row, segment, hit),
        )  # fmt: skip
        if used:
            table.touch(found)
        # Pinned last: an exception before this leaves nothing to unpin.
        table.pin(found)
        return located

    def _head(self, row: int) -> SlotHead:
        """Locked. The header that the slot of this row must have."""
        table = self._core.table
        segment = self._room.segments[int(table.segment[row])]
        pool = pool_of(table.pools[table.pool[row]], table.tenants[table.tenant[row]])
        return SlotHead(
            self._core.identity,
            table.key_of(row),
            pool,
            int(table.sequence[row]),
            int(table.length[row]),
            segment.number,
            row - segment.base,
        )

    def _settle(self, located: Located, ended: Ended) -> Ended:
        """Called for pages that ended: drops damaged ones, unpins their rows, updates counters."""
        core = self._core
        # Counted rather than put in a set, because an enum's hash runs Python code.
        if ended and [outcome for _, outcome in ended].count(ReadOutcome.OK) == len(ended):
            whole = len(ended) == len(located.rows)
            which = slice(None) if whole else np.array([i for i, _ in ended], np.int64)
            self._settle_good(located.rows[which], located.lengths[which])
            return ended
        good = np.array([i for i, outcome in ended if outcome is ReadOutcome.OK], np.int64)
        corrupt = (
            {i for i, outcome in ended if outcome is ReadOutcome.CORRUPT}
            if len(good) < len(ended)
            else set()
        )
        failed = (
            [i for i, outcome in ended if outcome is ReadOutcome.FAILED]
            if len(good) < len(ended)
            else []
        )
        indexes = good if len(good) == len(ended) else np.array([i for i, _ in ended], np.int64)
        rows = located.rows[indexes]
        try:
            if corrupt or failed:
                deleted = corrupt - self._drop_bad(located, sorted(corrupt), failed)
                # The page was deleted while it was being read, not damaged.
                ended = [(i, ReadOutcome.MISS if i in deleted else outcome) for i, outcome in ended]
        finally:
            self._unpin(rows[rows != EMPTY])
        with core.lock:
            core.counters.pages_read += len(good)
            core.counters.bytes_read += int(located.lengths[good].sum())
            for _, outcome in ended if len(good) < len(ended) else ():
                if outcome is not ReadOutcome.OK:
                    name = _COUNTED[outcome]
                    setattr(core.counters, name, getattr(core.counters, name) + 1)
        return ended

    def _settle_good(self, rows: Rows, lengths: NDArray[np.uint32]) -> None:
        core = self._core
        nbytes = int(lengths.sum())
        with core.lock:
            self._room.release(core.table.unpin(rows))
            if core.closing:
                core.lock.notify_all()
            core.counters.pages_read += len(rows)
            core.counters.bytes_read += nbytes

    def _drop_bad(self, located: Located, corrupt: list[int], failed: list[int]) -> set[int]:
        """Drops pages that are damaged or whose read failed twice. Returns the indexes of the
        dropped ones. Their rows stay pinned.
        """
        core = self._core
        dropped: dict[int, int] = {}
        with core.lock:
            for i in corrupt + failed:
                row, sequence = int(located.rows[i]), int(located.sequences[i])
                if core.table.state[row] == State.THEIRS:
                    # The sibling has reused the slot: no page of this store is damaged.
                    core.table.drop(located.rows[i : i + 1])
                    continue
                if (
                    row in dropped
                    or core.table.state[row] != State.LIVE
                    or core.table.sequence[row] != sequence
                ):
                    continue
                if i not in corrupt and self._suspects.pop(row, None) != sequence:
                    # A single failed read may be temporary; a second one drops the page.
                    self._suspects[row] = sequence
                    continue
                dropped[row] = i
            gone = self._eraser.forget(np.array(list(dropped), np.int64))
        self._eraser.erase(gone)
        return set(dropped.values())

    def _remove(self, find: Callable[[], Rows], *, theirs_too: bool = True) -> int:
        """Deletes the pages whose rows `find` returns, and waits until no slot holds a page deleted
        or evicted before. Does nothing while closing. `find` is called with the lock held. Returns
        how many pages there were; those in siblings' folders count only with `theirs_too`.
        """
        core = self._core
        removed = 0
        # Pages that are being written in the first round are found in the second.
        for _ in range(2):
            with core.lock:
                if core.closing:
                    return removed
                unsaid = self._eraser.unsaid()
                rows = find()
                live = rows[core.table.state[rows] == State.LIVE]
                theirs = rows[core.table.state[rows] == State.THEIRS]
                core.table.drop(theirs)
                gone = self._eraser.forget(live)
            self._eraser.erase(gone)
            removed += len(live) + (len(theirs) if theirs_too else 0)
            self._eraser.settle(unsaid)
            if len(live) + len(theirs) == len(rows):
                break
        if core.config.durable and self.sync():
            try:
                self._room.sync_names()
            except OSError as error:
                core.complaints.about("syncing the folder", error)
        return removed

    def _without_younger(self, rows: Rows) -> Rows:
        """Locked. The rows without siblings' pages that are younger than the delete: other owners
        still find those.
        """
        theirs = self._core.table.state[rows] == State.THEIRS
        if self._sharing is None or not theirs.any():
            return rows
        older: Rows = rows[~theirs | np.isin(rows, self._sharing.deleted_rows())]
        return older

    def _unpin(self, rows: Rows) -> None:
        with self._core.lock:
            self._room.release(self._core.table.unpin(rows))
            self._core.lock.notify_all()

    def _snapshot(self) -> np.ndarray:
        return snapshot(self._core, self._room)


_ANSWERS = {
    State.NONE: Lookup.MISS,
    State.LIVE: Lookup.HIT,
    State.THEIRS: Lookup.HIT,
    State.WRITING: Lookup.PENDING,
}
_COUNTED = {
    ReadOutcome.MISS: "pages_missed",
    ReadOutcome.CORRUPT: "pages_corrupt",
    ReadOutcome.FAILED: "reads_failed",
    ReadOutcome.LATE: "reads_late",
    ReadOutcome.CANCELLED: "reads_cancelled",
}


assert RECORD["pool"].itemsize == POOL_BYTES
