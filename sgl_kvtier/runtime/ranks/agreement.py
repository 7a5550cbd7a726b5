"""Values that all ranks agree on: one reduction per scheduler tick while a request is being
restored. Otherwise one in 16 ticks, and only while requests wait for each other.

For page states the minimum counts (`OPEN` < lost < `LANDED`); for times, those of the first rank.
All ranks pass vectors of the same length, because their polls follow from the same plans.

With lookahead, ranks need the same clock in every tick. So their values are added to the reduction
that SGLang makes in every tick anyway (`SharedReduction`), without a collective of our own.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.runtime.ranks.stage_reports import StageReports
from sgl_kvtier.runtime.sglang import tree_ranks
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.polls import Poll, agree

BROKEN = -1
"""The fingerprint of a rank whose map is not maintained any more."""
_MICRO = 1_000_000
_OTHERS = (1 << 62) - 1
_LARGEST = (1 << 63) - 1


class Agreement:
    """Reduces over the TP ranks and passes the first pipeline stage's result to the others.
    `reductions` counts the collectives.
    """

    def __init__(
        self, tree: Tree, ranks: int, first: bool, reports: StageReports | None = None
    ) -> None:
        """`ranks` is the number of processes that have to agree; `first`: this one's clock counts.
        `reports` are needed with several pipeline stages, since a reduction covers only the first
        stage's ranks.
        """
        self._tree = tree
        self._ranks = ranks
        self._first = first
        self._reports = reports
        self.reductions = 0

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self._ranks == 1

    def first_says(self, values: Sequence[float]) -> list[float]:
        """The first rank's values, none negative. A collective of its own, for the start."""
        if self.alone:
            return list(values)
        # Non-negative doubles have the same order as their bits.
        bits = [
            struct.unpack(">q", struct.pack(">d", v))[0] if self._first else _LARGEST
            for v in values
        ]
        agreed = tree_ranks.least(self._tree, bits)
        return [struct.unpack(">d", struct.pack(">q", v))[0] for v in agreed]

    def least(self, value: int) -> int:
        """The smallest of all ranks' values. Collectives of their own, for the start."""
        if self.alone:
            return value
        return tree_ranks.least_of_all(self._tree, value, staged=self._reports is not None)

    def same(self, value: int) -> bool:
        """Whether all ranks have the same value. Collectives of their own, for the start."""
        return self.least(value) == -self.least(-value)

    def local(self, polls: Sequence[Poll]) -> tuple[bytes, list[float]]:
        """The states of all pages of these polls as far as this rank may report them, and the time
        at which the last page of each ended poll ended. On a later pipeline stage the result is
        ignored: it receives the first stage's.
        """
        if self._reports is None:
            states = b"".join(
                poll.local for poll in polls
            )  # before the times: a page's time is noted before its state
            return states, [max(poll.ended_at) for poll in polls]
        self._reports.exchange(polls)
        states = b"".join(self._reports.state(poll) for poll in polls)
        return states, [self._reports.ended_at(poll) for poll in polls]

    def close(self) -> None:
        """Called at the end of the process."""
        if self._reports is not None:
            self._reports.close()

    def reduce(self, times: Sequence[float], states: bytes) -> tuple[list[float], bytes]:
        """The agreed times and page states. A collective unless this process is alone."""
        if self.alone:
            return list(times), states
        agreed = tree_ranks.least(self._tree, self.packed(times, states))
        self.reductions += 1
        return self.unpacked(agreed, len(times))

    def packed(self, times: Sequence[float], states: bytes) -> list[int]:
        """This rank's input to a reduction by MIN."""
        return [*(int(t * _MICRO) if self._first else _OTHERS for t in times), *states]

    def unpacked(self, values: Sequence[int], times: int) -> tuple[list[float], bytes]:
        """The result of the reduction: `times` agreed times, and page states."""
        return [v / _MICRO for v in values[:times]], bytes(values[times:])


@dataclass(frozen=True)
class _Input:
    """This rank's input to SGLang's reduction of a tick, needed to decode the result."""

    loads: Sequence[Poll]
    polls: Sequence[Poll]
    times: int
    own_times: int


class SharedReduction:
    """Values that ranks with lookahead agree on by SGLang's own reduction of a tick. Scheduler's
    thread; called in the order `reduction_input`, `take_result`, `results`.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._input: _Input | None = None
        self._result: tuple[list[float], bytes] | None = None
        self.maps_differ = False
        """Whether ranks' maps differ, or one is not maintained: known to all in the same step."""

    def reduction_input(
        self, loads: Sequence[Poll], polls: Sequence[Poll], own_times: Sequence[float], check: int
    ) -> list[int]:
        """This rank's input. `own_times` are those in facts, `check` is its map's fingerprint."""
        states, ends = self._agreement.local([*loads, *polls])
        clock = [time.monotonic(), *ends[: len(loads)], *own_times, *ends[len(loads) :]]
        self._input = _Input(loads, polls, len(clock), len(own_times))
        return [check, -check, *self._agreement.packed(clock, states)]

    def take_result(self, values: Sequence[int]) -> float:
        """Decodes the reduction's result; returns the agreed time in seconds."""
        given = self._input
        assert given is not None, "a result follows an input"
        least, most = values[0], -values[1]
        self.maps_differ = self.maps_differ or least != most or least == BROKEN
        self._result = self._agreement.unpacked(values[2:], given.times)
        return self._result[0][0]

    def report_polls(self) -> None:
        """Sets the agreed states in the polls other than loads."""
        if self._input is None or self._result is None:
            return
        (times, states), polls = self._result, self._input.polls
        begin = sum(len(load.local) for load in self._input.loads)
        agree(polls, states[begin:], times[len(times) - len(polls) :])

    def results(self, loads: int, own_times: int) -> tuple[list[float], bytes]:
        """Returns the agreed times and states, once. Raises KVTierError if they do not match what
        is expected now.
        """
        given, self._input = self._input, None
        result, self._result = self._result, None
        if (
            given is None
            or result is None
            or (len(given.loads), given.own_times) != (loads, own_times)
        ):
            raise KVTierError("what the ranks agreed on is not what there is to agree on")
        return result
