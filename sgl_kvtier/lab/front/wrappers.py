"""Stores in front of a store, with the same interface: `Throttled` is a slower device, `Faulty` an
unreliable one, `LayerParts` keeps pages in parts. A server imports this module where its
kvtier.json has `lab.throttle`, `lab.faults` or `lab.layer_parts`.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sgl_kvtier.config import FaultConfig, LabConfig, ThrottleConfig
from sgl_kvtier.errors import StoreError
from sgl_kvtier.lab.front.link import Link, LinkJob
from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadJob,
    ReadOutcome,
    StoreStats,
)
from sgl_kvtier.store.tiered.remote import RemoteStore
from sgl_kvtier.tenants import parted
from sgl_kvtier.types import Lookup, PageKey

logger = logging.getLogger(__name__)


def in_front(store: PageStore, config: LabConfig, tp_rank: int) -> PageStore:
    """The store behind the faults, the slower device and the parts that the settings ask for, if
    they do, on this rank.
    """
    faulty = config.faults != FaultConfig(seed=config.faults.seed, rank=config.faults.rank)
    if faulty and config.faults.rank in (-1, tp_rank):
        logger.warning("kvtier: faults are injected on purpose: %s", config.faults)
        store = Faulty(store, config.faults)
    if config.throttle != ThrottleConfig():
        logger.warning("kvtier: the store is slowed down on purpose: %s", config.throttle)
        store = Throttled(store, config.throttle)
    if config.layer_parts:
        store = LayerParts(store, config.layer_parts)
    return store


def in_front_of_remote(store: RemoteStore, config: LabConfig) -> RemoteStore:
    """The store that servers share, behind the slower network that the settings ask for."""
    logger.warning("kvtier: the network is slowed down on purpose: %s", config.remote_throttle)
    return ThrottledRemote(store, config.remote_throttle)


class _InFront:
    """Passes every call on to the store behind it."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        return self._store.lookup(keys, pool)

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> ReadJob:
        return self._store.read(pages, priority=priority, deadline_s=deadline_s, on_page=on_page)

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        return self._store.put(pages)

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        return self._store.retain(owner, keys, seconds)

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        return self._store.delete(keys, pool)

    def clear(self) -> int:
        return self._store.clear()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()


class Throttled(_InFront):
    """A store as it would be on a slower device: one link for all reads and one for all writes.

    A page occupies the read link for its bytes at `read_gbps`. Each job, or each put, first waits
    `latency_ms`, while the link serves others. Pages end one by one in the order of their jobs'
    priorities and of the pages in a job.
    """

    def __init__(self, store: PageStore, config: ThrottleConfig) -> None:
        super().__init__(store)
        self._config = config
        self._link = Link(store, config.read_gbps, config.latency_ms / 1e3)
        self._write_lock = threading.Lock()
        self._write_free_at = 0.0

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> LinkJob:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        return self._link.submit(pages, priority, deadline, on_page)

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        return self._slowed(pages, lambda: self._store.put(pages))

    def _slowed(
        self, pages: Sequence[PageWrite], put: Callable[[], list[PutOutcome]]
    ) -> list[PutOutcome]:
        started = time.monotonic()
        outcomes = put()
        nbytes = sum(
            sum(part.nbytes for part in page.data)
            for page, outcome in zip(pages, outcomes, strict=True)
            if outcome is PutOutcome.STORED
        )
        if nbytes:
            self._occupy_write_link(nbytes, started + self._config.latency_ms / 1e3)
        return outcomes

    def set_read_gbps(self, gbps: float) -> None:
        """Sets the bandwidth for pages that have not begun, in GB/s; 0 = as fast as the disk.
        Raises ValueError when negative.
        """
        if gbps < 0:
            raise ValueError("a bandwidth cannot be negative")
        self._link.set_gbps(gbps)

    def close(self) -> None:
        self._link.close()
        super().close()

    def _occupy_write_link(self, nbytes: int, earliest: float) -> None:
        seconds = nbytes * 8e-9 / self._config.write_gbps if self._config.write_gbps else 0.0
        with self._write_lock:
            self._write_free_at = until = max(self._write_free_at, earliest) + seconds
        time.sleep(max(0.0, until - time.monotonic()))


class ThrottledRemote(Throttled):
    """The same for a store that servers share. Questions to it are as fast as they are."""

    _store: RemoteStore

    @property
    def usable(self) -> bool:
        return self._store.usable

    @property
    def most_page_bytes(self) -> int:
        return self._store.most_page_bytes

    @property
    def calls_late(self) -> int:
        return self._store.calls_late

    @property
    def removals_waiting(self) -> int:
        return self._store.removals_waiting

    def ask(self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float = 0.0) -> bool:
        return self._store.ask(keys, pool, timeout_s)

    def put(
        self, pages: Sequence[PageWrite], wanted: Callable[[], bool] | None = None
    ) -> list[PutOutcome]:
        return self._slowed(pages, lambda: self._store.put(pages, wanted))

    def delete(
        self, keys: Sequence[PageKey], pool: str = KV, first: Callable[[], None] | None = None
    ) -> int:
        return self._store.delete(keys, pool, first)

    def clear(self, first: Callable[[], None] | None = None) -> int:
        return self._store.clear(first)

    def __getattr__(self, name: str) -> Any:
        """What only the store behind has, such as its condition."""
        return getattr(self._store, name)


class Faulty(_InFront):
    """A store whose device fails on purpose, by seed: FAILED reads, REFUSED writes, flipped bits on
    disk, slow reads, pages that are gone when they are looked up.

    The seed and the order of calls alone decide which pages are hit. Flipped bits are written to
    the disk by the store behind, so that its own checks have to find them. A store that cannot do
    that raises StoreError here.
    """

    def __init__(self, store: PageStore, config: FaultConfig) -> None:
        super().__init__(store)
        self._config = config
        self._damage: Callable[..., bool] | None = getattr(store, "damage", None)
        if config.corrupt_rate and self._damage is None:
            raise StoreError(
                f"{type(store).__name__} cannot damage its pages: put Faulty directly around the "
                "disk store"
            )
        self._random = random.Random(config.seed)
        self._lock = threading.Lock()

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        with self._lock:
            lost = [
                place < self._config.lose_first or self._random.random() < self._config.lose_rate
                for place in range(len(keys))
            ]
        if any(lost):
            self._store.delete([key for key, gone in zip(keys, lost, strict=True) if gone], pool)
        return self._store.lookup(keys, pool)

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> ReadJob:
        with self._lock:
            failing = {
                i for i in range(len(pages)) if self._random.random() < self._config.read_error_rate
            }
            stalled = {
                i
                for i in range(len(pages))
                if self._config.stall_ms and self._random.random() < 0.01
            }
        if not failing and not stalled:
            return self._store.read(
                pages, priority=priority, deadline_s=deadline_s, on_page=on_page
            )
        return _FaultyJob(
            self._store,
            pages,
            priority,
            deadline_s,
            on_page,
            failing,
            stalled,
            self._config.stall_ms / 1e3,
        )

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        with self._lock:
            refused = [self._random.random() < self._config.write_error_rate for _ in pages]
            damaged = [self._random.random() < self._config.corrupt_rate for _ in pages]
            bits = [self._random.getrandbits(48) for _ in pages]
        through = [i for i, no in enumerate(refused) if not no]
        outcomes = [PutOutcome.REFUSED] * len(pages)
        for i, outcome in zip(through, self._store.put([pages[i] for i in through]), strict=True):
            outcomes[i] = outcome
            if outcome is PutOutcome.STORED and damaged[i] and self._damage is not None:
                self._damage(pages[i].key, parted(pages[i].pool)[0], bit=bits[i])
        return outcomes


class _Job:
    """A read job of the store behind, `_job`, as a caller sees it."""

    _job: ReadJob

    @property
    def in_flight(self) -> int:
        return self._job.in_flight

    @property
    def done(self) -> bool:
        return self._job.done

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._job.wait(timeout_s)

    def cancel(self) -> None:
        self._job.cancel()


class _FaultyJob(_Job):
    """A read job in which some pages fail, or end later than they did."""

    def __init__(
        self,
        store: PageStore,
        pages: Sequence[PageRead],
        priority: int,
        deadline_s: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
        failing: set[int],
        stalled: set[int],
        stall_s: float,
    ) -> None:
        self._failing = failing
        self._stalled = stalled
        self._stall_s = stall_s
        self._on_page = on_page
        self._job = store.read(
            pages, priority=priority, deadline_s=deadline_s, on_page=self._page_ended
        )

    def _page_ended(self, index: int, outcome: ReadOutcome) -> None:
        if index in self._stalled:
            time.sleep(self._stall_s)
        if self._on_page is not None:
            self._on_page(index, self._seen(index, outcome))

    def _seen(self, index: int, outcome: ReadOutcome) -> ReadOutcome:
        return (
            ReadOutcome.FAILED if index in self._failing and outcome is ReadOutcome.OK else outcome
        )

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        return [None if o is None else self._seen(i, o) for i, o in enumerate(self._job.outcomes)]

    def drain(self) -> list[tuple[int, ReadOutcome]]:
        return [(i, self._seen(i, outcome)) for i, outcome in self._job.drain()]


_WORST = (
    *(ReadOutcome.CORRUPT, ReadOutcome.FAILED, ReadOutcome.MISS),
    *(ReadOutcome.LATE, ReadOutcome.CANCELLED, ReadOutcome.OK),
)


def pool_of(part: int) -> str:
    """The pool that has this part of all pages, 0 the lowest layers."""
    return f"{KV}/{part}"


def cut(pieces: Sequence[memoryview], part: int, parts: int) -> list[memoryview]:
    """A part of a page: of each of its pieces the bytes of these layers. `parts` divides the number
    of layers.
    """
    found = []
    for piece in pieces:
        step = piece.nbytes // parts
        found.append(piece[part * step : (part + 1) * step])
    return found


class LayerParts(_InFront):
    """Pages kept in parts of some layers each, so that the upper layers can be read without the
    lower: a store checks what it has under one key as a whole.

    A page of layout page_first_direct is keys, then values, each layer after layer. So a part is
    one run of bytes of both. Part g of a page is kept under the page's key in a pool of its own,
    `pool_of`. Other pools than `KV` pass through, and so do parts by name. Counts of pages are
    rounded down.
    """

    def __init__(self, store: PageStore, parts: int) -> None:
        super().__init__(store)
        self._parts = parts

    @property
    def set_read_gbps(self) -> Callable[[float], None] | None:
        """That of a throttled store behind."""
        found: Callable[[float], None] | None = getattr(self._store, "set_read_gbps", None)
        return found

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        """A page is there when all its parts are."""
        if pool != KV:
            return self._store.lookup(keys, pool)
        by_part = [self._store.lookup(keys, pool_of(part)) for part in range(self._parts)]
        return [
            next((one for one in answers if one is not Lookup.HIT), Lookup.HIT)
            for answers in zip(*by_part, strict=True)
        ]

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> ReadJob:
        if not any(page.pool == KV for page in pages):
            return super().read(pages, priority=priority, deadline_s=deadline_s, on_page=on_page)
        return _WholePages(self._store, pages, self._parts, priority, deadline_s, on_page)

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """A page is stored when all its parts are, which name no tenant."""
        each = [_parts_of(parted(page.pool)[0], self._parts) for page in pages]
        flat = [
            page
            if part is None
            else page._replace(data=cut(page.data, part, self._parts), pool=pool_of(part))
            for page, own in zip(pages, each, strict=True)
            for part in own
        ]
        outcomes = iter(self._store.put(flat))
        return [_written([next(outcomes) for _ in own]) for own in each]

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        if pool != KV:
            return self._store.delete(keys, pool)
        return max(self._store.delete(keys, pool_of(part)) for part in range(self._parts))

    def clear(self) -> int:
        return self._store.clear() // self._parts

    def stats(self) -> StoreStats:
        """Pages instead of parts."""
        found = self._store.stats()
        counts: dict[str, Any] = {
            field.name: getattr(found, field.name) // self._parts
            for field in dataclasses.fields(found)
            if field.name.startswith("pages")
        }
        return dataclasses.replace(found, **counts)


class _WholePages(_Job):
    """A read of whole pages as a read of their parts, page after page."""

    def __init__(
        self,
        store: PageStore,
        pages: Sequence[PageRead],
        parts: int,
        priority: int,
        deadline_s: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
    ) -> None:
        each = [_parts_of(page.pool, parts) for page in pages]
        self._page_of = [index for index, own in enumerate(each) for _ in own]
        self._left = [len(own) for own in each]
        self._found = [ReadOutcome.OK] * len(pages)
        self._on_page = on_page
        self._lock = threading.Lock()
        self._fresh: list[tuple[int, ReadOutcome]] = []
        self._job = store.read(
            [
                page
                if part is None
                else PageRead(page.key, cut(page.into, part, parts), pool_of(part))
                for page, own in zip(pages, each, strict=True)
                for part in own
            ],
            priority=priority,
            deadline_s=deadline_s,
            on_page=self._part_ended,
        )  # fmt: skip

    def _part_ended(self, index: int, outcome: ReadOutcome) -> None:
        page = self._page_of[index]
        with self._lock:
            self._found[page] = min(self._found[page], outcome, key=_WORST.index)
            self._left[page] -= 1
            found = self._found[page]
            over = self._left[page] == 0
            if over:
                self._fresh.append((page, found))
        if over and self._on_page is not None:
            self._on_page(page, found)

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        with self._lock:
            return [
                None if left else one for left, one in zip(self._left, self._found, strict=True)
            ]

    def drain(self) -> list[tuple[int, ReadOutcome]]:
        with self._lock:
            fresh, self._fresh = self._fresh, []
            return fresh


def _parts_of(pool: str, parts: int) -> list[int | None]:
    return list(range(parts)) if pool == KV else [None]


def _written(outcomes: Sequence[PutOutcome]) -> PutOutcome:
    worst_first = (PutOutcome.REFUSED, PutOutcome.NOT_ADMITTED, PutOutcome.STORED)
    return next((one for one in worst_first if one in outcomes), PutOutcome.KEPT)
