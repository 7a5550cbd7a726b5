"""Pools whose pages lie at the slots of the KV pages: what a load takes along, and which are known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import PAGE, latent_host_pool, latent_pool, state_pool
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, SidecarPoolSpec
from side_pools import (
    Beside,
    slots_of,
    with_compressed,
    with_draft,
    with_index_keys,
    with_packed_draft,
    with_packed_keys,
    with_windows,
)

from sgl_kvtier.runtime.backend.loaded_pools import anchor_pools
from sgl_kvtier.runtime.proof import pages
from sgl_kvtier.runtime.proof.pages import ReadBack
from sgl_kvtier.runtime.proof.start import Rows
from sgl_kvtier.runtime.restore import copy_device
from sgl_kvtier.runtime.restore.copy_device import CpuCopies
from sgl_kvtier.runtime.sglang import anchors, slot_pools
from sgl_kvtier.runtime.sglang.host_tier import HostTier

FROM, TO = [3, 6, 1], [2, 5, 9]


def with_compressed_pages() -> Beside:
    """DeepSeek V4's, without what a load brings with windows."""
    beside = with_compressed()
    return beside._replace(
        buffers={name: beside.buffers[name] for name in ("c4 pages", "c128 pages")}
    )


EACH = pytest.mark.parametrize(
    "made",
    [with_draft, with_index_keys, with_packed_draft, with_packed_keys, with_compressed_pages],
    ids=["draft", "DSA", "MTP of latents", "MTP", "DeepSeek V4"],
)


pytestmark = pytest.mark.usefixtures("torch_threads")


def load(beside: Beside) -> None:
    copy = CpuCopies(beside.controller).begin(
        slots_of(FROM, beside.page), slots_of(TO, beside.page), None
    )
    copy.place()
    assert copy.done()


def differing(back: ReadBack, beside: Beside) -> dict[int, tuple[str, int]]:
    return back.differing(slots_of(FROM, beside.page), slots_of(TO, beside.page))


def whole_page(layer: torch.Tensor, page: int, tokens: int) -> torch.Tensor:
    """The bytes of a page in a layer, whose rows are tokens or pages."""
    flat = layer.view(torch.uint8).view(len(layer), -1)
    is_page_row = len(layer) < 5 * tokens
    return flat[page] if is_page_row else flat[page * tokens : (page + 1) * tokens].view(-1)


@EACH
def test_a_load_brings_the_pages_of_all_pools(made):
    beside = made()
    back = ReadBack(beside.controller, beside.page, None)
    assert sorted(differing(back, beside)) == [0, 1, 2]
    load(beside)
    assert differing(back, beside) == {}
    tree: Any = SimpleNamespace(cache_controller=beside.controller, page_size=beside.page)
    assert back.page_bytes == HostTier(tree).page_bytes, "what is planned with and counted"


@pytest.mark.parametrize("piece_bytes", [16 << 20, 1])
@EACH
def test_one_bit_in_any_pool_is_found_where_it_is(made, piece_bytes, monkeypatch):
    monkeypatch.setattr(pages, "PIECE_BYTES", piece_bytes)
    beside = made()
    load(beside)
    back = ReadBack(beside.controller, beside.page, None)
    for name, layers in beside.buffers.items():
        for layer, rows in enumerate(layers):
            for page, place in ((0, 0), (1, 77), (2, -1)):
                found = whole_page(rows, TO[page], beside.page)
                found[place] ^= 4
                assert differing(back, beside) == {page: (name, layer)}
                found[place] ^= 4
    assert differing(back, beside) == {}


@EACH
def test_the_check_at_start_sees_the_rows_of_all_pools(made):
    beside = made()
    rows = Rows.of(beside.controller)
    assert rows.names == list(beside.buffers)
    assert rows.page_bytes == slot_pools.page_bytes(beside.controller.mem_pool_host, beside.page)
    load(beside)
    at = rows.slots(TO, on_device=True)
    for half, layers in enumerate(rows.device):
        for layer in range(len(layers)):
            wanted = rows.host[half][layer][FROM].flatten(0, 1).flatten(1)
            assert torch.equal(rows.read(half, layer, at), wanted), (rows.names[half], layer)
    rows.fill(at, 0x5A)
    for half, layers in enumerate(rows.device):
        assert all(bool(rows.all_are(half, n, at, 0x5A)) for n in range(len(layers)))
        beyond = whole_page(layers[0], TO[0] + 1, beside.page)
        assert not bool((beyond == 0x5A).all()), rows.names[half]


WINDOW_FROM, WINDOW_TO = [8, 2], [11, 3]
"""Of the last two of three pages."""


def with_loaded_windows(
    made: Callable[[], Beside] = with_windows,
) -> tuple[Beside, Callable[[], dict[int, tuple[str, int]]]]:
    """Windows that have come with the last pages of a load, and what compares all of it."""
    beside = made()
    page = beside.page
    host, device = slots_of(FROM, page), slots_of(TO, page)
    window = slots_of(WINDOW_FROM, page), slots_of(WINDOW_TO, page)
    copy = CpuCopies(beside.controller).begin(host, device, None, window)
    back = ReadBack(beside.controller, page, None)
    assert sorted(back.differing(host, device, window)) == [0, 1, 2]
    copy.place()
    return beside, lambda: back.differing(host, device, window)


@pytest.mark.parametrize("piece_bytes", [16 << 20, 1])
@pytest.mark.parametrize(
    ("made", "names"),
    [
        (with_windows, ["window keys", "window values"]),
        (with_compressed, ["window pages", "c4 state pages"]),
    ],
    ids=["windows", "DeepSeek V4"],
)
def test_one_bit_in_a_window_is_found_in_the_page_that_it_came_with(
    made, names, piece_bytes, monkeypatch
):
    monkeypatch.setattr(pages, "PIECE_BYTES", piece_bytes)
    beside, differing_now = with_loaded_windows(made)
    assert differing_now() == {}
    for name in names:
        for layer, rows in enumerate(beside.buffers[name]):
            for place, page in enumerate(WINDOW_TO):
                page_bytes = whole_page(rows, page, beside.page)
                page_bytes[-1] ^= 1
                assert differing_now() == {1 + place: (name, layer)}
                page_bytes[-1] ^= 1


def test_windows_that_sglang_does_not_describe_are_not_taken_for_compared():
    beside = with_windows()
    assert len(anchor_pools(beside.controller, PAGE)) == 1
    beside.controller._l2_load_transfers = lambda *_: []
    with pytest.raises(ValueError, match="describes no load"):
        anchor_pools(beside.controller, PAGE)
    assert anchor_pools(with_draft().controller, PAGE) == []


def test_a_window_in_the_slots_of_another_is_found():
    beside, differing_now = with_loaded_windows()
    first, second = (slots_of([page], PAGE) for page in WINDOW_TO)
    for layers in (beside.buffers["window keys"], beside.buffers["window values"]):
        for rows in layers:
            rows[torch.cat([first, second])] = rows[torch.cat([second, first])]
    assert differing_now() == {1: ("window keys", 0), 2: ("window keys", 0)}


def test_pages_of_several_pools_do_not_go_through_staging():
    assert copy_device._several_pools(with_packed_draft().controller) is None
    assert copy_device._several_pools(with_draft().controller) == (
        "pages of several pools, draft beside KV"
    )
    assert copy_device._all_layers(with_draft().controller) is None


def test_windows_of_deepseek_v4_are_counted_with_the_states_of_its_compressors():
    beside = with_compressed()
    group = beside.controller.mem_pool_host
    back = ReadBack(beside.controller, beside.page, None)
    assert slot_pools.page_bytes(group, beside.page) == back.page_bytes == 2 * 640 + 96
    row, ring, width = 1200, 8, 6
    assert back.anchor_bytes == 5 * row + 2 * ring * width * 4
    assert slot_pools.has_anchors(beside.controller) and slot_pools.has_windows(beside.controller)


@pytest.mark.parametrize("left_out", ["swa", "deepseek_v4_c4_state"])
def test_a_load_of_deepseek_v4_without_one_of_its_window_pools_is_found(left_out, monkeypatch):
    taken = tuple(name for name in anchors.POOLS if name != left_out)
    real = anchors.pools_in
    with monkeypatch.context() as patch:
        patch.setattr(
            anchors, "pools_in", lambda names: tuple(n for n in real(names) if n in taken)
        )
        beside, _ = with_loaded_windows(with_compressed)
    window = slots_of(WINDOW_FROM, beside.page), slots_of(WINDOW_TO, beside.page)
    found = ReadBack(beside.controller, beside.page, None).differing(
        slots_of(FROM, beside.page), slots_of(TO, beside.page), window
    )
    name = "window pages" if left_out == "swa" else "c4 state pages"
    assert found == dict.fromkeys((1, 2), (name, 0))


# --- which pools are known ------------------------------------------------------------------------


def tree(name: PoolName, host: Any, **how: Any) -> Any:
    spec = SidecarPoolSpec(**{"pool_name": name, "indices_from_pool": PoolName.KV, **how})
    group = SimpleNamespace(entry_map={name: SimpleNamespace(host_pool=host)})
    return SimpleNamespace(
        sidecar_pool_specs=[spec],
        cache_controller=SimpleNamespace(mem_pool_host=group),
        page_size=256,
    )


def test_drafts_and_index_keys_at_the_slots_of_kv_pages_are_known():
    draft, index_keys = with_draft().host("draft"), with_index_keys().host("indexer")
    assert slot_pools.foreign(tree(PoolName.DRAFT, draft)) == []
    assert slot_pools.foreign(tree(PoolName.DRAFT, latent_host_pool(latent_pool(1)))) == []
    for name in (PoolName.INDEXER, PoolName.DRAFT_INDEXER):
        assert slot_pools.foreign(tree(name, index_keys)) == []


_AT_WINDOWS = {"indices_from_pool": PoolName.SWA, "hit_policy": PoolHitPolicy.TRAILING_PAGES}


def compressed_host(name: PoolName, page: int = 256) -> Any:
    """A host pool of DeepSeek V4's, of the kind that it has under this name."""
    host = with_compressed().host(
        "deepseek_v4_c4_state" if "state" in str(name) else "deepseek_v4_c4"
    )
    host.page_size = page
    return host


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (PoolName.DEEPSEEK_V4_C4, {}),
        (PoolName.DEEPSEEK_V4_C4_INDEXER, {}),
        (PoolName.DEEPSEEK_V4_C128, {}),
        (PoolName.DEEPSEEK_V4_C4_STATE, _AT_WINDOWS),
        (PoolName.DEEPSEEK_V4_C4_INDEXER_STATE, _AT_WINDOWS),
    ],
)
def test_pools_of_deepseek_v4_are_known_at_their_own_slots_alone(name, how):
    host = compressed_host(name)
    assert slot_pools.foreign(tree(name, host, **how)) == []
    others = {} if how else _AT_WINDOWS
    assert slot_pools.foreign(tree(name, host, **others)) == [str(name)]
    assert slot_pools.foreign(tree(name, compressed_host(name, page=128), **how)) == [str(name)]


@pytest.mark.parametrize(
    ("name", "host", "how"),
    [
        (PoolName.DRAFT, with_draft, {"indices_from_pool": PoolName.SWA}),
        (PoolName.DRAFT, with_draft, {"hit_policy": PoolHitPolicy.TRAILING_PAGES}),
        (PoolName.DEEPSEEK_V4_C4, with_draft, {}),
        (PoolName.INDEXER, with_draft, {}),
        (PoolName.DRAFT, None, {}),
        (PoolName.DRAFT_SWA, with_draft, _AT_WINDOWS),
    ],
    ids=[
        "other slots",
        "a window",
        "another name",
        "not index keys",
        "states",
        "a draft's windows",
    ],
)
def test_other_pools_are_named(name, host, how):
    pool = state_pool() if host is None else host().host("draft")
    assert slot_pools.foreign(tree(name, pool, **how)) == [str(name)]


def test_the_pools_of_a_draft_are_told_before_sglang_registers_them():
    draft = with_draft().controller.mem_pool_host.entry_map[PoolName.DRAFT].device_pool
    sparse = with_index_keys().controller.mem_pool_device
    cases = [
        ((), set()),
        ((draft,), {"draft"}),
        ((sparse,), {"draft", "draft_indexer"}),
        ((SimpleNamespace(full_kv_pool=draft),), {"draft"}),
        ((SimpleNamespace(layer_num=0),), set()),
    ]
    for drafts, names in cases:
        params = SimpleNamespace(sidecar_draft_device_pools=drafts)
        assert slot_pools.registered_later(params) == names
    # SGLang 0.5.22: a draft's pool comes later, and ends restoration (test_radix_cache.py).
    assert slot_pools.registered_later(SimpleNamespace()) == set()
