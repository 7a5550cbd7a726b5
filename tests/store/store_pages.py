"""Small words for store tests: keys, pages, aligned memory, and stores in a folder."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadJob,
    ReadOutcome,
)
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import DiskStore, open_store
from sgl_kvtier.store.io.native_threads import NATIVE, io_uring_error
from sgl_kvtier.types import PageKey

IDENTITY = Identity({"model": "lab", "dtype": "bfloat16", "page_size": 16}, name="lab")


IO_KINDS = ("io_uring", "threads", "python")
"""The kinds of I/O threads, by what `DiskStore.io` calls them."""


def io_settings(kind: str) -> dict[str, Any]:
    """The settings that choose a kind of I/O threads; skips the test where there is none of that kind
    here.
    """
    if kind != "python" and not NATIVE:
        pytest.skip(
            "the native I/O threads are not built here (no C compiler when the package was installed)"
        )
    if kind == "io_uring" and io_uring_error():
        pytest.skip(f"this process may not use io_uring: {os.strerror(io_uring_error())}")
    return {"native_io": False} if kind == "python" else {"io": kind}


Open = Callable[..., DiskStore]
"""Opens a store of one folder, with these settings."""
OPENED: list[DiskStore] | None = None
"""Where `open_at` notes stores, for the fixture that closes them after a test (conftest.py)."""


def key(name: object) -> PageKey:
    return PageKey(hashlib.sha256(repr(name).encode()).digest())


def content(name: object, nbytes: int) -> bytes:
    return random.Random(repr(name)).randbytes(nbytes)


def named(names: Iterable[object], nbytes: int = 5000) -> dict[PageKey, bytes]:
    """Pages of these names."""
    return {key(name): content(name, nbytes) for name in names}


def aligned(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]


def open_at(
    path: Path,
    identity: Identity = IDENTITY,
    rank: str = "tp0",
    ranks: int = 1,
    env: Env | None = None,
    *,
    alike: str = "",
    writes: bool = True,
    **settings: Any,
) -> DiskStore:
    defaults: dict[str, Any] = {
        "path": str(path),
        "capacity_bytes": 8 << 20,
        "segment_bytes": 1 << 20,
        "min_free_bytes": 0,
        "io_threads": 2,
    }
    config = StoreConfig(**(defaults | settings))
    store = open_store(config, identity, rank, ranks, alike=alike, writes=writes, env=env)
    if OPENED is not None:
        OPENED.append(store)
    return store


def stored_at(path: Path, pages: dict[PageKey, bytes], **settings: Any) -> Path:
    """The folder of a store with these pages that is closed again."""
    store = open_at(path, **settings)
    assert set(put(store, pages)) <= {PutOutcome.STORED}
    store.close()
    return Path(store.folder)


def killed(store: DiskStore, to: Path) -> Path:
    """A copy of the store's root as its process leaves it that is killed now."""
    shutil.copytree(Path(store.folder).parent.parent, to)
    return to


def lose_the_end(root: Path | str) -> None:
    """Lets the log end in the middle of a frame, as a process leaves it that is killed while it
    writes there.
    """
    (log,) = Path(root).rglob("index.log")
    with log.open("ab") as file:
        file.write(b"KVTF")


def on_disk(root: Path | str) -> int:
    """Bytes of disk blocks below a folder."""
    return sum(p.lstat().st_blocks * 512 for p in Path(root).rglob("*") if p.is_file())


def put(store: PageStore, pages: dict[PageKey, bytes], pool: str = KV) -> list[PutOutcome]:
    return store.put([PageWrite(k, [memoryview(data)], pool) for k, data in pages.items()])


def read(
    store: PageStore, lengths: dict[PageKey, int], pool: str = KV, **how: Any
) -> list[tuple[ReadOutcome, bytes]]:
    buffers = [aligned(n) for n in lengths.values()]
    job = store.read([PageRead(k, [b], pool) for k, b in zip(lengths, buffers, strict=True)], **how)
    assert job.wait(60)
    assert job.in_flight == 0
    return [(outcome, bytes(b)) for outcome, b in zip(job.outcomes, buffers, strict=True)]


def begin(store: PageStore, names: Iterable[PageKey], nbytes: int = 5000, **how: Any) -> ReadJob:
    """A read of pages into memory of its own."""
    return store.read([PageRead(name, [aligned(nbytes)]) for name in names], **how)


def found(store: DiskStore, pages: dict[PageKey, bytes], pool: str = KV) -> int:
    """How many pages can be read. Fails for one that is neither as it was put nor a miss."""
    lengths = {name: len(data) for name, data in pages.items()}
    outcomes = []
    for (outcome, data), wanted in zip(read(store, lengths, pool), pages.values(), strict=True):
        assert outcome in (ReadOutcome.OK, ReadOutcome.MISS)
        assert outcome is not ReadOutcome.OK or data == wanted
        outcomes.append(outcome)
    with store._core.lock:
        store._core.table.check()
    return outcomes.count(ReadOutcome.OK)


def segments(store: DiskStore) -> list[Path]:
    return sorted(Path(store.folder).glob("seg-*"))


def hang(store: DiskStore) -> int:
    """Makes rings wait for what they read of a store's only segment, until the descriptor returned
    is closed: then nothing comes.
    """
    (path,) = segments(store)
    (fd,) = [
        int(fd)
        for fd in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{fd}") == os.path.realpath(path)
    ]
    reading, writing = os.pipe()
    os.dup2(reading, fd)
    os.close(reading)
    return writing
