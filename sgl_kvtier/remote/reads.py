"""Reads from the engine: jobs by priority, in batches with one call each."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence

from sgl_kvtier.remote.channel import bytes_in_ring, place
from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import Op
from sgl_kvtier.remote.link import Answer, Call, Link
from sgl_kvtier.remote.page import Namespace, can_be_named
from sgl_kvtier.remote.presence import CORRUPT_S, UNREADABLE_S, Presence
from sgl_kvtier.store.base import PageRead, ReadOutcome
from sgl_kvtier.store.io.jobs import Ended, OrderedJob
from sgl_kvtier.types import PageKey

BATCH_PAGES = 16
_BATCH_BYTES = 4 << 20
_BATCHES_IN_RING = 16
"""A call costs a query to the master and some thread switches, which its pages share. The pages of
a call end together, so it gets only a part of a read, and of the ring.
"""
_OUTCOMES = {
    Code.OK: ReadOutcome.OK,
    Code.MISS: ReadOutcome.MISS,
    Code.CORRUPT: ReadOutcome.CORRUPT,
}


def batch_bytes(ring_bytes: int) -> int:
    """Most bytes of a call with several pages."""
    return min(_BATCH_BYTES, ring_bytes // _BATCHES_IN_RING)


Count = Callable[[Ended, Sequence[int]], None]
"""Called with pages that ended and the lengths of all pages of their job."""
Tell = Callable[[], None]


class RemoteReadJob(OrderedJob):
    """An ordered job that begins up to 16 pages and `batch_bytes` of one pool together."""

    def __init__(
        self,
        pages: Sequence[PageRead],
        deadline: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
        count: Count,
        batch_bytes: int,
    ) -> None:
        super().__init__(len(pages), deadline, on_page)
        self.pages = pages
        self.lengths = [sum(part.nbytes for part in page.into) for page in pages]
        self.entered = math.inf
        """The time when it was queued."""
        self._counted_by = count
        self._batch_bytes = batch_bytes

    def upcoming(self) -> range:
        """The pages that `begin` returns next, unless the job is cancelled first."""
        start = self._next
        return range(start, self._run_end(start) if start < self.count else start)

    def _run_end(self, start: int) -> int:
        stop, room = start + 1, self._batch_bytes - self.lengths[start]
        while stop < min(self.count, start + BATCH_PAGES):
            room -= self.lengths[stop]
            if room < 0 or self.pages[stop].pool != self.pages[start].pool:
                break
            stop += 1
        return stop

    def _settle(self, ended: Ended) -> Ended:
        self._counted_by(ended, self.lengths)
        return ended


class Reader:
    """The read queue of one link. Any thread; callbacks are called without the link's lock."""

    def __init__(
        self, link: Link, namespace: Namespace, presence: Presence, deadline_s: float
    ) -> None:
        self._link = link
        self._namespace = namespace
        self._presence = presence
        self._deadline_s = deadline_s
        self._queue: list[tuple[int, int, RemoteReadJob]] = []
        self._order = itertools.count()
        self._under_way = 0
        self._came = -math.inf
        """When the engine last returned a page or reported that one is missing or damaged."""

    def enter(self, job: RemoteReadJob, priority: int) -> None:
        """Queues a job and begins what fits. Does not block."""
        now = time.monotonic()
        job.entered = now
        with self._link.lock:
            heapq.heappush(self._queue, (priority, next(self._order), job))
        self._pump(now)
        if not job.exhausted:
            self._link.wake_before(self._end(job))

    def tend(self, now: float) -> float:
        """Ends jobs that are late and begins what fits. Returns when the next job is late."""
        for job in self._jobs():
            if (rest := self._rest(job, now)) is not None:
                job.end_rest(rest)
        self._pump(now)
        waiting = (job for job in self._jobs() if not job.exhausted)
        return min(map(self._end, waiting), default=math.inf)

    def cancel(self) -> None:
        """Cancels all jobs."""
        for job in self._jobs():
            job.cancel()

    def _jobs(self) -> list[RemoteReadJob]:
        if not self._queue:
            return []
        with self._link.lock:
            return [job for _, _, job in self._queue]

    def _end(self, job: RemoteReadJob) -> float:
        """When a job's pages are late: at its deadline, or `deadline_s` after the last progress."""
        patience = max(job.entered, self._came) + self._deadline_s
        return patience if job.deadline is None else min(patience, job.deadline)

    def _rest(self, job: RemoteReadJob, now: float) -> ReadOutcome | None:
        """The outcome for pages that cannot begin any more; None if they may wait."""
        if self._link.usable or (job.deadline is not None and now >= job.deadline):
            return ReadOutcome.LATE if now >= self._end(job) else None
        return ReadOutcome.MISS

    def _pump(self, now: float) -> None:
        after: list[Tell] = []
        with self._link.lock:
            while self._queue and self._begin_next(self._queue[0][2], now, after):
                pass
        for tell in after:
            tell()

    def _begin_next(self, job: RemoteReadJob, now: float, after: list[Tell]) -> bool:
        """Locked. Begins the next batch of a job, or ends the job; False if it has to wait.
        `after`: functions to call once the lock is released.
        """
        rest = self._rest(job, now)
        if rest is not None or job.exhausted:
            heapq.heappop(self._queue)
            after.append(functools.partial(job.end_rest, rest or ReadOutcome.CANCELLED))
            return True
        wanted = [i for i in job.upcoming() if self._may_be_there(job.pages[i], now)]
        nbytes = bytes_in_ring(job.lengths[i] for i in wanted)
        if nbytes > self._link.ring.nbytes:
            wanted = []  # larger than the ring, so this store never put it
        sent = False
        if not wanted:
            begun = job.begin()
        else:
            # The other half is for writes and abandoned calls.
            if self._under_way >= self._link.ring.nbytes // 2:
                return False
            extent = self._link.ring.take(nbytes)
            if extent is None:
                return False
            begun = job.begin()
            sent = bool(begun) and self._send(job, wanted, extent, nbytes)
            if not sent:
                self._link.ring.give(extent)
        missed = [(i, ReadOutcome.MISS) for i in begun if not sent or i not in wanted]
        after.append(functools.partial(job.finish, missed))
        return True

    def _may_be_there(self, page: PageRead, now: float) -> bool:
        named = can_be_named(page.pool, [page.key])
        return named and not self._presence.gone(page.pool, page.key, now)

    def _send(self, job: RemoteReadJob, which: list[int], extent: int, nbytes: int) -> bool:
        """Locked. Sends a batch to the child; False if that is impossible now."""
        pool = job.pages[which[0]].pool
        lengths = [job.lengths[i] for i in which]
        keys = [job.pages[i].key for i in which]
        heads = self._namespace.heads(pool, keys, lengths)
        buffers = [list(job.pages[i].into) for i in which]
        limit = self._end(job)
        epoch = self._presence.epoch
        call = Call(
            Op.GET,
            pool,
            keys,
            functools.partial(self._landed, job, which, nbytes, epoch),
            limit,
            extent,
            place(extent, heads, lengths, buffers),
            fair=limit != job.deadline,
        )
        if not self._link.begin(call):
            return False
        self._under_way += nbytes
        return True

    def _landed(
        self, job: RemoteReadJob, which: list[int], nbytes: int, epoch: int, answer: Answer
    ) -> None:
        """Ends the pages of a batch: they were verified, or are never copied any more."""
        now = time.monotonic()
        with self._link.lock:
            self._under_way -= nbytes
            if any(code in _OUTCOMES for code in answer.codes):
                self._came = now
        by_code: dict[int, list[PageKey]] = {}
        for i, code in zip(which, answer.codes, strict=True):
            by_code.setdefault(code, []).append(job.pages[i].key)
        for code, keys in by_code.items():
            self._learn(job.pages[which[0]].pool, keys, code, now, epoch)
        outcomes = (_OUTCOMES.get(Code(code), ReadOutcome.FAILED) for code in answer.codes)
        job.finish(list(zip(which, outcomes, strict=True)))

    def _learn(self, pool: str, keys: list[PageKey], code: int, now: float, epoch: int) -> None:
        if code in (Code.OK, Code.MISS):
            self._presence.found(pool, keys, [code == Code.OK] * len(keys), now, epoch)
        elif code == Code.FAILED:
            self._presence.distrust(pool, keys, UNREADABLE_S, now)
        elif code == Code.CORRUPT:
            self._presence.distrust(pool, keys, CORRUPT_S, now)
            remove = Call(Op.REMOVE, pool, keys, lambda _: None, now + self._deadline_s)
            with self._link.lock:
                self._link.begin(remove)
