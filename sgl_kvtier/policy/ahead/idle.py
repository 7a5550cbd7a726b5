"""Idle sessions: when to consider prefetching their pages, when the pages get a copy in a lower
tier, and when they lose their owner.

`policy/sessions.py` predicts when a session returns; this module derives from that what happens to
its pages while it is idle. A session owns its pages in the map from turn to turn, under the name
that `owners.owner_of` gives it.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.prefetch import Prefetcher
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import Move, StepView
from sgl_kvtier.policy.pages.owners import owner_of
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.sessions import LIKELY, Return
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, PageKey, Span, Tier

MOST_IDLE: Final = 10_000
"""Upper bound of idle sessions that are tracked."""
_SPARE_SOON: Final = 1000
_MOST_LOST: Final = 100_000
"""Upper bound of pages of abandoned sessions that are kept for a later hint, 100 bytes each."""
_DEFER_TO: Final = 1.25
"""Sessions are deferred to this multiple of the queue's duration, and anew if it grows longer."""
_TOO_LATE: Final = 1.6
"""The time is also computed again once it is this multiple of the queue's duration away."""
_SHRINK: Final = 1e-6
"""The time between two deferred sessions is multiplied by this, which keeps their order."""


class Deferral:
    """The next use of idle sessions' pages, as recorded in the map. Seconds of the executor's
    clock.

    A session that is expected to return while requests wait will run after them. So its pages count
    as needed no sooner than the end of the queue, and are evicted before pages of the queue. These
    deferred sessions keep their order, but lie so close together that no page of one is worth
    evicting for another. The exception is a session that returns within about the time that a
    waiting request takes: it has less to compute and runs first.
    """

    def __init__(self, tier_map: TierMap) -> None:
        self._map = tier_map
        self._expected: dict[str, float] = {}
        """When each idle session should use its pages if it need not wait for the queue."""
        self._likely: dict[str, None] = {}
        """Sessions that are likely to return."""
        self._deferred: dict[str, None] = {}
        """Sessions whose next use is deferred to the end of the queue."""
        self._in_time: dict[str, None] = {}
        """Sessions that would be deferred if they did not return so soon."""
        self.until = -math.inf
        """Sessions expected earlier are deferred until this time."""
        self._soon = -math.inf
        """The exception: likely sessions that are expected before this time."""
        self._order: list[tuple[float, str]] = []
        """A heap of the sessions that are not deferred, with outdated entries."""
        self._later: list[tuple[float, str]] = []
        """The same for deferred sessions that are likely to return."""

    def expect(self, session: str, next_use: float, likely: bool = False) -> None:
        """An idle session should use its pages at `next_use` if it need not wait for the queue.
        `likely`: it is likely to return.
        """
        self.gone(session)
        self._expected[session] = next_use
        if likely:
            self._likely[session] = None
        self._map.expect(owner_of(session), next_use)
        self._push(self._order, session)

    def gone(self, session: str) -> None:
        """The session is no longer idle, or no longer expected."""
        for known in (self._expected, self._likely, self._deferred, self._in_time):
            known.pop(session, None)

    def queue(self, now: float, queue_s: float, soon_s: float = 0.0) -> None:
        """Running and waiting requests will be done in `queue_s` seconds; 0: there are none.
        Sessions that probably return within `soon_s` run before them.
        """
        self._soon = now + soon_s
        again = [*self._in_time]
        if now + queue_s > self.until or self.until - now > _TOO_LATE * queue_s:
            again += self._deferred
            self._deferred = {}
            self.until = now + _DEFER_TO * queue_s if queue_s > 0 else -math.inf
        for heap, before in ((self._order, self.until), (self._later, self._soon)):
            while heap and heap[0][0] < before:
                expected, session = heapq.heappop(heap)
                if self._expected.get(session) == expected:
                    again.append(session)
        for session in again:
            self._decide(session)

    def _decide(self, session: str) -> None:
        """Defers a session if it returns before the end of the queue, but not very soon."""
        expected = self._expected[session]
        self._in_time.pop(session, None)
        self._deferred.pop(session, None)
        if expected >= self.until:
            self._push(self._order, session)
        elif session in self._likely and expected < self._soon:
            self._in_time[session] = None
        else:
            self._defer(session)
            if session in self._likely:
                self._push(self._later, session)
            return
        self._map.expect(owner_of(session), expected)

    def _push(self, heap: list[tuple[float, str]], session: str) -> None:
        heapq.heappush(heap, (self._expected[session], session))
        if len(heap) > 64 + 4 * len(self._expected):
            # Removes duplicate and outdated entries; a sorted list is a heap.
            kept = [entry for entry in heap if self._expected.get(entry[1]) == entry[0]]
            heap[:] = sorted(dict.fromkeys(kept))

    def _defer(self, session: str) -> None:
        self._deferred[session] = None
        self._map.expect(
            owner_of(session), self.until - _SHRINK * (self.until - self._expected[session])
        )


class IdleSessions:
    """The sessions between two turns, by name. Seconds of the executor's clock."""

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        bandwidth: Bandwidth,
        tier_map: TierMap,
        prefetcher: Prefetcher,
        rules: Rules,
    ) -> None:
        self._config = config
        self._rules = rules
        self._engine = engine
        self._bandwidth = bandwidth
        self._map = tier_map
        self._prefetcher = prefetcher
        self._deferral = Deferral(tier_map)
        self._expected: dict[str, Return] = {}
        """All idle sessions that are expected to return."""
        self.due: dict[str, Return] = {}
        """Those whose pages are considered for prefetching now."""
        self._soon_at: dict[str, float] = {}
        """When each session's pages have to be considered."""
        self._soon: list[tuple[float, str]] = []
        """A heap of those times, with outdated entries."""
        self._demote: dict[str, None] = {}
        """Sessions whose pages are to get a copy in a lower tier."""
        self._lost: dict[str, tuple[PageKey, ...]] = {}
        """The pages of abandoned sessions, which no longer have an owner."""
        self._lost_with: dict[PageKey, dict[str, None]] = {}
        """The abandoned sessions that had a page."""
        self._lost_pages = 0

    def __len__(self) -> int:
        return len(self._expected)

    def __contains__(self, session: object) -> bool:
        return session in self._expected

    def gave_up(self, session: str) -> bool:
        """Whether the session is abandoned and its pages are still known."""
        return session in self._lost

    def lost_with(self, key: PageKey) -> list[str]:
        """The abandoned sessions that had this page."""
        return list(self._lost_with.get(key, ()))

    def expect(self, expected: Return, now: float, iteration_s: float) -> None:
        """A session is expected at a new time, or for the first time."""
        session = expected.session
        if expected.at == math.inf:
            self._expected.setdefault(session, expected)
            self._give_up(session)
            return
        first = session not in self._expected
        self._expected[session] = expected
        self._deferral.expect(session, expected.next_use, expected.chance >= LIKELY)
        pages = self._prefetcher.missing(owner_of(session)).pages
        lead_s = 2 * (
            iteration_s
            + self._bandwidth.seconds(Link.STORAGE_TO_HOST, pages * self._engine.page_bytes)
        )
        self._soon_at[session] = soon_at = expected.early - lead_s
        if session in self.due:
            if soon_at > now:
                del self.due[session]
                self._prefetcher.unwatch(owner_of(session))
            else:
                self.due[session] = expected
        heapq.heappush(self._soon, (soon_at, session))
        if len(self._soon) > _SPARE_SOON + 4 * len(self._expected):
            # A sorted list is a heap.
            self._soon = sorted(
                dict.fromkeys(
                    (at, name) for at, name in self._soon if self._soon_at.get(name) == at
                )
            )
        if first and expected.at - now > self._rules.demote_after_s:
            self._demote[session] = None
        if len(self._expected) > MOST_IDLE:
            self._give_up(next(iter(self._expected)))

    def find(self, expected: Return, now: float, iteration_s: float) -> None:
        """An abandoned session is expected after all, and owns its pages again."""
        self._map.claim(
            owner_of(expected.session), self._forget_lost(expected.session), expected.next_use
        )
        self.expect(expected, now, iteration_s)

    def back(self, session: str) -> None:
        """The session is no longer idle."""
        self._forget_lost(session)
        self._expected.pop(session, None)
        self._deferral.gone(session)
        self._soon_at.pop(session, None)
        if self.due.pop(session, None) is not None:
            self._prefetcher.unwatch(owner_of(session))
        self._demote.pop(session, None)

    def look(self, now: float, queue_s: float, soon_s: float = 0.0) -> None:
        """Time has passed. Waiting requests will be done in `queue_s` seconds, and sessions that
        probably return within `soon_s` run before them.
        """
        while self._soon and self._soon[0][0] <= now:
            at, session = heapq.heappop(self._soon)
            if self._soon_at.get(session) == at:
                self.due[session] = self._expected[session]
                self._prefetcher.watch(owner_of(session))
        if self._expected:
            self._deferral.queue(now, queue_s, soon_s)

    @property
    def deferred_until(self) -> float:
        """About when the requests that wait now are done; -infinity if none waits."""
        return self._deferral.until

    def comes_by(self, until: float) -> bool:
        """Whether a likely session with pages in memory is expected by then. O(idle sessions)."""
        for one in self._expected.values():
            if one.chance >= LIKELY and one.at <= until:
                missing = self._prefetcher.missing(owner_of(one.session))
                if missing.reach > missing.below:
                    return True
        return False

    def demotions(self, view: StepView) -> tuple[Move, ...]:
        """Copies to a lower tier of pages that have none there, for one session a step, so that the
        pages can be evicted at once later.
        """
        if not self._demote or self._config.prefetch != "on":
            return ()
        session = next(iter(self._demote))
        del self._demote[session]
        room = max(0, view.free_pages.get(Tier.HOST, 0) - self._map.evictable(Tier.HOST))
        moves = (
            self._prefetcher.demote(owner_of(session), Tier.DEVICE, Tier.HOST, room, view.now),
            self._prefetcher.demote(
                owner_of(session), Tier.HOST, Tier.STORAGE, len(self._map), view.now
            ),
        )
        return tuple(move for move in moves if move is not None)

    def _give_up(self, session: str) -> None:
        """Abandons a session. Its pages lose their owner, unless a hint comes later."""
        self.back(session)
        keys = self._map.keys_of(owner_of(session), Span(0, len(self._map)))
        self._lost[session] = keys
        self._lost_pages += len(keys)
        for key in keys:
            self._lost_with.setdefault(key, {})[session] = None
        while self._lost_pages > _MOST_LOST or len(self._lost) > MOST_IDLE:
            self._forget_lost(next(iter(self._lost)))
        self._map.release(owner_of(session))
        self._prefetcher.forget(owner_of(session))

    def _forget_lost(self, session: str) -> tuple[PageKey, ...]:
        """Forgets an abandoned session and returns its pages."""
        keys = self._lost.pop(session, ())
        self._lost_pages -= len(keys)
        for key in keys:
            having = self._lost_with[key]
            having.pop(session, None)
            if not having:
                del self._lost_with[key]
        return keys
