"""Moves pages of running loads: the store's reads into host pages, and copies from host pages into
device slots.

One thread beside the scheduler's. Pages that the store has read are copied when their load has none
left to read, or after `_GATHER_S`: a load's last page lands a copy later than it was read. Every
copy begun takes time of the interpreter that a forward's launches need too, about as long for a
load as for a page. The scheduler never waits for a copy: it reads `Load.poll` in its tick, and what
it does with it is the engine's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any, Protocol

import torch

from sgl_kvtier.runtime.ranks.polls import LANDED, LOST
from sgl_kvtier.runtime.restore.restoration import Load
from sgl_kvtier.store.base import ReadOutcome

logger = logging.getLogger(__name__)

_POLL_S = 0.0002
_GATHER_S = 0.01
"""Longest that a page which was read waits for the others of its load."""


class Copy(Protocol):
    """One copy under way."""

    def done(self) -> bool:
        """Whether the bytes are in place. Never blocks."""


class CopyDevice(Protocol):
    """What copies host pages into device slots, all layers."""

    def fence(self) -> Any:
        """Scheduler's thread, after slots were allocated: a mark behind everything that may still
        use them.
        """

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor, fence: Any) -> Copy:
        """Mover's thread: begins a copy that waits for the fence on the device, and for the copies
        begun before it.
        """


class PageMover:
    """The thread that lands pages. `submit` and `wait_news` are for the scheduler's thread."""

    def __init__(self, device: CopyDevice, page_tokens: int) -> None:
        self._device = device
        self._page = page_tokens
        self._changed = threading.Condition()
        self._ended: deque[tuple[Load, Any, int, ReadOutcome]] = deque()
        self._gathering_since = 0.0
        self._load_is_read = False
        self._news = threading.Event()
        self._closing = False
        self._copies: deque[tuple[Copy, Load, list[int]]] = deque()
        self._thread = threading.Thread(target=self._run, name="kvtier-mover", daemon=True)
        self._thread.start()

    def submit(self, load: Load, storage: Any, deadline_s: float) -> None:
        """Begins a load, the highest page first. Its pages end one by one, whatever happens."""
        pages, before = len(load.span), load.unread
        try:
            self._submit(load, storage, deadline_s)
        except Exception:
            # Whatever a driver or a store raises: the load is known to the scheduler, so it has to
            # end.
            logger.exception("kvtier: a load could not be begun")
            if load.unread == before:
                self._put([(load, None, offset, ReadOutcome.FAILED) for offset in range(pages)])

    def _submit(self, load: Load, storage: Any, deadline_s: float) -> None:
        fence, pages = self._device.fence(), len(load.span)
        if not load.owns_host:
            self._put([(load, fence, offset, ReadOutcome.OK) for offset in reversed(range(pages))])
            return

        def on_page(index: int, outcome: ReadOutcome) -> None:
            self._put([(load, fence, pages - 1 - index, outcome)])

        order = load.host_slots.view(pages, self._page).flip(0).flatten()
        job = (
            storage.begin_read(load.restoration.keys_of(load.span), order, deadline_s, on_page)
            if storage
            else None
        )
        load.job = job
        if job is None:
            self._put(
                [(load, fence, offset, ReadOutcome.MISS) for offset in reversed(range(pages))]
            )
        elif load.cancelled:
            job.cancel()

    def wait_news(self, timeout_s: float) -> None:
        """Blocks until a page has ended since the last call, or the time is over."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        """Ends the thread after what is under way. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, ended: list[tuple[Load, Any, int, ReadOutcome]]) -> None:
        """Any thread. Wakes the mover when it has to watch the time from now on, when a load is
        read, or pages are lost: not for every page.
        """
        with self._changed:
            begins = not self._ended
            if begins:
                self._gathering_since = time.monotonic()
            self._ended.extend(ended)
            for load, _, _, outcome in ended:
                load.unread -= 1
                # Compute may wait for pages that were asked back, or will not come.
                self._load_is_read |= load.unread == 0 or outcome is not ReadOutcome.OK
            if begins or self._load_is_read:
                self._changed.notify()

    def _gatherable(self) -> bool:
        """Locked. Whether there are pages to be copied now."""
        if not self._ended:
            return False
        return (
            self._load_is_read
            or self._closing
            or time.monotonic() >= self._gathering_since + _GATHER_S
        )

    def _gathered(self) -> list[tuple[Load, Any, int, ReadOutcome]]:
        """Locked. The pages to be copied now."""
        batch = list(self._ended) if self._gatherable() else []
        if batch:
            self._ended.clear()
            self._load_is_read = False
        return batch

    def _patience_s(self) -> float | None:
        """Locked. How long there is nothing to do but for news."""
        if self._copies:
            return _POLL_S
        return (
            max(0.0, self._gathering_since + _GATHER_S - time.monotonic()) if self._ended else None
        )

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self._changed:
                if self._closing and not self._ended and not self._copies:
                    return
                if not self._gatherable():
                    self._changed.wait(self._patience_s())
                batch = self._gathered()
            try:
                self._begin_copies(batch)
                self._reap()
            except Exception:
                # Whatever a driver or a pool raises must not end the thread: these pages are lost,
                # the others go on.
                logger.exception("kvtier: a copy to the device failed")
                self._fail(batch)

    def _begin_copies(self, batch: list[tuple[Load, Any, int, ReadOutcome]]) -> None:
        ready: dict[int, tuple[Load, Any, list[int]]] = {}
        for load, fence, offset, outcome in batch:
            if outcome is not ReadOutcome.OK:
                self._end(load, [offset], LOST[outcome])
            elif load.cancelled and (load.restoration.closed or not load.owns_host):
                self._end(load, [offset], LOST[ReadOutcome.CANCELLED])
            else:
                ready.setdefault(id(load), (load, fence, []))[2].append(offset)
        for load, fence, offsets in ready.values():
            for first, stop in _runs(offsets):
                # Slices only: on an accelerator the slots may not be there before the fence, so
                # nothing may read them here.
                host, device = (
                    slots[first * self._page : stop * self._page]
                    for slots in (load.host_slots, load.device_slots)
                )
                self._copies.append(
                    (self._device.begin(host, device, fence), load, list(range(first, stop)))
                )

    def _reap(self) -> None:
        """Copies end in the order in which they were begun."""
        while self._copies:
            copy, load, offsets = self._copies[0]
            try:
                if not copy.done():
                    return
                state = LANDED
            except Exception:
                logger.exception("kvtier: a copy to the device failed")
                state = LOST[ReadOutcome.FAILED]
            self._copies.popleft()
            self._end(load, offsets, state)

    def _fail(self, batch: list[tuple[Load, Any, int, ReadOutcome]]) -> None:
        copying = {(id(load), offset) for _, load, offsets in self._copies for offset in offsets}
        for load, _, offset, _ in batch:
            if not load.poll.local[offset] and (id(load), offset) not in copying:
                self._end(load, [offset], LOST[ReadOutcome.FAILED])

    def _end(self, load: Load, offsets: list[int], state: int) -> None:
        now = time.monotonic()
        for offset in offsets:
            load.poll.mark(offset, state, now)
        self._news.set()


def _runs(offsets: list[int]) -> list[tuple[int, int]]:
    """Pages as runs [first, stop) of neighbours, ascending."""
    runs: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs
