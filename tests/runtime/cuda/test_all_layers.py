"""SGLang's kernel that copies all layers, on its real pools: what it is given, and by whom it is left
alone. The kernel's part is done here by addresses, as kvcacheio/hicache.cuh does it.
"""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

import device_pools
import pytest
import torch
from pools import latent_host_pool, latent_pool
from sglang.kernels.ops.kvcache import hicache

from sgl_kvtier.runtime.cuda.all_layers import AllLayers, all_layers_of

PAGE = 16
FROM, TO = [2, 9, 4], [5, 3, 7]
SIGNATURES = {
    name: inspect.signature(getattr(hicache, name))
    for name in ("transfer_hicache_all_layer", "transfer_hicache_all_layer_mla")
}


def rows_by_address(source: Any, target: Any, given: dict[str, Any], steps: tuple[int, int]) -> int:
    """What run_all does with one pair of tables: bytes from host rows to device rows."""
    assert source.dtype == target.dtype == torch.uint64 and len(source) == len(target)
    size, pairs = (
        given["element_size"],
        zip(given["indices_src"].tolist(), given["indices_dst"].tolist(), strict=True),
    )
    for row, into in pairs:
        for layer, place in zip(source.tolist(), target.tolist(), strict=True):
            ctypes.memmove(place + into * steps[1], layer + row * steps[0], size)
    return len(source)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels launched so far; they copy when they are."""
    seen: list[str] = []

    def keys_and_values(**given: Any) -> None:
        given = SIGNATURES["transfer_hicache_all_layer"].bind(**given).arguments
        steps = given["kv_cache_src_stride_bytes"], given["kv_cache_dst_stride_bytes"]
        rows_by_address(given["k_ptr_src"], given["k_ptr_dst"], given, steps)
        rows_by_address(given["v_ptr_src"], given["v_ptr_dst"], given, steps)
        seen.append("keys and values")

    def latents(**given: Any) -> None:
        given = SIGNATURES["transfer_hicache_all_layer_mla"].bind(**given).arguments
        steps = given["cache_src_stride_bytes"], given["cache_dst_stride_bytes"]
        rows_by_address(given["ptr_src"], given["ptr_dst"], given, steps)
        seen.append("latents")

    monkeypatch.setattr(hicache, "transfer_hicache_all_layer", keys_and_values)
    monkeypatch.setattr(hicache, "transfer_hicache_all_layer_mla", latents)
    return seen


def controller_of(pair: tuple[Any, Any], io: str = "kernel") -> Any:
    """As on a card, where SGLang has compiled its kernels."""
    pair[1].can_use_jit = True
    return device_pools.controller(*pair, io)


POOLS = [
    *(
        (f"keys and values, {layout}", lambda way=layout: device_pools.pools("cpu", way))
        for layout in ("page_first", "layer_first")
    ),
    ("fp8", lambda: device_pools.pools("cpu", "page_first", dtype=torch.float8_e4m3fn)),
    ("latents", lambda: device_pools.latent_pools("cpu", "page_first")),
]


@pytest.mark.parametrize("made", [make for _, make in POOLS], ids=[name for name, _ in POOLS])
def test_one_launch_brings_every_layer_of_every_page_to_its_slots(launches, made):
    pair = made()
    controller = controller_of(pair)
    whole = all_layers_of(controller)
    assert whole is not None
    host, device = device_pools.slots(FROM, PAGE), device_pools.slots(TO, PAGE)
    (transfer,) = whole.of(controller._l2_load_transfers(host, device)) or ()
    transfer.host_pool.load_to_device_per_layer_physical(
        transfer.device_pool, transfer.host_indices, transfer.device_indices, 0, "kernel",
        is_draft=transfer.is_draft,
    )  # fmt: skip
    assert len(launches) == 1
    wanted = device_pools.wanted_rows(pair[1], host)
    assert device_pools.same(device_pools.rows(pair[0], device), wanted)


@pytest.mark.parametrize(
    ("io", "layout"), [("kernel", "page_head"), ("direct", "page_first_direct")]
)
def test_layouts_whose_rows_lie_apart_unevenly_are_copied_layer_by_layer(io, layout):
    assert all_layers_of(controller_of(device_pools.pools("cpu", layout), io)) is None


def test_without_compiled_kernels_layers_are_copied_one_by_one():
    pair = device_pools.pools("cpu", "page_first")
    assert not pair[1].can_use_jit
    assert all_layers_of(device_pools.controller(*pair, "kernel")) is None


def test_a_pool_with_more_than_rows_or_with_a_drafts_layers_is_not_taken():
    controller = controller_of(device_pools.pools("cpu", "page_first"))
    assert all_layers_of(controller) is not None
    pool = controller.mem_pool_host
    pool.__class__ = type("WithScales", (type(pool),), {})
    assert all_layers_of(controller) is None

    target = latent_pool(2)
    host = latent_host_pool(target, drafts=(latent_pool(1),))
    host.layout = "page_first"
    assert all_layers_of(controller_of((target, host))) is None


def test_transfers_of_several_pools_or_in_another_order_are_left_to_sglang():
    controller = controller_of(device_pools.pools("cpu", "page_first"))
    whole = all_layers_of(controller)
    assert whole is not None
    some = torch.arange(PAGE)
    (transfer,) = controller._l2_load_transfers(some, some)
    assert whole.of([transfer, transfer]) is None
    assert whole.of([transfer._replace(is_draft=True)]) is None
    assert whole.of([transfer._replace(host_pool=object())]) is None
    assert whole.of([transfer._replace(layer_mapper=lambda layer: layer + 1)]) is None
    same = transfer._replace(layer_mapper=lambda layer: layer)
    for _ in range(2):
        (one,) = whole.of([same]) or ()
        assert isinstance(one.host_pool, AllLayers) and one.layer_mapper is None
