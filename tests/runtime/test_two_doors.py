"""One folder, two doors: pages that the HiCache backend wrote are read through SGLang's external
linker, and the other way round. Here with both in this process.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import PAGE, device_pool, host_pool_of, server_args, slots, storage_config
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from store_linker import StoreLinker

from sgl_kvtier.errors import StoreBusyError
from sgl_kvtier.runtime.backend.storage import KVTierStorage

NAMES = [f"{n:064x}" for n in range(1, 4)]


@pytest.fixture
def doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", server_args)
    monkeypatch.setattr(
        "sglang.srt.arg_groups.model_override_base.resolving_view", lambda args: args
    )
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel",
        lambda: SimpleNamespace(dp_rank=None, num_dp_ranks=1),
    )
    doors = Doors(tmp_path)
    yield doors
    doors.close()


class Doors:
    """Servers of the same model, as far as their caches go: each opens the folder when it is
    asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.events = folder / "events.jsonl"
        self._settings = {"store": {"path": str(folder / "store"), "min_free_bytes": 0}}
        self._open: list[Any] = []

    def hicache(self, pool: Any) -> KVTierStorage:
        extra = {"module_path": "sgl_kvtier.runtime.backend.storage", **self._settings}
        backend = KVTierStorage(storage_config(extra_config=extra), {})
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        self._open.append(backend)
        return backend

    def linker(self, pool: Any) -> StoreLinker:
        allocator = SimpleNamespace(get_kvcache=lambda: pool)
        params = SimpleNamespace(page_size=PAGE, token_to_kv_pool_allocator=allocator)
        extra = {"kvtier": self._settings, "events": str(self.events)}
        linker = StoreLinker(None, params, components=set(), extra_config=extra)
        self._open.append(linker)
        return linker

    def close(self) -> None:
        for door in self._open:
            door.close()


def filled(seed: int) -> Any:
    """A device pool with random contents."""
    pool = device_pool()
    chance = torch.Generator().manual_seed(seed)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.rand(buffer.shape, generator=chance))
    return pool


def rows(pool: Any, pages: list[int]) -> torch.Tensor:
    """Keys and values of these pages in all layers."""
    return torch.stack([buffer[slots(pages)] for buffer in (*pool.k_buffer, *pool.v_buffer)])


def to_host(device: Any, host: Any, pages: list[int]) -> None:
    """What HiCache's write-through does: device pages to host pages of the same numbers."""
    host.backup_from_device_all_layer(device, slots(pages), slots(pages), "direct")


def to_device(host: Any, device: Any, pages: list[int]) -> None:
    """What HiCache's load-back does."""
    for layer in range(device.layer_num):
        host.load_to_device_per_layer(device, slots(pages), slots(pages), layer, "direct")


def kv(pages: list[int]) -> list[PoolTransfer]:
    return [PoolTransfer(PoolName.KV, device_indices=slots(pages), keys=NAMES[: len(pages)])]


def test_the_double_is_all_that_sglang_demands_of_a_linker():
    assert not inspect.isabstract(StoreLinker)


def test_pages_from_hicache_come_through_the_linker_into_the_same_numbers(doors):
    device = filled(1)
    host = host_pool_of(device)
    to_host(device, host, [3, 9, 4])
    backend = doors.hicache(host)
    assert backend.batch_set_v1(NAMES, slots([3, 9, 4])) == [True] * 3
    backend.close()

    other = filled(2)
    linker = doors.linker(other)
    assert linker.lookup("r", kv([1, 2, 5])) == [1, 2, 3]
    assert linker.load("r", kv([1, 2, 5]))
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert torch.equal(rows(other, [1, 2, 5]), rows(device, [3, 9, 4]))
    assert torch.equal(rows(other, [0, 3, 4, 6]), rows(filled(2), [0, 3, 4, 6]))


def test_pages_from_the_linker_come_through_hicache_into_the_same_numbers(doors):
    device = filled(3)
    linker = doors.linker(device)
    assert linker.offload(kv([7, 2, 8]))
    assert (linker.num_completed_offloads(), linker.pop_completed_offload()) == (1, True)
    linker.close()

    other = filled(4)
    host = host_pool_of(other)
    backend = doors.hicache(host)
    assert backend.batch_exists(NAMES) == 3
    assert backend.batch_get_v1(NAMES, slots([7, 2, 8])) == [True] * 3
    to_device(host, other, [7, 2, 8])
    assert torch.equal(rows(other, [7, 2, 8]), rows(device, [7, 2, 8]))


def test_both_doors_open_one_folder_and_never_at_once(doors):
    backend = doors.hicache(host_pool_of(device_pool()))
    with pytest.raises(StoreBusyError):
        doors.linker(device_pool())
    folder = backend.folder
    backend.close()
    doors.linker(device_pool())
    assert json.loads(doors.events.read_text()) == {
        "event": "opened",
        "folder": folder.name,
        "pages": 0,
    }


def test_a_page_lost_between_lookup_and_load_fails_the_load(doors):
    linker = doors.linker(filled(5))
    linker.offload(kv([1, 2]))
    linker.store.delete([bytes.fromhex(NAMES[1])])
    linker.load("r", kv([3, 4]))
    assert not linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
