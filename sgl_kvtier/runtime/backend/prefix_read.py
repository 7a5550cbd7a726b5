"""SGLang's read of one prefix into host memory, 128 pages a call, with the next pages already in
flight.

SGLang's I/O thread calls `batch_get_v1` for one batch after the other. Without read-ahead, the
device was idle between two calls until that thread had the GIL again: 5 ms or more each time, next
to a busy scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sgl_kvtier.store.base import ReadJob, ReadOutcome
from sgl_kvtier.store.io.read_ahead import ReadAhead


def read_or_given_up(outcomes: Sequence[ReadOutcome | None]) -> bool:
    """Whether all these pages were read, or cancelled by their reader. Cancelled reads count, since
    a slow store shows in them.
    """
    return all(outcome in (ReadOutcome.OK, ReadOutcome.CANCELLED) for outcome in outcomes)


class PrefixRead:
    """Reads the pages `keys` into `host_slots`, in this order. One thread, except `cancel`.

    `begin(keys, host_slots)` starts reading some of them. The slots of started pages belong to the
    store until `close` returns.
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
        """Whether its duration shows how fast the store is: every page requested so far was read,
        or cancelled by the caller.
        """
        self.seconds = 0.0
        """From the beginning of the first call to the end of the last."""
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
        """Whether these pages follow those read so far, and go to the slots given at the start."""
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
        """Cancels pages not started, also those requested later. Any thread."""
        self._ahead.cancel()

    def close(self) -> None:
        """Cancels reads that nobody requested; returns when no I/O touches any slot."""
        self._ahead.close()

    def _slots_of(self, first: int, last: int) -> torch.Tensor:
        return self._slots[first * self._per_page : last * self._per_page]
