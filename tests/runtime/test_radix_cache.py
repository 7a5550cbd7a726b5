"""Our radix cache at its ends: a model it cannot serve, a failure of looking ahead, and a graceful
stop.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_kvtier.runtime.restore.kept_pages import KeptPages
from sgl_kvtier.runtime.scheduler import radix_cache
from sgl_kvtier.runtime.scheduler.parts import Parts
from sgl_kvtier.runtime.scheduler.radix_cache import KVTierRadixCache
from sgl_kvtier.types import PageKey


def bare() -> Any:
    """The cache without a tree below it."""
    return object.__new__(KVTierRadixCache)


def test_at_a_graceful_end_nothing_reads_into_host_memory_when_it_is_unmapped(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(
        UnifiedRadixCache, "release_host_resources", lambda self: order.append("unmapped")
    )
    tree = bare()
    backend = SimpleNamespace(begin_read=None, close=lambda: order.append("store"))
    tree.cache_controller = SimpleNamespace(storage_backend=SimpleNamespace(_backend=backend))
    tree.kvtier = parts = object.__new__(Parts)
    parts.engine = SimpleNamespace(close=lambda: order.append("copies"))
    parts.notes = SimpleNamespace(close=lambda: order.append("notes"))
    parts.agreement = SimpleNamespace(close=lambda: None)
    ahead = SimpleNamespace(close=lambda: order.append("ahead"))
    parts.tick = SimpleNamespace(ahead=ahead)
    tree.release_host_resources()
    assert order == ["copies", "notes", "ahead", "store", "unmapped"]


def fails(*_: Any) -> None:
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    "controller",
    [None, SimpleNamespace(storage_backend=SimpleNamespace(begin_read=None, close=fails))],
    ids=["none of our parts", "a store that cannot be closed"],
)
def test_sglangs_own_memory_is_given_back_all_the_same(monkeypatch, controller):
    ended: list[int] = []
    monkeypatch.setattr(UnifiedRadixCache, "release_host_resources", lambda self: ended.append(1))
    tree = bare()
    tree.cache_controller = controller
    tree.release_host_resources()
    assert ended == [1]


PARAMS = SimpleNamespace(sidecar_draft_device_pools=())
SERVER = SimpleNamespace(
    hicache_storage_backend_extra_config='{"store": {"path": "unused"}, '
    '"policy": {"restore": "both", "prefetch": "on"}}'
)


def without_pools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cache of a model with KV pages alone; nothing is built."""
    monkeypatch.setattr(UnifiedRadixCache, "init_hicache", lambda self, server_args, params: None)
    tree = bare()
    tree.tree_components = (ComponentType.FULL,)
    tree.sidecar_pool_specs = []
    tree.cache_controller = SimpleNamespace(allocate_storage_hit=None, device="cpu")
    monkeypatch.setattr(
        UnifiedRadixCache,
        "register_sidecar_pool",
        lambda self, spec, entry: self.sidecar_pool_specs.append(spec),
    )
    return tree


def built(monkeypatch: pytest.MonkeyPatch, tree: Any) -> list[list[str]]:
    """At each building of our parts the names of the side pools that were there."""
    seen: list[list[str]] = []

    def build(tree: Any, server_args: Any) -> Any:
        seen.append([str(spec.pool_name) for spec in tree.sidecar_pool_specs])
        return SimpleNamespace(
            agreement=SimpleNamespace(alone=True),
            context=SimpleNamespace(anchors=None),
            close=seen.clear,
        )

    monkeypatch.setattr(radix_cache.restore_setup, "build", build)
    monkeypatch.setattr(radix_cache.restore_setup, "lacks", lambda tree, server_args: None)
    monkeypatch.setattr(radix_cache, "StoredPages", lambda controller, alone: None)
    monkeypatch.setattr(radix_cache.tree_ranks, "stages", lambda tree: 1)
    return seen


def spec(name: PoolName) -> Any:
    return SimpleNamespace(pool_name=name)


def test_our_parts_are_built_when_the_pools_of_a_draft_are_there(monkeypatch):
    tree = without_pools(monkeypatch)
    seen = built(monkeypatch, tree)
    monkeypatch.setattr(
        radix_cache.slot_pools, "registered_later", lambda params: {"draft", "draft_indexer"}
    )
    tree.register_sidecar_pool(spec(PoolName.INDEXER))  # SGLang's, while it builds its cache
    tree.init_hicache(SERVER, PARAMS)
    assert tree.kvtier is None
    tree.register_sidecar_pool(spec(PoolName.DRAFT))
    assert tree.kvtier is None and seen == []
    tree.register_sidecar_pool(spec(PoolName.DRAFT_INDEXER))
    assert tree.kvtier is not None and seen == [["indexer", "draft", "draft_indexer"]]


def test_a_model_without_a_draft_is_served_at_once(monkeypatch):
    tree = without_pools(monkeypatch)
    seen = built(monkeypatch, tree)
    tree.init_hicache(SERVER, PARAMS)
    assert tree.kvtier is not None and seen == [[]]


def test_a_pool_that_comes_later_than_told_ends_our_parts(monkeypatch, caplog):
    tree = without_pools(monkeypatch)
    seen = built(monkeypatch, tree)
    tree.init_hicache(SERVER, PARAMS)
    with caplog.at_level(logging.WARNING):
        tree.register_sidecar_pool(spec(PoolName.DRAFT))
    assert tree.kvtier is None and seen == [] and "the pool draft came too late" in caplog.text


def test_a_model_with_pages_of_another_kind_gets_none_of_our_parts(monkeypatch, caplog):
    tree = without_pools(monkeypatch)
    tree.tree_components = (ComponentType.FULL, ComponentType.SWA)
    tree.token_to_kv_pool_allocator = None
    with caplog.at_level(logging.WARNING):
        tree.init_hicache(SERVER, PARAMS)
    assert tree.kvtier is None
    assert (
        "prefixes are restored and pages are prefetched and evicted SGLang's own way: windows in a "
        in caplog.text
    )


def test_a_server_whose_pages_cannot_be_checked_gets_none_of_our_parts(monkeypatch, caplog):
    tree = without_pools(monkeypatch)
    built(monkeypatch, tree)
    monkeypatch.setattr(radix_cache.restore_setup, "build", lambda tree, server_args: "why it is")
    with caplog.at_level(logging.WARNING):
        tree.init_hicache(SERVER, PARAMS)
    assert tree.kvtier is None and tree.cache_controller.allocate_storage_hit is None
    assert [(one.levelname, one.message) for one in caplog.records] == [("WARNING", "why it is")]


def test_looking_ahead_that_fails_costs_itself_alone(caplog):
    tree = bare()
    tree.kvtier = parts = object.__new__(Parts)
    stopped: list[int] = []
    agreement = parts.agreement = SimpleNamespace(alone=True)
    parts.tick = SimpleNamespace(
        stop_looking_ahead=lambda: stopped.append(1), ahead=SimpleNamespace()
    )

    def fails(ahead):
        raise OverflowError("an id of an image")

    tree._tell_ahead(fails)
    assert stopped == [1] and "looking ahead failed" in caplog.text
    agreement.alone = False
    tree._tell_ahead(fails)
    assert stopped == [1] and parts.ahead.broken, "with other ranks it is agreed on"


PAGE = 4


def tree_that_backs_up(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> tuple[Any, list[list[int]], list[PageKey]]:
    """A tree with a node of so many pages; the device slots that SGLang copies, and their keys."""
    copied: list[list[int]] = []

    def copy(tree: Any, node: int, slots: torch.Tensor, comps: Any, sidecars: Any) -> torch.Tensor:
        copied.append(slots.tolist())
        tree.sidecars.append([sidecar.pool_name for sidecar in sidecars])
        return slots + 1000

    monkeypatch.setattr(UnifiedRadixCache, "_execute_kv_backup", copy)
    keys = [PageKey(bytes([number + 1]) * 32) for number in range(pages)]
    tree = bare()
    tree.tree_core = SimpleNamespace(
        page_size=PAGE, get_hash_values=lambda node: [key.hex() for key in keys]
    )
    tree.cache_controller = SimpleNamespace(ack_write_queue=[])
    tree.sidecars = []
    tree.kvtier = SimpleNamespace(
        engine=SimpleNamespace(kept=KeptPages(SimpleNamespace(free=lambda slots: None), PAGE)),
        turns=SimpleNamespace(nodes=list),
        ahead=None,
        context=SimpleNamespace(host=None),
    )
    return tree, copied, keys


@pytest.mark.parametrize("sides", [[], [PoolName.DRAFT]], ids=["KV alone", "a draft's as well"])
def test_pages_that_were_restored_are_not_copied_back(monkeypatch, sides):
    """A draft's rows were read into the same host pages; those of others go with their KV."""
    tree, copied, keys = tree_that_backs_up(monkeypatch, 3)
    kept = torch.arange(2 * PAGE) + 500
    tree.kvtier.engine.kept.keep("r", keys[1:], kept)
    host = tree._execute_kv_backup(7, torch.arange(3 * PAGE), {}, [spec(name) for name in sides])
    assert copied == [[0, 1, 2, 3]], "of three pages the one that was computed"
    assert host.tolist() == [1000, 1001, 1002, 1003, *kept.tolist()]
    assert tree.sidecars == [sides]
    assert tree.kvtier.engine.kept.tokens == 0 and tree.cache_controller.ack_write_queue == []


def test_a_node_that_was_restored_as_a_whole_is_acknowledged_without_a_copy(monkeypatch):
    tree, copied, keys = tree_that_backs_up(monkeypatch, 2)
    tree.kvtier.engine.kept.keep("r", keys, torch.arange(2 * PAGE) + 500)
    host = tree._execute_kv_backup(7, torch.arange(2 * PAGE), {}, [])
    assert (copied, host.tolist()) == ([], list(range(500, 508)))
    (ack,) = tree.cache_controller.ack_write_queue
    assert ack.node_ids == [7] and (ack.num_tokens, ack.num_bytes) == (0, 0)
    ack.finish_event.synchronize()


def test_pages_are_kept_where_their_node_could_not_be_backed_up(monkeypatch):
    tree, _, keys = tree_that_backs_up(monkeypatch, 2)
    monkeypatch.setattr(UnifiedRadixCache, "_execute_kv_backup", lambda *_: None)
    tree.kvtier.engine.kept.keep("r", keys[:1], torch.arange(PAGE))
    assert tree._execute_kv_backup(7, torch.arange(2 * PAGE), {}, []) is None
    assert tree.kvtier.engine.kept.tokens == PAGE


def test_kept_pages_give_way_after_everything_that_can_be_evicted(monkeypatch):
    tree, _, keys = tree_that_backs_up(monkeypatch, 3)
    tree.kvtier.engine.kept.keep("r", keys, torch.arange(3 * PAGE))
    monkeypatch.setattr(UnifiedRadixCache, "evict_host", lambda self, tokens, kind=None: PAGE)
    assert tree.evict_host(2 * PAGE) == 2 * PAGE and tree.kvtier.engine.kept.tokens == 2 * PAGE
    assert tree.evict_host(PAGE) == PAGE and tree.kvtier.engine.kept.tokens == 2 * PAGE
