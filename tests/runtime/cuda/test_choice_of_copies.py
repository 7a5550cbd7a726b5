"""Which way loads are copied, and the line that says why it is not the fastest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_pools import controller, latent_pools
from pools import (
    PAGE,
    device_pool,
    host_pool,
    host_pool_of,
    latent_host_pool,
    latent_pool,
    unequal_pool,
)

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.runtime.cuda.all_layers import AllLayers
from sgl_kvtier.runtime.cuda.card_memory import CardMemory
from sgl_kvtier.runtime.cuda.fences import fence
from sgl_kvtier.runtime.cuda.page_shape import shape_of, unfit
from sgl_kvtier.runtime.cuda.staging import ROOM_BYTES, pages_of_room, staging_bytes
from sgl_kvtier.runtime.proof import start
from sgl_kvtier.runtime.proof.record import Proof, State
from sgl_kvtier.runtime.proof.start import Rows, StartDiffers, StartResult, StartUnreadable
from sgl_kvtier.runtime.restore import copy_device
from sgl_kvtier.runtime.restore.copy_device import chosen_for, copies_for
from sgl_kvtier.runtime.scheduler import setup
from sgl_kvtier.runtime.scheduler.refusals import UNREADABLE
from sgl_kvtier.runtime.scheduler.setup import refute_at_start, unreadable_at_start


def controller_of(pool: Any, device: str = "cuda") -> Any:
    pool.pin_memory = True
    return SimpleNamespace(
        device=device, io_backend="direct", mem_pool_host=pool, mem_pool_device=SimpleNamespace()
    )


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_pages_of_keys_and_values_can_be_staged(layout):
    pool = host_pool(layout)
    assert unfit(controller_of(pool)) is None
    assert 2 * shape_of(pool).half_bytes == pool.size_per_token * pool.page_size


def test_what_cannot_be_staged_is_said():
    assert "layout page_head" in str(unfit(controller_of(host_pool("page_head"))))
    assert "latents" in str(unfit(controller_of(latent_host_pool(latent_pool(2)))))
    assert unfit(controller_of(unequal_pool())) == "K and V of different widths"
    pool = host_pool()
    pool.pin_memory = False
    assert "pinned" in str(CardMemory(0).unread(pool))
    moved = controller_of(host_pool())
    moved.mem_pool_device.host_transfer_translate = lambda slots: slots
    assert "other numbers" in str(unfit(moved))


@pytest.mark.parametrize(
    ("free", "said"), [(1 << 20, "--mem-fraction-static"), (1 << 40, "RuntimeError: no compiler")]
)
def test_without_staging_sglangs_kernels_serve_and_one_line_says_why(
    monkeypatch, caplog, free, said
):
    module = SimpleNamespace(current_device=lambda: 0, mem_get_info=lambda: (free, 1 << 40))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    streams = SimpleNamespace()
    monkeypatch.setattr(copy_device, "StreamCopies", lambda *_: streams)

    class Broken:
        def __init__(self, *_):
            raise RuntimeError("no compiler")

    monkeypatch.setattr(copy_device, "SCATTER", Broken)
    with caplog.at_level(logging.WARNING):
        assert copies_for(controller_of(host_pool())) is streams
    (line,) = [record.getMessage() for record in caplog.records if "kvtier" in record.getMessage()]
    assert said in line and "SGLang's kernels" in line


def test_latents_are_copied_by_sglangs_kernel_of_all_layers(monkeypatch, caplog):
    given: list[Any] = []
    module = SimpleNamespace(current_device=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    monkeypatch.setattr(copy_device, "StreamCopies", lambda *how: given.append(how))
    device, pool = latent_pools("cpu", "page_first")
    pool.can_use_jit, pool.pin_memory = True, True
    served = controller(device, pool, "kernel")
    served.device = "cuda"
    with caplog.at_level(logging.WARNING):
        copies_for(served)
    copies_for(served, restores=False)
    assert all(isinstance(how[-1], AllLayers) for how in given) and len(given) == 2
    (line,) = [record.getMessage() for record in caplog.records if "kvtier" in record.getMessage()]
    assert "all layers in one launch: pages of latents" in line


def test_an_accelerator_that_is_no_card_has_sglangs_copies(monkeypatch):
    monkeypatch.setattr(copy_device, "StreamCopies", lambda *how: how)
    served = controller_of(host_pool(), "xpu")
    assert copies_for(served) == (served,)


def test_a_device_without_streams_is_left_to_sglang(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _kind: SimpleNamespace())
    assert "no streams on mps" in str(copy_device.lacking(SimpleNamespace(device="mps")))
    assert copy_device.lacking(SimpleNamespace(device="cpu")) is None


CHECK = start.check


class Ways:
    """Three ways of copying, of which some are wrong."""

    def __init__(self, patch: pytest.MonkeyPatch, wrong: set[int]) -> None:
        self.made: list[Any] = []
        self.checked: list[int] = []
        self._wrong = wrong
        patch.setattr(copy_device, "_ways", lambda *_: self._each())
        patch.setattr(copy_device, "CARDS", {"cuda": lambda _controller: (None, None)})
        patch.setattr(copy_device, "StreamCopies", lambda _controller: "unchecked")
        patch.setattr(start, "check", self._check)

    def _each(self) -> Iterator[Any]:
        for number in range(3):
            self.made.append(SimpleNamespace(number=number))
            yield self.made[-1]

    def _check(self, copies: Any, controller: Any) -> StartResult:
        self.checked.append(copies.number)
        if copies.number in self._wrong:
            raise [StartDiffers("K of layer 1"), RuntimeError("no\nkernel")][copies.number % 2]
        return StartResult(40, 20.0, 90.0, 4 << 20, 0.1)


SERVED = SimpleNamespace(device="cuda")


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_first_way_that_is_right_is_taken(monkeypatch, wrong):
    ways = Ways(monkeypatch, set(range(wrong)))
    found = chosen_for(SERVED, PolicyConfig(restore="both"))
    assert found.copies is ways.made[-1] and ways.checked == list(range(wrong + 1))
    assert found.start is not None and found.wrong == ""


def test_where_no_way_is_right_it_says_what_was_wrong_with_each(monkeypatch, caplog):
    Ways(monkeypatch, {0, 1, 2})
    found = chosen_for(SERVED, PolicyConfig(restore="both"))
    assert (found.copies, found.start) == ("unchecked", None)
    assert found.wrong == "K of layer 1; RuntimeError: no"
    lines = [record for record in caplog.records if "not copied by" in record.getMessage()]
    assert len(lines) == 3


def test_pages_that_cannot_be_read_back_are_no_failed_proof(monkeypatch, caplog):
    """SGLang's pools in another order: a page has rows of each head's tokens, not of each token."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    device = device_pool()
    monkeypatch.delenv("SGLANG_USE_HND_KVCACHE")
    assert device.k_buffer[0].shape[1:] == (2, PAGE, 32)
    served = controller(device, host_pool_of(device), "direct")
    ways = Ways(monkeypatch, set())
    monkeypatch.setattr(
        start, "check", lambda copies, served: ways.checked.append(copies) or CHECK(copies, served)
    )
    served.device = "cuda"
    found = chosen_for(served, PolicyConfig(restore="both"))
    assert (found.unreadable, found.wrong, found.start) == (
        "device pages of layout hnd in MHATokenToKVPoolHost", "", None
    )  # fmt: skip
    assert len(ways.checked) == 1 and caplog.text == "", "it is the same for every way"

    alone: Any = SimpleNamespace(least=lambda here: here)
    line = unreadable_at_start(found.unreadable, alone)
    assert line == f"{found.unreadable}: {UNREADABLE}"
    proof = Proof("a GPU", "a way")
    refute_at_start(proof, found.wrong, alone)
    assert (proof.state, proof.difference) == (State.PROVING, None)


def test_a_server_whose_pages_cannot_be_read_back_begins_no_proof(monkeypatch):
    class Unreadable(Ways):
        def _check(self, copies, controller):
            raise StartUnreadable("pages upside down")

    Unreadable(monkeypatch, set())
    host = SimpleNamespace(tokens=PAGE)
    here = SimpleNamespace(page=PAGE, page_bytes=1, host=host, anchors=None)
    monkeypatch.setattr(setup, "StepContext", lambda tree, alone: here)
    monkeypatch.setattr(
        "sglang.srt.arg_groups.model_override_base.resolving_view", lambda args: args
    )
    args = SimpleNamespace(
        device="cuda", tp_size=1, pp_size=1, chunked_prefill_size=64, enable_mixed_chunk=False,
        hicache_storage_backend_extra_config='{"store": {"path": "unused"}, "policy": {"restore": "both"}}',
    )  # fmt: skip
    controller = SimpleNamespace(device="cuda", transfer_layer_id_max=2)
    tree: Any = SimpleNamespace(
        cache_controller=controller, tp_world_size=1, pp_size=1, pp_rank=0, tp_group=None
    )
    line = setup.build(tree, args)
    assert isinstance(line, str) and line.startswith("kvtier: prefixes are restored")
    assert line.endswith(f"SGLang's own way: pages upside down: {UNREADABLE}")


def test_pages_of_another_rank_that_cannot_be_read_back_end_restoration_on_all():
    agreement: Any = SimpleNamespace(least=lambda here: min(here, 0))
    assert unreadable_at_start("", agreement) == f"pages of another rank: {UNREADABLE}"
    agreement.least = lambda here: min(here, 1)
    assert unreadable_at_start("", agreement) is None


def test_rows_that_lie_apart_cannot_be_read_back():
    device, pool = latent_pools("cpu", "page_first_direct")
    device.kv_buffer[1] = device.kv_buffer[1].repeat(1, 1, 2)[:, :, ::2]
    with pytest.raises(StartUnreadable, match="device rows that lie apart"):
        Rows.of(controller(device, pool, "direct"))


@pytest.mark.parametrize("policy", [{"restore": "off"}, {"restore": "both", "proof": "off"}])
def test_a_server_that_proves_nothing_is_not_checked(monkeypatch, policy):
    ways = Ways(monkeypatch, {0, 1, 2})
    monkeypatch.setattr(copy_device, "copies_for", lambda _controller, restores: restores)
    assert chosen_for(SERVED, PolicyConfig(**policy)).copies is (policy["restore"] != "off")
    assert ways.checked == []


@pytest.mark.parametrize(
    ("wrong", "others", "state"),
    [("", 1, State.PROVING), ("K of layer 1", 1, State.REFUTED), ("", 0, State.REFUTED)],
    ids=["right", "wrong here", "wrong on another rank"],
)
def test_what_is_wrong_on_one_rank_refutes_all_and_is_not_remembered(wrong, others, state):
    remembered: list[Any] = []
    proof = Proof("a GPU", "a way")
    proof.changed = remembered.append
    agreement: Any = SimpleNamespace(least=lambda here: min(here, others))
    refute_at_start(proof, wrong, agreement)
    assert proof.state is state and remembered == []
    assert (proof.difference is not None) == (state is State.REFUTED)


def test_a_fence_is_taken_where_events_know_no_sleep():
    class Event:
        def __init__(self, enable_timing=False):
            self.timed, self.recorded = enable_timing, False

        def record(self):
            self.recorded = True

    event = fence(SimpleNamespace(Event=Event), SimpleNamespace(load_fence_stream=None))
    assert event.recorded


def test_rooms_of_staging_are_bounded():
    shape = shape_of(host_pool())
    assert pages_of_room(shape) * 2 * shape.half_bytes <= ROOM_BYTES
    assert staging_bytes(shape) <= 256 << 20
