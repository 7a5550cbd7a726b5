"""Page reads with a fault injected into each, and as many without: which pages come back, and
whether they are right.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.page import Namespace
from sgl_kvtier.remote.presence import Presence
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.types import PageKey

SHARES = {
    "late": 0.02,
    "fail": 0.02,
    "flip": 0.16,
    "flip_head": 0.16,
    "swap": 0.16,
    "other_identity": 0.16,
    "torn": 0.16,
    "truncate": 1.0,
}
"""Every page has one: what is left of 1 is the last one's. `late` says that the transfer failed,
and writes 7s to its memory after that has been given to other pages.
"""
_LATE_S, _HANG_S = 1.2, 1.0
_PAGES, IN_A_READ, _LENGTH = 512, 64, 2048
_MARK = b"\x55" * _LENGTH


class Unknowing(Presence):
    """Knows nothing, so that every read goes to the engine."""

    def found(self, *_: Any) -> None:
        pass

    def stored(self, *_: Any) -> None:
        pass

    def distrust(self, *_: Any) -> None:
        pass


def read_with_faults(reads: int, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Reads `reads` pages with a fault each and as many without one, by the memory engine. Raises
    BenchError where that does not start.
    """
    begun = time.monotonic()
    faulty = _reads(reads, {"get": SHARES, "late_s": _LATE_S}, advance, deadline_s=_HANG_S)
    clean = _reads(reads, {}, advance, deadline_s=30.0)
    others = ("wrong", "foreign", "restarts")
    return {
        "faulty_reads": sum(n for name, n in faulty.items() if name not in others),
        "clean_reads": sum(n for name, n in clean.items() if name not in others),
        "wrong_pages": faulty["wrong"] + clean["wrong"],
        "foreign_bytes_outside_the_ring": faulty["foreign"] + clean["foreign"],
        "faults_not_noticed": faulty[ReadOutcome.OK.value],
        "false_alarms": clean[ReadOutcome.CORRUPT.value],
        "outcomes_with_faults": dict(faulty),
        "outcomes_without": dict(clean),
        "seconds": time.monotonic() - begun,
    }


def _reads(
    reads: int, faults: dict[str, Any], advance: Callable[[], None], deadline_s: float
) -> Counter[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvtier-remote-") as folder:
        settings = RemoteSettings("memory", folder, deadline_s=deadline_s, hang_s=deadline_s)
        namespace = Namespace(hashlib.sha256(b"faults").digest(), "tp0")
        store = RemoteStore(settings, namespace, Unknowing())
        try:
            if not store.wait_usable(20):
                raise BenchError(f"the memory engine is not usable: {store.condition().trouble}")
            pages = _Pages(store)
            set_faults(folder, {"ignore": ["remove"], **faults})
            found = pages.read(reads, advance)
            found["restarts"] = store.condition().starts - 1
            return found
        finally:
            store.close()


class _Pages:
    """Pages in a store, and two sets of memory to read them into by turns: one that was read into
    before is watched for bytes that come late.
    """

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        chance = random.Random(1)
        self._data = {
            PageKey(hashlib.sha256(bytes([i % 256, i >> 8])).digest()): chance.randbytes(_LENGTH)
            for i in range(_PAGES)
        }
        self._chance = chance
        put = store.put([PageWrite(k, [memoryview(d)]) for k, d in self._data.items()])
        if any(outcome is not PutOutcome.STORED for outcome in put):
            raise BenchError("the memory engine did not take the pages")
        self._sets = [[bytearray(_MARK) for _ in range(IN_A_READ)] for _ in range(2)]

    def read(self, reads: int, advance: Callable[[], None]) -> Counter[str]:
        """Outcomes by name of `reads` pages or a few more, which the engine was asked for; `wrong`
        pages and `foreign` bytes besides.
        """
        found: Counter[str] = Counter()
        keys = list(self._data)
        turn = 0
        while turn * IN_A_READ - found[ReadOutcome.MISS.value] < reads:
            turn += 1
            if not self._store.wait_usable(20):
                raise BenchError(f"it is not usable again: {self._store.condition().trouble}")
            asked = self._chance.sample(keys, IN_A_READ)
            into, watched = self._sets[turn % 2], self._sets[1 - turn % 2]
            found.update(self._read(asked, into))
            for memory in into:
                memory[:] = _MARK
            for memory in watched:
                if memory != _MARK:
                    found["foreign"] += sum(a != b for a, b in zip(memory, _MARK, strict=True))
                    memory[:] = _MARK
            advance()
        return found

    def _read(self, asked: list[PageKey], into: list[bytearray]) -> Counter[str]:
        job = self._store.read(
            [PageRead(key, [memoryview(m)]) for key, m in zip(asked, into, strict=True)]
        )
        if not job.wait(60):
            raise BenchError("a read did not end")
        found: Counter[str] = Counter()
        for key, memory, outcome in zip(asked, into, job.outcomes, strict=True):
            found[outcome.value if outcome is not None else "none"] += 1
            if outcome is ReadOutcome.OK and memory != self._data[key]:
                found["wrong"] += 1
        return found
