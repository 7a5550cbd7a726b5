"""Our store as the benchmark drives it: one calling thread that collects batches of 128 pages. The
pages that follow are read ahead.

So the storage backend reads a prefix for SGLang, which asks for 128 pages at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import BenchError
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadJob, ReadOutcome
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import DiskStore, open_store
from sgl_kvtier.store.io.read_ahead import AHEAD_BYTES, ReadAhead
from sgl_kvtier.types import PageKey

BATCH = 128


class Subject:
    """A store filled with `nbytes` of pages of one size. Rates in bytes per second."""

    def __init__(self, folder: str, page_bytes: int, nbytes: int, **settings: Any) -> None:
        self._config = StoreConfig(
            path=folder, capacity_bytes=2 * nbytes + (1 << 30), min_free_bytes=0, **settings
        )
        self.store = self._open()
        self.page_bytes = page_bytes
        self._count = max(1, nbytes // page_bytes)
        self.keys = [PageKey(os.urandom(32)) for _ in range(self._count)]
        memory = _memory(page_bytes * memory_slots(page_bytes, nbytes))
        memory[:] = (os.urandom(1 << 20) * (len(memory) // (1 << 20) + 1))[: len(memory)]
        self._pages = [memory[i : i + page_bytes] for i in range(0, len(memory), page_bytes)]

    def write(self) -> float:
        """Writes every page anew, into slots used before, and syncs at the end."""
        self.store.delete(self.keys)
        self.store.sync()
        started = time.monotonic()
        for batch in self._batches(self.keys):
            outcomes = self.store.put(
                [PageWrite(key, [page]) for key, page in zip(batch, self._pages, strict=False)]
            )
            if outcomes.count(PutOutcome.STORED) != len(outcomes):
                raise BenchError(
                    f"the store refused pages while it was measured: is {self.store.folder} full?"
                )
        if not self.store.sync():
            raise BenchError("the disk did not confirm a sync")
        return self._rate(started)

    def read_random(self) -> float:
        """Reads every page once in random order."""
        return self._read(random.sample(self.keys, len(self.keys)))

    def read_unverified(self) -> float:
        """The same without checking what was read: the same pages, from the same place on disk,
        into the same memory.
        """
        return self._read_with(verify_reads=False)

    def read_by_threads(self) -> float:
        """The same by threads with one read each, whatever `store.io` chooses."""
        return self._read_with(io="threads")

    def _read_with(self, **changed: Any) -> float:
        self.store.close()
        self.store = self._open(**changed)
        try:
            return self.read_random()
        finally:
            self.store.close()
            self.store = self._open()

    def read_prefix(self) -> float:
        """Reads every page in the order they were stored, as one long prefix."""
        return self._read(self.keys)

    def read_beside_a_busy_thread(self) -> float:
        """Reads in random order while another Python thread of this process never rests."""
        stop = threading.Event()
        busy = threading.Thread(target=_spin, args=(stop,))
        busy.start()
        try:
            return self.read_random()
        finally:
            stop.set()
            busy.join()

    def lookup_seconds(self, count: int) -> float:
        """Seconds of one existence query for `count` keys."""
        keys = (self.keys * (count // len(self.keys) + 1))[:count]
        started = time.monotonic()
        self.store.lookup(keys)
        return time.monotonic() - started

    def close(self) -> None:
        self.store.close()

    def _open(self, **changed: Any) -> DiskStore:
        return open_store(
            replace(self._config, **changed), Identity({"benchmark": "store"}, "benchmark"), "r0"
        )

    def _read(self, keys: Sequence[PageKey]) -> float:
        started = time.monotonic()
        ahead = ReadAhead(
            lambda first, last: self._begin(keys, first, last), len(keys), self.page_bytes
        )
        try:
            while ahead.collected < len(keys):
                outcomes = ahead.collect(BATCH)
                if outcomes.count(ReadOutcome.OK) != len(outcomes):
                    raise BenchError(f"a read failed while it was measured: {set(outcomes)}")
        finally:
            ahead.close()
        return self._rate(started)

    def _begin(self, keys: Sequence[PageKey], first: int, last: int) -> ReadJob:
        slots = len(self._pages)
        return self.store.read(
            [PageRead(keys[i], [self._pages[i % slots]]) for i in range(first, last)]
        )

    def _rate(self, started: float) -> float:
        return self._count * self.page_bytes / (time.monotonic() - started)

    def _batches(self, keys: Sequence[PageKey]) -> list[Sequence[PageKey]]:
        return [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]


def memory_slots(page_bytes: int, nbytes: int) -> int:
    """For how many pages there is memory to read into: a batch, and what is read ahead of it. NIXL
    gets as much.
    """
    return min(BATCH + max(1, AHEAD_BYTES // page_bytes), max(1, nbytes // page_bytes))


def _memory(nbytes: int) -> memoryview:
    """Page-aligned memory in huge pages where the system has them, the same for every store
    measured here.

    A device takes one descriptor per physically contiguous piece; pieces of 4 KiB cost a virtual
    disk a third of its rate.
    """
    # Private: shared memory (Python's default) gets no huge pages on most systems.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _spin(stop: threading.Event) -> None:
    turns = 0
    while not stop.is_set():
        turns += 1
