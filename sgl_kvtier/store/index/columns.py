"""The pages of a batch as columns: keys, lengths and pools in arrays, buffers in one list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.base import PageRead, PageWrite
from sgl_kvtier.store.index.slots import Rows, words

_native: Any
try:
    from sgl_kvtier.store import _native  # type: ignore[no-redef, attr-defined, unused-ignore]
except ImportError:
    _native = None


@dataclass(frozen=True, slots=True)
class Columns:
    """One entry per page to read or write; `buffers` has `parts` entries per page."""

    keys: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    parts: NDArray[np.uint32]
    buffers: list[Any]
    pools: list[str]
    pool: str | None
    """The pool of all pages; None when they are of several pools."""

    def buffers_of(self, pages: Rows) -> list[Any]:
        """The buffers of some pages, in the given order."""
        ends = np.cumsum(self.parts).tolist()
        return [
            part
            for i in pages.tolist()
            for part in self.buffers[ends[i] - int(self.parts[i]) : ends[i]]
        ]


def columns_of(pages: Sequence[PageRead] | Sequence[PageWrite]) -> Columns:
    """The columns of a batch. Raises ValueError for keys that are not 32 bytes and for memory that
    is not contiguous, and TypeError for anything but pages.
    """
    try:
        return _columns_of(pages)
    except BufferError as error:
        raise ValueError(f"the memory of a page must be contiguous: {error}") from None


def _columns_of(pages: Sequence[PageRead] | Sequence[PageWrite]) -> Columns:
    if _native is not None:
        keys, parts, lengths, buffers, pool = _native.columns(pages)
        return Columns(
            np.frombuffer(keys, "<u8").reshape(-1, 4),
            np.frombuffer(lengths, np.int64),
            np.frombuffer(parts, np.uint32),
            buffers,
            [page[2] for page in pages] if pool is None else [pool] * len(pages),
            pool,
        )
    if not all(isinstance(page, tuple) and len(page) > 2 for page in pages):
        raise TypeError("a page is (key, buffers, pool)")
    pools = [page[2] for page in pages]
    return Columns(
        words([page[0] for page in pages]),
        np.array([sum(memoryview(p).nbytes for p in page[1]) for page in pages], np.int64),
        np.array([len(page[1]) for page in pages], np.uint32),
        [part for page in pages for part in page[1]],
        pools,
        pools[0] if pools and pools.count(pools[0]) == len(pools) else None,
    )
