"""Small stores to try, their pages, and the answers one of them may give."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.store.base import PageRead, PageStore, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import DiskStore, open_store
from sgl_kvtier.types import PageKey

IDENTITY = Identity({"model": "torture"}, name="torture")
CAPACITY = 768 << 10
SEGMENT = 96 << 10
SIZES = (3000, 4096, 9000)
NAMES = 150


def page_key(name: int) -> PageKey:
    return PageKey(hashlib.sha256(b"torture %d" % name).digest())


def size_of(name: int) -> int:
    """Bytes of a page: fixed by its name, so that a reader can ask for any version."""
    return SIZES[name % len(SIZES)]


def content(name: int, version: int) -> bytes:
    """A page's bytes, which do not come about by accident."""
    return random.Random((name << 40) | version).randbytes(size_of(name))


def open_at(root: str, env: Env | None = None, **settings: Any) -> DiskStore:
    """A small store under torture; `settings` as in StoreConfig."""
    defaults: dict[str, Any] = {
        "path": root,
        "capacity_bytes": CAPACITY,
        "segment_bytes": SEGMENT,
        "min_free_bytes": 0,
        "io_threads": 2,
    }
    return open_store(StoreConfig(**(defaults | settings)), IDENTITY, "r0", env=env)


def buffers(names: Iterable[int]) -> list[memoryview]:
    return [memoryview(mmap.mmap(-1, size_of(name))) for name in names]


@dataclass(slots=True)
class Verdict:
    """Counts of pages as they were read back."""

    right: int = 0
    wrong: int = 0
    resurrected: int = 0
    """Pages that a delete or clear was answered for, as they were before it."""
    missing: int = 0
    corrupt: int = 0

    def add(self, other: Verdict) -> None:
        self.right += other.right
        self.wrong += other.wrong
        self.resurrected += other.resurrected
        self.missing += other.missing
        self.corrupt += other.corrupt


@dataclass(slots=True)
class Oracle:
    """Which versions of each page may be returned. A miss is always allowed; any other bytes are
    wrong. One call at a time; `shared_oracle.py` accounts for several processes and threads.
    """

    allowed: dict[int, set[int]] = field(default_factory=dict)
    gone: dict[int, set[int]] = field(default_factory=dict)
    """Versions of each page that were deleted."""

    def intends(self, name: int, version: int) -> None:
        self.allowed.setdefault(name, set()).add(version)

    def stored(self, name: int, version: int) -> None:
        self.allowed[name] = {version}

    def deleted(self, name: int) -> None:
        self.gone.setdefault(name, set()).update(self.allowed.pop(name, set()))

    def check(self, store: PageStore, names: Iterable[int]) -> Verdict:
        """Reads pages and judges each. A page read as OK whose bytes are no allowed version is
        wrong.
        """
        names = list(names)
        into = buffers(names)
        job = store.read([PageRead(page_key(n), [b]) for n, b in zip(names, into, strict=True)])
        verdict = Verdict()
        if not job.wait(120):
            raise RuntimeError("a read did not end within 120 seconds")
        for name, data, outcome in zip(names, into, job.outcomes, strict=True):
            if outcome is ReadOutcome.OK:
                fine = any(data == content(name, version) for version in self.allowed.get(name, ()))
                back = not fine and any(
                    data == content(name, version) for version in self.gone.get(name, ())
                )
                verdict.right += fine
                verdict.resurrected += back
                verdict.wrong += not fine and not back
            elif outcome is ReadOutcome.CORRUPT:
                verdict.corrupt += 1
            else:
                verdict.missing += 1
        return verdict


def occupied(root: str) -> int:
    """Bytes on disk of all files below a folder."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue  # removed meanwhile
    return total


def quick_pages(count: int, nbytes: int, seed: int) -> np.ndarray:
    """Random pages as rows of one array."""
    return np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)
