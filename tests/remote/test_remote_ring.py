"""Extents of the ring never overlap, and all of it can be taken again."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sgl_kvtier.remote.ring import Ring

BYTES = 1 << 14


class Extents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(BYTES)
        self.taken: dict[int, int] = {}

    def teardown(self) -> None:
        self.ring.close()

    @rule(nbytes=st.integers(0, BYTES + 1))
    def take(self, nbytes: int) -> None:
        offset = self.ring.take(nbytes)
        if offset is not None:
            assert offset % 64 == 0
            assert offset + nbytes <= BYTES
            assert all(offset + nbytes <= o or o + n <= offset for o, n in self.taken.items())
            self.taken[offset] = nbytes

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.ring.give(offset)
        del self.taken[offset]

    @precondition(lambda self: not self.taken)
    @rule()
    def take_all(self) -> None:
        assert self.ring.take(BYTES) == 0
        assert self.ring.take(1) is None
        self.ring.give(0)

    @invariant()
    def counts_what_is_taken(self) -> None:
        assert self.ring.taken_bytes >= sum(self.taken.values())
        assert bool(self.ring.taken_bytes) == bool(self.taken)


Extents.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
test_extents_are_apart_and_come_back = Extents.TestCase
