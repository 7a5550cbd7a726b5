"""Any sequence of puts, reads, deletes, restarts and crashes agrees with a plain dictionary."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_pages import content, key, open_at, put, read

from sgl_kvtier.store.base import PutOutcome, ReadOutcome
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
        on_disk = sum(p.lstat().st_blocks * 512 for p in self.root.rglob("*") if p.is_file())
        assert on_disk <= CAP + (128 << 10)


StoreModel.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_store_agrees_with_a_dictionary = StoreModel.TestCase
