"""The state of one restoration, unit by unit: units are computed from the start and loaded from the
end, and each is delivered exactly once. A unit is a page or a layer.

Cake (section 4, appendix A) and CacheFlow (section 3.1) keep one pointer at either end. Here each
unit has a state of its own. So a unit that is stored nowhere, or whose load fails, is computed, and
loaded units after such a hole remain useful: they are attached once the hole is computed.
"""

from __future__ import annotations

import re
from typing import Final

from sgl_kvtier.types import Span

_FREE: Final = b"\0"
_LOST: Final = b"\1"
_COMPUTED: Final = b"\2"
_LOADING: Final = b"\3"
_LANDED: Final = b"\4"
_ATTACHED: Final = b"\5"
_FREE_RUN: Final = re.compile(_FREE + b"+")
_LANDED_RUN: Final = re.compile(_LANDED + b"+")
_LOST_RUN: Final = re.compile(_LOST + b"+")
_UNLANDED_RUN: Final = re.compile(b"[" + _FREE + _LOADING + b"]+")


class TwoPointer:
    """How each unit of [start, units) is delivered. `front` is the prefill cursor: units below it
    are computed, being computed, or attached after loading. Raises ValueError if a call would
    deliver a unit twice. Takes O(units) bytes of memory.
    """

    def __init__(self, start: int, units: int, anchor: int = 0) -> None:
        """`anchor`: number of the last units with which the anchor (see `messages`) is loaded."""
        if not 0 <= start <= units:
            raise ValueError(f"a restoration cannot start at {start} of {units} units")
        self._units = units
        self._front = start
        self._anchor = units - anchor if anchor else 0
        self._state = bytearray(_ATTACHED * start + _FREE * (units - start))

    @property
    def units(self) -> int:
        """Number of units; the restoration ends there."""
        return self._units

    @property
    def front(self) -> int:
        """The prefill cursor: all units below it are delivered or being computed."""
        return self._front

    @property
    def met(self) -> bool:
        """Whether the prefill cursor has reached the end: nothing is left to compute or load."""
        return self._front == self._units

    @property
    def whole(self) -> bool:
        """Whether loaded units can be attached only together with all units up to the end."""
        return self._front < self._anchor

    @property
    def anchor(self) -> Span:
        """The last units, with which the anchor is loaded; all units if there is none."""
        return Span(self._anchor, self._units)

    @property
    def loading(self) -> int:
        """Number of units in flight."""
        return self._state.count(_LOADING)

    def free_in(self, span: Span) -> int:
        """Number of units of `span` that neither end has taken and that may still be loaded."""
        return self._state.count(_FREE, span.start, span.stop)

    def free_runs(self, start: int) -> list[tuple[int, int]]:
        """Runs of untouched units from `start` on, as (first, one past the last) and ascending."""
        state = self._state
        first = state.find(_FREE, start)
        if first < 0:
            return []
        stop = state.rfind(_FREE, first) + 1
        if state.count(_FREE, first, stop) == stop - first:
            # The usual case: loads take units from the end, compute from the start.
            return [(first, stop)]
        return [run.span() for run in _FREE_RUN.finditer(state, first)]

    def unlanded_runs(self, start: int) -> list[tuple[int, int]]:
        """The same for units that are untouched or in flight."""
        return [run.span() for run in _UNLANDED_RUN.finditer(self._state, start)]

    def lost_in(self, span: Span) -> int:
        """Number of units of `span` that failed to load or are stored nowhere, and must be
        computed.
        """
        return self._state.count(_LOST, span.start, span.stop)

    def lost_from(self, start: int) -> int:
        """The same from unit `start` on."""
        return self._state.count(_LOST, start)

    def first_lost(self, start: int) -> int:
        """The first such unit from `start` on; `units` if there is none."""
        lost = self._state.find(_LOST, start)
        return lost if lost >= 0 else self._units

    def lost_runs(self, start: int) -> list[tuple[int, int]]:
        """Runs of such units after `start`, like `free_runs`. Omits a run that begins at `start`,
        or after loaded units that begin there, since prefill computes it next.
        """
        landed = _LANDED_RUN.match(self._state, start)
        first = landed.end() if landed else start
        return [run.span() for run in _LOST_RUN.finditer(self._state, first) if run.start() > first]

    def lost_run(self, start: int) -> int:
        """Number of consecutive units from `start` on that can only be computed."""
        ahead = self._state[start:]
        return len(ahead) - len(ahead.lstrip(_LOST))

    def barrier(self, start: int | None = None) -> int:
        """The first loaded or loading unit from `start` (default: the prefill cursor) on. Compute
        may proceed up to it.
        """
        start = self._front if start is None else start
        loading = self._state.find(_LOADING, start)
        landed = self._state.find(_LANDED, start, loading if loading >= 0 else self._units)
        return landed if landed >= 0 else loading if loading >= 0 else self._units

    def landed_run(self) -> Span:
        """The loaded units that can be attached at the prefill cursor; empty if there are none."""
        front, state = self._front, self._state
        if front == self._units or state[front] != _LANDED[0]:
            return Span(front, front)
        ahead = state[front:]
        stop = front + len(ahead) - len(ahead.lstrip(_LANDED))
        if stop < self._units and front < self._anchor:
            return Span(front, front)
        return Span(front, stop)

    def last_loading(self) -> Span:
        """The lowest run of units in flight, which starts last; empty if there is none."""
        start = self._state.find(_LOADING)
        if start < 0:
            return Span(self._units, self._units)
        ahead = self._state[start:]
        return Span(start, start + len(ahead) - len(ahead.lstrip(_LOADING)))

    def take_front(self, count: int) -> Span:
        """Takes up to `count` units at the prefill cursor for computing, up to the barrier."""
        stop = min(self._front + count, self.barrier())
        return self._advance(Span(self._front, stop), _COMPUTED)

    def lack(self, span: Span) -> None:
        """The untouched units of `span` cannot be loaded: they have to be computed."""
        piece = self._state[span.start : span.stop]
        self._state[span.start : span.stop] = piece.replace(_FREE, _LOST)

    def take_back(self, count: int, within: Span | None = None, floor: int = 0) -> Span:
        """Takes the highest run of at most `count` untouched units for loading, inside `within` and
        at or above `floor`; empty if there is none. Skips units whose load failed.
        """
        low = max(self._front, floor, within.start if within is not None else 0)
        stop = self._state.rfind(_FREE, low, within.stop if within is not None else self._units) + 1
        if stop == 0 or count <= 0:
            return Span(self._front, self._front)
        start = max(low, stop - count)
        piece = self._state[start:stop]
        start += len(piece.rstrip(_FREE))
        self._state[start:stop] = _LOADING * (stop - start)
        return Span(start, stop)

    def land(self, span: Span) -> int:
        """Units of `span` that are in flight are loaded now. Returns how many."""
        return self._settle(span, _LANDED)

    def lose(self, span: Span) -> int:
        """Units of `span` that are in flight will not arrive and have to be computed. Returns how
        many there were. If loaded units can be attached only up to the end, all units before the
        last lost one have to be computed too.
        """
        lost = self._settle(span, _LOST)
        if lost and self._front < self._anchor:
            stop = self._state.rfind(_LOST, self._front, span.stop) + 1
            self._paint(Span(self._front, max(self._front, stop)), _LOST)
        return lost

    def give_back(self, span: Span) -> int:
        """Loads of `span` never started: these units are untouched again. Returns how many."""
        return self._settle(span, _FREE)

    def attach(self, span: Span) -> None:
        """Attaches the loaded units `span`, which begin at the prefill cursor, to the prefix."""
        run = self.landed_run()
        early = self.whole and bool(span) and span.stop != self._units
        if span.start != self._front or span.stop > run.stop or early:
            raise ValueError(
                f"[{span.start}, {span.stop}) has not landed at the front at {self._front}"
            )
        self._advance(span, _ATTACHED)

    def _settle(self, span: Span, state: bytes) -> int:
        stop = min(span.stop, self._units)
        piece = self._state[span.start : stop]
        self._state[span.start : stop] = piece.replace(_LOADING, state)
        return piece.count(_LOADING)

    def _advance(self, span: Span, state: bytes) -> Span:
        self._paint(span, state)
        self._front = span.stop
        return span

    def _paint(self, span: Span, state: bytes) -> None:
        self._state[span.start : span.stop] = state * len(span)
