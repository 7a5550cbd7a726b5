"""A remote store with everything under way at once, while another process writes anything anywhere
into its ring: `scripts/sanitize` watches it from inside.

    python tests/remote/ring_under_load.py FOLDER SECONDS [SEED]

prints one line of JSON; 1 when a page was wrong, or when pages do not land in compiled code. The
child process and the one that writes into the ring run without the sanitizer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass

from sgl_kvtier.remote import channel
from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.page import Namespace
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PageRead, PageWrite, ReadOutcome
from sgl_kvtier.types import PageKey

_THREADS = 6
_LIFE_S = 3.0
_NAMES = 200
_SIZES = (1, 500, 8192, 70_001)
_FAULTS = {"get": {"flip": 0.05, "torn": 0.05, "swap": 0.05, "fail": 0.02, "late": 0.02}}
_PRELOADED = ("LD_PRELOAD", "PYTHONMALLOC")
_SPOIL = """
import mmap, os, random, sys, time
ring = mmap.mmap(int(sys.argv[1]), 0)
while os.getppid() == int(sys.argv[2]):
    n = random.choice((1, 8, 300, 4096))
    at = random.randrange(len(ring) - n)
    ring[at : at + n] = os.urandom(n)
    time.sleep(0.002)
"""


@dataclass(slots=True)
class Busy:
    """The outcome of a run."""

    compared: int = 0
    wrong: int = 0
    noticed: int = 0
    """Pages whose bytes were not theirs, and that were returned as that."""
    strange: int = 0
    """Jobs and threads that did not end."""
    stores: int = 0
    children: int = 0


def busy(root: str, seconds: float, seed: int) -> Busy:
    """Opens stores one after the other, kills their children, and closes them under load."""
    result = Busy()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory(dir=root, prefix="ring-") as folder:
            _one_life(folder, random.Random(seed * 1000 + result.stores), result)
        result.stores += 1
    return result


def _one_life(folder: str, chance: random.Random, result: Busy) -> None:
    settings = RemoteSettings("memory", folder, ring_bytes=2 << 20, deadline_s=1.0, hang_s=2.0)
    store = RemoteStore(settings, Namespace(hashlib.sha256(b"busy").digest(), "tp0"))
    ring = store._link.ring.fd
    spoiler = subprocess.Popen(
        [sys.executable, "-c", _SPOIL, str(ring), str(os.getpid())], pass_fds=(ring,)
    )
    closed = threading.Event()
    seen: list[Busy] = []
    seeds = [chance.getrandbits(60) for _ in range(_THREADS)]
    threads = [
        threading.Thread(target=lambda seed=seed: seen.append(_work(store, closed, seed)))
        for seed in seeds
    ]
    try:
        store.wait_usable(20)
        set_faults(folder, _FAULTS)
        for thread in threads:
            thread.start()
        time.sleep(_LIFE_S * chance.uniform(0.3, 0.7))
        if child := store.condition().child:
            os.kill(child, chance.choice((signal.SIGKILL, signal.SIGSTOP)))
        time.sleep(_LIFE_S)
    finally:
        result.children += store.condition().starts
        store.close()
        closed.set()
        spoiler.kill()
        spoiler.wait()
    for thread in threads:
        thread.join(60)
    for one in seen:
        result.compared += one.compared
        result.wrong += one.wrong
        result.noticed += one.noticed
        result.strange += one.strange
    result.strange += sum(thread.is_alive() for thread in threads)


def _work(store: RemoteStore, closed: threading.Event, seed: int) -> Busy:
    chance = random.Random(seed)
    result = Busy()
    while not closed.is_set():
        names = chance.sample(range(_NAMES), chance.randint(1, 24))
        act = chance.random()
        if act < 0.3:
            store.put([PageWrite(_key(n), _parts(bytearray(_page(n)))) for n in names])
        elif act < 0.34:
            store.delete([_key(n) for n in names[:3]])
        elif act < 0.35:
            store.clear()
        elif act < 0.45:
            store.ask([_key(n) for n in names], timeout_s=0.1)
            store.lookup([_key(n) for n in names])
            store.stats()
        else:
            _read(store, names, chance, result)
        if not store.usable:
            time.sleep(0.01)
    return result


def _read(store: RemoteStore, names: list[int], chance: random.Random, result: Busy) -> None:
    into = [bytearray(len(_page(n))) for n in names]
    job = store.read(
        [PageRead(_key(n), _parts(b)) for n, b in zip(names, into, strict=True)],
        priority=chance.randint(0, 3),
        deadline_s=chance.choice((None, None, 0.001, 0.02, 0.5)),
    )
    how = chance.random()
    if how < 0.1:
        return  # dropped while it is under way
    if how < 0.2:
        job.cancel()
    result.strange += not job.wait(60)
    for name, memory, outcome in zip(names, into, job.outcomes, strict=True):
        if outcome is ReadOutcome.OK:
            result.compared += 1
            result.wrong += memory != _page(name)
        result.noticed += outcome is ReadOutcome.CORRUPT


def _key(name: int) -> PageKey:
    return PageKey(hashlib.sha256(b"%d" % name).digest())


@functools.cache
def _page(name: int) -> bytes:
    return random.Random(name).randbytes(_SIZES[name % len(_SIZES)])


def _parts(page: bytearray) -> list[memoryview]:
    """A page in two buffers, as a page of several layers lies in memory."""
    cut = len(page) // 3
    return [memoryview(page)[:cut], memoryview(page)[cut:]]


def main(folder: str, seconds: str, seed: str = "1") -> int:
    """The command above."""
    for name in _PRELOADED:
        os.environ.pop(name, None)
    result = busy(folder, float(seconds), int(seed))
    print(json.dumps(asdict(result)))
    failed = result.wrong or result.strange or not result.compared
    return 1 if failed or channel._native is None else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
