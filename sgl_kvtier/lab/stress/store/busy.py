"""A store with everything in flight at once, closed in the midst of it, in one life of three with
calls that fail; and a device that hangs. `scripts/sanitize` watches the first from inside.

    python -m sgl_kvtier.lab.stress.store.busy FOLDER SECONDS [SEED]

prints one line of JSON; 1 when a page was wrong, or when the I/O threads are not the compiled ones
or cannot be made to fail.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import random
import shutil
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from sgl_kvtier.lab.stress.store.faults import (
    BUILT,
    FOREVER,
    Call,
    FaultyEnv,
    Planned,
    What,
    arm,
    counts,
    engines,
)
from sgl_kvtier.lab.stress.store.oracle import (
    NAMES,
    SEGMENT,
    buffers,
    content,
    occupied,
    open_at,
    page_key,
)
from sgl_kvtier.lab.stress.trouble import chance
from sgl_kvtier.store.base import PageRead, PageWrite, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.io.native_threads import NATIVE

_THREADS = 8
_LIFE_S = 0.8
_KINDS = (("io_uring", "auto"), ("threads", "auto"), ("threads", "off"), ("io_uring", "on"))
_PERIOD = 97
_TROUBLES = (
    (What.FAIL, (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN)),
    (What.SHORT, (0, 512, 4096, -512)),
    (What.DELAY, (100, 2000)),
)


@dataclass(slots=True)
class Busy:
    """The outcome of a run. `io` counts stores opened by what read their pages."""

    compared: int = 0
    wrong: int = 0
    strange: int = 0
    """Pages damaged or failed while no call was made to fail, threads that did not end, and
    descriptors that stayed open.
    """
    over_cap_bytes: int = 0
    """The most that a store without failing calls took beyond its capacity and a segment."""
    faults: int = 0
    stores: int = 0
    io: dict[str, int] = field(default_factory=dict)


def busy(root: str, seconds: float, seed: int) -> Busy:
    """Opens stores one after the other, each with another kind of I/O, and closes them under
    load.
    """
    result = Busy()
    until = time.monotonic() + seconds
    descriptors = len(os.listdir("/proc/self/fd"))
    for life in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
        io, direct = _KINDS[life % len(_KINDS)]
        drawn = chance(seed, "busy", life)
        failing = BUILT and life % 3 == 1
        if failing:
            arm(_plan(drawn), _PERIOD)
        folder = os.path.join(
            root, f"{life % 2}"
        )  # every other store opens what the one before last left
        try:
            store = open_at(
                folder,
                FaultyEnv() if failing else Env(),
                io=io,
                direct_io=direct,
                capacity_bytes=(768 << 10) << life % 3,
                io_threads=3,
            )
        except Exception as error:
            if direct != "on":
                raise
            print(f"without O_DIRECT here: {error}", file=sys.stderr)
            continue
        result.stores += 1
        result.io[store.io] = result.io.get(store.io, 0) + 1
        _one_life(store, drawn, result, failing)
        result.faults += counts().faults[Call.ANY] if failing else 0
        result.strange += len(os.listdir("/proc/self/fd")) != descriptors
        if not failing:
            over = occupied(folder) - ((768 << 10) << life % 3) - SEGMENT
            result.over_cap_bytes = max(result.over_cap_bytes, over)
    return result


def _plan(drawn: random.Random) -> list[Planned]:
    """One call in three of the I/O threads fails, is cut short or comes late."""
    plan = []
    for number in range(0, _PERIOD, 3):
        what, amounts = drawn.choice(_TROUBLES)
        plan.append(Planned(Call.ANY, number, number, what, drawn.choice(amounts)))
    return plan


def _one_life(store: DiskStore, drawn: random.Random, result: Busy, failing: bool) -> None:
    closed = threading.Event()
    seen: list[tuple[int, int, int]] = []
    works = [
        functools.partial(_work, store, closed, drawn.getrandbits(60)) for _ in range(_THREADS)
    ]
    threads = [
        threading.Thread(target=lambda work: seen.append(work()), args=(work,)) for work in works
    ]
    for thread in threads:
        thread.start()
    time.sleep(_LIFE_S)
    store.close()
    closed.set()
    for thread in threads:
        thread.join(60)
    result.compared += sum(compared for compared, _, _ in seen)
    result.wrong += sum(wrong for _, wrong, _ in seen)
    result.strange += sum(thread.is_alive() for thread in threads)
    result.strange += 0 if failing else sum(strange for _, _, strange in seen)


def _work(store: DiskStore, closed: threading.Event, seed: int) -> tuple[int, int, int]:
    drawn = chance(seed)
    compared = wrong = strange = 0
    while not closed.is_set():
        names = drawn.sample(range(NAMES), drawn.randint(1, 16))
        act = drawn.random()
        if act < 0.35:
            store.put([PageWrite(page_key(n), [memoryview(_page(n))]) for n in names])
        elif act < 0.42:
            store.delete([page_key(n) for n in names])
        elif act < 0.43:
            store.clear()
        elif act < 0.5:
            store.lookup([page_key(n) for n in names])
            store.retain(f"{drawn.random():.1f}", [page_key(n) for n in names], 0.1)
            store.stats()
        else:
            right, other, odd = _read(store, names, drawn)
            compared, wrong, strange = compared + right + other, wrong + other, strange + odd
    return compared, wrong, strange


def _read(store: DiskStore, names: list[int], drawn: random.Random) -> tuple[int, int, int]:
    """Reads in one of many ways: (right, wrong, neither read nor missing)."""
    into = buffers(names)
    told: list[int] = []
    job = store.read(
        [PageRead(page_key(n), [b]) for n, b in zip(names, into, strict=True)],
        priority=drawn.randint(0, 3),
        deadline_s=drawn.choice((None, None, 0.0, 0.001, 1.0)),
        on_page=(lambda index, _: told.append(index)) if drawn.random() < 0.3 else None,
    )
    how = drawn.random()
    if how < 0.1:
        return 0, 0, 0  # dropped while it is under way
    if how < 0.3:
        job.cancel()
    elif how < 0.5:
        job.wait(0.0)
        job.drain()
    ended = job.wait(60)
    right = wrong = strange = 0
    for name, buffer, outcome in zip(names, into, job.outcomes, strict=True):
        if outcome is ReadOutcome.OK:
            fine = buffer == _page(name)
            right += fine
            wrong += not fine
        strange += outcome in (ReadOutcome.CORRUPT, ReadOutcome.FAILED)
    return right, wrong, strange + (not ended or job.in_flight != 0)


@functools.cache
def _page(name: int) -> bytes:
    return content(name, 0)


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
    store.put([PageWrite(page_key(n), [memoryview(content(n, 0))]) for n in names])
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


def main(folder: str, seconds: str, seed: str = "1") -> int:
    """The command above."""
    root = os.path.join(folder, f"busy{os.getpid()}")
    try:
        result = busy(root, float(seconds), int(seed))
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(root)
    print(json.dumps(asdict(result)))
    nothing_tried = not result.compared or not result.faults or not NATIVE
    return 1 if result.wrong or result.strange or nothing_tried else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
