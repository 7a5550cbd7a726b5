"""The write path: which pages are new, where they go, and writing neighbours together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.outside import shown
from sgl_kvtier.store.base import PageWrite, PutOutcome
from sgl_kvtier.store.disk.format import BLOCK, DROP, MAX_PAYLOAD, POOL_BYTES, PUT, slot_bytes
from sgl_kvtier.store.disk.index_log import Frame
from sgl_kvtier.store.erasing import Eraser
from sgl_kvtier.store.index.admission import admission_of
from sgl_kvtier.store.index.columns import Columns, columns_of
from sgl_kvtier.store.index.core import Core
from sgl_kvtier.store.index.located import Located
from sgl_kvtier.store.index.room import Room
from sgl_kvtier.store.index.slots import EMPTY, Rows, State
from sgl_kvtier.store.io.threads import IOThreads
from sgl_kvtier.tenants import NOBODY, parted

_ROUNDS = 2
"""Making space can evict a stored page of the same batch, which gets a second chance."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The batch of one put: the pages as given, and as columns."""

    pages: Sequence[PageWrite]
    columns: Columns
    digests: list[str]
    whose: NDArray[np.int64]
    """For each page, the index of its tenant in `digests`."""
    names: NDArray[np.bytes_]
    outcomes: list[PutOutcome]
    allocated: list[Rows]
    """Slots allocated for pages of the batch that are not written yet. Every path releases them."""

    @property
    def slot_bytes(self) -> NDArray[np.int64]:
        """The slot size that each page needs."""
        return BLOCK + -(-self.columns.lengths // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class _New:
    """Pages of a batch that have a slot allocated."""

    indexes: Rows
    located: Located

    @property
    def in_order(self) -> bool:
        """Whether these are the batch's first pages, in its order."""
        return bool((self.indexes == np.arange(len(self.indexes))).all())


class Writer:
    """The write path of one open store. Any number of threads."""

    def __init__(self, core: Core, room: Room, io_threads: IOThreads, eraser: Eraser) -> None:
        self._core = core
        self._room = room
        self._io_threads = io_threads
        self._eraser = eraser
        self._admission = admission_of(core.config)

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """Writes pages that are not stored yet and that the admission filter admits; REFUSED if
        that fails. Never raises OSError.
        """
        columns = columns_of(pages)
        names = pool_names(columns)
        refused = [PutOutcome.REFUSED] * len(pages)
        batch = _Batch(pages, *_split_tenants(columns), names, refused, [])
        try:
            self._put(batch)
        except BaseException:
            self._free_allocated(batch)
            raise
        self._count_refused(batch.outcomes)
        return batch.outcomes

    def _put(self, batch: _Batch) -> None:
        core, columns = self._core, batch.columns
        # Siblings would neither find a page that the log does not name, nor delete it.
        only_kept = core.stamps and core.log.lost
        alike = None if only_kept else self._allocate_alike(batch)
        if alike is not None:
            self._write_all(alike, batch)
            return
        fitting = np.flatnonzero((columns.lengths > 0) & (columns.lengths <= MAX_PAYLOAD))
        if only_kept:
            with core.lock:
                fitting = fitting[find_pages(core, columns, fitting) != EMPTY]
        fitting = self._admitted(batch, fitting)
        allocated: list[_New] = []
        others: list[tuple[int, int, int]] = []
        for _ in range(_ROUNDS):
            with self._core.lock:
                here = find_pages(self._core, columns, fitting)
                # Marked as used, so that pages of this batch are not evicted first.
                self._core.table.touch(here[here != EMPTY])
                absent = fitting[here == EMPTY]
            sizes, counts = np.unique(batch.slot_bytes[absent], return_counts=True)
            for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
                self._room.make(size, count)
            with self._core.lock:
                new, waiting, fitting = self._enter(batch, fitting)
            allocated += new
            others += waiting
            if not len(fitting):
                break
        if allocated:
            self._write_all(_upwards(allocated), batch)
        self._await_others(others, batch.outcomes)

    def _allocate_alike(self, batch: _Batch) -> _New | None:
        """Fast path: allocates slots for all pages at once if they are new, of one size, pool and
        tenant, and the slots are free. None otherwise, with nothing allocated.
        """
        lengths = batch.columns.lengths
        length = int(lengths[0]) if len(lengths) else 0
        alike = (
            0 < length <= MAX_PAYLOAD
            and bool((lengths == length).all())
            and len({page[0] for page in batch.pages}) == len(lengths)
            and len(batch.digests) == 1
        )
        if not alike or batch.columns.pool is None or self._admission is not None:
            return None
        size = slot_bytes(length)
        with self._core.lock:
            if self._core.closing or not self._room.has_free(size, len(lengths)):
                return None
            if (find_pages(self._core, batch.columns) != EMPTY).any():
                return None
            return self._allocate_slots(batch, np.arange(len(lengths)), size, batch.digests[0])

    def _admitted(self, batch: _Batch, indexes: Rows) -> Rows:
        """The pages that are stored already or admitted. Others become NOT_ADMITTED."""
        if self._admission is None:
            return indexes
        pools = batch.columns.pools
        with self._core.lock:
            absent = find_pages(self._core, batch.columns, indexes) == EMPTY
            admitted = self._admission.admit(
                (batch.pages[i].key, pools[i]) for i in indexes[absent].tolist()
            )
            self._core.counters.pages_not_admitted += admitted.count(False)
        worth = np.ones(len(indexes), bool)
        worth[absent] = admitted
        for i in indexes[~worth].tolist():
            batch.outcomes[i] = PutOutcome.NOT_ADMITTED
        admitted_indexes: Rows = indexes[worth]
        return admitted_indexes

    def _enter(
        self, batch: _Batch, indexes: Rows
    ) -> tuple[list[_New], list[tuple[int, int, int]], Rows]:
        """Locked. Allocates slots for new pages.

        Returns these, (index, row, sequence) of pages that another put is writing, and the pages
        for which there was no slot.
        """
        table = self._core.table
        found = find_pages(self._core, batch.columns)
        here, there = found[indexes], found[found != EMPTY]
        missing = indexes[here == EMPTY].tolist()
        # If a page is in the batch twice, only the first is written. The loop runs backwards, so
        # that the first stays.
        name = {i: (batch.pages[i].key, batch.columns.pools[i]) for i in missing}
        first = {name[i]: i for i in reversed(missing)}
        fresh = missing if len(first) == len(missing) else sorted(first.values())
        # Pinned, so that no page of the batch is evicted for another: its outcome would be wrong.
        table.pin(there)
        try:
            new = self._allocate(batch, np.array(fresh, np.int64))
        finally:
            table.unpin(there)
        if len(fresh) == len(indexes) == sum(len(n.indexes) for n in new):
            return new, [], indexes[:0]
        row_of = dict(zip(indexes.tolist(), here.tolist(), strict=True))
        row_of.update(
            (i, row)
            for n in new
            for i, row in zip(n.indexes.tolist(), n.located.rows.tolist(), strict=True)
        )
        row_of.update((i, row_of[first[name[i]]]) for i in missing)
        written = {i for n in new for i in n.indexes.tolist()}
        others, kept = [], 0
        for i in indexes.tolist():
            row = row_of[i]
            if i in written or row == EMPTY:
                continue
            if table.state[row] >= State.LIVE:
                batch.outcomes[i] = PutOutcome.KEPT
                kept += 1
            else:
                others.append((i, row, int(table.sequence[row])))
        self._core.counters.pages_kept += kept
        return new, others, np.array([i for i in indexes.tolist() if row_of[i] == EMPTY], np.int64)

    def _allocate(self, batch: _Batch, indexes: Rows) -> list[_New]:
        """Locked. Allocates a slot for each page, in the given order, until there are no more."""
        core = self._core
        if core.closing:
            return []
        new: list[_New] = []
        needed, whose = batch.slot_bytes[indexes], batch.whose[indexes]
        for size, code in dict.fromkeys(zip(needed.tolist(), whose.tolist(), strict=True)):
            mine = indexes[(needed == size) & (whose == code)]
            some = self._allocate_slots(batch, mine, size, batch.digests[code])
            if len(some.indexes):
                new.append(some)
        return new

    def _allocate_slots(self, batch: _Batch, indexes: Rows, size: int, digest: str) -> _New:
        """Locked. Allocates slots of one size for as many of these pages of a tenant as it can."""
        core, columns = self._core, batch.columns
        tenant = core.table.tenant_id(digest)
        rows = self._room.take(size, len(indexes), tenant)
        batch.allocated.append(rows)
        whole = len(rows) == len(columns.lengths)
        mine = indexes[: len(rows)]
        keys, lengths, names = columns.keys, columns.lengths, batch.names
        if not whole:
            keys, lengths, names = keys[mine], lengths[mine], names[mine]
        first = core.next_sequence(len(mine))
        sequences = np.arange(first, first + len(mine), dtype=np.uint64)
        if columns.pool is not None:
            pools = np.full(len(mine), core.table.pool_id(columns.pool))
        else:
            pools = np.array(
                [core.table.pool_id(columns.pools[i]) for i in mine.tolist()], np.int64
            )
        core.table.enter(rows, keys, pools, lengths, sequences, tenants=tenant)
        where = self._room.slots_of(rows, core.table.segment[rows], np.ones(len(rows), bool))
        return _New(
            mine,
            Located(core.identity, rows, keys, names, sequences, lengths.astype(np.uint32), *where),
        )

    def _write_all(self, new: _New, batch: _Batch) -> None:
        frames: list[Frame] = []
        # The log's frame is packed while the device is busy. It is used only if all pages were
        # written.
        written = self._write(new, batch, lambda: frames.append(Frame(new.located.records(PUT))))
        self._publish(new, self._log_written(new, written, frames), batch)

    def _free_allocated(self, batch: _Batch) -> None:
        """Erases and frees allocated slots. Neither their new nor their old pages are found."""
        core = self._core
        rows = np.concatenate([np.empty(0, np.int64), *batch.allocated])
        try:
            with core.lock:
                records = self._room.records(rows, DROP)
            self._eraser.wipe(records)
        finally:
            with core.lock:
                batch.allocated.clear()
                core.table.drop(rows[core.table.state[rows] == State.WRITING])
                self._room.release(rows)
                core.lock.notify_all()

    def _write(self, new: _New, batch: _Batch, meanwhile: Callable[[], None]) -> Rows:
        """Writes pages; returns the indexes of those that are on disk."""
        core, columns = self._core, batch.columns
        started = core.env.now()
        parts, buffers = columns.parts, columns.buffers
        if len(new.indexes) < len(parts) or not new.in_order:
            parts, buffers = parts[new.indexes], columns.buffers_of(new.indexes)
        failed = lambda error: core.complaints.about("writing pages", error)  # noqa: E731
        written = self._io_threads.write(new.located, parts, buffers, failed, meanwhile)
        for segment in new.located.segments.values():
            # Not earlier: a sync that began during the write may not cover these pages.
            segment.dirty = True
        if core.config.durable and len(written):
            try:
                self._room.sync()
            except OSError as error:
                # It is unknown which pages reached the device, so none counts as stored.
                core.complaints.about("syncing pages", error)
                written = written[:0]
        with core.lock:
            core.counters.write_busy_s += core.env.now() - started
        return written

    def _log_written(self, new: _New, written: Rows, frames: list[Frame]) -> Rows:
        """Appends the written pages to the log; returns those that count as stored."""
        core = self._core
        if not len(written):
            return written
        every = len(written) == len(new.indexes)
        # Before they can be read, and so evicted: the log must have a slot's records in the order
        # of its pages.
        named = core.log.append_frame(
            frames[0] if every and frames else Frame(new.located.at(written).records(PUT))
        )
        if core.stamps and not named:
            return written[:0]
        if core.config.durable:
            try:
                core.log.sync()
            except OSError as error:
                # As for the pages themselves, it is unknown which of them would be found again.
                core.complaints.about("syncing the index", error)
                return written[:0]
        return written

    def _publish(self, new: _New, written: Rows, batch: _Batch) -> None:
        core = self._core
        whole = len(written) == len(new.indexes)
        good = new.located if whole else new.located.at(written)
        indexes = new.indexes if whole else new.indexes[written]
        nbytes, padded_bytes = (
            int(good.lengths.sum()),
            int((BLOCK + -(-good.lengths.astype(np.int64) // BLOCK) * BLOCK).sum()),
        )
        with core.lock:
            core.table.publish(good.rows)
            # Slots of pages that were not written stay allocated until nothing on disk names these
            # pages or the slots' previous ones.
            batch.allocated[:] = [] if whole else [np.setdiff1d(new.located.rows, good.rows)]
            core.counters.pages_written += len(written)
            core.counters.bytes_written += nbytes
            core.counters.bytes_written_to_device += padded_bytes
            core.lock.notify_all()
        for i in indexes.tolist():
            batch.outcomes[i] = PutOutcome.STORED
        if not whole:
            self._free_allocated(batch)

    def _await_others(self, others: list[tuple[int, int, int]], outcomes: list[PutOutcome]) -> None:
        """Waits for pages that another put, or this batch, is writing. KEPT if that succeeds."""
        if not others:
            return
        table = self._core.table
        with self._core.lock:
            for index, row, sequence in others:
                self._core.lock.wait_for(
                    lambda row=row, sequence=sequence: (  # type: ignore[misc]
                        table.state[row] != State.WRITING or table.sequence[row] != sequence
                    )
                )
                if table.state[row] == State.LIVE and table.sequence[row] == sequence:
                    outcomes[index] = PutOutcome.KEPT
                    self._core.counters.pages_kept += 1

    def _count_refused(self, outcomes: list[PutOutcome]) -> None:
        refused = outcomes.count(PutOutcome.REFUSED)
        if refused:
            with self._core.lock:
                self._core.counters.pages_refused += refused


def _upwards(allocated: list[_New]) -> _New:
    """All new pages in the order of their slots, so that neighbours are written together."""
    indexes = np.concatenate([new.indexes for new in allocated])
    located = Located.join([new.located for new in allocated])
    order = np.argsort(located.rows)
    if (order[1:] > order[:-1]).all():
        return _New(indexes, located)
    return _New(indexes[order], located.at(order))


def _split_tenants(columns: Columns) -> tuple[Columns, list[str], NDArray[np.int64]]:
    """(columns whose pools name no tenant, the tenants' digests, each page's index in them)."""
    whose = np.zeros(len(columns.pools), np.int64)
    if columns.pool is not None:
        pool, digest = parted(columns.pool)
        if digest != NOBODY:
            columns = replace(columns, pool=pool, pools=[pool] * len(whose))
        return columns, [digest], whose
    both = [parted(pool) for pool in columns.pools]
    pools = [pool for pool, _ in both]
    one = pools[0] if pools and pools.count(pools[0]) == len(pools) else None
    digests = list(dict.fromkeys(digest for _, digest in both))
    whose[:] = [digests.index(digest) for _, digest in both]
    return replace(columns, pool=one, pools=pools), digests, whose


def pool_names(columns: Columns) -> NDArray[np.bytes_]:
    """The pool names as stored in headers. Raises ValueError for a name that no header can hold,
    and TypeError for one that is no text.
    """
    known: set[str] = set()
    for pool in columns.pools if columns.pool is None else [columns.pool]:
        if not isinstance(pool, str):
            raise TypeError(f"the name of a pool is a text, not {type(pool).__name__}")
        if pool in known:
            continue
        known.add(pool)
        if not pool.isascii() or not 0 < len(pool) <= POOL_BYTES or "\0" in pool:
            raise ValueError(
                f"not a pool's name: {shown(pool)}. 1 to {POOL_BYTES} ASCII characters"
            )
    if columns.pool is not None:
        return np.frombuffer(
            columns.pool.encode().ljust(POOL_BYTES, b"\0") * len(columns.pools), f"S{POOL_BYTES}"
        )
    return np.array(columns.pools, f"S{POOL_BYTES}")


def find_pages(core: Core, pages: Columns, which: Rows | None = None) -> Rows:
    """Locked. The row of each page, or EMPTY; for all pages or for `which`."""
    keys = pages.keys if which is None else pages.keys[which]
    if pages.pool is not None:
        return core.table.find_words(keys, pages.pool)
    pools = np.array(pages.pools if which is None else [pages.pools[i] for i in which.tolist()])
    rows = np.full(len(keys), EMPTY, np.int64)
    for pool in dict.fromkeys(pools.tolist()):
        mine = pools == pool
        rows[mine] = core.table.find_words(np.ascontiguousarray(keys[mine]), pool)
    return rows
