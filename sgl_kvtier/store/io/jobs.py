"""Read jobs: the pages of one read in their order, which have begun, and how each ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.store.index.located import Located

logger = logging.getLogger(__name__)

Ended = list[tuple[int, ReadOutcome]]
"""(index of a page in its job, its outcome) pairs."""


class OrderedJob:
    """A `ReadJob` whose pages are begun in order by the thread that serves it. Any thread. Every
    page ends exactly once.

    Of `count` pages, [0, next) have begun, by `begin` or by `end_rest`. Pages returned by `begin`
    are in flight until `finish`.
    """

    def __init__(
        self, count: int, deadline: float | None, on_page: Callable[[int, ReadOutcome], None] | None
    ) -> None:
        self.count = count
        self.deadline = deadline
        self._on_page = on_page
        self._outcomes: list[ReadOutcome | None] = [None] * count
        self._fresh: Ended = []
        self._next = 0
        self._open = count
        self._in_flight = 0
        self._changed = threading.Condition()

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        with self._changed:
            return list(self._outcomes)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def done(self) -> bool:
        return self._open == 0

    @property
    def exhausted(self) -> bool:
        """Whether all pages have begun."""
        return self._next >= self.count

    def drain(self) -> Ended:
        with self._changed:
            fresh, self._fresh = self._fresh, []
            return fresh

    def wait(self, timeout_s: float | None = None) -> bool:
        timeout_s = seconds_to_wait(timeout_s)
        if timeout_s is None and self._open:
            refuse_in_callback()
        with self._changed:
            return self._changed.wait_for(lambda: self._open == 0, timeout_s)

    def cancel(self) -> None:
        self.end_rest(ReadOutcome.CANCELLED)

    def begin(self) -> list[int]:
        """The next pages to read together; empty if none is left."""
        with self._changed:
            start = self._next
            if start >= self.count:
                return []
            self._next = self._run_end(start)
            self._in_flight += self._next - start
            return list(range(start, self._next))

    def finish(self, ended: Ended) -> None:
        """Ends pages returned by `begin`. Their destinations belong to the caller again."""
        self._close(ended, begun=len(ended))

    def end_rest(self, outcome: ReadOutcome) -> None:
        """Ends every page that has not begun with this outcome."""
        with self._changed:
            rest = [(i, outcome) for i in range(self._next, self.count)]
            self._next = self.count
        self._close(rest, begun=0)

    def _run_end(self, start: int) -> int:
        """The end (exclusive) of the pages that are begun together."""
        return start + 1

    def _settle(self, ended: Ended) -> Ended:
        """Called before outcomes become visible; may change them."""
        return ended

    def _close(self, ended: Ended, begun: int) -> None:
        if not ended:
            return
        ended = settled_or_failed(lambda: self._settle(ended), ended)
        try:
            if self._on_page is not None:
                call_back(self._on_page, ended)
        finally:
            with self._changed:
                self._in_flight -= begun
                self._open -= len(ended)
                for index, outcome in ended:
                    self._outcomes[index] = outcome
                self._fresh.extend(ended)
                if self._open == 0:
                    self._changed.notify_all()


_calling = threading.local()
"""`inside`: how many callbacks of reads are on this thread's stack."""


def call_back(on_page: Callable[[int, ReadOutcome], None], ended: Ended) -> None:
    """Calls a reader's callback for pages that ended. If it raises, the first exception is logged
    and the next page follows, because the thread belongs to the store and serves other reads. Only
    Ctrl-C on the main thread, which is never an I/O thread, is raised again after the last page.
    """
    interrupt: KeyboardInterrupt | None = None
    failed = False
    _calling.inside = getattr(_calling, "inside", 0) + 1
    try:
        for index, outcome in ended:
            try:
                on_page(index, outcome)
            except BaseException as error:
                if (
                    isinstance(error, KeyboardInterrupt)
                    and threading.current_thread() is threading.main_thread()
                ):
                    interrupt = error
                elif not failed:
                    failed = True
                    logger.exception("an on_page callback failed")
    finally:
        _calling.inside -= 1
    if interrupt is not None:
        raise interrupt


def refuse_in_callback() -> None:
    """Raises RuntimeError on a thread that is in a callback of a read: waiting there for a read
    without a timeout could deadlock.
    """
    if getattr(_calling, "inside", 0):
        raise RuntimeError(
            "on_page must not wait for a read: begin it there, and wait in another thread"
        )


def seconds_to_wait(timeout_s: float | None) -> float | None:
    """Validates a timeout; None means no limit, as does a number beyond `threading.TIMEOUT_MAX`.
    Raises TypeError for other types and ValueError for NaN.
    """
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, (int, float)):
        raise TypeError(f"a timeout is a number of seconds, not {type(timeout_s).__name__}")
    if timeout_s != timeout_s:
        raise ValueError("a timeout is a number of seconds, not NaN")
    return None if timeout_s > threading.TIMEOUT_MAX else float(max(0.0, timeout_s))


def settled_or_failed(settle: Callable[[], Ended], ended: Ended) -> Ended:
    """The outcomes that `settle` returns for pages that ended. If it raises, they are FAILED, so
    that no caller waits for ever.
    """
    try:
        return settle()
    except Exception:
        # Out of memory, or a bug: these pages must not count as OK.
        logger.exception("settling pages failed")
        return [(index, ReadOutcome.FAILED) for index, _ in ended]


Settle = Callable[[Located, Ended], Ended]
"""What the store does with pages that ended, before their outcomes become visible: drops damaged
ones, unpins, counts.
"""


class DiskReadJob(OrderedJob):
    """An ordered job that begins neighbouring slots together, in ascending or descending order."""

    RUN_BYTES = 1 << 20
    RUN_PAGES = 64

    def __init__(
        self,
        into: list[list[memoryview]],
        located: Located,
        deadline: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
        settle: Settle,
    ) -> None:
        super().__init__(len(into), deadline, on_page)
        self.into = into
        self.located = located
        self._settled_by = settle

    def _settle(self, ended: Ended) -> Ended:
        return self._settled_by(self.located, ended)

    def _run_end(self, start: int) -> int:
        if not self.located.found(start):
            return start + 1
        slot_bytes = self.located.segment_of(start).slot_bytes
        most = min(self.RUN_PAGES, self.RUN_BYTES // slot_bytes, self.count - start)
        stop = start + 1
        step = 0
        while stop < start + most:
            gap = self._gap(stop - 1, stop)
            if abs(gap) != 1 or (step and gap != step):
                break
            step = gap
            stop += 1
        return stop

    def _gap(self, left: int, right: int) -> int:
        at = self.located
        if not at.found(left) or not at.found(right) or at.segment[left] != at.segment[right]:
            return 0
        return int(at.slots[right] - at.slots[left])
