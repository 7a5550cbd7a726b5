"""Opening a store of many pages: time and memory, from an index log alone, since opening reads no
payload.
"""

from __future__ import annotations

import os
import time

import numpy as np

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import PUT, RECORD
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.disk.index_log import IndexLog
from sgl_kvtier.store.disk.namespace import own_rank_folder
from sgl_kvtier.store.disk.segment import BUFFERED, create_segment
from sgl_kvtier.store.engine import open_store

_SLOT = 8192
_IDENTITY = Identity({"benchmark": "open"}, "benchmark")


class SparseEnv(Env):
    """Reserves no disk space, so that a million slots fit anywhere."""

    def allocate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)


def lay_out(folder: str, pages: int) -> None:
    """Makes the files of a store with `pages` pages."""
    env = SparseEnv()
    rank = own_rank_folder(env, folder, _IDENTITY, "r0")
    slots = min(32_768, pages)
    records = np.zeros(pages, RECORD)
    records["key"] = np.frombuffer(os.urandom(32 * pages), "V32")
    records["pool"] = b"kv"
    records["sequence"] = np.arange(1, pages + 1)
    records["segment"] = 1 + np.arange(pages) // slots
    records["slot"] = np.arange(pages) % slots
    records["length"] = 4096
    records["kind"] = PUT
    for number in range(1, -(-pages // slots) + 1):
        env.close(
            create_segment(env, rank.path, number, _SLOT, slots, _IDENTITY.fingerprint, BUFFERED).fd
        )
    log = IndexLog(env, rank.path, _IDENTITY.fingerprint)
    log.rewrite(lambda: records[:0])
    for at in range(0, pages, 128):
        log.append(records[at : at + 128])
    log.close()
    rank.release(env)


def open_again(folder: str, pages: int) -> tuple[float, float]:
    """(seconds to open, bytes of index memory per page) of a store that `lay_out` made."""
    config = StoreConfig(path=folder, capacity_bytes=1 << 44, min_free_bytes=0)
    started = time.monotonic()
    store = open_store(config, _IDENTITY, "r0")
    took = time.monotonic() - started
    try:
        assert store.stats().pages == pages
        return took, store.index_bytes / pages
    finally:
        store.close()
