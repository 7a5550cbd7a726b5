"""The storage backend against SGLang's own host pools, and against what HiCacheFile answers."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import until
from pools import (
    PAGE,
    Ranks,
    backend_on,
    compressed_pool,
    host_pool,
    index_key_pool,
    keys,
    latent_host_pool,
    latent_pool,
    numbering_pool,
    page_bytes,
    pages_of,
    serve_with,
    server_args,
    slots,
    state_pool,
    storage_config,
    unequal_pool,
)
from sglang.srt.distributed import parallel_state
from sglang.srt.managers import cache_controller
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host
from side_pools import slots_of, with_compressed

from sgl_kvtier.errors import ConfigError, SeamError
from sgl_kvtier.lab.gpu.pools import random_bytes
from sgl_kvtier.runtime.backend import hooks as backend_hooks
from sgl_kvtier.runtime.backend import identity
from sgl_kvtier.runtime.backend.host_pages import bytes_of, is_page_contiguous
from sgl_kvtier.runtime.backend.storage import KVTierStorage, _ranks_on_a_host, _WholePages
from sgl_kvtier.runtime.sglang import anchors
from sgl_kvtier.runtime.sglang.hooks import HOOKS, targets
from sgl_kvtier.runtime.step.page_names import page_key
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.segment import probe_direct_io
from sgl_kvtier.tenants import digest_of
from sgl_kvtier.types import Tier

CONTIGUOUS = ["page_first_direct", "page_first"]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Opens backends on one folder; they are closed at the end."""
    opened = []
    serve_with(monkeypatch, server_args())

    def opening(pool, side_pools=(), path=tmp_path / "store", store=None, lab=None, **config):
        opened.append(backend_on(path, pool, side_pools, {"lab": lab or {}}, store, **config))
        return opened[-1]

    yield opening
    for backend in opened:
        backend.close()


def filled(make, count, **how):
    """A backend that has stored the first `count` pages of its host pool; their names, the pool."""
    pool, names = host_pool(), keys(*range(count))
    backend = make(pool, **how)
    backend.batch_set_v1(names, slots(range(count)))
    return backend, names, pool


def slow_reads(gbps):
    return {"throttle": {"read_gbps": gbps}}


def side_transfer(name, pages, names, **how):
    """A transfer of a side pool's pages, as SGLang asks for it."""
    return PoolTransfer(name=name, host_indices=slots(pages), keys=names, **how)


@pytest.mark.parametrize("layout", CONTIGUOUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_pages_come_back_into_other_slots_byte_for_byte(make, layout, dtype):
    pool = host_pool(layout, dtype)
    backend = make(pool)
    names = keys(*range(4))
    assert backend.batch_set_v1(names, slots([3, 9, 4, 20])) == [True] * 4
    stored, neighbours = pages_of(pool, 3, 9, 4, 20), pages_of(pool, 0, 13, 31)
    assert backend.batch_get_v1(names, slots([11, 12, 30, 14])) == [True] * 4
    assert pages_of(pool, 11, 12, 30, 14) == stored
    assert pages_of(pool, 0, 13, 31) == neighbours


@pytest.mark.parametrize("layout", ["layer_first", *CONTIGUOUS])
def test_pages_come_back_through_flat_copies(make, layout):
    pool = host_pool(layout)
    backend = make(pool)
    names = keys("a", "b")
    assert backend.batch_set(names, [pool.get_data_page(5 * PAGE), pool.get_data_page(6 * PAGE)])
    targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
    first, missing, second = backend.batch_get([names[0], *keys("none"), names[1]], targets)
    assert missing is None
    pool.set_from_flat_data_page(1 * PAGE, first)
    pool.set_from_flat_data_page(2 * PAGE, second)
    assert page_bytes(pool, 1) == page_bytes(pool, 5)
    assert page_bytes(pool, 2) == page_bytes(pool, 6)
    assert backend.get(names[0], pool.get_dummy_flat_data_page()) is not None


def unequal_page(pool, page):
    """One page's bytes, K's and then V's, where these have heads of different widths."""
    pieces = pool.kv_buffer
    if pool.layout == "page_first":
        pieces = [piece.unflatten(0, (-1, PAGE)) for piece in pieces]
    return b"".join(bytes_of(piece[page].contiguous()).tobytes() for piece in pieces)


@pytest.mark.parametrize("layout", CONTIGUOUS)
def test_pages_whose_keys_and_values_have_different_widths_come_back_with_their_windows(
    make, layout
):
    """MiMo V2's, by the calls of SGLang's controller: it cannot copy these pages into tensors."""
    pool, window = unequal_pool(layout), unequal_pool(layout, heads=4, layers=2)
    backend = make(pool, [(PoolName.SWA, window)])
    controller = SimpleNamespace(storage_backend=backend, storage_host_pool=pool)
    for name in ("_page_get_zero_copy", "_page_set_zero_copy"):
        function = getattr(cache_controller.HiCacheController, name)
        setattr(controller, name, function.__get__(controller))
    backend_hooks.use_zero_copy(None, controller)
    names = keys(*range(3))
    own, theirs = ([unequal_page(one, p) for p in (3, 9, 4)] for one in (pool, window))
    neighbours = [unequal_page(one, p) for one in (pool, window) for p in (0, 13, 31)]
    assert controller.page_set_func(names, slots([3, 9, 4]))
    stored = side_transfer(PoolName.SWA, [3, 9, 4], names)
    assert backend.batch_set_v2([stored]) == {PoolName.SWA: [True] * 3}

    with backend.reading_ahead(names, slots([11, 12, 30])):
        assert controller.page_get_func(None, names, slots([11, 12, 30])) == 3
    read = side_transfer(PoolName.SWA, [11, 12, 30], names)
    assert backend.batch_get_v2([read]) == {PoolName.SWA: [True] * 3}
    assert [unequal_page(pool, p) for p in (11, 12, 30)] == own
    assert [unequal_page(window, p) for p in (11, 12, 30)] == theirs
    assert [unequal_page(one, p) for one in (pool, window) for p in (0, 13, 31)] == neighbours


def backup_of(names, where):
    """SGLang's operation that writes these pages."""
    return SimpleNamespace(
        hash_value=names, host_indices=where, prefix_keys=None, completed_tokens=0
    )


def test_all_batches_of_a_node_are_stored_at_its_second_offer_with_second_hit(make):
    backend = make(host_pool(), store={"admission": "second-hit"})
    backend.watch_pages()
    controller = SimpleNamespace(
        page_size=PAGE, page_set_func=lambda *batch: all(backend.batch_set_v1(*batch))
    )
    node = keys(*range(480))
    for there in (0, 480):
        operation = backup_of(node, slots([0] * 480))
        cache_controller.HiCacheController._page_backup(controller, operation)
        assert backend.batch_exists(node) == len(set(backend.take_seen())) == there
    assert backend._store.stats().pages_refused == 0


def test_existence_counts_from_the_front_and_stops_at_the_first_gap(make):
    pool = host_pool()
    backend = make(pool)
    a, b, c, d = keys("a", "b", "c", "d")
    backend.batch_set_v1([a, b, d], slots([0, 1, 2]))
    assert backend.batch_exists([a, b, c, d]) == 2
    assert backend.batch_exists([c, d]) == 0
    assert backend.batch_exists([]) == 0
    assert backend.exists(d) and not backend.exists(c)


def test_two_backends_of_one_rank_find_each_others_pages(make):
    pool, other = host_pool(), host_pool()
    first, second = make(pool), make(other)
    assert first.folder == second.folder
    first.batch_set_v1(keys("a", "b"), slots([1, 2]))
    second._store.follow()
    assert second.batch_exists(keys("a", "b")) == 2
    assert second.batch_get_v1(keys("a", "b"), slots([5, 6])) == [True] * 2
    assert page_bytes(other, 5) == page_bytes(pool, 1)
    assert second.batch_set_v1(keys("a"), slots([5])) == [True]
    assert second._store.stats().pages_written == 0


@pytest.mark.parametrize(
    ("pool", "ranks"),
    [({"dtype": torch.bfloat16}, {}), ({"layout": "page_first"}, {}), ({}, {"tp_size": 2})],
    ids=["dtype", "layout", "ranks"],
)
def test_pages_of_another_setup_are_not_found(make, pool, ranks):
    first = make(host_pool())
    first.batch_set_v1(keys("a"), slots([0]))
    first.close()
    other = make(host_pool(**pool), **ranks)
    assert other.batch_exists(keys("a")) == 0
    other.close()
    assert make(host_pool()).batch_exists(keys("a")) == 1


def test_pages_of_other_weights_are_not_found(make, tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_server_args", lambda: server_args(str(model))
    )
    found = []
    for weights in (b"1", b"2", b"1"):
        (model / "model.bin").write_bytes(weights)
        backend = make(host_pool())
        found.append(backend.batch_exists(keys("a")))
        backend.batch_set_v1(keys("a"), slots([0]))
        backend.close()
    assert found == [0, 0, 1]


def test_clear_drops_everything(make):
    backend = make(host_pool())
    backend.batch_set_v1(keys("a", "b"), slots([0, 1]))
    backend.clear()
    assert backend.batch_exists(keys("a", "b")) == 0


def test_after_new_weights_nothing_is_served_or_stored(make):
    backend = make(host_pool())
    backend.batch_set_v1(keys("a"), slots([0]))
    backend.leave_identity()
    assert backend.batch_exists(keys("a")) == 0
    assert backend.batch_get_v1(keys("a"), slots([3])) == [False]
    assert backend.batch_set_v1(keys("b"), slots([1])) == [False]


@pytest.fixture
def scheduler(make, monkeypatch):
    """One whose backend has page "a", before any update of weights."""
    monkeypatch.setattr(identity, "_runtime_weights", None)
    backend = make(host_pool())
    backend.batch_set_v1(keys("a"), slots([0]))
    controller = SimpleNamespace(storage_backend=backend)
    return SimpleNamespace(tree_cache=SimpleNamespace(cache_controller=controller))


def has_left(scheduler):
    """Whether stored pages are not used any more."""
    backend = scheduler.tree_cache.cache_controller.storage_backend
    return backend.batch_exists(keys("a")) == 0 and identity._runtime_weights is not None


def test_weights_that_may_have_been_written_from_outside_end_the_use_of_stored_pages(scheduler):
    names = {target.rpartition(".")[2] for target in targets("weights")}
    assert names >= {
        "begin_weight_update", "end_weight_update", "flush_cache_after_weight_update",
    }  # fmt: skip
    refused = SimpleNamespace(success=False)
    backend_hooks.leave_old_weights(refused, SimpleNamespace(scheduler=scheduler))
    assert not has_left(scheduler)
    backend_hooks.leave_old_weights(None, SimpleNamespace(scheduler=scheduler))
    assert has_left(scheduler)
    backend_hooks.leave_old_weights(None, SimpleNamespace(scheduler=None))


@pytest.mark.parametrize("name", ["update_weights_from_disk", "update_weights_from_ipc"])
@pytest.mark.parametrize("raises", [False, True])
def test_an_update_of_weights_that_fails_half_way_ends_the_use_of_stored_pages(
    scheduler, monkeypatch, name, raises
):
    def fails(*args, **kwargs):
        if raises:
            raise RuntimeError("half-way")
        return False, "half of the tensors were loaded"

    runner = SimpleNamespace(weight_updater=SimpleNamespace(**{name: fails}))
    updater = SimpleNamespace(
        scheduler=scheduler,
        tp_cpu_group=None,
        _observe_weight_load=lambda source: nullcontext(),
        _select_runners=lambda: [("target", runner)],
    )
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    (hook,) = (hook for hook in HOOKS if hook.target.endswith("." + name))
    assert hook.kind == "around"
    request = SimpleNamespace(model_path="m", load_format=None, recapture_cuda_graph=False)
    original = getattr(SchedulerWeightUpdaterManager, name)
    with pytest.raises(RuntimeError) if raises else nullcontext():
        assert not hook.load()(original, updater, request).success
    assert has_left(scheduler)


@pytest.mark.parametrize(
    "name, message, kept, saves, gone",
    [
        ("release_memory_occupation", {"tags": None}, False, True, True),
        ("release_memory_occupation", {"tags": ["weights"]}, False, True, True),
        ("release_memory_occupation", {"tags": ["kv_cache"]}, False, True, False),
        ("release_memory_occupation", {"tags": None}, True, True, False),
        ("release_memory_occupation", {"tags": None}, False, False, False),
        ("check_weights", {"action": "reset_tensors"}, False, True, True),
        ("check_weights", {"action": "checksum"}, False, True, False),
    ],
)
def test_weights_that_are_lost_or_random_end_the_use_of_stored_pages(
    make, monkeypatch, name, message, kept, saves, gone
):
    monkeypatch.setattr(identity, "_runtime_weights", None)
    backend = make(host_pool())
    backend.batch_set_v1(keys("a"), slots([0]))
    tree = SimpleNamespace(cache_controller=SimpleNamespace(storage_backend=backend))
    args = SimpleNamespace(enable_weights_cpu_backup=kept)
    updater = SimpleNamespace(
        scheduler=SimpleNamespace(tree_cache=tree, server_args=args),
        memory_saver_adapter=SimpleNamespace(enabled=saves),
    )
    (hook,) = (hook for hook in HOOKS if hook.target.endswith("." + name))
    assert hook.kind == "after"
    hook.load()(None, updater, SimpleNamespace(**message))
    assert (backend.batch_exists(keys("a")) == 0) is gone
    assert (identity._runtime_weights is not None) is gone


def test_attached_again_after_new_weights_it_starts_empty(make, monkeypatch):
    backend = make(host_pool())
    backend.batch_set_v1(keys("a"), slots([0]))
    monkeypatch.setattr(identity, "_runtime_weights", None)
    identity.weights_changed()
    backend.leave_identity()
    monkeypatch.setattr(parallel_state, "get_tp_group", Ranks)
    assert make(host_pool()).batch_exists(keys("a")) == 0


def test_ranks_attached_again_after_new_weights_find_each_others_pages(make, monkeypatch):
    group, ranks = Ranks(), []
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: group)
    for rank in (0, 1):
        monkeypatch.setattr(identity, "_runtime_weights", None)
        identity.weights_changed()
        pool = latent_host_pool(latent_pool(2))
        ranks.append(make(pool, is_mla_model=True, tp_size=2, tp_rank=rank))
    assert ranks[0].batch_set_v1(keys("a"), slots([0])) == [True]
    ranks[1].local_store.follow()
    assert ranks[1].batch_exists(keys("a")) == 1


@pytest.mark.parametrize(
    "faults", [{"read_error_rate": 1.0}, {"corrupt_rate": 1.0}], ids=["errors", "flipped-bits"]
)
def test_a_failing_disk_makes_misses_and_no_exception(make, faults):
    backend, names, _ = filled(make, 2, lab={"faults": faults})
    assert backend.batch_get_v1(names, slots([4, 5])) == [False, False]


def test_a_worse_device_without_the_laboratory_is_refused_and_the_folder_is_free(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kvtier.lab.front.wrappers", None)
    with pytest.raises(ConfigError, match=r"not installed here .*Omit the section lab"):
        make(host_pool(), lab=slow_reads(1.0))
    make(host_pool())


def test_a_read_that_nobody_wants_any_more_is_cut_short_and_later_ones_are_not(make):
    backend, names, _ = filled(make, 20, lab=slow_reads(0.0002))  # a page takes a second
    with ThreadPoolExecutor(1) as other:
        long = other.submit(backend.batch_get_v1, names, slots(range(20)))
        until(lambda: backend._reading)
        with backend.reads_cut_short():
            read = long.result(timeout=15)
            assert backend.batch_get_v1(names[:2], slots([30, 31])) == [False, False]
    assert sum(read) < 10
    backend.throttle(0)
    assert backend.batch_get_v1(names[:2], slots([30, 31])) == [True, True]


def test_a_flush_ends_a_long_write_before_sglang_ends_the_server(make, monkeypatch):
    """SGLang's own write-back thread, in a write of 20 batches and 15 s, and its end of it."""
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 1)
    pool = host_pool()
    gbps = 8e-9 * len(page_bytes(pool, 0)) / 0.75
    backend = make(pool, lab={"throttle": {"write_gbps": gbps}})
    controller = object.__new__(cache_controller.HiCacheController)
    controller.storage_backend, controller.page_size = backend, PAGE
    controller.storage_config = SimpleNamespace(is_storage_writer=True)
    controller.backup_queue, controller.ack_backup_queue = Queue(), Queue()
    controller.storage_stop_event = threading.Event()
    controller.page_set_func = controller._page_set_zero_copy
    names = keys(*range(20))
    where = slots(range(20))
    operation = backup_of(names, where)
    controller.backup_queue.put(operation)
    controller.backup_thread = threading.Thread(target=controller.backup_thread_func, daemon=True)
    controller.backup_thread.start()
    until(lambda: backend._store.stats().pages)
    stop = cache_controller.HiCacheController._stop_storage_threads
    backend_hooks.cut_reads_short(stop, controller)  # raises where a thread is left
    stored = operation.completed_tokens // PAGE
    assert 0 < stored < 20
    backend.local_store._write_free_at = 0.0
    assert backend.batch_set_v1(names[-1:], where[-PAGE:]) == [True]
    assert backend.batch_exists(names) == stored


def transfer(backend, names, where, batch=4, stop_after=None):
    """What SGLang's `_page_transfer` does with one prefix, within our hook on it: which pages were
    read.
    """
    read = []

    def in_batches(controller, operation):
        for at in range(0, len(operation.hash_value), batch):
            if len(read) >= (stop_after or len(names)):
                break
            read.extend(
                controller.storage_backend.batch_get_v1(
                    operation.hash_value[at : at + batch], slots(where[at : at + batch])
                )
            )
        return len(read)

    operation = SimpleNamespace(hash_value=names, host_indices=slots(where))
    assert backend_hooks.read_ahead(
        in_batches, SimpleNamespace(storage_backend=backend), operation
    ) == len(read)
    return read


def test_a_prefix_asked_for_in_batches_is_read_ahead_each_page_once(make):
    backend, names, pool = filled(make, 10, enable_storage_metrics=True)
    before = backend._store.stats().pages_read
    assert transfer(backend, names, range(20, 30)) == [True] * 10
    assert pages_of(pool, *range(20, 30)) == pages_of(pool, *range(10))
    assert backend._store.stats().pages_read == before + 10
    assert backend.get_stats().prefetch_pgs == [10] and len(backend.own_reads) == 1
    assert backend._reading == {}


@pytest.mark.parametrize("stop_after", [None, 4])
def test_sglangs_own_loop_over_a_prefix_gets_its_pages_and_says_so(make, monkeypatch, stop_after):
    monkeypatch.setattr(cache_controller, "STORAGE_BATCH_SIZE", 4)
    backend, names, pool = filled(make, 10)
    controller = object.__new__(cache_controller.HiCacheController)
    controller.storage_backend, controller.page_size = backend, PAGE
    controller.prefetch_sync_queue = Queue()
    controller.page_get_func = controller._page_get_zero_copy
    acks = controller.prefetch_sync_queue.queue
    operation = SimpleNamespace(
        hash_value=names, host_indices=slots(range(20, 30)), prefix_keys=None, request_id="one", pool_transfers=None,
        is_terminated=lambda: stop_after is not None and len(acks) * 4 >= stop_after,
    )  # fmt: skip
    read = stop_after or 10
    own_loop = cache_controller.HiCacheController._page_transfer
    assert backend_hooks.read_ahead(own_loop, controller, operation) == read
    acknowledged = [min(read, pages) * PAGE for pages in (4, 8, 10)]
    assert [ack.completed_tokens for ack in acks] == acknowledged
    assert pages_of(pool, *range(20, 20 + read)) == pages_of(pool, *range(read))
    assert backend._reading == {}


def test_what_was_read_ahead_and_not_asked_for_leaves_its_slots_alone_afterwards(make):
    backend, names, pool = filled(make, 12)
    empty = torch.zeros_like(pool.get_dummy_flat_data_page())
    for _ in range(20):
        assert transfer(backend, names, range(18, 30), stop_after=4) == [True] * 4
        for page in range(22, 30):
            pool.set_from_flat_data_page(page * PAGE, empty)
        again = backend.batch_get_v1(names, slots(range(12)))
        assert again == [True] * 12, "what was queued before has ended by then"
        assert not any(any(page) for page in pages_of(pool, *range(22, 30)))
    assert pages_of(pool, *range(18, 22)) == pages_of(pool, *range(4))


def test_a_prefix_with_a_page_missing_says_which_and_other_pages_than_expected_are_read_as_asked(
    make,
):
    pool = host_pool()
    backend = make(pool)
    names = keys(*range(8))
    backend.batch_set_v1(names[:5] + names[6:], slots([0, 1, 2, 3, 4, 6, 7]))
    assert transfer(backend, names, range(20, 28)) == [True] * 5 + [False] + [True] * 2
    with backend.reading_ahead(names, slots(range(20, 28))):
        assert backend.batch_get_v1(names[2:4], slots([14, 15])) == [True, True]
        assert backend.batch_get_v1(names[:2], slots([16, 17])) == [True, True]
        assert backend.batch_get_v1(names[:2], slots([20, 21])) == [True, True]
    assert pages_of(pool, 14, 15, 16, 17) == pages_of(pool, 2, 3, 0, 1)


def test_a_read_that_is_stopped_ends_with_the_pages_that_were_begun(make):
    backend, names, _ = filled(make, 20, lab=slow_reads(0.005))  # a page takes 40 ms
    with ThreadPoolExecutor(1) as other:
        own = other.submit(transfer, backend, names, range(20))
        until(lambda: backend._reading or own.done())
        backend.stop_reading(names)
        read = own.result(timeout=15)
    assert not all(read)
    backend.throttle(0)
    assert transfer(backend, names, range(20)) == [True] * 20, "it is read again as asked"


def test_a_restorations_pages_are_read_before_those_sglang_reads(make):
    backend, names, _ = filled(make, 24, lab=slow_reads(0.005))  # a page takes 40 ms
    ended: list[str] = []
    with ThreadPoolExecutor(1) as other:
        own = other.submit(transfer, backend, names[:20], range(20))
        until(lambda: backend._reading or own.done())
        job = backend.begin_read(
            [page_key(name) for name in names[20:]],
            slots([24, 25, 26, 27]),
            on_page=lambda page, outcome: ended.append(outcome.name),
        )
        assert job.wait(15) and ended == ["OK"] * 4 and not own.done()
        backend.throttle(0)
        assert own.result(timeout=15) == [True] * 20


def with_draft(make, **how):
    """A backend with a draft's pool beside the KV pages, and both pools with pages 0 to 3 stored."""
    kv, draft = host_pool(), host_pool(seed=1)
    backend = make(kv, side_pools=[(PoolName.DRAFT, draft)], **how)
    backend.batch_set_v1(keys(*range(4)), slots([0, 1, 2, 3]))
    stored = side_transfer(PoolName.DRAFT, [0, 1, 3], keys(0, 1, 3))
    assert backend.batch_set_v2([stored]) == {PoolName.DRAFT: [True] * 3}
    return backend, kv, draft


def test_a_page_is_read_in_all_pools_as_one(make):
    backend, kv, draft = with_draft(make)
    ended: list[tuple[int, str]] = []
    job = backend.begin_read(
        [page_key(name) for name in keys(0, 1, 2, 3)],
        slots([20, 21, 22, 23]),
        on_page=lambda page, outcome: ended.append((page, outcome.name)),
    )
    assert job.wait(15)
    assert sorted(ended) == [(0, "OK"), (1, "OK"), (2, "MISS"), (3, "OK")], "once for each page"
    for pool in (kv, draft):
        assert pages_of(pool, 20, 21, 23) == pages_of(pool, 0, 1, 3)


def test_windows_come_with_the_first_pages_of_a_read_and_into_slots_of_their_own(make):
    kv, windows = host_pool(), host_pool(seed=1)
    backend = make(kv, side_pools=[(PoolName.SWA, windows)])
    backend.batch_set_v1(keys(*range(4)), slots([0, 1, 2, 3]))
    stored = side_transfer(PoolName.SWA, [3, 2], keys(3, 1))
    assert backend.batch_set_v2([stored]) == {PoolName.SWA: [True] * 2}
    ended: list[tuple[int, str]] = []
    job = backend.begin_read(
        [page_key(name) for name in keys(3, 2, 1, 0)],
        slots([23, 22, 21, 20]),
        on_page=lambda page, outcome: ended.append((page, outcome.name)),
        anchor=slots([8, 9]),
    )
    assert job.wait(15)
    assert sorted(ended) == [(0, "OK"), (1, "MISS"), (2, "OK"), (3, "OK")], "2 has no window"
    assert page_bytes(windows, 8) == page_bytes(windows, 3)
    assert pages_of(kv, 20, 21, 23) == pages_of(kv, 0, 1, 3)


def test_a_page_ends_with_its_last_part_and_the_first_that_failed():
    ended: list[tuple[int, ReadOutcome]] = []
    whole = _WholePages([3, 3], lambda page, outcome: ended.append((page, outcome)))
    for part, outcome in ((4, "CORRUPT"), (0, "OK"), (3, "OK"), (1, "OK")):
        whole(part, ReadOutcome[outcome])
    assert ended == []
    whole(5, ReadOutcome.CANCELLED)
    whole(2, ReadOutcome.OK)
    assert ended == [(1, ReadOutcome.CORRUPT), (0, ReadOutcome.OK)]


def test_sglangs_own_read_of_a_prefix_leaves_side_pools_to_sglang(make):
    backend, kv, draft = with_draft(make)
    before = page_bytes(draft, 20)
    assert transfer(backend, keys(0, 1), [20, 21]) == [True, True]
    assert page_bytes(kv, 20) == page_bytes(kv, 0) and page_bytes(draft, 20) == before


def test_a_page_is_stored_where_every_pool_has_it(make):
    backend, _, _ = with_draft(make)
    assert backend.stored(keys(*range(5))) == [Tier.STORAGE, Tier.STORAGE, None, Tier.STORAGE, None]


def test_index_keys_are_read_in_place_as_they_were_stored(make):
    """A copy through a flat page is what earlier versions have stored."""
    pool = index_key_pool()
    random_bytes(pool.index_k_with_scale_buffer)
    backend = make(host_pool(), side_pools=[(PoolName.INDEXER, pool)])
    pages = [(torch.arange(64) + 64 * page) for page in (1, 5)]
    flat = pool.get_data_page(64, flat=True).contiguous()
    backend._write(keys("a"), [[bytes_of(flat)]], "indexer")
    into = PoolTransfer(name=PoolName.INDEXER, host_indices=pages[1], keys=keys("a"))
    assert backend.batch_get_v2([into]) == {PoolName.INDEXER: [True]}
    assert torch.equal(pool.get_data_page(5 * 64), flat)
    again = PoolTransfer(name=PoolName.INDEXER, host_indices=pages[0], keys=keys("b"))
    assert is_page_contiguous(pool) and backend.batch_set_v2([again]) == {PoolName.INDEXER: [True]}
    found = pool.get_dummy_flat_data_page()
    assert backend._read(keys("b"), [[bytes_of(found)]], "indexer") == [True]
    assert torch.equal(found, flat)


def test_a_read_that_was_cut_short_tells_how_slow_the_store_is(make):
    """What SGLang gives up since it takes too long is all there is to learn from where everything
    is left to SGLang.
    """
    backend, names, _ = filled(make, 20, lab=slow_reads(0.001))  # a page takes a fifth of a second
    page_nbytes = backend._store.stats().bytes_written // 20
    for read in (transfer, lambda backend, names, pages: backend.batch_get_v1(names, slots(pages))):
        with ThreadPoolExecutor(1) as other:
            long = other.submit(read, backend, names, range(20))
            time.sleep(0.7)
            with backend.reads_cut_short():
                landed = sum(long.result(timeout=15))
        assert 0 < landed < 20
        _, nbytes, seconds = backend.own_reads.pop()
        assert nbytes == landed * page_nbytes and seconds > 0


def test_another_backend_is_left_alone(make):
    controller = SimpleNamespace(storage_backend=object())
    assert backend_hooks.read_ahead(lambda controller, operation: 7, controller, None) == 7


def test_a_refusing_disk_says_so_and_no_exception(make):
    backend = make(host_pool(), lab={"faults": {"write_error_rate": 1.0}})
    assert backend.batch_set_v1(keys("a"), slots([0])) == [False]
    assert backend.batch_exists(keys("a")) == 0


def test_statistics_tell_pages_and_bandwidth_of_each_batch_once(make):
    backend = make(host_pool(), enable_storage_metrics=True)
    backend.batch_set_v1(keys("a", "b", "c"), slots([0, 1, 2]))
    backend.batch_get_v1(keys("a", "b"), slots([4, 5]))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [2])
    assert stats.backup_bandwidth[0] > 0 and stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []


def test_mla_pages_that_all_tensor_ranks_hold_are_written_once_and_read_by_all(make):
    pools = [latent_host_pool(latent_pool(2)) for _ in range(2)]
    ranks = [
        make(pool, is_mla_model=True, tp_size=2, tp_rank=rank) for rank, pool in enumerate(pools)
    ]
    names = keys("a", "b", "c")
    for rank in ranks:
        assert rank.storage_config.is_storage_writer, "SGLang asks every rank to write"
        rank.watch_pages()
        assert rank.batch_set_v1(names, slots([1, 2, 3])) == [True] * 3
    ranks[1]._store.follow()
    written = [rank._store.stats() for rank in ranks]
    assert [stats.pages_written for stats in written] == [3, 0]
    assert written[1].bytes_written == 0 < written[0].bytes_written
    assert ranks[0].take_seen() == ranks[1].take_seen()
    assert ranks[1].batch_exists(names) == 3
    assert ranks[1].batch_get_v1(names, slots([5, 6, 7])) == [True] * 3
    assert page_bytes(pools[1], 6) == page_bytes(pools[0], 2)


def test_pages_are_noted_for_lookahead_only_while_somebody_takes_them(make):
    backend = make(host_pool())
    backend.watch_pages()
    backend.batch_set_v1(keys("a"), slots([1]))
    assert len(backend.take_seen()) == 1
    backend.unwatch_pages()
    backend.batch_set_v1(keys("b"), slots([2]))
    assert backend.batch_exists(keys("a", "b")) == 2
    assert backend.take_seen() == () and not backend._seen


def two_ranks_beside_latents(make, **sides):
    """Two TP ranks of a model with latents (MLA), and each rank's host pools by their names: their
    bytes differ on the two ranks.
    """
    ranks, pools = [], []
    for rank in (0, 1):
        own = {name: pool(rank) for name, pool in sides.items()}
        latents = latent_host_pool(latent_pool(2))
        latents.kv_buffer.fill_(7.0)
        ranks.append(
            make(latents, side_pools=own.items(), is_mla_model=True, tp_size=2, tp_rank=rank)
        )
        pools.append({"kv": latents, **own})
    return ranks, pools


def states(rank):
    pool = state_pool()
    for part in (pool.temporal_buffer, *pool.conv_buffer):
        part.fill_(float(rank + 1))
    return pool


def moved(backend, pool, name, names, first, *, store):
    """Stores a side pool's pages from a slot on, or reads them into slots from there on."""
    pages = list(range(first, first + len(names)))
    where = slots(pages) if pool.page_size == PAGE else torch.tensor(pages)
    one = PoolTransfer(name=PoolName(name), host_indices=where, keys=names)
    move = backend.batch_set_v2 if store else backend.batch_get_v2
    (done,) = move([one]).values()
    return done


def bytes_at(pool, page):
    at = page * (pool.page_size or 1)
    return pool.get_data_page(at).contiguous().view(torch.uint8).numpy().tobytes()


SHARES = {
    "mamba": states,
    "draft": lambda rank: host_pool(seed=10 + rank),
    "draft_swa": lambda rank: host_pool(seed=20 + rank),
}
"""Pools beside latents of which each TP rank has a share: states of linear layers, and keys and
values of a draft with heads.
"""


@pytest.mark.parametrize("name", SHARES)
def test_a_rank_reads_back_its_own_share_of_a_pool_beside_replicated_latents(make, name):
    ranks, pools = two_ranks_beside_latents(make, **{name: SHARES[name]})
    names = keys("a", "b")
    for rank, own in zip(ranks, pools, strict=True):
        assert moved(rank, own[name], name, names, 1, store=True) == [True, True]
    stored = [bytes_at(own[name], 1) for own in pools]
    assert stored[0] != stored[1]
    for rank in ranks:
        rank._store.follow()
    for rank, own, bytes_stored in zip(ranks, pools, stored, strict=True):
        assert moved(rank, own[name], name, names, 4, store=False) == [True, True]
        assert bytes_at(own[name], 4) == bytes_stored


@pytest.mark.parametrize(
    ("nodes", "stages", "latents", "through"),
    [(1, 1, True, True), (2, 1, True, False), (2, 2, True, True), (1, 1, False, False)],
)
def test_ranks_of_a_host_with_the_same_pages_read_them_through_the_page_cache(
    make, monkeypatch, tmp_path, nodes, stages, latents, through
):
    args = server_args(nnodes=nodes)
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
    pool = latent_host_pool(latent_pool(2)) if latents else host_pool("page_first")
    store = make(pool, is_mla_model=latents, tp_size=2, tp_rank=0, pp_size=stages).local_store
    usual = probe_direct_io(Env(), str(tmp_path), "auto")
    assert store.direct_io == (bool(usual.flags) and not through)


def test_the_first_rank_of_each_host_writes_pages_that_all_ranks_have(make, monkeypatch, tmp_path):
    args = server_args(nnodes=2, tp_size=4)
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: args)
    names, ranks = keys("a"), []
    for number in range(4):
        pool = latent_host_pool(latent_pool(2))
        host = str(tmp_path / f"host{number // 2}")
        ranks.append(make(pool, path=host, is_mla_model=True, tp_size=4, tp_rank=number))
    for rank in ranks:
        assert rank.batch_set_v1(names, slots([1])) == [True]
        rank.local_store.follow()
    assert [rank.local_store.stats().pages_written for rank in ranks] == [1, 0, 1, 0]
    assert [rank.batch_exists(names) for rank in ranks] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("ranks", "group", "nodes", "stages", "on_a_host"),
    [
        (16, 16, 1, 1, 16),
        (16, 16, 2, 1, 8),
        (16, 16, 2, 2, 16),
        (8, 8, 4, 2, 4),
        (16, 8, 2, 1, 8),
        (16, 8, 4, 1, 4),
        (12, 4, 2, 1, 2),
    ],
    ids=["host", "hosts", "stages", "stages-on-hosts", "groups", "group-on-hosts", "unequal"],
)
def test_every_host_has_a_first_rank_of_each_attention_group(
    ranks, group, nodes, stages, on_a_host
):
    config = storage_config(tp_size=group, pp_size=stages)
    found = _ranks_on_a_host(config, server_args(nnodes=nodes, tp_size=ranks))
    assert found == on_a_host
    of_a_host = ranks // max(1, nodes // stages)
    there = {(rank // of_a_host, rank // group) for rank in range(ranks)}
    first = {
        (rank // of_a_host, rank // group) for rank in range(ranks) if rank % group % found == 0
    }
    assert first == there


def test_a_rank_finds_a_share_only_once_it_has_written_it_itself(make):
    ranks, pools = two_ranks_beside_latents(make, **SHARES)
    names = keys("a")
    asked = [PoolTransfer(name=PoolName.MAMBA, keys=names, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    ranks[0].batch_set_v1(names, slots([1]))
    moved(ranks[0], pools[0]["mamba"], "mamba", names, 1, store=True)
    ranks[1]._store.follow()
    assert [rank.batch_exists(names) for rank in ranks] == [1, 1]
    assert [rank.batch_exists_v2(names, asked).kv_hit_pages for rank in ranks] == [1, 0]
    moved(ranks[1], pools[1]["mamba"], "mamba", names, 1, store=True)
    assert ranks[1].batch_exists_v2(names, asked).kv_hit_pages == 1


def test_shares_are_there_after_both_ranks_were_opened_again(make):
    ranks, pools = two_ranks_beside_latents(make, **SHARES)
    names = keys("a")
    for rank, own in zip(ranks, pools, strict=True):
        rank.batch_set_v1(names, slots([1]))
        moved(rank, own["mamba"], "mamba", names, 1, store=True)
        rank.close()
    again, pools = two_ranks_beside_latents(make, **SHARES)
    for number, (rank, own) in enumerate(zip(again, pools, strict=True)):
        expected = bytes_at(states(number), 0)
        assert moved(rank, own["mamba"], "mamba", names, 3, store=False) == [True]
        assert bytes_at(own["mamba"], 3) == expected


def test_latents_and_index_keys_are_written_once_beside_pools_that_are_shared_out(make):
    ranks, _ = two_ranks_beside_latents(make, **SHARES, indexer=lambda rank: index_key_pool())
    names = keys("a", "b")
    for rank in ranks:
        assert rank.batch_set_v1(names, slots([1, 2])) == [True, True]
        keys_of_pages = PoolTransfer(
            name=PoolName.INDEXER, host_indices=torch.arange(128), keys=names
        )
        assert rank.batch_set_v2([keys_of_pages]) == {PoolName.INDEXER: [True, True]}
    ranks[1]._store.follow()
    assert [rank._store.stats().pages_written for rank in ranks] == [4, 0]
    assert ranks[1].batch_get_v1(names, slots([5, 6])) == [True, True]
    asked = [PoolTransfer(name=PoolName.INDEXER, keys=names, hit_policy=PoolHitPolicy.ALL_PAGES)]
    assert ranks[1].batch_exists_v2(names, asked).kv_hit_pages == 2


def test_a_share_that_is_registered_late_is_each_ranks_own(make):
    ranks, _ = two_ranks_beside_latents(make)
    names = keys("a")
    drafts = [SHARES["draft"](rank) for rank in (0, 1)]
    for rank, draft in zip(ranks, drafts, strict=True):
        rank.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        assert moved(rank, draft, "draft", names, 1, store=True) == [True]
    for rank, draft in zip(ranks, drafts, strict=True):
        rank._store.follow()
        assert moved(rank, draft, "draft", names, 4, store=False) == [True]
        assert page_bytes(draft, 4) == page_bytes(draft, 1)


def test_a_host_pool_that_is_not_known_is_each_ranks_own(make):
    """Also as the KV pool of a model with latents: each rank then has a folder of its own."""
    own = [host_pool(seed=rank) for rank in (0, 1)]
    ranks = [
        make(pool, is_mla_model=True, tp_size=2, tp_rank=rank) for rank, pool in enumerate(own)
    ]
    for rank, pool in zip(ranks, own, strict=True):
        assert rank.batch_set_v1(keys("a"), slots([1])) == [True]
        assert rank.batch_get_v1(keys("a"), slots([5])) == [True]
        assert page_bytes(pool, 5) == page_bytes(pool, 1)


def test_data_parallel_ranks_have_each_others_shares_of_the_same_number(make):
    latents = [latent_host_pool(latent_pool(2)) for _ in (0, 1)]
    own = [states(0), states(4)]
    first, second = [
        make(kv, side_pools=[("mamba", state)], is_mla_model=True, tp_size=2, tp_rank=1, dp_rank=d)
        for d, (kv, state) in enumerate(zip(latents, own, strict=True))
    ]
    assert moved(first, own[0], "mamba", keys("a"), 1, store=True) == [True]
    second._store.follow()
    assert moved(second, own[1], "mamba", keys("a"), 1, store=False) == [True]
    assert bytes_at(own[1], 1) == bytes_at(own[0], 1)


def test_tensor_ranks_of_other_models_have_pages_of_their_own(make):
    first = make(host_pool(), tp_size=2, tp_rank=0)
    second = make(host_pool(), tp_size=2, tp_rank=1)
    first.batch_set_v1(keys("a"), slots([1]))
    second._store.follow()
    assert second.batch_exists(keys("a")) == 0


def test_two_writes_on_their_way_that_begin_with_one_page_are_one_tenants(make):
    """As those of a node whose side pools are backed up later than its KV pages."""
    backend = make(host_pool())
    for _ in range(2):
        backend.note_tenant(*keys("a"), "a salt")
    for name, slot in (("a", 1), ("b", 2)):
        with backend.writing_for_tenant_of(*keys("a")):
            backend.batch_set_v1(keys(name), slots([slot]))
    with backend.writing_for_tenant_of(*keys("a")):
        backend.batch_set_v1(keys("nobody's"), slots([3]))
    assert backend._store.delete_tenant(digest_of("a salt")) == 2
    assert backend.batch_exists(keys("nobody's")) == 1


def without_pages():
    return type("OtherHostPool", (), {"kv_buffer": None})()


def with_scales_elsewhere():
    pool = object.__new__(MHATokenToKVPoolMXFP8Host)  # SGLang builds it on a card only
    pool.kv_buffer, pool.page_size, pool.layout = torch.zeros(1), PAGE, "page_first"
    return pool


@pytest.mark.parametrize(
    ("pool", "said"),
    [
        (without_pages, "Choose another --hicache-storage-backend"),
        (with_scales_elsewhere, "--kv-cache-dtype"),
    ],
)
def test_a_pool_whose_pages_cannot_be_stored_is_refused(pool, said):
    backend = KVTierStorage(
        storage_config(extra_config={"module_path": "x", "store": {"path": "unused"}}), {}
    )
    with pytest.raises(ConfigError, match=said):
        backend.register_mem_pool_host(pool())


def test_pages_of_deepseek_v4_come_back_although_its_kv_pool_has_no_bytes(make):
    """By the calls that SGLang's controller makes: flat copies of the KV pool, whose pages have no
    bytes, and transfers of the pool beside it.
    """
    anchor, compressed = numbering_pool(), compressed_pool(seed=1)
    backend = make(anchor, [(PoolName.DEEPSEEK_V4_C4, compressed)], is_mla_model=True)
    names, page = keys(*range(5)), anchor.page_size

    def transfer(first, count, **more):
        places = torch.arange(first * page, (first + count) * page)
        name = PoolName.DEEPSEEK_V4_C4
        return PoolTransfer(name=name, host_indices=places, keys=names[:count], **more)

    def usable():
        asked = transfer(0, 5, hit_policy=PoolHitPolicy.ALL_PAGES)
        found = backend.batch_exists_v2(names, [asked])
        return found.kv_hit_pages, found.extra_pool_hit_pages.get(PoolName.DEEPSEEK_V4_C4, 0)

    assert backend.batch_exists(names) == 0
    assert backend.batch_set(names[:4], [anchor.get_data_page(i * page) for i in range(4)])
    assert backend.batch_exists(names) == 4
    assert usable()[0] == 0  # the pages themselves are not stored yet
    backend.batch_set_v2([transfer(0, 3)])
    assert usable() == (3, 3)

    read = backend.batch_get(names, [anchor.get_dummy_flat_data_page() for _ in names])
    assert [one is not None for one in read] == [True] * 4 + [False]
    landed = backend.batch_get_v2([transfer(8, 4)])[PoolName.DEEPSEEK_V4_C4]
    assert landed == [True, True, True, False]
    for i in range(3):
        stored = compressed.get_data_page(i * page, flat=True)
        assert torch.equal(compressed.get_data_page((8 + i) * page, flat=True), stored)


def test_a_page_of_deepseek_v4_is_read_in_all_pools_with_window_and_states_at_its_end(make):
    made = with_compressed()
    entries = made.controller.mem_pool_host.entries
    hosts = {str(one.name): one.host_pool for one in entries}
    backend = make(hosts.pop("kv"), side_pools=[*hosts.items()], is_mla_model=True)
    stored = {name: [2, 1, 0] for name in hosts if name not in anchors.POOLS}
    stored |= {"swa": [2, 1], "deepseek_v4_c4_state": [2]}
    for name, pages in stored.items():
        into = slots_of([5 + page for page in pages], made.page)
        backend.batch_set_v2([PoolTransfer(name=name, host_indices=into, keys=keys(*pages))])

    def read(anchored):
        """Pages 2, 1 and 0 into 12, 11 and 10, their windows into 15 and 14."""
        ended = {}
        job = backend.begin_read(
            [page_key(name) for name in keys(2, 1, 0)],
            slots_of([12, 11, 10], made.page),
            on_page=lambda page, outcome: ended.update({page: outcome.name}),
            anchor=slots_of(anchored, made.page),
        )
        assert job.wait(15)
        return [ended[page] for page in range(3)]

    assert read([15, 14]) == ["OK", "MISS", "OK"], "page 1 has no states"
    assert read([15]) == ["OK"] * 3
    for name, pages in stored.items():
        into = 13 if name in anchors.POOLS else 10
        for page in pages:
            there, came = (
                hosts[name].get_data_page(at * made.page) for at in (5 + page, into + page)
            )
            assert torch.equal(came, there), (name, page)


def test_numbers_of_pages_tell_nothing_of_the_stores_speed(make):
    anchor, compressed = numbering_pool(), compressed_pool(seed=1)
    backend = make(anchor, [(PoolName.DEEPSEEK_V4_C4, compressed)], is_mla_model=True)
    names, places = keys("a"), torch.arange(anchor.page_size)
    backend.batch_set(names, [anchor.get_data_page(0)])
    moved = PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, host_indices=places, keys=names)
    backend.batch_set_v2([moved])
    assert backend.batch_get(names, [anchor.get_dummy_flat_data_page()]) != [None]
    assert not backend.own_reads, "a byte for each page"
    assert backend.batch_get_v2([moved]) == {PoolName.DEEPSEEK_V4_C4: [True]}
    ((_, nbytes, _),) = backend.own_reads
    assert nbytes == compressed.get_data_page(0).nbytes


def test_ranks_of_deepseek_v4_share_their_pages(make):
    """SGLang computes them in full on every rank; the first one writes."""
    name, names = PoolName.DEEPSEEK_V4_C4, keys(*range(2))
    pools = [compressed_pool(seed=1), compressed_pool(seed=2)]
    anchor = numbering_pool()
    first, second = (
        make(anchor, [(name, pool)], is_mla_model=True, tp_size=2, tp_rank=rank)
        for rank, pool in enumerate(pools)
    )
    places = torch.arange(2 * anchor.page_size)
    values = [anchor.get_dummy_flat_data_page() for _ in names]
    for backend in (second, first):  # the second writes nothing, although it is asked first
        assert backend.batch_set(names, values)
        backend.batch_set_v2([PoolTransfer(name=name, host_indices=places, keys=names)])
    second._store.follow()
    read = second.batch_get_v2([PoolTransfer(name=name, host_indices=places, keys=names)])
    assert read[name] == [True, True]
    assert torch.equal(pools[1].get_data_page(0, flat=True), pools[0].get_data_page(0, flat=True))


def test_the_store_is_opened_where_sglang_does_not_say_that_all_pools_are_known(make, monkeypatch):
    """As before SGLang 0.5.23. Side pools that come later are kept apart by their shape."""
    monkeypatch.delattr(HiCacheStorage, "on_host_pools_registered")
    opened = []
    monkeypatch.setattr(
        KVTierStorage, "on_host_pools_registered", lambda backend: opened.append(set(backend.registered_pools))
    )  # fmt: skip
    make(host_pool(), [("mamba", state_pool())])
    assert opened[0] == {"kv"}


def test_pages_of_a_later_side_pool_come_back_although_its_name_and_tag_are_too_long(make):
    """DeepSeek V4's before SGLang 0.5.23: a name of 28 characters, and 9 of the tag."""
    anchor, names = host_pool(), keys("a", "b")
    backend = make(anchor)
    sides = {
        name: host_pool(seed=seed)
        for seed, name in enumerate(
            (PoolName.DEEPSEEK_V4_C4_INDEXER_STATE, PoolName.DEEPSEEK_V4_C4_INDEXER_SCALE), 1
        )
    }
    for name, side in sides.items():
        backend.register_mem_host_pool_v2(side, name)
    stored = [side_transfer(name, [2, 3], names) for name in sides]
    backend.note_tenant(names[0], "acme")
    with backend.writing_for_tenant_of(names[0]):
        assert backend.batch_set_v2(stored) == {name: [True, True] for name in sides}
    back = [side_transfer(name, [8, 9], names) for name in sides]
    assert backend.batch_get_v2(back) == {name: [True, True] for name in sides}
    for side in sides.values():
        assert page_bytes(side, 8) == page_bytes(side, 2)
    assert backend._store.delete_tenant(digest_of("acme")) == 4


@pytest.mark.parametrize("had", [True, False])
def test_every_rank_writes_what_it_has_a_share_of(had):
    """Before SGLang 0.5.23 a controller noted that ranks of MLA models do not."""
    controller = SimpleNamespace(
        storage_backend=SimpleNamespace(begin_read=None), storage_host_pool=host_pool("layer_first")
    )
    if had:
        controller.backup_skip = True
    backend_hooks.use_zero_copy(None, controller)
    assert getattr(controller, "backup_skip", False) is False
    assert hasattr(controller, "backup_skip") is had


def test_nothing_is_read_ahead_or_by_address_by_an_sglang_that_was_not_tried(make, monkeypatch):
    backend = make(host_pool())
    monkeypatch.setattr(backend_hooks.features, "moved", lambda name: (name,))
    controller = SimpleNamespace(
        storage_backend=backend, storage_host_pool=host_pool(), page_get_func="generic"
    )
    backend_hooks.use_zero_copy(None, controller)
    assert controller.page_get_func == "generic"
    monkeypatch.setattr(KVTierStorage, "reading_ahead", None)
    read = backend_hooks.read_ahead(lambda controller, operation: "read", controller, None)
    assert read == "read"


def test_without_the_plugin_the_named_backend_refuses_to_start():
    with pytest.raises(SeamError, match="SGLANG_PLUGINS"):
        KVTierStorage(storage_config(extra_config={"store": {"path": "unused"}}), {})


def test_keys_that_are_no_hash_are_kept_apart(make):
    backend = make(host_pool())
    assert backend.batch_set_v1(["short", "f" * 63 + "x"], slots([0, 1])) == [True, True]
    assert backend.batch_exists(["short", "f" * 63 + "x", "other"]) == 2


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_side_pools_have_pages_of_their_own_under_the_same_keys(make, layout):
    pool, side = host_pool(), host_pool(layout, seed=1)
    backend = make(pool, side_pools=[(PoolName.SWA, side)])
    names = keys("a", "b")
    backend.batch_set_v1(names, slots([0, 1]))
    stored = side_transfer(PoolName.SWA, [2, 3], names)
    assert backend.batch_set_v2([stored]) == {PoolName.SWA: [True, True]}
    back = side_transfer(PoolName.SWA, [8, 9], names)
    assert backend.batch_get_v2([back]) == {PoolName.SWA: [True, True]}
    assert pages_of(side, 8, 9) == pages_of(side, 2, 3)


def test_a_side_transfer_that_does_not_fit_its_slots_moves_nothing(make):
    pool, side = host_pool(), host_pool(seed=1)
    backend = make(pool, side_pools=[(PoolName.SWA, side)])
    stored = side_transfer(PoolName.SWA, [2], keys("a", "b"))
    assert backend.batch_set_v2([stored]) == {PoolName.SWA: [False, False]}
    assert backend._store.stats().pages == 0


present = st.lists(st.booleans(), min_size=6, max_size=6)


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(kv=present, swa=present, mamba=present, window=st.integers(1, 4))
def test_the_usable_prefix_is_what_hicachefile_says(
    make, tmp_path_factory, monkeypatch, kv, swa, mamba, window
):
    pool, sides = (
        host_pool(),
        {PoolName.SWA: host_pool(seed=1), PoolName.INDEXER: host_pool(seed=2)},
    )
    folder = tmp_path_factory.mktemp("file")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
    ours, theirs = make(pool, side_pools=list(sides.items())), HiCacheFile(storage_config())
    theirs.register_mem_pool_host(pool)
    for name, side in sides.items():
        theirs.register_mem_host_pool_v2(side, name)
    names = keys(*range(6))
    for backend in (ours, theirs):
        for i, name in enumerate(names):
            if kv[i]:
                backend.set(name, pool.get_data_page(i * PAGE))
        for which, have in ((PoolName.SWA, swa), (PoolName.INDEXER, mamba)):
            mine = [i for i in range(6) if have[i]]
            backend.batch_set_v2([side_transfer(which, mine, [names[i] for i in mine])])
    asked = [
        PoolTransfer(
            name=PoolName.SWA, keys=names[:window], hit_policy=PoolHitPolicy.TRAILING_PAGES
        ),
        PoolTransfer(name=PoolName.INDEXER, keys=names, hit_policy=PoolHitPolicy.ALL_PAGES),
    ]
    mine, other = ours.batch_exists_v2(names, asked), theirs.batch_exists_v2(names, asked)
    ours.clear()
    ours.close()
    assert mine.kv_hit_pages == other.kv_hit_pages
    assert mine.restorable_prefix_pages == other.restorable_prefix_pages
    assert mine.extra_pool_hit_pages == other.extra_pool_hit_pages
