"""On a card: the check at start of every way to copy, in SGLang's pools, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import device_pools
import pytest
import torch
from place import Place

from sgl_kvtier.runtime.cuda import scatter, staged_copies
from sgl_kvtier.runtime.cuda.flashinfer_scatter import FlashInferScatter
from sgl_kvtier.runtime.cuda.scatter import TritonScatter
from sgl_kvtier.runtime.proof import start
from sgl_kvtier.runtime.proof.start import StartDiffers
from sgl_kvtier.runtime.restore import copy_device
from sgl_kvtier.runtime.restore.copy_device import StreamCopies, copies_for, proven_copies, way_of
from sgl_kvtier.runtime.tools import gpu_probe

pytestmark = pytest.mark.gpu
PAGE = 16
STAGED = (("kernel", "page_first"), ("direct", "page_first_direct"))


MADE: list[Any] = []


@pytest.fixture(autouse=True)
def registered_memory() -> Any:
    """Memory of a host pool that is gone stays registered, and its next owner could not be."""
    yield
    while MADE:
        MADE.pop().destroy()


def place_of(io: str, pools: tuple[Any, Any]) -> Place:
    place = Place("cuda", io, pools)
    MADE.append(place.host)
    place.host.kv_buffer.zero_()
    return place


def usual(io: str, layout: str, **more: Any) -> Place:
    return place_of(io, device_pools.pools("cuda", layout, **more))


def is_free(place: Place) -> bool:
    torch.cuda.synchronize()
    layers = getattr(place.device, "k_buffer", None) or place.device.kv_buffer
    return not place.host.kv_buffer.view(torch.uint8).any() and not any(
        layer.view(torch.uint8).any() for layer in layers
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("io", "layout"), device_pools.WAYS)
def test_the_first_way_to_copy_is_shown_to_be_right(io, layout, dtype):
    place = usual(io, layout, dtype=dtype)
    found = proven_copies(place.controller)
    assert found.wrong == "" and found.start is not None and found.start.pages > 10
    assert is_free(place)
    if layout in ("page_first", "page_first_direct"):
        assert way_of(found.copies) == "StagedCopies by TritonScatter"
        assert found.start.window_bytes and found.start.small_copy_us and found.start.gbytes_per_s


@pytest.mark.parametrize(("io", "layout"), STAGED)
def test_latents_and_sglangs_own_copies_are_shown_to_be_right(io, layout):
    for pools in (device_pools.latent_pools("cuda", layout), device_pools.pools("cuda", layout)):
        place = place_of(io, pools)
        assert start.check(StreamCopies(place.controller), place.controller).pages > 8


@pytest.mark.slow  # nvcc compiles FlashInfer's module
def test_flashinfers_append_is_taken_where_our_kernel_is_wrong(monkeypatch):
    pytest.importorskip("flashinfer.page").get_page_module()
    place = usual("kernel", "page_first")
    token_step_off(monkeypatch)
    found = proven_copies(place.controller)
    assert found.wrong == ""
    assert way_of(found.copies) == f"StagedCopies by {FlashInferScatter.__name__}"
    assert is_free(place)


def test_where_staging_is_wrong_sglangs_kernels_copy(monkeypatch):
    place = usual("kernel", "page_first")
    the_last_page_is_not_sent(monkeypatch)
    found = proven_copies(place.controller)
    assert (way_of(found.copies), found.wrong) == ("StreamCopies", "")


def test_where_no_way_is_right_restoration_is_off_and_says_why(monkeypatch):
    place = usual("kernel", "page_first")
    the_fence_knows_no_forward(monkeypatch)
    found = proven_copies(place.controller)
    assert found.start is None and "forward" in found.wrong
    assert is_free(place)


def test_the_check_that_doctor_makes_is_passed_on_scratch_pools():
    probe = gpu_probe.try_out()
    assert probe.device == torch.cuda.get_device_name() and probe.result.pages > 20
    assert probe.result.gbytes_per_s and probe.result.small_copy_us and probe.result.window_bytes


def token_step_off(patch: pytest.MonkeyPatch) -> None:
    known = scatter.constants

    def constants(*how: Any) -> dict[str, Any]:
        found = known(*how)
        return {**found, "TOKEN_STEP": found["TOKEN_STEP"] + 4}

    patch.setattr(scatter, "constants", constants)


def the_last_page_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    send = staged_copies.send_pages

    def sent(copy: Any, stream: Any, room: Any, host: Any, slots: Any, *more: Any) -> None:
        page = host[3]
        send(copy, stream, room, host, slots[:-page] if len(slots) > page else slots, *more)

    patch.setattr(staged_copies, "send_pages", sent)


def the_fence_knows_no_forward(patch: pytest.MonkeyPatch) -> None:
    def fence(module: Any, _controller: Any) -> Any:
        event = module.Event()
        event.record()
        return event

    patch.setattr(staged_copies, "fence", fence)
    patch.setattr(copy_device, "fence", fence)


def layers_exchanged(patch: pytest.MonkeyPatch) -> None:
    made = TritonScatter.__init__

    def init(self: Any, shape: Any, pages: int, buffers: list[torch.Tensor]) -> None:
        made(self, shape, pages, [buffers[1], buffers[0], *buffers[2:]])

    patch.setattr(TritonScatter, "__init__", init)


def the_end_comes_before_the_scatter(patch: pytest.MonkeyPatch) -> None:
    place = staged_copies.StagedCopies._place

    def placed(copies: Any, room: Any, slots: Any, come: Any) -> Any:
        ended = torch.cuda.Event(blocking=True)
        ended.record(copies._bus)
        place(copies, room, slots, come)
        return ended

    patch.setattr(staged_copies.StagedCopies, "_place", placed)


def page_0_is_written(patch: pytest.MonkeyPatch) -> None:
    written_too(patch, lambda slots: torch.arange(PAGE, device="cuda"))


def the_page_behind_is_written(patch: pytest.MonkeyPatch) -> None:
    written_too(patch, lambda slots: slots[:PAGE] + PAGE)


def written_too(patch: pytest.MonkeyPatch, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    launch = TritonScatter.launch

    def launched(self: Any, room: Any, slots: torch.Tensor) -> None:
        launch(self, room, other(slots))
        launch(self, room, slots)

    patch.setattr(TritonScatter, "launch", launched)


@pytest.mark.parametrize(
    "plant",
    [
        token_step_off,
        the_last_page_is_not_sent,
        the_fence_knows_no_forward,
        layers_exchanged,
        the_end_comes_before_the_scatter,
        page_0_is_written,
        the_page_behind_is_written,
    ],
)
@pytest.mark.parametrize(("io", "layout"), STAGED)
def test_a_mistake_in_staged_copies_is_found(monkeypatch, plant, io, layout):
    place = usual(io, layout)
    plant(monkeypatch)
    copies = copies_for(place.controller)
    with pytest.raises(StartDiffers):
        start.check(copies, place.controller)
