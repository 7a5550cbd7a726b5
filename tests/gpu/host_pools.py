"""Host pools end with the test that made them, as a server's do when it ends.

SGLang registers a pool's memory with CUDA. Where that memory is given back and mapped anew without
being unregistered, CUDA refuses to register it for the next pool: error 712.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def host_pools_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unregisters the host pools that the test made."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    made: list[Any] = []
    allocate = HostKVCache._allocate_host_buffer

    def allocate_and_note(pool: Any) -> None:
        allocate(pool)
        made.append(pool)

    monkeypatch.setattr(HostKVCache, "_allocate_host_buffer", allocate_and_note)
    yield
    torch.cuda.synchronize()
    for pool in made:
        pool.destroy()
