"""Every slot of a store as one row of numpy arrays: its page, its last use, and the reads of it in
flight.

About 75 bytes a slot. Not thread-safe: the engine's lock guards every call, and no call does I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.disk.format import KEY_BYTES
from sgl_kvtier.store.index.hashtable import EMPTY, HashTable, Rows
from sgl_kvtier.types import PageKey

MOST_POOLS = 1 << 16
"""Pools that a row's number of its pool can tell apart."""


class State(enum.IntEnum):
    """The state of a row. FREE -> WRITING -> LIVE -> FREE, or LIVE -> DOOMED -> FREE while a read
    of the slot is in flight. From LIVE on a page can be read.
    """

    NONE = 0
    """No slot: a gap left by a segment that was discarded."""
    FREE = 1
    WRITING = 2
    DOOMED = 3
    LIVE = 4
    THEIRS = 5
    """A page in a sibling's folder: read, never written or erased by this process."""


class SlotTable:
    """Rows of slots, and the row of a key. A row is the same slot until its segment goes."""

    def __init__(self) -> None:
        self.keys: NDArray[np.uint64] = np.zeros((0, 4), np.uint64)
        self.sequence: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.used: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.length: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.segment: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.pool: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.pins: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.state: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.pools: list[str] = []
        self._pool_ids: dict[str, int] = {}
        self.losses = 0
        """Grows whenever keys were forgotten or rows became free: another copy may be entered."""
        self._table = HashTable()
        self._clock = 0
        self._own = 0
        self._theirs = 0
        self._gaps: list[tuple[int, int]] = []
        self._rows = 0

    def __len__(self) -> int:
        """Number of pages of this store's own: written or being written. One number, which may be
        read without the lock.
        """
        return self._own

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the rows and the hash table take."""
        return sum(column.nbytes for column in self._columns().values()) + self._table.nbytes

    def pool_id(self, pool: str) -> int:
        """The small number that stands for the name of a pool with pages in this process. Raises
        ValueError where there are more pools than it can number.
        """
        found = self._pool_ids.get(pool)
        if found is None:
            if len(self.pools) == MOST_POOLS:
                raise ValueError(f"a store has at most {MOST_POOLS} pools: use fewer names")
            found = self._pool_ids[pool] = len(self.pools)
            self.pools.append(pool)
        return found

    def reserve(self, count: int) -> None:
        """Makes room for `count` rows at once, so that adding them copies nothing."""
        self._grow(self._rows + count)

    def add_rows(self, count: int, segment: int) -> int:
        """Free rows for a new segment; returns the first one."""
        for i, (start, stop) in enumerate(self._gaps):
            if stop - start >= count:
                self._gaps[i] = (start + count, stop)
                break
        else:
            start = self._rows
            self._rows += count
            self._grow(self._rows)
        self._gaps = [gap for gap in self._gaps if gap[0] < gap[1]]
        self.state[start : start + count] = State.FREE
        self.segment[start : start + count] = segment
        return start

    def remove_rows(self, start: int, count: int) -> None:
        """Drops the rows of a segment, none of which may be pinned or being written."""
        rows = np.arange(start, start + count)
        self.drop(rows[self.state[rows] == State.LIVE])
        assert not self.pins[rows].any() and (self.state[rows] == State.FREE).all()
        self.state[rows] = State.NONE
        self._gaps.append((start, start + count))

    def find(self, keys: Sequence[PageKey], pool: str) -> Rows:
        """The row of each key, or EMPTY. Raises TypeError or ValueError for keys that are not 32
        bytes and for a pool that is no text.
        """
        if not isinstance(pool, str):
            raise TypeError(f"the name of a pool is a text, not {type(pool).__name__}")
        return self.find_words(words(keys), pool)

    def find_words(self, keys: NDArray[np.uint64], pool: str) -> Rows:
        """Like `find`, for keys that are rows of four words already."""
        pool_id = self._pool_ids.get(pool)
        if pool_id is None:
            return np.full(len(keys), EMPTY, np.int64)
        return self._table.find(keys, pool_id, self.keys, self.pool)

    def touch(self, rows: Rows) -> None:
        """Marks rows as the most recently used ones."""
        self._clock += 1
        self.used[rows] = self._clock

    def age(self, rows: Rows) -> None:
        """Marks rows as used one after the other, the first one longest ago."""
        self.used[rows] = self._clock + 1 + np.arange(len(rows), dtype=np.uint64)
        self._clock += len(rows)

    def enter(
        self,
        rows: Rows,
        keys: NDArray[np.uint64],
        pools: Rows,
        lengths: Rows,
        sequences: NDArray[np.uint64],
        *,
        theirs: bool = False,
    ) -> None:
        """Turns free rows into WRITING rows of new, distinct keys; with `theirs` into pages of a
        sibling's folder, used longer ago than any other.
        """
        assert (self.state[rows] == State.FREE).all()
        self.keys[rows] = keys
        self.pool[rows] = pools
        self.length[rows] = lengths
        self.sequence[rows] = sequences
        self._table.insert(rows, self.keys, self.pool)
        # Last, once they can be found: `drop` looks them up to remove them.
        if theirs:
            self.state[rows] = State.THEIRS
            self.used[rows] = 0
            self._theirs += len(rows)
        else:
            self.state[rows] = State.WRITING
            self.touch(rows)
            self._own += len(rows)

    def publish(self, rows: Rows) -> None:
        """Turns WRITING rows into LIVE ones."""
        self.state[rows] = State.LIVE

    def drop(self, rows: Rows) -> Rows:
        """Forgets pages; returns the rows free now. A pinned row is free with its last `unpin`."""
        self._table.remove(rows, self.keys, self.pool)
        theirs = int((self.state[rows] == State.THEIRS).sum()) if self._theirs else 0
        self._theirs -= theirs
        self._own -= len(rows) - theirs
        self.losses += 1
        pinned = self.pins[rows] > 0
        self.state[rows[pinned]] = State.DOOMED
        self.state[rows[~pinned]] = State.FREE
        return rows[~pinned]

    def pin(self, rows: Rows) -> None:
        """Keeps slots from being reused. Pins are counted: each needs one unpin."""
        self._count(rows, 1)

    def unpin(self, rows: Rows) -> Rows:
        """Removes one pin from each row; returns the rows that are free now."""
        self._count(rows, -1)
        freed: Rows = rows[(self.state[rows] == State.DOOMED) & (self.pins[rows] == 0)]
        if len(freed):
            freed = np.unique(freed)
            self.state[freed] = State.FREE
            self.losses += 1
        return freed

    def _count(self, rows: Rows, step: int) -> None:
        if len(set(rows.tolist())) == len(rows):
            self.pins[rows] += np.uint16(step % (1 << 16))
        else:
            # A row that is there twice has to count twice; this also releases Python's lock, which
            # costs 5 ms beside a busy thread.
            np.add.at(self.pins, rows, np.uint16(step % (1 << 16)))

    def key_of(self, row: int) -> bytes:
        key: bytes = self.keys[row].tobytes()
        return key

    def check(self) -> None:
        """Asserts the invariants that hold between calls; for tests."""
        live = np.flatnonzero((self.state >= State.LIVE) | (self.state == State.WRITING))
        assert len(live) == len(self._table) == self._own + self._theirs
        assert self._theirs == int((self.state == State.THEIRS).sum())
        for pool in range(len(self.pools)):
            mine = live[self.pool[live] == pool]
            assert (self._table.find(self.keys[mine], pool, self.keys, self.pool) == mine).all()
        assert not self.pins[(self.state == State.FREE) | (self.state == State.NONE)].any()

    def _columns(self) -> dict[str, np.ndarray]:
        names = ("keys", "sequence", "used", "length", "segment", "pool", "pins", "state")
        return {name: getattr(self, name) for name in names}

    def _grow(self, rows: int) -> None:
        if rows <= len(self.state):
            return
        # A quarter more than needed, so that a store that grows segment by segment is not copied
        # each time.
        rows = max(rows, len(self.state) * 5 // 4)
        for name, column in self._columns().items():
            wider = np.zeros((rows, *column.shape[1:]), column.dtype)
            wider[: len(column)] = column
            setattr(self, name, wider)


def words(keys: Sequence[PageKey]) -> NDArray[np.uint64]:
    """Keys as rows of four 64-bit words. Raises ValueError for keys that are not 32 bytes, and
    TypeError for what is no sequence of keys.
    """
    try:
        right, joined = set(map(len, keys)) <= {KEY_BYTES}, b"".join(keys)
        count = len(keys)
    except TypeError:
        raise TypeError(
            f"page keys are a sequence of bytes objects of {KEY_BYTES} bytes each"
        ) from None
    if not right or len(joined) != KEY_BYTES * count:
        raise ValueError(f"a page key is {KEY_BYTES} bytes")
    return np.frombuffer(joined, np.dtype("<u8")).reshape(-1, 4)


__all__ = ["EMPTY", "Rows", "SlotTable", "State", "words"]
