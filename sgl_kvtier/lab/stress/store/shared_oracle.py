"""What the owners of one shared folder must find, and must not find any more: an exact account in
memory that all their processes share.

A name stands for one key. Its pages come in generations: a page that was deleted may be put again,
and then has other bytes, so that a deleted page that comes back is told from the new one. Every
change of the account happens under a lock that the campaign also holds while it kills or suspends
a process. The account therefore never stops half way.

Of each name the account knows one of three things:

- *owed*: a put was answered STORED or KEPT, and no delete or clear has begun since that put began.
  Whoever stored it must find the page, and so must all that opened the folder or began to follow it
  after the answer. A process that is putting the page itself may miss it meanwhile.
- *gone*: a delete or clear was answered, and no put of the page was in flight meanwhile. The
  process that deleted it must not find it any more, and neither must any other that opened or
  began to follow after the answer. Where the deleter could not tell others, only the first holds.
- neither: something was in flight, a process died before its answer, or an owner that could not
  make a segment evicted the page. Only the bytes are judged.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.lab.stress.trouble import OF_A_STORE, Finding
from sgl_kvtier.store.base import PutOutcome
from sgl_kvtier.types import PageKey

Names = NDArray[np.int64]

SIZES = (3000, 8192, 20_000)
POOLS = ("kv", "kv", "kv", "kv", "swa")
_NOISE = np.random.default_rng(20_261_126).bytes(1 << 20)
_HEAD = struct.Struct("<QII32s")
_EVENTS = 1 << 20
_FAULTS = 1000
_NOTE_BYTES = 1800
_SHOWN_EVENTS = 60
_UNTOLD = 1 << 62
"""As the moment since which a page is gone: only for the process that deleted it."""


class Count(IntEnum):
    """What the owners count."""

    PUT = 0
    """Pages that a put was answered STORED or KEPT for."""
    REFUSED = 1
    COMPARED = 2
    """Pages that were returned, each compared with its bytes."""
    LOOKED_FOR = 3
    """Pages looked for that were owed."""
    FOUND = 4
    """Those of them that were found."""
    GONE_LOOKED_FOR = 5
    """Pages looked for that were gone."""
    DELETES = 6
    """Pages that a delete was answered for."""
    CLEARS = 7
    OPENED = 8
    REFUSED_OPENS = 9
    """Opens that a shortage of descriptors or of space refused with a sentence."""
    FOLLOWED = 10
    EVICTED = 11
    IO_URING = 12
    """Stores opened with these I/O threads (`DiskStore.io`)."""
    THREADS = 13
    PYTHON = 14


class Act(IntEnum):
    """An event of the history."""

    OPENED = 0
    PUT_BEGAN = 1
    PUT_ANSWERED = 2
    DELETE_BEGAN = 3
    DELETE_ANSWERED = 4
    CLEAR_BEGAN = 5
    CLEAR_ANSWERED = 6
    KILLED = 7
    STOPPED = 8
    SUSPENDED = 9
    CONTINUED = 10
    CLOCK_STEPPED = 11
    TROUBLE_BEGAN = 12
    TROUBLE_ENDED = 13
    FOLDER_GONE = 14
    BEGAN = 15
    ENDED_BY_ITSELF = 16
    EVICTED = 17


class How(IntEnum):
    """What an event of the history says beside its act."""

    NOTHING = 0
    OWED = 1
    REFUSED = 2
    NOT_OWED = 3
    GONE = 4
    UNSURE = 5
    DESCRIPTORS = 6
    DISK_FULL = 7
    ONE = 8
    ALL = 9
    OWED_AND_KEPT = 10
    """The put found the page there already."""


_EVENT = np.dtype(
    [
        ("at", "<i8"),
        ("life", "<u4"),
        ("name", "<i4"),
        ("generation", "<i4"),
        ("act", "u1"),
        ("how", "u1"),
        ("room", "u1"),
        ("epoch", "u1"),
    ]
)
_FAULT = np.dtype(
    [
        ("at", "<i8"),
        ("kind", "u1"),
        ("life", "<u4"),
        ("name", "<i4"),
        ("generation", "<u4"),
        ("room", "u1"),
        ("epoch", "u1"),
        ("note", f"S{_NOTE_BYTES}"),
    ]
)


_ACCOUNT = np.dtype(
    [
        ("generation", "<u4"),
        ("owed_since", "<i8"),
        ("putter", "<u4"),
        ("gone_since", "<i8"),
        ("deleter", "<u4"),
        ("earlier_gone_since", "<i8"),
        ("earlier_deleter", "<u4"),
        ("delete_over", "<i8"),
        ("deletes", "<u4"),
        ("unsure", "?"),
    ]
)
"""What is known of a name. Moments are of `now_ns`, 0 where there is none; who did it is a life."""


def now_ns() -> int:
    """Nanoseconds on the clock that all processes of this host share, which is never set."""
    return time.monotonic_ns()


def shared_array(shape: int | tuple[int, ...], dtype: Any) -> Any:
    """An array of zeros in memory that forked processes share."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize))
    return np.frombuffer(memory, dtype, count).reshape(shape)


class Page(NamedTuple):
    """Where the page of a name lies. The key is another one in each epoch of a folder."""

    key: PageKey
    pool: str
    nbytes: int


@functools.lru_cache(1 << 14)
def page_of(room: int, epoch: int, name: int) -> Page:
    digest = hashlib.sha256(b"page %d %d %d" % (room, epoch, name)).digest()
    return Page(PageKey(digest), POOLS[name % len(POOLS)], SIZES[name % len(SIZES)])


def content(page: Page, generation: int) -> bytes:
    """A page's bytes: no other page or generation, and no other part of it, has the same ones."""
    digest = hashlib.sha256(page.key + page.pool.encode() + b"%d" % generation).digest()
    head = _HEAD.pack(generation, page.nbytes, 0, digest)
    rest = page.nbytes - len(head)
    start = int.from_bytes(digest[:8], "little") % (len(_NOISE) - rest)
    return head + _NOISE[start : start + rest]


def generation_of(page: Page, data: bytes) -> int | None:
    """The generation whose bytes these are; None where they are no generation's."""
    generation = int(_HEAD.unpack_from(data)[0])
    return generation if data == content(page, generation) else None


class SharedLock:
    """A lock among processes, and among their threads. A killed process lets go of it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._threads = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def attach(self) -> None:
        """In a forked process, before it is used there."""
        os.close(self._fd)
        self._threads = threading.Lock()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> None:
        self._threads.acquire()
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()


class Journal:
    """Events and faults of all rooms. Its lock is that of the rooms' oracles too."""

    def __init__(self, path: str) -> None:
        self.lock = SharedLock(path)
        self.began_ns = now_ns()
        self._events = shared_array(_EVENTS, _EVENT)
        self._faults = shared_array(_FAULTS, _FAULT)
        self._heads = shared_array(2, np.int64)

    # Below: with the lock held.

    def note(
        self,
        room: int,
        epoch: int,
        act: Act,
        life: int,
        names: Sequence[int] | Names = (-1,),
        generations: Any = 0,
        how: Any = 0,
    ) -> None:
        """One event for each name; -1 stands for the whole folder."""
        events = np.zeros(len(names), _EVENT)
        events["at"], events["life"], events["act"] = now_ns(), life, act
        events["name"], events["generation"], events["how"] = names, generations, how
        events["room"], events["epoch"] = room, epoch
        head = int(self._heads[0])
        self._events[(head + np.arange(len(names))) % _EVENTS] = events
        self._heads[0] = head + len(names)

    def fault(
        self,
        room: int,
        epoch: int,
        kind: Finding,
        life: int,
        note: str,
        name: int = -1,
        of: int = 0,
    ) -> int:
        """The fault's number. `of`: the generation. Faults beyond the first thousand are only
        counted.
        """
        head = int(self._heads[1])
        if head < _FAULTS:
            note_bytes = note.encode()[-_NOTE_BYTES:]
            self._faults[head] = (now_ns(), kind, life, name, of, room, epoch, note_bytes)
        self._heads[1] = head + 1
        return head

    def add_to_fault(self, number: int, note: str) -> None:
        """What was found out of a fault later."""
        if number < _FAULTS:
            known = bytes(self._faults[number]["note"])
            self._faults[number]["note"] = (known + note.encode())[-_NOTE_BYTES:]

    def faults(self) -> list[Any]:
        return list(self._faults[: min(int(self._heads[1]), _FAULTS)])

    def history(self, fault: Any) -> list[str]:
        """What is known of a fault, and what happened to its page and its folder before."""
        kind = Finding(int(fault["kind"])).label
        about = f"{kind}: folder {fault['room']}, life {fault['life']}"
        if fault["name"] >= 0:
            about += f", page {fault['name']}, generation {fault['generation']}"
        lines = [f"{self._at(fault)} {about}: {fault['note'].decode(errors='replace')}"]
        events = self._events[: min(int(self._heads[0]), _EVENTS)]
        events = events[(events["room"] == fault["room"]) & (events["at"] <= fault["at"])]
        if fault["name"] >= 0:
            of_page = events["name"] == fault["name"]
            lives = np.unique(events["life"][of_page])
            # Of other processes only what changes the folder for all of them.
            large = np.isin(events["act"], (Act.CLOCK_STEPPED, Act.FOLDER_GONE, Act.CLEAR_BEGAN))
            concerned = np.isin(events["life"], [*lives.tolist(), int(fault["life"])]) | large
            events = events[of_page | ((events["name"] < 0) & concerned)]
        else:
            events = events[events["name"] < 0]
        events = events[np.argsort(events["at"], kind="stable")][-_SHOWN_EVENTS:]
        return lines + [f"  {self._at(event)} {_told(event)}" for event in events]

    def _at(self, what: Any) -> str:
        return f"{(int(what['at']) - self.began_ns) / 1e9:9.3f} s"


def _told(event: Any) -> str:
    act = Act(int(event["act"])).name.lower().replace("_", " ")
    page = f", page {event['name']}, generation {event['generation']}" if event["name"] >= 0 else ""
    how = f" ({How(int(event['how'])).name.lower().replace('_', ' ')})" if event["how"] else ""
    if event["act"] == Act.CLOCK_STEPPED:
        page = f", now {event['generation']:+} s"
    if event["act"] == Act.OPENED:
        page = f", folder {event['generation']}"
    return f"life {event['life']} {act}{page}{how}"


@dataclass(frozen=True, slots=True)
class Intent:
    """Pages of a call that has begun, as they were then."""

    epoch: int
    names: Names
    generations: NDArray[np.uint32]
    deletes: NDArray[np.uint32]


class Seen(NamedTuple):
    """What the account says of some names at one moment."""

    names: Names
    epoch: int
    known: Any
    """Their rows of `_ACCOUNT`."""
    putting: NDArray[np.bool_]
    """Whether the reader puts the page itself."""
    put_steps: NDArray[np.uint32]


class Verdict(NamedTuple):
    """The judgement of one read."""

    faults: list[tuple[int, Finding, int, str]]
    """(name, kind, generation, what is known)."""
    compared: int
    looked_for: int
    found: int
    gone_looked_for: int


class SharedOracle:
    """The account of one folder. Any process and thread; `attach` the journal's lock first."""

    def __init__(
        self, journal: Journal, room: int, names: int, slots: int, *, owes: bool = True
    ) -> None:
        """Of up to `slots` processes at a time. Where pages are evicted none is owed."""
        self.journal = journal
        self.lock = journal.lock
        self.room = room
        self.names = names
        self.owes = owes
        self._epoch = shared_array(1, np.int64)
        self._epoch[0] = 1
        self._known: Any = shared_array(names, _ACCOUNT).view(np.recarray)
        self._putting = shared_array((slots, names), np.uint16)
        self._put_steps = shared_array((slots, names), np.uint32)
        """Beginnings and ends of puts."""
        self._deleting = shared_array((slots, names), np.uint16)
        self.counts = shared_array((slots, len(Count)), np.int64)
        self.fault_counts = shared_array(len(OF_A_STORE), np.int64)

    @property
    def epoch(self) -> int:
        """Which of the folders that stood at this path; 0 while it is being taken away."""
        return int(self._epoch[0])

    def count(self, slot: int, what: Count, amount: int = 1) -> None:
        with self.lock:
            self.counts[slot, what] += amount

    def total(self, what: Count) -> int:
        return int(self.counts[:, what].sum())

    def blame(self, kind: Finding, life: int, note: str, name: int = -1, of: int = 0) -> int:
        """Counts a fault, and keeps it with what is known of it. Returns its number."""
        with self.lock:
            self.fault_counts[kind] += 1
            return self.journal.fault(self.room, self.epoch, kind, life, note, name, of)

    def note(self, act: Act, life: int, how: How = How.NOTHING, number: int = 0) -> None:
        """An event of the whole folder. With the lock held. `number`: the seconds that the clock is
        ahead by now, or which of the owners' folders was opened.
        """
        self.journal.note(self.room, self.epoch, act, life, generations=number, how=how)

    def begin_put(self, slot: int, life: int, epoch: int, names: Names, followed_ns: int) -> Intent:
        """The names that may be put, in the generation that they are put in. A deleted page is put
        again only by who must not find the old one any more.
        """
        with self.lock:
            if epoch != self.epoch:
                return self._intent(names[:0])
            gone = self._known.gone_since[names]
            knows = (self._known.deleter[names] == life) | (gone < followed_ns)
            names = names[(gone == 0) | knows]
            anew = names[self._known.gone_since[names] > 0]
            self._known.earlier_gone_since[anew] = self._known.gone_since[anew]
            self._known.earlier_deleter[anew] = self._known.deleter[anew]
            self._known.gone_since[anew] = 0
            self._known.generation[anew] += 1
            first = names[self._known.generation[names] == 0]
            self._known.generation[first] = 1
            self._known.unsure[names] |= self._deleting[:, names].any(axis=0)
            self._putting[slot, names] += 1
            self._put_steps[slot, names] += 1
            intent = self._intent(names)
            self._tell(Act.PUT_BEGAN, life, intent)
            return intent

    def end_put(
        self, slot: int, life: int, intent: Intent, outcomes: Sequence[PutOutcome], followed_ns: int
    ) -> None:
        """The page of an outcome STORED or KEPT is owed unless a delete was in flight, or one
        that this process may not know of yet had ended.
        """
        names = intent.names
        done = np.array([outcome.is_there for outcome in outcomes], np.bool_)
        kept = np.array([outcome is PutOutcome.KEPT for outcome in outcomes], np.bool_)
        with self.lock:
            self.counts[slot, Count.PUT] += int(done.sum())
            self.counts[slot, Count.REFUSED] += int((~done).sum())
            if intent.epoch != self.epoch:
                return
            self._putting[slot, names] -= 1
            self._put_steps[slot, names] += 1
            undeleted = (self._known.deletes[names] == intent.deletes) & ~self._deleting[
                :, names
            ].any(0)
            known = self._known.delete_over[names] < followed_ns
            owed = (
                done
                & self.owes
                & undeleted
                & known
                & (self._known.generation[names] == intent.generations)
            )
            fresh = names[owed & (self._known.owed_since[names] == 0)]
            self._known.owed_since[fresh] = now_ns()
            self._known.putter[fresh] = 0
            self._known.putter[names[owed & ~kept]] = life
            how = np.where(kept, How.OWED_AND_KEPT, How.OWED)
            how = np.where(owed, how, np.where(done, How.NOT_OWED, How.REFUSED))
            self._tell(Act.PUT_ANSWERED, life, intent, how)

    def begin_delete(
        self, slot: int, life: int, epoch: int, names: Names, *, all_pages: bool = False
    ) -> Intent:
        with self.lock:
            if epoch != self.epoch:
                return self._intent(names[:0])
            putting = self._putting[:, names].any(axis=0)
            deleting = self._deleting[:, names].any(axis=0)
            self._known.unsure[names] = putting | (self._known.unsure[names] & deleting)
            self._known.owed_since[names] = 0
            self._known.deletes[names] += 1
            self._deleting[slot, names] += 1
            intent = self._intent(names)
            self._tell(Act.CLEAR_BEGAN if all_pages else Act.DELETE_BEGAN, life, intent)
            if all_pages:
                self.note(Act.CLEAR_BEGAN, life)
            return intent

    def end_delete(
        self, slot: int, life: int, intent: Intent, *, sure: bool = True, all_pages: bool = False
    ) -> None:
        """The call was answered. Pages that no put was in flight of are gone. Not `sure`: the
        process could not tell others yet, and the delete is in flight until it ends.
        """
        names = intent.names
        with self.lock:
            if all_pages:
                self.counts[slot, Count.CLEARS] += 1
            else:
                self.counts[slot, Count.DELETES] += len(names)
            if intent.epoch != self.epoch:
                return
            if sure:
                self._deleting[slot, names] -= 1
                self._known.delete_over[names] = now_ns()
            certain = ~self._known.unsure[names] & (
                self._known.generation[names] == intent.generations
            )
            since = self._known.gone_since[names]
            new = names[certain & ((since == 0) | ((since == _UNTOLD) & sure))]
            self._known.gone_since[new] = now_ns() if sure else _UNTOLD
            self._known.deleter[new] = life
            how = np.where(certain, How.GONE, How.UNSURE)
            self._tell(Act.CLEAR_ANSWERED if all_pages else Act.DELETE_ANSWERED, life, intent, how)

    def begin_evicting(self, slot: int, life: int, names: Names) -> Intent:
        """Pages that are about to be overwritten with newer ones. They are no longer owed, and no
        put owes them again before the eviction has ended; nor are they gone, since another owner
        may have a copy.
        """
        with self.lock:
            self._known.owed_since[names] = 0
            self._known.deletes[names] += 1
            self._deleting[slot, names] += 1
            intent = self._intent(names)
            self._tell(Act.EVICTED, life, intent)
            return intent

    def end_evicting(self, slot: int, intent: Intent, *, told: bool) -> None:
        """The put that evicted them was answered. Not `told`: the log does not say so yet, and the
        eviction is in flight until its process ends.
        """
        with self.lock:
            if told and intent.epoch == self.epoch:
                self._deleting[slot, intent.names] -= 1
                self._known.delete_over[intent.names] = now_ns()

    def bury(self, slot: int) -> None:
        """With the lock held: the process in this slot has ended, and nothing that it began will be
        answered.
        """
        open_deletes = np.flatnonzero(self._deleting[slot])
        self._known.delete_over[open_deletes] = now_ns()
        untold = open_deletes[self._known.gone_since[open_deletes] == _UNTOLD]
        self._known.gone_since[untold] = 0
        self._putting[slot] = 0
        self._deleting[slot] = 0

    def begin_anew(self, epoch: int) -> None:
        """With the lock held: the folder was taken away with all its pages. Epoch 0: it is being
        taken away, and nothing is judged but bytes.
        """
        self._epoch[0] = epoch
        for array in (self._known, self._putting, self._deleting):
            array[:] = np.zeros((), array.dtype)

    def look(self, slot: int, names: Names) -> Seen:
        """What holds before a read of the process in this slot."""
        with self.lock:
            return self._seen(slot, names)

    def owed(self) -> Names:
        with self.lock:
            return np.flatnonzero(self._known.owed_since)

    def gone(self) -> Names:
        with self.lock:
            return np.flatnonzero(self._known.gone_since)

    def judge(
        self, before: Seen, pages: Sequence[bytes | str], slot: int, life: int, followed_ns: int
    ) -> Verdict:
        """Judges the pages that a read returned, or its outcome for others. The reader opened
        the folder, or began to follow it, at `followed_ns`, 0 where that says nothing.
        """
        with self.lock:
            after = self._seen(slot, before.names)
        old, new = before.known, after.known
        same_epoch = before.epoch == after.epoch != 0
        unchanged = (old.generation == new.generation) & same_epoch
        owed = (old.owed_since > 0) & (old.deletes == new.deletes) & unchanged
        owed &= (old.owed_since < followed_ns) | (old.putter == life)
        owed &= ~before.putting & (before.put_steps == after.put_steps)
        gone = (old.gone_since > 0) & (old.gone_since == new.gone_since) & unchanged
        gone &= (old.gone_since < followed_ns) | (old.deleter == life)
        earlier = (old.earlier_gone_since > 0) & same_epoch
        earlier &= (old.earlier_gone_since < followed_ns) | (old.earlier_deleter == life)
        faults: list[tuple[int, Finding, int, str]] = []
        found = 0
        for i, (name, data) in enumerate(zip(before.names.tolist(), pages, strict=True)):
            now = int(new.generation[i])
            if isinstance(data, str):
                if owed[i]:
                    faults.append(
                        (name, Finding.LOST, now, f"the page is owed, and reading it: {data}")
                    )
                continue
            found += bool(owed[i])
            was = generation_of(page_of(self.room, before.epoch, name), data)
            if was is None or (same_epoch and not 0 < was <= now):
                known = "of no generation" if was is None else f"of generation {was}"
                faults.append((name, Finding.WRONG, now, f"the bytes are {known}"))
            elif was == now and gone[i]:
                faults.append((name, Finding.RESURRECTED, now, "the page was deleted"))
            elif was < int(old.generation[i]) and earlier[i]:
                note = f"the page is of generation {was}, which was deleted"
                faults.append((name, Finding.RESURRECTED, now, note))
        compared = sum(isinstance(data, bytes) for data in pages)
        return Verdict(faults, compared, int(owed.sum()), found, int(gone.sum()))

    # Below: with the lock held.

    def _intent(self, names: Names) -> Intent:
        return Intent(self.epoch, names, self._known.generation[names], self._known.deletes[names])

    def _tell(self, act: Act, life: int, intent: Intent, how: Any = 0) -> None:
        self.journal.note(self.room, self.epoch, act, life, intent.names, intent.generations, how)

    def _seen(self, slot: int, names: Names) -> Seen:
        return Seen(
            names,
            self.epoch,
            self._known[names],
            self._putting[slot, names] > 0,
            self._put_steps[slot, names],
        )
