"""A hash table from key to row: open addressing in a numpy array, 8 to 24 bytes per page."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_native: Any
try:
    from sgl_kvtier.store import _native  # type: ignore[no-redef, attr-defined, unused-ignore]
except ImportError:
    _native = None

EMPTY = -1
_GONE = -2
MIX = np.array(
    [0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63],
    dtype=np.uint64,
)
_POOL_MIX = np.uint64(0x27D4EB2F165667C5)
_SHIFT = np.uint64(32)

Rows = NDArray[np.int64]


class HashTable:
    """Maps (key, pool) to a row of the caller's arrays. Not thread-safe: the core's lock guards it.

    A key is four 64-bit words. The full key is compared, so a lookup is exact.
    """

    def __init__(self) -> None:
        self._buckets = np.full(1024, EMPTY, np.int32)
        self._live = 0
        self._gone = 0

    @property
    def nbytes(self) -> int:
        return int(self._buckets.nbytes)

    def __len__(self) -> int:
        return self._live

    def find(
        self,
        wanted: NDArray[np.uint64],
        pool: int,
        keys: NDArray[np.uint64],
        pools: NDArray[np.uint16],
    ) -> Rows:
        """The row of each wanted key, EMPTY if it is not in the table."""
        rows = np.full(len(wanted), EMPTY, np.int64)
        if not self._live:
            return rows
        if _native is not None:
            _native.find(self._buckets, keys, pools, wanted, pool, rows)
            return rows
        mask = len(self._buckets) - 1
        at = key_hash(wanted, np.full(len(wanted), pool, np.uint16)) & mask
        open_ = np.arange(len(wanted))
        while len(open_):
            found = self._buckets[at[open_]]
            row = np.maximum(found, 0)
            same = (found >= 0) & (keys[row, 0] == wanted[open_, 0]) & (pools[row] == pool)
            if same.any():
                hit = np.flatnonzero(same)
                same[hit] = (keys[row[hit]] == wanted[open_[hit]]).all(axis=1)
            rows[open_[same]] = found[same]
            open_ = open_[(found != EMPTY) & ~same]
            at[open_] = (at[open_] + 1) & mask
        return rows

    def insert(self, rows: Rows, keys: NDArray[np.uint64], pools: NDArray[np.uint16]) -> None:
        """Adds rows, whose keys must be new and distinct."""
        if (self._live + self._gone + len(rows)) * 2 > len(self._buckets):
            self._rebuild(len(rows), keys, pools)
        self._place(np.asarray(rows, np.int64), keys, pools)
        self._live += len(rows)

    def remove(self, rows: Rows, keys: NDArray[np.uint64], pools: NDArray[np.uint16]) -> None:
        """Removes rows that are in the table."""
        mask = len(self._buckets) - 1
        at = key_hash(keys[rows], pools[rows]) & mask
        open_ = np.arange(len(rows))
        while len(open_):
            same = self._buckets[at[open_]] == rows[open_]
            self._buckets[at[open_[same]]] = _GONE
            open_ = open_[~same]
            at[open_] = (at[open_] + 1) & mask
        self._live -= len(rows)
        self._gone += len(rows)

    def _place(self, rows: Rows, keys: NDArray[np.uint64], pools: NDArray[np.uint16]) -> None:
        if _native is not None:
            _native.place(self._buckets, keys, pools, rows)
            return
        mask = len(self._buckets) - 1
        at = key_hash(keys[rows], pools[rows]) & mask
        while len(rows):
            free = self._buckets[at] == EMPTY
            # If several rows hash to one bucket, the last one written stays; the others try the
            # next.
            self._buckets[at[free]] = rows[free]
            rest = self._buckets[at] != rows
            rows = rows[rest]
            at = (at[rest] + 1) & mask

    def _rebuild(self, more: int, keys: NDArray[np.uint64], pools: NDArray[np.uint16]) -> None:
        rows = self._buckets[self._buckets >= 0].astype(np.int64)
        size = 1024
        while size < (len(rows) + more) * 3:
            size *= 2
        self._buckets = np.full(size, EMPTY, np.int32)
        self._gone = 0
        self._place(rows, keys, pools)


def key_hash(keys: NDArray[np.uint64], pools: NDArray[np.uint16]) -> Rows:
    """63 well-mixed bits of each key and pool."""
    with np.errstate(over="ignore"):
        mixed = keys @ MIX + pools.astype(np.uint64) * _POOL_MIX
        mixed ^= mixed >> _SHIFT
        mixed *= MIX[0]
        mixed ^= mixed >> _SHIFT
    bits: Rows = (mixed >> np.uint64(1)).astype(np.int64)
    return bits
