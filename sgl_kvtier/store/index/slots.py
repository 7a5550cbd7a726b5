"""Every slot of a store as one row of numpy arrays: its page, its last use, and its reads in
flight.

78 to 105 bytes per slot. Not thread-safe: the core's lock guards every call. No call does I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.disk.format import BLOCK, KEY_BYTES, POOL_BYTES
from sgl_kvtier.store.index.hashtable import EMPTY, HashTable, Rows
from sgl_kvtier.tenants import NOBODY, pool_of
from sgl_kvtier.types import PageKey

MOST_POOLS = 1 << 16
"""Largest number of pools: a row stores its pool in 16 bits."""
FEW_TENANTS = 1 << 16
"""Number of tenants from which on the numbers of tenants without pages are reused."""


class State(enum.IntEnum):
    """The state of a row. FREE -> WRITING -> LIVE -> FREE, or LIVE -> DOOMED -> FREE if it is
    dropped while a read is in flight. Pages in states from LIVE on, by number, can be read.
    """

    NONE = 0
    """No slot: the gap of a removed segment."""
    FREE = 1
    WRITING = 2
    DOOMED = 3
    LIVE = 4
    THEIRS = 5
    """A page in a sibling's folder: this process reads it, and never writes or erases it."""


class SlotTable:
    """The rows of all slots, and a hash table from key to row. A row stays the same slot until its
    segment is removed.
    """

    def __init__(self) -> None:
        self.keys: NDArray[np.uint64] = np.zeros((0, 4), np.uint64)
        self.sequence: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.used: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.length: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.segment: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.pool: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.pins: NDArray[np.uint16] = np.zeros(0, np.uint16)
        self.state: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.tenant: NDArray[np.uint32] = np.zeros(0, np.uint32)
        """The tenant of each page, an index into `tenants`. A key belongs to one tenant, so lookups
        do not compare it.
        """
        self.pools: list[str] = []
        self._pool_ids: dict[str, int] = {}
        self.tenants: list[str] = [NOBODY]
        """Digests by number; number 0 stands for no tenant."""
        self._tenant_ids: dict[str, int] = {NOBODY: 0}
        self._unused: list[int] = []
        self._look_at = FEW_TENANTS
        self._groups: dict[str, int] = {}
        self.group: NDArray[np.uint8] = np.zeros(0, np.uint8)
        """The group of each tenant's number: 1 and up for the tenants with a guaranteed share, 0
        for all others. Empty if no tenant has one: then nothing is counted.
        """
        self.held: NDArray[np.int64] = np.zeros((2, 1), np.int64)
        """Bytes of slots with each group's pages, in this store and in siblings' folders."""
        self.losses = 0
        """Grows whenever pages are dropped or rows freed: another copy may be entered then."""
        self._table = HashTable()
        self._clock = 0
        self._own = 0
        self._theirs = 0
        self._gaps: list[tuple[int, int]] = []
        self._rows = 0

    def __len__(self) -> int:
        """Number of own pages, written or being written. May be read without the lock."""
        return self._own

    @property
    def nbytes(self) -> int:
        """Memory of the rows and the hash table, in bytes."""
        return sum(column.nbytes for column in self._columns().values()) + self._table.nbytes

    def pool_id(self, pool: str) -> int:
        """The number of a pool's name in this process, assigned on first use. Raises ValueError
        beyond `MOST_POOLS` pools.
        """
        found = self._pool_ids.get(pool)
        if found is None:
            if len(self.pools) == MOST_POOLS:
                raise ValueError(f"a store has at most {MOST_POOLS} pools: use fewer names")
            found = self._pool_ids[pool] = len(self.pools)
            self.pools.append(pool)
        return found

    def tenant_id(self, digest: str) -> int:
        """The number of a tenant, assigned on first use. Another tenant may get it once this one
        has no pages, but not before the lock was released.
        """
        return int(self.tenant_ids([digest])[0])

    def tenant_ids(self, digests: Sequence[str]) -> NDArray[np.uint32]:
        """`tenant_id` of each."""
        ids = self._tenant_ids
        new = [digest for digest in dict.fromkeys(digests) if digest not in ids]
        if new and not self._unused and len(self.tenants) >= self._look_at:
            self._look_for_unused(digests)
        for digest in new:
            if self._unused:
                found = self._unused.pop()
                self.tenants[found] = digest
            else:
                found = len(self.tenants)
                self.tenants.append(digest)
            ids[digest] = found
            if len(self.group):
                if found >= len(self.group):
                    self.group = np.concatenate([self.group, np.zeros_like(self.group)])
                self.group[found] = self._groups.get(digest, 0)
        return np.array([ids[digest] for digest in digests], np.uint32)

    def known_tenant(self, digest: str) -> int | None:
        """The number of a tenant; None if it certainly has no pages."""
        return self._tenant_ids.get(digest)

    def _look_for_unused(self, wanted: Sequence[str]) -> None:
        """Frees the numbers of tenants without pages, except those of the settings and the `wanted`
        ones. It scans the whole table, so it runs again only after the tenants with pages have
        doubled.
        """
        there = (self.state != State.NONE) & (self.state != State.FREE)
        used = np.zeros(len(self.tenants), bool)
        used[: 1 + len(self._groups)] = True
        used[[self._tenant_ids[digest] for digest in wanted if digest in self._tenant_ids]] = True
        used[self.tenant[there]] = True
        self._unused = np.flatnonzero(~used).tolist()
        for number in self._unused:
            del self._tenant_ids[self.tenants[number]]
        self._look_at = max(FEW_TENANTS, 2 * int(used.sum()))

    def count_by(self, digests: Sequence[str]) -> None:
        """Starts counting what each of these tenants holds, as group 1, 2, ... in this order. The
        table must be empty.
        """
        assert not len(self._table)
        self._groups = {digest: i + 1 for i, digest in enumerate(digests)}
        self.group = np.zeros(FEW_TENANTS, np.uint8)
        self.held = np.zeros((2, len(digests) + 1), np.int64)
        self.tenant_ids(digests)

    def _count_held(self, rows: Rows, sign: int, theirs: NDArray[np.bool_] | None = None) -> None:
        """`theirs`: which of the rows are siblings' pages; None: none of them."""
        if not len(self.group):
            return
        nbytes = BLOCK - (-self.length[rows].astype(np.int64) // BLOCK) * BLOCK
        groups = self.group[self.tenant[rows]].astype(np.int64)
        if theirs is not None:
            groups += len(self.held[0]) * theirs
        sums = np.bincount(groups, nbytes, minlength=self.held.size)
        self.held += sign * sums.astype(np.int64).reshape(self.held.shape)

    def names_of(self, rows: Rows) -> NDArray[np.bytes_]:
        """The pool names of rows as stored on disk, with the tenant."""
        label = (self.tenant[rows].astype(np.int64) << 16) | self.pool[rows]
        # A set, because sorting releases the GIL, and getting it back takes 5 ms next to a busy
        # thread.
        names = {
            one: pool_of(self.pools[one & 0xFFFF], self.tenants[one >> 16]).encode()
            for one in set(label.tolist())
        }
        if len(names) == 1:
            (name,) = names.values()
            text = name.ljust(POOL_BYTES, b"\0") * len(rows)
            return np.frombuffer(text, f"S{POOL_BYTES}")
        return np.array([names[one] for one in label.tolist()], f"S{POOL_BYTES}")

    def reserve(self, count: int) -> None:
        """Allocates memory for `count` rows, so that adding them copies nothing."""
        self._grow(self._rows + count)

    def add_rows(self, count: int, segment: int) -> int:
        """Adds the free rows of a new segment; returns the first one."""
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
        """Removes the rows of a segment, none of which may be pinned or being written."""
        rows = np.arange(start, start + count)
        self.drop(rows[self.state[rows] == State.LIVE])
        assert not self.pins[rows].any() and (self.state[rows] == State.FREE).all()
        self.state[rows] = State.NONE
        self._gaps.append((start, start + count))

    def find(self, keys: Sequence[PageKey], pool: str) -> Rows:
        """The row of each key, or EMPTY. Raises ValueError for keys that are not 32 bytes, and
        TypeError for other types of keys or pool.
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
        """Marks rows as most recently used."""
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
        tenants: NDArray[np.uint32] | int = 0,
        theirs: bool = False,
    ) -> None:
        """Turns free rows into WRITING rows of new, distinct keys. With `theirs` they become pages
        of a sibling's folder, older than any use. `tenants`: their numbers.
        """
        assert (self.state[rows] == State.FREE).all()
        self.keys[rows] = keys
        self.pool[rows] = pools
        self.length[rows] = lengths
        self.sequence[rows] = sequences
        self.tenant[rows] = tenants
        self._table.insert(rows, self.keys, self.pool)
        # Last, after they can be found, because `drop` looks up the rows it removes.
        if theirs:
            self.state[rows] = State.THEIRS
            self.used[rows] = 0
            self._theirs += len(rows)
            self._count_held(rows, 1, np.ones(len(rows), bool))
        else:
            self.state[rows] = State.WRITING
            self.touch(rows)
            self._own += len(rows)
            self._count_held(rows, 1)

    def publish(self, rows: Rows) -> None:
        """Turns WRITING rows into LIVE ones."""
        self.state[rows] = State.LIVE

    def drop(self, rows: Rows) -> Rows:
        """Drops pages; returns the rows that are free now. Pinned rows become free with `unpin`."""
        self._table.remove(rows, self.keys, self.pool)
        self._count_held(rows, -1, self.state[rows] == State.THEIRS if self._theirs else None)
        theirs = int((self.state[rows] == State.THEIRS).sum()) if self._theirs else 0
        self._theirs -= theirs
        self._own -= len(rows) - theirs
        self.losses += 1
        pinned = self.pins[rows] > 0
        self.state[rows[pinned]] = State.DOOMED
        self.state[rows[~pinned]] = State.FREE
        return rows[~pinned]

    def pin(self, rows: Rows) -> None:
        """Keeps slots from being reused. Pins are counted: each needs an `unpin`."""
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
            # Counts a row twice if it is there twice. This releases the GIL, and getting it back
            # takes 5 ms next to a busy thread.
            np.add.at(self.pins, rows, np.uint16(step % (1 << 16)))

    def key_of(self, row: int) -> bytes:
        key: bytes = self.keys[row].tobytes()
        return key

    def check(self) -> None:
        """Asserts the table's invariants; for tests."""
        live = np.flatnonzero((self.state >= State.LIVE) | (self.state == State.WRITING))
        assert len(live) == len(self._table) == self._own + self._theirs
        assert self._theirs == int((self.state == State.THEIRS).sum())
        self._check_held()
        for pool in range(len(self.pools)):
            mine = live[self.pool[live] == pool]
            assert (self._table.find(self.keys[mine], pool, self.keys, self.pool) == mine).all()
        assert not self.pins[(self.state == State.FREE) | (self.state == State.NONE)].any()

    def _check_held(self) -> None:
        live = np.flatnonzero((self.state >= State.LIVE) | (self.state == State.WRITING))
        held, self.held = self.held, np.zeros_like(self.held)
        self._count_held(live, 1, self.state[live] == State.THEIRS)
        assert (held == self.held).all()

    def _columns(self) -> dict[str, np.ndarray]:
        names = ("keys", "sequence", "used", "length", "segment", "pool", "tenant", "pins", "state")
        return {name: getattr(self, name) for name in names}

    def _grow(self, rows: int) -> None:
        if rows <= len(self.state):
            return
        # Grows by a quarter at least, so that adding segment after segment does not copy everything
        # each time.
        rows = max(rows, len(self.state) * 5 // 4)
        for name, column in self._columns().items():
            wider = np.zeros((rows, *column.shape[1:]), column.dtype)
            wider[: len(column)] = column
            setattr(self, name, wider)


def words(keys: Sequence[PageKey]) -> NDArray[np.uint64]:
    """Keys as rows of four 64-bit words. Raises ValueError for keys that are not 32 bytes, and
    TypeError for anything but a sequence of keys.
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
