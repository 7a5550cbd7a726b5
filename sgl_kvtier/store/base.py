"""The page store as the rest of the package sees it: look up, read in an order you choose, put,
delete, close.

Everything that keeps pages (`engine.DiskStore`) or stands in front of one (`wrappers.Throttled`,
`wrappers.Faulty`) has this interface. Bytes and lengths only: a store knows neither tokens nor
tiers nor why a page moves.

The promise: a page that is returned is byte-identical to the page put under that key, pool and
identity, or it is a miss. Pages may be lost; a wrong page is never returned; no call raises because
the disk failed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sgl_kvtier.types import Lookup, PageKey

KV = "kv"
"""The pool of ordinary KV pages. Side pools (window or state pages of hybrid models) have names of
their own.
"""


class ReadOutcome(enum.Enum):
    """How the read of one page ended. Only OK means that the destination holds the page."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    """The bytes on disk are not the page asked for (torn, stale, swapped or damaged); the entry has
    been dropped.
    """
    FAILED = "failed"
    """The device reported an error."""
    LATE = "late"
    """Not begun before its deadline."""
    CANCELLED = "cancelled"


class PutOutcome(enum.Enum):
    """How the write of one page ended."""

    STORED = "stored"
    KEPT = "kept"
    """The key was there already: nothing was written."""
    REFUSED = "refused"
    """No room, a read-only or full filesystem, an I/O error, or a page of a size that cannot be
    kept.
    """


class PageRead(NamedTuple):
    """One page to read. `into` are writable, contiguous byte buffers filled in turn; their total is
    the page's length.
    """

    key: PageKey
    into: Sequence[memoryview]
    pool: str = KV


class PageWrite(NamedTuple):
    """One page to write. `data` are contiguous byte buffers written in turn; they are not kept
    after `put` returns.
    """

    key: PageKey
    data: Sequence[memoryview]
    pool: str = KV
    cost_s: float | None = None
    """What it would take to compute the page again, for the admission filter; None = nobody knows.
    """


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and its present size. Bytes are payload bytes but for
    `bytes_on_disk`.
    """

    pages: int = 0
    bytes_on_disk: int = 0
    capacity_bytes: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    pages_written: int = 0
    bytes_written: int = 0
    bytes_written_to_device: int = 0
    pages_kept: int = 0
    pages_refused: int = 0
    pages_evicted: int = 0
    pages_missed: int = 0
    pages_corrupt: int = 0
    reads_failed: int = 0
    reads_late: int = 0
    reads_cancelled: int = 0
    read_busy_s: float = 0.0
    write_busy_s: float = 0.0
    open_s: float = 0.0
    """Seconds since the store was opened."""

    @property
    def write_amplification(self) -> float:
        """Bytes the device was given per payload byte kept; 1 is the least."""
        return self.bytes_written_to_device / self.bytes_written if self.bytes_written else 1.0

    @property
    def bytes_written_per_day(self) -> float:
        """What the device would be given in a day at this rate: compare it with the drive's
        endurance rating.
        """
        return self.bytes_written_to_device / self.open_s * 86_400 if self.open_s else 0.0


class ReadJob(Protocol):
    """An ordered read under way. Pages are begun in the order given, and finish in any order.

    Until `in_flight` is 0 the store may still write into destinations: do not reuse their memory
    before that, also after `cancel`. All methods may be called from any thread.
    """

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        """One entry per page in the order asked for; None while it is open. Like `done`, `drain`
        and `wait`, this may write to the disk where pages have ended that are damaged: they are
        dropped before anybody sees it.
        """

    @property
    def in_flight(self) -> int:
        """Pages that were begun and have not ended. Their destinations belong to the store."""

    @property
    def done(self) -> bool:
        """Every page has an outcome and nothing is in flight."""

    def drain(self) -> list[tuple[int, ReadOutcome]]:
        """The (index, outcome) of pages that ended since the last call. Waits for no page."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until done or until the time is over; True when done."""

    def cancel(self) -> None:
        """Pages not begun become CANCELLED; those begun go on to their end. Waits for no page and
        does no I/O.
        """


class PageStore(Protocol):
    """What keeps pages. Every method may be called from several threads at once and none raises for
    a disk's sake.
    """

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        """One answer per key, from memory: no disk access."""

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> ReadJob:
        """Begins reading pages in the given order and returns at once.

        Jobs of a lower `priority` number are served first, equal ones in the order of their calls.
        A page not begun `deadline_s` seconds from now is LATE. `on_page(index, outcome)` is called
        once per page from an I/O thread; pages that are not begun may end on the thread that
        cancels or closes, or within this call.
        """

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """Writes pages and returns when they can be read back. An existing key is never rewritten."""

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        """Drops pages and returns how many there were."""

    def clear(self) -> int:
        """Drops every page of this identity and rank and returns how many there were."""

    def stats(self) -> StoreStats:
        """Counters and size; takes no lock that an I/O operation holds."""

    def close(self) -> None:
        """Ends the I/O threads and releases the directory. Reads under way end first. Idempotent."""
