"""Two pointers against a plain list of units: each is delivered exactly once, in whatever order
things end.
"""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.types import Span


class TwoPointerMachine(RuleBasedStateMachine):
    @initialize(units=st.integers(0, 40), data=st.data())
    def begin(self, units, data):
        start = data.draw(st.integers(0, units))
        anchor = data.draw(st.integers(0, units - start))
        self.units = units
        self.start = start
        self.anchored = units - anchor if anchor else 0
        self.pointer = TwoPointer(start, units, anchor)
        self.state = ["given"] * start + ["free"] * (units - start)
        self.front = start

    def run_of(self, state, start):
        stop = start
        while stop < self.units and self.state[stop] == state:
            stop += 1
        return Span(start, stop)

    @rule(count=st.integers(0, 12))
    def compute(self, count):
        stop = self.front
        while (
            stop < self.units and stop < self.front + count and self.state[stop] in ("free", "lost")
        ):
            stop += 1
        assert self.pointer.take_front(count) == Span(self.front, stop)
        self.state[self.front : stop] = ["computed"] * (stop - self.front)
        self.front = stop

    @rule(
        count=st.integers(0, 12),
        low=st.integers(0, 40),
        length=st.integers(0, 40),
        floor=st.integers(0, 40),
    )
    def load(self, count, low, length, floor):
        within = Span(min(low, self.units), min(low + length, self.units))
        allowed = [
            unit
            for unit in range(max(self.front, within.start, floor), within.stop)
            if self.state[unit] == "free"
        ]
        span = self.pointer.take_back(count, within, floor)
        if not allowed or not count:
            assert not span
            return
        assert span.stop == max(allowed) + 1 and 0 < len(span) <= count
        assert all(unit in allowed for unit in range(span.start, span.stop))
        assert len(span) == count or span.start - 1 not in allowed
        self.state[span.start : span.stop] = ["loading"] * len(span)

    @rule(start=st.integers(0, 40), length=st.integers(0, 20))
    def lack(self, start, length):
        span = Span(min(start, self.units), min(start + length, self.units))
        self.pointer.lack(span)
        for unit in range(span.start, span.stop):
            self.state[unit] = "lost" if self.state[unit] == "free" else self.state[unit]

    @rule(
        start=st.integers(0, 40),
        length=st.integers(0, 20),
        outcome=st.sampled_from(["landed", "lost", "free"]),
    )
    def end(self, start, length, outcome):
        span = Span(min(start, self.units), min(start + length, self.units))
        units = [unit for unit in range(span.start, span.stop) if self.state[unit] == "loading"]
        pointer = self.pointer
        told = {"landed": pointer.land, "lost": pointer.lose, "free": pointer.give_back}[outcome]
        assert told(span) == len(units)
        for unit in units:
            self.state[unit] = outcome
        if outcome == "lost" and units and self.front < self.anchored:
            last = max(unit for unit in range(span.stop) if self.state[unit] == "lost")
            stop = max(self.front, last + 1)
            self.state[self.front : stop] = ["lost"] * (stop - self.front)

    def attachable(self):
        run = self.run_of("landed", self.front)
        if self.front < self.anchored and run.stop < self.units:
            return Span(self.front, self.front)
        return run

    @rule(data=st.data())
    def attach(self, data):
        run = self.attachable()
        stop = data.draw(st.integers(run.start, run.stop))
        if self.front < self.anchored and stop < run.stop:
            stop = self.front
        self.pointer.attach(Span(self.front, stop))
        self.state[self.front : stop] = ["attached"] * (stop - self.front)
        self.front = stop

    @precondition(lambda self: self.front < self.units)
    @rule(beyond=st.integers(1, 5))
    def attach_too_far(self, beyond):
        with pytest.raises(ValueError):
            self.pointer.attach(Span(self.front, self.attachable().stop + beyond))

    @precondition(lambda self: self.front + 1 < self.anchored)
    @rule()
    def attach_up_to_no_window(self):
        with pytest.raises(ValueError):
            self.pointer.attach(Span(self.front, self.anchored - 1))

    @invariant()
    def they_agree(self):
        count = self.state.count
        pointer = self.pointer
        assert pointer.front == self.front and pointer.units == self.units
        assert pointer.met is (self.front == self.units)
        assert pointer.loading == count("loading")
        everything = Span(0, self.units)
        assert pointer.free_in(everything) == count("free")
        assert pointer.lost_in(everything) == count("lost")
        lost = [unit for unit in range(self.front, self.units) if self.state[unit] == "lost"]
        assert pointer.first_lost(self.front) == min(lost, default=self.units)
        front = self.run_of("landed", self.front).stop
        begins = [unit for unit in lost if unit - 1 not in lost and unit > front]
        runs = [(unit, self.run_of("lost", unit).stop) for unit in begins]
        assert pointer.lost_runs(self.front) == runs
        assert pointer.landed_run() == self.attachable()
        assert pointer.whole is (self.front < self.anchored)
        taken = [
            unit
            for unit in range(self.front, self.units)
            if self.state[unit] in ("loading", "landed")
        ]
        assert pointer.barrier() == min(taken, default=self.units)
        loading = [unit for unit in range(self.units) if self.state[unit] == "loading"]
        if loading:
            assert pointer.last_loading() == self.run_of("loading", loading[0])
        else:
            assert not pointer.last_loading()

    @invariant()
    def everything_below_the_front_is_delivered_or_being_computed(self):
        assert all(state in ("given", "computed", "attached") for state in self.state[: self.front])

    def teardown(self):
        """Whatever has happened, the front can always go on once what was begun has ended."""
        if not hasattr(self, "pointer"):
            return
        if self.anchored:  # landed units may wait for others, which have to be tried
            while self.pointer.take_back(self.units):
                pass
        self.pointer.lose(Span(0, self.units))
        for _ in range(self.units + 1):
            self.pointer.attach(self.pointer.landed_run())
            self.pointer.take_front(self.units)
        assert self.pointer.met


TestTwoPointer = TwoPointerMachine.TestCase
TestTwoPointer.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)


def test_lost_units_at_the_front_are_no_hole_and_those_behind_landed_ones_there_are_none() -> None:
    pointer = TwoPointer(0, 10)
    pointer.lack(Span(0, 2))
    pointer.lack(Span(5, 7))
    assert pointer.lost_runs(0) == [(5, 7)]
    assert pointer.take_back(3, Span(2, 5)) == Span(2, 5)
    pointer.land(Span(2, 5))
    assert pointer.lost_runs(2) == []
    assert (pointer.lost_run(0), pointer.first_lost(2)) == (2, 5)
