"""Pages on the device compared with the host pages that they were loaded from, in SGLang's real
pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import device_pools
import numpy as np
import pytest
import torch
from device_pools import LAYOUTS, controller, latent_pools, slots
from engine_fakes import host_load
from patience import until

from sgl_kvtier.runtime.proof import pages, record
from sgl_kvtier.runtime.proof.pages import ReadBack, Sampling, checks_of
from sgl_kvtier.runtime.proof.record import Proof, State
from sgl_kvtier.runtime.restore.copy_device import CpuCopies
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, OPEN
from sgl_kvtier.runtime.step.restoration import Load

PAGE = 16
GIB = 1 << 30
pools = partial(device_pools.pools, heads=2, dim=32)
FROM, TO = [2, 9, 4], [5, 3, 7]

PAIRS = [
    *((f"keys and values, {layout}", lambda way=layout: pools("cpu", way)) for layout in LAYOUTS),
    ("one head, page_head", lambda: device_pools.pools("cpu", "page_head", heads=1, dim=32)),
    *(
        (f"latents, {layout}", lambda way=layout: latent_pools("cpu", way))
        for layout in ("page_first", "page_first_direct")
    ),
    ("fp8, page_first", lambda: pools("cpu", "page_first", dtype=torch.float8_e4m3fn)),
]
each_pool = pytest.mark.parametrize(
    "made", [make for _, make in PAIRS], ids=[name for name, _ in PAIRS]
)


pytestmark = pytest.mark.usefixtures("torch_threads")


def loaded(pair: tuple[Any, Any]) -> ReadBack:
    """What reads pages back of pools whose device pages `TO` have what host pages `FROM` have."""
    device, host = pair
    device_pools.put(device, slots(TO, PAGE), device_pools.wanted_rows(host, slots(FROM, PAGE)))
    return ReadBack(controller(*pair, "direct"), PAGE, None)


def differing(back: ReadBack) -> dict[int, tuple[str, int]]:
    return back.differing(slots(FROM, PAGE), slots(TO, PAGE))


def buffers(device: Any) -> dict[str, list[torch.Tensor]]:
    if hasattr(device, "k_buffer"):
        return {"keys": device.k_buffer, "values": device.v_buffer}
    return {"latents": device.kv_buffer}


PIECES = (16 << 20, 3000, 1)
"""Bytes of a piece: all pages at once, some layers of a page, one layer of a page."""


@pytest.mark.parametrize("piece_bytes", PIECES)
@each_pool
def test_one_bit_anywhere_on_the_device_is_found_where_it_is(made, piece_bytes, monkeypatch):
    monkeypatch.setattr(pages, "PIECE_BYTES", piece_bytes)
    pair = made()
    back = loaded(pair)
    assert differing(back) == {}
    for half, layers in buffers(pair[0]).items():
        for layer, rows in enumerate(layers):
            flat = rows.view(torch.uint8).view(len(rows), -1)
            for page, token, byte in ((0, 0, 0), (1, 7, flat.shape[1] // 2), (2, PAGE - 1, -1)):
                flat[TO[page] * PAGE + token, byte] ^= 4
                assert differing(back) == {page: (half, layer)}
                flat[TO[page] * PAGE + token, byte] ^= 4
    assert differing(back) == {}


@each_pool
def test_every_mistake_of_order_is_found(made):
    """Layers, halves, pages or tokens exchanged: each leaves the same bytes in another place."""
    pair = made()
    back = loaded(pair)
    host, device = slots(FROM, PAGE), slots(TO, PAGE)
    turned = device.view(3, PAGE).flip(0).flatten()
    assert sorted(back.differing(host, turned)) == [0, 2]
    assert sorted(back.differing(host, device.roll(1))) == [0, 1, 2]
    for layers in buffers(pair[0]).values():
        both = [layer[device].clone() for layer in layers[:2]]
        layers[0][device], layers[1][device] = both[1], both[0]
        assert sorted(differing(back)) == [0, 1, 2]
        layers[0][device], layers[1][device] = both
    assert differing(back) == {}


def test_pages_that_cannot_be_compared_say_why(monkeypatch):
    pair = pools("cpu", "page_first")
    proof = Proof()
    for change, why in (
        (lambda c: setattr(c.mem_pool_host, "layout", "layer_first"), "layout layer_first"),
        (lambda c: setattr(c.mem_pool_device, "host_transfer_translate", len), "other numbers"),
        (lambda c: setattr(c, "_l2_load_transfers", lambda *_: []), "describes no load"),
        (lambda c: c.mem_pool_device.k_buffer.pop(), "host pages of"),
    ):
        one = controller(*pools("cpu", "page_first"), "direct")
        change(one)
        with pytest.raises(ValueError, match=why):
            ReadBack(one, PAGE, None)
        assert checks_of(one, torch.zeros(1), PAGE, proof, None, every_page=True) is None
    assert not proof.looks
    monkeypatch.setattr(pages, "_differing", None)
    with pytest.raises(ValueError, match="not compiled"):
        ReadBack(controller(*pair, "direct"), PAGE, None)


def test_c_compares_nothing_outside_of_what_it_was_given():
    found, host = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    starts, axes = np.zeros(2, np.int64), ((2, 8, 16), (1, 0, 0), (2, 4, 8))
    assert pages.compare(found, host, starts, 32, axes, 4) == [-1, -1]
    for wrong in (
        (found[:59], host, starts, 32, axes, 4),
        (found, host[:15], starts, 32, axes, 4),
        (found, host, np.array([0, 49]), 32, axes, 4),
        (found, host, np.array([0, -1]), 32, axes, 4),
        (found, host, starts, -32, axes, 4),
        (found, host, starts, 32, axes, 0),
        (found, host, starts, 32, ((0, 8, 16), *axes[1:]), 4),
        (found, host, starts, 32, ((1 << 62, 8, 16), *axes[1:]), 4),
        (found, host, starts, 32, ((2, -8, 16), *axes[1:]), 4),
        (found, host, starts.astype(np.int32), 32, axes, 4),
    ):
        with pytest.raises(ValueError, match=r"."):
            pages.compare(*wrong)
    found[40], host[2] = 1, 1
    assert pages.compare(found, host, starts, 32, axes, 4) == [0, 0]
    host[2] = 0
    assert pages.compare(found, host, starts, 32, axes, 4) == [-1, 0]


# --- how many are looked at -----------------------------------------------------------------------


def taken(sampling: Sampling, loads: int, each: int, page_bytes: int, first: int = 1) -> list[int]:
    """How many pages were looked at of each of these loads, in copies of four pages."""
    counts = []
    for number in range(first, first + loads):
        copies = [sampling.take(number, 4, page_bytes) for _ in range(each // 4)]
        counts.append(sum(map(len, copies)))
    return counts


def test_all_pages_of_the_first_loads_and_bytes_are_looked_at_then_one_in_64():
    sampling = Sampling(every_page=False, proven=False)
    assert taken(sampling, 16, 64, GIB // 64) == [64] * 16  # 16 loads, 16 GiB
    assert taken(sampling, 4, 64, GIB // 64, 17) == [1] * 4
    sampling = Sampling(every_page=False, proven=False)
    assert taken(sampling, 64, 64, GIB // 512) == [64] * 64  # 64 loads, 8 GiB
    assert taken(sampling, 4, 64, GIB // 512, 65) == [1] * 4


def test_the_copies_of_a_load_count_as_one_load():
    sampling = Sampling(every_page=False, proven=False)
    assert sum(taken(sampling, 15, 1024, GIB)) == 15 * 1024
    assert sampling.looks_again
    assert taken(sampling, 2, 4, GIB, 16) == [4, 0]
    assert not sampling.looks_again


def test_after_64_gib_one_page_in_1024_is_looked_at():
    sampling = Sampling(every_page=False, proven=True)
    assert sum(taken(sampling, 64, 64, GIB // 64)) == 64
    assert sum(taken(sampling, 64, 64, GIB // 64, 65)) == 4


def test_a_proven_server_begins_with_few_and_one_asked_for_all_looks_at_all():
    assert taken(Sampling(every_page=False, proven=True), 2, 64, 1) == [1, 1]
    sampling = Sampling(every_page=True, proven=True)
    assert sum(taken(sampling, 100, 64, GIB)) == 6400 and sampling.looks_again


def test_the_same_loads_have_the_same_pages_looked_at():
    one, other = (Sampling(every_page=False, proven=True) for _ in range(2))
    sizes = [(number, 1 + number * 7 % 13) for number in range(1, 400)]
    looked = [
        [each.take(number, count, GIB // 8) for number, count in sizes] for each in (one, other)
    ]
    assert looked[0] == looked[1]
    assert all(
        all(place < count for place in found)
        for found, (_, count) in zip(looked[0], sizes, strict=True)
    )


# --- the mover ------------------------------------------------------------------------------------


class Scene:
    """Real pools on a CPU, copies, the mover and its check; a load from host memory."""

    def __init__(self, every_page: bool = True, layout: str = "page_first_direct") -> None:
        self.device, self.host = pools("cpu", layout)
        self.controller = controller(self.device, self.host, "direct")
        self.copies, self.proof = CpuCopies(self.controller), Proof("a device", "a way")
        self.rows = torch.zeros(4, 64 * PAGE, dtype=torch.int32)
        made = checks_of(self.controller, self.rows, PAGE, self.proof, None, every_page=every_page)
        assert made is not None
        self.check, self.again = made
        self.mover = PageMover(self.copies, PAGE, self.check)
        self.number = 0

    def load(self, source: list[int] = FROM, target: list[int] = TO) -> Load:
        """These pages of a request, which have ended."""
        self.number += 1
        load = host_load(slots(source, PAGE), slots(target, PAGE), PAGE, self.number)
        self.mover.submit(load, None, 60.0)
        until(lambda: OPEN not in load.poll.local)
        return load

    def spoil(self, page: int, layer: int = 1) -> None:
        """One bit of a device page."""
        self.device.v_buffer[layer].view(torch.uint8)[page * PAGE + 3].view(-1)[9] ^= 1

    def close(self) -> None:
        self.mover.close()
        self.again.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_pages_that_are_right_land_and_are_counted(scene):
    load = scene.load()
    assert load.poll.local == bytearray([LANDED] * 3)
    assert scene.proof.pages == {"equal": 3} and scene.proof.difference is None
    assert (
        scene.proof.nbytes
        == 3
        * len(bytes(scene.host.kv_buffer.view(torch.uint8).numpy()))
        // (scene.host.kv_buffer.shape[1])
    )


def test_a_page_that_was_damaged_on_its_way_does_not_land(scene, caplog):
    """The planted mistake: without the check it lands, and a forward reads it."""
    copy = scene.copies._copy

    def damages(host_slots, device_slots, *more):
        copy(host_slots, device_slots, *more)
        scene.spoil(TO[1])

    scene.copies._copy = damages
    load = scene.load()
    assert list(load.poll.local) == [LANDED, DIFFERS, LANDED]
    assert scene.proof.pages == {"equal": 2, "differs": 1}
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    for said in ("a device", "a way", "page 1 of request r1", "values of layer 1"):
        assert said in line


def test_nothing_lands_any_more_after_a_difference(scene):
    scene.proof.differs(record.Difference("attach", "found elsewhere on this rank"))
    assert list(scene.load().poll.local) == [DIFFERS] * 3
    assert scene.proof.pages == {}


def test_what_cannot_be_compared_lands_and_is_counted_as_skipped(scene, caplog, monkeypatch):
    def broken(*_):
        raise RuntimeError("a driver's error")

    monkeypatch.setattr(scene.check._back, "differing", broken)
    for _ in range(2):
        assert list(scene.load().poll.local) == [LANDED] * 3
    assert scene.proof.pages == {"skipped": 6}
    assert len([r for r in caplog.records if "not compared" in r.getMessage()]) == 1


def test_pages_between_the_samples_are_not_read_back():
    scene = Scene(every_page=False)
    scene.check._sampling._proven = True
    looked: list[int] = []
    differing = scene.check._back.differing
    scene.check._back.differing = lambda host, *more: (
        looked.append(len(host) // PAGE),
        differing(host, *more),
    )[1]
    for _ in range(50):
        scene.load()
    assert looked == [1, 1, 1] and scene.proof.pages == {"equal": 3}  # of 150 pages
    scene.close()


# --- the second look ------------------------------------------------------------------------------


def attach(scene: Scene, load: Load) -> Any:
    """A request that got these pages into its row."""
    r = load.restoration
    req = SimpleNamespace(rid=r.rid, output_ids=[7], kv=SimpleNamespace(req_pool_idx=2))
    scene.rows[2, : len(load.device_slots)] = load.device_slots.to(torch.int32)
    kept = r.to_look_at_again
    scene.again.attached(r.rid, kept, load.device_slots[kept.page * PAGE : (kept.page + 1) * PAGE])
    return req


def looked(scene: Scene) -> None:
    """Until what was taken has been compared."""
    until(scene.again._free.is_set)


def test_a_page_that_is_overwritten_after_it_landed_is_found_when_the_prefill_has_ended(scene):
    load = scene.load()
    req = attach(scene, load)
    scene.spoil(TO[load.restoration.to_look_at_again.page])
    scene.again.prefilled(req)
    looked(scene)
    found = scene.proof.difference
    assert found is not None and found.check == "second look" and "layer 1" in found.what
    assert list(scene.load().poll.local) == [DIFFERS] * 3


def test_a_page_that_is_as_it_was_is_no_difference_and_is_looked_at_once(scene):
    req = attach(scene, scene.load())
    assert scene.again.waits
    scene.again.look(req)
    looked(scene)
    assert scene.proof.difference is None and not scene.again.waits


def test_a_page_that_is_not_the_requests_any_more_is_left_out(scene):
    """The tree had it already: the row has the tree's slots, and these are another's."""
    load = scene.load()
    req = attach(scene, load)
    page = load.restoration.to_look_at_again.page
    scene.spoil(TO[page])
    scene.rows[2, page * PAGE : (page + 1) * PAGE] = torch.arange(PAGE)
    scene.again.look(req)
    looked(scene)
    assert scene.proof.difference is None


def test_no_page_is_looked_at_again_before_the_first_token_or_of_a_request_that_is_gone(scene):
    load = scene.load()
    req = attach(scene, load)
    req.output_ids = []
    scene.again.prefilled(req)
    assert scene.again.waits
    scene.again.forget(req.rid)
    assert not scene.again.waits
    scene.again.look(req)
    assert scene.again._taken.empty()


def test_few_pages_are_kept_for_a_second_look_at_a_time(scene):
    loads = [scene.load() for _ in range(pages._MOST_KEPT + 3)]
    kept = [load for load in loads if load.restoration.to_look_at_again is not None]
    assert len(kept) == pages._MOST_KEPT
    del loads, kept
    assert scene.load().restoration.to_look_at_again is not None


def test_of_a_page_that_fits_no_piece_some_layers_are_looked_at_again(monkeypatch):
    monkeypatch.setattr(pages, "PIECE_BYTES", 2 * 2 * PAGE * 2 * 32 * 2)  # two layers of four
    scene = Scene()
    for layer, found in ((1, False), (2, True)):
        load = scene.load()
        req = attach(scene, load)
        scene.spoil(TO[load.restoration.to_look_at_again.page], layer)
        scene.again.look(req)
        looked(scene)
        assert (scene.proof.difference is not None) is found
        scene.spoil(TO[load.restoration.to_look_at_again.page], layer)
    assert "layer 2" in scene.proof.difference.what
    scene.close()


def test_a_second_look_that_fails_is_left_out_and_the_next_one_works(scene, monkeypatch):
    req = attach(scene, scene.load())
    monkeypatch.setattr(scene.again, "_compare", lambda taken: 1 / 0)
    scene.again.look(req)
    looked(scene)
    monkeypatch.undo()
    load = scene.load()
    req = attach(scene, load)
    scene.spoil(TO[load.restoration.to_look_at_again.page])
    scene.again.look(req)
    looked(scene)
    assert scene.proof.difference is not None
    assert scene.proof.state is State.PROVING, "the engine refutes, not the thread"
