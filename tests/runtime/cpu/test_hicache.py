"""SGLang's host pools on a host without an accelerator: what they hold can be stored and read back."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
import torch
from pools import host_pool, index_key_pool, server_args, state_pool, storage_config
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host import base

from sgl_kvtier.runtime.backend.storage import KVTierStorage
from sgl_kvtier.runtime.cpu import hicache, platform
from sgl_kvtier.runtime.sglang import seams

NAMES = [hashlib.sha256(name).hexdigest() for name in (b"a", b"b")]


@pytest.fixture
def parallel(monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", server_args)
    monkeypatch.setattr(
        "sglang.srt.arg_groups.model_override_base.resolving_view", lambda args: args
    )
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel",
        lambda: SimpleNamespace(dp_rank=None, num_dp_ranks=1),
    )


def _fill(buffers):
    for seed, buffer in enumerate(buffers):
        noise = torch.randint(
            0,
            255,
            (buffer.nbytes,),
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.uint8,
        )
        buffer.view(-1).view(torch.uint8).copy_(noise)


@pytest.mark.parametrize(
    ("name", "make"),
    [(PoolName.INDEXER, index_key_pool), (PoolName.MAMBA, state_pool)],
    ids=["indexer", "mamba"],
)
def test_pages_of_a_side_pool_come_back_from_storage(parallel, tmp_path, name, make):
    side = make()
    _fill(side.kv_buffer if name is PoolName.MAMBA else side.get_hybrid_pool_buffer())
    page = side.page_size

    def places(first, second):
        return torch.cat(
            [
                torch.arange(first * page, (first + 1) * page),
                torch.arange(second * page, (second + 1) * page),
            ]
        )

    extra = {
        "module_path": "sgl_kvtier.runtime.backend.storage",
        "store": {"path": str(tmp_path), "min_free_bytes": 0, "segment_bytes": "4MiB"},
    }
    backend = KVTierStorage(storage_config(extra_config=extra), {})
    try:
        backend.register_mem_pool_host(host_pool())
        backend.register_mem_host_pool_v2(side, name)
        backend.on_host_pools_registered()
        stored = [side.get_data_page(number * page).clone() for number in (1, 2)]
        assert not torch.equal(*stored)
        assert backend.batch_set_v2(
            [PoolTransfer(name=name, host_indices=places(1, 2), keys=NAMES)]
        ) == {name: [True, True]}
        assert backend.batch_get_v2(
            [PoolTransfer(name=name, host_indices=places(5, 4), keys=NAMES)]
        ) == {name: [True, True]}
        assert torch.equal(side.get_data_page(5 * page), stored[0]) and torch.equal(
            side.get_data_page(4 * page), stored[1]
        )
    finally:
        backend.close()


def test_every_hook_of_the_cpu_platform_is_a_seam():
    assert set(hicache.UNPINNED) <= {seam.symbol for seam in seams.load_manifest()}


def test_host_pools_leave_little_memory_free(monkeypatch):
    hicache.install()
    free = 3 << 30
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: free)
    monkeypatch.setattr(base, "ranks_per_host", lambda: 1)
    assert base.host_memory_budget_bytes(1) == free - platform.RESERVE_BYTES
