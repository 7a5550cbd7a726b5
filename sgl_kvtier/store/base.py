"""The interface of every page store: look up, read in a chosen order, put, delete, close.

`engine.DiskStore` implements it on disk; the laboratory has wrappers around a store (`lab/front/`).
A store handles keys, pools and bytes. It knows neither tokens nor tiers nor why a page moves.

The guarantee: a page that is returned is byte-identical to the page put under that key, pool and
identity; otherwise the read is a miss. Pages may be lost. A wrong page is never returned, and no
call raises because the disk failed.

Once `put` has returned STORED, the store on disk keeps the page until it is deleted, damaged on the
device, or evicted. Its owner evicts it to stay within the capacity, or for a newer page (even below
the capacity, if the filesystem is full or no descriptor is left for another segment). If its folder
has no owner, another owner that needs space may evict it too. Until then the page is found

- by the process that put it, as soon as `put` returns;
- by another owner of the same pages that is running on this host, at its next poll (within 0.1 s,
  or within a second if that owner was alone until then), or when its `follow` returns;
- by a store that is opened later, when `open_store` returns;
- after its owner was killed: the kernel has page and index record before `put` returns STORED;
- after a power loss, if `store.durable` is set. Otherwise the page may be lost.

Exceptions, each of which is a miss and never a wrong page:

- KEPT means that the page was there at that moment, perhaps in another owner's folder. It lives as
  long as that copy, which its owner may have deleted or evicted up to 0.1 s ago.
- While this process puts a page, `lookup` returns `Lookup.PENDING` and a read misses it, even if
  another owner has it.
- If several owners wrote a page, each has a copy. When one copy goes, the next poll finds another
  (within 1 s if more than 4,096 copies wait).
- A put that overlaps a delete or clear of its page, by any owner, may be dropped by it. The same
  holds for a put that another owner begins before it has seen the delete (0.1 s) if the host's
  clock is behind the newest page.
- If a segment cannot be opened, for lack of descriptors or because of the device, this process does
  not find its pages until it is restarted. Pages in another owner's folder are found once the
  segment can be opened. Such pages are not lost, and a delete of them holds.
- If the index record cannot be written, for example on a full disk, an owner with siblings returns
  REFUSED until the log is rewritten: by the first put at least 10 s after the last attempt. A store
  without siblings returns STORED, and finds the page.
- While the clock is more than a year behind the newest page, that page is ignored, and the next
  open forgets it.

Once `delete` or `clear` has returned, the page is not found again: not by this process in any
folder, not by a store that is opened later, and not by another owner after its next poll. This
holds after a kill, and after a power loss with `store.durable`. The returned count includes pages
of other owners only if those owners could be notified. If they could not (full disk, no
descriptors, folder moved), the store retries every second and when it is closed. For their pages
the delete does not hold if the process is killed before a retry succeeds, or if a folder is moved
away and back after this store was closed. An `open_store` that lacks descriptors to read another
owner's list of deletes waits 1 s for it; after that it may find pages on the list until it has read
it.
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
"""The pool of ordinary KV pages. Side pools (window or state pages) have other names."""


MOST_PRIORITY: Final = (1 << 31) - 1


class ReadOutcome(enum.Enum):
    """How the read of one page ended. Only OK means that the destination holds the page."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    """The bytes on disk are not this page (torn, stale, swapped, damaged). It was dropped."""
    FAILED = "failed"
    """The device reported an error."""
    LATE = "late"
    """The read of the page had not begun by its deadline."""
    CANCELLED = "cancelled"


class PutOutcome(enum.Enum):
    """How the write of one page ended."""

    STORED = "stored"
    KEPT = "kept"
    """The key was there already: nothing was written."""
    NOT_ADMITTED = "not admitted"
    """The first put of a page with `store.admission` = second-hit. The second put writes it."""
    REFUSED = "refused"
    """No space, a read-only or full filesystem, an I/O error, or a size that cannot be stored."""

    @property
    def is_there(self) -> bool:
        """The store has the page."""
        return self in (PutOutcome.STORED, PutOutcome.KEPT)


class PageRead(NamedTuple):
    """One page to read. `into`: writable, contiguous byte buffers that the page is read into, in
    order. Together they have the page's length.
    """

    key: PageKey
    into: Sequence[memoryview]
    pool: str = KV


class PageWrite(NamedTuple):
    """One page to write. `data`: contiguous byte buffers, written in order, unused after `put`."""

    key: PageKey
    data: Sequence[memoryview]
    pool: str = KV


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and its current size. Byte counts are of payloads,
    except `bytes_on_disk`, `capacity_bytes` and `bytes_written_to_device`.
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
    """Polls of siblings' folders that ended with an unexpected exception and were retried."""
    read_busy_s: float = 0.0
    write_busy_s: float = 0.0
    open_s: float = 0.0
    """Seconds since the store was opened."""


class Urgency(enum.IntEnum):
    """Priorities of reads, the most urgent first."""

    NOW = 0
    """Compute and device memory wait for the pages, for example in a restoration."""
    SOON = 1
    """A queued request will need them."""
    AHEAD = 2
    """Prefetch: no request needs them yet."""
    LAST = 3
    """Background: read when no other read waits. It is not counted as a use of the page."""


def checked_read(
    priority: int, deadline_s: float | None, on_page: object
) -> tuple[int, float | None]:
    """Validates the arguments of a read. Returns priority and deadline within the range that every
    clock and queue accepts; a deadline beyond `threading.TIMEOUT_MAX` / 2 becomes None. Raises
    TypeError or ValueError.
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
    # Half, because the clock's current time is added to it.
    return priority, None if deadline_s > threading.TIMEOUT_MAX / 2 else max(0.0, deadline_s)


class ReadJob(Protocol):
    """An ordered read in flight. Pages are begun in the given order and finish in any order.

    Until `in_flight` is 0 the store may still write to the destinations: do not reuse their memory
    before that, even after `cancel`. All methods may be called from any thread.
    """

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        """One entry per page in the order of the call; None until the page has ended. Like `done`,
        `drain` and `wait`, this may write to the disk: damaged pages are dropped before their
        outcome is returned.
        """

    @property
    def in_flight(self) -> int:
        """Pages that were begun and have not ended. The store owns their destinations."""

    @property
    def done(self) -> bool:
        """Every page has an outcome and nothing is in flight."""

    def drain(self) -> list[tuple[int, ReadOutcome]]:
        """The (index, outcome) of pages that ended since the last call. Does not block."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until done, at most `timeout_s` seconds. Returns whether it is done."""

    def cancel(self) -> None:
        """Pages not begun become CANCELLED; those in flight go on. Neither blocks nor does I/O."""


class PageStore(Protocol):
    """A store of pages. Every method may be called from several threads at once. None raises
    because the disk failed.
    """

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        """The state of each key, from memory: no disk access."""

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
        `Urgency` names the priorities; a read with `LAST` does not count as a use of its pages. A
        page that has not begun `deadline_s` seconds from now is LATE; 0 or less means now.

        `on_page(index, outcome)` is called once per page from an I/O thread. For pages that never
        began it may be called on the thread that cancels or closes, or within this call. A callback
        may call every method of the store, including `close`, and may cancel and query jobs. It
        must not wait for a read without a timeout (RuntimeError), because all reads with callbacks
        may share its thread; for the same reason it should be short. An exception in a callback,
        including SystemExit, is logged and does not change the page's outcome.

        Raises TypeError or ValueError for an invalid argument; nothing was begun then.
        """

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """Writes pages and returns when they can be read back (see the guarantee above for which
        processes). Never rewrites an existing key.
        """

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        """Protects pages from eviction until `seconds` from now or until this process ends: in
        every pool all other pages are evicted first, even if a page is written only later.

        The retained pages of all `owner`s (any text, such as a session's name) may take half of the
        store's bytes. Returns how many of `keys`, counted from the first, are retained. A new call
        replaces the owner's previous one; 0 seconds end it.
        """

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        """Drops pages and returns how many there were, except those of other owners that could not
        be notified yet. This store neither finds nor reads them any more. A store that servers
        share may remove its copies later (`tiered.store`).
        """

    def clear(self) -> int:
        """Drops every page of this identity and rank, as `delete` does."""

    def stats(self) -> StoreStats:
        """Counters and size; takes no lock that an I/O operation holds."""

    def close(self) -> None:
        """Waits for reads in flight, ends the I/O threads and releases the folder. Idempotent."""
