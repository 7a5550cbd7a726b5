"""Moves the pages of loads in flight: reads of the store into host pages, and copies from host
pages into device slots.

The mover has a thread of its own. Pages that the store has read are copied when all pages of their
load are read, or after `_GATHER_S`. They are gathered because starting a copy takes interpreter
time that launching a forward needs too: about as much for one page as for a load. The scheduler
never waits for a copy: it reads `Load.poll` in its tick, and the engine acts on it.

Slots are written only after the host has seen their fence, so a copy that waits for its fence does
not hold up others on the device. Two more threads block in device events: one in fences, one in
copies in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_kvtier.runtime.restore.event_waiter import EventWaiter
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, LOST
from sgl_kvtier.runtime.step.restoration import Load
from sgl_kvtier.store.base import ReadOutcome

logger = logging.getLogger(__name__)

_GATHER_S = 0.01
"""Longest time, in seconds, that a page which was read waits for the others of its load."""
_CLOSE_S = 30.0


class Fence(Protocol):
    """An event after everything that may still use certain slots."""

    def query(self) -> bool:
        """Whether the event is reached."""

    def synchronize(self) -> None:
        """Blocks until it is, with the GIL released."""


class Copy(Protocol):
    """One copy in flight."""

    def place(self) -> None:
        """Starts writing to the slots. Mover's thread, after the fence was seen. If this raises,
        nothing writes to the slots any more.
        """

    def drop(self) -> None:
        """Releases what `begin` took. Mover's thread, in place of `place` or after it raised. Never
        raises.
        """

    def done(self) -> bool:
        """Whether the bytes are in place. Never blocks."""

    def wait(self) -> None:
        """Blocks until they are, with the GIL released."""

    @property
    def seconds(self) -> float | None:
        """Seconds that the link was busy with the copy, once done; None if not measured."""


class CopyDevice(Protocol):
    """Copies host pages into device slots, all layers."""

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of one copy; None for any number."""

    def enter(self) -> None:
        """Called first on each of the mover's threads: a new thread is on the first device."""

    def fence(self) -> Fence | None:
        """Returns a fence after everything that may still use slots allocated so far; None: nothing
        uses them. Fences are reached in the order in which they were made. Scheduler's thread.
        """

    def begin(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        fence: Any,
        window: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Copy | None:
        """Begins what can be done of a copy before its fence is reached. Returns None if there is
        no staging memory at present; called again after a fence was reached. `window`: host and
        device slots of a window that comes with the pages. Mover's thread.
        """


class Check(Protocol):
    """Checks pages after they were copied and before they may be read."""

    def look(self, load: Load, first: int, stop: int) -> Collection[int]:
        """Returns those of the copied pages [first, stop) of a load that differ and must not land.
        Runs on the copies' thread, on a CPU on the mover's, and may block it. Never raises.
        """


@dataclass(eq=False)
class _Piece:
    """Neighbouring pages [first, stop) of a load that are copied together."""

    load: Load
    fence: Fence | None
    first: int
    stop: int
    read_at: float
    copy: Copy | None = None

    @property
    def is_unwanted(self) -> bool:
        return self.load.cancelled and (self.load.restoration.closed or not self.load.owns_host)


class PageMover:
    """The thread that moves pages. `submit` and `wait_news` are for the scheduler's thread."""

    def __init__(self, device: CopyDevice, page_tokens: int, check: Check | None = None) -> None:
        self._device, self._check = device, check
        self._page = page_tokens
        self._changed = threading.Condition()
        self._ended: deque[tuple[Load, Any, int, ReadOutcome]] = deque()
        self._gathering_since = 0.0
        self._load_is_read = False
        self._fence_has_come = False
        self._news = threading.Event()
        self._closing = False
        self._waiting: list[_Piece] = []
        """Pages that were read and are not placed yet. Mover's thread."""
        self._link_free_at = self._compared_at = 0.0
        self._fences = EventWaiter("kvtier-fences", device.enter)
        self._copying = EventWaiter("kvtier-copies", device.enter)
        self._thread = threading.Thread(target=self._run, name="kvtier-mover", daemon=True)
        self._thread.start()

    def submit(self, load: Load, storage: Any, deadline_s: float) -> None:
        """Starts a load, the highest page first. Each page ends on its own, whatever happens."""
        pages, before = len(load.span), load.unread
        try:
            self._submit(load, storage, deadline_s)
        except Exception:
            # A driver or a store may raise anything. The scheduler knows of this load, so it has to
            # end.
            logger.exception("kvtier: a load could not be begun")
            if load.unread == before:
                self._put([(load, None, offset, ReadOutcome.FAILED) for offset in range(pages)])

    def _submit(self, load: Load, storage: Any, deadline_s: float) -> None:
        fence, pages = self._device.fence(), len(load.span)
        if fence is not None:
            self._fences.add(_FenceWait(fence), self._note_fence)
        if not load.owns_host:
            self._put([(load, fence, offset, ReadOutcome.OK) for offset in reversed(range(pages))])
            return

        def on_page(index: int, outcome: ReadOutcome) -> None:
            self._put([(load, fence, pages - 1 - index, outcome)])

        order = load.host_slots.view(pages, self._page).flip(0).flatten()
        how: dict[str, Any] = {}
        if (anchor := load.anchor) is not None:
            how["anchor"] = anchor.host.view(-1, anchor.page).flip(0).flatten()
        keys = load.restoration.keys_of(load.span)
        job = storage.begin_read(keys, order, deadline_s, on_page, **how) if storage else None
        load.job = job
        if job is None:
            self._put(
                [(load, fence, offset, ReadOutcome.MISS) for offset in reversed(range(pages))]
            )
        elif load.cancelled:
            job.cancel()

    def wait_news(self, timeout_s: float) -> None:
        """Blocks until a page has ended since the last call, or until the timeout."""
        self._news.wait(timeout_s)
        self._news.clear()

    def close(self) -> None:
        """Ends the threads after work in flight. Threads that do not end within `_CLOSE_S`, as
        after a device error, are abandoned. Idempotent.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        end = time.monotonic() + _CLOSE_S
        self._thread.join(_CLOSE_S)
        for waiter in (self._fences, self._copying):
            waiter.close(max(0.0, end - time.monotonic()))

    def _note_fence(self) -> None:
        """Runs on the fences' thread."""
        with self._changed:
            self._fence_has_come = True
            self._changed.notify()

    def _put(self, ended: list[tuple[Load, Any, int, ReadOutcome]]) -> None:
        """Queues pages whose read has ended; any thread. Wakes the mover not for every page, but
        when the gathering time starts, a load is read completely, or a page is lost.
        """
        with self._changed:
            begins = not self._ended
            if begins:
                self._gathering_since = time.monotonic()
            self._ended.extend(ended)
            for load, _, _, outcome in ended:
                load.unread -= 1
                # Compute may wait for pages that were cancelled or lost.
                self._load_is_read |= load.unread == 0 or outcome is not ReadOutcome.OK
            if begins or self._load_is_read:
                self._changed.notify()

    def _gatherable(self) -> bool:
        """Whether there are pages to copy now. Lock held."""
        if not self._ended:
            return False
        return (
            self._load_is_read
            or self._closing
            or time.monotonic() >= self._gathering_since + _GATHER_S
        )

    def _gathered(self) -> list[tuple[Load, Any, int, ReadOutcome]]:
        """Takes the pages to copy now. Lock held."""
        batch = list(self._ended) if self._gatherable() else []
        if batch:
            self._ended.clear()
            self._load_is_read = False
        return batch

    def _patience_s(self) -> float | None:
        """How long the mover may sleep, in seconds; None: until it is notified. Lock held."""
        if not self._ended:
            return None
        return max(0.0, self._gathering_since + _GATHER_S - time.monotonic())

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        self._device.enter()
        while True:
            with self._changed:
                if self._closing and not self._ended and not self._waiting:
                    return
                if not self._gatherable() and not self._fence_has_come:
                    self._changed.wait(self._patience_s())
                batch, self._fence_has_come = self._gathered(), False
            self._sort(batch)
            self._go_on()

    def _sort(self, batch: list[tuple[Load, Any, int, ReadOutcome]]) -> None:
        """Ends pages that were lost, and cuts the others into pieces."""
        ready: dict[int, tuple[Load, Any, list[int]]] = {}
        for load, fence, offset, outcome in batch:
            if outcome is ReadOutcome.OK:
                ready.setdefault(id(load), (load, fence, []))[2].append(offset)
            else:
                self._end(load, [offset], LOST[outcome])
        now, most = time.monotonic(), self._device.most_tokens
        pages = None if most is None else most // self._page
        for load, fence, offsets in ready.values():
            for first, stop in _runs(offsets, pages):
                self._waiting.append(_Piece(load, fence, first, stop, now))

    def _go_on(self) -> None:
        """Begins and places pieces where possible, those whose slots are free first."""
        left: list[_Piece] = []
        early: list[_Piece] = []
        for piece in self._waiting:
            (early if self._is_held(piece) else left).append(piece)
        self._waiting = [piece for piece in (*left, *early) if not self._advance(piece)]

    def _is_held(self, piece: _Piece) -> bool:
        """Whether something may still use the piece's slots. If the device raises, `_advance`
        handles it.
        """
        try:
            return piece.fence is not None and not piece.fence.query()
        except Exception:
            return False

    def _advance(self, piece: _Piece) -> bool:
        """Returns whether the mover is done with a piece: its copy into the slots is in flight, or
        its pages have ended. If a driver or a pool raises, these pages fail, not the thread.
        """
        load, pages = piece.load, list(range(piece.first, piece.stop))
        try:
            if piece.copy is None:
                if piece.is_unwanted:
                    self._end(load, pages, LOST[ReadOutcome.CANCELLED])
                    return True
                piece.copy = self._begun(piece)
            if piece.copy is None or (piece.fence is not None and not piece.fence.query()):
                return False
            piece.copy.place()
        except Exception:
            logger.exception("kvtier: a copy to the device failed")
            if piece.copy is not None:
                piece.copy.drop()
            self._end(load, pages, LOST[ReadOutcome.FAILED])
            return True
        if piece.fence is None:
            self._reap(piece, piece.copy)
        else:
            copy = piece.copy
            self._copying.add(copy, lambda: self._reap(piece, copy))
        return True

    def _begun(self, piece: _Piece) -> Copy | None:
        # Only slices: on an accelerator the slots' values may not be there before the fence, so
        # they must not be read here.
        host, device = (
            slots[piece.first * self._page : piece.stop * self._page]
            for slots in (piece.load.host_slots, piece.load.device_slots)
        )
        anchor = piece.load.anchor_of(piece.first, piece.stop)
        if anchor is None:
            return self._device.begin(host, device, piece.fence)
        return self._device.begin(host, device, piece.fence, (anchor.host, anchor.device))

    def _reap(self, piece: _Piece, copy: Copy) -> None:
        """A copy has ended. Runs on the copies' thread, or on the mover's."""
        state, seconds = LANDED, None
        try:
            if not copy.done():
                raise RuntimeError("a copy that was waited for has not ended")
            seconds = copy.seconds
        except Exception:
            logger.exception("kvtier: a copy to the device failed")
            state = LOST[ReadOutcome.FAILED]
        now = time.monotonic()
        if seconds is not None:
            # Counts the link's own time, without the wait for slots, so that the learned bandwidth
            # is the link's.
            self._link_free_at = max(self._link_free_at, piece.read_at) + seconds
            now = min(now, self._link_free_at)
        load, pages = piece.load, range(piece.first, piece.stop)
        wrong: Collection[int] = ()
        if self._check is not None and state == LANDED:
            begun = time.monotonic()
            wrong = self._check.look(load, piece.first, piece.stop)
            # Comparing acts as a second link after this one: while all pages are compared, loads
            # are as slow as comparing, and the planner loads less.
            now = max(self._compared_at, now) + time.monotonic() - begun
            self._compared_at = now
        self._end(load, [page for page in pages if page not in wrong], state, now)
        self._end(load, wrong, DIFFERS, now)

    def _end(
        self, load: Load, offsets: Collection[int], state: int, at: float | None = None
    ) -> None:
        at = time.monotonic() if at is None else at
        for offset in offsets:
            load.poll.mark(offset, state, at)
        self._news.set()


class _FenceWait:
    """A fence as something an `EventWaiter` waits for."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def wait(self) -> None:
        self._fence.synchronize()


def _runs(offsets: list[int], most: int | None) -> list[tuple[int, int]]:
    """Offsets as ascending runs [first, stop) of neighbours, of at most `most` pages each."""
    runs: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if runs and runs[-1][1] == offset and (most is None or offset - runs[-1][0] < most):
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs
