"""Our radix cache at its ends: a model it cannot serve, a failure of looking ahead, and a graceful
stop.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_kvtier.runtime.scheduler.parts import Parts
from sgl_kvtier.runtime.scheduler.radix_cache import KVTierRadixCache


def bare() -> Any:
    """The cache without a tree below it."""
    return object.__new__(KVTierRadixCache)


def test_at_a_graceful_end_nothing_reads_into_host_memory_when_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        UnifiedRadixCache, "release_host_resources", lambda self: order.append("unmapped")
    )
    tree = bare()
    backend = SimpleNamespace(begin_read=None, close=lambda: order.append("store"))
    tree.cache_controller = SimpleNamespace(storage_backend=SimpleNamespace(_backend=backend))
    tree.kvtier = parts = object.__new__(Parts)
    parts.engine = SimpleNamespace(close=lambda: order.append("copies"))  # type: ignore[assignment]
    parts.notes = SimpleNamespace(close=lambda: order.append("notes"))  # type: ignore[assignment]
    parts.agreement = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    ahead = SimpleNamespace(close=lambda: order.append("ahead"))
    parts.tick = SimpleNamespace(ahead=ahead)  # type: ignore[assignment]
    tree.release_host_resources()
    assert order == ["copies", "notes", "ahead", "store", "unmapped"]


def test_a_server_without_our_parts_ends_as_stock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(UnifiedRadixCache, "release_host_resources", lambda self: ended.append(1))
    tree = bare()
    tree.cache_controller = None
    tree.release_host_resources()
    assert ended == [1]


def test_a_model_with_pages_of_another_kind_gets_none_of_our_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(UnifiedRadixCache, "init_hicache", lambda self, server_args, params: None)
    tree = bare()
    tree.tree_components = (ComponentType.FULL,)
    tree.sidecar_pool_specs = [SimpleNamespace(pool_name=PoolName.INDEXER)]
    extra = '{"store": {"path": "unused"}, "policy": {"restore": "both", "prefetch": "on"}}'
    with caplog.at_level(logging.WARNING):
        tree.init_hicache(SimpleNamespace(hicache_storage_backend_extra_config=extra), None)
    assert tree.kvtier is None
    assert (
        "prefixes are restored and pages are prefetched and evicted SGLang's own way: indexer"
        in caplog.text
    )


def test_looking_ahead_that_fails_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    tree = bare()
    tree.kvtier = parts = object.__new__(Parts)
    stopped: list[int] = []
    agreement = parts.agreement = SimpleNamespace(alone=True)  # type: ignore[assignment]
    parts.tick = SimpleNamespace(  # type: ignore[assignment]
        stop_looking_ahead=lambda: stopped.append(1), ahead=SimpleNamespace()
    )

    def fails(ahead: Any) -> None:
        raise OverflowError("an id of an image")

    tree._tell_ahead(fails)
    assert stopped == [1] and "looking ahead failed" in caplog.text
    agreement.alone = False
    tree._tell_ahead(fails)
    assert stopped == [1] and parts.ahead.broken, "with other ranks it is agreed on"


def test_a_store_that_cannot_be_closed_does_not_keep_stock_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(UnifiedRadixCache, "release_host_resources", lambda self: ended.append(1))

    def fails() -> None:
        raise OSError("the disk is gone")

    tree = bare()
    tree.cache_controller = SimpleNamespace(
        storage_backend=SimpleNamespace(begin_read=None, close=fails)
    )
    tree.release_host_resources()
    assert ended == [1]
