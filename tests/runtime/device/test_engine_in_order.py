"""Restorations on an accelerator that lags: nothing is read before it landed, nor given away before
the last copy of it has ended, whatever becomes of its request.
"""

from __future__ import annotations

import time

import pytest
from engine_lab import EngineLab, lab_of
from patience import until
from sglang_streams import PAGE, PAGES

from sgl_kvtier.runtime.step.polls import LANDED, OPEN
from sgl_kvtier.types import Span


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "sglang"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("seed", range(3))
def test_restorations_in_any_order(monkeypatch, seed, overlap, staged):
    lab = lab_of(monkeypatch, 100 * seed, overlap=overlap, staged=staged)
    lab.run(40)
    lab.end()
    lab.rig.device.check()
    assert lab.spliced >= 40 and lab.given_up >= 3
    for pool in (lab.device, lab.host):
        assert sorted(pool.free_pages) == list(range(PAGES))
    slots = lab.engine.context.slots
    assert (slots.tokens, slots.host_tokens, lab.engine.loads) == (0, 0, [])


def under_way(lab: EngineLab) -> None:
    """A load of two pages is placed, and its stream does not come to it."""
    r = lab.begin()
    assert r is not None
    lab.ask(r, Span(6, 8))
    lab.rig.device.drain()  # its fence
    lab.store.chance.random = lambda: 1.0
    for _ in range(2):
        lab.store.read()
    until(lambda: any(stream.todo for stream in lab.rig.device.streams), 20)
    time.sleep(0.02)


@pytest.fixture(params=["staged", "sglang"])
def lab(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> EngineLab:
    return lab_of(monkeypatch, staged=request.param == "staged")


def test_pages_of_a_request_that_is_gone_stay_its_loads_until_their_copies_ended(lab):
    under_way(lab)
    (load,) = lab.engine.loads
    lab.engine.abandon(load.restoration, "aborted")
    lab.tick()
    lab.engine.context.slots.free()
    assert set(load.poll.local) == {OPEN} and lab.engine.holds_memory
    assert lab.host.available_size() == lab.device.available_size() == (PAGES - 2) * PAGE
    lab.end()
    lab.rig.device.check()
    assert lab.host.available_size() == lab.device.available_size() == PAGES * PAGE


def test_pages_that_were_written_off_stay_their_loads_until_their_copies_ended(lab):
    under_way(lab)
    (load,) = lab.engine.loads
    lab.engine.context.now = load.due + 1
    lab.tick()
    assert load.written_off and lab.device.available_size() == (PAGES - 2) * PAGE
    lab.until(lambda: set(load.poll.local) == {LANDED})
    lab.end()
    lab.rig.device.check()


def test_room_is_given_by_what_has_landed_and_not_by_what_is_under_way(lab):
    under_way(lab)
    assert lab.engine.give_room(PAGE)
    assert lab.device.available_size() == (PAGES - 2) * PAGE
    lab.end()
    lab.rig.device.check()


def test_what_landed_is_read_by_the_next_forward(lab):
    under_way(lab)
    (load,) = lab.engine.loads
    lab.until(lambda: set(load.poll.local) == {LANDED})
    lab.tick()
    r = load.restoration
    r.front = 6
    slots = lab.engine.splice(r, Span(6, 8))
    lab.rig.forward("the chunk behind the jump", slots.tolist())
    lab.rig.device.check()
    lab.rows.append((slots, []))
    lab.end()
    lab.rig.device.check()
