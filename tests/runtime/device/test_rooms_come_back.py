"""Staging has all its rooms once every copy has ended, each of them once, whichever call of the
device fails on the way.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_fakes import host_load
from patience import until
from sglang_streams import PAGE, ROOM_PAGES, Rig, slots_of
from virtual_device import Event, Stream

from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.step.polls import LANDED, OPEN
from sgl_kvtier.runtime.step.restoration import Load


class Faults:
    """The mover's call of the device with this number fails, or it and all behind it."""

    def __init__(self, patch: pytest.MonkeyPatch, rig: Rig, number: int, ever_after: bool) -> None:
        self.number, self.ever_after = number, ever_after
        self.calls, self.raised = 0, False
        module: Any = rig.device.module
        places: list[tuple[Any, tuple[str, ...]]] = [
            (Event, ("record", "query", "synchronize")),
            (Stream, ("wait_event", "synchronize")),
            (module, ("Event", "stream")),
            (rig.memory, ("copy", "driver_call")),
            (rig.copies._scatter, ("launch",)),
        ]
        for owner, names in places:
            for name in names:
                patch.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*how: Any, **more: Any) -> Any:
            if threading.current_thread().name == "kvtier-mover":
                self.calls += 1
                if self.calls == self.number or (self.ever_after and self.calls > self.number):
                    self.raised = True
                    raise RuntimeError(f"call {self.calls} of the device failed")
            return call(*how, **more)

        return counted


def in_host(mover: PageMover, first: int) -> Load:
    """A load of a room's pages that are in host memory, into slots of the same numbers."""
    slots = slots_of(*range(first, first + ROOM_PAGES))
    load = host_load(slots, slots, PAGE)
    mover.submit(load, None, 1.0)
    return load


def ended(rig: Rig, *loads: Load) -> None:
    """Streams run until every page has ended."""
    end = time.monotonic() + 20
    while any(OPEN in load.poll.local for load in loads):
        assert time.monotonic() < end
        rig.device.drain()
        time.sleep(0.0005)


def one_failure(
    patch: pytest.MonkeyPatch, number: int, by_driver: bool, held: bool, ever_after: bool
) -> bool:
    """Two loads, of which a call may fail; then, on a device that works again, one more. Whether
    there was such a call.
    """
    rig = Rig(patch, number, staged=True, by_driver=by_driver)
    staging: Any = rig.copies._staging
    rooms = {id(room) for room in staging._free}
    release = rig.hold() if held else lambda: None
    faults = Faults(patch, rig, number, ever_after)
    mover = PageMover(rig.copies, PAGE)
    first, second = in_host(mover, 0), in_host(mover, ROOM_PAGES)
    if held:
        until(lambda: len(staging._free) <= len(rooms) - 2 or faults.raised)
        release()
    ended(rig, first, second)
    if not ever_after:
        faults.number = 0
        for load in (first, second):
            rig.fill(load.host_slots, 5, "the next owner of its host pages")
            rig.forward("the next owner of its slots", [], load.device_slots.tolist())
        last = in_host(mover, 0)
        ended(rig, last)
        assert set(last.poll.local) == {LANDED}
    rig.device.drain()
    if not ever_after:
        rig.device.check()
    mover.close()
    free = [id(room) for room in staging._free]
    assert len(free) == len(set(free)) and set(free) == rooms, f"call {number}"
    return faults.raised


@pytest.mark.parametrize("ever_after", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("held", [False, True], ids=["slots free", "slots held"])
@pytest.mark.parametrize("by_driver", [True, False], ids=["by the driver", "by torch"])
def test_every_room_comes_back_whichever_call_of_the_device_fails(
    monkeypatch, by_driver, held, ever_after
):
    for number in itertools.count(1):
        with monkeypatch.context() as patch:
            if not one_failure(patch, number, by_driver, held, ever_after):
                break
    assert number > 15  # so many calls were tried


def test_a_copy_that_was_never_sent_leaves_its_room_to_nobody_before_the_scatter_ended(monkeypatch):
    rig = Rig(monkeypatch, staged=True)
    fence = rig.copies.fence()
    rig.device.drain()
    assert fence.query()
    rooms = len(rig.copies._staging._free)
    for page in range(rooms):
        last = rig.copies.begin(slots_of(page), slots_of(page), fence)
    last.place()  # its room alone is free, and no stream has run yet
    event, calls = rig.device.module.Event, itertools.count()

    def fails_once(**how):
        if next(calls) == 0:
            raise RuntimeError("no event")
        return event(**how)

    monkeypatch.setattr(rig.device.module, "Event", fails_once)
    monkeypatch.setattr(Stream, "synchronize", lambda stream: None)  # the device says it is idle
    with pytest.raises(RuntimeError, match="no event"):
        rig.copies.begin(slots_of(30), slots_of(30), fence)
    rig.copies.begin(slots_of(30), slots_of(30), fence).place()
    rig.device.drain()
    rig.device.check()


class Windows:
    """Copies of windows, as `StagedCopies` takes them, of which a call may fail."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.calls = failing, list[str]()
        self.seconds = None

    def begin(self, host: Any, device: Any, fence: Any, window: Any) -> Windows:
        assert len(host) == len(device) == 0 and window is not None
        return self

    def place(self) -> None:
        self.called("place")

    def wait(self) -> None:
        self.called("wait")

    def done(self) -> bool:
        return "wait" in self.calls

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise RuntimeError(f"no {name}")


def with_windows(rig: Rig, windows: Windows) -> Any:
    rig.copies._windows = windows
    fence = rig.copies.fence()
    rig.device.drain()
    return rig.copies.begin(slots_of(0), slots_of(0), fence, (slots_of(1), slots_of(1)))


def test_pages_have_not_landed_before_their_windows(monkeypatch):
    rig, windows = Rig(monkeypatch, staged=True), Windows()
    copy = with_windows(rig, windows)
    copy.place()
    rig.device.drain()
    assert windows.calls == ["place"] and not copy.done()
    copy.wait()
    assert copy.done()


def test_windows_that_cannot_be_copied_leave_the_room_and_the_slots(monkeypatch):
    rig = Rig(monkeypatch, staged=True)
    rooms = len(rig.copies._staging._free)
    copy = with_windows(rig, Windows("place"))
    with pytest.raises(RuntimeError, match="no place"):
        copy.place()
    copy.drop()
    assert len(rig.copies._staging._free) == rooms
    rig.device.drain()
    rig.device.check()


@pytest.mark.parametrize("failing", ["", "wait"])
def test_pages_that_cannot_be_scattered_wait_for_their_windows(monkeypatch, failing):
    """Nothing writes into slots any more when the mover hears of it."""
    rig, windows = Rig(monkeypatch, staged=True), Windows(failing)
    rooms = len(rig.copies._staging._free)
    copy = with_windows(rig, windows)

    def fails(*_):
        raise RuntimeError("no scatter")

    monkeypatch.setattr(rig.copies._scatter, "launch", fails)
    with pytest.raises(RuntimeError, match="no scatter"):
        copy.place()
    copy.drop()
    assert windows.calls == ["place", "wait"] and len(rig.copies._staging._free) == rooms
