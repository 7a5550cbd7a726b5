"""Copies onto an accelerator are ordered behind what used their slots, and before what reads them:
with SGLang's own transfer engine and through staging, with both event loops, whatever the timing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sglang_streams import PAGE, PAGES, ROOM_PAGES, Rig, slots_of
from virtual_device import Race

Make = Callable[..., Rig]


@pytest.fixture(params=["staged", "staged by torch", "sglang", "all layers"])
def way(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {
        "staged": request.param.startswith("staged"),
        "by_driver": request.param != "staged by torch",
        "all_layers": request.param == "all layers",
    }


@pytest.fixture(params=["overlap", "no overlap"])
def make(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, way: dict[str, bool]
) -> Make:
    def made(seed: int = 0) -> Rig:
        return Rig(monkeypatch, seed, overlap=request.param == "overlap", **way)

    return made


def test_a_load_reaches_the_device_that_the_scheduler_uses(make):
    rig, copies = make(), []
    rig.fill(slots_of(1), 7)
    fence = rig.copies.fence()

    def load():
        rig.copies.enter()
        copies.append(rig.load(slots_of(1), slots_of(2), fence))

    mover = threading.Thread(target=load)
    mover.start()
    mover.join()
    rig.device.drain()
    rig.device.check()
    assert copies and copies[0].done() and rig.values(slots_of(2).tolist()) == {7}


@pytest.mark.parametrize("seed", range(10))
def test_slots_that_a_forward_still_uses_are_not_written(make, seed):
    rig = make(seed)
    rig.forward("a request's last step", [0, 1, 2, 3], [3])
    copy = rig.load(slots_of(5), slots_of(0))  # its slots were freed and claimed meanwhile
    while not copy.done():
        assert rig.device.step()
    rig.forward("the chunk behind the jump", [0, 1, 2, 3], [4, 5])
    rig.device.drain()
    rig.device.check()


def test_a_jump_over_pages_that_have_not_landed_is_seen(make):
    rig = make()
    rig.load(slots_of(5), slots_of(0))
    with pytest.raises(Race, match="may still write"):
        rig.forward("the chunk behind the jump", [0, 1, 2, 3], [4])


def test_the_time_of_a_copy_is_its_own_and_not_its_fences(make):
    rig = make()
    release = rig.hold()
    fence = rig.copies.fence()
    copy = rig.copies.begin(slots_of(1), slots_of(1), fence)
    rig.device.drain()
    rig.device.now_ms += 10_000.0
    release()
    rig.device.drain()
    assert fence.query()
    copy.place()
    rig.device.drain()
    assert copy.done() and 0 < copy.seconds < 1


@pytest.mark.parametrize("seed", range(12))
def test_loads_and_forwards_in_any_order(make, seed):
    """Slots go round between loads and forwards: read once landed, freed while a forward reads."""
    rig, chance = make(seed), random.Random(seed)
    free, bounce = list(range(PAGES)), list(range(PAGES))
    held: list[tuple[Any, Any, int, int, int]] = []
    under_way: list[tuple[Any, int, int, int]] = []
    rows: list[tuple[int, int]] = []

    def advance():
        for one in list(held):
            copy, fence, page, host, value = one
            if fence.query():
                copy.place()
                held.remove(one)
                under_way.append((copy, page, host, value))

    for number in range(1, 160):
        rig.device.steps(chance.randrange(6))
        advance()
        what = chance.choice(("load", "load", "settle", "forward", "finish"))
        if what == "load" and free and bounce:
            page, host = free.pop(0), bounce.pop(0)
            rig.fill(slots_of(host), number)
            fence = rig.copies.fence()
            copy = rig.copies.begin(slots_of(host), slots_of(page), fence)
            if copy is None:
                free.append(page)
                bounce.append(host)
            else:
                held.append((copy, fence, page, host, number))
        elif what == "settle" and under_way and under_way[0][0].done():
            _, page, host, value = under_way.pop(0)
            bounce.append(host)
            rows.append((page, value))
            assert rig.values(slots_of(page).tolist()) == {value}
        elif what == "forward" and rows:
            rig.forward(f"forward {number}", [int(s) for p, _ in rows for s in slots_of(p)])
        elif what == "finish" and rows:
            free.append(rows.pop(chance.randrange(len(rows)))[0])
    while held:
        rig.device.drain()
        advance()
    rig.device.drain()
    rig.device.check()
    assert all(copy.done() for copy, *_ in under_way)


def test_pages_cross_the_bus_while_a_forward_has_their_slots(monkeypatch):
    rig = Rig(monkeypatch, staged=True)
    rig.fill(slots_of(4), 9)
    release = rig.hold()
    rig.forward("a long chunk", [0, 1, 2, 3], [3])
    fence = rig.copies.fence()
    copy = rig.copies.begin(slots_of(4), slots_of(0), fence)
    rig.device.drain()
    assert copy._come.query() and not fence.query() and not copy.done()
    release()
    rig.device.drain()
    assert fence.query()
    copy.place()
    rig.device.drain()
    rig.device.check()
    assert rig.values([0, 1, 2, 3]) == {9}


def test_staging_full_of_pages_that_wait_keeps_a_room_for_those_that_need_not(monkeypatch):
    rig = Rig(monkeypatch, staged=True)
    free = rig.copies.fence()
    rig.device.drain()
    release = rig.hold()
    held = rig.copies.fence()
    early = []
    while (copy := rig.copies.begin(slots_of(1), slots_of(len(early)), held)) is not None:
        early.append(copy)
    assert len(early) >= 2
    ready = rig.load(slots_of(2), slots_of(30), free)
    rig.device.drain()
    assert ready.done() and not held.query()
    release()
    rig.device.drain()
    for copy in early:
        assert held.query()
        copy.place()
    rig.device.drain()
    rig.device.check()
    assert all(copy.done() for copy in early)


def test_staging_is_filled_again_and_again(monkeypatch):
    rig = Rig(monkeypatch, staged=True)
    for number in range(20):  # more than all rooms hold, and nothing has run yet
        pages = [2 * number % PAGES, (2 * number + 1) % PAGES]
        fence = rig.copies.fence()
        rig.device.drain() if number == 10 else None
        copy = rig.copies.begin(slots_of(*pages), slots_of(*pages), fence)
        while not fence.query():
            rig.device.step()
        copy.place()
    rig.device.drain()
    rig.device.check()
    assert rig.copies.most_tokens == ROOM_PAGES * PAGE


def test_pages_that_lie_apart_in_host_memory_come_to_their_own_slots(make):
    rig = make()
    for page, value in ((7, 70), (3, 30)):
        rig.fill(slots_of(page), value)
    rig.load(slots_of(7, 3), slots_of(0, 1))
    rig.device.drain()
    assert (rig.values(slots_of(0).tolist()), rig.values(slots_of(1).tolist())) == ({70}, {30})


def test_a_load_by_sglangs_kernel_of_all_layers_is_one_launch(monkeypatch):
    rig = Rig(monkeypatch, all_layers=True)
    rig.fill(slots_of(7, 3), 8)
    rig.load(slots_of(7, 3), slots_of(0, 1))
    rig.device.drain()
    assert rig.kernels == ["copy of all layers"]
    assert rig.values(slots_of(0, 1).tolist()) == {8}


def test_a_copy_that_fails_halfway_leaves_nothing_under_way(monkeypatch):
    rig = Rig(monkeypatch, staged=True)
    fence, launch = rig.copies.fence(), rig.copies._scatter.launch

    def broken(room, slots):
        launch(room, slots)
        raise RuntimeError("the launch behind it failed")

    rig.copies._scatter.launch = broken
    copy = rig.copies.begin(slots_of(1), slots_of(1), fence)
    rig.device.drain()
    assert fence.query()
    with pytest.raises(RuntimeError, match="behind it"):
        copy.place()
    rig.forward("somebody who was given the slots", [], [4, 5, 6, 7])
    rig.copies._scatter.launch = launch
    rig.load(slots_of(2), slots_of(2))
    rig.device.drain()
    rig.device.check()


@pytest.mark.parametrize("registered_pages", [1, 3, PAGES, 2 * PAGES])
@pytest.mark.parametrize("by_driver", [True, False], ids=["by the driver", "by torch"])
def test_neighbours_in_several_registrations_of_host_memory_are_several_copies(
    monkeypatch, registered_pages, by_driver
):
    rig = Rig(monkeypatch, staged=True, by_driver=by_driver, registered_pages=registered_pages)
    for page in range(0, PAGES, ROOM_PAGES):
        pages = range(page, page + ROOM_PAGES)
        for number in pages:
            rig.fill(slots_of(number), number + 1)
        rig.load(slots_of(*pages), slots_of(*pages))
        rig.device.drain()
    rig.device.check()
    for number in range(PAGES):
        assert rig.values(slots_of(number).tolist()) == {number + 1}


def test_the_error_of_a_copy_that_the_driver_refused_is_not_left_to_torchs_next_kernel(monkeypatch):
    rig = Rig(monkeypatch, staged=True)
    copies, memory = rig.copies, rig.memory
    memory.borders = [rig.pool.kv_buffer[0, PAGE].data_ptr()]
    with pytest.raises(RuntimeError, match="the device failed"):
        copies.begin(slots_of(0, 1), slots_of(0, 1), copies.fence())
    assert memory.errors_cleared == 1
    memory.borders = []
    rig.fill(slots_of(0, 1), 7)
    rig.load(slots_of(0, 1), slots_of(2, 3))
    rig.device.drain()
    assert rig.values(slots_of(2, 3).tolist()) == {7}
