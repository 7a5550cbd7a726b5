"""Killing one of two processes that own folders with the same pages: the other's pages, and those
that the killed one was told were stored, are all found, and no page is wrong or comes back.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.torture.oracle import IDENTITY, SEGMENT, Journal, occupied
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore, open_store
from sgl_kvtier.types import Lookup, PageKey

AMPLE = 256 << 20
EVICTING = 1 << 20
_LIFE = 1 << 20
"""Names of one process's life: each page has a name of its own and one content for ever."""
_KEPT = 300
"""Pages that one life may leave; it deletes the older ones."""


def page_key(name: int) -> PageKey:
    return PageKey(hashlib.sha256(b"together %d" % name).digest())


def content(name: int) -> bytes:
    """A page's bytes: no 32 of them are another page's."""
    return hashlib.sha256(b"content %d" % name).digest() * (96 + name % 3 * 96)


def open_together(root: str, capacity_bytes: int, *, writes: bool = True) -> DiskStore:
    """One more owner of the same pages below `root`."""
    config = StoreConfig(
        path=root,
        capacity_bytes=capacity_bytes,
        segment_bytes=SEGMENT,
        min_free_bytes=0,
        io_threads=2,
    )
    return open_store(config, IDENTITY, "r0", alike="r0", writes=writes)


@dataclass(slots=True)
class _Life:
    """A process at work, and what it said."""

    pid: int
    said: int
    number: int
    rest: bytes = b""
    stored: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Together:
    """Two owners in one folder, one of which is killed again and again."""

    root: str
    seed: int
    capacity_bytes: int
    kills: int = 0
    deletes: int = 0
    checked: int = 0
    found: int = 0
    lost: int = 0
    wrong: int = 0
    resurrected: int = 0
    failed_opens: int = 0
    failed_lives: int = 0
    over_cap_bytes: int = 0
    lives: list[_Life] = field(default_factory=list)
    stored: set[int] = field(default_factory=set)
    """Names that must be found where nothing is evicted."""
    doubtful: set[int] = field(default_factory=set)
    """Names whose delete has begun."""
    deleted: set[int] = field(default_factory=set)
    _born: int = 0

    def kill(self) -> None:
        """Kills one of the two at a random moment, and looks at all pages as a third owner, who
        takes the folder of the killed one over while the survivor works on.
        """
        chance = random.Random(self.seed * 1_000_003 + self.kills)
        while len(self.lives) < 2:
            self._begin(chance)
        time.sleep(0.02 + chance.expovariate(1 / 0.03))
        victim = self.lives.pop(chance.randrange(2))
        os.kill(victim.pid, signal.SIGKILL)
        self._hear(victim, to_the_end=True)
        _, status = os.waitpid(victim.pid, 0)
        self.failed_lives += not os.WIFSIGNALED(status)
        self.kills += 1
        self._check()

    def end(self) -> None:
        """Kills who is left."""
        for life in self.lives:
            os.kill(life.pid, signal.SIGKILL)
            os.waitpid(life.pid, 0)
            os.close(life.said)
        self.lives.clear()

    def _begin(self, chance: random.Random) -> None:
        reading, writing = os.pipe()
        self._born += 1
        number, seed = self._born, chance.getrandbits(60)
        child = os.fork()
        if child == 0:
            known = sorted(self.stored - self.doubtful)[-_KEPT:]
            _live(self.root, self.capacity_bytes, Journal(writing), number, seed, known)
        os.close(writing)
        os.set_blocking(reading, False)
        self.lives.append(_Life(child, reading, number))

    def _hear(self, life: _Life, *, to_the_end: bool = False) -> None:
        if to_the_end:
            os.set_blocking(life.said, True)
        try:
            while chunk := os.read(life.said, 1 << 16):
                life.rest += chunk
        except BlockingIOError:
            pass
        *lines, life.rest = life.rest.split(b"\n")
        for line in lines:
            word, names = json.loads(line)
            if word == "stored":
                self.stored.update(names)
            elif word == "delete":
                self.doubtful.update(names)
            elif word == "deleted":
                self.deleted.update(names)
                self.deletes += 1
            elif word == "wrong":
                self.wrong += len(names)
        if to_the_end:
            os.close(life.said)

    def _check(self) -> None:
        for life in self.lives:
            self._hear(life)
        must, gone = self.stored - self.doubtful, self.deleted & self.stored
        try:
            store = open_together(self.root, self.capacity_bytes)
        except KVTierError:
            self.failed_opens += 1
            return
        try:
            store.follow()
            names = sorted(must | gone)
            found, wrong = _read(store, names)
        finally:
            store.close()
        over = occupied(self.root) - self.capacity_bytes - SEGMENT
        self.over_cap_bytes = max(self.over_cap_bytes, over)
        for life in self.lives:
            self._hear(life)
        self.wrong += len(wrong)
        self.resurrected += len(found & gone)
        self.checked += len(must - self.doubtful)
        self.found += len(found & (must - self.doubtful))
        if self.capacity_bytes == AMPLE:
            self.lost += len(must - self.doubtful - found)
        # A process that was killed before its answer may or may not have deleted them.
        self.stored -= self.doubtful - self.deleted
        self.doubtful &= self.stored


def _read(store: DiskStore, names: list[int]) -> tuple[set[int], set[int]]:
    """(pages that were found, those of them that are wrong)."""
    into = [memoryview(bytearray(len(content(n)))) for n in names]
    job = store.read([PageRead(page_key(n), [b]) for n, b in zip(names, into, strict=True)])
    if not job.wait(120):
        raise RuntimeError("a read did not end within 120 seconds")
    found = {
        (n, bytes(b) == content(n))
        for n, b, outcome in zip(names, into, job.outcomes, strict=True)
        if outcome is ReadOutcome.OK
    }
    return {n for n, _ in found}, {n for n, right in found if not right}


def _live(
    root: str, capacity_bytes: int, journal: Journal, number: int, seed: int, known: list[int]
) -> None:
    """The life of one owner: never returns. `known` pages were there when it began."""
    try:
        store = open_together(root, capacity_bytes)
        chance = random.Random(seed)
        mine: list[int] = []
        next_name = number * _LIFE
        while True:
            what = chance.random()
            if what < 0.5:
                names = list(range(next_name, next_name + chance.randint(1, 8)))
                next_name = names[-1] + 1
                outcomes = store.put(
                    [PageWrite(page_key(n), [memoryview(content(n))]) for n in names]
                )
                done = zip(names, outcomes, strict=True)
                stored = [n for n, outcome in done if outcome is PutOutcome.STORED]
                mine += stored
                journal.say("stored", stored)
            elif what < 0.9:
                names = chance.sample(known + mine, min(8, len(known + mine)))
                there = store.lookup([page_key(n) for n in names])
                names = [n for n, how in zip(names, there, strict=True) if how is Lookup.HIT]
                _, wrong = _read(store, names)
                if wrong:
                    journal.say("wrong", sorted(wrong))
                if names and chance.random() < 0.3:
                    _delete(store, journal, names[:1])
            elif len(mine) > _KEPT:
                _delete(store, journal, mine[: len(mine) - _KEPT])
                del mine[: len(mine) - _KEPT]
            elif chance.random() < 0.05:
                # A log that is made anew under those who follow it.
                store._core.log.rewrite(store._snapshot)
    finally:
        os._exit(3)


def _delete(store: DiskStore, journal: Journal, names: list[int]) -> None:
    journal.say("delete", names)
    store.delete([page_key(n) for n in names])
    journal.say("deleted", names)


def together(
    root: str, seed: int, kills: int, step: Callable[[int], None] = lambda _: None
) -> list[Together]:
    """Half of the kills in a folder with room for everything, half in one that evicts."""
    rooms = [Together(os.path.join(root, str(n)), seed + n, n) for n in (AMPLE, EVICTING)]
    try:
        for number in range(kills):
            rooms[number % 2].kill()
            step(1)
    finally:
        for room in rooms:
            room.end()
    return rooms
