"""I/O threads that serve read jobs by priority, one run of neighbouring pages at a time."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.store.env import Env
from sgl_kvtier.store.jobs import DiskReadJob, Ended
from sgl_kvtier.store.transfer import Mover


class Lanes:
    """A queue of read jobs and the threads that work on it.

    Jobs of a lower priority number go first, equal ones in the order they came. Every submitted job ends: by being
    read, by its deadline, by its cancellation, or CANCELLED when the lanes close.
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
        """Seconds that threads spent reading and checking, added up over threads."""
        self._threads = [
            threading.Thread(target=self._serve, args=(movers(),), name=f"kvtier-read-{i}", daemon=True)
            for i in range(threads)
        ]
        self._watch = threading.Thread(target=self._watch_deadlines, name="kvtier-deadlines", daemon=True)
        self._watch_changed = threading.Condition()
        for thread in [*self._threads, self._watch]:
            thread.start()

    def submit(self, job: DiskReadJob, priority: int) -> None:
        """Queues a job. After `close` it is CANCELLED at once."""
        order = next(self._order)
        with self._changed:
            closing = self._closing
            if not closing:
                heapq.heappush(self._queue, (priority, order, job))
                self._changed.notify(len(job.pages))
        if closing:
            job.end_rest(ReadOutcome.CANCELLED)
            return
        if job.deadline is not None:
            with self._watch_changed:
                heapq.heappush(self._deadlines, (job.deadline, order, job))
                self._watch_changed.notify()

    def give_way(self, longest_s: float) -> None:
        """Blocks while pages wait to be read, but not for longer than this: for writers, who can wait."""
        with self._idle:
            if self._queue:
                self._idle.wait_for(lambda: not self._queue, longest_s)

    def close(self) -> None:
        """Ends the threads after the reads they are in; jobs not begun are CANCELLED. Idempotent."""
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
            if late:
                job.end_rest(ReadOutcome.LATE)
            if begun:
                started = self._env.now()
                ended = _read_run(mover, job, begun)
                with self._changed:
                    self.busy_s += self._env.now() - started
                job.finish(ended)
            del job  # an idle lane must not keep the last caller's memory

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
                    self._watch_changed.wait(left)
                    continue
                heapq.heappop(self._deadlines)
            job.end_rest(ReadOutcome.LATE)


def _read_run(mover: Mover, job: DiskReadJob, begun: list[int]) -> Ended:
    targets = {i: job.targets[i] for i in begun}
    first = targets[begun[0]]
    if first is None:
        return [(begun[0], ReadOutcome.MISS)]
    # A run may go down the file (back to front); the device is always asked upwards.
    upwards = sorted(begun, key=lambda i: targets[i].head.slot)  # type: ignore[union-attr]
    heads = [targets[i].head for i in upwards]  # type: ignore[union-attr]
    outcomes = dict(zip(upwards, mover.read(first.segment, heads, [job.pages[i].into for i in upwards]), strict=True))
    return [(i, outcomes[i]) for i in begun]
