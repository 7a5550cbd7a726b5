"""One restoration on any axis: the front is computed, the back is loaded, and every unit is
delivered exactly once.

Cake (section 4, appendix A) and CacheFlow (section 3.1) run one pointer from either end. Here a
unit (a page, or a layer) has a state of its own. So a unit that is stored nowhere, or fails to
load, goes to the front, and landed units after a hole are still useful: the front computes the hole
and attaches the landed units after it.
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
    """Which end delivers each unit of [start, units). Units below `front` belong to the front:
    computed, being computed, or attached after landing. Raises ValueError when a caller would
    deliver a unit twice; O(units) bytes of memory.
    """

    def __init__(self, start: int, units: int, anchor: int = 0) -> None:
        """`anchor`: so many of the last units bring what is needed to go on from the end
        (`messages`); 0: nothing is.
        """
        if not 0 <= start <= units:
            raise ValueError(f"a restoration cannot start at {start} of {units} units")
        self._units = units
        self._front = start
        self._anchor = units - anchor if anchor else 0
        self._state = bytearray(_ATTACHED * start + _FREE * (units - start))

    @property
    def units(self) -> int:
        """The end of the restoration."""
        return self._units

    @property
    def front(self) -> int:
        """All units below this one are delivered or being computed."""
        return self._front

    @property
    def met(self) -> bool:
        """The front has reached the end: nothing is left to compute or load."""
        return self._front == self._units

    @property
    def whole(self) -> bool:
        """Whether landed units can be attached up to the end only."""
        return self._front < self._anchor

    @property
    def anchor(self) -> Span:
        """The last units, which bring the anchor; from the first one where there is none."""
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
            # The usual case: loads take units from the back, compute from the front.
            return [(first, stop)]
        return [run.span() for run in _FREE_RUN.finditer(state, first)]

    def unlanded_runs(self, start: int) -> list[tuple[int, int]]:
        """The same of units untouched or in flight."""
        return [run.span() for run in _UNLANDED_RUN.finditer(self._state, start)]

    def lost_in(self, span: Span) -> int:
        """Number of units of `span` that failed to load, or are stored nowhere, and were not
        computed yet.
        """
        return self._state.count(_LOST, span.start, span.stop)

    def lost_from(self, start: int) -> int:
        """The same from unit `start` on."""
        return self._state.count(_LOST, start)

    def first_lost(self, start: int) -> int:
        """The first such unit from `start` on; `units` where there is none."""
        lost = self._state.find(_LOST, start)
        return lost if lost >= 0 else self._units

    def lost_runs(self, start: int) -> list[tuple[int, int]]:
        """Runs of such units after `start`, like `free_runs`. One that begins there, or after
        units that have landed there, is not among them: the front is at it.
        """
        landed = _LANDED_RUN.match(self._state, start)
        first = landed.end() if landed else start
        return [run.span() for run in _LOST_RUN.finditer(self._state, first) if run.start() > first]

    def lost_run(self, start: int) -> int:
        """Number of consecutive units from `start` on that can only be computed."""
        ahead = self._state[start:]
        return len(ahead) - len(ahead.lstrip(_LOST))

    def barrier(self, start: int | None = None) -> int:
        """The first unit from `start` (the front) on that a transfer has taken: compute may go up
        to it.
        """
        start = self._front if start is None else start
        loading = self._state.find(_LOADING, start)
        landed = self._state.find(_LANDED, start, loading if loading >= 0 else self._units)
        return landed if landed >= 0 else loading if loading >= 0 else self._units

    def landed_run(self) -> Span:
        """The landed units that begin at the front and can be attached; empty when the unit at the
        front has not landed.
        """
        front, state = self._front, self._state
        if front == self._units or state[front] != _LANDED[0]:
            return Span(front, front)
        ahead = state[front:]
        stop = front + len(ahead) - len(ahead.lstrip(_LANDED))
        if stop < self._units and front < self._anchor:
            return Span(front, front)
        return Span(front, stop)

    def last_loading(self) -> Span:
        """The lowest run of units in flight: the last to begin when loads go from the back. Empty
        if there is none.
        """
        start = self._state.find(_LOADING)
        if start < 0:
            return Span(self._units, self._units)
        ahead = self._state[start:]
        return Span(start, start + len(ahead) - len(ahead.lstrip(_LOADING)))

    def take_front(self, count: int) -> Span:
        """Claims up to `count` units from the front for computing, never one that a transfer has
        taken.
        """
        stop = min(self._front + count, self.barrier())
        return self._advance(Span(self._front, stop), _COMPUTED)

    def lack(self, span: Span) -> None:
        """Untouched units of `span` cannot be loaded: they belong to the front."""
        piece = self._state[span.start : span.stop]
        self._state[span.start : span.stop] = piece.replace(_FREE, _LOST)

    def take_back(self, count: int, within: Span | None = None, floor: int = 0) -> Span:
        """Claims the highest run of at most `count` untouched units for loading, inside `within`
        and at or above `floor`.

        Units that failed once belong to the front and are skipped. Empty when there is none.
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
        """Units of `span` in flight have landed. Others stay as they are; returns how many
        landed.
        """
        return self._settle(span, _LANDED)

    def lose(self, span: Span) -> int:
        """Units of `span` in flight will not come: they belong to the front. Returns how many there
        were. Where landed units can be attached up to the end only, all units before the last of
        these belong to it too.
        """
        lost = self._settle(span, _LOST)
        if lost and self._front < self._anchor:
            stop = self._state.rfind(_LOST, self._front, span.stop) + 1
            self._paint(Span(self._front, max(self._front, stop)), _LOST)
        return lost

    def give_back(self, span: Span) -> int:
        """Units of `span` in flight were not begun and will not be: either end may take them.
        Returns how many.
        """
        return self._settle(span, _FREE)

    def attach(self, span: Span) -> None:
        """The landed units `span`, which begin at the front, are now part of the prefix."""
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
