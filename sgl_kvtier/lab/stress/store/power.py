"""Power loss: the writes of a run are recorded and replayed with those not synced dropped,
reordered or torn.

Root's tools for this (dm-log-writes) are not needed: the record is taken at `Env`, above the
filesystem. Creating, renaming and removing files is taken to happen in order, as journaling
filesystems do; their data is not.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.stress.store.faults import HookedEnv
from sgl_kvtier.lab.stress.store.oracle import Oracle, Verdict, content, open_at, page_key
from sgl_kvtier.lab.stress.trouble import chance
from sgl_kvtier.store.base import PageWrite, PutOutcome

_NAMES = 90


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to the folder. `data` of a write; `other` is a rename's new name;
    `size` of an allocation.
    """

    kind: str
    path: str
    data: bytes = b""
    offset: int = 0
    other: str = ""
    size: int = 0


class RecordingEnv(HookedEnv):
    """Writes as always, and remembers what it wrote. So Python's I/O threads write."""

    native = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._paths: dict[int, str] = {}

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        done = act(*args)
        first = args[0]
        if call == "open":
            self._paths[done] = first
            if args[1] & (os.O_CREAT | os.O_TRUNC):
                self.events.append(Event("create", first, size=args[1] & os.O_TRUNC))
        elif call == "pwritev":
            data = b"".join(args[1])[:done]
            self.events.append(Event("write", self._paths[first], data, args[2]))
        elif call in ("allocate", "truncate"):
            self.events.append(Event(call, self._paths[first], size=args[1]))
        elif call == "sync":
            self.events.append(Event(call, self._paths[first]))
        elif call in ("unlink", "make_directory"):
            self.events.append(Event(call, first))
        elif call == "rename":
            for fd, path in self._paths.items():
                self._paths[fd] = args[1] if path == first else path
            self.events.append(Event(call, first, other=args[1]))
        return done


@dataclass(slots=True)
class Record:
    """A run: its events, and after which event each page was acknowledged, synced, or deleted."""

    root: str
    events: list[Event]
    marks: list[tuple[int, str, int, int]] = field(default_factory=list)
    engine: str = ""
    """The I/O threads that wrote, as `DiskStore.io` calls them."""


@dataclass(slots=True)
class PowerLoss:
    power_loss_states: int = 0
    failed_opens: int = 0
    synced: int = 0
    synced_found: int = 0
    deletes: int = 0
    """Pages that were deleted for good before the loss, summed over states."""
    verdict: Verdict = field(default_factory=Verdict)
    engines: set[str] = field(default_factory=set)
    """The I/O threads of the stores that lost power, as `DiskStore.io` calls them."""


def record(root: str, seed: int) -> Record:
    """A run of puts, evictions, deletes and clears, two of its three stores syncing every batch."""
    drawn = chance(seed, "record")
    env = RecordingEnv()
    run = Record(root, env.events)
    version = 0
    for life in range(3):
        store = open_at(
            root,
            env,
            capacity_bytes=512 << 10,
            segment_bytes=64 << 10,
            io_threads=1,
            durable=life != 1,
        )
        run.engine = store.io
        unsynced: dict[int, None] = {}
        for _ in range(14):
            names = drawn.sample(range(_NAMES), drawn.randint(1, 8))
            if (act := drawn.random()) < 0.2:
                gone = names[:1] if act < 0.15 else list(range(_NAMES))
                run.marks += [(len(env.events), "deleting", n, 0) for n in gone]
                if act < 0.15:
                    store.delete([page_key(n) for n in gone])
                else:
                    store.clear()
                if life == 1:
                    unsynced.update(dict.fromkeys(gone))
                else:
                    run.marks += [(len(env.events), "deleted", n, 0) for n in gone]
                continue
            for n in names:
                unsynced.pop(n, None)
            version += 1
            run.marks += [(len(env.events), "intended", n, version) for n in names]
            outcomes = store.put(
                [PageWrite(page_key(n), [memoryview(content(n, version))]) for n in names]
            )
            word = "synced" if life != 1 else "stored"
            run.marks += [
                (len(env.events), word, n, version)
                for n, outcome in zip(names, outcomes, strict=True)
                if outcome is PutOutcome.STORED
            ]
        store.close()  # syncs
        run.marks += [(len(env.events), "deleted", n, 0) for n in unsynced]
    return run


def torture_power(
    root: str, seed: int, states: int, step: Callable[[int], None] = lambda _: None
) -> PowerLoss:
    """Opens `states` folders as a power loss could leave them, and reads every page."""
    result = PowerLoss()
    drawn = chance(seed, "power")
    while result.power_loss_states < states:
        folder = os.path.join(root, f"record{result.power_loss_states}")
        run = record(folder, drawn.getrandbits(32))
        result.engines.add(run.engine)
        for _ in range(min(250, states - result.power_loss_states)):
            _one_state(run, os.path.join(root, "state"), drawn, result)
            step(1)
        shutil.rmtree(folder)
    return result


def _one_state(run: Record, target: str, drawn: random.Random, result: PowerLoss) -> None:
    cut = drawn.randrange(len(run.events) + 1)
    materialise(run, target, cut, drawn)
    oracle, synced = _oracle(run, cut)
    result.power_loss_states += 1
    try:
        store = open_at(target, capacity_bytes=512 << 10, segment_bytes=64 << 10, io_threads=1)
    except KVTierError:
        result.failed_opens += 1
    else:
        result.verdict.add(oracle.check(store, range(_NAMES)))
        result.deletes += len(oracle.gone)
        result.synced += len(synced)
        result.synced_found += oracle.check(store, synced).right
        store.close()
    shutil.rmtree(target)


def _oracle(run: Record, cut: int) -> tuple[Oracle, list[int]]:
    """The pages that may be read after a loss at `cut`, and the latest pages that were promised to
    survive it.
    """
    oracle = Oracle()
    latest: dict[int, str] = {}
    for at, word, name, version in run.marks:
        if at > cut:
            break
        latest.pop(name, None)
        latest[name] = word
        if word == "synced":
            oracle.allowed[name] = {version}
        elif word in ("intended", "stored"):
            # Until a newer version is promised, an older one that was evicted may still stand on
            # the disk.
            oracle.allowed[name] = oracle.allowed.get(name, set()) | {version}
        elif word == "deleted":
            oracle.deleted(name)
    # Only the newest are sure not to have been evicted meanwhile.
    return oracle, [name for name in list(latest)[-12:] if latest[name] == "synced"]


def materialise(run: Record, target: str, cut: int, drawn: random.Random) -> None:
    """Writes the folder as it may be after a power loss following event `cut`."""
    files: dict[str, bytearray] = {}
    pending: dict[str, list[Event]] = {}
    for event in run.events[:cut]:
        path = event.path
        if event.kind == "make_directory":
            os.makedirs(_moved(run, path, target), mode=0o700, exist_ok=True)
        elif event.kind == "create":
            if path not in files or event.size:
                files[path] = bytearray()
                pending[path] = []
        elif event.kind in ("allocate", "truncate"):
            data = files.setdefault(path, bytearray())
            del data[event.size :]
            data.extend(bytes(event.size - len(data)))
        elif event.kind == "write":
            pending.setdefault(path, []).append(event)
        elif event.kind == "sync":
            for write in pending.pop(path, []):
                _apply(files[path], write.offset, write.data)
        elif event.kind == "unlink":
            files.pop(path, None), pending.pop(path, None)
        elif event.kind == "rename":
            files[event.other] = files.pop(path)
            pending[event.other] = pending.pop(path, [])
    for path, writes in pending.items():
        if path in files:
            _lose(files[path], writes, drawn)
    for path, data in files.items():
        where = _moved(run, path, target)
        os.makedirs(os.path.dirname(where), mode=0o700, exist_ok=True)
        with open(where, "wb") as file:
            file.write(data)


def _lose(data: bytearray, writes: list[Event], drawn: random.Random) -> None:
    """Some of the writes not synced reach the disk, in any order, some of them in part."""
    kept = [write for write in writes if drawn.random() < drawn.choice((0.2, 0.5, 0.9, 1.0))]
    if drawn.random() < 0.5:
        drawn.shuffle(kept)
    for write in kept:
        content_ = write.data
        step = drawn.choice((0, 0, 512, 4096))
        if step and len(content_) > step:
            sectors = range(0, len(content_), step)
            for start in sectors:
                if drawn.random() < 0.5:
                    _apply(data, write.offset + start, content_[start : start + step])
            continue
        _apply(data, write.offset, content_)


def _apply(data: bytearray, offset: int, content_: bytes) -> None:
    if len(data) < offset + len(content_):
        data.extend(bytes(offset + len(content_) - len(data)))
    data[offset : offset + len(content_)] = content_


def _moved(run: Record, path: str, target: str) -> str:
    return os.path.join(target, os.path.relpath(path, run.root))
