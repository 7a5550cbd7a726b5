"""SGLang's HiCache storage backend on top of the page store (`--hicache-storage-backend kvtier`).

There is one object per scheduler process, that is, per rank. SGLang calls it from three threads of
its own (existence queries, reads, write-back) and from the scheduler's thread (`get_stats`, attach,
detach, flush). Nothing here raises while serving: a page that cannot be read is a miss, one that
cannot be written is not stored, and the store counts both. Interface:
sglang.srt.mem_cache.hicache_storage.HiCacheStorage.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.srt.observability.metrics_collector import StorageMetrics

from sgl_kvtier.config import FaultConfig, KVTierConfig, ThrottleConfig
from sgl_kvtier.errors import ConfigError, StoreError
from sgl_kvtier.runtime import settings
from sgl_kvtier.runtime.backend import identity, remote, side_pools
from sgl_kvtier.runtime.backend.host_pages import (
    bytes_of,
    has_bytes,
    is_page_contiguous,
    is_replicated,
    nbytes_of,
    parts_of,
    says_where_pages_lie,
    shape_of,
    share_of,
)
from sgl_kvtier.runtime.backend.prefix_read import PrefixRead, read_or_given_up
from sgl_kvtier.runtime.backend.side_pools import leading
from sgl_kvtier.runtime.metrics import (
    PUBLISHER,
    Source,
    feature_samples,
    remote_samples,
    store_samples,
    tenant_samples,
)
from sgl_kvtier.runtime.sglang import anchors, features, hooks, page_hash, seams
from sgl_kvtier.runtime.step.page_names import page_key
from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadJob,
    ReadOutcome,
    Urgency,
)
from sgl_kvtier.store.disk.format import POOL_BYTES
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.store.io.jobs import OrderedJob
from sgl_kvtier.store.tiered.store import TieredStore
from sgl_kvtier.tenants import NOBODY, digest_of, pool_of
from sgl_kvtier.types import Lookup, PageKey, Tier

logger = logging.getLogger(__name__)

_MOST_WAITING = 100_000
"""Most queued writes whose tenant is remembered."""
_WRITING_S = 5.0
"""Longest time, in seconds, that writes go on while SGLang stops its storage threads. SGLang waits
10 s for a thread, which writes all batches of a node, and ends the server after that.
"""


class KVTierStorage(HiCacheStorage):
    """Keeps HiCache's pages in the verified page store of this rank."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Checks SGLang and the settings; the store is opened when all pools are known. Raises
        SeamError, ConfigError.
        """
        del kwargs
        features.require("storage")
        extra = storage_config.extra_config or {}
        self.config = settings.from_extra_config(extra)
        policy = self.config.policy
        features.require(*settings.named_features(policy))
        if self.config.store.tenants:
            features.require("tenants")
        if "module_path" not in extra:
            needed = ["storage", "zero-copy", "weights"]
            if policy.restore != "off" or settings.looks_ahead(policy):
                needed.append("restore")
            there = [name for name in needed if not features.moved(name)]
            seams.require_hooks(hooks.targets(*there))
        page_hash.load()  # if the backend is attached at run time, it is not compiled yet
        self.storage_config = storage_config
        self.registered_pools: dict[str, Any] = {}
        self._seen: dict[Tier, deque[PageKey]] = {}
        self.folder: Path | None = None
        """The folder of this server's model fingerprint, once the store was opened."""
        self._store: PageStore | None = None
        self._pool_tags: dict[str, str] = {}
        self._read_batches: deque[tuple[int, float]] = deque(maxlen=4096)
        self._write_batches: deque[tuple[int, float]] = deque(maxlen=4096)
        self.own_reads: deque[tuple[Tier, int, float]] = deque(maxlen=64)
        """Tier, bytes and seconds of SGLang's own prefetches, from which the planner learns the
        bandwidth of disk and network when restorations load nothing. Reads from several tiers are
        omitted.
        """
        self._metrics: list[Source] = []
        self._reading: dict[int, ReadJob | PrefixRead] = {}
        self._prefix = threading.local()
        self._tenants: dict[str, tuple[str, int]] = {}
        """For queued writes, by the name of the first page of each: the tenant's digest, and the
        number of such writes. Pools that are stored later have one more.
        """
        self._tenants_lock = threading.Lock()
        self._writing = threading.local()
        self._cut_short = False
        self._writing_ends = math.inf
        """After this time, in seconds of the monotonic clock, batches of pages are not stored."""
        self._latents = bool(storage_config.is_mla_model)
        self._replicated: set[str] = set()
        """Pools whose pages are equal on all TP ranks: the first rank on each host writes them, and
        all ranks read them.
        """
        self._on_a_host = int(storage_config.tp_size)
        """TP ranks, or ranks of a data-parallel attention group, that share one host's disk."""
        # With MLA, SGLang would not call the ranks that do not write replicated pages. But every
        # rank has to write the pools of which it has a share of its own, and to know which pages
        # are stored.
        storage_config.is_mla_model = False

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the pool of ordinary KV pages. Raises ConfigError for a pool that is not known
        to hold pages or to number those of its side pools.
        """
        if has_bytes(mem_pool_host) and getattr(mem_pool_host, "kv_buffer", None) is None:
            raise ConfigError(
                f"this model's KV pool ({type(mem_pool_host).__name__}) holds no pages of its own, "
                "which the kvtier backend does not support. Choose another "
                "--hicache-storage-backend"
            )
        if not says_where_pages_lie(mem_pool_host):
            raise ConfigError(
                f"SGLang keeps a part of this KV pool's pages ({type(mem_pool_host).__name__}) "
                "apart and does not say where, as it does for MXFP8. Choose another "
                "--kv-cache-dtype, such as fp8_e4m3 or bfloat16, or omit "
                "--hicache-storage-backend"
            )
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)
        if not hasattr(HiCacheStorage, "on_host_pools_registered"):
            self.on_host_pools_registered()  # SGLang before 0.5.23 does not call it

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Registers a side pool; after the store was opened, it gets a tag for its shape."""
        name = str(host_pool_name)
        if name == KV:
            return
        self._register(name, host_pool)
        if self._store is not None:
            shape = repr(sorted(shape_of(host_pool).fields().items()))
            self._pool_tags[name] = f"{name}-{hashlib.sha256(shape.encode()).hexdigest()[:8]}"

    def _register(self, name: str, host_pool: Any) -> None:
        self.registered_pools[name] = host_pool
        if self._latents and is_replicated(host_pool):
            self._replicated.add(name)
        else:
            self._replicated.discard(name)

    def _is_replicated(self, pool: str) -> bool:
        """Whether all TP ranks have the same pages of this pool. They share a folder where the KV
        pages are replicated.
        """
        return {KV, pool} <= self._replicated

    def _writes(self, pool: str) -> bool:
        first = self.storage_config.tp_rank % self._on_a_host == 0
        return first or not self._is_replicated(pool)

    def on_host_pools_registered(self) -> None:
        """Opens the store under the fingerprint that includes all pools. Raises StoreError."""
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.runtime_context import get_parallel, get_server_args

        c, parallel = self.storage_config, get_parallel()
        share = share_of(c)
        pools = {name: shape_of(pool) for name, pool in self.registered_pools.items()}
        identity.agree_on_weights()
        who = identity.identity_of(
            resolving_view(get_server_args()), share, pools, kept=self.config.store.path
        )
        replicated = self._is_replicated(KV)
        rank = share.folder(replicated=replicated)
        config = self.config.store
        self._on_a_host = _ranks_on_a_host(c, get_server_args())
        if replicated and self._on_a_host > 1 and config.direct_io == "auto":
            # The TP ranks of a host read the same pages at the same time: through the page cache
            # each page is read from the disk once.
            config = replace(config, direct_io="off")
        try:
            store = open_store(
                config,
                who,
                rank,
                share.holders(replicated=replicated),
                alike=share.alike(replicated=replicated),
                writes=any(self._writes(name) for name in self.registered_pools),
            )
            self._store = remote.beside(
                _in_front(store, self.config, c.tp_rank),
                self.config.remote,
                self.config.lab,
                who,
                rank,
                resolving_view(get_server_args()),
                self.registered_pools.values(),
            )
        except StoreError as error:
            again = (
                "If this was an attach at run time, DELETE /hicache/storage-backend before you "
                "PUT again"
            )
            raise type(error)(f"{error}. {again}") from error
        self.folder = Path(self.config.store.path) / who.directory_name
        with self._tenants_lock:
            self._tenants.clear()
        if c.enable_storage_metrics:
            labels = {
                "tp_rank": str(c.tp_rank),
                "pp_rank": str(c.pp_rank),
                "dp_rank": str(parallel.dp_rank or 0),
            }
            self._metrics.append(PUBLISHER.add("", partial(store_samples, self._store), labels))
            self._metrics.append(PUBLISHER.add("", feature_samples, labels))
            if config.tenants:
                samples = partial(tenant_samples, store.tenants)
                self._metrics.append(PUBLISHER.add("tenant_", samples, labels))
            if isinstance(self._store, TieredStore):
                samples = partial(remote_samples, self._store)
                self._metrics.append(PUBLISHER.add("remote_", samples, labels))
        stats = self._store.stats()
        logger.info(
            "kvtier: %d pages in %s, zero copy %s, at most %d bytes", stats.pages, store.folder,
            all(is_page_contiguous(p) for p in self.registered_pools.values() if has_bytes(p)),
            stats.capacity_bytes,
        )  # fmt: skip

    def leave_identity(self) -> None:
        """Stops serving and storing: the weights changed. Attaching again starts a new
        fingerprint.
        """
        if self._store is not None:
            self.close()
            logger.warning(
                "kvtier: weights were changed at run time, so stored pages are not used any more. "
                "To store pages of the new weights, detach and attach the storage backend (DELETE "
                "and PUT /hicache/storage-backend)"
            )

    # ---- existence ----

    def exists(self, key: str) -> bool:
        """Whether one page is stored. No disk access."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, are stored without a gap. No disk access."""
        del extra_info
        return leading(self._has(keys, KV))

    @property
    def local_store(self) -> PageStore | None:
        """The store on this host's disk; None before it is opened, and after `close`."""
        store = self._store
        return store.local if isinstance(store, TieredStore) else store

    @property
    def shares(self) -> bool:
        """Whether pages may also come from a store that several servers share."""
        return isinstance(self._store, TieredStore)

    def stored(self, keys: Sequence[str]) -> list[Tier | None]:
        """The tier of each page that is stored in all pools (the slowest of its parts), else None.
        No disk access. Only for servers whose side pools share the slots of KV pages.
        """
        names = [page_key(key) for key in keys]
        there, tiers = [True] * len(keys), [Tier.STORAGE] * len(keys)
        for pool in self.registered_pools:
            there = [a and b for a, b in zip(there, self._has(keys, pool), strict=True)]
            tiers = [max(pair) for pair in zip(tiers, self._tiers(names, pool), strict=True)]
        return [tier if page else None for tier, page in zip(tiers, there, strict=True)]

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The usable prefix if side pools must be stored too, by each pool's rule."""
        del extra_info
        return side_pools.usable_prefix(keys, pool_transfers or (), self._has)

    # ---- zero copy: pages by host slot ----

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Reads pages directly into host slots. Returns when no I/O touches the slots any more."""
        del extra_info
        prefix: PrefixRead | None = getattr(self._prefix, "read", None)
        if prefix is not None and prefix.comes_next(keys, host_indices):
            return prefix.read(len(keys))
        return self._read(keys, parts_of(self.mem_pool_host, len(keys), host_indices), KV)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Writes pages directly from host slots. True also if the page was stored already, or if
        `store.admission` does not admit it.
        """
        del extra_info
        return self._write(keys, parts_of(self.mem_pool_host, len(keys), host_indices), KV)

    @contextmanager
    def reading_ahead(self, keys: list[str], host_indices: torch.Tensor) -> Iterator[None]:
        """While this context is active, pages that this thread requests by `batch_get_v1`, in this
        order and in parts, are already in flight. When it ends, no I/O touches the slots any more,
        whether or not the pages were requested.
        """
        page = self.mem_pool_host.page_size
        host_indices = host_indices[: len(keys) * page]
        if (
            self._store is None
            or not keys
            or len(host_indices) < len(keys) * page
            or not is_page_contiguous(self.mem_pool_host)
        ):
            yield
            return
        (first,) = parts_of(self.mem_pool_host, 1, host_indices[:page])
        prefix = PrefixRead(keys, host_indices, sum(part.nbytes for part in first), self._begin)
        self._reading[id(prefix)] = prefix
        if self._cut_short:
            prefix.cancel()
        tier = self._one_tier(keys, KV)
        self._prefix.read = prefix
        try:
            yield
        finally:
            self._prefix.read = None
            prefix.close()
            del self._reading[id(prefix)]
            nbytes = prefix.pages_read * prefix.page_bytes
            self._note(self._read_batches, prefix.pages_read, nbytes, prefix.seconds)
            if prefix.pages_read and prefix.tells and tier is not None:
                self.own_reads.append((tier, nbytes, prefix.seconds))

    def stop_reading(self, keys: list[str]) -> None:
        """Cancels reads not started yet of the `reading_ahead` of exactly this list. Any thread."""
        for read in list(self._reading.values()):
            if isinstance(read, PrefixRead) and read.keys is keys:
                read.cancel()

    def note_tenant(self, first: str, salt: str) -> None:
        """Notes that the pages whose first one has this name will be written, and belong to the
        tenant of this salt. Scheduler's thread.
        """
        with self._tenants_lock:
            while len(self._tenants) >= _MOST_WAITING:
                # Entries of writes that were dropped when the backend was detached or SGLang
                # flushed.
                del self._tenants[next(iter(self._tenants))]
            _, writes = self._tenants.pop(first, (NOBODY, 0))
            self._tenants[first] = (digest_of(salt), writes + 1)

    @contextmanager
    def writing_for_tenant_of(self, first: str) -> Iterator[None]:
        """While this context is active, this thread's writes belong to the tenant noted for
        `first`.
        """
        with self._tenants_lock:
            digest, writes = self._tenants.pop(first, (NOBODY, 1))
            if writes > 1:
                self._tenants[first] = (digest, writes - 1)
        self._writing.tenant = digest
        try:
            yield
        finally:
            self._writing.tenant = NOBODY

    # ---- copies: pages as flat tensors ----

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Reads one page into a flat tensor, or returns None."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Reads pages into flat tensors; None where a page is missing or damaged."""
        del target_sizes
        read = self._read(keys, [[bytes_of(t)] for t in target_locations], KV)
        return [t if ok else None for t, ok in zip(target_locations, read, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores one page given as a tensor."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores pages given as tensors; True if none was refused."""
        del target_locations, target_sizes
        return all(self._write(keys, [[bytes_of(v.contiguous())] for v in values], KV))

    # ---- side pools ----

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Reads the pages of side pools into their host slots."""
        del extra_info
        return side_pools.read_pages(transfers, self.registered_pools, self._read)

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Writes the pages of side pools from their host slots."""
        del extra_info
        return side_pools.write_pages(transfers, self.registered_pools, self._write)

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        """See `PageStore.retain`; 0 while the store is not open."""
        return 0 if self._store is None else self._store.retain(owner, keys, seconds)

    # ---- ordered reads, for the restore engine ----

    def begin_read(
        self,
        keys: Sequence[PageKey],
        host_slots: torch.Tensor,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
        urgency: Urgency = Urgency.NOW,
        anchor: torch.Tensor | None = None,
    ) -> ReadJob | None:
        """Starts reading pages, in this order, into host slots, each page in all pools that share
        these slots. Returns None while no store is open, or if a page's layout in a host pool
        differs from the store's. The slots belong to the store until the page's `on_page`, which an
        I/O thread calls when the last part of the page has ended, with the first outcome that is
        not OK. The anchor (a window or a state) comes with the first pages, into the slots
        `anchor`. Only for servers without other side pools. The job counts parts of pages.
        """
        own = anchors.pools_in(self.registered_pools)
        pools = tuple(
            name
            for name, host in self.registered_pools.items()
            if name not in own and has_bytes(host)
        )
        store, pages = self._store, self._page_reads(pools, keys, host_slots)
        beside: list[list[PageRead]] | None = [] if anchor is None else None
        if anchor is not None and own:
            first = len(anchor) // self.registered_pools[own[0]].page_size
            beside = self._page_reads(own, keys[:first], anchor)
        if store is None or pages is None or beside is None:
            return None
        for parts, more in zip(pages, beside, strict=False):
            parts += more
        if on_page is not None and any(len(parts) > 1 for parts in pages):
            on_page = _WholePages([len(parts) for parts in pages], on_page)
        reads = [read for parts in pages for read in parts]
        return store.read(reads, priority=urgency, deadline_s=deadline_s, on_page=on_page)

    def _page_reads(
        self, pools: Sequence[str], keys: Sequence[PageKey], host_slots: torch.Tensor
    ) -> list[list[PageRead]] | None:
        """The parts of each page in these pools; None if one cannot be read in place."""
        hosts = [self.registered_pools[pool] for pool in pools]
        if not all(map(is_page_contiguous, hosts)):
            return None
        by_pool = [
            self._reads(keys, parts_of(host, len(keys), host_slots), pool)
            for pool, host in zip(pools, hosts, strict=True)
        ]
        return [list(page) for page in zip(*by_pool, strict=True)]

    def begin_read_into(
        self, keys: Sequence[PageKey], parts: Sequence[Sequence[memoryview]]
    ) -> ReadJob | None:
        """Starts reading KV pages into the caller's memory, which belongs to the store until the
        job is done; None while no store is open.
        """
        return self.begin_reads(self._reads(keys, parts, KV))

    def begin_reads(
        self, pages: Sequence[PageRead], on_page: Callable[[int, ReadOutcome], None] | None = None
    ) -> ReadJob | None:
        """The same for pages of any pools, with `begin_read`'s `on_page`."""
        store = self._store
        return None if store is None else store.read(pages, on_page=on_page)

    def _reads(
        self, keys: Sequence[PageKey], parts: Sequence[Sequence[memoryview]], pool: str
    ) -> list[PageRead]:
        tag = self._tag(pool)
        return [PageRead(key, part, tag) for key, part in zip(keys, parts, strict=True)]

    # ---- stored pages, for lookahead ----

    def watch_pages(self) -> None:
        """Starts noting KV pages that are written or found, for `take_seen`."""
        self._seen = {Tier.STORAGE: deque(), Tier.REMOTE: deque()}

    def unwatch_pages(self) -> None:
        """Stops noting pages."""
        self._seen = {}

    def take_seen(self, tier: Tier = Tier.STORAGE) -> tuple[PageKey, ...]:
        """KV pages written to or found in a tier since the last call, possibly with duplicates.
        Never blocks.
        """
        seen = self._seen.get(tier)
        return tuple(seen.popleft() for _ in range(len(seen))) if seen else ()

    # ---- maintenance ----

    def get_stats(self) -> StorageMetrics | None:
        """Pages and bandwidth of each batch since the last call. Called every tick on the
        scheduler's thread, so it takes no lock that I/O holds.
        """
        if not self._metrics:
            return None
        stats = StorageMetrics()
        _drain(self._read_batches, stats.prefetch_pgs, stats.prefetch_bandwidth)
        _drain(self._write_batches, stats.backup_pgs, stats.backup_bandwidth)
        return stats

    def clear(self) -> None:
        """Drops every page of this model fingerprint and rank."""
        if self._store is not None:
            logger.info("kvtier: dropped %d pages", self._store.clear())

    def throttle(self, read_gbps: float) -> None:
        """Sets the throttle in gigabits per second; 0: the disk's own. ValueError without one."""
        change = getattr(self.local_store, "set_read_gbps", None)
        if change is None:
            raise ValueError("the store was not started with lab.throttle: it has no bandwidth")
        change(read_gbps)

    @contextmanager
    def reads_cut_short(self) -> Iterator[None]:
        """While this context is active, `batch_get_v1` and similar calls return as soon as no read
        of their pages is in flight, with False for pages not started. After `_WRITING_S`, batches
        of pages to be written are refused as well.
        """
        self._cut_short = True
        self._writing_ends = time.monotonic() + _WRITING_S
        try:
            for job in list(self._reading.values()):
                job.cancel()
            yield
        finally:
            self._cut_short = False
            self._writing_ends = math.inf

    def close(self) -> None:
        """Ends I/O and releases the folder. Idempotent."""
        store, self._store = self._store, None
        metrics, self._metrics = self._metrics, []
        for source in metrics:
            source.close()
        if store is not None:
            store.close()

    # ---- access to the store ----

    def _has(self, keys: Sequence[str], pool: str) -> list[bool]:
        store = self._store
        if store is None:
            return [False] * len(keys)
        names = [page_key(k) for k in keys]
        # This is SGLang's prefetch thread, which may wait a moment for a shared store.
        find = store.find if isinstance(store, TieredStore) else store.lookup
        there = [answer is Lookup.HIT for answer in find(names, self._tag(pool))]
        found = names[: leading(there)]
        seen = self._seen
        if seen and pool == KV:
            for tier, name in zip(self._tiers(found, pool), found, strict=True):
                seen[tier].append(name)
        return there

    def _tiers(self, names: Sequence[PageKey], pool: str) -> list[Tier]:
        """The tier that each of these pages is read from, if it is stored at all."""
        store = self._store
        if not isinstance(store, TieredStore):
            return [Tier.STORAGE] * len(names)
        own = store.own(names, self._tag(pool))
        return [Tier.STORAGE if here else Tier.REMOTE for here in own]

    def _one_tier(self, keys: Sequence[str], pool: str) -> Tier | None:
        """The tier from which all of these pages are read; None if there are several."""
        if not self.shares:
            return Tier.STORAGE
        tiers = set(self._tiers([page_key(key) for key in keys], pool))
        return tiers.pop() if len(tiers) == 1 else None

    def _read(
        self, keys: Sequence[str], parts: Sequence[Sequence[memoryview]], pool: str
    ) -> list[bool]:
        store = self._store
        if store is None:
            return [False] * len(keys)
        started = time.perf_counter()
        tag = self._tag(pool)
        tier = self._one_tier(keys, pool)
        pages = [PageRead(page_key(k), p, tag) for k, p in zip(keys, parts, strict=True)]
        job = store.read(pages, priority=Urgency.SOON)
        self._reading[id(job)] = job
        if self._cut_short:
            job.cancel()
        # without a timeout: until the last read ends, SGLang must not reuse the slots it goes to
        job.wait()
        del self._reading[id(job)]
        outcomes = job.outcomes
        read = [outcome is ReadOutcome.OK for outcome in outcomes]
        seconds = time.perf_counter() - started
        self._note(self._read_batches, sum(read), nbytes_of(parts, read), seconds)
        tells = has_bytes(self.registered_pools[pool]) and read_or_given_up(outcomes)
        if any(read) and tells and tier is not None:
            self.own_reads.append((tier, nbytes_of(parts, read), seconds))
        return read

    def _begin(self, keys: Sequence[str], host_indices: torch.Tensor) -> ReadJob:
        """Starts a part of SGLang's own read, which handles side pools itself."""
        names = [page_key(key) for key in keys]
        store, pages = self._store, self._page_reads((KV,), names, host_indices)
        if store is not None and pages is not None:
            return store.read([read for (read,) in pages], priority=Urgency.SOON)
        job = OrderedJob(len(keys), None, None)
        job.end_rest(ReadOutcome.MISS)
        return job

    def _write(
        self, keys: Sequence[str], parts: Sequence[Sequence[memoryview]], pool: str
    ) -> list[bool]:
        store = self._store
        if store is None:
            return [False] * len(keys)
        if not self._writes(pool):
            # The host's first rank writes these pages; this rank finds them a moment later.
            self._note_seen([page_key(k) for k in keys], pool)
            return [True] * len(keys)
        if time.monotonic() > self._writing_ends:
            return [False] * len(keys)
        started = time.perf_counter()
        tag = pool_of(self._tag(pool), getattr(self._writing, "tenant", NOBODY))
        outcomes = store.put(
            [PageWrite(page_key(k), p, tag) for k, p in zip(keys, parts, strict=True)]
        )
        seconds = time.perf_counter() - started
        stored = [outcome is PutOutcome.STORED for outcome in outcomes]
        self._note(self._write_batches, sum(stored), nbytes_of(parts, stored), seconds)
        each = zip(keys, outcomes, strict=True)
        self._note_seen([page_key(k) for k, o in each if o.is_there], pool)
        # A page that is not admitted is not a failure, after which SGLang would offer no more
        # pages.
        return [outcome is not PutOutcome.REFUSED for outcome in outcomes]

    def _note_seen(self, names: Sequence[PageKey], pool: str) -> None:
        seen = self._seen
        if seen and pool == KV:
            seen[Tier.STORAGE].extend(names)

    def _note(
        self, batches: deque[tuple[int, float]], pages: int, nbytes: int, seconds: float
    ) -> None:
        if self._metrics and pages:
            batches.append((pages, nbytes / max(seconds, 1e-9) / 1e9))

    def _tag(self, pool: str) -> str:
        """The name of a pool in the store. In a folder shared by all TP ranks it includes the rank,
        if each has its own share of the pool. A name too long for the store becomes its beginning
        and a digest, 23 characters, so that a tenant fits too.
        """
        tag = self._pool_tags.get(pool, pool)
        c = self.storage_config
        if c.tp_size > 1 and self._is_replicated(KV) and not self._is_replicated(pool):
            tag = f"{tag}-tp{c.tp_rank}"
        if len(tag) <= POOL_BYTES:
            return tag
        return f"{pool[:6]}-{hashlib.sha256(tag.encode()).hexdigest()[:16]}"


def _ranks_on_a_host(config: Any, server_args: Any) -> int:
    """How many consecutive ranks of `config.tp_size` are on the same host. If hosts divide groups
    of data-parallel attention unequally: the greatest common divisor of the parts.
    """
    hosts_of_a_stage = max(1, server_args.nnodes // config.pp_size)
    # With data-parallel attention `config` has the ranks of one attention group.
    ranks = max(config.tp_size, server_args.tp_size)
    return math.gcd(max(1, ranks // hosts_of_a_stage), config.tp_size)


def _in_front(store: PageStore, config: KVTierConfig, tp_rank: int) -> PageStore:
    """The store, with the emulated slower device in front that the section `lab` asks for. Raises
    ConfigError if the laboratory is not installed.
    """
    plain = (config.lab.throttle, config.lab.faults) == (ThrottleConfig(), FaultConfig())
    if plain and not config.lab.layer_parts:
        return store
    try:
        front = settings.of_lab("front.wrappers", "lab.throttle, lab.faults and lab.layer_parts")
    except ConfigError:
        store.close()
        raise
    found: PageStore = front.in_front(store, config.lab, tp_rank)
    return found


class _WholePages:
    """Turns callbacks for parts of pages into one callback for each page, called when its last part
    has ended. `parts`: the number of parts of each page, which follow one another. Any thread.
    """

    def __init__(self, parts: Sequence[int], on_page: Callable[[int, ReadOutcome], None]) -> None:
        self._on_page = on_page
        self._left = list(parts)
        self._page_of = [page for page, count in enumerate(parts) for _ in range(count)]
        self._outcomes = [ReadOutcome.OK] * len(parts)
        self._lock = threading.Lock()

    def __call__(self, part: int, outcome: ReadOutcome) -> None:
        page = self._page_of[part]
        with self._lock:
            self._left[page] -= 1
            if self._outcomes[page] is ReadOutcome.OK:
                self._outcomes[page] = outcome
            if self._left[page]:
                return
        self._on_page(page, self._outcomes[page])


def _drain(batches: deque[tuple[int, float]], pages: list[int], bandwidth: list[float]) -> None:
    for _ in range(len(batches)):
        count, gbps = batches.popleft()
        pages.append(count)
        bandwidth.append(gbps)
