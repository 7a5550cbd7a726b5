"""A link of limited bandwidth that read jobs share: it makes a fast disk look like a slower
device.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from sgl_kvtier.store.base import PageRead, PageStore, ReadOutcome
from sgl_kvtier.store.io.jobs import OrderedJob

logger = logging.getLogger(__name__)

_AHEAD_S = 0.01
"""Seconds before delivery at which a page is requested from the store. This hides the disk's own
latency.
"""
_AGAIN_S = _AHEAD_S / 2
"""More are requested when at most this many seconds of it are left: several at once, since each
request costs processor time.
"""
_AHEAD_PAGES = 64


class LinkJob(OrderedJob):
    """A read job on a link. It does not begin before `ready_at`."""

    def __init__(
        self,
        pages: Sequence[PageRead],
        deadline: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
        ready_at: float,
    ) -> None:
        super().__init__(len(pages), deadline, on_page)
        self.pages = pages
        self.ready_at = ready_at
        self.landed: dict[int, ReadOutcome] = {}
        """Pages that the store has read and the link has not delivered yet."""

    def nbytes(self, index: int) -> int:
        return sum(part.nbytes for part in self.pages[index].into)

    def late(self, now: float) -> bool:
        """Whether the deadline has passed, so that no further page may begin."""
        return self.deadline is not None and now >= self.deadline


class Link:
    """Serves one page after the other, jobs of a lower priority number first. One thread of its
    own.

    Times are read from the system's clock: this models a device, so it takes real time.
    """

    def __init__(self, store: PageStore, gbps: float, latency_s: float) -> None:
        self._store = store
        self._gbps = gbps
        self._latency_s = latency_s
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, LinkJob]] = []
        self._under_way: deque[tuple[LinkJob, int, float]] = deque()
        self._free_at = 0.0
        self._closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="kvtier-link", daemon=True)
        self._thread.start()

    def set_gbps(self, gbps: float) -> None:
        """Sets the bandwidth for pages that begin from now on; 0 = no limit."""
        with self._changed:
            self._gbps = gbps

    def submit(
        self,
        pages: Sequence[PageRead],
        priority: int,
        deadline: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
    ) -> LinkJob:
        """Queues a read. After `close` it is CANCELLED at once; in a forked process, which has no
        link, it is a MISS.
        """
        job = LinkJob(pages, deadline, on_page, time.monotonic() + self._latency_s)
        if os.getpid() != self._process:
            job.end_rest(ReadOutcome.MISS)
            return job
        # Converted first: a priority that cannot be compared would stay in the queue.
        entry = (operator.index(priority), next(self._order), job)
        with self._changed:
            closing = self._closing
            if not closing:
                heapq.heappush(self._queue, entry)
                self._changed.notify()
        if closing:
            job.end_rest(ReadOutcome.CANCELLED)
        return job

    def close(self) -> None:
        """Delivers pages in flight and cancels the rest. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closing = True
            left, self._queue = self._queue, []
            self._changed.notify()
        for _, _, job in left:
            job.end_rest(ReadOutcome.CANCELLED)
        self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                late = self._take_late()
                begun = self._begin()
                if not late and not begun and not self._deliverable():
                    if self._closing and not self._under_way:
                        return
                    self._changed.wait(self._until_next())
                    continue
            for job in late:
                job.end_rest(ReadOutcome.LATE)
            for job, indexes in begun:
                self._ask_store(job, indexes)
            self._deliver()

    def _begin(self) -> list[tuple[LinkJob, list[int]]]:
        """Locked. Assigns the next pages their time on the link."""
        now = time.monotonic()
        begun: list[tuple[LinkJob, list[int]]] = []
        if self._free_at > now + _AGAIN_S:
            return begun
        self._queue = [entry for entry in self._queue if not entry[2].exhausted]
        heapq.heapify(self._queue)
        for _, _, job in sorted(
            entry for entry in self._queue if entry[2].ready_at <= now and not entry[2].late(now)
        ):
            indexes: list[int] = []
            while self._free_at < now + _AHEAD_S and len(self._under_way) < _AHEAD_PAGES:
                run = job.begin()
                if not run:
                    break
                indexes += run
                seconds = job.nbytes(run[0]) * 8e-9 / self._gbps if self._gbps else 0.0
                self._free_at = max(self._free_at, now) + seconds
                self._under_way.append((job, run[0], self._free_at))
            if indexes:
                begun.append((job, indexes))
        return begun

    def _take_late(self) -> list[LinkJob]:
        now = time.monotonic()
        return [j for _, _, j in self._queue if j.late(now) and not j.exhausted]

    def _ask_store(self, job: LinkJob, indexes: list[int]) -> None:
        def landed(position: int, outcome: ReadOutcome) -> None:
            with self._changed:
                job.landed[indexes[position]] = outcome
                if self._deliverable():
                    self._changed.notify()

        try:
            self._store.read([job.pages[i] for i in indexes], on_page=landed)
        except Exception:
            # Memory that cannot be read into, or an error in another class's store: these pages
            # fail, the link lives on.
            logger.exception("reading pages over a link failed")
            for position in range(len(indexes)):
                landed(position, ReadOutcome.FAILED)

    def _deliverable(self) -> bool:
        if not self._under_way:
            return False
        job, index, at = self._under_way[0]
        return at <= time.monotonic() and index in job.landed

    def _deliver(self) -> None:
        while True:
            with self._changed:
                if not self._deliverable():
                    return
                job, index, _ = self._under_way.popleft()
                outcome = job.landed.pop(index)
            job.finish([(index, outcome)])

    def _until_next(self) -> float | None:
        """Locked. Seconds until the clock alone makes something due; None when only an event
        can.
        """
        now = time.monotonic()
        times = [
            job.deadline
            for _, _, job in self._queue
            if job.deadline is not None and not job.exhausted
        ]
        if self._queue and len(self._under_way) < _AHEAD_PAGES:
            times.append(
                max(self._free_at - _AGAIN_S, min(job.ready_at for _, _, job in self._queue))
            )
        if self._under_way and (self._under_way[0][2] > now or self._deliverable()):
            times.append(self._under_way[0][2])
        return min(max(1e-4, min(times) - now), threading.TIMEOUT_MAX) if times else None
