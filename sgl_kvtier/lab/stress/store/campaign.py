"""Processes that own folders of pages, killed, stopped, suspended and troubled one after the other:
at random moments, or within a system call.

They put, read, delete and clear pages. In one folder there is room for everything; in the other the
owners evict. Several owners of a folder have the same pages, follow each other, and have different
capacities. What each may find is the account of `shared_oracle.py`; every process begins with a
look at all pages. Random numbers come from the seed; which process is faster does not.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.lab.stress.store.oracle import CAPACITY, SEGMENT, occupied
from sgl_kvtier.lab.stress.store.owner import Board, Life, Opener, live, open_owner
from sgl_kvtier.lab.stress.store.shared_oracle import Act, Count, How, Journal, SharedOracle, now_ns
from sgl_kvtier.lab.stress.trouble import OF_A_STORE, Finding, chance, resume, suspend

AMPLE = (2 << 30, 1 << 30, 4 << 30)
EVICTING = (8 << 20, 4 << 20, 2 << 20)
LITTLE = (CAPACITY, CAPACITY // 2)
_HISTORIES = 10
_PATIENT_S = 90.0
"""Seconds after which a process that was told to stop, or opened for the last look, hangs."""
_NEVER = 1 << 62
_SEGMENT = 256 << 10
_SETTLED_S = 5.0
"""Seconds after a trouble in which the owners come back to their capacity."""
_SHIFTS_S = (0, 0, 30, -30, 3600, -3600, 86_400, -86_400)

_DELETED_S = 5.0
"""Half of the kills come right after a delete was answered, if one is within that time."""
_CUT = 0.2
"""Share of the kills after which the logs of a folder that no process has end in the middle of a
frame. It looks as if the frame had been written at that moment.
"""
_CALLS = 40
"""Calls of a process that is to kill itself."""

_ACTS = (
    ("kill", 50), ("stop", 20), ("suspend", 10), ("step_clock", 7), ("step_own_clock", 3),
    ("short_of_descriptors", 5), ("disk_full", 4), ("take_folder", 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """How much, how fast, and by whom."""

    ends: int
    """Kills and orderly stops together."""
    gap_s: float
    """Seconds between two acts of the campaign, on average."""
    longest_s: float = 0.0
    """Seconds that an owner is suspended for at most."""
    owners: int = 3
    """Processes of a folder at all times."""
    more: int = 2
    """And at most so many that come later."""
    names: int = 1200
    acts: tuple[tuple[str, int], ...] = _ACTS
    """What is done to the processes, and how often."""
    rooms: tuple[tuple[int, ...], ...] = (AMPLE, EVICTING)
    """The capacities of each folder's owners."""
    threads: int = 2
    rest_s: float = 0.02
    troubled: bool = False
    """The writes of half of the processes are slow and fail at times. Then no page is owed."""


def alone(kills: int, threads: int = 1, *, troubled: bool = False) -> Plan:
    """A process of its own in each of two folders, killed again and again."""
    return Plan(
        kills, 0.05, owners=1, more=0, names=150, acts=(("kill", 1),), rooms=(AMPLE, LITTLE),
        threads=threads, rest_s=0.002, troubled=troubled,
    )  # fmt: skip


@dataclass(slots=True)
class _Running:
    """A process of a folder."""

    life: Life
    pid: int
    suspended_until: float = 0.0
    trouble_until: float = 0.0
    stopping_since: float = 0.0


@dataclass(slots=True)
class _Folder:
    """One folder, its processes and its account."""

    root: str
    capacities: tuple[int, ...]
    oracle: SharedOracle
    board: Board
    running: dict[int, _Running] = field(default_factory=dict)
    begin_at: dict[int, float] = field(default_factory=dict)
    """When the next process begins in a slot."""
    epochs: int = 1
    taken_at: float = 0.0
    """When the folder is given up for a new one; 0 while it stands."""
    over_cap_bytes: int = 0
    troubled_at: float = 0.0
    """The last moment at which a process may have missed what others hold."""


class Campaign:
    """The whole campaign."""

    def __init__(self, root: str, seed: int, plan: Plan, opener: Opener = open_owner) -> None:
        self._chance = chance(seed, "campaign")
        self._plan = plan
        self._opener = opener
        self._root = root
        self._lives = 0
        self.acts: Counter[str] = Counter()
        self.journal = Journal(os.path.join(root, "lock"))
        self.folders: list[_Folder] = []
        for number, capacities in enumerate(plan.rooms):
            path = os.path.join(root, str(number))
            os.mkdir(path, 0o700)
            slots = plan.owners + plan.more
            owes = min(capacities) >= min(AMPLE) and not plan.troubled
            oracle = SharedOracle(self.journal, number, plan.names, slots, owes=owes)
            folder = _Folder(path, capacities, oracle, Board(slots))
            self.folders.append(folder)

    def run(self, step: Callable[[int], None] = lambda _: None) -> None:
        """Until as many processes as asked were killed or stopped, and all pages looked at once
        more.
        """
        with self._ending():
            for folder in self.folders:
                folder.begin_at = dict.fromkeys(range(self._plan.owners), 0.0)
            next_at = time.monotonic()
            while (ended := self._ended()) < self._plan.ends:
                time.sleep(0.005)
                for folder in self.folders:
                    self._tend(folder)
                if time.monotonic() >= next_at:
                    next_at = time.monotonic() + self._chance.expovariate(1 / self._plan.gap_s)
                    self._act(self._chance.choice(self.folders))
                step(self._ended() - ended)
            for folder in self.folders:
                self._calm(folder)
                self._end_all(folder)
                self._look_once_more(folder)

    def kill_at(
        self, point: tuple[str, str], kills: int, step: Callable[[int], None] = lambda _: None
    ) -> int:
        """Processes that kill themselves there, in each folder in turn, all pages being looked at
        behind each. Returns how many got there: as many as asked, unless most do not.
        """
        done, rare = 0, point[0] in ("rename", "unlink", "allocate", "list", "lock", "size")
        with self._ending():
            for number in range(20 * kills + 20):
                if done == kills:
                    break
                folder = self.folders[number % len(self.folders)]
                if not folder.oracle.total(Count.PUT):
                    # Some are on the way to every first page: they would be met in an empty folder.
                    self._let_live(folder)
                nth = self._chance.randint(1, 2 if rare else 12)
                killed = self._let_live(folder, point, nth)
                self._look_once_more(folder)
                done += killed
                step(killed)
        return done

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """No process is left behind the block."""
        try:
            yield
        finally:
            for folder in self.folders:
                for running in list(folder.running.values()):
                    self._end(folder, running, signal.SIGKILL, counted=False)
            self.journal.lock.close()

    @property
    def faults(self) -> int:
        """What must not happen and did until now."""
        return sum(int(folder.oracle.fault_counts.sum()) for folder in self.folders)

    def result(self) -> dict[str, Any]:
        """All counts; what must be 0 has the name of its fault."""
        counts = {
            what.name.lower(): sum(f.oracle.total(what) for f in self.folders) for what in Count
        }
        faults = {
            kind.name.lower(): sum(int(f.oracle.fault_counts[kind]) for f in self.folders)
            for kind in OF_A_STORE
        }
        acts = {name: self.acts[name] for name in (*dict(_ACTS), "cut_log")}
        found: dict[str, Any] = acts | counts | faults
        found["over_cap_bytes"] = max(folder.over_cap_bytes for folder in self.folders)
        found["seconds"] = round((now_ns() - self.journal.began_ns) / 1e9, 1)
        kept = self.journal.faults()
        first = [[f for f in kept if f["kind"] == kind][: _HISTORIES // 3] for kind in OF_A_STORE]
        found["histories"] = [self.journal.history(fault) for some in first for fault in some]
        return found

    def _ended(self) -> int:
        return self.acts["kill"] + self.acts["stop"]

    def _act(self, folder: _Folder) -> None:
        names, weights = zip(*self._plan.acts, strict=True)
        name = self._chance.choices(names, weights)[0]
        if folder.taken_at:
            return
        if name == "take_folder":
            self._take(folder)
        elif name == "step_clock":
            seconds = self._chance.choice(_SHIFTS_S)
            with folder.oracle.lock:
                folder.board.step_clock(seconds * 10**9)
                folder.oracle.note(Act.CLOCK_STEPPED, 0, How.ALL, seconds)
        else:
            able = [r for r in folder.running.values() if not r.stopping_since]
            if name not in ("kill", "stop"):
                able = [r for r in able if not r.suspended_until and not r.trouble_until]
            if not able:
                return
            getattr(self, f"_{name}")(folder, self._chance.choice(able))
            if name in ("kill", "stop"):
                return
        self.acts[name] += 1

    def _kill(self, folder: _Folder, running: _Running) -> None:
        if self._chance.random() < 0.5 and not running.suspended_until:
            deletes = folder.oracle.counts[running.life.slot, [Count.DELETES, Count.CLEARS]]
            until = time.monotonic() + _DELETED_S
            while (
                time.monotonic() < until
                and (
                    deletes
                    == folder.oracle.counts[running.life.slot, [Count.DELETES, Count.CLEARS]]
                ).all()
            ):
                time.sleep(0.0005)
        self._end(folder, running, signal.SIGKILL)

    def _stop(self, folder: _Folder, running: _Running) -> None:
        self._continue(folder, running)
        running.stopping_since = time.monotonic()
        folder.board.stop[running.life.slot] = True

    def _suspend(self, folder: _Folder, running: _Running) -> None:
        seconds = self._chance.choice((0.02, 0.1, 0.4, 1.0)) * self._plan.longest_s
        with folder.oracle.lock:
            # It stands before the lock is free again: it must not be suspended while it has it.
            suspend(running.pid)
            folder.board.calm_since_ns[running.life.slot] = _NEVER
            folder.oracle.note(Act.SUSPENDED, running.life.number)
        running.suspended_until = time.monotonic() + seconds

    def _continue(self, folder: _Folder, running: _Running) -> None:
        if not running.suspended_until:
            return
        running.suspended_until = 0.0
        with folder.oracle.lock:
            folder.board.calm_since_ns[running.life.slot] = now_ns()
            folder.oracle.note(Act.CONTINUED, running.life.number)
        resume(running.pid)

    def _step_own_clock(self, folder: _Folder, running: _Running) -> None:
        seconds = self._chance.choice(_SHIFTS_S)
        with folder.oracle.lock:
            folder.board.own_shift_ns[running.life.slot] = seconds * 10**9
            folder.oracle.note(Act.CLOCK_STEPPED, running.life.number, How.ONE, seconds)

    def _short_of_descriptors(self, folder: _Folder, running: _Running) -> None:
        self._trouble(folder, running, How.DESCRIPTORS)
        soft = len(os.listdir(f"/proc/{running.pid}/fd")) + self._chance.choice((0, 1, 3))
        _limit_descriptors(running.pid, soft)

    def _disk_full(self, folder: _Folder, running: _Running) -> None:
        self._trouble(folder, running, How.DISK_FULL)

    def _trouble(self, folder: _Folder, running: _Running, kind: How) -> None:
        slot, board = running.life.slot, folder.board
        with folder.oracle.lock:
            board.calm_since_ns[slot] = _NEVER
            board.troubles[slot] += 1
            if kind is How.DISK_FULL:
                board.disk_full[slot] = True
            folder.oracle.note(Act.TROUBLE_BEGAN, running.life.number, kind)
        running.trouble_until = time.monotonic() + self._chance.uniform(0.1, 2.0)

    def _end_trouble(self, folder: _Folder, running: _Running) -> None:
        slot, board = running.life.slot, folder.board
        running.trouble_until = 0.0
        _limit_descriptors(running.pid, None)
        with folder.oracle.lock:
            board.disk_full[slot] = False
            board.troubles[slot] += 1
            if not running.suspended_until:
                board.calm_since_ns[slot] = now_ns()
            folder.oracle.note(Act.TROUBLE_ENDED, running.life.number)

    def _take(self, folder: _Folder) -> None:
        """Renames or removes the folder of the identity, or one owner's, beneath its processes."""
        with folder.oracle.lock:
            folder.oracle.begin_anew(0)
            folder.oracle.note(Act.FOLDER_GONE, 0)
        namespaces = [entry.path for entry in os.scandir(folder.root) if entry.name != "away"]
        for namespace in namespaces:
            ranks = [entry.path for entry in os.scandir(namespace) if entry.is_dir()]
            if ranks and self._chance.random() < 0.5:
                shutil.rmtree(self._chance.choice(ranks), ignore_errors=True)
            else:
                os.rename(namespace, os.path.join(folder.root, "away"))
        folder.taken_at = time.monotonic() + self._chance.uniform(0.0, 1.0)

    def _give_new_folder(self, folder: _Folder) -> None:
        """A new folder at the same place, once all that worked in the old one have ended."""
        self._end_all(folder)
        shutil.rmtree(folder.root)
        os.mkdir(folder.root, 0o700)
        folder.epochs += 1
        with folder.oracle.lock:
            folder.oracle.begin_anew(folder.epochs)
        folder.taken_at = 0.0
        folder.begin_at = dict.fromkeys(range(self._plan.owners), 0.0)

    def _tend(self, folder: _Folder) -> None:
        """What is due in a folder, and who has ended there."""
        now = time.monotonic()
        for running in list(folder.running.values()):
            if running.suspended_until and now >= running.suspended_until:
                self._continue(folder, running)
            if running.trouble_until and now >= running.trouble_until:
                self._end_trouble(folder, running)
            self._reap(folder, running)
        if folder.taken_at:
            if now >= folder.taken_at:
                self._give_new_folder(folder)
            return
        for slot, at in list(folder.begin_at.items()):
            if now >= at:
                del folder.begin_at[slot]
                self._begin(folder, slot)
        slots = range(self._plan.owners, self._plan.owners + self._plan.more)
        more = [slot for slot in slots if slot not in folder.running]
        if more and self._chance.random() < 0.0005 / self._plan.gap_s:
            self._begin(folder, more[0])

    def _begin(
        self,
        folder: _Folder,
        slot: int,
        *,
        last: bool = False,
        calls: int | None = None,
        point: tuple[str, str] | None = None,
        nth: int = 1,
    ) -> None:
        """`last`: the process only looks at all pages. The others as in `Life`."""
        drawn, board, plan = self._chance, folder.board, self._plan
        self._lives += 1
        short = "short_of_descriptors" in dict(plan.acts) and not last and drawn.random() < 0.06
        life = Life(
            number=self._lives,
            slot=slot,
            seed=drawn.getrandbits(60),
            config=StoreConfig(
                path=folder.root,
                capacity_bytes=drawn.choice(folder.capacities),
                segment_bytes=drawn.choice((SEGMENT, _SEGMENT)),
                min_free_bytes=0,
                io_threads=2,
                native_io=drawn.random() < 0.8,
                io=drawn.choice(("auto", "threads")),
                direct_io=drawn.choice(("auto", "off")),
                durable=drawn.random() < 0.05 or (point is not None and point[0] == "sync"),
            ),
            writes=drawn.random() < 0.9,
            follows=drawn.random() < 0.6,
            same_pid=drawn.random() < 0.5,
            descriptors=drawn.randrange(3, 40) if short else None,
            only_looks=last,
            threads=plan.threads,
            rest_s=plan.rest_s,
            calls=calls,
            point=point,
            nth=nth,
            troubled=plan.troubled and not last and drawn.random() < 0.5,
        )
        board.stop[slot] = False
        board.own_shift_ns[slot] = 0
        board.disk_full[slot] = False
        board.troubles[slot] = 1 if short else 0
        board.calm_since_ns[slot] = _NEVER if short else now_ns()
        with folder.oracle.lock:
            folder.oracle.note(Act.BEGAN, life.number)
        pid = os.fork()
        if pid == 0:
            live(folder.oracle, board, life, self._opener)
        folder.running[slot] = running = _Running(life, pid)
        if short:
            running.trouble_until = time.monotonic() + drawn.uniform(0.3, 2.0)

    def _end(
        self, folder: _Folder, running: _Running, how: signal.Signals, *, counted: bool = True
    ) -> None:
        """Kills a process while no process is within the account."""
        with folder.oracle.lock:
            os.kill(running.pid, how)
            _, status = os.waitpid(running.pid, 0)
            folder.oracle.bury(running.life.slot)
            folder.oracle.note(Act.KILLED, running.life.number)
        if counted and status != how and not running.stopping_since:
            self._blame_for_ending(folder, running, status)
        self.acts["kill"] += counted
        self._gone(folder, running)
        if counted and not folder.running and self._chance.random() < _CUT:
            self.acts["cut_log"] += 1
            for log in Path(folder.root).glob("*/*/index.log"):
                with log.open("ab") as file:
                    file.write(b"KVTF")

    def _reap(self, folder: _Folder, running: _Running) -> bool:
        """Notices a process that has ended by itself, or hangs when it was told to stop. Returns
        whether it killed itself where it was to.
        """
        pid, status = os.waitpid(running.pid, os.WNOHANG)
        stopping = running.stopping_since
        if not pid:
            if stopping and time.monotonic() - stopping > _PATIENT_S:
                note = f"the process did not stop within {_PATIENT_S:.0f} seconds"
                folder.oracle.blame(Finding.EXCEPTION, running.life.number, note)
                self._end(folder, running, signal.SIGKILL)
            return False
        killed = running.life.point is not None and status == signal.SIGKILL
        with folder.oracle.lock:
            folder.oracle.bury(running.life.slot)
            act = Act.STOPPED if stopping else Act.KILLED if killed else Act.ENDED_BY_ITSELF
            folder.oracle.note(act, running.life.number)
        if not killed and (status or not (stopping or running.life.ends_itself)):
            self._blame_for_ending(folder, running, status)
        self.acts["stop"] += bool(stopping) and not running.life.ends_itself
        self.acts["kill"] += killed
        self._gone(folder, running)
        return killed

    def _blame_for_ending(self, folder: _Folder, running: _Running, status: int) -> None:
        note = f"the process ended by itself with status {os.waitstatus_to_exitcode(status)}"
        folder.oracle.blame(Finding.EXCEPTION, running.life.number, note)

    def _gone(self, folder: _Folder, running: _Running) -> None:
        """Measures the folder, and lets another process begin in its place."""
        slot = running.life.slot
        del folder.running[slot]
        if slot < self._plan.owners:
            wait_s = self._chance.choice((0.0, 0.0, 0.5, 2.0)) * min(1.0, 2 * self._plan.gap_s)
            folder.begin_at[slot] = time.monotonic() + wait_s
        now = time.monotonic()
        if any(other.trouble_until for other in folder.running.values()):
            folder.troubled_at = now
        settled = now - folder.troubled_at > _SETTLED_S and not self._plan.troubled
        if settled and not folder.taken_at:
            most = max(folder.capacities) + (self._plan.owners + self._plan.more) * _SEGMENT
            folder.over_cap_bytes = max(folder.over_cap_bytes, occupied(folder.root) - most)

    def _calm(self, folder: _Folder) -> None:
        for running in list(folder.running.values()):
            self._continue(folder, running)
            if running.trouble_until:
                self._end_trouble(folder, running)

    def _end_all(self, folder: _Folder) -> None:
        for running in list(folder.running.values()):
            if not running.stopping_since and self._chance.random() < 0.5:
                self._end(folder, running, signal.SIGKILL)
            elif not running.stopping_since:
                self._stop(folder, running)
        self._wait_for_stopping(folder)
        folder.begin_at.clear()

    def _wait_for_stopping(self, folder: _Folder) -> None:
        self._calm(folder)
        while folder.running:
            time.sleep(0.01)
            for running in list(folder.running.values()):
                self._reap(folder, running)

    def _look_once_more(self, folder: _Folder) -> None:
        """One process opens the folder alone, and looks at every page."""
        if folder.taken_at:
            return
        self._begin(folder, 0, last=True)
        folder.running[0].stopping_since = time.monotonic()
        self._wait_for_stopping(folder)

    def _let_live(
        self, folder: _Folder, point: tuple[str, str] | None = None, nth: int = 1
    ) -> bool:
        """One process that ends after some calls, or kills itself before; returns whether it
        did.
        """
        self._begin(folder, 0, calls=_CALLS, point=point, nth=nth)
        running = folder.running[0]
        running.stopping_since = time.monotonic()
        killed = False
        while folder.running:
            time.sleep(0.001)
            killed = self._reap(folder, running)
        return killed


def _limit_descriptors(pid: int, soft: int | None) -> None:
    """Limits the files that a process may open; None: as many as before."""
    own, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (own if soft is None else soft, hard))
