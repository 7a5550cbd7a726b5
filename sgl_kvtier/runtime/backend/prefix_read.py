"""SGLang's read of one prefix into host memory, 128 pages a call, with the next pages in flight
already.

SGLang's I/O thread calls `batch_get_v1` for one batch after the other. Between two calls the device
had nothing to do until that thread had Python's lock again: 5 ms and more each time beside a busy
scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sgl_kvtier.store.base import ReadJob, ReadOutcome
from sgl_kvtier.store.io.read_ahead import ReadAhead


def read_or_given_up(outcomes: Sequence[ReadOutcome | None]) -> bool:
    """Whether nothing but its reader's will kept any of these pages from being read. A slow store
    shows in reads that are given up.
    """
    return all(outcome in (ReadOutcome.OK, ReadOutcome.CANCELLED) for outcome in outcomes)


class PrefixRead:
    """The pages `keys` that go to `host_slots`, read in this order. One thread, except `cancel`.

    `begin(keys, host_slots)` begins reading some of them. Slots of pages that were begun belong to
    the store until `close` returns.
    """

    def __init__(
        self,
        keys: list[str],
        host_slots: torch.Tensor,
        page_bytes: int,
        begin: Callable[[list[str], torch.Tensor], ReadJob],
    ) -> None:
        self.page_bytes = page_bytes
        self.pages_read = 0
        self.tells = True
        """Its duration says how fast the store is: every page requested so far was read, or given
        up by the caller.
        """
        self.seconds = 0.0
        """From the first call's begin to the last one's end."""
        self._started = 0.0
        self.keys = keys
        self._slots = host_slots
        self._per_page = len(host_slots) // max(1, len(keys))
        self._ahead = ReadAhead(
            lambda first, last: begin(keys[first:last], self._slots_of(first, last)),
            len(keys),
            page_bytes,
        )

    def comes_next(self, keys: list[str], host_slots: torch.Tensor) -> bool:
        """Whether these pages follow those read so far, and go where they were said to go."""
        first = self._ahead.collected
        last = first + len(keys)
        return (
            bool(keys)
            and self.keys[first:last] == keys
            and torch.equal(self._slots_of(first, last), host_slots)
        )

    def read(self, count: int) -> list[bool]:
        """Which of the next `count` pages were read. Returns when no I/O touches their slots."""
        now = time.perf_counter()
        self._started = self._started or now
        outcomes = self._ahead.collect(count)
        self.seconds = time.perf_counter() - self._started
        read = [outcome is ReadOutcome.OK for outcome in outcomes]
        self.pages_read += sum(read)
        self.tells = self.tells and read_or_given_up(outcomes)
        return read

    def cancel(self) -> None:
        """Pages not begun are given up, also those requested later. Any thread."""
        self._ahead.cancel()

    def close(self) -> None:
        """Gives up reads begun and not requested; returns when no I/O touches any slot."""
        self._ahead.close()

    def _slots_of(self, first: int, last: int) -> torch.Tensor:
        return self._slots[first * self._per_page : last * self._per_page]
