"""SGLang's host pools on a host without an accelerator: what they hold can be stored and read back."""

from __future__ import annotations

from sglang.srt.mem_cache.pool_host import base

from sgl_kvtier.runtime.cpu import hicache, platform
from sgl_kvtier.runtime.sglang import seams


def test_every_hook_of_the_cpu_platform_is_a_seam():
    assert set(hicache.UNPINNED) <= {seam.symbol for seam in seams.load_manifest()}


def test_host_pools_leave_little_memory_free(monkeypatch):
    hicache.install()
    free = 3 << 30
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: free)
    monkeypatch.setattr(base, "ranks_per_host", lambda: 1)
    assert base.host_memory_budget_bytes(1) == free - platform.RESERVE_BYTES
