"""Killing a process whose threads put, delete, clear and read at once: what was deleted must not
come back.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.stress.store.faults import (
    Call,
    FaultyEnv,
    Planned,
    What,
    arm,
    engines,
    fail,
    take,
)
from sgl_kvtier.lab.stress.store.oracle import (
    NAMES,
    Journal,
    Verdict,
    buffers,
    content,
    open_at,
    opened,
    page_key,
)
from sgl_kvtier.lab.stress.store.oracle import Oracle as Plain
from sgl_kvtier.store.base import PageRead, PageStore, PageWrite, PutOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import BLOCK

EVICTING = 384 << 10
AMPLE = 16 << 20
_THREADS = 4
_TORN = 0.2
"""Share of the kills after which the log ends in the middle of a frame. It looks as if the frame
had been written at that moment.
"""


class Oracle(Plain):
    """For threads: a delete or clear takes back what was answered before it began. What is under
    way may stay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answered = 0
        self.sure: dict[int, int] = {}
        """The version of each page that was stored and that no delete can have met since its put
        began.
        """
        self._met: set[int] = set()
        self._puts: dict[int, set[int]] = {}
        self._deletes: dict[str, dict[int, set[int]]] = {}

    def hear(self, word: str, names: list[int], rest: list[Any]) -> None:
        """One line of a worker's journal."""
        if word == "put":
            for name in names:
                self.intends(name, rest[0])
                self._puts.setdefault(name, set()).add(rest[0])
        elif word == "stored":
            version, refused = rest
            for name in [*names, *refused]:
                self._puts[name].discard(version)
            for name in names if version not in self._met else ():
                self.sure[name] = version
            for name in refused:
                self.allowed[name].discard(version)
        elif word == "delete":
            before = {
                name: self.allowed.get(name, set()) - self._puts.get(name, set()) for name in names
            }
            self._deletes[rest[0]] = before
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
        """Nothing of what was under way will be answered."""
        for before in self._deletes.values():
            for name in before:
                self.sure.pop(name, None)
        self._puts.clear()
        self._deletes.clear()
        self._met.clear()


_WRITES = 400
"""Writes of pages after which their troubles are the same again."""


class TroubledEnv(FaultyEnv):
    """Pages are written slowly and sometimes not at all; now and then the log or a removal
    fails. One at a time in a process.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._logs: set[int] = set()
        arm([self._trouble(number) for number in range(_WRITES)], _WRITES)

    def _trouble(self, number: int) -> Planned:
        if self._chance.random() < 0.05:
            return Planned(Call.WRITE, number, number, What.FAIL, errno.EIO)
        return Planned(Call.WRITE, number, number, What.DELAY, self._chance.choice((0, 500, 3000)))

    def _fail(self, share: float) -> None:
        if self._chance.random() < share:
            raise fail(errno.EIO)

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        (self._logs.add if os.path.basename(path).startswith("index.log") else self._logs.discard)(
            fd
        )
        return fd

    def pwritev(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        if fd in self._logs:
            self._fail(0.01)
        elif sum(map(len, data)) > BLOCK:
            what, amount = take(Call.WRITE)
            if what == What.FAIL:
                raise fail(amount)
            time.sleep(amount / 1e6)
        return super().pwritev(fd, data, offset)

    def unlink(self, path: str) -> None:
        self._fail(0.05)
        super().unlink(path)


@dataclass(slots=True)
class Deleting:
    """One folder that is killed again and again, and what its oracle says."""

    root: str
    seed: int
    capacity_bytes: int
    oracle: Oracle = field(default_factory=Oracle)
    verdict: Verdict = field(default_factory=Verdict)
    version: int = 0
    kills: int = 0
    failed_opens: int = 0
    sure: int = 0
    """In ample room. Threads that put at once may still evict each other's pages, before one has
    made another segment.
    """
    sure_found: int = 0
    engines: Counter[str] = field(default_factory=Counter)
    """Lives by their I/O threads, as `DiskStore.io` calls them."""

    def kill(self) -> None:
        """One life that ends at a random moment, half of the times right after a delete was
        answered.
        """
        chance = random.Random(self.seed * 1_000_003 + self.kills)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _life(self, writing, chance)
        os.close(writing)
        until = time.monotonic() + 0.03 + chance.expovariate(1 / 0.08)
        at_a_delete, give_up = chance.random() < 0.5, until + 5
        said = b""
        while chunk := os.read(reading, 1 << 16):
            said += chunk
            now = time.monotonic()
            if now >= give_up or (now >= until and (not at_a_delete or b"deleted" in chunk)):
                break
        os.kill(child, signal.SIGKILL)
        while chunk := os.read(reading, 1 << 16):
            said += chunk
        os.close(reading)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise RuntimeError(f"a worker ended by itself: {status}")
        self.kills += 1
        self.engines.update(opened(said))
        self._hear(said)
        if chance.random() < _TORN:
            for log in Path(self.root).glob("*/*/index.log"):
                with log.open("ab") as file:
                    file.write(b"KVTF")
        if chance.random() < 0.7:  # else the next life follows a kill
            self._verify()

    def _hear(self, lines: bytes) -> None:
        for line in lines.split(b"\n")[:-1]:
            word, names, *rest = json.loads(line)
            if word == "put":
                self.version = max(self.version, rest[0])
            self.oracle.hear(word, names, rest)
        self.oracle.killed()

    def _verify(self) -> None:
        try:
            store = open_at(self.root, capacity_bytes=self.capacity_bytes)
        except KVTierError:
            self.failed_opens += 1
            return
        try:
            self.verdict.add(self.oracle.check(store, range(NAMES)))
            if self.capacity_bytes >= AMPLE:
                self.sure += len(self.oracle.sure)
                self.sure_found += self.oracle.check(store, self.oracle.sure).right
        finally:
            store.close()


def _life(of: Deleting, writing: int, chance: random.Random) -> None:
    """The life of a worker: ends when it is killed."""
    try:
        settings: dict[str, Any] = {
            "durable": chance.random() < 0.25,
            "direct_io": chance.choice(("auto", "off")),
        }
        settings |= chance.choice(list(engines().values()))
        env = TroubledEnv(random.Random(chance.random())) if chance.random() < 0.5 else Env()
        store = open_at(of.root, env, capacity_bytes=of.capacity_bytes, **settings)
        Journal(writing).say("opened", [], store.io)
        numbers = itertools.count(of.version + 1)
        workers = [
            threading.Thread(
                target=_work,
                args=(store, Journal(writing), chance.getrandbits(60), thread, numbers),
            )
            for thread in range(_THREADS)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        os._exit(3)


def _work(
    store: PageStore, journal: Journal, seed: int, thread: int, numbers: itertools.count[int]
) -> None:
    """Puts and deletes pages that no other thread does, clears everything now and then, reads
    whatever there is.
    """
    chance = random.Random(seed)
    mine = range(thread, NAMES, _THREADS)
    while True:
        act = chance.random()
        names = chance.sample(mine, chance.randint(1, 8))
        token = f"{thread}"
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
