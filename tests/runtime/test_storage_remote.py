"""Storage backends of several servers with one remote store between them, in this process. The
engine is the double that keeps its pages in a folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import (
    PAGE,
    backend_on,
    host_pool,
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
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.front.wrappers import Throttled, ThrottledRemote
from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.runtime.backend import host_pages, identity
from sgl_kvtier.runtime.backend.storage import KVTierStorage
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.namespace import is_open
from sgl_kvtier.store.tiered.store import TieredStore
from sgl_kvtier.types import PageKey, Tier


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """What the engine of all servers keeps."""
    folder = tmp_path / "engine"
    folder.mkdir()
    return folder


@pytest.fixture
def start(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., KVTierStorage]]:
    """Starts servers with folders of their own; they are closed at the end."""
    opened: list[KVTierStorage] = []
    args = server_args(load_format="dummy")
    serve_with(monkeypatch, args)
    monkeypatch.setattr(identity, "_runtime_weights", None)

    def started(
        pool: Any = None,
        remote: Any = None,
        lab: Any = None,
        sides: Any = None,
        load_format: str = "dummy",
        **ranks: Any,
    ) -> Any:
        args.load_format = load_format
        number = len(opened)
        sections = {
            "remote": remote or {"engine": "memory", "master": str(shared)},
            "lab": lab or {},
        }
        folder = tmp_path / f"store{number}"
        own = host_pool(seed=number) if pool is None else pool
        opened.append(backend_on(folder, own, (sides or {}).items(), sections, **ranks))
        store = opened[-1]._store
        assert not isinstance(store, TieredStore) or store._remote.wait_usable(60)
        return opened[-1]

    yield started
    for backend in opened:
        backend.close()


def tiered(backend: KVTierStorage) -> TieredStore:
    store = backend._store
    assert isinstance(store, TieredStore)
    return store


def put(backend: KVTierStorage, names: list[str], pages: Sequence[int]) -> None:
    """Stores these pages, also in the engine."""
    assert backend.batch_set_v1(names, slots(pages)) == [True] * len(names)
    assert tiered(backend).settle(30)


def found(backend: KVTierStorage, names: list[str]) -> int:
    """What `batch_exists` says once the engine's answer came in time, as it may not on a busy
    machine.
    """
    remote = tiered(backend)._remote
    for _ in range(100):
        late = remote.condition().exists_late
        count = backend.batch_exists(names)
        if remote.condition().exists_late == late:
            return count
        time.sleep(0.1)
    raise AssertionError("no answer came in time")


def test_a_page_of_one_server_is_found_and_read_by_another_and_kept_there(start):
    a, b = start(), start()
    names = keys(1, 2, 3)
    put(a, names, [3, 9, 4])
    assert found(b, [*names, *keys("other")]) == 3
    assert b.batch_get_v1(names, slots([11, 12, 30])) == [True] * 3
    assert pages_of(b.mem_pool_host, 11, 12, 30) == pages_of(a.mem_pool_host, 3, 9, 4)
    assert tiered(b).settle(30)
    assert tiered(b).local.stats().pages == 3
    assert tiered(b).tiered_stats().kept == 3


def test_the_largest_page_of_all_pools_can_be_sent(start, monkeypatch):
    states = state_pool()
    large = {states: 40 << 20}
    monkeypatch.setattr(
        "sgl_kvtier.runtime.backend.remote.page_bytes", lambda pool: large.get(pool, 1 << 20)
    )
    assert tiered(start(sides={PoolName.MAMBA: states})).remote.most_page_bytes >= 40 << 20


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_a_pools_pages_have_as_many_bytes_as_are_sent(start, layout):
    pool, states = host_pool(layout), state_pool()
    a = start(pool, sides={PoolName.MAMBA: states})
    a.batch_set(keys(1), [pool.get_data_page(0)])
    state = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0]), keys=keys(1))
    a.batch_set_v2([state])
    assert tiered(a).settle(30)
    sent = tiered(a).remote.stats().bytes_written
    assert sent == sum(map(host_pages.page_bytes, (pool, states)))
    assert host_pages.page_bytes(numbering_pool()) == 0


def test_it_says_where_each_page_is(start):
    a, b = start(), start()
    names = keys(*range(4))
    b.batch_set_v1(names[:2], slots([0, 1]))
    put(a, names[:3], [0, 1, 2])
    assert b.shares
    assert b.stored(names) == [Tier.STORAGE, Tier.STORAGE, Tier.REMOTE, None]


def test_pages_found_are_noted_by_where_they_are(start):
    a, b = start(), start()
    names = keys(*range(3))
    put(a, names, [0, 1, 2])
    b.watch_pages()
    b.batch_set_v1(names[:1], slots([0]))
    assert found(b, names) == 3
    ids = [PageKey(bytes.fromhex(name)) for name in names]
    assert set(b.take_seen()) == {ids[0]}
    assert b.take_seen(Tier.REMOTE) == tuple(ids[1:])


def test_reads_tell_the_speed_of_the_place_all_their_pages_are_in(start):
    a, b = start(), start()
    names = keys(*range(6))
    b.batch_set_v1(names[:3], slots(range(3)))
    put(a, names, range(6))
    assert found(b, names) == 6
    assert b.batch_get_v1(names[:2], slots([8, 9])) == [True] * 2
    assert b.batch_get_v1(names[2:4], slots([8, 9])) == [True] * 2, "one of each place"
    into = slots([10, 11])
    with b.reading_ahead(names[4:], into):
        assert b.batch_get_v1(names[4:], into) == [True] * 2
    assert [tier for tier, _, _ in b.own_reads] == [Tier.STORAGE, Tier.REMOTE]


def test_the_network_can_be_slowed_down_on_its_own(start):
    a = start()
    b = start(lab={"remote_throttle": {"read_gbps": 1.0}})
    assert isinstance(tiered(b).remote, ThrottledRemote)
    assert not isinstance(tiered(b).local, Throttled)
    names = keys(1, 2)
    put(a, names, [3, 9])
    assert found(b, names) == 2
    assert b.batch_get_v1(names, slots([5, 6])) == [True] * 2
    assert page_bytes(b.mem_pool_host, 6) == page_bytes(a.mem_pool_host, 9)
    assert tiered(b).remote.condition().usable


def test_a_restoration_reads_pages_of_both_places_in_one_job(start):
    a, b = start(), start()
    names = keys(*range(6))
    b.batch_set_v1(names[1::2], slots([1, 3, 5]))
    put(a, names, [10, 11, 12, 13, 14, 15])
    asked = [PageKey(bytes.fromhex(name)) for name in reversed(names)]
    ended: list[tuple[int, ReadOutcome]] = []
    job = b.begin_read(
        asked, slots(range(20, 26)), 30.0, lambda i, outcome: ended.append((i, outcome))
    )
    assert job.wait(30) and job.outcomes == [ReadOutcome.OK] * 6
    assert sorted(i for i, _ in ended) == list(range(6))
    assert tiered(b).tiered_stats().remote.pages_read == 3


def test_sglangs_read_of_a_prefix_ahead_takes_pages_of_both_places(start):
    a, b = start(), start()
    names = keys(*range(8))
    b.batch_set_v1(names[:3], slots([0, 1, 2]))
    put(a, names, range(8))
    assert found(b, names) == 8
    into = slots(range(16, 24))
    with b.reading_ahead(names, into):
        assert b.batch_get_v1(names[:4], into[: 4 * PAGE]) == [True] * 4
        assert b.batch_get_v1(names[4:], into[4 * PAGE :]) == [True] * 4
    assert page_bytes(b.mem_pool_host, 23) == page_bytes(a.mem_pool_host, 7)


def test_a_look_up_ends_while_the_engine_hangs(start, shared):
    a, b = start(), start()
    put(a, keys(1), [1])
    set_faults(shared, {"hang": ["exists", "get", "put"]})
    assert b.batch_exists(keys(1)) == 0
    assert b.batch_set_v1(keys(2), slots([2])) == [True]
    assert b.batch_exists(keys(2)) == 1


def test_a_wrong_page_of_the_engine_is_a_miss_and_is_not_kept(start, shared):
    a, b = start(), start()
    put(a, keys(1), [1])
    assert found(b, keys(1)) == 1
    set_faults(shared, {"get": {"flip": 1.0}})
    assert b.batch_get_v1(keys(1), slots([4])) == [False]
    set_faults(shared, {})
    assert tiered(b).settle(30)
    assert tiered(b).local.stats().pages == 0
    assert tiered(b).tiered_stats().remote.pages_corrupt == 1


def test_a_clear_drops_pages_for_all_servers(start):
    a, b = start(), start()
    put(a, keys(1, 2), [1, 2])
    a.clear()
    assert b.batch_exists(keys(1, 2)) == 0


def test_pages_of_weights_that_another_host_may_not_have_are_refused_at_start(start, tmp_path):
    with pytest.raises(ConfigError, match=r"remote\.engine = memory: .*only their path is known"):
        start(load_format="auto")
    (rank,) = (tmp_path / "store0").glob("*/tp0*")
    assert not is_open(Env(), str(rank)), "the local store was closed again"


def test_a_server_starts_and_serves_where_nothing_answers(start, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(
        "sgl_kvtier.remote.store.RemoteStore.wait_usable", lambda store, seconds: True
    )
    begun = time.monotonic()
    backend = start(remote={"engine": "mooncake", "master": "127.0.0.1:9"})
    assert time.monotonic() - begun < 5, "setting Mooncake up without a master takes 90 s"
    assert backend.batch_set_v1(keys(1), slots([1])) == [True]
    assert backend.batch_exists(keys(1, 2)) == 1
    assert backend.batch_get_v1(keys(1, 2), slots([3, 4])) == [True, False]


def test_a_rank_finds_its_own_share_beside_replicated_latents_on_another_server(start):
    names = keys("a")
    servers = []
    for server in (0, 1):
        for rank in (0, 1):
            draft = host_pool(seed=10 * server + rank)
            backend = start(
                latent_host_pool(latent_pool(2)),
                sides={"draft": draft},
                is_mla_model=True,
                tp_size=2,
                tp_rank=rank,
            )
            servers.append((backend, draft))
    here = PoolTransfer(name=PoolName.DRAFT, host_indices=slots([1]), keys=names)
    for backend, _ in servers[:2]:
        assert backend.batch_set_v2([here]) == {PoolName.DRAFT: [True]}
        assert tiered(backend).settle(30)
    for (first, of_first), (second, of_second) in zip(servers[:2], servers[2:], strict=True):
        assert first.batch_get_v2([here]) == second.batch_get_v2([here]) == {PoolName.DRAFT: [True]}
        assert page_bytes(of_second, 1) == page_bytes(of_first, 1)
    assert page_bytes(servers[2][1], 1) != page_bytes(servers[3][1], 1)


def test_a_store_without_the_section_is_the_disk_alone(start):
    backend = start(remote={"engine": "off"})
    assert not isinstance(backend._store, TieredStore)
