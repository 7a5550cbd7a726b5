"""Putting pages: which are new, where they go, and writing neighbours in one go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_kvtier.store.admission import SecondHit
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome
from sgl_kvtier.store.core import Core
from sgl_kvtier.store.format import MAX_PAYLOAD, PUT, RECORD, SlotHead, slot_bytes
from sgl_kvtier.store.lanes import Lanes, SlotWrite
from sgl_kvtier.store.room import Room
from sgl_kvtier.store.slots import EMPTY, Rows, State, words

_ROUNDS = 2
"""Making room for new pages can cost one of the same batch that was there a moment ago; it gets a second chance."""


@dataclass(slots=True)
class _New:
    """A page of this batch that is being written."""

    index: int
    row: int
    page: SlotWrite

    @property
    def head(self) -> SlotHead:
        return self.page.head


class Writer:
    """The write path of one open store. Any number of threads."""

    def __init__(self, core: Core, room: Room, lanes: Lanes) -> None:
        self._core = core
        self._room = room
        self._lanes = lanes
        self._admission = SecondHit() if core.config.admission == "second-hit" else None

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """Writes what is not there yet. Never raises OSError; what could not be written is REFUSED."""
        outcomes = [PutOutcome.REFUSED] * len(pages)
        data = [[part.cast("B") for part in page.data] for page in pages]
        lengths = [sum(map(len, parts)) for parts in data]
        fitting = [i for i, length in enumerate(lengths) if 0 < length <= MAX_PAYLOAD]
        with self._core.lock:
            fitting = self._worth_it(pages, fitting)
        new: list[_New] = []
        others: list[tuple[int, int, int]] = []
        for _ in range(_ROUNDS):
            with self._core.lock:
                absent = self._absent(pages, fitting)
            for size, count in Counter(slot_bytes(lengths[i]) for i in absent).items():
                self._room.make(size, count)
            with self._core.lock:
                claimed, waiting, fitting = self._enter(pages, data, lengths, fitting, outcomes)
            new += claimed
            others += waiting
            if not fitting:
                break
        written: list[_New] = []
        try:
            self._write(new, written)
        finally:
            self._publish(new, written, outcomes)
        self._await_others(others, outcomes)
        self._count_refused(outcomes)
        return outcomes

    def _worth_it(self, pages: Sequence[PageWrite], indexes: list[int]) -> list[int]:
        """Locked. The pages that are there already or that the admission filter lets in."""
        if self._admission is None:
            return indexes
        absent = self._absent(pages, indexes)
        admitted = self._admission.admit([pages[i].key for i in absent])
        turned_away = {i for i, yes in zip(absent, admitted, strict=True) if not yes}
        return [i for i in indexes if i not in turned_away]

    def _absent(self, pages: Sequence[PageWrite], indexes: list[int]) -> list[int]:
        """Locked. The pages that are not in the table."""
        rows = find_pages(self._core, [pages[i] for i in indexes])
        return [i for i, row in zip(indexes, rows.tolist(), strict=True) if row == EMPTY]

    def _enter(
        self,
        pages: Sequence[PageWrite],
        data: list[list[memoryview]],
        lengths: list[int],
        indexes: list[int],
        outcomes: list[PutOutcome],
    ) -> tuple[list[_New], list[tuple[int, int, int]], list[int]]:
        """Locked. Claims slots for new pages.

        Returns them, (index, row, sequence) of pages being written already, and the pages that found no slot.
        """
        table = self._core.table
        rows = find_pages(self._core, [pages[i] for i in indexes])
        here = dict(zip(indexes, rows.tolist(), strict=True))
        fresh: dict[tuple[bytes, str], int] = {}
        repeats: list[int] = []
        for i in indexes:
            name = (pages[i].key, pages[i].pool)
            if here[i] == EMPTY and name in fresh:
                repeats.append(i)
            elif here[i] == EMPTY:
                fresh[name] = i
        new = self._claim([(i, pages[i], data[i], lengths[i]) for i in fresh.values()])
        claimed = {(n.head.key, n.head.pool): n.row for n in new}
        others = []
        homeless = [i for i in indexes if here[i] == EMPTY and (pages[i].key, pages[i].pool) not in claimed]
        for i in [i for i in indexes if here[i] != EMPTY] + repeats:
            row = here[i] if here[i] != EMPTY else claimed.get((pages[i].key, pages[i].pool), EMPTY)
            if row != EMPTY and table.state[row] == State.LIVE:
                outcomes[i] = PutOutcome.KEPT
            elif row != EMPTY:
                others.append((i, row, int(table.sequence[row])))
        kept = [here[i] for i in indexes if outcomes[i] is PutOutcome.KEPT]
        table.touch(np.array(kept, np.int64))
        self._core.counters.pages_kept += len(kept)
        return new, others, homeless

    def _claim(self, wanted: list[tuple[int, PageWrite, list[memoryview], int]]) -> list[_New]:
        """Locked. A slot for each page as far as there are any, in the order given."""
        core = self._core
        if core.closing:
            return []
        new: list[_New] = []
        by_size: dict[int, list[tuple[int, PageWrite, list[memoryview], int]]] = {}
        for item in wanted:
            by_size.setdefault(slot_bytes(item[3]), []).append(item)
        for size, items in by_size.items():
            rows = self._room.take(size, len(items))
            items = items[: len(rows)]
            if not items:
                continue
            first = core.next_sequence(len(items))
            core.table.enter(
                rows,
                words([page.key for _, page, _, _ in items]),
                np.array([core.table.pool_id(page.pool) for _, page, _, _ in items]),
                np.array([length for _, _, _, length in items]),
                np.arange(first, first + len(items)),
            )
            numbers = core.table.segment[rows].tolist()
            for k, (row, (index, page, parts, length)) in enumerate(zip(rows.tolist(), items, strict=True)):
                segment = self._room.segments[numbers[k]]
                head = SlotHead(
                    core.identity, page.key, page.pool, first + k, length, segment.number, row - segment.base
                )
                new.append(_New(index, row, SlotWrite(segment, head, parts)))
        return new

    def _write(self, new: list[_New], written: list[_New]) -> None:
        if not new:
            return
        core = self._core
        started = core.env.now()
        by_head = {id(n.page): n for n in new}
        upwards = sorted(new, key=lambda n: n.row)
        for n in upwards:
            n.page.segment.dirty = True
        done = self._lanes.write([n.page for n in upwards], lambda error: core.complaints.about("writing pages", error))
        written.extend(by_head[id(page)] for page in done)
        if core.config.durable and written:
            self._sync(written)
        core.counters.write_busy_s += core.env.now() - started

    def _sync(self, written: list[_New]) -> None:
        try:
            self._room.sync()
        except OSError as error:
            # Nobody knows which of them reached the device: none counts as stored.
            self._core.complaints.about("syncing pages", error)
            written.clear()

    def _publish(self, new: list[_New], written: list[_New], outcomes: list[PutOutcome]) -> None:
        core = self._core
        good = [n.row for n in written]
        failed = sorted({n.row for n in new} - set(good))
        if good:
            # Before they become readable, and so evictable: the log's order on a slot is the order of its pages.
            core.log.append(records_of([n.head for n in written], PUT))
            if core.config.durable:
                try:
                    core.log.sync()
                except OSError as error:
                    core.complaints.about("syncing the index", error)
        with core.lock:
            core.table.publish(np.array(good, np.int64))
            self._room.release(core.table.drop(np.array(failed, np.int64)))
            core.counters.pages_written += len(good)
            core.counters.bytes_written += sum(n.head.length for n in written)
            core.counters.bytes_written_to_device += sum(slot_bytes(n.head.length) for n in written)
            core.lock.notify_all()
        for n in written:
            outcomes[n.index] = PutOutcome.STORED

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


def find_pages(core: Core, pages: Sequence[PageRead | PageWrite]) -> Rows:
    """Locked. The row of each page's key in its pool, EMPTY where there is none."""
    pools = [page.pool for page in pages]
    if len(set(pools)) == 1:
        return core.table.find([page.key for page in pages], pools[0])
    rows = np.full(len(pages), EMPTY, np.int64)
    for pool in dict.fromkeys(pools):
        mine = [i for i, other in enumerate(pools) if other == pool]
        rows[mine] = core.table.find([pages[i].key for i in mine], pool)
    return rows


def records_of(heads: Sequence[SlotHead], kind: int) -> np.ndarray:
    """Records for the index log."""
    rows = [(h.key, h.pool.encode(), h.sequence, h.segment, h.slot, h.length, kind) for h in heads]
    return np.array(rows, RECORD)
