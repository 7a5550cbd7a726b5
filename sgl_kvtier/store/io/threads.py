"""I/O threads in pure Python: they serve read jobs by priority, one run of neighbouring pages at a
time.

`native_threads` does the same in C, for processes with another busy Python thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.base import ReadJob, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.index.columns import Columns
from sgl_kvtier.store.index.located import Located
from sgl_kvtier.store.index.slots import Rows
from sgl_kvtier.store.io.jobs import DiskReadJob, Ended, Settle
from sgl_kvtier.store.io.transfer import MOST_BUFFERS, Mover

logger = logging.getLogger(__name__)

WRITE_RUN_BYTES = 1 << 20
_GIVE_WAY_S = 0.02
"""Seconds that a writer waits for readers before each run: readers go first, and a writer still
gets 50 MB/s next to them.
"""


class IOThreads(Protocol):
    """Reads and writes pages. Any thread."""

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one I/O thread read or verified pages."""

    def read(
        self,
        pages: Columns,
        located: Located,
        priority: int,
        deadline: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
        settle: Settle,
    ) -> ReadJob:
        """Begins reading and returns at once. After `close` every page is CANCELLED."""

    def write(
        self,
        located: Located,
        parts: NDArray[np.uint32],
        buffers: list[Any],
        failed: Callable[[OSError], None],
        meanwhile: Callable[[], None],
    ) -> Rows:
        """Writes pages, which are in the order of their slots, from `parts[i]` buffers each.
        Returns the indexes of those written, in that order.

        `failed` is called with each error. `meanwhile` is called once, if possible while the first
        pages are being written.
        """

    def close(self) -> None:
        """Ends the threads after their current reads; other jobs are CANCELLED. Idempotent."""


class PythonIOThreads:
    """A queue of read jobs and the Python threads that serve it. Writes run on the calling thread.

    Jobs of a lower priority number are served first, equal ones in the order of their calls. Every
    job ends: read, past its deadline, cancelled, or CANCELLED by `close`.
    """

    def __init__(self, env: Env, movers: Callable[[], Mover], threads: int) -> None:
        self._env = env
        self._queue: list[tuple[int, int, DiskReadJob]] = []
        self._deadlines: list[tuple[float, int, DiskReadJob]] = []
        self._order = itertools.count()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._closing = False
        self.busy_s = 0.0
        """See `IOThreads.busy_s`."""
        self._reading, self._marked = 0, 0.0
        """Number of threads that read, and the time up to which `busy_s` includes them."""
        self._threads = [
            threading.Thread(
                target=self._serve, args=(movers(),), name=f"kvtier-read-{i}", daemon=True
            )
            for i in range(threads)
        ]
        self._new_mover = movers
        self._movers: list[Mover] = []
        self._watch = threading.Thread(
            target=self._watch_deadlines, name="kvtier-deadlines", daemon=True
        )
        self._watch_changed = threading.Condition()
        for thread in [*self._threads, self._watch]:
            thread.start()

    def read(
        self,
        pages: Columns,
        located: Located,
        priority: int,
        deadline: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
        settle: Settle,
    ) -> DiskReadJob:
        if any(memoryview(part).readonly for part in pages.buffers):
            raise ValueError("a page is read into memory that can be written")
        parts = iter([memoryview(part).cast("B") for part in pages.buffers])
        into = [list(itertools.islice(parts, count)) for count in pages.parts.tolist()]
        job = DiskReadJob(into, located, deadline, on_page, settle)
        # Converted first, because a priority that cannot be compared would break the queue.
        entry = (operator.index(priority), next(self._order), job)
        with self._changed:
            closing = self._closing
            if not closing:
                heapq.heappush(self._queue, entry)
                self._changed.notify(job.count)
        if closing:
            job.end_rest(ReadOutcome.CANCELLED)
        elif deadline is not None:
            try:
                with self._watch_changed:
                    heapq.heappush(self._deadlines, (deadline, entry[1], job))
                    self._watch_changed.notify()
            except MemoryError:
                # The job is in flight: an exception would tell the caller that it is not.
                job.end_rest(ReadOutcome.LATE)
        return job

    def write(
        self,
        located: Located,
        parts: NDArray[np.uint32],
        buffers: list[Any],
        failed: Callable[[OSError], None],
        meanwhile: Callable[[], None],
    ) -> Rows:
        meanwhile()
        flat = iter([memoryview(part).cast("B") for part in buffers])
        data = [list(itertools.islice(flat, count)) for count in parts.tolist()]
        with self._changed:
            mover = self._movers.pop() if self._movers else self._new_mover()
        written: list[int] = []
        for run in _runs(located, data):
            with self._idle:
                if self._queue:
                    self._idle.wait_for(lambda: not self._queue, _GIVE_WAY_S)
            try:
                mover.write(
                    located.segment_of(run[0]),
                    [located.head(i) for i in run],
                    [data[i] for i in run],
                )
            except OSError as error:
                failed(error)
                continue
            written.extend(run)
        with self._changed:
            self._movers.append(mover)
        return np.array(written, np.int64)

    def close(self) -> None:
        """See `IOThreads.close`."""
        with self._changed:
            self._closing = True
            left, self._queue = self._queue, []
            self._changed.notify_all()
        for _, _, job in left:
            job.end_rest(ReadOutcome.CANCELLED)
        with self._watch_changed:
            self._watch_changed.notify()
        for thread in [*self._threads, self._watch]:
            if thread is not threading.current_thread():
                thread.join()

    def _serve(self, mover: Mover) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._queue[0][2]
                late = job.deadline is not None and self._env.now() >= job.deadline
                begun = [] if late else job.begin()
                if late or job.exhausted:
                    heapq.heappop(self._queue)
                if not self._queue:
                    self._idle.notify_all()
                if begun:
                    if not self._reading:
                        self._marked = self._env.now()
                    self._reading += 1
            if late:
                job.end_rest(ReadOutcome.LATE)
            if begun:
                try:
                    ended = _read_run(mover, job, begun)
                except Exception:
                    # Out of memory, or a bug: these pages fail, the thread goes on.
                    logger.exception("reading pages failed")
                    ended = [(i, ReadOutcome.FAILED) for i in begun]
                with self._changed:
                    now = self._env.now()
                    self.busy_s += now - self._marked
                    self._marked = now
                    self._reading -= 1
                job.finish(ended)
            # Otherwise an idle thread keeps the last caller's memory alive.
            del job

    def _watch_deadlines(self) -> None:
        while True:
            with self._watch_changed:
                while not self._closing and not self._deadlines:
                    self._watch_changed.wait()
                if self._closing:
                    return
                deadline, _, job = self._deadlines[0]
                left = 0.0 if job.exhausted else deadline - self._env.now()
                if left > 0:
                    self._watch_changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self._deadlines)
            job.end_rest(ReadOutcome.LATE)


def _read_run(mover: Mover, job: DiskReadJob, begun: list[int]) -> Ended:
    located = job.located
    if not located.found(begun[0]):
        return [(begun[0], ReadOutcome.MISS)]
    # A run may go down the file; the device always reads upwards.
    upwards = sorted(begun, key=lambda i: located.slots[i])
    heads = [located.head(i) for i in upwards]
    outcomes = mover.read(located.segment_of(begun[0]), heads, [job.into[i] for i in upwards])
    by_index = dict(zip(upwards, outcomes, strict=True))
    return [(i, by_index[i]) for i in begun]


def _runs(located: Located, data: Sequence[Sequence[memoryview]]) -> Iterator[list[int]]:
    """Groups pages in neighbouring slots into writes of up to `WRITE_RUN_BYTES`."""
    run: list[int] = []
    nbytes = buffers = 0
    for i, parts in enumerate(data):
        size, more = located.segment_of(i).slot_bytes, len(parts) + 2
        joined = (
            run
            and located.segment[i - 1] == located.segment[i]
            and located.slots[i - 1] + 1 == located.slots[i]
        )
        if run and (not joined or nbytes + size > WRITE_RUN_BYTES or buffers + more > MOST_BUFFERS):
            yield run
            run, nbytes, buffers = [], 0, 0
        run.append(i)
        nbytes += size
        buffers += more
    if run:
        yield run
