"""Any sequence of puts, reads, deletes, restarts and crashes agrees with a plain dictionary."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_pages import aligned, content, io_settings, key, on_disk, open_at, put, read

from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.types import Lookup

CAP = 1 << 20
SIZES = (100, 4096, 5000, 20_000, 70_000)
NAMES = st.integers(0, 60)


class StoreModel(RuleBasedStateMachine):
    """`stored` is every page acknowledged and not deleted; eviction may take any of them, nothing
    may change one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.stored: dict[int, tuple[int, int]] = {}
        self.writes = 0
        self.gone = 0
        self.store = self.open()

    def open(self) -> DiskStore:
        return open_at(self.root, capacity_bytes=CAP, segment_bytes=128 << 10)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    @rule(names=st.lists(NAMES, min_size=1, max_size=8, unique=True), size=st.sampled_from(SIZES))
    def put(self, names: list[int], size: int) -> None:
        self.writes += 1
        outcomes = put(self.store, {key(n): content((n, self.writes), size) for n in names})
        for n, outcome in zip(names, outcomes, strict=True):
            assert outcome is not PutOutcome.REFUSED
            if outcome is PutOutcome.STORED:
                self.stored[n] = (self.writes, size)
            else:
                assert n in self.stored

    @rule(names=st.lists(NAMES, min_size=1, max_size=12))
    def read(self, names: list[int]) -> None:
        for n in dict.fromkeys(names):
            write, size = self.stored.get(n, (0, 100))
            ((outcome, data),) = read(self.store, {key(n): size})
            assert outcome in (ReadOutcome.OK, ReadOutcome.MISS)
            if outcome is ReadOutcome.OK:
                assert n in self.stored
                assert data == content((n, write), size)

    @rule(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
    def delete(self, names: list[int]) -> None:
        here = self.store.lookup([key(n) for n in names]).count(Lookup.HIT)
        assert self.store.delete([key(n) for n in names]) == here
        for n in names:
            self.stored.pop(n, None)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.stored.clear()
        assert self.store.stats().pages == 0

    @rule()
    def reopen(self) -> None:
        pages = self.store.stats().pages
        self.store.close()
        self.store = self.open()
        assert self.store.stats().pages == pages

    @rule()
    def crash(self) -> None:
        """Goes on with a copy of the folder as a killed process leaves it."""
        copy = Path(tempfile.mkdtemp())
        shutil.copytree(self.root, copy, dirs_exist_ok=True)
        self.teardown()
        self.root = copy
        self.store = self.open()

    @rule()
    def crash_and_lose_the_index(self) -> None:
        self.crash()
        self.store.close()
        os.unlink(Path(self.store.folder, "index.log"))
        self.store = self.open()

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), bit=st.integers(0, 1 << 20))
    def damage(self, data: st.DataObject, bit: int) -> None:
        n = data.draw(st.sampled_from(sorted(self.stored)))
        if self.store.damage(key(n), bit=bit):
            ((outcome, _),) = read(self.store, {key(n): self.stored[n][1]})
            assert outcome is ReadOutcome.CORRUPT
            del self.stored[n]

    @invariant()
    def finds_only_what_was_stored(self) -> None:
        found = self.store.lookup([key(n) for n in range(61)])
        assert {n for n, answer in enumerate(found) if answer is Lookup.HIT} <= set(self.stored)
        assert found.count(Lookup.HIT) == self.store.stats().pages

    @invariant()
    def stays_below_its_capacity(self) -> None:
        assert on_disk(self.root) <= CAP + (128 << 10)


StoreModel.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_store_agrees_with_a_dictionary = StoreModel.TestCase


# Many pages: what grows with their number stays in proportion, and all of them are found again
# with the index log and without.


PAGES = 10_000
BATCH = 500
NBYTES = 512
KEYS = [key(i) for i in range(PAGES)]


def contents(first: int) -> np.ndarray:
    """A row per page, none like another."""
    numbers = np.arange(first, first + BATCH, dtype=np.uint64)[:, None]
    return numbers * np.uint64(0x9E3779B97F4A7C15) + np.arange(NBYTES // 8, dtype=np.uint64)


def found(store: DiskStore) -> set[int]:
    """The pages that are there. Fails when one is not as it was put."""
    whole: set[int] = set()
    memory = aligned(BATCH * NBYTES)
    rows = np.frombuffer(memory, np.uint64).reshape(BATCH, -1)
    for first in range(0, PAGES, BATCH):
        job = store.read(
            [
                PageRead(KEYS[first + i], [memory[i * NBYTES : (i + 1) * NBYTES]])
                for i in range(BATCH)
            ]
        )
        assert job.wait(60)
        here = [i for i, outcome in enumerate(job.outcomes) if outcome is ReadOutcome.OK]
        assert (rows[here] == contents(first)[here]).all()
        whole.update(first + i for i in here)
    return whole


def test_many_pages_are_found_again_with_the_log_and_without(tmp_path: Path) -> None:
    settings = {
        "capacity_bytes": 256 << 20,
        "segment_bytes": 32 << 20,
        "io_threads": 4,
        "direct_io": "off",
    } | io_settings("threads")
    store = open_at(tmp_path, **settings)
    for first in range(0, PAGES, BATCH):
        rows = contents(first)
        pages = [PageWrite(KEYS[first + i], [memoryview(rows[i]).cast("B")]) for i in range(BATCH)]
        assert store.put(pages) == [PutOutcome.STORED] * BATCH
    assert store.stats().pages == PAGES and store.index_bytes < 200 * PAGES
    gone = set(range(0, PAGES, 100))
    assert store.delete([KEYS[i] for i in sorted(gone)]) == len(gone)
    folder = store.folder
    left = set(range(PAGES)) - gone
    store.close()

    store = open_at(tmp_path, **settings)
    assert store.lookup(KEYS).count(Lookup.HIT) == len(left) and found(store) == left
    store.close()

    os.unlink(os.path.join(folder, "index.log"))
    store = open_at(tmp_path, **settings)
    assert store.stats().pages == len(left) and found(store) == left
    assert store.clear() == len(left)
    store.close()
    assert open_at(tmp_path, **settings).stats().pages == 0
