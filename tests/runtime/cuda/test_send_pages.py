"""All copies of a load in one call: which bytes go where, and what is refused before any is sent.

The driver's copy is a function of the C library, or of ctypes, with the same arguments.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.runtime.cuda import card_memory
from sgl_kvtier.runtime.cuda.card_memory import CardMemory, registration_borders, send_pages
from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.staging import Staging, staging_bytes

PAGE, PAGES, HALF, ROOM = 4, 12, 48, 5
STREAM = 77
COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t
)
compiled = pytest.mark.skipif(
    card_memory._native is None, reason="sgl_kvtier.runtime.cuda._native is not compiled"
)


def slots_of(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


class Bus:
    """Host pages, a room, and a driver that copies at once; the call `fails` answers an error."""

    def __init__(self, fails: int = 0) -> None:
        self.host = torch.randint(0, 256, (2, PAGES, HALF), dtype=torch.uint8)
        self.room = torch.zeros(2, ROOM, HALF, dtype=torch.uint8)
        self.sent: list[tuple[int, int, int]] = []
        """Bytes, kind and stream of each copy."""
        self._fails, self._driver = fails, COPY(self._copy)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        self.sent.append((nbytes, kind, stream))
        if len(self.sent) == self._fails:
            return 719
        ctypes.memmove(target, source, nbytes)
        return 0

    def send(self, slots: torch.Tensor, page: int = PAGE, borders: Sequence[int] = ()) -> None:
        address = ctypes.cast(self._driver, ctypes.c_void_p).value
        assert address is not None
        k, v = (half.data_ptr() for half in self.host)
        room = self.room.data_ptr(), ROOM
        send_pages(address, STREAM, room, (k, v, PAGES, page, HALF), slots, array("Q", borders))


@compiled
@pytest.mark.parametrize("pages", [[0], [3, 4, 5], [11, 0, 7], [2, 3, 9, 8, 7], [5, 5], []])
def test_pages_lie_in_the_room_in_the_order_of_the_load(pages):
    bus = Bus()
    bus.send(slots_of(*pages) if pages else torch.zeros(0, dtype=torch.int64))
    assert torch.equal(bus.room[:, : len(pages)], bus.host[:, pages])
    assert not bus.room[:, len(pages) :].any()


@compiled
def test_neighbours_in_host_memory_are_one_copy_of_each_half():
    bus = Bus()
    bus.send(slots_of(4, 5, 6, 1, 2))
    assert bus.sent == [(n * HALF, 1, STREAM) for n in (3, 3, 2, 2)]


@compiled
@pytest.mark.parametrize("cut", [1, HALF, HALF + 16, 3 * HALF - 1, 3 * HALF])
def test_a_copy_is_cut_where_host_memory_was_registered_in_pieces(cut):
    bus, pages = Bus(), [4, 5, 6]
    first = bus.host.data_ptr() + 4 * HALF
    bus.send(slots_of(*pages), borders=[first, first + cut, first + 4 * HALF])
    assert torch.equal(bus.room[:, :3], bus.host[:, pages])
    of_k = [cut, 3 * HALF - cut] if cut < 3 * HALF else [3 * HALF]
    assert [nbytes for nbytes, _, _ in bus.sent] == [*of_k, 3 * HALF]


def test_borders_are_where_one_of_sglangs_registrations_ends_and_the_next_begins():
    buffer = torch.zeros(8)
    assert list(registration_borders(buffer)) == []
    buffer._sglang_cuda_host_registered_ranges = [(900, 100), (700, 200), (1000, 50)]
    assert list(registration_borders(buffer)) == [900, 1000]


@compiled
@pytest.mark.parametrize(
    "slots",
    [
        slots_of(1, PAGES),
        slots_of(1) - 2 * PAGE,
        slots_of(1, 2) + 1,
        slots_of(1, 2)[:-1],
        slots_of(0, 2, 4, 6, 8, 10),
        slots_of(1, 2).to(torch.int32),
    ],
    ids=["behind", "in front", "within a page", "half a page", "more than a room", "other numbers"],
)
def test_slots_that_are_no_pages_are_refused_and_nothing_is_sent(slots):
    bus = Bus()
    with pytest.raises(ValueError, match="slot"):
        bus.send(slots)
    with pytest.raises(ValueError, match="slot"):
        bus.send(slots_of(1), page=0)
    assert bus.sent == [] and not bus.room.any()


@compiled
def test_a_copy_that_fails_is_the_last_and_says_the_drivers_error():
    bus = Bus(fails=3)
    with pytest.raises(RuntimeError, match="719"):
        bus.send(slots_of(1, 3, 5))
    assert len(bus.sent) == 3


@compiled
def test_copies_are_made_without_the_interpreter():
    holds_it = ctypes.cast(ctypes.pythonapi.PyGILState_Check, ctypes.c_void_p).value
    assert holds_it is not None
    bus = Bus()
    place = *(half.data_ptr() for half in bus.host), PAGES, PAGE, HALF
    # It answers 1, an error, where the calling thread holds the interpreter.
    send_pages(holds_it, STREAM, (bus.room.data_ptr(), ROOM), place, slots_of(1, 3))


def test_torch_makes_each_copy_where_the_driver_cannot_be_called(monkeypatch, caplog):
    monkeypatch.setattr(card_memory, "_native", None)
    with caplog.at_level(logging.WARNING):
        assert CardMemory(0).driver_copy() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "torch makes each copy" in line and "_native is not compiled" in line


@compiled
def test_torch_makes_each_copy_where_what_the_driver_copies_does_not_arrive(monkeypatch):
    """The calls of a card are stood in for by a CPU's."""
    nothing = ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value
    memmove = COPY(lambda to, source, nbytes, *_: bool(ctypes.memmove(to, source, nbytes) != to))
    stream = type("Stream", (), {"cuda_stream": STREAM, "synchronize": lambda self: None})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        CardMemory, "raw", lambda self, nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    )
    found = []
    for copy in (nothing, ctypes.cast(memmove, ctypes.c_void_p).value):
        monkeypatch.setattr(card_memory, "_driver_copy", lambda copy=copy: copy)
        found.append(CardMemory(0).driver_copy() is not None)
    assert found == [False, True]


# Rooms between the bus and the slots: who gets the last one, and when one is filled again.


SHAPE = PageShape(tokens=16, layers=4, row_bytes=64 << 10, layer_major=True)
MEMORY: Any = SimpleNamespace(raw=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def test_pages_that_cannot_leave_their_room_yet_never_get_the_last_one():
    staging = Staging(MEMORY, SHAPE)
    early = []
    while (room := staging.take(early=True)) is not None:
        early.append(room)
    assert len(early) == staging_bytes(SHAPE) // (2 * SHAPE.half_bytes * staging.pages) - 1
    last = staging.take(early=False)
    assert last is not None and last not in early
    assert staging.take(early=False) is None
    staging.give(early[0], left=7)
    assert staging.take(early=True) is None
    again = staging.take(early=False)
    assert again is early[0] and again.left == 7
