"""Copies in two steps: over the bus into staging at once, then into slots once these are free.

The first step takes most of the time. It needs no fence, since no other copy uses this staging, and
no multiprocessor, since the copy engine works in parallel with a forward. The second step is one
launch for all layers, at the speed of the GPU's own memory.

Windows, which come only with the last pages of a prefix, are not staged: `windows` copies them in
the second step.
"""

from __future__ import annotations

import contextlib
import logging
from itertools import pairwise
from typing import Any

import torch

from sgl_kvtier.runtime.cuda.bus_window import START_BYTES, BusWindow
from sgl_kvtier.runtime.cuda.card_memory import CardMemory, registration_borders, send_pages
from sgl_kvtier.runtime.cuda.fences import fence
from sgl_kvtier.runtime.cuda.page_shape import host_pool_of, shape_of
from sgl_kvtier.runtime.cuda.scatter import Scatter
from sgl_kvtier.runtime.cuda.staging import Room, Staging

logger = logging.getLogger(__name__)


class StagedCopies:
    """Constructed on the scheduler's thread. `fence` runs there, everything else on the mover's."""

    def __init__(
        self, controller: Any, scatter: Scatter, memory: CardMemory, windows: Any = None
    ) -> None:
        """`windows`: a `CopyDevice` for the windows or states that come with pages. Raises
        torch.OutOfMemoryError if staging does not fit.
        """
        self._windows = windows
        pool = host_pool_of(controller)
        self._controller, self._scatter, self.memory = controller, scatter, memory
        self._page, self._half_bytes = int(pool.page_size), shape_of(pool).half_bytes
        self._host = [half.view(-1).view(torch.uint8) for half in pool.kv_buffer]
        k, v = (half.data_ptr() for half in self._host)
        pages = self._host[0].numel() // self._half_bytes
        self._host_place = k, v, pages, self._page, self._half_bytes
        self.host_pages, self.page_bytes = pages, 2 * self._half_bytes
        """Pages of the host pool; bytes of K and V of a page."""
        self._borders = registration_borders(pool.kv_buffer)
        self._driver_copy = memory.driver_copy()
        self._staging = Staging(memory, shape_of(pool))
        self.most_tokens = self._staging.pages * self._page
        """Most tokens of one copy."""
        self._module = torch.get_device_module(controller.device)
        self._index = self._module.current_device()
        self._bus, self._slots = self._module.Stream(), self._module.Stream()
        self._window: BusWindow | None = None
        self.bound_bus(START_BYTES)

    @property
    def rooms(self) -> int:
        """Number of staging rooms; each holds one copy."""
        return self._staging.rooms

    @property
    def slots_stream(self) -> Any:
        """The stream that copies pages from staging to their slots."""
        return self._slots

    @property
    def window_bytes(self) -> int | None:
        """Most bytes queued on the bus at a time; None: no limit."""
        return None if self._window is None else self._window.nbytes

    def bound_bus(self, nbytes: int) -> None:
        """Limits what is queued on the bus, if SGLang's own copies share it. Not while a copy is
        being begun.
        """
        if not self.memory.shares_bus:
            return
        events = None if self._driver_copy is None else self.memory.driver_events()
        if self._driver_copy is None or events is not None:
            self._window = BusWindow(self._module, self._bus, nbytes, events)

    def enter(self) -> None:
        """Called on each thread that uses these copies, before anything else."""
        self._module.set_device(self._index)

    def fence(self) -> Any:
        """An event after everything that may still use slots allocated before."""
        return fence(self._module, self._controller)

    def begin(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        fence: Any,
        window: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> StagedCopy | None:
        """Sends the pages over the bus; blocks, with the GIL released, until the last of them may
        be queued. Returns None if staging is full of pages that wait for their fences. Does not
        touch `device_slots` before `place`.
        """
        room = self._staging.take(early=not fence.query())
        if room is None:
            return None
        try:
            begun = self._module.Event(enable_timing=True)
            come = self._module.Event(enable_timing=True)
            if room.left is not None:
                self._bus.wait_event(room.left)
            begun.record(self._bus)
            self._send(room, host_slots)
            come.record(self._bus)
        except Exception:
            self._give_up(room)
            raise
        beside = None
        if window is not None:
            beside = self._windows.begin(host_slots[:0], device_slots[:0], fence, window)
        return StagedCopy(self, room, device_slots, begun, come, beside)

    def _give_up(self, room: Room) -> None:
        """Returns a room that is not scattered. Never raises."""
        self._settle(self._bus)
        # The event it waits for may not be reached yet: a copy that was never sent has not waited.
        self._staging.give(room, room.left)

    def _settle(self, *streams: Any) -> None:
        """Waits until these streams are idle. A device that fails counts as idle."""
        for stream in streams:
            try:
                stream.synchronize()
            except Exception:
                logger.exception("kvtier: a stream of the device failed")

    def _send(self, room: Room, host_slots: torch.Tensor) -> None:
        """Sends pages of host memory over the bus."""
        copy, stream = self._driver_copy, self._bus.cuda_stream
        if copy is not None:
            place = self._host_place
            window = None if self._window is None else self._window.fields
            try:
                send_pages(copy, stream, room.place, place, host_slots, self._borders, window)
            except RuntimeError:
                self.memory.clear_error()
                raise
            return
        with self._module.stream(self._bus):
            self._send_runs(room, host_slots[:: self._page].tolist())

    def _send_runs(self, room: Room, firsts: list[int]) -> None:
        """Sends pages that are neighbours in host memory in one copy of K and one of V."""
        size, at = self._half_bytes, 0
        while at < len(firsts):
            stop = at + 1
            while stop < len(firsts) and firsts[stop] == firsts[stop - 1] + self._page:
                stop += 1
            first = firsts[at] // self._page * size
            for half, host in enumerate(self._host):
                source = host[first : first + (stop - at) * size]
                self._copy(room.piece(half, at, stop - at), source)
            at = stop

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One copy, or several if the source spans several registrations."""
        first = source.data_ptr()
        cuts = [border - first for border in self._borders if 0 < border - first < len(source)]
        for start, stop in pairwise([0, *cuts, len(source)]):
            self._copy_slices(target[start:stop], source[start:stop])

    def _copy_slices(self, target: torch.Tensor, source: torch.Tensor) -> None:
        window, at = self._window, 0
        while at < len(source):
            stop = len(source) if window is None else min(len(source), at + window.room())
            self.memory.copy(target[at:stop], source[at:stop])
            if window is not None:
                window.sent(stop - at)
            at = stop

    def _place(self, room: Room, slots: torch.Tensor, come: Any) -> Any:
        """Scatters the room's pages into slots and gives it back; returns the event after it."""
        try:
            ended = self._module.Event(blocking=True)
            with self._module.stream(self._slots):
                self._slots.wait_event(come)
                self._scatter.launch(room, slots)
                ended.record()
                if slots.is_cuda:
                    slots.record_stream(self._slots)
        except Exception:
            self._settle(self._bus, self._slots)
            self._staging.give(room, None)
            raise
        self._staging.give(room, ended)
        return ended


class StagedCopy:
    """Pages on the bus or in staging; from `place` on, on their way into slots."""

    def __init__(
        self,
        copies: StagedCopies,
        room: Room,
        slots: torch.Tensor,
        begun: Any,
        come: Any,
        beside: Any,
    ) -> None:
        """`beside`: the copy of their windows, or None."""
        self._copies, self._into, self._beside = copies, slots, beside
        self._room: Room | None = room
        """None once it is given back."""
        self._begun, self._come, self._ended = begun, come, None

    def place(self) -> None:
        """Copies into the slots, once the fence was seen."""
        assert self._room is not None, "placed once, and not after it was dropped"
        if self._beside is not None:
            self._beside.place()
        room, self._room = self._room, None
        try:
            self._ended = self._copies._place(room, self._into, self._come)
        except Exception:
            if self._beside is not None:
                with contextlib.suppress(Exception):  # a device that fails counts as idle
                    self._beside.wait()
            raise

    def drop(self) -> None:
        """Gives the room back, in place of `place`. The copy is not used any more."""
        room, self._room = self._room, None
        if room is not None:
            self._copies._give_up(room)

    def done(self) -> bool:
        """Whether the pages are in their slots."""
        ended = self._ended is not None and bool(self._ended.query())
        return ended and (self._beside is None or bool(self._beside.done()))

    def wait(self) -> None:
        """Blocks until they are, with the GIL released."""
        assert self._ended is not None, "placed before it is waited for"
        self._ended.synchronize()
        if self._beside is not None:
            self._beside.wait()

    @property
    def seconds(self) -> float:
        """How long the bus was busy with it; known once it is done."""
        beside = None if self._beside is None else self._beside.seconds
        return float(self._begun.elapsed_time(self._come)) / 1e3 + (beside or 0.0)
