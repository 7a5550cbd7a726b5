"""Mistakes put into the copies of pages on purpose: each is found by what a scene reads, and without
it the scene finds nothing.

Gates choose the worst order: a forward has not run yet, the bus has not carried its bytes, a scatter
has not begun. Whatever says too early that it has ended, or does not wait, shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import device_pools
import pytest
import torch
from place import Place, wait
from stand_in.control import Gate, pageable_copies
from stand_in.kernels import bytes_now

from sgl_kvtier.runtime.cuda import staged_copies, staging
from sgl_kvtier.runtime.cuda.page_shape import shape_of
from sgl_kvtier.runtime.cuda.staged_copies import StagedCopies

PAGE = 16
SOURCE, TARGET, OTHER = [3, 4, 5, 0, 7], [6, 2, 9, 1, 12], [20, 21, 22]
WAYS = [("kernel", "page_first"), ("direct", "page_first_direct")]


class Scene:
    """Pages loaded into slots that a forward, which has not run yet, still reads and writes."""

    def __init__(self, io: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pools = device_pools.pools("cuda", layout, page=PAGE)
        # Three rooms of eight pages, so that they are used again.
        monkeypatch.setattr(staging, "ROOM_BYTES", 8 * 2 * shape_of(pools[1]).half_bytes)
        monkeypatch.setattr(staging, "MOST_BYTES", 0)
        self.patch = monkeypatch
        self.place = Place("cuda", io, pools)
        assert isinstance(self.copies, StagedCopies)
        self.place.warm()
        self.rooms = len(self.copies._staging._rooms)
        self.gates: list[Gate] = []
        self.junk: list[torch.Tensor] = []

    @property
    def copies(self) -> Any:
        return self.place.copies

    def closed(self, stream: Any) -> Gate:
        gate = Gate(stream)
        self.gates.append(gate)
        return gate

    def opened(self) -> None:
        """All gates; everything has run."""
        for gate in self.gates:
            gate.open()
        torch.cuda.synchronize()

    def begin(self, source: list[int], target: list[int]) -> tuple[Any, Any]:
        fence = self.copies.fence()
        slots = self.place.slots(target)
        return self.copies.begin(self.place.host_slots(source), slots, fence), fence

    def holds_now(self, source: list[int], target: list[int]) -> bool:
        """Whether the slots hold the pages already, whatever is on its way."""
        place, at = self.place, device_pools.slots(target, PAGE)
        found = [
            bytes_now(layer).view(len(layer), -1)[at]
            for both in zip(place.device.k_buffer, place.device.v_buffer, strict=True)
            for layer in both
        ]
        return device_pools.same(
            found, device_pools.wanted_rows(place.host, place.host_slots(source))
        )

    def unless_held_up(self, stream: Any) -> None:
        """Gives a stream that waits for nothing the time to end."""
        until = time.monotonic() + 0.2
        while time.monotonic() < until and not stream.query():
            time.sleep(0.001)

    def beside_a_forward(self) -> list[str]:
        """One load into slots whose last forward waits at a gate."""
        place, wrong = self.place, []
        at = place.slots(TARGET)
        before = device_pools.rows(place.device, at)
        gate = self.closed(place.forward)
        with place.launched():
            layers = (*place.device.k_buffer, *place.device.v_buffer)
            read = [layer.view(torch.uint8)[at].clone() for layer in layers]
            place.scribble(TARGET)
        copy, fence = self.begin(SOURCE, TARGET)
        torch.cuda.current_stream().synchronize()
        if fence.query():
            copy.place()
            wait(copy)
            gate.open()
        else:
            gate.open()
            fence.synchronize()
            copy.place()
            wait(copy)
        place.forward.synchronize()
        if not self.holds_now(SOURCE, TARGET):
            wrong.append("pages are wrong when they are said to have landed")
        self.opened()
        order = before[0::2] + before[1::2]
        if not all(torch.equal(a.cpu().flatten(1), b) for a, b in zip(read, order, strict=True)):
            wrong.append("a forward read what it should not have")
        if not place.holds(SOURCE, TARGET):
            wrong.append("pages are wrong")
        return wrong

    def beside_a_late_bus(self) -> list[str]:
        return self._late(self.copies._bus, self.copies._slots)

    def beside_a_late_scatter(self) -> list[str]:
        return self._late(self.copies._slots, self.copies._bus)

    def _late(self, stream: Any, other: Any) -> list[str]:
        """Two loads, whose slots nobody holds, and the bus of the second or the scatters of both
        wait at a gate: it may not say that it has ended.
        """
        place, wrong = self.place, []
        loads = ((SOURCE, TARGET), ([10, 11, 12], OTHER))
        first, fence = self.begin(*loads[0])
        fence.synchronize()
        gate = self.closed(stream)
        second, fence = self.begin(*loads[1])
        fence.synchronize()
        for copy in (first, second):
            copy.place()
            copy._into = None
        torch.cuda.current_stream().synchronize()
        self.unless_held_up(other)
        if second.done():
            wrong.append("an end before its bytes")
        for pages in (3, 5):  # others take the memory of slots that nobody holds
            self.junk += [
                torch.ones(pages * PAGE, dtype=torch.int64, device="cuda") for _ in range(16)
            ]
        torch.cuda.current_stream().synchronize()
        gate.open()
        for copy in (first, second):
            wait(copy)
        self.opened()
        if not all(place.holds(*load) for load in loads):
            wrong.append("pages are wrong")
        return wrong

    def through_all_rooms(self) -> list[str]:
        """As many loads as there are rooms and one more, while no scatter has run."""
        place, copies, loads = self.place, self.copies, []
        gate = self.closed(copies._slots)
        for n in range(self.rooms + 1):
            source, target = ([first + 3 * n + k for k in range(3)] for first in (0, 2))
            copy, fence = self.begin(source, target)
            fence.synchronize()
            copy.place()
            loads.append((copy, source, target))
        self.unless_held_up(copies._bus)
        gate.open()
        for copy, *_ in loads:
            wait(copy)
        self.opened()
        return [
            f"pages {target} are wrong"
            for _, source, target in loads
            if not place.holds(source, target)
        ]

    def wrong(self) -> list[str]:
        """What was wrong in the first order in which something was. A copy that fails is wrong."""
        try:
            for order in (
                self.beside_a_forward, self.beside_a_late_scatter, self.beside_a_late_bus, self.through_all_rooms,
            ):  # fmt: skip
                if found := order():
                    return found
        except RuntimeError as error:
            return [f"a copy failed: {error}"]
        finally:
            self.opened()
        return []


@pytest.fixture(params=WAYS, ids=lambda way: way[1])
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def scene(way: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    yield Scene(*way, monkeypatch)


def test_without_a_mistake_nothing_is_found(scene: Scene) -> None:
    assert scene.wrong() == []


# --- mistakes: each changes one thing of a scene


def _constant(name: str, change: Callable[[int], int]) -> Callable[[Scene], None]:
    def plant(scene: Scene) -> None:
        kernel = scene.copies._scatter
        kernel._constants[name] = change(kernel._constants[name])
        kernel._compiled = None  # compiled anew, for that constant

    return plant


def _begun(change: Callable[[Any, Any], Any]) -> Callable[[Scene], None]:
    def plant(scene: Scene) -> None:
        begin = scene.copies.begin
        scene.patch.setattr(
            scene.copies, "begin", lambda host, device, fence: begin(*change(host, device), fence)
        )

    return plant


def _placed(steps: str) -> Callable[[Scene], None]:
    """`_place` with its steps in this order: w waits for the bus, s scatters, e records the end, n
    notes that the slots are used; without n they are not. What follows an end waits at a gate.
    """

    def plant(scene: Scene) -> None:
        copies = scene.copies

        def place(room: Any, slots: Any, come: Any) -> Any:
            ended = torch.cuda.Event(blocking=True)
            with torch.cuda.stream(copies._slots):
                for step in steps:
                    if step == "w":
                        copies._slots.wait_event(come)
                    elif step == "s":
                        copies._scatter.launch(room, slots)
                    elif step == "e":
                        ended.record()
                        if "s" in steps[steps.index("e") :]:
                            scene.closed(copies._slots)
                    else:
                        slots.record_stream(copies._slots)
                behind = torch.cuda.Event()
                behind.record()
            copies._staging.give(room, behind)
            return ended

        scene.patch.setattr(copies, "_place", place)

    return plant


def _end_of_another_stream(scene: Scene) -> None:
    place = StagedCopies._place

    def changed(self: Any, room: Any, slots: Any, come: Any) -> Any:
        place(self, room, slots, come)
        ended = torch.cuda.Event(blocking=True)
        ended.record(torch.cuda.current_stream())
        return ended

    scene.patch.setattr(StagedCopies, "_place", changed)


def _fence_without_the_forward(scene: Scene) -> None:
    scene.place.controller.load_fence_stream = None


def _fence_of_an_earlier_tick(scene: Scene) -> None:
    old = scene.copies.fence()
    torch.cuda.synchronize()
    scene.patch.setattr(scene.copies, "fence", lambda: old)


def _rooms_given_away_at_once(scene: Scene) -> None:
    give = scene.copies._staging.give
    scene.patch.setattr(scene.copies._staging, "give", lambda room, left: give(room, None))


MISTAKES: dict[str, Callable[[Scene], None]] = {
    "page step off": _constant("PAGE_STEP", lambda step: step - 4),
    "half step off by a page": _constant("HALF_STEP", lambda step: step + 4),
    "wrong span: pages of the prompt's next position": _begun(
        lambda host, device: (host + PAGE, device)
    ),
    "wrong row: slots in another order": _begun(
        lambda host, device: (host, device.view(-1, PAGE).flip(0).flatten())
    ),
    "slots off by one token": _begun(lambda host, device: (host, device + 1)),
    "end recorded before the scatter": _placed("wesn"),
    "end never recorded": _placed("wsn"),
    "end recorded on another stream": _end_of_another_stream,
    "scatter does not wait for the bus": _placed("sen"),
    "slots freed while the scatter still reads them": _placed("wse"),
    "fence without the forward stream": _fence_without_the_forward,
    "fence of an earlier tick": _fence_of_an_earlier_tick,
    "room filled again before its scatter ran": _rooms_given_away_at_once,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(scene: Scene, mistake: str) -> None:
    MISTAKES[mistake](scene)
    assert scene.wrong(), mistake


def test_a_copy_over_a_border_of_two_registrations_fails_where_it_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As SGLang registers a large host pool, in pieces."""
    place = Place("cuda", *WAYS[0][:1], device_pools.pools("cuda", "page_first", page=PAGE))
    place.warm()
    pool = place.host
    runtime = torch.cuda.cudart()
    buffer = pool.kv_buffer
    first, nbytes = buffer.data_ptr(), buffer.numel() * buffer.element_size()
    page_bytes = nbytes // 2 // (pool.size // PAGE)
    border = 4 * page_bytes
    torch.cuda.synchronize()
    assert int(runtime.cudaHostUnregister(first)) == 0
    ranges = [(first, border), (first + border, nbytes - border)]
    for start, size in ranges:
        assert int(runtime.cudaHostRegister(start, size, 0)) == 0
    monkeypatch.setattr(buffer, "_sglang_cuda_host_registered_ranges", ranges, raising=False)
    cut = Place.__new__(Place)
    cut.__dict__.update(place.__dict__)
    cut.copies = staged_copies.StagedCopies(
        place.controller, place.copies._scatter, place.copies.memory
    )
    wait(cut.begin([2, 3, 4, 5], [30, 31, 32, 33]))
    assert cut.holds([2, 3, 4, 5], [30, 31, 32, 33])
    monkeypatch.setattr(cut.copies, "_borders", b"")
    with pytest.raises(RuntimeError, match="error 1 of its driver"):
        cut.begin([2, 3, 4, 5], [30, 31, 32, 33])


def test_loads_never_copy_pageable_memory(scene: Scene) -> None:
    place = scene.place
    host, device = place.host_slots(SOURCE), place.slots(TARGET)
    fence = place.copies.fence()
    fence.synchronize()
    before = pageable_copies()
    copy = place.copies.begin(host, device, fence)
    copy.place()
    wait(copy)
    assert pageable_copies() == before
    assert place.holds(SOURCE, TARGET)
