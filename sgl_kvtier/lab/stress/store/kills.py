"""Killing a process whose threads put, delete, clear and read: at a random moment from outside, or
before, after or within one system call. What was deleted must not come back.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.stress.store.faults import (
    MOST,
    Call,
    HookedEnv,
    Planned,
    What,
    arm,
    engines,
    fail,
    take,
)
from sgl_kvtier.lab.stress.store.oracle import (
    CAPACITY,
    NAMES,
    Journal,
    Oracle,
    Verdict,
    open_at,
    work,
)
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.format import BLOCK
from sgl_kvtier.store.engine import DiskStore

EVICTING = 384 << 10
AMPLE = 16 << 20
_CALLS = 40
"""Calls of a worker that is to kill itself."""
_CUT = 0.2
"""Share of the kills after which the log ends in the middle of a frame. It looks as if the frame
had been written at that moment.
"""
_PATIENT_S = 5.0
"""Seconds within which a worker's delete is answered."""
_WRITES = 400
"""Writes of pages after which their troubles are the same again."""
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


class DeadlyEnv(HookedEnv):
    """Kills its own process at the `nth` call of one kind, Python's or an I/O thread's. One at a
    time in a process.
    """

    def __init__(self, point: tuple[str, str], nth: int) -> None:
        self._call, self._moment = point
        self._left = nth
        what = What.KILL_BEFORE if self._moment == "before" else What.KILL_AFTER
        amount = -_TORN[self._moment] if self._moment in _TORN else MOST
        arm([Planned(call, nth - 1, nth - 1, what, amount) for call in _MOVING.get(self._call, ())])

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        due = self._due(call)
        if due and self._moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if due and self._moment in _TORN:
            _tear(_TORN[self._moment], *args)
        else:
            result = act(*args)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _due(self, call: str) -> bool:
        if call in _MOVING:
            return take(_MOVING[call][0])[0] != What.NOTHING
        if call != self._call:
            return False
        self._left -= 1
        return self._left == 0


def _tear(step: int, fd: int, data: Sequence[memoryview], offset: int) -> None:
    """Writes some units of `step` bytes."""
    whole = b"".join(data)
    cut = random.Random(len(whole) + offset).randrange(0, max(1, len(whole) // step)) * step
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), whole[:cut], offset)


class TroubledEnv(HookedEnv):
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

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        if call == "unlink":
            self._fail(0.05)
        elif call == "pwritev" and args[0] in self._logs:
            self._fail(0.01)
        elif call == "pwritev" and sum(map(len, args[1])) > BLOCK:
            what, amount = take(Call.WRITE)
            if what == What.FAIL:
                raise fail(amount)
            time.sleep(amount / 1e6)
        result = act(*args)
        if call == "open":
            is_log = os.path.basename(args[0]).startswith("index.log")
            (self._logs.add if is_log else self._logs.discard)(result)
        return result


@dataclass(slots=True)
class Killing:
    """One folder whose process is killed again and again, and what its oracle says."""

    root: str
    seed: int
    capacity_bytes: int = CAPACITY
    threads: int = 1
    troubled: bool = False
    """Half of the lives have calls that fail, and I/O threads of any kind."""
    oracle: Oracle = field(default_factory=Oracle)
    verdict: Verdict = field(default_factory=Verdict)
    kills: int = 0
    failed_opens: int = 0
    recent: int = 0
    """Pages that must have survived but for the last moment's: those stored last, and with ample
    room all. Several threads in little room evict each other's, so none counts there.
    """
    recent_found: int = 0

    def __post_init__(self) -> None:
        self.oracle.replaces = not self.troubled

    def at_random(self) -> None:
        """One life that ends at a random moment, half of the times right after a delete was
        answered.
        """
        chance = random.Random(self.seed * 1_000_003 + self.kills)
        after_s = 0.01 + chance.expovariate(1 / (0.08 if self.troubled else 0.03))
        if not self._live(lambda: self._open(chance), chance, after_s=after_s):
            raise RuntimeError("a worker ended by itself")
        if chance.random() < _CUT:
            for log in Path(self.root).glob("*/*/index.log"):
                with log.open("ab") as file:
                    file.write(b"KVTF")
        if not self.troubled or chance.random() < 0.7:  # else the next life follows a kill
            self._verify()

    def at_point(self, point: tuple[str, str]) -> bool:
        """One life that ends at a point; False when it ended before it got there."""
        if point[0] in ("list", "lock", "unlink") and not self.oracle.sure:
            # On the way to every first page: they would be met in an empty folder each time.
            self._live(lambda: open_at(self.root), random.Random(self.seed))
            self._verify()
        chance = random.Random(self.seed * 7_000_003 + self.oracle.version)
        rare = point[0] in ("rename", "unlink", "allocate", "list", "lock", "size")
        nth = chance.randint(1, 2) if rare else chance.randint(1, 12)
        kinds = list(engines().values())
        threads = kinds[(self.seed + self.kills) % len(kinds)]
        durable = point[0] == "sync"
        killed = self._live(
            # In the child: its plan is not this process's.
            lambda: open_at(self.root, DeadlyEnv(point, nth), durable=durable, **threads),
            chance,
        )
        self._verify()
        return killed

    def _open(self, chance: random.Random) -> DiskStore:
        if not self.troubled:
            return open_at(self.root, capacity_bytes=self.capacity_bytes)
        settings: dict[str, Any] = {
            "durable": chance.random() < 0.25,
            "direct_io": chance.choice(("auto", "off")),
            **chance.choice(list(engines().values())),
        }
        env = TroubledEnv(random.Random(chance.random())) if chance.random() < 0.5 else Env()
        return open_at(self.root, env, capacity_bytes=self.capacity_bytes, **settings)

    def _live(
        self,
        open_store: Callable[[], DiskStore],
        chance: random.Random,
        after_s: float | None = None,
    ) -> bool:
        """A life of a forked worker, ended by a kill after so many seconds. None: by itself, and
        the result says whether that was a kill. Raises RuntimeError for a worker that failed.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            calls = float("inf") if after_s is not None else _CALLS
            _life(self, open_store, writing, chance.getrandbits(60), calls)
        os.close(writing)
        said = b""
        if after_s is not None:
            said = _listen(reading, after_s, chance.random() < 0.5)
            os.kill(child, signal.SIGKILL)
        while chunk := os.read(reading, 1 << 16):
            said += chunk
        os.close(reading)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        if status and not killed:
            raise RuntimeError(f"a worker failed: {os.waitstatus_to_exitcode(status)}")
        self.kills += killed
        for line in said.split(b"\n")[:-1]:
            word, names, *rest = json.loads(line)
            self.oracle.hear(word, names, rest)
        self.oracle.killed()
        return killed

    def _verify(self) -> None:
        try:
            store = open_at(self.root, capacity_bytes=self.capacity_bytes)
        except KVTierError:
            self.failed_opens += 1
            return
        try:
            self.verdict.add(self.oracle.check(store, range(NAMES)))
            ample = self.capacity_bytes >= AMPLE
            recent = list(self.oracle.sure)[0 if ample else -_RECENT :]
            if ample or self.threads == 1:
                self.recent += len(recent)
                self.recent_found += self.oracle.check(store, recent).right
        finally:
            store.close()


def _listen(reading: int, seconds: float, at_a_delete: bool) -> bytes:
    """What a worker says in that time, and until a delete is answered where that is asked for."""
    said = b""
    until = time.monotonic() + seconds
    end = until + _PATIENT_S * at_a_delete
    while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        chunk = os.read(reading, 1 << 16)
        said += chunk
        now = time.monotonic()
        if not chunk or now >= end or (at_a_delete and now >= until and b"deleted" in chunk):
            break
    return said


def _life(
    of: Killing, open_store: Callable[[], DiskStore], writing: int, seed: int, calls: float
) -> None:
    """The life of a worker: never returns."""

    def ended(args: Any) -> None:
        threading.__excepthook__(args)
        os._exit(3)

    status = 3
    threading.excepthook = ended
    try:
        store = open_store()
        journal = Journal(writing)
        journal.say("opened", [], store.io)
        numbers = itertools.count(of.oracle.version + 1)
        workers = [
            threading.Thread(
                target=work,
                args=(
                    store, journal, seed + thread, range(thread, NAMES, of.threads), numbers, calls
                ),
            )
            for thread in range(of.threads)
        ]  # fmt: skip
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        store.close()
        status = 0
    finally:
        os._exit(status)
