"""Reads with a fault each, and as many without, by the memory engine."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections import Counter
from typing import Any

from remote_pages import STARTED_S

from sgl_kvtier.remote.child.memory import set_faults
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.page import Namespace
from sgl_kvtier.remote.presence import Presence
from sgl_kvtier.remote.store import RemoteStore
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.types import PageKey

FAULTS = {
    "late": 0.02,
    "fail": 0.02,
    "flip": 0.16,
    "flip_head": 0.16,
    "swap": 0.16,
    "other_identity": 0.16,
    "torn": 0.16,
    "truncate": 1.0,
}
"""Shares of pages with a fault. Every page has one: what is left of 1 is the last one's. `late` says that the transfer failed,
and writes 7s to its memory after that has been given to other pages.
"""
LATE_S, HANG_S = 1.2, 1.0
PAGES, IN_A_READ, LENGTH = 512, 64, 2048
MARK = b"\x55" * LENGTH


class Unknowing(Presence):
    """Knows nothing, so that every read goes to the engine."""

    def found(self, *_: Any) -> None:
        pass

    def stored(self, *_: Any) -> None:
        pass

    def distrust(self, *_: Any) -> None:
        pass


def outcomes(reads: int, faults: dict[str, Any], deadline_s: float) -> Counter[str]:
    """Outcomes by name of `reads` pages or a few more, read by the memory engine; `wrong` pages and
    `foreign` bytes besides.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvtier-remote-") as folder:
        settings = RemoteSettings("memory", folder, deadline_s=deadline_s, hang_s=deadline_s)
        namespace = Namespace(hashlib.sha256(b"faults").digest(), "tp0")
        store = RemoteStore(settings, namespace, Unknowing())
        try:
            assert store.wait_usable(STARTED_S), store.condition().trouble
            pages = Pages(store)
            set_faults(folder, {"ignore": ["remove"], **faults})
            return pages.read(reads)
        finally:
            store.close()


class Pages:
    """Pages in a store, and two sets of memory to read them into by turns: one that was read into
    before is watched for bytes that come late.
    """

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        chance = random.Random(1)
        self._data = {
            PageKey(hashlib.sha256(bytes([i % 256, i >> 8])).digest()): chance.randbytes(LENGTH)
            for i in range(PAGES)
        }
        self._chance = chance
        put = store.put([PageWrite(k, [memoryview(d)]) for k, d in self._data.items()])
        assert all(outcome is PutOutcome.STORED for outcome in put)
        self._sets = [[bytearray(MARK) for _ in range(IN_A_READ)] for _ in range(2)]

    def read(self, reads: int) -> Counter[str]:
        found: Counter[str] = Counter()
        keys = list(self._data)
        turn = 0
        while turn * IN_A_READ - found[ReadOutcome.MISS.value] < reads:
            turn += 1
            assert self._store.wait_usable(STARTED_S), self._store.condition().trouble
            asked = self._chance.sample(keys, IN_A_READ)
            into, watched = self._sets[turn % 2], self._sets[1 - turn % 2]
            found.update(self._read(asked, into))
            for memory in into:
                memory[:] = MARK
            for memory in watched:
                if memory != MARK:
                    found["foreign"] += sum(a != b for a, b in zip(memory, MARK, strict=True))
                    memory[:] = MARK
        return found

    def _read(self, asked: list[PageKey], into: list[bytearray]) -> Counter[str]:
        job = self._store.read(
            [PageRead(key, [memoryview(m)]) for key, m in zip(asked, into, strict=True)]
        )
        assert job.wait(60)
        found: Counter[str] = Counter()
        for key, memory, outcome in zip(asked, into, job.outcomes, strict=True):
            found[outcome.value if outcome is not None else "none"] += 1
            if outcome is ReadOutcome.OK and memory != self._data[key]:
                found["wrong"] += 1
        return found


def test_every_fault_is_noticed_and_no_page_is_wrong() -> None:
    found = outcomes(2000, {"get": FAULTS, "late_s": LATE_S}, deadline_s=HANG_S)
    assert sum(found.values()) - found["wrong"] - found["foreign"] >= 2000
    assert found["wrong"] == found["foreign"] == 0
    assert found["ok"] == 0
    assert found["corrupt"] > 1500


def test_no_page_without_a_fault_is_called_damaged() -> None:
    found = outcomes(2000, {}, deadline_s=30.0)
    assert found["ok"] >= 2000
    assert found["corrupt"] == found["wrong"] == found["foreign"] == 0
