"""Pages compared on a GPU before they may be used: right ones land in every layout, and planted
mistakes of the copies land no wrong page.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import device_pools
import pytest
import torch
from engine_fakes import host_load
from patience import until
from place import LATENTS, LAYOUTS, Place

from sgl_kvtier.runtime.cuda import staged_copies
from sgl_kvtier.runtime.proof.pages import checks_of
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.restore.copy_device import memory_of, way_of
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, OPEN
from sgl_kvtier.runtime.step.restoration import Load

gpu = pytest.mark.gpu
SOURCE, TARGET = [3, 11, 4, 0, 7], [6, 2, 9, 1, 12]


pytestmark = pytest.mark.usefixtures("torch_threads")


class Scene:
    """Loads from host memory by the mover, each page compared before it lands."""

    def __init__(self, where: str, io: str, pools: tuple[Any, Any]) -> None:
        self.place = Place(where, io, pools)
        self.proof = Proof("", way_of(self.place.copies))
        self.rows = torch.zeros(2, 64 * self.place.page, dtype=torch.int32, device=where)
        controller = self.place.controller
        memory = memory_of(controller)
        made = checks_of(
            controller, self.rows, self.place.page, self.proof, memory, every_page=True
        )
        assert made is not None
        self.check, self.again = made
        self.mover = PageMover(self.place.copies, self.place.page, self.check)
        self.number = 0

    def load(self, source: list[int], target: list[int]) -> Load:
        """Begins a load."""
        self.number += 1
        place = self.place
        load = host_load(place.host_slots(source), place.slots(target), place.page, self.number)
        self.mover.submit(load, None, 60.0)
        return load

    def ended(self, load: Load) -> bytes:
        """The states of its pages."""
        until(lambda: OPEN not in load.poll.local, 240)
        return bytes(load.poll.local)

    def landed_wrong(self, load: Load, source: list[int], target: list[int]) -> int:
        """Pages that landed and are not those of host memory. Waits for the device."""
        states = zip(load.poll.local, source, target, strict=True)
        return sum(
            state == LANDED and not self.place.holds([one], [other]) for state, one, other in states
        )

    def close(self) -> None:
        """Ends the threads, and takes the host pool's registration with the driver back: the next
        pool may get the same memory.
        """
        self.mover.close()
        self.again.close()
        if self.place.on_card:
            torch.cuda.synchronize()
            self.place.host.destroy()


SceneOf = Callable[[str, str, tuple[Any, Any]], Scene]


@pytest.fixture
def scene_of() -> Iterator[SceneOf]:
    made: list[Scene] = []

    def make(*how: Any) -> Scene:
        made.append(Scene(*how))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_pages_of_every_layout_are_equal_and_land(scene_of, where, io, layout, dtype):
    scene = scene_of(where, io, device_pools.pools(where, layout, dtype=dtype))
    assert scene.ended(scene.load(SOURCE, TARGET)) == bytes([LANDED] * 5)
    assert scene.proof.pages == {"equal": 5} and scene.place.holds(SOURCE, TARGET)


@pytest.mark.parametrize(("where", "io", "layout"), LATENTS)
def test_pages_of_latents_are_equal_and_land(scene_of, where, io, layout):
    scene = scene_of(where, io, device_pools.latent_pools(where, layout))
    assert scene.ended(scene.load(SOURCE, TARGET)) == bytes([LANDED] * 5)
    assert scene.proof.pages == {"equal": 5}


@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_a_page_that_is_spoiled_in_front_of_the_look_does_not_land(scene_of, where, io, layout):
    scene = scene_of(where, io, device_pools.pools(where, layout))
    look = scene.check.look

    def spoiled(*how):
        row = scene.place.device.v_buffer[-1].view(torch.uint8)[TARGET[2] * scene.place.page + 3]
        row.view(-1)[5] ^= 1
        if scene.place.on_card:
            torch.cuda.synchronize()
        return look(*how)

    scene.check.look = spoiled
    states = scene.ended(scene.load(SOURCE, TARGET))
    assert states == bytes([LANDED, LANDED, DIFFERS, LANDED, LANDED])
    assert scene.proof.difference is not None and "values of layer 3" in scene.proof.difference.what


# --- planted mistakes -----------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch, Scene], None]


def layers_exchanged(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scatter = scene.place.copies._scatter
    order = torch.arange(len(scatter._tables), device="cuda")
    order[:2] = order[:2].flip(0)
    patch.setattr(scatter, "_tables", scatter._tables[order])


def values_where_the_keys_belong(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scatter = scene.place.copies._scatter
    patch.setattr(scatter, "_tables", scatter._tables.roll(len(scatter._tables) // 2))


def a_token_step_off(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scatter = scene.place.copies._scatter
    constants = {**scatter._constants, "TOKEN_STEP": scatter._constants["TOKEN_STEP"] + 4}
    patch.setattr(scatter, "_constants", constants)
    patch.setattr(scatter, "_compiled", None)


def the_last_page_not_sent(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    send, page = staged_copies.send_pages, scene.place.page

    def short(copy: Any, stream: Any, room: Any, host: Any, slots: Any, *rest: Any) -> None:
        send(copy, stream, room, host, slots[:-page] if len(slots) > page else slots, *rest)

    patch.setattr(staged_copies, "send_pages", short)
    # Another scene's staging had the same memory, and the same pages in it.
    for room in scene.place.copies._staging._rooms:
        room.memory.fill_(0xEE)
    torch.cuda.synchronize()


def pages_shifted_in_the_room(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    send = staged_copies.send_pages

    def shifted(copy: Any, stream: Any, room: Any, *rest: Any) -> None:
        send(copy, stream, (room[0] + 64, room[1]), *rest)

    patch.setattr(staged_copies, "send_pages", shifted)


def slots_of_the_next_page(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    scatter, page = scene.place.copies._scatter, scene.place.page
    launch = scatter.launch
    patch.setattr(scatter, "launch", lambda room, slots: launch(room, slots + page))


def an_end_in_front_of_the_scatter(patch: pytest.MonkeyPatch, scene: Scene) -> None:
    copies = scene.place.copies
    launch = copies._scatter.launch

    def late(room: Any, slots: Any) -> None:
        torch.cuda._sleep(400_000_000)
        launch(room, slots)

    def placed(room: Any, slots: Any, come: Any) -> Any:
        ended = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(copies._slots):
            copies._slots.wait_event(come)
            ended.record()
            late(room, slots)
            after = torch.cuda.Event()
            after.record()
            slots.record_stream(copies._slots)
        copies._staging.give(room, after)
        return ended

    patch.setattr(copies, "_place", placed)


@gpu
@pytest.mark.parametrize(
    "plant",
    [
        layers_exchanged, values_where_the_keys_belong, a_token_step_off, the_last_page_not_sent,
        pages_shifted_in_the_room, slots_of_the_next_page, an_end_in_front_of_the_scatter,
    ],
    ids=lambda plant: plant.__name__,
)  # fmt: skip
def test_a_planted_mistake_lands_no_wrong_page(scene_of, monkeypatch, plant):
    scene = scene_of("cuda", "kernel", device_pools.pools("cuda", "page_first"))
    if not hasattr(scene.place.copies, "_scatter"):
        pytest.fail("copies are not staged here")
    plant(monkeypatch, scene)
    load = scene.load(SOURCE, TARGET)
    states = scene.ended(load)
    assert DIFFERS in states and scene.proof.difference is not None
    assert scene.landed_wrong(load, SOURCE, TARGET) == 0
    assert scene.ended(scene.load([1, 2], [20, 21])) == bytes([DIFFERS] * 2)


@gpu
@pytest.mark.parametrize("seed", range(2))
def test_many_loads_beside_forwards_are_all_equal(scene_of, seed):
    chance = random.Random(seed)
    scene = scene_of("cuda", "kernel", device_pools.pools("cuda", "page_first"))
    place, free, loads = scene.place, list(range(2, 62)), []
    chance.shuffle(free)
    while free:
        taken = [free.pop() for _ in range(min(len(free), chance.randrange(1, 9)))]
        source = chance.sample(range(100), len(taken))
        with place.launched(overlap=chance.random() < 0.5):
            place.sleep(chance.random() * 0.01)
            place.scribble(taken)
        loads.append((scene.load(source, taken), source, taken))
    for load, source, taken in loads:
        assert scene.ended(load) == bytes([LANDED] * len(taken))
        assert scene.landed_wrong(load, source, taken) == 0
    assert scene.proof.pages == {"equal": 60} and scene.proof.difference is None


@gpu
@pytest.mark.parametrize("overwritten", [True, False], ids=["overwritten", "as it was"])
def test_a_forward_that_writes_over_a_landed_page_is_found_at_the_second_look(
    scene_of, overwritten
):
    """As one does that a fence has left out. Whoever owns the slots after the request comes behind
    the second look, and is not taken for it.
    """
    scene = scene_of("cuda", "kernel", device_pools.pools("cuda", "page_first"))
    place = scene.place
    load = scene.load(SOURCE, TARGET)
    assert scene.ended(load) == bytes([LANDED] * 5)
    if overwritten:
        with place.launched():
            place.sleep(0.05)
            place.scribble(TARGET)
    kept = load.restoration.to_look_at_again
    scene.rows[1, : len(load.device_slots)] = load.device_slots.to(torch.int32)
    slots = load.device_pages(kept.page, kept.page + 1, place.page)
    scene.again.attached("r1", kept, slots)
    req = SimpleNamespace(rid="r1", output_ids=[1], kv=SimpleNamespace(req_pool_idx=1))
    scene.again.prefilled(req)
    scene.rows.zero_()
    with place.launched():
        place.scribble(TARGET)
    end = time.monotonic() + 60
    while not scene.again._free.is_set() and time.monotonic() < end:
        time.sleep(0.01)
    found = scene.proof.difference
    assert (found is not None) is overwritten
    assert found is None or found.check == "second look"
