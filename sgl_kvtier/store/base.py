"""The page store as the rest of the package sees it: look up, read in a chosen order, put, delete,
close.

`engine.DiskStore` keeps pages; the laboratory has stores in front of one (`lab/front/`). All have
this interface. It speaks of bytes and lengths only: a store knows neither tokens nor tiers
nor why a page moves.

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
"""The pool of ordinary KV pages. Side pools (window or state pages of hybrid models) have other
names.
"""


class ReadOutcome(enum.Enum):
    """How the read of one page ended. Only OK means that the destination holds the page."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    """The bytes on disk are not this page (torn, stale, swapped, damaged); it was dropped."""
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
    """No room, a read-only or full filesystem, an I/O error, or a size that cannot be kept."""


class PageRead(NamedTuple):
    """One page to read. `into`: writable, contiguous byte buffers of its length, filled in turn."""

    key: PageKey
    into: Sequence[memoryview]
    pool: str = KV


class PageWrite(NamedTuple):
    """One page to write. `data`: contiguous byte buffers, written in turn, not kept after `put`."""

    key: PageKey
    data: Sequence[memoryview]
    pool: str = KV
    cost_s: float | None = None
    """Seconds it would take to compute the page again, for the admission filter; None = unknown."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and its present size. Counts of bytes are of payloads,
    except `bytes_on_disk`.
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


class Urgency(enum.IntEnum):
    """Priorities of reads, the most urgent first."""

    NOW = 0
    """Compute and device memory wait for the pages, as those of a restoration."""
    SOON = 1
    """A request that waits will need them."""
    AHEAD = 2
    """No request needs them yet."""
    LAST = 3
    """When nothing else is to be read. It is no use of a page: it leaves as soon as without it."""


class ReadJob(Protocol):
    """An ordered read in flight. Pages are begun in the given order, and finish in any order.

    Until `in_flight` is 0 the store may still write into destinations: do not reuse their memory
    before that, even after `cancel`. All methods may be called from any thread.
    """

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        """One entry per page in the order of the call; None while it is open. Like `done`, `drain`
        and `wait`, this may write to the disk: damaged pages are dropped before their outcome is
        returned.
        """

    @property
    def in_flight(self) -> int:
        """Pages that were begun and have not ended. Their destinations belong to the store."""

    @property
    def done(self) -> bool:
        """Every page has an outcome and nothing is in flight."""

    def drain(self) -> list[tuple[int, ReadOutcome]]:
        """The (index, outcome) of pages that ended since the last call. Does not block."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until done, or for `timeout_s` seconds; True when done."""

    def cancel(self) -> None:
        """Pages not begun become CANCELLED; others go on. Neither blocks nor does I/O."""


class PageStore(Protocol):
    """Keeps pages. Every method may be called from several threads at once; none raises because the
    disk failed.
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

        Jobs of a lower `priority` number are served first, equal ones in the order of their calls
        (`Urgency` has names for them; a read with `LAST` is no use of its pages).
        A page not begun `deadline_s` seconds from now is LATE. `on_page(index, outcome)` is called
        once per page from an I/O thread; pages that are not begun may end on the thread that
        cancels or closes, or within this call.
        """

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """Writes pages; returns when they can be read back. Never rewrites an existing key."""

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        """Drops pages and returns how many there were."""

    def clear(self) -> int:
        """Drops every page of this identity and rank and returns how many there were."""

    def stats(self) -> StoreStats:
        """Counters and size; takes no lock that an I/O operation holds."""

    def close(self) -> None:
        """Ends I/O threads and releases the folder. Reads in flight end first. Idempotent."""
