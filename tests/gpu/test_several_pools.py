"""Loads whose pages are in several pools, a draft's, index keys, windows or states beside the KV
pages: the check at start and the page check see all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_fakes import host_load
from patience import until
from place import LATENTS
from side_pools import (
    Beside,
    slots_of,
    with_compressed,
    with_draft,
    with_index_keys,
    with_packed_keys,
    with_states,
    with_windows,
)

from sgl_kvtier.runtime.proof import start
from sgl_kvtier.runtime.proof.pages import checks_of
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.proof.start import StartDiffers
from sgl_kvtier.runtime.restore import copy_device
from sgl_kvtier.runtime.restore.copy_device import (
    StreamCopies,
    copies_for,
    memory_of,
    proven_copies,
    way_of,
)
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.step.polls import DIFFERS, LANDED, OPEN
from sgl_kvtier.runtime.step.private_slots import AnchorSlots

SOURCE, TARGET = [3, 9, 4, 0, 7], [6, 2, 9, 1, 12]
ANCHORS = {
    with_windows: ([8, 2], [11, 3]),
    with_states: ([8], [11]),
    with_compressed: ([8, 2], [11, 3]),
}
"""Window pages, or a state, that come with the last pages of a load, in host memory and on the
device.
"""
POOLS = {
    with_draft: "draft",
    with_index_keys: "index keys",
    with_windows: "window",
    with_states: "recurrent states",
    with_compressed: "c4 pages",
}
REGISTERED = {with_index_keys: "indexer", with_states: "mamba"}
NAMES = ["draft", "DSA", "windows", "states", "DeepSeek V4"]
EACH = pytest.mark.parametrize("made", list(POOLS), ids=NAMES)
WITH_MTP = pytest.mark.parametrize("made", [*POOLS, with_packed_keys], ids=[*NAMES, "MTP"])
EACH_ANCHOR = pytest.mark.parametrize(
    "made", [with_windows, with_states], ids=["windows", "states"]
)
WHERE = pytest.mark.parametrize(("where", "io", "layout"), LATENTS)
ON_GPU = pytest.mark.parametrize(
    ("io", "layout"), [("kernel", "page_first"), ("direct", "page_first_direct")]
)


pytestmark = pytest.mark.usefixtures("torch_threads")


MADE: list[Any] = []


@pytest.fixture(autouse=True)
def registered_memory() -> Iterator[None]:
    """These pools register their memory with CUDA where `host_pools_end` does not see it."""
    yield
    while MADE:
        MADE.pop().destroy()


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """SGLang has nvcc compile the kernel that copies states, which the CUDA stand-in does without
    in its quicker run.
    """
    given = getattr(request.node, "callspec", None)
    if given is None or given.params.get("made") is not with_states:
        return
    on_card = given.params.get("where", "cuda") == "cuda"
    toolkit = os.environ.get("CUDA_HOME")
    has_nvcc = not toolkit or (Path(toolkit) / "bin" / "nvcc").exists()
    if on_card and given.params["io"] == "kernel" and not has_nvcc:
        pytest.skip("a kernel that nvcc compiles")


def place(made: Callable[..., Beside], layout: str, where: str, io: str) -> Beside:
    beside = made(layout, where, io)
    if where == "cuda":
        beside.controller.load_fence_stream = torch.cuda.Stream()
        if (name := REGISTERED.get(made)) is not None:
            MADE.append(beside.host(name))
        if made is with_compressed:
            MADE.extend(one.host_pool for one in beside.controller.mem_pool_host.entries)
    return beside


def load(made: Callable[..., Beside], beside: Beside) -> tuple[bytes, Proof]:
    """How the pages of a load by the mover have ended, each compared before it lands."""
    controller, page = beside.controller, beside.page
    copies, memory = copies_for(controller), memory_of(controller)
    proof = Proof("", way_of(copies))
    rows = torch.zeros(2, 64 * page, dtype=torch.int32, device=controller.device)
    checks = checks_of(controller, rows, page, proof, memory, every_page=True)
    assert checks is not None
    mover = PageMover(copies, page, checks[0])
    host = slots_of(SOURCE, page)
    device = slots_of(TARGET, page).to(controller.device)
    anchor = None
    if made in ANCHORS:
        in_host, on_device = (slots_of(some, beside.anchor_page) for some in ANCHORS[made])
        anchor = AnchorSlots(on_device.to(controller.device), in_host, beside.anchor_page)
    one = host_load(host, device, page, anchor=anchor)
    mover.submit(one, None, 60.0)
    until(lambda: OPEN not in one.poll.local, 240)
    mover.close()
    checks[1].close()
    return bytes(one.poll.local), proof


def leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies bring the KV pages alone."""

    def kv_alone(
        controller: Any, host: torch.Tensor, device: torch.Tensor, window: Any = None
    ) -> list[Any]:
        described: list[Any] = controller._l2_load_transfers(host, device)
        return described

    names = {**vars(copy_device.slot_pools), "transfers": kv_alone}
    monkeypatch.setattr(copy_device, "slot_pools", SimpleNamespace(**names))


@WITH_MTP
@WHERE
def test_pages_land_in_all_pools_and_are_compared_in_all(made, where, io, layout):
    states, proof = load(made, place(made, layout, where, io))
    assert states == bytes([LANDED] * len(SOURCE)) and proof.difference is None
    assert proof.pages == {"equal": len(SOURCE)}


@EACH
@WHERE
def test_pages_of_which_a_part_did_not_come_do_not_land(made, where, io, layout, monkeypatch):
    leave_out(monkeypatch)
    states, proof = load(made, place(made, layout, where, io))
    of_kv = made in (with_windows, with_states)  # pages without anchors are the KV pool's alone
    alone = len(SOURCE) - len(ANCHORS[made][0]) if of_kv else 0
    assert states == bytes([LANDED] * alone + [DIFFERS] * (len(SOURCE) - alone))
    assert proof.difference is not None and POOLS[made] in proof.difference.what


def exchange_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies bring windows into the slots of each other, the first one into the last one's."""
    real = copy_device.slot_pools.transfers

    def exchanged(
        controller: Any, host: torch.Tensor, device: torch.Tensor, window: Any = None
    ) -> list[Any]:
        turned = window and (window[0], window[1].roll(len(window[1]) // 2))
        described: list[Any] = real(controller, host, device, turned)
        return described

    names = {**vars(copy_device.slot_pools), "transfers": exchanged}
    monkeypatch.setattr(copy_device, "slot_pools", SimpleNamespace(**names))


@WHERE
def test_windows_in_the_slots_of_others_do_not_land(where, io, layout, monkeypatch):
    exchange_windows(monkeypatch)
    states, proof = load(with_windows, place(with_windows, layout, where, io))
    assert states == bytes([LANDED] * 3 + [DIFFERS] * 2)
    assert proof.difference is not None and "window keys of layer 0" in proof.difference.what


@pytest.mark.gpu
@EACH_ANCHOR
@ON_GPU
@pytest.mark.parametrize("mistake", [leave_out, exchange_windows])
def test_the_check_at_start_finds_windows_and_states_that_come_wrong(
    made, io, layout, monkeypatch, mistake,
):  # fmt: skip
    controller = place(made, layout, "cuda", io).controller
    copies = copies_for(controller)
    mistake(monkeypatch)
    with pytest.raises(StartDiffers, match=r"(window values|convolution states) of layer [23]"):
        start.check(copies, controller)


@pytest.mark.gpu
@EACH_ANCHOR
@ON_GPU
def test_windows_and_states_that_do_not_wait_for_a_forward_are_found(made, io, layout, monkeypatch):
    """Placed when they are begun: the forward reads them, or writes over them."""
    monkeypatch.setattr(start, "_BUSY_S", 0.2)  # longer than a busy host delays a copy
    controller = place(made, layout, "cuda", io).controller
    copies, begin = copies_for(controller), StreamCopies.begin

    def begin_at_once(self, host, device, fence, window=None):
        del fence
        past = torch.cuda.Event()
        copy = begin(self, host, device, past, window)
        copy.place()
        monkeypatch.setattr(copy, "place", lambda: None)
        return copy

    assert start.check(copies, controller).pages > 16
    monkeypatch.setattr(StreamCopies, "begin", begin_at_once)
    with pytest.raises(StartDiffers, match=r"window values|convolution states|still read"):
        start.check(copies, controller)


@pytest.mark.gpu
@EACH_ANCHOR
@ON_GPU
def test_pages_whose_windows_or_states_come_beside_them_go_through_staging(
    made, io, layout, caplog
):
    beside = place(made, layout, "cuda", io)
    found = proven_copies(beside.controller)
    assert found.wrong == "" and found.start is not None and found.start.pages > 16
    assert way_of(found.copies) == "StagedCopies by TritonScatter"
    for name, layers in beside.buffers.items():
        assert not any(layer.view(torch.uint8).any() for layer in layers), name


WITHOUT_STAGING = pytest.mark.parametrize(
    ("made", "names"),
    [
        (with_draft, "draft"),
        (with_index_keys, "indexer"),
        (with_compressed, "deepseek_v4_c4, deepseek_v4_c128"),
    ],
    ids=["draft", "DSA", "DeepSeek V4"],
)


@pytest.mark.gpu
@WITHOUT_STAGING
@ON_GPU
def test_the_check_at_start_takes_sglangs_kernels_and_says_why(made, names, io, layout, caplog):
    beside = place(made, layout, "cuda", io)
    found = proven_copies(beside.controller)
    assert found.wrong == "" and found.start is not None and found.start.pages > 8
    assert way_of(found.copies) == "StreamCopies"
    assert f"layer by layer: pages of several pools, {names} beside KV" in caplog.text
    for name, layers in beside.buffers.items():
        assert not any(layer.view(torch.uint8).any() for layer in layers), name


@pytest.mark.gpu
@WITHOUT_STAGING
@ON_GPU
def test_the_check_at_start_finds_a_pool_that_is_left_out(made, names, io, layout, monkeypatch):
    del names
    beside = place(made, layout, "cuda", io)
    leave_out(monkeypatch)
    said = {with_draft: "draft values", with_index_keys: "index keys"}.get(made, "c128 pages")
    with pytest.raises(StartDiffers, match=said):
        start.check(StreamCopies(beside.controller), beside.controller)


@pytest.mark.gpu
@ON_GPU
def test_a_draft_in_the_targets_pages_goes_through_staging_with_them(io, layout):
    found = proven_copies(place(with_packed_keys, layout, "cuda", io).controller)
    assert found.wrong == "" and found.start is not None and found.start.pages > 8
    assert way_of(found.copies) == "StagedCopies by TritonScatter"
