"""Where the pages of a read or write are on disk, and the headers of their slots, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.disk.format import RECORD, SlotHead, heads_of
from sgl_kvtier.store.disk.segment import NUMBER_MASK, Segment
from sgl_kvtier.store.index.slots import EMPTY, Rows


@dataclass(frozen=True, slots=True)
class Located:
    """One entry per page; its row is EMPTY if there is no such page. Rows stay pinned until they
    are read, or allocated until they are written.
    """

    identity: bytes
    rows: Rows
    keys: NDArray[np.uint64]
    pools: NDArray[np.bytes_]
    sequences: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    slots: Rows
    segment: NDArray[np.uint32]
    segments: dict[int, Segment]
    """The segments of these pages by number (in siblings' folders: `segment.named_apart`)."""

    @classmethod
    def nothing(cls, identity: bytes, count: int) -> Located:
        """`count` entries without a page."""
        none = np.zeros(count, np.int64)
        return cls(
            identity,
            none + EMPTY,
            np.zeros((count, 4), np.uint64),
            np.zeros(count, "S32"),
            none.astype(np.uint64),
            none.astype(np.uint32),
            none,
            none.astype(np.uint32),
            {},
        )

    def found(self, index: int) -> bool:
        return bool(self.rows[index] != EMPTY)

    def segment_of(self, index: int) -> Segment:
        return self.segments[int(self.segment[index])]

    @classmethod
    def join(cls, some: Sequence[Located]) -> Located:
        """The entries of several, in the given order. All must have the same identity."""
        if len(some) == 1:
            return some[0]
        columns = {
            name: np.concatenate([getattr(one, name) for one in some])
            for name in ("rows", "keys", "pools", "sequences", "lengths", "slots", "segment")
        }
        segments = {number: segment for one in some for number, segment in one.segments.items()}
        return cls(identity=some[0].identity, segments=segments, **columns)

    def at(self, which: Rows) -> Located:
        """Some of the entries, in the given order."""
        return Located(
            self.identity,
            self.rows[which],
            self.keys[which],
            self.pools[which],
            self.sequences[which],
            self.lengths[which],
            self.slots[which],
            self.segment[which],
            self.segments,
        )

    def records(self, kind: int) -> np.ndarray:
        """Records for the index log."""
        records = np.empty(len(self.rows), RECORD)
        records["key"] = self.keys.view("V32").reshape(-1)
        records["pool"] = self.pools
        records["sequence"] = self.sequences
        records["segment"] = self.segment
        records["slot"] = self.slots
        records["length"] = self.lengths
        records["kind"] = kind
        return records

    def head(self, index: int) -> SlotHead:
        """The header that the slot of a page must have. The page must have been found."""
        return SlotHead(
            self.identity,
            self.keys[index].tobytes(),
            self.pools[index].decode(),
            int(self.sequences[index]),
            int(self.lengths[index]),
            int(self.segment[index]) & NUMBER_MASK,
            int(self.slots[index]),
        )

    def heads(self) -> np.ndarray:
        """`head` for all pages at once; meaningless for pages that were not found."""
        return heads_of(
            self.identity,
            self.keys,
            self.pools,
            self.sequences,
            self.lengths,
            self.segment & NUMBER_MASK,
            self.slots,
        )
