"""One process that owns a folder of pages, and works until it is killed or told to stop."""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import logging
import os
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.stress.store.faults import DeadlyEnv, TroubledEnv
from sgl_kvtier.lab.stress.store.oracle import IDENTITY
from sgl_kvtier.lab.stress.store.shared_oracle import (
    Act,
    Count,
    Names,
    Seen,
    SharedOracle,
    Verdict,
    content,
    now_ns,
    page_of,
    shared_array,
)
from sgl_kvtier.lab.stress.trouble import Finding, chance
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.engine import DiskStore, open_store
from sgl_kvtier.store.index.slots import Rows

PATIENCE_NS = 10_000_000_000
"""A follower that runs undisturbed for that long has seen what was answered before."""
_BATCH = 500
_FOLLOWER = "kvtier-follow"
_LOGGERS = "sgl_kvtier"
_STEPS = 512

Opener = Callable[[StoreConfig, Env, bool], Any]
"""Opens the store of one more owner: (settings, operating system, whether it puts)."""


def open_owner(config: StoreConfig, env: Env, writes: bool) -> DiskStore:
    """A store that shares its folder with all others of this identity."""
    return open_store(config, IDENTITY, "r0", alike="r0", writes=writes, env=env)


class Board:
    """What the campaign tells the processes of one folder, in memory that they share."""

    def __init__(self, slots: int) -> None:
        self.stop = shared_array(slots, np.bool_)
        self.disk_full = shared_array(slots, np.bool_)
        self.troubles = shared_array(slots, np.int64)
        """Beginnings and ends of troubles of the process in this slot: odd within one."""
        self.calm_since_ns = shared_array(slots, np.int64)
        """Since when the process in this slot was neither suspended nor in trouble."""
        self.own_shift_ns = shared_array(slots, np.int64)
        self._steps = shared_array((_STEPS, 2), np.int64)
        self._count = shared_array(1, np.int64)

    def calm(self, slot: int, since: int) -> bool:
        """Whether the process in this slot was in no trouble since `troubles` had that value."""
        return since % 2 == 0 and since == int(self.troubles[slot])

    def step_clock(self, shift_ns: int) -> None:
        """From now on the host's clock is that far ahead of the real one."""
        count = int(self._count[0])
        if count < _STEPS:
            self._steps[count] = (time.time_ns(), shift_ns)
            self._count[0] = count + 1

    def shown(self, real_ns: int) -> int:
        """What the host's clock showed at a real moment: files keep the time of their change."""
        times = self._steps[: int(self._count[0]), 0].tolist()
        at = bisect.bisect_right(times, real_ns)
        return real_ns + (int(self._steps[at - 1, 1]) if at else 0)


class OwnersEnv(Env):
    """The operating system of one owner: its clock is stepped, and its disk is full at times."""

    native = True

    def __init__(self, board: Board, slot: int) -> None:
        self._board = board
        self._slot = slot

    def wall_ns(self) -> int:
        return self._board.shown(time.time_ns()) + int(self._board.own_shift_ns[self._slot])

    def modified_ns(self, path: str) -> int:
        return self._board.shown(super().modified_ns(path))

    def status(self, path: str) -> os.stat_result:
        found = super().status(path)
        shown = self._board.shown(found.st_mtime_ns)
        return os.stat_result(tuple(found), {"st_mtime_ns": shown, "st_mtime": shown / 1e9})

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT and not self.exists(path):
            self._refuse(path)
        return super().open(path, flags)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._refuse(None)
        super().allocate(fd, nbytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset + sum(map(len, buffers)) > self.size(fd):
            self._refuse(None)
        return super().pwritev(fd, buffers, offset)

    def free_bytes(self, path: str) -> int:
        return 0 if self._board.disk_full[self._slot] else super().free_bytes(path)

    def _refuse(self, path: str | None) -> None:
        if self._board.disk_full[self._slot]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@dataclass(frozen=True, slots=True)
class Life:
    """What one process is."""

    number: int
    slot: int
    seed: int
    config: StoreConfig
    writes: bool = True
    follows: bool = True
    """Whether it calls `follow` itself. Otherwise it knows only what its follower finds."""
    same_pid: bool = False
    """Whether it believes to be process 1, as in a container."""
    descriptors: int | None = None
    """How many more it may open while it opens the store."""
    only_looks: bool = False
    threads: int = 2
    rest_s: float = 0.02
    """Seconds between two calls of a thread, on average."""
    calls: int | None = None
    """After so many of each thread it ends by itself."""
    point: tuple[str, str] | None = None
    """Where it kills itself: in the `nth` call of this kind (`faults.POINTS`)."""
    nth: int = 1
    troubled: bool = False
    """Its writes are slow, and some of its writes and removals fail."""

    @property
    def ends_itself(self) -> bool:
        """Whether nobody has to tell it to stop."""
        return self.only_looks or self.calls is not None


class Owner:
    """A process at work. Every answer of its store is told to the oracle."""

    def __init__(
        self, oracle: SharedOracle, board: Board, life: Life, opener: Opener = open_owner
    ) -> None:
        self._oracle = oracle
        self._board = board
        self._life = life
        self._opener = opener
        self._env = _env_of(oracle, board, life)
        self._store: Any = None
        self._known_ns = 0
        """The beginning of the last `follow`, or of the opening."""
        self._all = np.arange(oracle.names)
        self._maimed = False
        """Opened in trouble: segments of its own may have been left aside."""
        self._blamed_follower = False
        self._evicted = 0
        self._mine = threading.local()
        """Of each thread: `troubles` when its put began, and what that put evicted until now."""

    def open(self) -> bool:
        """Tries until it succeeds; False when told to stop before."""
        while not self._told_to_stop():
            began, epoch, troubles = now_ns(), self._oracle.epoch, self._troubles()
            try:
                self._store = self._opener(self._life.config, self._env, self._life.writes)
            except BaseException as error:
                with_advice = isinstance(error, KVTierError)
                excused = not self._calm(troubles) or not epoch == self._oracle.epoch != 0
                if excused and with_advice:
                    self._oracle.count(self._life.slot, Count.REFUSED_OPENS)
                else:
                    self._blame(Finding.FAILED_OPEN, traceback.format_exc())
                time.sleep(0.3)
                continue
            self._maimed = not self._calm(troubles)
            self._known_ns = 0 if self._maimed else began
            if self._oracle.owes and isinstance(self._store, DiskStore):
                self._watch_evictions(self._store)
            with self._oracle.lock:
                self._oracle.counts[self._life.slot, Count.OPENED] += 1
                if isinstance(self._store, DiskStore):
                    self._oracle.counts[self._life.slot, Count[self._store.io.upper()]] += 1
                number = _folder_number(self._store)
                self._oracle.note(Act.OPENED, self._life.number, number=number)
            return True
        return False

    def work(self) -> None:
        """Looks at every page, and then does at random what owners do, in several threads."""
        drawn = chance(self._life.seed, "threads")
        with self._reported("the first look at all pages"):
            self.check(self._all)
        if self._life.only_looks:
            return
        threads = [
            threading.Thread(target=self._act_on, args=(drawn.getrandbits(60),), daemon=True)
            for _ in range(self._life.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        with self._reported("close"):
            self._store.close()

    def put(self, names: Names) -> None:
        oracle, life = self._oracle, self._life
        epoch, known = oracle.epoch, self._known_ns
        intent = oracle.begin_put(life.slot, life.number, epoch, names, known)
        outcomes = [PutOutcome.REFUSED] * len(intent.names)
        self._mine.troubles, self._mine.evicted = self._troubles(), []
        try:
            pages = [page_of(oracle.room, epoch, name) for name in intent.names.tolist()]
            outcomes = self._store.put(
                [
                    PageWrite(page.key, [memoryview(content(page, generation))], page.pool)
                    for page, generation in zip(pages, intent.generations.tolist(), strict=True)
                ]
            )
        finally:
            oracle.end_put(life.slot, life.number, intent, outcomes, known)
            for evicted in self._mine.evicted:
                told = not self._store._core.log.lost
                oracle.end_evicting(life.slot, evicted, told=told)

    def delete(self, names: Names) -> None:
        oracle, life = self._oracle, self._life
        epoch, troubles = oracle.epoch, self._troubles()
        intent = oracle.begin_delete(life.slot, life.number, epoch, names)
        pages = [page_of(oracle.room, epoch, name) for name in intent.names.tolist()]
        for pool in sorted({page.pool for page in pages}):
            self._store.delete([page.key for page in pages if page.pool == pool], pool)
        sure = self._calm(troubles)
        oracle.end_delete(life.slot, life.number, intent, sure=sure)

    def clear(self) -> None:
        oracle, life = self._oracle, self._life
        epoch, troubles = oracle.epoch, self._troubles()
        intent = oracle.begin_delete(life.slot, life.number, epoch, self._all, all_pages=True)
        self._store.clear()
        sure = self._calm(troubles)
        oracle.end_delete(life.slot, life.number, intent, sure=sure, all_pages=True)

    def follow(self) -> None:
        began, troubles = now_ns(), self._troubles()
        self._store.follow()
        self._oracle.count(self._life.slot, Count.FOLLOWED)
        if self._calm(troubles) and not self._maimed:
            self._known_ns = max(self._known_ns, began)

    def check(self, names: Names) -> None:
        """Reads pages, and has them judged."""
        for start in range(0, len(names), _BATCH):
            self._check(names[start : start + _BATCH])

    def _check(self, names: Names) -> None:
        oracle, life = self._oracle, self._life
        known, troubles = self._known_ns, self._troubles()
        before, pages = self._read(names)
        verdict = self._judge(before, pages, self._valid(known, troubles))
        with oracle.lock:
            counts = oracle.counts[life.slot]
            counts[Count.COMPARED] += verdict.compared
            counts[Count.LOOKED_FOR] += verdict.looked_for
            counts[Count.FOUND] += verdict.found
            counts[Count.GONE_LOOKED_FOR] += verdict.gone_looked_for
        # All at once: this process may be killed before it has looked again.
        blamed = [(self._blame(k, note, n, g), n, k) for n, k, g, note in verdict.faults]
        for number, name, kind in blamed[:3]:
            again = self._again(name, kind)
            with oracle.lock:
                oracle.journal.add_to_fault(number, f" ({again})")
        patient = now_ns() - PATIENCE_NS
        if patient > self._board.calm_since_ns[life.slot] and not verdict.faults:
            late = self._judge(before, pages, self._valid(patient, troubles))
            if late.faults:
                self._follower_is_late(late.faults)

    def _follower_is_late(self, faults: list[tuple[int, Finding, int, str]]) -> None:
        """What a follower should have seen long ago: does one look find it?"""
        troubles = self._troubles()
        self.follow()
        names, known = np.array([name for name, *_ in faults]), self._known_ns
        before, pages = self._read(names)
        valid = self._valid(known, troubles)
        verdict = self._judge(before, pages, valid)
        for name, kind, generation, note in verdict.faults:
            self._blame(kind, f"{note} (also after another look)", name, generation)
        if not verdict.faults and not self._blamed_follower:
            self._blamed_follower = True
            name, kind, generation, note = faults[0]
            self._blame(
                Finding.FOLLOWER_STOPPED,
                f"{note}, until `follow` was called ({kind.name.lower()})", name, generation,
            )  # fmt: skip

    def _again(self, name: int, kind: Finding) -> str:
        """Whether another look mends a fault."""
        began = now_ns()
        self._store.follow()
        before, pages = self._read(np.array([name]))
        verdict = self._judge(before, pages, began)
        if any(again is kind for _, again, _, _ in verdict.faults):
            return "also after another look"
        return "not any more after another look"

    def _judge(self, before: Seen, pages: list[bytes | str], known_ns: int) -> Verdict:
        life = self._life
        return self._oracle.judge(before, pages, life.slot, life.number, known_ns)

    def _read(self, names: Names) -> tuple[Seen, list[bytes | str]]:
        """(what held before, each page's bytes or how its read ended otherwise)."""
        before = self._oracle.look(self._life.slot, names)
        pages = [page_of(self._oracle.room, before.epoch, name) for name in names.tolist()]
        into = [memoryview(bytearray(page.nbytes)) for page in pages]
        job = self._store.read(
            [PageRead(page.key, [b], page.pool) for page, b in zip(pages, into, strict=True)]
        )
        if not job.wait(120):
            raise RuntimeError("a read did not end within 120 seconds")
        ended = zip(into, job.outcomes, strict=True)
        return before, [
            bytes(b) if how is ReadOutcome.OK else str(how and how.name) for b, how in ended
        ]

    def _act_on(self, seed: int) -> None:
        drawn = chance(seed)
        parent, calls = os.getppid(), self._life.calls
        for _ in itertools.count() if calls is None else range(calls):
            if self._told_to_stop() or os.getppid() != parent:
                return
            try:
                self._act(drawn)
            except BaseException:
                self._blame(Finding.EXCEPTION, traceback.format_exc())
            time.sleep(drawn.expovariate(1 / self._life.rest_s))

    def _act(self, drawn: random.Random) -> None:
        act = drawn.random()
        some = np.array(sorted(drawn.sample(range(self._oracle.names), drawn.randint(1, 24))))
        if act < 0.4:
            if self._life.writes:
                self.put(some)
        elif act < 0.65:
            self.check(some)
        elif act < 0.75:
            self.delete(some[:8])
        elif act < 0.752:
            self.clear()
        elif act < 0.85:
            if self._life.follows:
                self.follow()
            known = self._oracle.gone() if drawn.random() < 0.5 else self._oracle.owed()
            self.check(np.array(sorted(drawn.sample(known.tolist(), min(60, len(known)))), int))
        elif act < 0.95:
            self._stats()
        else:
            pages = [page_of(self._oracle.room, self._oracle.epoch, name) for name in some.tolist()]
            self._store.lookup([page.key for page in pages])

    def _stats(self) -> None:
        try:
            evicted = self._store.stats().pages_evicted
            with self._oracle.lock:
                self._oracle.counts[self._life.slot, Count.EVICTED] += evicted - self._evicted
                self._evicted = evicted
        except Exception:
            self._blame(Finding.STATS_RAISED, traceback.format_exc())
        alive = {thread.name for thread in threading.enumerate()}
        followed = isinstance(self._store, DiskStore)
        if followed and _FOLLOWER not in alive and not self._blamed_follower:
            self._blamed_follower = True
            self._blame(Finding.FOLLOWER_STOPPED, "its thread has ended")

    def _watch_evictions(self, store: DiskStore) -> None:
        """Tells the account of each page that is evicted for another one, before it is gone. Where
        there is room for all, that is a fault unless this process is in trouble.
        """
        room, table = store._room, store._core.table
        take, drop = room.take, table.drop
        taking = False  # the store's lock guards it

        def take_watched(slot_bytes: int, count: int, tenant: int = 0) -> Rows:
            nonlocal taking
            taking = True
            try:
                return take(slot_bytes, count, tenant)
            finally:
                taking = False

        def drop_watched(rows: Rows) -> Rows:
            if taking and len(rows):
                self._evicts({bytes(key) for key in table.keys[rows].view("V32").reshape(-1)})
            return drop(rows)

        room.take = take_watched  # type: ignore[method-assign]
        table.drop = drop_watched  # type: ignore[method-assign]

    def _evicts(self, keys: set[bytes]) -> None:
        oracle, life, epoch = self._oracle, self._life, self._oracle.epoch
        names = [n for n in self._all.tolist() if page_of(oracle.room, epoch, n).key in keys]
        evicted = oracle.begin_evicting(life.slot, life.number, np.array(names, np.int64))
        self._mine.evicted.append(evicted)
        if self._calm(self._mine.troubles) and epoch == oracle.epoch != 0:
            self._blame(Finding.LOST, f"pages {names} were evicted although there was room")

    def _valid(self, known_ns: int, troubles: int) -> int:
        """`known_ns`, or 0 where what this process has found since then says nothing."""
        return known_ns if self._calm(troubles) and not self._maimed else 0

    def _troubles(self) -> int:
        return int(self._board.troubles[self._life.slot])

    def _calm(self, since: int) -> bool:
        return self._board.calm(self._life.slot, since)

    def _told_to_stop(self) -> bool:
        return bool(self._board.stop[self._life.slot])

    def _blame(self, kind: Finding, note: str, name: int = -1, of: int = 0) -> int:
        return self._oracle.blame(kind, self._life.number, note, name, of)

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._blame(Finding.EXCEPTION, f"{what}: {traceback.format_exc()}")

    def watch_threads(self) -> None:
        """From now on what ends a thread, and what is logged as an exception, is a fault."""

        def ended(args: Any) -> None:
            text = "".join(traceback.format_exception(args.exc_value))
            self._blame(Finding.EXCEPTION, f"thread {args.thread and args.thread.name}: {text}")

        def ignored(args: Any) -> None:
            self._blame(Finding.EXCEPTION, f"ignored: {args.exc_value!r} in {args.object!r}")

        threading.excepthook = ended
        sys.unraisablehook = ignored
        logger = logging.getLogger(_LOGGERS)
        logger.propagate = False
        logger.handlers = [_Blaming(self)]
        for name in (_LOGGERS, f"{_LOGGERS}.store"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _env_of(oracle: SharedOracle, board: Board, life: Life) -> Env:
    """The operating system of a life. Its plan of failing calls is this process's from now on."""
    if life.point is not None:
        return DeadlyEnv(life.point, life.nth, oracle.lock)
    return TroubledEnv(chance(life.seed, "calls")) if life.troubled else OwnersEnv(board, life.slot)


def _folder_number(store: Any) -> int:
    """Which of the owners' folders a store has, from 1 on; 0 where it has none."""
    if not isinstance(store, DiskStore):
        return 0
    number = os.path.basename(store.folder).partition(".")[2]
    return int(number or 1)


class _Blaming(logging.Handler):
    """Exceptions in the log of the store are faults."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(logging.ERROR)
        self._owner = owner

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            text = "".join(traceback.format_exception(*record.exc_info))
            self._owner._blame(Finding.EXCEPTION, f"logged: {record.getMessage()}: {text}")


def live(oracle: SharedOracle, board: Board, life: Life, opener: Opener = open_owner) -> None:
    """The whole life of a forked process: never returns."""
    status = 1
    try:
        oracle.lock.attach()
        owner = Owner(oracle, board, life, opener)
        owner.watch_threads()
        if life.same_pid:
            os.getpid = lambda: 1
        if life.descriptors is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            allowed = len(os.listdir("/proc/self/fd")) + life.descriptors
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if owner.open():
            owner.work()
            owner.close()
        status = 0
    finally:
        os._exit(status)
