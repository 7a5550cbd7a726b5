"""Idle sessions: when prefetching their pages has to be considered, when the pages get a copy in a
lower tier, and when they have no owner any more.

`sessions.py` predicts when a session returns; this module derives what that means for its pages
while it is idle. A session owns its pages in the map from turn to turn, under the name
`owners.owner_of` gives it.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.behind import Behind
from sgl_kvtier.policy.ahead.prefetch import Prefetcher
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import Move, StepView
from sgl_kvtier.policy.pages.owners import owner_of
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.sessions.returns import LIKELY
from sgl_kvtier.policy.sessions.sessions import Return
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, PageKey, Span, Tier

MOST_IDLE: Final = 10_000
"""Most idle sessions that are tracked."""
_SPARE_SOON: Final = 1000
_MOST_LOST: Final = 100_000
"""Most pages of abandoned sessions whose names are kept for a later hint: at most 100 bytes each,
when nothing else names them.
"""


class IdleSessions:
    """Sessions between two turns, by name. Seconds of the executor's clock."""

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
        self._behind = Behind(tier_map)
        self._expected: dict[str, Return] = {}
        self.due: dict[str, Return] = {}
        """Sessions whose pages have to be considered for prefetching by now."""
        self._soon_at: dict[str, float] = {}
        self._soon: list[tuple[float, str]] = []
        """A heap of the times at which their pages are considered; it has outdated entries too."""
        self._demote: dict[str, None] = {}
        self._lost: dict[str, tuple[PageKey, ...]] = {}
        self._lost_pages = 0

    def __len__(self) -> int:
        return len(self._expected)

    def __contains__(self, session: object) -> bool:
        return session in self._expected

    def gave_up(self, session: str) -> bool:
        """Whether its pages have no owner any more, but are remembered."""
        return session in self._lost

    def lost_with(self, key: PageKey) -> list[str]:
        """Abandoned sessions that had this page. O(their pages)."""
        return [session for session, keys in self._lost.items() if key in keys]

    def expect(self, expected: Return, now: float, iteration_s: float) -> None:
        """A session is expected at another time than before, or for the first time."""
        session = expected.session
        if expected.at == math.inf:
            self._expected.setdefault(session, expected)
            self._give_up(session)
            return
        first = session not in self._expected
        self._expected[session] = expected
        self._behind.expect(session, expected.next_use, expected.chance >= LIKELY)
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
        """An abandoned session is expected after all: it owns its pages again."""
        self._map.claim(
            owner_of(expected.session), self._forget_lost(expected.session), expected.next_use
        )
        self.expect(expected, now, iteration_s)

    def back(self, session: str) -> None:
        """The session is no longer idle."""
        self._forget_lost(session)
        self._expected.pop(session, None)
        self._behind.gone(session)
        self._soon_at.pop(session, None)
        if self.due.pop(session, None) is not None:
            self._prefetcher.unwatch(owner_of(session))
        self._demote.pop(session, None)

    def look(self, now: float, queue_s: float, soon_s: float = 0.0) -> None:
        """Time has passed; the requests that wait now will be done in `queue_s` seconds. Sessions
        that probably come within `soon_s` run before them.
        """
        while self._soon and self._soon[0][0] <= now:
            at, session = heapq.heappop(self._soon)
            if self._soon_at.get(session) == at:
                self.due[session] = self._expected[session]
                self._prefetcher.watch(owner_of(session))
        if self._expected:
            self._behind.queue(now, queue_s, soon_s)

    @property
    def put_off_until(self) -> float:
        """About when the requests that wait now are done; -infinity where none waits."""
        return self._behind.until

    def comes_by(self, until: float) -> bool:
        """Whether a session that has pages in memory, and is likely to return, should be back by
        then. O(idle sessions).
        """
        for one in self._expected.values():
            if one.chance >= LIKELY and one.at <= until:
                missing = self._prefetcher.missing(owner_of(one.session))
                if missing.reach > missing.below:
                    return True
        return False

    def demotions(self, view: StepView) -> tuple[Move, ...]:
        """For one session a step: copies of its pages that are in device or host alone to a lower
        tier, so that they can be evicted at once later.
        """
        if not self._demote or self._config.prefetch == "off":
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
        """Abandons a session: its pages have no owner, unless a hint comes later."""
        self.back(session)
        keys = self._map.keys_of(owner_of(session), Span(0, len(self._map)))
        self._lost[session] = keys
        self._lost_pages += len(keys)
        while self._lost_pages > _MOST_LOST or len(self._lost) > MOST_IDLE:
            self._forget_lost(next(iter(self._lost)))
        self._map.release(owner_of(session))
        self._prefetcher.forget(owner_of(session))

    def _forget_lost(self, session: str) -> tuple[PageKey, ...]:
        """Forgets an abandoned session and returns its pages."""
        keys = self._lost.pop(session, ())
        self._lost_pages -= len(keys)
        return keys
