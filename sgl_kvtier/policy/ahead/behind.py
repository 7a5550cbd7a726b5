"""Idle sessions behind the queue: whoever waits now runs before a request that is still to come.

A session that is expected back while others wait will run after them, however soon it comes. So its
pages are taken to be needed no sooner than the queue is done, and give way to those of the queue.
Among themselves such sessions keep their order, and are so close together that none is worth
pushing out for another.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

from sgl_kvtier.policy.pages.owners import owner_of
from sgl_kvtier.policy.pages.tier_map import TierMap

_SPARE: Final = 1.25
"""Sessions are put off to so many times the queue, so that this is worked out anew only after the
rest of it.
"""
_LOOSE: Final = 1.6
"""Or when the queue has become so many times as short."""
_APART: Final = 1e-6
"""What is left of the time between two sessions that are put off."""


class Behind:
    """When idle sessions will next use their pages, as the map is told. Seconds of the hands'
    clock.
    """

    def __init__(self, tier_map: TierMap) -> None:
        self._map = tier_map
        self._expected: dict[str, float] = {}
        self._put_off: dict[str, None] = {}
        self._until = -math.inf
        """Sessions expected before are put off until then."""
        self._order: list[tuple[float, str]] = []
        """A heap of those not put off, with entries that hold no longer."""

    def expect(self, session: str, next_use: float) -> None:
        """An idle session is expected to use its pages then, if it need not wait."""
        self._expected[session] = next_use
        self._put_off.pop(session, None)
        self._map.expect(owner_of(session), next_use)
        heapq.heappush(self._order, (next_use, session))
        if len(self._order) > 64 + 4 * len(self._expected):
            self._order[:] = [
                (told, name) for name, told in self._expected.items() if name not in self._put_off
            ]
            heapq.heapify(self._order)

    def gone(self, session: str) -> None:
        """It is not idle any more, or not expected any more."""
        self._expected.pop(session, None)
        self._put_off.pop(session, None)

    def queue(self, now: float, queue_s: float) -> None:
        """What runs and waits now is done in so many seconds; 0: nothing does."""
        if now + queue_s > self._until or self._until - now > _LOOSE * queue_s:
            before, self._put_off = self._put_off, {}
            self._until = now + _SPARE * queue_s if queue_s > 0 else -math.inf
            for session in before:
                if self._expected[session] < self._until:
                    self._put(session)
                else:
                    self.expect(session, self._expected[session])
        order = self._order
        while order and order[0][0] < self._until:
            expected, session = heapq.heappop(order)
            if self._expected.get(session) == expected and session not in self._put_off:
                self._put(session)

    def _put(self, session: str) -> None:
        self._put_off[session] = None
        self._map.expect(
            owner_of(session), self._until - _APART * (self._until - self._expected[session])
        )
