"""One prefix that is read by layers: which parts of which pages have come, and whether the next
ones are worth waiting for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from sgl_kvtier.store.base import PageRead, ReadJob, ReadOutcome
from sgl_kvtier.types import Span

_OPEN, _THERE, _LOST = b"\0", b"\1", b"\2"


class Job:
    """Parts of the pages `span` of one prompt, each of some layers, part 0 the lowest. They come on
    the store's threads; the scheduler's thread asks. `host_slots` are token slots of the pages.
    """

    def __init__(self, rid: str, span: Span, host_slots: Any, parts: int) -> None:
        self.rid = rid
        self.span = span
        self.host_slots = host_slots
        self.parts = parts
        self.copied: Any = None
        """An event behind all copies out of its host pages, where there may be some under way."""
        self._state = [bytearray(len(span)) for _ in range(parts)]
        self._reads: list[tuple[int, ReadJob]] = []
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._came = 0

    def read(self, storage: Any, block: Span, pages: Sequence[Sequence[PageRead]]) -> bool:
        """Begins reading a block of its pages, the top part of all of them first. `pages` are those
        of the block, each as the reads of its parts from the lowest on. False: no store is open.
        """
        order = [(part, page) for part in reversed(range(self.parts)) for page in range(len(block))]

        def on_page(index: int, outcome: ReadOutcome) -> None:
            part, page = order[index]
            self._ended(part, block.start + page - self.span.start, outcome)

        job = storage.begin_reads([pages[page][part] for part, page in order], on_page)
        if job is not None:
            self._reads.append((block.stop, job))
        return job is not None

    def _ended(self, part: int, page: int, outcome: ReadOutcome) -> None:
        there = outcome is ReadOutcome.OK
        with self._changed:
            self._state[part][page] = (_THERE if there else _LOST)[0]
            self._came += there
            self._changed.notify_all()

    def is_there(self, pages: Span, part: int) -> bool:
        """Whether this part of all these pages has come."""
        return self._found(pages, part) == _THERE * len(pages)

    def is_lost(self, pages: Span, part: int) -> bool:
        """Whether any of these pages will lack this part or one above it."""
        return any(_LOST in self._found(pages, upper) for upper in range(part, self.parts))

    def all_there(self, pages: Span, part: int) -> bool:
        """Whether this part and all above it have come."""
        return all(self.is_there(pages, upper) for upper in range(part, self.parts))

    def wait_s(self, pages: Span, part: int) -> float:
        """Seconds until this part and those above it are predicted to have come."""
        with self._changed:
            came, took_s = self._came, time.monotonic() - self._began
        left = sum(self._found(pages, upper).count(_OPEN) for upper in range(part, self.parts))
        return left * took_s / came if came else float("inf") if left else 0.0

    def wait(self, pages: Span, part: int, timeout_s: float) -> bool:
        """Blocks until they have come, or one is lost, or the time is over; True when they have."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.all_there(pages, part) or self.is_lost(pages, part), timeout_s
            )
        return self.all_there(pages, part)

    def cancel(self, below: int | None = None) -> None:
        """Blocks that end at page `below` or before it, or all, are not read any further."""
        for stop, read in self._reads:
            if below is None or stop <= below:
                read.cancel()

    @property
    def over(self) -> bool:
        """Whether nothing touches its host pages any more."""
        read = all(job.done for _, job in self._reads)
        return read and (self.copied is None or bool(self.copied.query()))

    def wait_over(self, timeout_s: float) -> bool:
        """Blocks until then, or the time is over."""
        end = time.monotonic() + timeout_s
        for _, job in self._reads:
            job.wait(max(0.0, end - time.monotonic()))
        if self.copied is not None:
            self.copied.synchronize()
        return self.over

    def _found(self, pages: Span, part: int) -> bytes:
        return bytes(
            self._state[part][pages.start - self.span.start : pages.stop - self.span.start]
        )


def best_cut(waits_s: Sequence[float], part_s: float, tail_share: float) -> int:
    """After how many more computed parts the rest is best taken from storage. `waits_s` has, for
    every such number from 0 on, the seconds until the parts above have come, and in the end 0.0.
    `part_s` is what computing a part of all tokens takes, `tail_share` the share of it that the
    suffix alone takes.
    """
    last = len(waits_s) - 1

    def seconds(more: int) -> float:
        return max(more * part_s, waits_s[more]) + (last - more) * part_s * tail_share

    return min(range(last + 1), key=seconds)
