"""Idle sessions behind the queue: requests that wait now run before requests still to come.

A session that is expected back while requests wait will run after them. So its pages count as
needed no sooner than the queue is done, and are evicted before those of the queue. Among themselves
such sessions keep their order, but lie so close together that no page of one is worth evicting for
another. One that comes within about the time that a waiting request takes runs before those, for
it has less to compute: its pages are needed when it comes.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

from sgl_kvtier.policy.pages.owners import owner_of
from sgl_kvtier.policy.pages.tier_map import TierMap

_SPARE: Final = 1.25
"""Sessions are put off to this many times the queue's duration: recomputed only after the rest."""
_LOOSE: Final = 1.6
"""The time is also recomputed once it lies more than this many times the queue's duration ahead."""
_APART: Final = 1e-6
"""The time between two sessions that are put off is shrunk to this share."""


class Behind:
    """The next use of idle sessions' pages, as the map is told. Seconds of the executor's clock."""

    def __init__(self, tier_map: TierMap) -> None:
        self._map = tier_map
        self._expected: dict[str, float] = {}
        self._likely: dict[str, None] = {}
        self._put_off: dict[str, None] = {}
        self._before: dict[str, None] = {}
        """Sessions that would be put off if they did not come so soon."""
        self.until = -math.inf
        """Sessions expected earlier are put off until this time."""
        self._soon = -math.inf
        """But not those that probably come by then."""
        self._order: list[tuple[float, str]] = []
        """A heap of the sessions not put off; it also has outdated entries."""
        self._later: list[tuple[float, str]] = []
        """The same of those put off that are likely to come."""

    def expect(self, session: str, next_use: float, likely: bool = False) -> None:
        """An idle session should use its pages at `next_use`, if it need not wait for the queue.
        `likely`: it comes rather than not.
        """
        self.gone(session)
        self._expected[session] = next_use
        if likely:
            self._likely[session] = None
        self._map.expect(owner_of(session), next_use)
        self._push(self._order, session)

    def gone(self, session: str) -> None:
        """The session is no longer idle, or no longer expected."""
        for known in (self._expected, self._likely, self._put_off, self._before):
            known.pop(session, None)

    def queue(self, now: float, queue_s: float, soon_s: float = 0.0) -> None:
        """The requests that run and wait now will be done in `queue_s` seconds; 0: none. Sessions
        that probably come within `soon_s` run before them.
        """
        self._soon = now + soon_s
        again = [*self._before]
        if now + queue_s > self.until or self.until - now > _LOOSE * queue_s:
            again += self._put_off
            self._put_off = {}
            self.until = now + _SPARE * queue_s if queue_s > 0 else -math.inf
        for heap, before in ((self._order, self.until), (self._later, self._soon)):
            while heap and heap[0][0] < before:
                expected, session = heapq.heappop(heap)
                if self._expected.get(session) == expected:
                    again.append(session)
        for session in again:
            self._decide(session)

    def _decide(self, session: str) -> None:
        """Puts a session off, or not."""
        expected = self._expected[session]
        self._before.pop(session, None)
        self._put_off.pop(session, None)
        if expected >= self.until:
            self._push(self._order, session)
        elif session in self._likely and expected < self._soon:
            self._before[session] = None
        else:
            self._put(session)
            if session in self._likely:
                self._push(self._later, session)
            return
        self._map.expect(owner_of(session), expected)

    def _push(self, heap: list[tuple[float, str]], session: str) -> None:
        heapq.heappush(heap, (self._expected[session], session))
        if len(heap) > 64 + 4 * len(self._expected):
            # Doubles and outdated entries go; a sorted list is a heap.
            kept = [entry for entry in heap if self._expected.get(entry[1]) == entry[0]]
            heap[:] = sorted(dict.fromkeys(kept))

    def _put(self, session: str) -> None:
        self._put_off[session] = None
        self._map.expect(
            owner_of(session), self.until - _APART * (self.until - self._expected[session])
        )
