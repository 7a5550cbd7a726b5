"""The check at start finds what is wrong with a way of copying, and leaves the pools as they were."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from late_rows import LateRows, running
from sglang_streams import PAGE, Rig
from test_planted_mistakes import (
    ALL_LAYERS,
    BY_TORCH,
    SGLANG,
    STAGED,
    a_fence_that_was_never_recorded,
    a_fence_without_the_forwards,
    a_room_filled_before_its_scatter_ended,
    a_scatter_that_does_not_wait_for_the_bus,
    an_end_recorded_in_front_of_the_scatter,
    an_end_that_is_the_buss,
    rig_of,
)

from sgl_kvtier.runtime.cuda import bus_window
from sgl_kvtier.runtime.proof import start
from sgl_kvtier.runtime.proof.start import StartDiffers, StartResult

WAYS = (STAGED, BY_TORCH, SGLANG, ALL_LAYERS)
Plant = Callable[[pytest.MonkeyPatch, Rig], None]


def checked(rig: Rig, rows: LateRows | None = None) -> StartResult:
    rows = rows or LateRows(rig)
    with running(rig, rows):
        return start.check(rig.copies, rig.controller, rows)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("way", WAYS)
def test_a_way_that_is_right_is_found_right_and_the_pools_are_free_again(monkeypatch, way, seed):
    rig = rig_of(monkeypatch, way)
    rig.device.chance.seed(seed)
    stream = rig.controller.load_fence_stream
    for layer in (*rig.k, *rig.v):
        layer[:PAGE] = 9  # what SGLang's padding has written
    found = checked(rig)
    rig.device.drain()
    rig.device.check()
    assert found.pages > 2 * PAGE
    assert found.window_bytes == getattr(rig.copies, "window_bytes", None)
    assert rig.controller.load_fence_stream is stream
    assert all(bool((layer[:PAGE] == 9).all()) for layer in (*rig.k, *rig.v))
    assert not any(layer[PAGE:].any() for layer in (*rig.k, *rig.v))
    assert not rig.pool.kv_buffer.any()


def test_both_sides_of_every_border_between_registrations_are_copied(monkeypatch):
    rig = Rig(monkeypatch, staged=True, registered_pages=13)
    wanted = {12, 13, 25, 26, 38, 39}  # a half page of V comes behind PAGES of K
    assert wanted & set(start._choose(LateRows(rig), 4).host)
    checked(rig)
    assert rig.memory.errors_cleared == 0


def a_scatter_in_front_of_the_fence(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    begin = rig.copies.begin

    def begun(*how: Any) -> Any:
        copy = begin(*how)
        copy.place()
        copy.place = lambda: None
        return copy

    patch.setattr(rig.copies, "begin", begun)


def a_copy_that_ends_when_it_is_placed(patch: pytest.MonkeyPatch, rig: Rig) -> None:
    begin = rig.copies.begin

    def begun(*how: Any) -> Any:
        copy = begin(*how)
        copy.done, copy.wait = (lambda: True), (lambda: None)
        return copy

    patch.setattr(rig.copies, "begin", begun)


MISTAKES: list[tuple[Plant, str]] = [
    (a_fence_without_the_forwards, STAGED),
    (a_fence_without_the_forwards, SGLANG),
    (a_fence_without_the_forwards, ALL_LAYERS),
    (a_fence_that_was_never_recorded, STAGED),
    (a_scatter_in_front_of_the_fence, STAGED),
    (a_scatter_that_does_not_wait_for_the_bus, STAGED),
    (an_end_that_is_the_buss, STAGED),
    (an_end_recorded_in_front_of_the_scatter, STAGED),
    (a_copy_that_ends_when_it_is_placed, STAGED),
    (a_copy_that_ends_when_it_is_placed, SGLANG),
    (a_room_filled_before_its_scatter_ended, STAGED),
]


@pytest.mark.parametrize(
    ("plant", "way"), MISTAKES, ids=[f"{plant.__name__}-{way}" for plant, way in MISTAKES]
)
def test_a_planted_mistake_is_found_before_the_server_serves(monkeypatch, plant, way):
    """By what the pools hold: the virtual device's own eye for races is closed."""
    rig = rig_of(monkeypatch, way)
    monkeypatch.setattr(rig.device, "_access", lambda *_: None)
    plant(monkeypatch, rig)
    with pytest.raises(StartDiffers):
        checked(rig)


def test_a_copy_that_the_driver_refuses_is_no_way(monkeypatch):
    rig = Rig(monkeypatch, staged=True, registered_pages=13)
    monkeypatch.setattr(rig.copies, "_borders", array("Q"))
    with pytest.raises(RuntimeError, match="719"):
        checked(rig)


def test_the_window_is_the_one_that_the_measurement_calls_for(monkeypatch):
    monkeypatch.setattr(bus_window, "SLICE_BYTES", 256)
    rig = Rig(monkeypatch, staged=True)
    with running(rig, LateRows(rig)):
        trials = start.measure(rig.copies, rig.controller, windows=(64, 512, 1024))
    assert [trial.window_bytes for trial in trials] == [64, 512, 1024]
    assert all(trial.gbytes_per_s > 0 and trial.small_copy_s > 0 for trial in trials)
    assert not any(layer.any() for layer in (*rig.k, *rig.v))
