"""Idle sessions behind the queue: whoever waits now runs before a request that is still to come.

A session that is expected back while others wait will run after them, however soon it comes. So its pages are taken to be
needed no sooner than the queue is done, and give way to those of the queue.
"""

from __future__ import annotations

import heapq

from sgl_kvtier.policy.tier_map import TierMap

_SPARE = 1.25
"""A session is put off behind so many times the queue, so that this has to be looked at again only after the rest of it."""


class Behind:
    """When idle sessions will next use their pages, as the map is told. Seconds of the hands' clock."""

    def __init__(self, tier_map: TierMap) -> None:
        self._map = tier_map
        self._expected: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._put_off: dict[str, None] = {}
        self._order: list[tuple[float, str]] = []
        """A heap of what the map was told, with entries that hold no longer."""

    def expect(self, session: str, next_use: float) -> None:
        """An idle session is expected to use its pages then, if it need not wait."""
        self._expected[session] = next_use
        self._put_off.pop(session, None)
        self._tell(session, next_use)

    def gone(self, session: str) -> None:
        """It is not idle any more, or not expected any more."""
        for known in (self._expected, self._told):
            known.pop(session, None)
        self._put_off.pop(session, None)

    def queue(self, now: float, queue_s: float) -> None:
        """What waits now is done in so many seconds; 0: nobody waits."""
        if queue_s <= 0:
            for session in self._put_off:
                self._tell(session, self._expected[session])
            self._put_off.clear()
            return
        order, done = self._order, now + queue_s
        while order and order[0][0] < done:
            told, session = heapq.heappop(order)
            if self._told.get(session) == told:
                self._put_off[session] = None
                # Behind the queue they keep their order.
                self._tell(session, now + _SPARE * queue_s + (_SPARE - 1) * max(0.0, self._expected[session] - now))

    def _tell(self, session: str, turn: float) -> None:
        self._told[session] = turn
        self._map.expect(f"session {session}", turn)
        heapq.heappush(self._order, (turn, session))
        if len(self._order) > 64 + 4 * len(self._told):
            self._order[:] = [(told, name) for name, told in self._told.items()]
            heapq.heapify(self._order)
