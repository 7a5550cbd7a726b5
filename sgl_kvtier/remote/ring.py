"""Memory shared by this process and its child, divided into extents of any size.

The engine's transport writes nowhere else. An extent belongs to a call from `take` to `give`, and
is given back when the child has replied or is dead.
"""

from __future__ import annotations

import bisect
import mmap
import os

ALIGN = 64


class Ring:
    """`nbytes` of anonymous shared memory, freed with the last process that maps it.

    Not thread-safe: the link's lock guards the extents. Raises OSError if there is no memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("kvtier-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
            self.memory = mmap.mmap(self.fd, nbytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._free = [(0, nbytes)]
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """Bytes of allocated extents."""
        return sum(self._taken.values())

    def take(self, nbytes: int) -> int | None:
        """Allocates an extent; returns its offset, a multiple of 64, or None if there is no gap."""
        need = padded(max(nbytes, 1))
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= need:
                self._free[i : i + 1] = [(start + need, stop)] if stop - start > need else []
                self._taken[start] = need
                return start
        return None

    def give(self, offset: int) -> None:
        """Frees an extent."""
        start, stop = offset, offset + self._taken.pop(offset)
        at = bisect.bisect(self._free, (start, stop))
        if at < len(self._free) and self._free[at][0] == stop:
            stop = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, stop))

    def close(self) -> None:
        """Closes the descriptor; the mapping stays while something refers to it."""
        os.close(self.fd)


def padded(nbytes: int) -> int:
    """Bytes that an object of `nbytes` takes in the ring."""
    return -(-nbytes // ALIGN) * ALIGN
