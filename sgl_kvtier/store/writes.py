"""Putting pages: which are new, where they go, and writing neighbours in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.admission import admission_of
from sgl_kvtier.store.base import PageWrite, PutOutcome
from sgl_kvtier.store.columns import Columns, columns_of
from sgl_kvtier.store.core import Core
from sgl_kvtier.store.format import BLOCK, MAX_PAYLOAD, POOL_BYTES, PUT, RECORD, SlotHead
from sgl_kvtier.store.lanes import Lanes
from sgl_kvtier.store.located import Located
from sgl_kvtier.store.room import Room
from sgl_kvtier.store.slots import EMPTY, Rows, State

_ROUNDS = 2
"""Making room for new pages can cost one of the same batch that was there a moment ago; it gets a second chance."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is being put: the pages as given, and the same as columns."""

    pages: Sequence[PageWrite]
    columns: Columns
    names: NDArray[np.bytes_]
    outcomes: list[PutOutcome]

    @property
    def slot_bytes(self) -> NDArray[np.int64]:
        """The slot size that each page needs."""
        return BLOCK + -(-self.columns.lengths // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class _New:
    """Pages of a batch that slots were claimed for."""

    indexes: Rows
    located: Located


class Writer:
    """The write path of one open store. Any number of threads."""

    def __init__(self, core: Core, room: Room, lanes: Lanes) -> None:
        self._core = core
        self._room = room
        self._lanes = lanes
        self._admission = admission_of(core.config)

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """Writes what is not there yet. Never raises OSError; what could not be written is REFUSED."""
        columns = columns_of(pages)
        batch = _Batch(pages, columns, pool_names(columns), [PutOutcome.REFUSED] * len(pages))
        fitting = np.flatnonzero((columns.lengths > 0) & (columns.lengths <= MAX_PAYLOAD))
        fitting = self._worth_it(batch, fitting)
        claimed: list[_New] = []
        others: list[tuple[int, int, int]] = []
        for _ in range(_ROUNDS):
            with self._core.lock:
                absent = fitting[find_pages(self._core, columns, fitting) == EMPTY]
            sizes, counts = np.unique(batch.slot_bytes[absent], return_counts=True)
            for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
                self._room.make(size, count)
            with self._core.lock:
                new, waiting, fitting = self._enter(batch, fitting)
            claimed += new
            others += waiting
            if not len(fitting):
                break
        if claimed:
            self._write_all(_upwards(claimed), batch)
        self._await_others(others, batch.outcomes)
        self._count_refused(batch.outcomes)
        return batch.outcomes

    def _worth_it(self, batch: _Batch, indexes: Rows) -> Rows:
        """The pages that are there already or that the admission filter lets in."""
        if self._admission is None:
            return indexes
        with self._core.lock:
            absent = find_pages(self._core, batch.columns, indexes) == EMPTY
            admitted = self._admission.admit([batch.pages[i] for i in indexes[absent].tolist()])
        worth = np.ones(len(indexes), bool)
        worth[absent] = admitted
        return indexes[worth]

    def _enter(self, batch: _Batch, indexes: Rows) -> tuple[list[_New], list[tuple[int, int, int]], Rows]:
        """Locked. Claims slots for new pages.

        Returns them, (index, row, sequence) of pages being written already, and the pages that found no slot.
        """
        table = self._core.table
        here = find_pages(self._core, batch.columns, indexes)
        missing = indexes[here == EMPTY].tolist()
        # Of a page that is in the batch twice only the first is written: filled backwards, so that the first stays.
        name = {i: (batch.pages[i].key, batch.pages[i].pool) for i in missing}
        first = {name[i]: i for i in reversed(missing)}
        fresh = missing if len(first) == len(missing) else sorted(first.values())
        new = self._claim(batch, np.array(fresh, np.int64))
        if len(fresh) == len(indexes) == sum(len(n.indexes) for n in new):
            return new, [], indexes[:0]
        row_of = dict(zip(indexes.tolist(), here.tolist(), strict=True))
        row_of.update((i, row) for n in new for i, row in zip(n.indexes.tolist(), n.located.rows.tolist(), strict=True))
        row_of.update((i, row_of[first[name[i]]]) for i in missing)
        written = {i for n in new for i in n.indexes.tolist()}
        others, kept = [], []
        for i in indexes.tolist():
            row = row_of[i]
            if i in written or row == EMPTY:
                continue
            if table.state[row] == State.LIVE:
                batch.outcomes[i] = PutOutcome.KEPT
                kept.append(row)
            else:
                others.append((i, row, int(table.sequence[row])))
        table.touch(np.array(kept, np.int64))
        self._core.counters.pages_kept += len(kept)
        return new, others, np.array([i for i in indexes.tolist() if row_of[i] == EMPTY], np.int64)

    def _claim(self, batch: _Batch, indexes: Rows) -> list[_New]:
        """Locked. A slot for each page as far as there are any, in the order given."""
        core = self._core
        if core.closing:
            return []
        new: list[_New] = []
        needed = batch.slot_bytes[indexes]
        for size in dict.fromkeys(needed.tolist()):
            mine = indexes[needed == size]
            rows = self._room.take(size, len(mine))
            mine = mine[: len(rows)]
            if not len(mine):
                continue
            first = core.next_sequence(len(mine))
            columns = batch.columns
            keys, lengths = columns.keys[mine], columns.lengths[mine]
            sequences = np.arange(first, first + len(mine), dtype=np.uint64)
            ids = {name: core.table.pool_id(name) for name in dict.fromkeys(columns.pools)}
            core.table.enter(rows, keys, np.array([ids[columns.pools[i]] for i in mine.tolist()]), lengths, sequences)
            where = self._room.slots_of(rows, core.table.segment[rows], np.ones(len(rows), bool))
            names = batch.names[mine]
            located = Located(core.identity, rows, keys, names, sequences, lengths.astype(np.uint32), *where)
            new.append(_New(mine, located))
        return new

    def _write_all(self, new: _New, batch: _Batch) -> None:
        written = new.indexes[:0]
        try:
            written = self._write(new.located, [batch.pages[i].data for i in new.indexes.tolist()])
        finally:
            self._publish(new, written, batch)

    def _write(self, located: Located, data: list[Sequence[memoryview]]) -> Rows:
        """Which of the pages are on disk."""
        core = self._core
        started = core.env.now()
        for segment in located.segments.values():
            segment.dirty = True
        written = self._lanes.write(located, data, lambda error: core.complaints.about("writing pages", error))
        if core.config.durable and len(written):
            try:
                self._room.sync()
            except OSError as error:
                # Nobody knows which of them reached the device: none counts as stored.
                core.complaints.about("syncing pages", error)
                written = written[:0]
        core.counters.write_busy_s += core.env.now() - started
        return written

    def _publish(self, new: _New, written: Rows, batch: _Batch) -> None:
        core = self._core
        good = new.located if len(written) == len(new.indexes) else new.located.at(written)
        if len(written):
            # Before they become readable, and so evictable: the log's order on a slot is the order of its pages.
            core.log.append(good.records(PUT))
            if core.config.durable:
                try:
                    core.log.sync()
                except OSError as error:
                    core.complaints.about("syncing the index", error)
        indexes = new.indexes[written]
        with core.lock:
            core.table.publish(good.rows)
            if len(written) < len(new.indexes):
                self._room.release(core.table.drop(np.setdiff1d(new.located.rows, good.rows)))
            core.counters.pages_written += len(written)
            core.counters.bytes_written += int(batch.columns.lengths[indexes].sum())
            core.counters.bytes_written_to_device += int(batch.slot_bytes[indexes].sum())
            core.lock.notify_all()
        for i in indexes.tolist():
            batch.outcomes[i] = PutOutcome.STORED

    def _await_others(self, others: list[tuple[int, int, int]], outcomes: list[PutOutcome]) -> None:
        """Another thread, or this batch itself, writes the same page: its outcome is ours."""
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


def _upwards(claimed: list[_New]) -> _New:
    """All of them in the order of their slots, so that neighbours are written in one go."""
    indexes = np.concatenate([new.indexes for new in claimed])
    located = Located.join([new.located for new in claimed])
    order = np.argsort(located.rows)
    return _New(indexes[order], located.at(order))


def pool_names(columns: Columns) -> NDArray[np.bytes_]:
    """The pools' names as headers have them. Raises ValueError for one that no header can hold."""
    for pool in dict.fromkeys(columns.pools):
        if not pool.isascii() or not 0 < len(pool) <= POOL_BYTES or "\0" in pool:
            raise ValueError(f"not a pool's name: {pool!r}. 1 to {POOL_BYTES} ASCII characters")
    if columns.pool is not None:
        return np.frombuffer(columns.pool.encode().ljust(POOL_BYTES, b"\0") * len(columns.pools), f"S{POOL_BYTES}")
    return np.array(columns.pools, f"S{POOL_BYTES}")


def find_pages(core: Core, pages: Columns, which: Rows | None = None) -> Rows:
    """Locked. The row of each page's key in its pool, EMPTY where there is none; of all pages, or of some."""
    keys = pages.keys if which is None else pages.keys[which]
    if pages.pool is not None:
        return core.table.find_words(keys, pages.pool)
    pools = np.array(pages.pools if which is None else [pages.pools[i] for i in which.tolist()])
    rows = np.full(len(keys), EMPTY, np.int64)
    for pool in dict.fromkeys(pools.tolist()):
        mine = pools == pool
        rows[mine] = core.table.find_words(np.ascontiguousarray(keys[mine]), pool)
    return rows


def records_of(heads: Sequence[SlotHead], kind: int) -> np.ndarray:
    """Records for the index log."""
    rows = [(h.key, h.pool.encode(), h.sequence, h.segment, h.slot, h.length, kind) for h in heads]
    return np.array(rows, RECORD)
