"""What may be queued on the bus: how it is chosen, and that a load keeps to it."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_send_pages import COPY, compiled

from sgl_kvtier.runtime.cuda.bus_window import (
    SLICE_BYTES,
    START_BYTES,
    BusWindow,
    Trial,
    window_for,
)
from sgl_kvtier.runtime.cuda.card_memory import send_pages

MIB = 1 << 20
PAGE, PAGES, HALF = 4, 12, 48
ALL = (torch.arange(PAGES)[:, None] * PAGE + torch.arange(PAGE)).flatten()
_RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)


def trials(*found: tuple[int, float, float]) -> list[Trial]:
    """Of MiB, GB/s and microseconds."""
    return [Trial(mib * MIB, gbps, delay / 1e6) for mib, gbps, delay in found]


@pytest.mark.parametrize(
    ("found", "mib"),
    [
        ([], START_BYTES // MIB),
        ([(1, 26, 40), (2, 48, 60), (4, 50, 90), (16, 50, 290)], 2),
        ([(1, 26, 40), (2, 40, 60), (4, 50, 90), (16, 51, 290)], 4),
        ([(1, 10, 40), (2, 12, 60), (4, 14, 90), (16, 50, 900)], 4),
        ([(1, 24, 400), (2, 25, 500), (4, 25, 600)], 1),
        ([(1, 25, 10), (16, 25, 10)], 1),
    ],
    ids=[
        "nothing was measured",
        "the smallest that is fast enough",
        "the fastest",
        "the fast ones delay too long",
        "every one delays too long",
        "small copies do not wait at all",
    ],
)
def test_the_smallest_window_that_is_fast_and_does_not_delay_is_chosen(found, mib):
    assert window_for(trials(*found)) == mib * MIB
    assert window_for(trials(*found[::-1])) == mib * MIB


class Bus:
    """A driver that copies when an event behind the copy is waited for, and counts what is queued."""

    def __init__(self) -> None:
        self.host = torch.randint(0, 256, (2, PAGES, HALF), dtype=torch.uint8)
        self.room = torch.zeros(2, PAGES, HALF, dtype=torch.uint8)
        self.queue: deque[Any] = deque()
        self.queued = self.most_queued = 0
        self.pieces: list[int] = []
        self._driver = COPY(self._copy), _RECORD(self._record), _WAIT(self._wait)
        self.copy, self.record, self.wait = (
            ctypes.cast(f, ctypes.c_void_p).value or 0 for f in self._driver
        )
        self._numbers = 0

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        assert (kind, stream) == (1, 77)
        self.queue.append((to, source, nbytes))
        self.pieces.append(nbytes)
        self.queued += nbytes
        self.most_queued = max(self.most_queued, self.queued)
        return 0

    def _record(self, event: int, stream: int) -> int:
        self.queue.append(event)
        return 0

    def _wait(self, event: int) -> int:
        while event in self.queue:
            self._run()
        return 0

    def _run(self) -> None:
        entry = self.queue.popleft()
        if isinstance(entry, tuple):
            ctypes.memmove(*entry)
            self.queued -= entry[2]

    def drain(self) -> None:
        while self.queue:
            self._run()

    def event(self, blocking: bool) -> Any:
        assert blocking
        self._numbers += 1
        number = self._numbers
        return SimpleNamespace(
            cuda_event=number,
            record=lambda stream: self._record(number, 77),
            synchronize=lambda: self._wait(number),
        )

    def window(self, nbytes: int, *, by_driver: bool = True) -> BusWindow:
        events = (self.record, self.wait) if by_driver else None
        found = BusWindow(SimpleNamespace(Event=self.event), None, nbytes, events)
        self.drain()
        return found

    def send(self, window: BusWindow, borders: Sequence[int] = ()) -> None:
        k, v = (half.data_ptr() for half in self.host)
        place, host = (self.room.data_ptr(), PAGES), (k, v, PAGES, PAGE, HALF)
        send_pages(self.copy, 77, place, host, ALL, array("Q", borders), window.fields)


@compiled
@pytest.mark.parametrize("nbytes", [2, 50, 96, 300])
def test_a_load_never_has_more_than_its_window_queued_and_all_of_it_comes(nbytes):
    bus = Bus()
    window = bus.window(nbytes)
    for _ in range(3):  # a slice may go on in the next load
        bus.send(window)
        assert bus.most_queued <= nbytes
    bus.drain()
    assert torch.equal(bus.room, bus.host)
    assert bus.most_queued > nbytes // 2 and max(bus.pieces) <= nbytes // 2


@compiled
def test_the_next_slice_goes_when_the_last_but_one_has_come():
    bus = Bus()
    bus.send(bus.window(2 * HALF))
    assert set(bus.pieces) == {HALF} and len(bus.pieces) == 2 * PAGES
    assert bus.queued == bus.most_queued == 2 * HALF  # those still in flight when the call ends


@compiled
def test_slices_end_at_borders_of_registrations_as_well():
    bus = Bus()
    border = bus.host.data_ptr() + 5 * HALF + 7
    bus.send(bus.window(2 * HALF), borders=[border])
    bus.drain()
    assert torch.equal(bus.room, bus.host) and 7 in bus.pieces and bus.most_queued <= 2 * HALF


@compiled
def test_a_window_without_events_is_refused_and_nothing_is_sent():
    bus = Bus()
    window = bus.window(100)
    for fields in (window.fields[:5], array("Q", [0, 0, 0, 0, 0, 1])):
        window.fields = fields
        with pytest.raises(ValueError, match="window"):
            bus.send(window)
    assert bus.pieces == []


def test_copies_that_torch_makes_keep_to_it_too():
    bus = Bus()
    window, left = bus.window(100, by_driver=False), 1000
    while left:
        piece = min(left, window.room())
        bus._copy(bus.room.data_ptr(), bus.host.data_ptr(), piece, 1, 77)
        window.sent(piece)
        left -= piece
    assert sum(bus.pieces) == 1000 and bus.most_queued == 100


def test_a_slice_has_two_mebibytes_at_most():
    bus = Bus()
    assert bus.window(16 * MIB).room() == SLICE_BYTES
    assert bus.window(1 * MIB).room() == MIB // 2
