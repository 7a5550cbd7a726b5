"""When storage threads may be stopped: not before they have come to rest, where ranks wait for each
other.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.runtime.backend import quiet_stop
from sgl_kvtier.runtime.sglang.hooks import HOOKS


def controller(ranks: int) -> Any:
    groups = ["a group"] if ranks > 1 else []
    return SimpleNamespace(
        prefetch_completion_sync_groups=groups,
        prefetch_queue=Queue(),
        prefetch_buffer=Queue(),
        prefetch_sync_queue=Queue(),
    )


def test_one_rank_waits_for_nobody():
    alone = controller(1)
    alone.prefetch_buffer.put(1)
    assert quiet_stop.wait(alone)


def test_a_rank_waits_until_reads_and_reductions_are_over():
    one = controller(2)
    for queue in (one.prefetch_buffer, one.prefetch_sync_queue):
        queue.put(1)
    order: list[str] = []

    def works():
        with quiet_stop.busy(one, "reading"):
            one.prefetch_buffer.get()
            time.sleep(0.1)
            order.append("read")
        with quiet_stop.busy(one, "reducing"):
            one.prefetch_sync_queue.get()
            time.sleep(0.1)
            order.append("reduced")

    thread = threading.Thread(target=works)
    thread.start()
    assert quiet_stop.wait(one)
    order.append("stopped")
    thread.join()
    assert order == ["read", "reduced", "stopped"]


def test_what_never_comes_to_rest_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(quiet_stop, "_LONGEST_S", 0.05)
    one = controller(2)
    with quiet_stop.busy(one, "reading"):
        assert not quiet_stop.wait(one)
    assert quiet_stop.wait(one)


def test_side_pools_are_waited_for_like_the_pages(monkeypatch):
    """SGLang's class for side pools reads their states after the pages, and reduces twice: the
    second time after its base class has marked the end of the first.
    """
    pytest.importorskip("sglang")
    from sglang.srt.managers.cache_controller import HiCacheController, PrefetchAck
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    for kind in (HiCacheController, HybridCacheController):
        for step in ("_page_transfer", "_reduce_prefetch_ack"):
            target = f"{kind.__module__}.{kind.__name__}.{step}"
            for row in HOOKS:
                if row.target == target:
                    hook = row.load()
                    monkeypatch.setattr(kind, step, _around(hook, vars(kind)[step]))
    both = HybridCacheController.__new__(HybridCacheController)
    vars(both).update(vars(controller(2)), page_size=16, enable_storage=True)
    at_work: list[bool] = []

    def observed(*_: Any, **__: Any) -> dict[str, list[bool]]:
        at_work.append(not quiet_stop._rests(both))
        return {}

    state = PoolTransfer(name=PoolName.MAMBA, keys=["a"])
    operation: Any = SimpleNamespace(
        request_id="r",
        prefix_keys=None,
        hash_value=[],
        pool_transfers=[state],
        sidecar_hash_values=["a"],
        sidecar_hit_pages=1,
        is_terminated=lambda: False,
    )
    both.mem_pool_host = SimpleNamespace(layout_lease=nullcontext)
    both.storage_backend = SimpleNamespace(batch_get_v2=observed)
    monkeypatch.setattr(both, "_sync_trailing_keys", lambda *_: None, raising=False)
    monkeypatch.setattr(
        both, "_resolve_sidecar_nonkv_derived_pool_transfers", lambda *_: None, raising=False
    )
    both._page_transfer(operation)
    assert at_work == [True]
    ack = both.prefetch_sync_queue.get()
    assert quiet_stop._rests(both)

    monkeypatch.setattr(both, "_all_reduce", observed, raising=False)
    both._reduce_prefetch_ack(ack)
    both._reduce_prefetch_ack(PrefetchAck(rid="r", operation=operation, completed_tokens=16))
    assert at_work == [True] * 3
    assert quiet_stop._rests(both)


def _around(hook: Any, original: Any) -> Any:
    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    return step
