"""Copies from host pages into device pages: the bytes, and their order beside a forward."""

from __future__ import annotations

import random
import time

import device_pools
import pytest
import torch
from engine_fakes import host_load
from patience import until
from place import LATENTS, LAYOUTS, Place, wait

from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.step.polls import LANDED

SOURCE, TARGET = [3, 11, 4, 0, 7], [6, 2, 9, 1, 12]
LONG_S = 0.1
gpu = pytest.mark.gpu


pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.mark.parametrize(
    "kind",
    [
        {"page": 16},
        {"page": 64},
        {"dtype": torch.float16},
        {"dtype": torch.float8_e4m3fn},
        {"heads": 1},  # as on a rank of eight
    ],
    ids=["16 tokens", "64 tokens", "float16", "fp8", "one head"],
)
@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_pages_of_every_layout_arrive_byte_by_byte(where, io, layout, kind):
    place = Place(where, io, device_pools.pools(where, layout, **kind))
    wait(place.begin(SOURCE, TARGET), 240.0)
    assert place.holds(SOURCE, TARGET)
    assert not place.holds(SOURCE, TARGET[::-1])


@pytest.mark.parametrize(("where", "io", "layout"), LATENTS)
def test_pages_of_latents_arrive_byte_by_byte(where, io, layout):
    place = Place(where, io, device_pools.latent_pools(where, layout))
    wait(place.begin(SOURCE, TARGET), 240.0)
    assert place.holds(SOURCE, TARGET)


@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_what_no_copy_was_asked_for_stays_as_it_is(where, io, layout):
    place = Place(where, io, device_pools.pools(where, layout))
    others = [page for page in range(1, 40) if page not in TARGET]
    place.scribble(others)
    before = device_pools.rows(place.device, place.slots(others))
    wait(place.begin(SOURCE, TARGET), 240.0)
    assert device_pools.same(device_pools.rows(place.device, place.slots(others)), before)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_a_copy_waits_for_the_forward_that_still_writes_its_pages(where, io, layout, overlap):
    place = Place(where, io, device_pools.pools(where, layout))
    place.warm()
    with place.launched(overlap=overlap):
        place.sleep(LONG_S)
        place.scribble(TARGET)
    copy = place.begin(SOURCE, TARGET)
    wait(copy)
    assert place.holds(SOURCE, TARGET)


@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_a_forward_launched_later_is_behind_pages_seen_landed(where, io, layout):
    place = Place(where, io, device_pools.pools(where, layout))
    wait(place.begin(SOURCE, TARGET), 240.0)
    with place.launched():
        read = [
            layer.view(torch.uint8)[place.slots(TARGET)].clone().flatten(1)
            for both in zip(place.device.k_buffer, place.device.v_buffer, strict=True)
            for layer in both
        ]
    if place.on_card:
        torch.cuda.synchronize()
    wanted = device_pools.wanted_rows(place.host, place.host_slots(SOURCE))
    assert device_pools.same([rows.cpu() for rows in read], wanted)


@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_slots_that_nobody_holds_any_more_do_no_harm(where, io, layout):
    """Their tensors are dropped while the copy waits, and others take that memory at once."""
    place = Place(where, io, device_pools.pools(where, layout))
    place.warm()
    with place.launched():
        place.sleep(LONG_S)
    copy = place.begin(SOURCE, TARGET)
    junk = [
        torch.zeros(len(TARGET) * place.page, dtype=torch.int64, device=where) for _ in range(64)
    ]
    wait(copy)
    assert place.holds(SOURCE, TARGET) and junk


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_many_loads_of_any_size_beside_forwards_all_arrive(where, io, layout, seed):
    chance = random.Random(seed)
    place = Place(where, io, device_pools.pools(where, layout))
    place.warm()
    free = list(range(2, 64))
    chance.shuffle(free)
    under_way = []
    while free:
        taken = [free.pop() for _ in range(min(len(free), chance.randrange(1, 9)))]
        source = chance.sample(range(100), len(taken))
        with place.launched(overlap=chance.random() < 0.5):
            place.sleep(chance.random() * 0.01)
            place.scribble(taken)
        under_way.append((place.begin(source, taken), source, taken))
    for copy, source, taken in under_way:
        wait(copy)
        assert place.holds(source, taken)


@pytest.mark.parametrize(("where", "io", "layout"), LAYOUTS)
def test_the_mover_lands_pages_from_a_thread_of_its_own(where, io, layout):
    place = Place(where, io, device_pools.pools(where, layout))
    source, target = list(range(40)), list(range(20, 60))
    mover = PageMover(place.copies, place.page)
    load = host_load(place.host_slots(source), place.slots(target), place.page)
    mover.submit(load, None, 60.0)
    until(lambda: set(load.poll.local) == {LANDED}, 240)
    mover.close()
    assert place.holds(source, target)


@gpu
@pytest.mark.parametrize(("io", "layout"), device_pools.WAYS)
def test_a_copy_is_not_done_while_the_forward_before_it_runs(io, layout):
    place = Place("cuda", io, device_pools.pools("cuda", layout))
    place.warm()
    with place.launched():
        place.sleep(LONG_S)
        behind = torch.cuda.Event()
        behind.record()
    fence = place.copies.fence()
    copy = place.copies.begin(place.host_slots(SOURCE), place.slots(TARGET), fence)
    while not behind.query():
        assert not copy.done() or behind.query()
    wait(place.placed(copy, fence))
    assert place.holds(SOURCE, TARGET)


@gpu
@pytest.mark.real_gpu("a real clock")
def test_beginning_beside_a_kernel_of_100_ms_takes_less_than_1_ms():
    """The one test here that takes a time: a card's forward does not hold it up."""
    place = Place("cuda", "kernel", device_pools.pools("cuda", "page_first"))
    place.warm()
    source, target = place.host_slots(SOURCE), place.slots(TARGET)
    took = []
    for _ in range(5):
        with place.launched():
            place.sleep(LONG_S)
        fence = place.copies.fence()
        began = time.perf_counter()
        copy = place.copies.begin(source, target, fence)
        took.append(time.perf_counter() - began)
        wait(place.placed(copy, fence))
    assert sorted(took)[2] < 1e-3, took


@gpu
def test_a_second_card_would_be_told_from_the_first():
    """SGLang calls its device "cuda"; the mover's thread has to choose the scheduler's card."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one card")
    with torch.cuda.device(1):
        place = Place("cuda", "kernel", device_pools.pools("cuda", "page_first"))
        wait(place.begin(SOURCE, TARGET), 240.0)
        assert place.device.k_buffer[0].device.index == 1 and place.holds(SOURCE, TARGET)
