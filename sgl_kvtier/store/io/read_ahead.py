"""Reading a known list of pages piece by piece: the next piece is in flight while the present one
is waited for.

A Python caller that reads 128 pages, waits, and only then requests the next 128 leaves the device
idle in between: for half a millisecond, and for 5 ms and more beside a busy Python thread.
Requesting pages ahead hides that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sgl_kvtier.store.base import ReadJob, ReadOutcome

AHEAD_BYTES = 32 << 20
"""Bytes requested beyond the pages waited for: what a device with 6.4 GB/s reads in 5 ms. Other
reads wait for that much more.
"""


class ReadAhead:
    """The pages [0, count) of one read, collected in their order. One thread, except `cancel`.

    `begin(first, last)` begins reading the pages [first, last). Destinations of pages that were
    begun belong to the store until `collect` has returned them or `close` has returned; `close`
    must be called.
    """

    def __init__(self, begin: Callable[[int, int], ReadJob], count: int, page_bytes: int) -> None:
        self._begin = begin
        self._count = count
        self._ahead = max(1, AHEAD_BYTES // max(1, page_bytes))
        self._jobs: deque[ReadJob] = deque()
        self._ended: list[ReadOutcome | None] = []
        self._begun = 0
        self._collected = 0
        self._cancelled = False

    @property
    def collected(self) -> int:
        """Number of pages that `collect` has returned."""
        return self._collected

    def collect(self, count: int) -> list[ReadOutcome | None]:
        """Waits for the next `count` pages and returns how each ended. The pages after them are in
        flight before the wait.
        """
        first, last = self._collected, min(self._collected + count, self._count)
        until = min(last + self._ahead, self._count)
        while self._begun < until:
            # In the pieces in which they will be collected, so that no piece waits for the end of a
            # larger one.
            stop = last if self._begun < last else min(until, self._begun + count)
            self._jobs.append(self._begin(self._begun, stop))
            self._begun = stop
            if self._cancelled:
                self._jobs[-1].cancel()
        while len(self._ended) < last - first:
            self._jobs[0].wait()
            self._ended += self._jobs[0].outcomes
            # Not before its outcomes are there: those of the next pages would be taken for them.
            self._jobs.popleft()
        self._collected = last
        found, self._ended = self._ended[: last - first], self._ended[last - first :]
        return found

    def cancel(self) -> None:
        """Pages not begun become CANCELLED, collected later or not. Never blocks; any thread."""
        self._cancelled = True
        # From the back: a page of a later piece must not begin where an earlier piece was given up.
        for job in reversed(tuple(self._jobs)):
            job.cancel()

    def close(self) -> None:
        """Ends reads that were begun and not collected. Blocks until no destination is written to
        any more. Idempotent.
        """
        self.cancel()
        while self._jobs:
            self._jobs[0].wait()
            self._jobs.popleft()
