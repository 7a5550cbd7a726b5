"""The answers a store may give: an account of pages kept outside it, and the work whose pages it
accounts for.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.store.base import PageRead, PageStore, PageWrite, PutOutcome, ReadOutcome
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
    wrong. Calls of several threads may be in flight: a delete or clear takes back what was answered
    before it began, and what is in flight meanwhile may stay.
    """

    replaces: bool = True
    """Whether a page that was stored is the only version from then on. Where calls fail, an older
    one may still be found.
    """
    allowed: dict[int, set[int]] = field(default_factory=dict)
    gone: dict[int, set[int]] = field(default_factory=dict)
    """Versions of each page that were deleted."""
    sure: dict[int, int] = field(default_factory=dict)
    """The version of each page that was stored and that no delete can have met since its put
    began, in the order they were stored.
    """
    answered: int = 0
    """Deletes and clears."""
    version: int = 0
    """The highest one that was put."""
    engines: set[str] = field(default_factory=set)
    """The I/O threads of the stores that were opened, as `DiskStore.io` calls them."""
    _met: set[int] = field(default_factory=set)
    _puts: dict[int, set[int]] = field(default_factory=dict)
    _deletes: dict[str, dict[int, set[int]]] = field(default_factory=dict)

    def intends(self, name: int, version: int) -> None:
        self.allowed.setdefault(name, set()).add(version)

    def stored(self, name: int, version: int) -> None:
        self.allowed[name] = {version}

    def deleted(self, name: int) -> None:
        self.gone.setdefault(name, set()).update(self.allowed.pop(name, set()))

    def hear(self, word: str, names: list[int], rest: list[Any]) -> None:
        """One line of a worker's journal."""
        if word == "opened":
            self.engines.add(rest[0])
        elif word == "put":
            self.version = max(self.version, rest[0])
            for name in names:
                self.intends(name, rest[0])
                self._puts.setdefault(name, set()).add(rest[0])
        elif word == "stored":
            version, refused = rest
            for name in [*names, *refused]:
                self._puts[name].discard(version)
            for name in names:
                if self.replaces:
                    self.stored(name, version)
                if version not in self._met:
                    self.sure.pop(name, None)
                    self.sure[name] = version
            for name in refused:
                self.allowed[name].discard(version)
        elif word == "delete":
            self._deletes[rest[0]] = {
                name: self.allowed.get(name, set()) - self._puts.get(name, set()) for name in names
            }
            for name in names:
                self.sure.pop(name, None)
        elif word == "deleted":
            self.answered += 1
            for name, versions in self._deletes.pop(rest[0]).items():
                self.allowed.setdefault(name, set()).difference_update(versions)
                self.gone.setdefault(name, set()).update(versions)
                self.sure.pop(name, None)
                self._met |= self._puts.get(name, set())

    def killed(self) -> None:
        """Nothing of what was in flight will be answered."""
        for before in self._deletes.values():
            for name in before:
                self.sure.pop(name, None)
        self._puts.clear()
        self._deletes.clear()
        self._met.clear()

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


class Journal:
    """A worker's messages to the oracle before and after each call, through a pipe that survives
    the worker.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, *words: Any) -> None:
        os.write(self._fd, json.dumps(words).encode() + b"\n")


def work(
    store: PageStore, journal: Journal, seed: int, mine: range, numbers: Iterator[int], calls: float
) -> None:
    """Puts and deletes pages that no other thread does, clears everything now and then, reads
    whatever there is. Each call is announced before and reported after, until `calls` are done.
    """
    chance = random.Random(seed)
    token = f"{mine.start}"
    while (calls := calls - 1) >= 0:
        act = chance.random()
        names = chance.sample(mine, chance.randint(1, 8))
        if act < 0.25:
            journal.say("delete", names, token)
            store.delete([page_key(n) for n in names])
            journal.say("deleted", names, token)
        elif act < 0.26:
            journal.say("delete", list(range(NAMES)), token)
            store.clear()
            journal.say("deleted", [], token)
        elif act < 0.4:
            some = chance.sample(range(NAMES), 6)
            store.read(
                [PageRead(page_key(n), [b]) for n, b in zip(some, buffers(some), strict=True)]
            ).wait(60)
        else:
            version = next(numbers)
            journal.say("put", names, version)
            outcomes = store.put(
                [PageWrite(page_key(n), [memoryview(content(n, version))]) for n in names]
            )
            stored = [
                n
                for n, outcome in zip(names, outcomes, strict=True)
                if outcome is PutOutcome.STORED
            ]
            journal.say("stored", stored, version, [n for n in names if n not in stored])


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
