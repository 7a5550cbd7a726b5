"""Page-aligned memory for direct I/O: for slot headers, and for payloads in unaligned memory."""

from __future__ import annotations

import mmap

from sgl_kvtier.store.disk.format import BLOCK


class Scratch:
    """Aligned memory for one thread at a time. It grows on demand and is reused."""

    def __init__(self) -> None:
        self._heads = memoryview(mmap.mmap(-1, BLOCK))
        self._padding = memoryview(mmap.mmap(-1, BLOCK))
        self._bounce = memoryview(b"")

    def heads(self, count: int) -> list[memoryview]:
        """`count` header blocks. They are valid until the next call."""
        if len(self._heads) < count * BLOCK:
            self._heads = memoryview(mmap.mmap(-1, count * BLOCK))
        return [self._heads[i * BLOCK : (i + 1) * BLOCK] for i in range(count)]

    def bounce(self, nbytes: int) -> memoryview:
        """`nbytes` of aligned memory, not cleared, valid until the next call."""
        if len(self._bounce) < nbytes:
            self._bounce = memoryview(mmap.mmap(-1, nbytes))
        return self._bounce[:nbytes]

    def padding(self) -> memoryview:
        """One block for the bytes between a payload's end and its slot's end."""
        return self._padding
