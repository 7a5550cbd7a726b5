"""Pages of a load are copied together once it is read, and by themselves only when the others are
slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patience import until

from sgl_kvtier.runtime.restore import page_mover
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.step.polls import LANDED, LOST, OPEN, Poll
from sgl_kvtier.runtime.step.restoration import Load
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, Span

PAGE = 4


class Event:
    """Comes when the test says so."""

    def __init__(self) -> None:
        self._come = threading.Event()

    def come(self) -> None:
        self._come.set()

    def query(self) -> bool:
        return self._come.is_set()

    def synchronize(self) -> None:
        assert self._come.wait(20)


class Copy:
    """Done when it is placed, or when its event comes."""

    seconds: float | None = None

    def __init__(self, ended: Event | None = None) -> None:
        self.ended, self.placed, self.dropped = ended, False, 0

    def place(self) -> None:
        self.placed = True

    def drop(self) -> None:
        self.dropped += 1

    def done(self) -> bool:
        return self.placed and (self.ended is None or self.ended.query())

    def wait(self) -> None:
        if self.ended is not None:
            self.ended.synchronize()


class Device:
    """Copies are done when they are placed. `copied` has the host slots of each."""

    most_tokens: int | None = None

    def __init__(self) -> None:
        self.copied: list[list[int]] = []

    def enter(self) -> None:
        """A device without an index."""

    def fence(self) -> Any:
        return None

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor, fence: Any) -> Any:
        assert len(host_slots) == len(device_slots)
        self.copied.append(host_slots[::PAGE].tolist())
        return Copy()


class Storage:
    """Reads end when the test says so, in the order asked for."""

    def __init__(self) -> None:
        self.on_page: list[Callable[[int, ReadOutcome], None]] = []

    def begin_read(
        self, keys: Any, slots: Any, deadline_s: float, on_page: Callable[[int, ReadOutcome], None]
    ) -> Any:
        self.on_page.append(on_page)
        return SimpleNamespace(cancel=lambda: None)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def mover(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageMover]:
    monkeypatch.setattr(page_mover, "_GATHER_S", 60.0)
    moving = PageMover(device, PAGE)
    yield moving
    moving.close()


def load_of(pages: int, owns_host: bool = True) -> Load:
    slots = torch.arange(pages * PAGE)
    restoration: Any = SimpleNamespace(keys_of=lambda span: [b""] * len(span), closed=False)
    return Load(
        restoration,
        Span(0, pages),
        Link.STORAGE_TO_DEVICE,
        slots,
        slots,
        owns_host,
        0.0,
        0.0,
        Poll(1, pages),
    )


def test_a_load_that_is_read_page_by_page_is_one_copy(mover, device):
    storage, load = Storage(), load_of(5)
    mover.submit(load, storage, 1.0)
    for index in range(4):
        storage.on_page[0](index, ReadOutcome.OK)
    time.sleep(0.05)
    assert (device.copied, load.poll.local) == ([], bytearray([OPEN] * 5))
    storage.on_page[0](4, ReadOutcome.OK)
    until(lambda: load.poll.local == bytearray([LANDED] * 5))
    assert device.copied == [[0, 4, 8, 12, 16]]


def test_a_load_that_is_read_takes_along_what_others_have(mover, device):
    storage, first, second = Storage(), load_of(2), load_of(2)
    mover.submit(first, storage, 1.0)
    mover.submit(second, storage, 1.0)
    storage.on_page[1](0, ReadOutcome.OK)
    for index in range(2):
        storage.on_page[0](index, ReadOutcome.OK)
    until(lambda: OPEN not in first.poll.local and second.poll.local[1] == LANDED)
    assert second.poll.local[0] == OPEN
    storage.on_page[1](1, ReadOutcome.OK)
    until(lambda: OPEN not in second.poll.local)


def test_neighbours_are_copied_together_and_what_lies_apart_by_itself(mover, device):
    # Slots of an accelerator may only be sliced here: they are computed on a stream that the fence
    # waits for.
    storage, load = Storage(), load_of(5)
    mover.submit(load, storage, 1.0)
    for index in (4, 0, 3, 1):
        storage.on_page[0](index, ReadOutcome.OK)
    storage.on_page[0](2, ReadOutcome.MISS)
    until(lambda: OPEN not in load.poll.local)
    assert device.copied == [[0, 4], [12, 16]]


def test_a_load_that_cannot_be_begun_ends(mover, device):
    first, second = load_of(2), load_of(2)
    mover.submit(first, SimpleNamespace(), 1.0)  # a store that cannot read
    until(lambda: OPEN not in first.poll.local)

    def broken():
        raise RuntimeError("the device is gone")

    device.fence = broken
    mover.submit(second, Storage(), 1.0)
    until(lambda: OPEN not in second.poll.local)
    failed = LOST[ReadOutcome.FAILED]
    assert (first.poll.local, second.poll.local) == (
        bytearray([failed] * 2),
        bytearray([failed] * 2),
    )


class Late(Device):
    """Copies that end, and fences that come, when the test says so, in the order of begin."""

    def __init__(self) -> None:
        super().__init__()
        self.fences: list[Event] = []
        self.copies: list[Copy] = []

    def fence(self) -> Any:
        self.fences.append(Event())
        return self.fences[-1]

    def begin(self, host_slots: torch.Tensor, device_slots: torch.Tensor, fence: Any) -> Any:
        super().begin(host_slots, device_slots, fence)
        self.copies.append(Copy(Event()))
        return self.copies[-1]


@pytest.fixture
def late() -> Iterator[tuple[Late, PageMover]]:
    device = Late()
    moving = PageMover(device, PAGE)
    yield device, moving
    for event in [*device.fences, *(copy.ended for copy in device.copies if copy.ended)]:
        event.come()
    moving.close()


def in_host(moving: PageMover, pages: int = 1) -> Load:
    load = load_of(pages, owns_host=False)
    moving.submit(load, None, 1.0)
    return load


def test_a_copy_whose_fence_has_not_come_is_begun_and_not_placed(late):
    device, moving = late
    load = in_host(moving)
    until(lambda: len(device.copies) == 1)
    time.sleep(0.02)
    assert not device.copies[0].placed
    device.fences[0].come()
    until(lambda: device.copies[0].placed)
    assert load.poll.local[0] == OPEN
    device.copies[0].ended.come()
    until(lambda: load.poll.local[0] == LANDED)


def test_a_page_read_later_is_placed_before_one_whose_fence_has_not_come(late):
    device, moving = late
    storage, first = Storage(), load_of(1)
    moving.submit(first, storage, 1.0)  # its fence comes first, and its page later
    device.fences[0].come()
    second = in_host(moving)
    until(lambda: len(device.copies) == 1)
    storage.on_page[0](0, ReadOutcome.OK)
    until(lambda: len(device.copies) == 2 and device.copies[1].placed)
    device.copies[1].ended.come()
    until(lambda: first.poll.local[0] == LANDED)
    assert second.poll.local[0] == OPEN and not device.copies[0].placed


def test_pages_for_which_there_is_no_room_are_begun_when_a_fence_has_come(late, monkeypatch):
    device, moving = late
    begin = device.begin
    device.begin = lambda host, slots, fence: (
        begin(host, slots, fence) if fence.query() or not device.copies else None
    )
    first, second = in_host(moving), in_host(moving)
    until(lambda: len(device.copies) == 1)
    for fence in device.fences:
        fence.come()
    until(lambda: [copy.placed for copy in device.copies] == [True, True])
    for copy in device.copies:
        copy.ended.come()
    until(lambda: (first.poll.local[0], second.poll.local[0]) == (LANDED, LANDED))


def test_a_copy_has_no_more_pages_than_the_device_takes(mover, device):
    device.most_tokens = 2 * PAGE
    load = in_host(mover, pages=5)
    until(lambda: OPEN not in load.poll.local)
    assert device.copied == [[0, 4], [8, 12], [16]]


def test_a_load_that_waited_for_slots_ended_when_its_link_was_done(late):
    device, moving = late
    load, begun = in_host(moving), time.monotonic()
    until(lambda: len(device.copies) == 1)
    device.copies[0].seconds = 0.001
    time.sleep(0.2)
    device.fences[0].come()
    device.copies[0].ended.come()
    until(lambda: load.poll.local[0] == LANDED)
    assert load.poll.ended_at[0] - begun < 0.2


def test_a_copy_that_fails_costs_its_own_pages(late):
    device, moving = late
    begin, broken = device.begin, []

    def breaks_once(host, slots, fence):
        if not broken:
            broken.append(True)
            raise RuntimeError("a driver's error")
        return begin(host, slots, fence)

    device.begin = breaks_once
    first, second = in_host(moving), in_host(moving)
    until(lambda: first.poll.local[0] == LOST[ReadOutcome.FAILED])
    for fence in device.fences:
        fence.come()
    until(lambda: bool(device.copies) and device.copies[0].placed)
    device.copies[0].ended.come()
    until(lambda: second.poll.local[0] == LANDED)


def test_a_copy_whose_fence_fails_is_dropped_and_not_placed(late):
    device, moving = late
    load = in_host(moving)
    until(lambda: len(device.copies) == 1)

    def broken():
        raise RuntimeError("a device's error")

    device.fences[0].query = broken
    device.fences[0].come()
    until(lambda: load.poll.local[0] == LOST[ReadOutcome.FAILED])
    assert (device.copies[0].dropped, device.copies[0].placed) == (1, False)


def test_closing_leaves_a_copy_behind_that_never_ends(late, monkeypatch):
    device, moving = late
    monkeypatch.setattr(page_mover, "_CLOSE_S", 0.05)
    in_host(moving)
    device.fences[0].come()
    until(lambda: bool(device.copies) and device.copies[0].placed)
    closing = threading.Thread(target=moving.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive()


def test_a_page_does_not_wait_for_a_slow_one(device, monkeypatch):
    monkeypatch.setattr(page_mover, "_GATHER_S", 0.001)
    moving, storage, load = PageMover(device, PAGE), Storage(), load_of(2)
    moving.submit(load, storage, 1.0)
    storage.on_page[0](0, ReadOutcome.OK)
    until(lambda: load.poll.local[1] == LANDED)
    assert (load.poll.local[0], device.copied) == (OPEN, [[4]])
    storage.on_page[0](1, ReadOutcome.OK)
    until(lambda: load.poll.local[0] == LANDED)
    moving.close()


def test_closing_copies_what_was_read(device, monkeypatch):
    monkeypatch.setattr(page_mover, "_GATHER_S", 60.0)
    moving, storage, load = PageMover(device, PAGE), Storage(), load_of(2)
    moving.submit(load, storage, 1.0)
    storage.on_page[0](0, ReadOutcome.OK)
    moving.close()
    assert load.poll.local == bytearray([OPEN, LANDED])


def test_a_copy_that_has_not_ended_although_it_was_waited_for_is_lost(late):
    device, moving = late
    load = in_host(moving)
    until(lambda: len(device.copies) == 1)
    device.copies[0].done = lambda: False
    device.copies[0].ended.come()
    device.fences[0].come()
    until(lambda: load.poll.local[0] == LOST[ReadOutcome.FAILED])


def test_two_copies_that_waited_for_slots_had_the_link_one_after_the_other(late):
    device, moving = late
    loads = in_host(moving), in_host(moving)
    until(lambda: len(device.copies) == 2)
    for copy in device.copies:
        copy.seconds = 0.01
        copy.ended.come()
    time.sleep(0.1)
    for fence in device.fences:
        fence.come()
    until(lambda: all(load.poll.local[0] == LANDED for load in loads))
    first, second = sorted(load.poll.ended_at[0] for load in loads)
    assert second - first >= 0.01 - 1e-6


def test_pages_that_are_compared_end_one_after_the_other_when_that_is_done():
    """What a comparison takes counts as the load's time, and what was waited for before does not."""
    device = Late()

    class Slow:
        def look(self, load, first, stop):
            time.sleep(0.05)
            return []

    moving = PageMover(device, PAGE, Slow())
    loads = in_host(moving), in_host(moving)
    until(lambda: len(device.copies) == 2)
    for copy in device.copies:
        copy.seconds = 0.01
        copy.ended.come()
    for fence in device.fences:
        fence.come()
    until(lambda: all(load.poll.local[0] == LANDED for load in loads))
    first, second = sorted(load.poll.ended_at[0] for load in loads)
    assert second - first >= 0.05 - 1e-6 and second <= time.monotonic()
    moving.close()


def test_pages_whose_slots_are_free_go_before_those_that_were_read_sooner(
    mover, device, monkeypatch
):
    fences = [Event(), Event()]
    remaining = iter(fences)
    monkeypatch.setattr(device, "fence", lambda: next(remaining))
    storage, held, free = Storage(), load_of(2), load_of(1)
    mover.submit(held, storage, 1.0)
    mover.submit(free, storage, 1.0)
    fences[1].come()
    storage.on_page[0](0, ReadOutcome.OK)  # waits for the other page of its load
    storage.on_page[1](0, ReadOutcome.OK)
    until(lambda: len(device.copied) == 2)
    assert device.copied == [[0], [PAGE]]
    storage.on_page[0](1, ReadOutcome.OK)
    fences[0].come()
    until(lambda: OPEN not in held.poll.local)


def test_a_read_that_is_cancelled_while_it_is_begun_is_cancelled(mover):
    load, cancelled = load_of(1), []

    class Cancelling(Storage):
        def begin_read(self, *how, **named):
            super().begin_read(*how, **named)
            load.cancel()  # there is no job yet that it could cancel
            return SimpleNamespace(cancel=lambda: cancelled.append(True))

    storage = Cancelling()
    mover.submit(load, storage, 1.0)
    assert cancelled == [True]
    storage.on_page[0](0, ReadOutcome.CANCELLED)
    until(lambda: OPEN not in load.poll.local)


def test_a_lost_page_hurries_those_that_were_read_although_others_are_still_to_come(mover, device):
    storage, load = Storage(), load_of(3)
    mover.submit(load, storage, 1.0)
    storage.on_page[0](0, ReadOutcome.OK)
    storage.on_page[0](1, ReadOutcome.MISS)
    until(lambda: load.poll.local[2] == LANDED)
    assert list(load.poll.local) == [OPEN, LOST[ReadOutcome.MISS], LANDED]
    storage.on_page[0](2, ReadOutcome.OK)
    until(lambda: OPEN not in load.poll.local)


@pytest.mark.parametrize(
    ("closed", "owns_host", "landed"),
    [(False, True, True), (True, True, False), (False, False, False)],
)
def test_of_a_load_that_was_taken_back_only_what_was_read_for_a_living_request_is_copied(
    mover, device, closed, owns_host, landed
):
    storage, load = Storage(), load_of(1, owns_host)
    load.restoration.closed = closed
    load.cancelled = True
    mover.submit(load, storage, 1.0)
    if owns_host:
        storage.on_page[0](0, ReadOutcome.OK)
    until(lambda: OPEN not in load.poll.local)
    assert load.poll.local[0] == (LANDED if landed else LOST[ReadOutcome.CANCELLED])
    assert device.copied == ([[0]] if landed else [])


def test_pages_of_a_read_that_breaks_after_it_began_are_not_said_to_have_ended(mover, device):
    class Breaking(Storage):
        def begin_read(self, keys, slots, deadline_s, on_page):
            on_page(0, ReadOutcome.OK)
            raise RuntimeError("the store's, and nobody knows what it still writes to")

    load, other = load_of(2), load_of(1)
    mover.submit(load, Breaking(), 1.0)
    storage = Storage()
    mover.submit(other, storage, 1.0)
    storage.on_page[0](0, ReadOutcome.OK)
    until(lambda: load.poll.local[1] == LANDED and other.poll.local[0] == LANDED)
    assert load.poll.local[0] == OPEN
