"""Read-ahead for a list of pages: the next piece is in flight during the wait for the current one.

A Python caller that reads 128 pages, waits, and only then requests the next 128 leaves the device
idle in between: for 0.5 ms, or for 5 ms and more next to a busy Python thread. Requesting pages
ahead hides that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sgl_kvtier.store.base import ReadJob, ReadOutcome

AHEAD_BYTES = 32 << 20
"""Bytes requested beyond the pages waited for: what a device with 6.4 GB/s reads in 5 ms. Other
reads may have to wait for that much more.
"""


class ReadAhead:
    """The pages [0, count) of one read, collected in order. One thread, except `cancel`.

    `begin(first, last)` begins reading the pages [first, last). The store owns the destinations of
    begun pages until `collect` has returned them or `close` has returned. `close` must be called.
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
        """Waits for the next `count` pages and returns their outcomes. Read-ahead of later pages
        begins before the wait.
        """
        first, last = self._collected, min(self._collected + count, self._count)
        until = min(last + self._ahead, self._count)
        while self._begun < until:
            # In pieces of the size in which they are collected, so that none waits for the end of a
            # larger one.
            stop = last if self._begun < last else min(until, self._begun + count)
            self._jobs.append(self._begin(self._begun, stop))
            self._begun = stop
            if self._cancelled:
                self._jobs[-1].cancel()
        while len(self._ended) < last - first:
            self._jobs[0].wait()
            self._ended += self._jobs[0].outcomes
            # Only after its outcomes were read, or those of the next job would be taken for them.
            self._jobs.popleft()
        self._collected = last
        found, self._ended = self._ended[: last - first], self._ended[last - first :]
        return found

    def cancel(self) -> None:
        """Pages that have not begun become CANCELLED. Never blocks; any thread."""
        self._cancelled = True
        # From the back, so that no page of a later piece begins after an earlier piece was
        # cancelled.
        for job in reversed(tuple(self._jobs)):
            job.cancel()

    def close(self) -> None:
        """Cancels the rest. Blocks until no destination is written to any more. Idempotent."""
        self.cancel()
        while self._jobs:
            self._jobs[0].wait()
            self._jobs.popleft()
