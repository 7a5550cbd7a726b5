"""Tests a remote store: sends pages, looks them up, reads and compares them, and removes them."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from dataclasses import asdict, dataclass

from sgl_kvtier.config import RemoteConfig
from sgl_kvtier.errors import StoreError
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.store import RemoteStore, open_remote
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.types import Lookup, PageKey

PAGES, PAGE_BYTES = 32, 256 << 10
_START_S = 15.0
_WAIT_S = 5.0


@dataclass(frozen=True)
class RemoteSpeed:
    """Results with 32 pages of 256 KiB: MB/s (10^6 bytes) including checks, and the duration of one
    look-up of all of them.
    """

    write_mbps: float
    read_mbps: float
    exists_ms: float


def try_out(config: RemoteConfig) -> RemoteSpeed:
    """Sends pages of a fingerprint that no server has, and reads them back. Takes some seconds at
    most. Raises ConfigError and StoreError, which say what to do.
    """
    settings = RemoteSettings(**{**asdict(config), "write": "all"})
    nowhere = Identity({"doctor": os.urandom(16).hex()}, "doctor")
    store = open_remote(settings, nowhere, "doctor")
    try:
        if not store.wait_usable(_START_S):
            raise StoreError(store.condition().trouble or "it does not answer")
        return _measure(store)
    finally:
        store.clear()
        store.close()


def _measure(store: RemoteStore) -> RemoteSpeed:
    content = [os.urandom(PAGE_BYTES) for _ in range(PAGES)]
    keys = [PageKey(hashlib.sha256(data).digest()) for data in content]
    absent = [PageKey(os.urandom(32)) for _ in range(PAGES)]
    started = time.perf_counter()
    if not store.ask(absent, timeout_s=_WAIT_S) or Lookup.HIT in store.lookup(absent):
        raise StoreError("it finds pages that were never stored, or does not answer")
    asked = time.perf_counter()
    outcomes = store.put(
        [PageWrite(key, [memoryview(data)]) for key, data in zip(keys, content, strict=True)]
    )
    put = time.perf_counter()
    if outcomes.count(PutOutcome.STORED) < PAGES:
        taken = outcomes.count(PutOutcome.STORED)
        raise StoreError(
            f"it took {taken} of {PAGES} pages: is there an owner of memory with room for them? "
            f"{store.condition().trouble}".strip()
        )
    _read(store, keys, content)  # the first read over a new connection takes several times as long
    begun = time.perf_counter()
    _read(store, keys, content)
    mb = PAGES * PAGE_BYTES / 1e6
    read_s = time.perf_counter() - begun
    return RemoteSpeed(mb / (put - asked), mb / read_s, (asked - started) * 1e3)


def _read(store: RemoteStore, keys: list[PageKey], content: list[bytes]) -> None:
    buffers = [memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in keys]
    job = store.read([PageRead(key, [into]) for key, into in zip(keys, buffers, strict=True)])
    job.wait(_WAIT_S)
    right = [
        outcome is ReadOutcome.OK and into == data
        for outcome, into, data in zip(job.outcomes, buffers, content, strict=True)
    ]
    if not all(right):
        raise StoreError(
            f"{right.count(False)} of {PAGES} pages did not come back "
            f"({', '.join(sorted({str(o and o.value) for o in job.outcomes}))})"
        )
