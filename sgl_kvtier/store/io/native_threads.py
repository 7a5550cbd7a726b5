"""I/O threads in C (native/): I/O, checksums, order, deadlines and cancellation without the GIL.

Only settling pages that ended needs a Python thread. Usually it is the thread that waits for the
job or queries it. A thread of this module settles jobs with callbacks, and every `_SWEEP_S` seconds
the jobs that no thread queries any more.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.store.disk.format import BLOCK, HEAD
from sgl_kvtier.store.index.columns import Columns
from sgl_kvtier.store.index.located import Located
from sgl_kvtier.store.index.slots import EMPTY, Rows
from sgl_kvtier.store.io.jobs import (
    Ended,
    Settle,
    call_back,
    refuse_in_callback,
    seconds_to_wait,
    settled_or_failed,
)
from sgl_kvtier.store.io.threads import WRITE_RUN_BYTES

_native: Any
try:
    from sgl_kvtier.store import _native  # type: ignore[no-redef, attr-defined, unused-ignore]
except ImportError:
    _native = None

logger = logging.getLogger(__name__)

NATIVE = _native is not None and HEAD.itemsize == _native.HEAD_BYTES
"""Whether the extension module is installed and has this version's format."""

_READ_RUN_BYTES = 1 << 20
_OUTCOMES = (
    None,
    None,
    ReadOutcome.OK,
    ReadOutcome.MISS,
    ReadOutcome.CORRUPT,
    ReadOutcome.FAILED,
    ReadOutcome.LATE,
    ReadOutcome.CANCELLED,
)
"""Indexed by the codes of native/runs.h."""
_SWEEP_S = 0.25
"""Seconds that a job which no thread queries may keep its slots pinned after it has ended."""
_DEADLINE_POLL_S = 0.01
"""Seconds that the callback for a missed deadline may be late while all I/O threads hang."""


_RING_RUNS = 16
_RING_BYTES = 2 << 20
"""Bytes in flight per ring. With 8 threads that is up to 128 runs, and 16 MiB unless single runs
are larger than 2 MiB.
"""


@functools.cache
def io_uring_error() -> int:
    """0 if this process may use io_uring, else an errno. The kernel is queried once."""
    return int(_native.probe_io_uring()) if NATIVE else errno.ENOSYS


def ring_threads(setting: str, direct: bool, threads: int) -> int:
    """Number of I/O threads that read through their own io_uring; 0 means plain reads.

    Without O_DIRECT, `auto` uses none: the kernel reads pages that are not cached in its own
    threads, so a ring gains nothing.
    """
    if setting == "threads" or (setting == "auto" and not direct):
        return 0
    error = io_uring_error()
    if error:
        if setting == "io_uring":
            logger.warning(
                "store.io is io_uring, but this process may not use it (%s): threads read",
                os.strerror(error),
            )
        return 0
    return threads


class NativeReadJob:
    """A `ReadJob` that the native pool serves. Any thread."""

    def __init__(
        self,
        count: int,
        located: Located,
        on_page: Callable[[int, ReadOutcome], None] | None,
        settle: Settle,
        deadline: float | None,
    ) -> None:
        self.located = located
        self.on_page = on_page
        self.deadline = deadline
        self._settle = settle
        self._outcomes: list[ReadOutcome | None] = [None] * count
        self._fresh: Ended = []
        self._unsettled = count
        self._settling = threading.Lock()
        self._settled = threading.Condition(self._settling)
        self._job: Any = None

    def begin(self, job: Any) -> None:
        """Sets the pool's job, which is in flight."""
        self._job = job

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        self._reap()
        with self._settling:
            return list(self._outcomes)

    @property
    def in_flight(self) -> int:
        return int(self._job.in_flight)

    @property
    def done(self) -> bool:
        if self._unsettled and not self._job.open:
            self._reap()
        return self._unsettled == 0

    def drain(self) -> Ended:
        self._reap()
        with self._settling:
            fresh, self._fresh = self._fresh, []
            return fresh

    def wait(self, timeout_s: float | None = None) -> bool:
        timeout_s = seconds_to_wait(timeout_s)
        if timeout_s is None and self._unsettled:
            refuse_in_callback()
        if not self._job.wait(-1.0 if timeout_s is None else timeout_s):
            self._reap()
            # All may have ended in the meantime, or before this process was forked.
            return self._unsettled == 0
        self._reap()
        with self._settling:
            return self._settled.wait_for(lambda: self._unsettled == 0, timeout_s)

    def cancel(self) -> None:
        # Settling may do I/O, so the next wait, query or sweep does it.
        self._job.cancel()

    def settle_ended(self) -> bool:
        """Settles pages that have ended; True if none is left. For the settling thread."""
        with self._settling:
            ended: Ended = self._job.take(_OUTCOMES)
            if ended:
                ended = settled_or_failed(
                    functools.partial(self._settle, self.located, ended), ended
                )
            if self.on_page is None:
                self._record(ended)
        if self.on_page is not None:
            # Only one thread settles jobs with callbacks, so their order is kept without holding
            # the lock.
            try:
                call_back(self.on_page, ended)
            finally:
                with self._settling:
                    self._record(ended)
        return self._unsettled == 0

    def _record(self, ended: Ended) -> None:
        for index, outcome in ended:
            self._outcomes[index] = outcome
        self._fresh += ended
        self._unsettled -= len(ended)
        if self._unsettled == 0:
            self._settled.notify_all()

    def _reap(self) -> None:
        # Jobs with callbacks are left to the settling thread.
        if self.on_page is None:
            self.settle_ended()


class NativeIOThreads:
    """The native pool, and a thread that settles pages that no caller waits for."""

    def __init__(
        self, threads: int, verify: bool, alignment: int, rings: int, module: Any = None
    ) -> None:
        """`module`: another build of the extension module, for tests."""
        self._pool = (module or _native).Pool(
            threads,
            verify,
            alignment,
            _READ_RUN_BYTES,
            WRITE_RUN_BYTES,
            rings,
            _RING_RUNS,
            _RING_BYTES,
        )
        self._jobs: dict[int, NativeReadJob] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._sweeper = threading.Thread(target=self._sweep, name="kvtier-settle", daemon=True)
        self._sweeper.start()

    @property
    def busy_s(self) -> float:
        return float(self._pool.busy())

    @property
    def rings(self) -> int:
        """Number of I/O threads that read through their own io_uring; 0 means plain reads."""
        return int(self._pool.rings)

    def read(
        self,
        pages: Columns,
        located: Located,
        priority: int,
        deadline: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
        settle: Settle,
    ) -> NativeReadJob:
        job = NativeReadJob(len(pages.lengths), located, on_page, settle, deadline)
        fds, sizes, offsets = _places(located)
        heads = located.heads()
        with self._lock:
            # Before `submit`, so that a job in flight is always settled.
            self._jobs[id(job)] = job
            try:
                job.begin(
                    self._pool.submit(
                        False,
                        on_page is not None,
                        priority,
                        min(deadline or 0.0, threading.TIMEOUT_MAX),
                        fds,
                        sizes,
                        offsets,
                        located.lengths,
                        heads,
                        pages.parts,
                        pages.buffers,
                    )
                )
            except BaseException:
                del self._jobs[id(job)]
                raise
            closing = self._closing
        if closing:
            self._settle_all()
        return job

    def write(
        self,
        located: Located,
        parts: NDArray[np.uint32],
        buffers: list[Any],
        failed: Callable[[OSError], None],
        meanwhile: Callable[[], None],
    ) -> Rows:
        job = self._pool.submit(
            True, False, 0, 0.0, *_places(located), located.lengths, located.heads(), parts, buffers
        )
        try:
            meanwhile()
        finally:
            # Even after an error: the device may use slots and memory until the job has ended.
            job.wait(-1.0)
        if job.error:
            failed(OSError(job.error, "writing pages"))
        return np.frombuffer(job.good(), np.int64)

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._pool.close()
        if self._sweeper is not threading.current_thread():
            self._sweeper.join()
        self._settle_all()

    def _sweep(self) -> None:
        seen = 0
        while not self._closing:
            with self._lock:
                waiting = any(job.on_page and job.deadline for job in self._jobs.values())
            now = self._pool.wait(seen, _DEADLINE_POLL_S if waiting else _SWEEP_S)
            if now != seen or self._jobs:
                self._settle_all()
            seen = now

    def _settle_all(self) -> None:
        with self._lock:
            jobs = list(self._jobs.items())
        for name, job in jobs:
            try:
                ended = job.settle_ended()
            except Exception:
                # Out of memory, or a bug: retried, and the thread goes on.
                logger.exception("settling pages failed")
                continue
            if ended:
                with self._lock:
                    self._jobs.pop(name, None)


def _places(located: Located) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(descriptor, slot size, offset) of each page; descriptor -1 if there is none."""
    count = len(located.rows)
    if len(located.segments) == 1 and (located.rows != EMPTY).all():
        (segment,) = located.segments.values()
        offsets = (BLOCK + located.slots * segment.slot_bytes).view(np.uint64)
        return (
            np.full(count, segment.fd, np.int32),
            np.full(count, segment.slot_bytes, np.uint32),
            offsets,
        )
    fds = np.full(count, -1, np.int32)
    sizes = np.zeros(count, np.uint32)
    offsets = np.zeros(count, np.uint64)
    for number, segment in located.segments.items():
        mine = (located.segment == number) & (located.rows >= 0)
        fds[mine] = segment.fd
        sizes[mine] = segment.slot_bytes
        offsets[mine] = BLOCK + located.slots[mine] * segment.slot_bytes
    return fds, sizes, offsets
