"""A store of two tiers: the local disk first, then the remote store."""

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
"""Seconds within which one write counts as following another."""
_FULL = 0.9
"""Fraction of the local capacity from which on evictions are near. From then on (on-evict), at most
this fraction of the local pages may be unsent.
"""


@dataclass(frozen=True, slots=True)
class TieredStats:
    """Counters of the remote store, and of pages moved between the two tiers."""

    remote: StoreStats
    usable: bool
    """Whether the remote store responds."""
    child_starts: int
    """How often the process that runs its engine was started."""
    kept: int
    """Pages read from the remote store and written to the local one."""
    uploaded: int
    refused: int
    """Pages that the remote store refused."""
    uploads_waiting: int
    uploads_dropped: int
    calls_late: int
    """Puts, deletes and clears that returned before the remote store had completed them."""
    removals_waiting: int
    """Pages deleted here that the remote store may still have; a clear counts as one."""


class TieredStore:
    """A `PageStore` over two stores, which it owns from now on.

    `put` returns the local store's outcomes: remote errors fail no write. A page that can be read
    from neither store has a normal outcome.
    """

    def __init__(self, local: PageStore, remote: RemoteStore, write: str = "all") -> None:
        """`write`: which pages are uploaded for other servers (`upload.Uploader`)."""
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
        """Whether each page is on the local disk, from which it would be read. No disk access."""
        return [answer is Lookup.HIT for answer in self._local.lookup(keys, pool)]

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        keys = list(keys)
        answers = self._local.lookup(keys, pool)
        return self._with_remote(answers, _not_here(answers), keys, pool)

    def find(
        self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float = 0.02
    ) -> list[Lookup]:
        """`lookup` after querying the remote store for all pages that are not local. Waits for at
        most `timeout_s`; the next look-up sees a result that comes later.
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
        # Every page that is not local may be remote: a page may be read long after it was found.
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
        """Retains pages on the local disk only."""
        return self._local.retain(owner, keys, seconds)

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        """Drops pages in both tiers. Returns how many local ones there were, or remote ones if
        more.

        This server uses none of them from now on. If the remote store does not respond in time, its
        pages are removed in the background; if the process ends before that, they stay there.
        """
        keys = list(keys)
        self._local.lookup(keys, pool)  # raises for invalid arguments before anything is hidden
        here = 0

        def drop_here() -> None:
            nonlocal here
            self._keeper.forget()
            here = self._local.delete(keys, pool)
            self._uploader.forget(keys, pool)

        there = self._remote.delete(keys, pool, drop_here)
        return max(here, there)

    def clear(self) -> int:
        """`delete` for every page of this identity and rank in both tiers, for all servers."""
        here = 0

        def drop_here() -> None:
            nonlocal here
            self._keeper.forget()
            here = self._local.clear()
            self._uploader.forget()

        there = self._remote.clear(drop_here)
        return max(here, there)

    def stats(self) -> StoreStats:
        """The local store's counters."""
        return self._local.stats()

    def tiered_stats(self) -> TieredStats:
        """Counters of the remote store and of pages moved. Takes no lock that I/O holds."""
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
        """Blocks until no page waits to be kept or sent, at most `timeout_s`. Returns whether that
        is so.
        """
        return self._keeper.settle(timeout_s) and self._uploader.settle(timeout_s)

    def close(self) -> None:
        self._uploader.stop()
        self._remote.close()  # ends calls that the uploader waits for
        self._uploader.close()
        self._keeper.close()
        self._local.close()

    def _most_unsent(self) -> float:
        """How many local pages may be unsent. Once the disk is full, a tenth must have been sent:
        those that are evicted next.
        """
        stats = self._local.stats()
        full = stats.bytes_on_disk >= _FULL * stats.capacity_bytes
        return _FULL * stats.pages if full else math.inf

    def _writing(self) -> bool:
        return self._writes > 0 or time.monotonic() < self._wrote_at + _ROW_S

    def _split(self, pages: Sequence[PageRead]) -> tuple[list[int], list[int]]:
        """Indexes of local pages, and of the others."""
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
            # The local part is in flight already, so this part has to end as a job too.
            logger.exception("kvtier: pages could not be read from the remote store")
            failed = OrderedJob(len(there), None, ended)
            failed.end_rest(ReadOutcome.FAILED)
            return failed

    def _with_remote(
        self, answers: list[Lookup], missing: list[int], keys: Sequence[PageKey], pool: str
    ) -> list[Lookup]:
        """Adds hits that are known of the remote store."""
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
