"""Every slot of a store as one row of numpy arrays: its page, its last use, and the reads of it in
flight.

About 82 bytes a slot. Not thread-safe: the engine's lock guards every call, and no call does I/O.
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
"""Pools that a row's number of its pool can tell apart."""
FEW_TENANTS = 1 << 16
"""Tenants that get numbers before those without pages give theirs back."""


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
        self.tenant: NDArray[np.uint32] = np.zeros(0, np.uint32)
        """Whose each page is: a number in `tenants`. A key belongs to one tenant, so that it is no
        part of what is looked up.
        """
        self.pools: list[str] = []
        self._pool_ids: dict[str, int] = {}
        self.tenants: list[str] = [NOBODY]
        """Digests by number; 0 is nobody."""
        self._tenant_ids: dict[str, int] = {NOBODY: 0}
        self._unused: list[int] = []
        self._look_at = FEW_TENANTS
        self._groups: dict[str, int] = {}
        self.group: NDArray[np.uint8] = np.zeros(0, np.uint8)
        """Of each tenant's number its group: from 1 on the tenants that were promised a share, 0
        all others. Empty where nobody was: nothing is counted then.
        """
        self.held: NDArray[np.int64] = np.zeros((2, 1), np.int64)
        """Bytes of slots that each group's pages have, here and in siblings' folders."""
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

    def tenant_id(self, digest: str) -> int:
        """The number that stands for a tenant from now on. Another tenant may get it once this one
        has no pages, but not before the lock was given up.
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
        """The number of a tenant that may have pages."""
        return self._tenant_ids.get(digest)

    def _look_for_unused(self, wanted: Sequence[str]) -> None:
        """Takes their numbers from tenants without pages, but for those of the settings and the
        `wanted` ones. It reads the whole table, so that it is done again only after the tenants
        with pages have doubled.
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
        """From now on counts what each of these tenants holds, in this order from group 1 on. While
        the table is empty.
        """
        assert not len(self._table)
        self._groups = {digest: i + 1 for i, digest in enumerate(digests)}
        self.group = np.zeros(FEW_TENANTS, np.uint8)
        self.held = np.zeros((2, len(digests) + 1), np.int64)
        self.tenant_ids(digests)

    def _count_held(self, rows: Rows, sign: int, theirs: NDArray[np.bool_] | None = None) -> None:
        """`theirs`: which of the rows are siblings'; None: none."""
        if not len(self.group):
            return
        nbytes = BLOCK - (-self.length[rows].astype(np.int64) // BLOCK) * BLOCK
        groups = self.group[self.tenant[rows]].astype(np.int64)
        if theirs is not None:
            groups += len(self.held[0]) * theirs
        sums = np.bincount(groups, nbytes, minlength=self.held.size)
        self.held += sign * sums.astype(np.int64).reshape(self.held.shape)

    def names_of(self, rows: Rows) -> NDArray[np.bytes_]:
        """The pools' names of rows as on disk, with the tenants."""
        label = (self.tenant[rows].astype(np.int64) << 16) | self.pool[rows]
        # A set, no sorting: that releases Python's lock, which costs 5 ms beside a busy thread.
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
        tenants: NDArray[np.uint32] | int = 0,
        theirs: bool = False,
    ) -> None:
        """Turns free rows into WRITING rows of new, distinct keys; with `theirs` into pages of a
        sibling's folder, used longer ago than any other. `tenants`: whose they are.
        """
        assert (self.state[rows] == State.FREE).all()
        self.keys[rows] = keys
        self.pool[rows] = pools
        self.length[rows] = lengths
        self.sequence[rows] = sequences
        self.tenant[rows] = tenants
        self._table.insert(rows, self.keys, self.pool)
        # Last, once they can be found: `drop` looks them up to remove them.
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
        """Forgets pages; returns the rows free now. A pinned row is free with its last `unpin`."""
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
