"""Mistakes planted in the copies, the mover, the engine and the adder: the device sees every one.

Each is one line that somebody could get wrong. None of them changes what this run happens to do:
the device sees that nothing orders it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_lab import EngineLab, lab_of
from sglang_streams import Rig, slots_of
from test_engine_in_order import under_way
from test_jump_in_order import Jump
from virtual_device import Event, Race

from sgl_kvtier.runtime.cuda import staged_copies
from sgl_kvtier.runtime.restore import copy_device
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.event_waiter import EventWaiter
from sgl_kvtier.runtime.step.polls import OPEN
from sgl_kvtier.types import Span

Plant = Callable[[pytest.MonkeyPatch, Any], None]


# --- copies ---------------------------------------------------------------------------------------


def one_load(rig: Rig) -> None:
    """Slots of a forward that runs are claimed, loaded and read; the bounce page is given away."""
    rig.fill(slots_of(5), 1)
    early = rig.device.module.Event()
    early.record()
    rig.early = early
    rig.forward("a request's last step", [0, 1, 2, 3], [3])
    fence = rig.copies.fence()
    copy = rig.copies.begin(slots_of(5), slots_of(0), fence)
    if not fence.query():
        rig.device.drain()
        assert fence.query()
    copy.place()
    while not copy.done():
        assert rig.device.step()
    rig.fill(slots_of(5), 2, "the next owner of its bounce page")
    rig.forward("the chunk behind the jump", [0, 1, 2, 3], [4])
    rig.device.drain()


def many_loads(rig: Rig) -> None:
    """More than staging and the ring of indices hold, while the streams do nothing."""
    fence = rig.copies.fence()
    rig.device.drain()
    assert fence.query()
    for number in range(12):
        first = rig.copies.begin(slots_of(2 * number), slots_of(2 * number), fence)
        second = rig.copies.begin(slots_of(2 * number + 1), slots_of(2 * number + 1), fence)
        first.place()
        second.place()
    rig.device.drain()


def a_fence_without_the_forwards(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    def fence(module: Any, _controller: Any) -> Any:
        event = module.Event()
        event.record()
        return event

    patch.setattr(staged_copies, "fence", fence)
    patch.setattr(copy_device, "fence", fence)


def a_fence_that_was_never_recorded(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(rig.copies, "fence", rig.device.module.Event)


def a_fence_from_before_the_forward(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(rig.copies, "fence", lambda: rig.early)


def a_copy_that_is_done_when_it_is_begun(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    begin = rig.copies.begin

    def begun(*how: Any) -> Any:
        copy = begin(*how)
        copy.done = lambda: True
        return copy

    patch.setattr(rig.copies, "begin", begun)


def a_scatter_that_does_not_wait_for_the_bus(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(rig.copies._slots, "wait_event", lambda event: None)


def a_scatter_in_front_of_the_fence(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    begin = rig.copies.begin

    def begun(*how: Any) -> Any:
        copy = begin(*how)
        copy.place()
        return copy

    patch.setattr(rig.copies, "begin", begun)


def an_end_that_is_the_buss(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    place = rig.copies._place

    def placed(room: Any, slots: Any, come: Any) -> Any:
        place(room, slots, come)
        return come

    patch.setattr(rig.copies, "_place", placed)


def a_room_filled_before_its_scatter_ended(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(rig.copies._bus, "wait_event", lambda event: None)


def a_room_given_back_when_it_is_filled(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    staging = rig.copies._staging
    take = staging.take

    def taken(early: bool) -> Any:
        room = take(early)
        staging._free.appendleft(room)
        return room

    patch.setattr(staging, "take", taken)
    patch.setattr(staging, "give", lambda room, left: setattr(room, "left", left))


def an_end_recorded_in_front_of_the_scatter(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    launch, place = rig.copies._scatter.launch, rig.copies._place
    ended: list[Any] = []

    def launched(room: Any, slots: Any) -> None:
        ended.append(rig.device.module.Event())
        ended[-1].record()
        launch(room, slots)

    def placed(*how: Any) -> Any:
        place(*how)
        return ended[-1]

    patch.setattr(rig.copies._scatter, "launch", launched)
    patch.setattr(rig.copies, "_place", placed)


def indices_written_while_they_are_uploaded(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(Event, "synchronize", lambda event: None)


def indices_uploaded_on_another_stream(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    upload, other = rig.copies._ring.upload, rig.device.module.Stream()

    def uploaded(slots: torch.Tensor) -> torch.Tensor:
        with rig.device.on(other):
            return upload(slots)

    patch.setattr(rig.copies._ring, "upload", uploaded)


def pages_sent_on_another_stream(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    patch.setattr(rig.copies._bus, "cuda_stream", rig.device.module.Stream().cuda_stream)


STAGED, BY_TORCH, SGLANG, ALL_LAYERS = "staged", "staged by torch", "sglang", "all layers"
OF_COPIES: list[tuple[Plant, str, Callable[[Rig], None]]] = [
    (a_fence_without_the_forwards, STAGED, one_load),
    (a_fence_without_the_forwards, SGLANG, one_load),
    (a_fence_that_was_never_recorded, STAGED, one_load),
    (a_fence_that_was_never_recorded, SGLANG, one_load),
    (a_fence_from_before_the_forward, STAGED, one_load),
    (a_fence_from_before_the_forward, SGLANG, one_load),
    (a_copy_that_is_done_when_it_is_begun, STAGED, one_load),
    (a_copy_that_is_done_when_it_is_begun, SGLANG, one_load),
    (a_scatter_that_does_not_wait_for_the_bus, STAGED, one_load),
    (a_scatter_that_does_not_wait_for_the_bus, BY_TORCH, one_load),
    (a_scatter_in_front_of_the_fence, STAGED, one_load),
    (an_end_that_is_the_buss, STAGED, one_load),
    (an_end_recorded_in_front_of_the_scatter, STAGED, one_load),
    (a_room_filled_before_its_scatter_ended, STAGED, many_loads),
    (a_room_filled_before_its_scatter_ended, BY_TORCH, many_loads),
    (a_room_given_back_when_it_is_filled, STAGED, many_loads),
    (a_room_given_back_when_it_is_filled, BY_TORCH, many_loads),
    (pages_sent_on_another_stream, STAGED, one_load),
    (indices_written_while_they_are_uploaded, SGLANG, many_loads),
    (indices_uploaded_on_another_stream, SGLANG, one_load),
    (a_fence_without_the_forwards, ALL_LAYERS, one_load),
    (a_copy_that_is_done_when_it_is_begun, ALL_LAYERS, one_load),
    (indices_written_while_they_are_uploaded, ALL_LAYERS, many_loads),
    (indices_uploaded_on_another_stream, ALL_LAYERS, one_load),
]


def rig_of(patch: pytest.MonkeyPatch, way: str) -> Rig:
    return Rig(
        patch,
        staged=way in (STAGED, BY_TORCH),
        by_driver=way != BY_TORCH,
        all_layers=way == ALL_LAYERS,
    )


@pytest.mark.parametrize(
    ("plant", "way", "scene"),
    OF_COPIES,
    ids=[f"{plant.__name__}-{way}" for plant, way, _ in OF_COPIES],
)
def test_a_mistake_in_the_copies_is_seen(monkeypatch, plant, way, scene):
    rig = rig_of(monkeypatch, way)
    plant(monkeypatch, rig)
    with pytest.raises(Race):
        scene(rig)
        rig.device.check()


@pytest.mark.parametrize("way", [STAGED, BY_TORCH, SGLANG, ALL_LAYERS])
@pytest.mark.parametrize("scene", [one_load, many_loads])
def test_without_a_mistake_nothing_is_seen(monkeypatch, way, scene):
    rig = rig_of(monkeypatch, way)
    scene(rig)
    rig.device.check()


# --- mover and engine -----------------------------------------------------------------------------


def aborted(lab: EngineLab) -> None:
    """A request goes while its copies are under way."""
    under_way(lab)
    lab.engine.abandon(lab.engine.loads[0].restoration, "aborted")
    lab.engine.context.slots.free()


def hung(lab: EngineLab) -> None:
    """Copies take so long that they are written off."""
    under_way(lab)
    lab.engine.context.now = lab.engine.loads[0].due + 1
    lab.tick()
    lab.engine.context.slots.free()


def spliced(lab: EngineLab) -> None:
    """What was loaded is a row's as soon as it may be."""
    under_way(lab)
    (load,) = lab.engine.loads
    r = load.restoration
    end = time.monotonic() + 0.5
    while OPEN in load.poll.local and time.monotonic() < end:
        time.sleep(0.001)  # the mover's thread marks pages, and may be late
    lab.tick()
    r.front = 6
    if lab.engine.trusted(r, Span(6, 8)):
        lab.rig.forward("the chunk behind the jump", lab.engine.splice(r, Span(6, 8)).tolist())


def loaded_under_a_forward(lab: EngineLab) -> None:
    """Slots of a forward that runs are claimed; nothing waits for the mover's answer but time."""
    lab.rig.forward("a request's last step", range(8), [3])
    r = lab.begin()
    assert r is not None
    lab.ask(r, Span(0, 2))
    for _ in range(2):
        lab.store.read()
    end = time.monotonic() + 5
    while not lab.rig.device.races and time.monotonic() < end:
        time.sleep(0.001)
    lab.rig.device.check()


def bounce_pages_freed_at_the_abort(patch: pytest.MonkeyPatch, lab: EngineLab) -> None:
    abandon = lab.engine.abandon

    def abandoned(r: Any, how: str) -> None:
        abandon(r, how)
        for load in r.loads:
            lab.engine.context.slots.put_back_host(load.host_slots)

    patch.setattr(lab.engine, "abandon", abandoned)


def slots_freed_at_the_abort(patch: pytest.MonkeyPatch, lab: EngineLab) -> None:
    abandon = lab.engine.abandon

    def abandoned(r: Any, how: str) -> None:
        abandon(r, how)
        for load in r.loads:
            lab.engine.context.slots.put_back(load.device_slots)

    patch.setattr(lab.engine, "abandon", abandoned)


def slots_freed_at_the_write_off(patch: pytest.MonkeyPatch, lab: EngineLab) -> None:
    write_off = RestoreEngine._write_off

    def written_off(engine: Any, load: Any, state: bytes) -> None:
        write_off(engine, load, state)
        engine.context.slots.put_back(load.device_slots)

    patch.setattr(RestoreEngine, "_write_off", written_off)


def a_wait_that_returns_at_once(patch: pytest.MonkeyPatch, lab: EngineLab) -> None:
    """A copy counts as ended when it is waited for, though its event has not come."""

    def add(waiter: Any, waitable: Any, then: Callable[[], None]) -> None:
        if hasattr(waitable, "done"):
            waitable.done = lambda: True
        then()

    patch.setattr(EventWaiter, "add", add)


def pages_used_before_they_landed(patch: pytest.MonkeyPatch, lab: EngineLab) -> None:
    patch.setattr(lab.engine, "trusted", lambda r, span: True)


def slots_written_without_a_look_at_their_fence(patch: pytest.MonkeyPatch, lab: EngineLab) -> None:
    always = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
    patch.setattr(lab.rig.copies, "fence", lambda: always)


OF_ENGINE: list[tuple[Plant, Callable[[EngineLab], None]]] = [
    (bounce_pages_freed_at_the_abort, aborted),
    (slots_freed_at_the_abort, aborted),
    (slots_freed_at_the_write_off, hung),
    (a_wait_that_returns_at_once, spliced),
    (pages_used_before_they_landed, spliced),
    (slots_written_without_a_look_at_their_fence, loaded_under_a_forward),
]


@pytest.mark.parametrize(
    ("plant", "scene"), OF_ENGINE, ids=[plant.__name__ for plant, _ in OF_ENGINE]
)
def test_a_mistake_in_mover_or_engine_is_seen(monkeypatch, plant, scene):
    lab = lab_of(monkeypatch)
    plant(monkeypatch, lab)
    with pytest.raises(Race):
        scene(lab)
    lab.rig.device.drain()


# --- the jump -------------------------------------------------------------------------------------


def a_row_written_from_its_start(patch: pytest.MonkeyPatch, jump: Jump) -> None:
    def written(where: Any, _slots: torch.Tensor) -> None:
        jump.write((0, slice(0, where[1].stop)), torch.zeros(where[1].stop, dtype=torch.int32))

    patch.setattr(jump.adder.tree_cache.req_to_token_pool, "write", written)


def a_row_written_on_another_stream(patch: pytest.MonkeyPatch, jump: Jump) -> None:
    other = jump.rig.device.module.Stream()

    def written(where: Any, slots: torch.Tensor) -> None:
        with jump.rig.device.on(other):
            jump.write(where, slots)

    patch.setattr(jump.adder.tree_cache.req_to_token_pool, "write", written)


def a_forward_that_does_not_wait_for_the_scheduler(patch: pytest.MonkeyPatch, jump: Jump) -> None:
    patch.setattr(jump.rig.forward_stream, "wait_stream", lambda other: None)


@pytest.mark.parametrize(
    "plant",
    [
        a_row_written_from_its_start,
        a_row_written_on_another_stream,
        a_forward_that_does_not_wait_for_the_scheduler,
    ],
)
def test_a_mistake_at_the_jump_is_seen(monkeypatch, plant):
    jump = Jump(monkeypatch, overlap=True)
    plant(monkeypatch, jump)
    with pytest.raises(Race):
        jump.jump()
    jump.release()
    jump.rig.device.drain()
    jump.lab.engine.close()
