"""Many threads in many processes that evict all the time, and a device that stalls. Each process
has a rank of its own.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.lab.stress.store.faults import FOREVER, Call, FaultyEnv, Planned, What, arm, engines
from sgl_kvtier.lab.stress.store.oracle import (
    NAMES,
    SEGMENT,
    Oracle,
    buffers,
    content,
    occupied,
    open_at,
    page_key,
)
from sgl_kvtier.store.base import PageRead, PageWrite, ReadOutcome
from sgl_kvtier.store.engine import DiskStore

_CAPACITY = 1 << 20


@dataclass(slots=True)
class Crowd:
    operations: int = 0
    wrong: int = 0
    failures: int = 0
    peak_bytes: int = 0
    cap_bytes: int = 0
    descriptors_before: int = 0
    descriptors_after: int = 0
    engine: str = ""
    """The I/O threads of the processes, as `DiskStore.io` calls them."""

    @property
    def over_cap_bytes(self) -> int:
        return max(0, self.peak_bytes - self.cap_bytes)


@dataclass(slots=True)
class Stall:
    """A hanging device as seen by a caller with a deadline."""

    deadline_s: float = 0.0
    free_after_s: float = 0.0
    late_pages: int = 0
    canary_touched: int = 0
    in_flight_while_stalled: int = 0
    engines: list[str] = field(default_factory=list)
    """The I/O threads of the stores, as `DiskStore.io` calls them."""


def crowd(root: str, seed: int, processes: int, threads: int, operations: int) -> Crowd:
    """`operations` in all; pages have one version each, so any other bytes are wrong."""
    result = Crowd(cap_bytes=_CAPACITY * processes + SEGMENT, descriptors_before=_descriptors())
    share = max(1, operations // (processes * threads))
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            _life(os.path.join(root, f"p{rank}"), seed + rank, threads, share)
        children.append(child)
    alive = set(children)
    while alive:
        result.peak_bytes = max(result.peak_bytes, occupied(root))
        for child in list(alive):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                alive.remove(child)
                code = os.waitstatus_to_exitcode(status)
                result.wrong += code == 1
                result.failures += code not in (0, 1)
        time.sleep(0.005)
    result.operations = share * processes * threads
    result.descriptors_after = _descriptors()
    store = open_at(os.path.join(root, "p0"), capacity_bytes=_CAPACITY)
    result.engine = store.io
    store.close()
    return result


def _life(root: str, seed: int, threads: int, operations: int) -> None:
    status = 2
    try:
        store = open_at(root, capacity_bytes=_CAPACITY)
        wrong: list[int] = []
        workers = [
            threading.Thread(
                target=_hammer, args=(store, random.Random(seed * 100 + i), operations, wrong)
            )
            for i in range(threads)
        ]
        before = _descriptors()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        # Segments may have been added; anything beyond them would be a leak.
        leaked = _descriptors() - before > _CAPACITY // SEGMENT + 16
        store.close()
        status = 1 if wrong or leaked else 0
    finally:
        os._exit(status)


def _hammer(store: DiskStore, chance: random.Random, operations: int, wrong: list[int]) -> None:
    done = 0
    while done < operations:
        names = chance.sample(range(NAMES), 8)
        done += len(names)
        what = chance.random()
        if what < 0.4:
            # Refused pages are no fault: with every slot being read or written there may be no
            # room.
            store.put([PageWrite(page_key(n), [memoryview(content(n, 0))]) for n in names])
        elif what < 0.97:
            into = buffers(names)
            job = store.read([PageRead(page_key(n), [b]) for n, b in zip(names, into, strict=True)])
            job.wait(120)
            for n, b, outcome in zip(names, into, job.outcomes, strict=True):
                if outcome is ReadOutcome.OK and b != content(n, 0):
                    wrong.append(n)
                if outcome not in (ReadOutcome.OK, ReadOutcome.MISS):
                    wrong.append(n)
        else:
            store.delete([page_key(n) for n in names])


_HANG = [
    Planned(call, 0, FOREVER, What.DELAY, 120_000_000) for call in (Call.READ, Call.COMPLETION)
]


def stall(root: str, rounds: int) -> Stall:
    """Reads with a deadline from a device that hangs; memory of pages not begun is reused at the
    deadline. `rounds` with each kind of compiled I/O threads.
    """
    result = Stall(deadline_s=0.05)
    for name, settings in engines().items():
        if name != "python":
            _stall(os.path.join(root, name), settings, rounds, result)
    return result


def _stall(root: str, settings: dict[str, Any], rounds: int, result: Stall) -> None:
    arm()
    store = open_at(root, FaultyEnv(), io_threads=2, **settings)
    result.engines.append(store.io)
    names = list(range(60))
    oracle = Oracle()
    store.put([PageWrite(page_key(n), [memoryview(content(n, 0))]) for n in names])
    for n in names:
        oracle.stored(n, 0)
    for _ in range(rounds):
        arm(_HANG)
        into = buffers(names)
        apart = sorted(
            names, key=lambda n: n % 3
        )  # neighbours in the file are begun together; these are not neighbours
        started = time.monotonic()
        job = store.read(
            [PageRead(page_key(n), [into[n]]) for n in apart], deadline_s=result.deadline_s
        )
        job.wait(result.deadline_s)
        late = None
        while late is None:
            outcomes = job.outcomes
            if ReadOutcome.LATE in outcomes:
                late = [
                    n
                    for n, outcome in zip(apart, outcomes, strict=True)
                    if outcome is ReadOutcome.LATE
                ]
        result.free_after_s = max(result.free_after_s, time.monotonic() - started)
        result.late_pages += len(late)
        result.in_flight_while_stalled += job.in_flight
        for n in late:
            into[n][:] = b"\xa5" * len(into[n])
        arm()
        job.wait(120)
        result.canary_touched += sum(into[n] != b"\xa5" * len(into[n]) for n in late)
    store.close()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
