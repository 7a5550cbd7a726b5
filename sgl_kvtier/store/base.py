"""The page store as the rest of the package sees it: look up, read in a chosen order, put, delete,
close.

`engine.DiskStore` keeps pages; the laboratory has stores in front of one (`lab/front/`). All have
this interface. It speaks of bytes and lengths only: a store knows neither tokens nor tiers
nor why a page moves.

The promise: a page that is returned is byte-identical to the page put under that key, pool and
identity, or it is a miss. Pages may be lost; a wrong page is never returned; no call raises because
the disk failed.

A page of the store on disk that `put` answered STORED stays until it is deleted, damaged on the
device, or evicted: by its owner, to stay within the capacity or for a newer page (also where there
is capacity, but no space on the filesystem or no descriptor for another segment), and once its
folder has no owner, also by another owner that needs room. Until then it is found

- by the process that put it, from the answer on;
- by another owner of the same pages that is open on this host, from its next look on: within 0.1 s
  (1 s for an owner that was alone until then), or when its `follow` returns;
- by a store that is opened later, when `open_store` returns;
- after its owner was killed, as before: page and index record are with the kernel before STORED is
  answered;
- after a power loss, where `store.durable` is set. Without it, it may be lost.

Exceptions, each a miss and never a wrong page:

- KEPT says that the page was there at that moment, perhaps in another owner's folder. It lives as
  long as that copy, which may be one that an owner deleted or evicted less than 0.1 s ago.
- A page that this process is putting itself is `Lookup.PENDING`, and a read misses it, until that
  put is answered, also where another owner has it.
- Of a page that several owners wrote, each has a copy. When one goes, the next look finds another
  (within 1 s where more than 4,096 copies wait).
- A put that overlaps a delete or clear of its page, by any owner, may be dropped by it. So may one
  that another owner begins before it has seen the delete (0.1 s) while the clock of the host is
  behind the newest page.
- Pages in a segment that cannot be opened, for want of descriptors or because of the device, are
  not found by this process in this life. In another owner's folder they are found as soon as the
  segment can be opened. Meanwhile they are neither lost nor, once deleted, found again.
- Where the index record cannot be written, as on a full disk, an owner with siblings answers
  REFUSED until the log is made anew: with the first put that comes 10 s after the last try. A store
  without siblings answers STORED, and finds the page.
- While the clock is more than a year behind the newest page, that page is passed over, and
  forgotten by an opening.

A page whose `delete` or `clear` was answered is not found again: not by this process in any folder,
not by a store that is opened later, and not by another owner after its next look. That holds after
a kill; after a power loss with `store.durable`. Pages of other owners are counted in the answer
only if their owners could be told. Where they could not (full disk, no descriptors, folder moved),
it is tried again every second and when the store is closed; it does not hold for them if the
process is killed before that, nor if a folder is moved away and back after this store was closed.
An opening that cannot read another owner's list of deletes for want of descriptors waits 1 s for
it; then it may find what is on that list until it can be read.
"""

from __future__ import annotations

import enum
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from sgl_kvtier.types import Lookup, PageKey

KV = "kv"
"""The pool of ordinary KV pages. Side pools (window or state pages of hybrid models) have other
names.
"""


MOST_PRIORITY: Final = (1 << 31) - 1


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
    NOT_ADMITTED = "not admitted"
    """A first offer, with `store.admission` = second-hit: written when it is offered again."""
    REFUSED = "refused"
    """No room, a read-only or full filesystem, an I/O error, or a size that cannot be kept."""

    @property
    def is_there(self) -> bool:
        """The store has the page."""
        return self in (PutOutcome.STORED, PutOutcome.KEPT)


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


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and its present size. Counts of bytes are of payloads,
    except `bytes_on_disk`.
    """

    pages: int = 0
    pages_retained: int = 0
    bytes_on_disk: int = 0
    capacity_bytes: int = 0
    pages_read: int = 0
    bytes_read: int = 0
    pages_written: int = 0
    bytes_written: int = 0
    bytes_written_to_device: int = 0
    pages_kept: int = 0
    pages_not_admitted: int = 0
    pages_refused: int = 0
    pages_evicted: int = 0
    pages_missed: int = 0
    pages_corrupt: int = 0
    reads_failed: int = 0
    reads_late: int = 0
    reads_cancelled: int = 0
    follow_failures: int = 0
    """Looks at siblings' folders that ended with an unexpected exception and were tried again."""
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


def checked_read(
    priority: int, deadline_s: float | None, on_page: object
) -> tuple[int, float | None]:
    """The priority and deadline of a read in a range that every clock and queue takes. A deadline
    farther away than `threading.TIMEOUT_MAX` is none. Raises TypeError or ValueError.
    """
    try:
        priority = operator.index(priority)
    except TypeError:
        raise TypeError(
            f"the priority of a read is a whole number, not {type(priority).__name__}"
        ) from None
    if not -MOST_PRIORITY <= priority <= MOST_PRIORITY:
        raise ValueError(
            f"the priority of a read is a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        )
    if on_page is not None and not callable(on_page):
        raise TypeError(f"on_page is a function, not {type(on_page).__name__}")
    if deadline_s is None:
        return priority, None
    if not isinstance(deadline_s, (int, float)):
        raise TypeError(f"deadline_s is a number of seconds, not {type(deadline_s).__name__}")
    if deadline_s != deadline_s:
        raise ValueError("deadline_s is a number of seconds, not NaN")
    # Half: a clock's present time is added.
    return priority, None if deadline_s > threading.TIMEOUT_MAX / 2 else max(0.0, deadline_s)


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
        A page not begun `deadline_s` seconds from now is LATE; 0 or less: now. `on_page(index,
        outcome)` is called once per page from an I/O thread; pages that are not begun may end on
        the thread that cancels or closes, or within this call. A callback may call every method
        of the store, `close` included, and cancel and query jobs, but must not wait for a read
        without a limit (RuntimeError): all reads with callbacks may share its thread. So it should
        be short. What it raises, SystemExit too, is logged, and the page ends as it ended.

        Raises TypeError or ValueError where an argument has a wrong type or value: then nothing
        was begun.
        """

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """Writes pages; returns when they can be read back, as the promise above says by whom.
        Never rewrites an existing key.
        """

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        """Evicts all other pages before these, in every pool and also where they are written only
        later, until `seconds` from now or until this process ends. Pages of all owners may take
        half of the store's bytes: returns how many of `keys` are retained, the first ones. A new
        call takes the place of the owner's last one; 0 seconds end it.
        """

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        """Drops pages and returns how many there were, without those of other owners that could not
        be told yet. They are not found or read by this store any more. A store that servers share
        may remove its copies later, see `tiered.store`.
        """

    def clear(self) -> int:
        """Drops every page of this identity and rank, as `delete` does."""

    def stats(self) -> StoreStats:
        """Counters and size; takes no lock that an I/O operation holds."""

    def close(self) -> None:
        """Ends I/O threads and releases the folder. Reads in flight end first. Idempotent."""
