"""A store of two: the local disk first, then pages of other servers."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadJob,
    ReadOutcome,
    StoreStats,
    checked_read,
)
from sgl_kvtier.store.index.columns import columns_of
from sgl_kvtier.store.io.jobs import OrderedJob
from sgl_kvtier.store.tiered.job import TwoJobs
from sgl_kvtier.store.tiered.keeping import Keeper
from sgl_kvtier.store.tiered.remote import RemoteStore
from sgl_kvtier.store.tiered.upload import Name, Uploader
from sgl_kvtier.store.writes import pool_names
from sgl_kvtier.tenants import parted
from sgl_kvtier.types import Lookup, PageKey

logger = logging.getLogger(__name__)

OnPage = Callable[[int, ReadOutcome], None]
_ROW_S = 0.01
"""A write that follows another within this time is one of a row."""
_FULL = 0.9
"""Share of the local store's capacity from which on pages are about to leave it, and then of its
pages that are not sent yet (on-evict).
"""


@dataclass(frozen=True, slots=True)
class TieredStats:
    """What the remote store did, and what moved between the two."""

    remote: StoreStats
    usable: bool
    """Whether the remote store answers now."""
    child_starts: int
    """How often the process that has its engine was started."""
    kept: int
    """Pages that came from the remote store and were written here."""
    uploaded: int
    refused: int
    """Pages the remote store did not take."""
    uploads_waiting: int
    uploads_dropped: int
    calls_late: int
    """Puts, deletes and clears that returned before the remote store had done them."""
    removals_waiting: int
    """Pages that were deleted here and that the remote store may still have; a clear counts as
    one.
    """


class TieredStore:
    """A `PageStore` over two; both belong to it from now on.

    What a write says is what the local store says: trouble of the remote one costs no write. A page
    that cannot be read from either is a plain outcome.
    """

    def __init__(self, local: PageStore, remote: RemoteStore, write: str = "all") -> None:
        """`write`: which pages other servers shall find (`upload.Uploader`)."""
        self._local = local
        self._remote = remote
        self._lock = threading.Lock()
        self._remote_pages = 0
        self._writes = 0
        self._wrote_at = -math.inf
        self._keeper = Keeper(local)
        self._uploader = Uploader(
            local,
            remote,
            write,
            lambda: self._remote_pages > 0,
            self._writing,
            most_unsent=self._most_unsent,
        )

    @property
    def local(self) -> PageStore:
        """The store on local disk."""
        return self._local

    @property
    def remote(self) -> RemoteStore:
        """The store that servers share."""
        return self._remote

    def own(self, keys: Sequence[PageKey], pool: str = KV) -> list[bool]:
        """Which pages are on the local disk: these are read from there. No disk access."""
        return [answer is Lookup.HIT for answer in self._local.lookup(keys, pool)]

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        keys = list(keys)
        answers = self._local.lookup(keys, pool)
        return self._with_remote(answers, _not_here(answers), keys, pool)

    def find(
        self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float = 0.02
    ) -> list[Lookup]:
        """Like `lookup`, after the remote store was asked about all pages that are not here. Waits
        at most `timeout_s` for it; an answer that comes later is known to the next look-up.
        """
        keys = list(keys)
        answers = self._local.lookup(keys, pool)
        missing = _not_here(answers)
        if missing:
            self._remote.ask([keys[i] for i in missing], pool, timeout_s)
        return self._with_remote(answers, missing, keys, pool)

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: OnPage | None = None,
    ) -> ReadJob:
        priority, deadline_s = checked_read(priority, deadline_s, on_page)
        pool_names(columns_of(pages))
        # Whatever is not here may be there: a page that was found may be read much later.
        here, there = self._split(pages)
        self._uploader.read(_name_of(pages[i]) for i in here)
        if not there:
            return self._local.read(
                pages, priority=priority, deadline_s=deadline_s, on_page=on_page
            )
        jobs: list[ReadJob] = []
        if here:
            jobs.append(
                self._local.read(
                    [pages[i] for i in here],
                    priority=priority,
                    deadline_s=deadline_s,
                    on_page=_at(here, on_page),
                )
            )
        jobs.append(self._read_remote(pages, there, priority, deadline_s, on_page))
        return TwoJobs(jobs, [here, there]) if here else jobs[0]

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        with self._lock:
            self._writes += 1
        try:
            outcomes = self._local.put(pages)
        finally:
            with self._lock:
                self._writes -= 1
                self._wrote_at = time.monotonic()
        self._uploader.written(
            Name(page[0], parted(page[2])[0], sum(memoryview(part).nbytes for part in page[1]))
            for page, outcome in zip(pages, outcomes, strict=True)
            if outcome.is_there
        )
        return outcomes

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        """On this server's disk alone."""
        return self._local.retain(owner, keys, seconds)

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        """Drops pages in both; counts those here, or there where it had more.

        This server uses none of them from now on. Where the remote store does not answer in time,
        its pages are removed in the background; a process that ends before leaves them there.
        """
        keys = list(keys)
        self._local.lookup(keys, pool)  # raises before anything is hidden
        here = 0

        def drop_here() -> None:
            nonlocal here
            self._keeper.forget()
            here = self._local.delete(keys, pool)
            self._uploader.forget(keys, pool)

        there = self._remote.delete(keys, pool, drop_here)
        return max(here, there)

    def clear(self) -> int:
        """Drops every page of this identity and rank in both, for all servers, as `delete` does.
        Counts those here, or there where it had more.
        """
        here = 0

        def drop_here() -> None:
            nonlocal here
            self._keeper.forget()
            here = self._local.clear()
            self._uploader.forget()

        there = self._remote.clear(drop_here)
        return max(here, there)

    def stats(self) -> StoreStats:
        """Of the local store."""
        return self._local.stats()

    def tiered_stats(self) -> TieredStats:
        """Of the remote store and of what moved between the two. Takes no lock of an I/O."""
        return TieredStats(
            self._remote.stats(),
            self._remote.usable,
            self._remote.child_starts,
            self._keeper.kept,
            self._uploader.sent,
            self._uploader.refused,
            self._uploader.waiting,
            self._uploader.dropped,
            self._remote.calls_late,
            self._remote.removals_waiting,
        )

    def settle(self, timeout_s: float) -> bool:
        """Blocks until nothing waits to be kept or sent, or the time is over; whether nothing
        does.
        """
        return self._keeper.settle(timeout_s) and self._uploader.settle(timeout_s)

    def close(self) -> None:
        self._uploader.stop()
        self._remote.close()  # ends what the uploader waits for
        self._uploader.close()
        self._keeper.close()
        self._local.close()

    def _most_unsent(self) -> float:
        """Of a full disk a tenth is sent, so that what leaves it next has been."""
        stats = self._local.stats()
        full = stats.bytes_on_disk >= _FULL * stats.capacity_bytes
        return _FULL * stats.pages if full else math.inf

    def _writing(self) -> bool:
        return self._writes > 0 or time.monotonic() < self._wrote_at + _ROW_S

    def _split(self, pages: Sequence[PageRead]) -> tuple[list[int], list[int]]:
        """Indexes of pages that are here, and of the others."""
        by_pool: dict[str, list[int]] = {}
        for index, page in enumerate(pages):
            by_pool.setdefault(page[2], []).append(index)
        missing: list[int] = []
        for pool, indexes in by_pool.items():
            answers = self._local.lookup([pages[i][0] for i in indexes], pool)
            missing += [indexes[i] for i in _not_here(answers)]
        if not missing:
            return list(range(len(pages))), []
        there = set(missing)
        return [i for i in range(len(pages)) if i not in there], sorted(there)

    def _read_remote(
        self,
        pages: Sequence[PageRead],
        there: list[int],
        priority: int,
        deadline_s: float | None,
        on_page: OnPage | None,
    ) -> ReadJob:
        epoch = self._keeper.epoch

        def ended(position: int, outcome: ReadOutcome) -> None:
            index = there[position]
            with self._lock:
                self._remote_pages -= 1
            try:
                if outcome is ReadOutcome.OK:
                    self._keeper.take(pages[index], epoch)
            finally:
                if on_page is not None:
                    on_page(index, outcome)

        with self._lock:
            self._remote_pages += len(there)
        try:
            return self._remote.read(
                [pages[i] for i in there], priority=priority, deadline_s=deadline_s, on_page=ended
            )
        except Exception:
            # The local part is in flight already: it has to end as a job, and so does this one.
            logger.exception("kvtier: pages could not be read from the remote store")
            failed = OrderedJob(len(there), None, ended)
            failed.end_rest(ReadOutcome.FAILED)
            return failed

    def _with_remote(
        self, answers: list[Lookup], missing: list[int], keys: Sequence[PageKey], pool: str
    ) -> list[Lookup]:
        """The answers with what is known of the remote store."""
        if missing:
            known = self._remote.lookup([keys[i] for i in missing], pool)
            for index, answer in zip(missing, known, strict=True):
                if answer is Lookup.HIT:
                    answers[index] = answer
        return answers


def _not_here(answers: Sequence[Lookup]) -> list[int]:
    return [i for i, answer in enumerate(answers) if answer is not Lookup.HIT]


def _at(places: Sequence[int], on_page: OnPage | None) -> OnPage | None:
    if on_page is None:
        return None
    return lambda position, outcome: on_page(places[position], outcome)


def _name_of(page: PageRead) -> Name:
    return Name(page[0], page[2], sum(memoryview(part).nbytes for part in page[1]))
