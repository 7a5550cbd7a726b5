"""Killing the writer: at a random moment from outside, or right at, before, after or within one
system call.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.stress.store.faults import (
    MOST,
    Call,
    FaultyEnv,
    Planned,
    What,
    arm,
    engines,
    take,
)
from sgl_kvtier.lab.stress.store.oracle import (
    NAMES,
    Journal,
    Oracle,
    Verdict,
    hear,
    open_at,
    opened,
    work,
)
from sgl_kvtier.store.engine import DiskStore

_RECENT = 15
"""The number of pages acknowledged last that fit any capacity: they must survive but for the last
moment's.
"""

POINTS = (
    *(
        (call, moment)
        for call in (
            "open",
            "pwritev",
            "allocate",
            "rename",
            "unlink",
            "sync",
            "list",
            "size",
            "lock",
            "preadv",
        )
        for moment in ("before", "after")
    ),
    ("pwritev", "within"),
    ("pwritev", "within a sector"),
)
"""Every system call that changes or finds something, before and after it, and writes torn at two
sizes. Reads through a ring count as preadv; they are killed when they have ended.
"""


_TORN = {"within": 4096, "within a sector": 512}
"""Moments at which a write is torn, and of how many bytes it leaves a whole number."""
_MOVING = {"preadv": (Call.READ, Call.COMPLETION), "pwritev": (Call.WRITE,)}
"""Calls that the compiled I/O threads make too: they are counted there."""


class DeadlyEnv(FaultyEnv):
    """Kills its own process at the `nth` call of one kind, Python's or an I/O thread's. One at a
    time in a process.
    """

    def __init__(self, point: tuple[str, str], nth: int) -> None:
        self._call, self._moment = point
        self._left = nth
        what = What.KILL_BEFORE if self._moment == "before" else What.KILL_AFTER
        amount = -_TORN[self._moment] if self._moment in _TORN else MOST
        arm([Planned(call, nth - 1, nth - 1, what, amount) for call in _MOVING.get(self._call, ())])

    def _due(self, call: str) -> bool:
        if call in _MOVING:
            return take(_MOVING[call][0])[0] != What.NOTHING
        if call != self._call:
            return False
        self._left -= 1
        return self._left == 0

    def _run(
        self, call: str, act: Callable[[], object], tear: Callable[[int], object] | None = None
    ) -> object:
        due = self._due(call)
        if due and self._moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = tear(_TORN[self._moment]) if due and tear and self._moment in _TORN else act()
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def open(self, path: str, flags: int) -> int:
        return int(self._run("open", lambda: super(DeadlyEnv, self).open(path, flags)))  # type: ignore[call-overload]

    def pwritev(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        def tear(step: int) -> None:
            whole = b"".join(data)
            cut = random.Random(len(whole) + offset).randrange(0, max(1, len(whole) // step)) * step
            with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), whole[:cut], offset)

        act = lambda: super(DeadlyEnv, self).pwritev(fd, data, offset)  # noqa: E731
        return int(self._run("pwritev", act, tear))  # type: ignore[call-overload]

    def preadv(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        return int(self._run("preadv", lambda: super(DeadlyEnv, self).preadv(fd, data, offset)))  # type: ignore[call-overload]

    def allocate(self, fd: int, nbytes: int) -> None:
        self._run("allocate", lambda: super(DeadlyEnv, self).allocate(fd, nbytes))

    def rename(self, old: str, new: str) -> None:
        self._run("rename", lambda: super(DeadlyEnv, self).rename(old, new))

    def unlink(self, path: str) -> None:
        self._run("unlink", lambda: super(DeadlyEnv, self).unlink(path))

    def sync(self, fd: int) -> None:
        self._run("sync", lambda: super(DeadlyEnv, self).sync(fd))

    def list(self, path: str) -> list[str]:
        return self._run("list", lambda: super(DeadlyEnv, self).list(path))  # type: ignore[return-value]

    def size(self, fd: int) -> int:
        return int(self._run("size", lambda: super(DeadlyEnv, self).size(fd)))  # type: ignore[call-overload]

    def lock(self, fd: int) -> None:
        self._run("lock", lambda: super(DeadlyEnv, self).lock(fd))


@dataclass(slots=True)
class Killing:
    """One folder that is killed again and again, and what its oracle says."""

    root: str
    seed: int
    oracle: Oracle = field(default_factory=Oracle)
    verdict: Verdict = field(default_factory=Verdict)
    version: int = 0
    kills: int = 0
    failed_opens: int = 0
    deletes: int = 0
    recent: int = 0
    recent_found: int = 0
    points: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    """Lives that opened their store, by its I/O threads as `DiskStore.io` calls them."""

    def blackbox(self) -> None:
        """One life that ends at a random moment."""
        chance = random.Random(self.seed * 1_000_003 + self.kills)
        self._live(lambda: open_at(self.root), chance.expovariate(1 / 0.02), chance)

    def whitebox(self, point: tuple[str, str]) -> bool:
        """One life that ends at a point; False when it ended before it got there."""
        if point[0] in ("list", "lock", "unlink") and not self.oracle.acknowledged:
            # On the way to every first page: they would be met in an empty folder each time.
            self._live(lambda: open_at(self.root), None, random.Random(self.seed))
        chance = random.Random(self.seed * 7_000_003 + self.version)
        rare = point[0] in ("rename", "unlink", "allocate", "list", "lock", "size")
        nth = chance.randint(1, 2) if rare else chance.randint(1, 12)
        kinds = list(engines().values())
        threads = kinds[(self.seed + self.kills) % len(kinds)]
        durable = point[0] == "sync"
        killed = self._live(
            # In the child: its plan is not this process's.
            lambda: open_at(self.root, DeadlyEnv(point, nth), durable=durable, **threads),
            None,
            chance,
        )
        if killed:
            self.points[" ".join(point)] += 1
        return killed

    def _live(
        self, open_store: Callable[[], DiskStore], after_s: float | None, chance: random.Random
    ) -> bool:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _child(
                open_store,
                writing,
                chance.getrandbits(60),
                self.version,
                10**9 if after_s is not None else 25,
            )
        os.close(writing)
        said = b""
        if after_s is not None:
            if chance.random() < 0.5:
                said = os.read(
                    reading, 1 << 16
                )  # it is open: however slow the machine is, some lives get to their work
            time.sleep(0.01 + after_s)
            os.kill(child, signal.SIGKILL)
        while chunk := os.read(reading, 1 << 16):
            said += chunk
        os.close(reading)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        self.kills += killed
        self.version = max(self.version, hear(self.oracle, said))
        self.deletes += said.count(b'"deleted"')
        self.engines.update(opened(said))
        self._verify()
        return killed

    def _verify(self) -> None:
        try:
            store = open_at(self.root)
        except KVTierError:
            self.failed_opens += 1
            return
        try:
            seen = self.oracle.check(store, range(NAMES))
            self.verdict.add(seen)
            recent = list(dict.fromkeys(self.oracle.acknowledged[::-1]))[:_RECENT]
            self.recent += len(recent)
            self.recent_found += self.oracle.check(store, recent).right
            self.oracle.acknowledged = self.oracle.acknowledged[-10 * NAMES :]
        finally:
            store.close()


def _child(
    open_store: Callable[[], DiskStore], writing: int, seed: int, version: int, calls: int
) -> None:
    """The life of a worker: never returns."""
    status = 3
    try:
        store = open_store()
        journal = Journal(writing)
        journal.say("opened", [], store.io)
        work(store, journal, seed, version, calls)
        store.close()
        status = 0
    finally:
        os._exit(status)
