"""The next runs, and the budget of one planning step: how many runs ahead it looks, and the link
seconds and tier pages that are charged move by move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from sgl_kvtier.policy.ahead.moves import Overlap
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import Move, ReadsDue
from sgl_kvtier.policy.pages.page_state import Missing
from sgl_kvtier.policy.pages.tier_map import EvictionClass, TierMap
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, PageKey, Tier

FIRST_HOP: Final[Mapping[Tier, Link]] = {
    Tier.STORAGE: Link.STORAGE_TO_HOST,
    Tier.REMOTE: Link.REMOTE_TO_HOST,
}
"""The link from each tier below host memory to host memory."""
_IN_ONE: Final[Mapping[Link, Link]] = {
    Link.STORAGE_TO_HOST: Link.STORAGE_TO_DEVICE,
    Link.REMOTE_TO_HOST: Link.REMOTE_TO_DEVICE,
}
"""The link of restorations over the same device or network. Its second hop is the faster one."""
_EARLY: Final = 0.5
"""With K from measured speeds, a run is expected after this share of the predicted time."""
SOON: Final = 2.0
"""With K from measured speeds, transfers begin if they are due within this many iterations."""


class Turn(NamedTuple):
    """The next run of an owner of pages."""

    owner: str
    """The owner's name in the map."""
    rid: str | None
    """The waiting request that will run; None for a session that is only expected."""
    steps: int
    """Number of iterations before it; 0: it runs in this one."""
    window_s: float
    """Seconds that these iterations take."""
    before: int = 0
    """Device pages that runs between the previous turn and this one allocate. These runs are
    omitted because they lack no pages.
    """
    chance: float = 1.0
    """The probability that it runs at all."""


def reads_due(question: ReadsDue) -> tuple[str, ...]:
    """The requests whose stored pages are read now, in queue order. The first in the queue never
    waits; a later one is read if it and all before it fit.

    SGLang reads a waiting request's pages from storage into host memory once, when it arrives,
    however many requests wait before it. Pages that do not fit evict those read for other requests,
    which are then computed although they were read. TierKV (Algorithm 1) looks as far ahead as
    there is room, and so does this.
    """
    found: list[str] = []
    room = question.room
    for place, request in enumerate(question.queue):
        room -= request.pages
        if room < 0 and place:
            break
        if request.unread:
            found.append(request.rid)
    return tuple(found)


def restored_over(hop: Link) -> Link:
    """The link of restorations over the same device or network as this first hop."""
    return _IN_ONE[hop]


def hops(source: Tier) -> tuple[Link, ...]:
    """The links from a tier to the device, one after the other."""
    if source is Tier.HOST:
        return (Link.HOST_TO_DEVICE,)
    return (FIRST_HOP[source], Link.HOST_TO_DEVICE)


class LinkBudget:
    """The time at which a link will be done with everything charged to it, in seconds from now.
    `factor` > 1: the link counts as slower than measured.
    """

    def __init__(
        self, bandwidth: Bandwidth, link: Link, page_bytes: int, factor: float = 1.0
    ) -> None:
        source, whole = link, _IN_ONE.get(link)
        if whole is not None and not bandwidth.known(link) and bandwidth.known(whole):
            source = whole
        self.page_s = page_bytes / bandwidth.bytes_per_second(source) * factor
        self.latency_s = max(0.0, bandwidth.seconds(source, page_bytes) * factor - self.page_s)
        self.end_s = 0.0
        self.closed = False
        """A request waits for pages of this link, so nothing more is charged to it in this step."""

    def seconds(self, pages: int) -> float:
        """Seconds that pages take on an idle link (TierKV Eq. 2)."""
        return self.latency_s + pages * self.page_s if pages else 0.0

    def fit(self, until_s: float) -> int:
        """Number of pages that could arrive within `until_s` seconds, after those charged."""
        if self.closed:
            return 0
        return (
            max(0, int((until_s - self.end_s - self.latency_s) / self.page_s + 1e-9))
            if until_s < math.inf
            else 1 << 30
        )

    def charge(self, pages: int) -> None:
        """Charges more pages to the link."""
        self.end_s += self.seconds(pages)


class TierBudget:
    """The pages of a tier that can be allocated: empty ones first, then evictable ones, farthest
    next use first.

    `coming` pages are in flight to the tier and may not be allocated yet. They are served first,
    and pages may still have to be evicted for them. The map is read lazily, for as many classes of
    victims as are needed, and must not regroup its pages meanwhile.
    """

    def __init__(
        self, tier_map: TierMap, tier: Tier, free: int, empty: int | None = None, coming: int = 0
    ) -> None:
        self._map = tier_map
        self._tier = tier
        self.left = max(0, free)
        """Number of pages that can still be reserved."""
        self.empty = (
            max(0, free - tier_map.evictable(tier)) if empty is None else max(0, min(empty, free))
        )
        self._have = self.empty
        self._classes = tier_map.classes(tier)
        self._next: EvictionClass | None = None
        self._drawn: list[int] = []
        self._drawn_pages = 0
        self.filled = 0
        if coming:
            self.filled = self.reserve(coming, -math.inf)

    def reserve(self, pages: int, needed_at: float) -> int:
        """Reserves up to `pages`, evicting those needed after `needed_at`. Returns how many."""
        if not self.left:
            return 0
        granted = self._gather(min(pages, self.left), needed_at)
        self.left -= granted
        return granted

    def pass_over(self, pages: int) -> None:
        """Leaves the first evictable pages to other requests that have not allocated them yet."""
        self._gather(pages, -math.inf)

    def fill(self, pages: int) -> None:
        """Counts reserved pages that are filled in this step."""
        self.filled += pages

    def victims(self) -> tuple[PageKey, ...]:
        """The pages to evict for the pages filled in this step."""
        missing = self.filled - self.empty
        if missing <= 0:
            return ()
        while self._drawn_pages < missing and self._draw():
            pass
        return self._map.victims_of(self._tier, self._drawn, missing)

    def _gather(self, pages: int, needed_at: float) -> int:
        """Takes up to `pages` available and evictable pages. Returns how many there were."""
        while self._have < pages and (more := self._draw(needed_at)):
            self._have += more
        granted = max(0, min(pages, self._have))
        self._have -= granted
        return granted

    def _draw(self, needed_at: float = -math.inf) -> int:
        """Adds the next class of victims unless needed too soon. Returns its number of pages."""
        if self._next is None:
            self._next = next(self._classes, None)
        if self._next is None or self._next.next_use <= needed_at:
            return 0
        shelf, _, pages = self._next
        self._drawn.append(shelf)
        self._drawn_pages += pages
        self._next = None
        return pages


class Step:
    """The state of one planning step."""

    def __init__(
        self,
        now: float,
        iteration_s: float,
        links: dict[Link, LinkBudget],
        tiers: dict[Tier, TierBudget],
    ) -> None:
        self.now = now
        self.iteration_s = iteration_s
        self.links = links
        self.tiers = tiers
        self.moves: list[Move] = []
        self.tests: list[Overlap] = []
        self.lookahead = 0

    def firsts(self, missing: Missing) -> list[tuple[LinkBudget, int]]:
        """The first hops of an owner's pages below host memory, each with its number of pages."""
        found = [(self.links[Link.STORAGE_TO_HOST], missing.below - missing.remote)]
        if missing.remote:
            found.append((self.links[Link.REMOTE_TO_HOST], missing.remote))
        return found

    def full(self, horizon_s: float) -> bool:
        """Whether every first hop has enough work until the horizon."""
        return all(
            time.closed or time.end_s >= horizon_s
            for link, time in self.links.items()
            if link is not Link.HOST_TO_DEVICE
        )

    def spent(self, budget: int, horizon_s: float, from_host: bool) -> bool:
        """Whether no more pages can be prefetched to the device for any turn: there is no room, or
        links have enough work until the horizon. `from_host`: some turn has pages in host memory.
        """
        pcie = self.links[Link.HOST_TO_DEVICE]
        if budget <= 0 or not self.tiers[Tier.DEVICE].left or not pcie.fit(horizon_s + pcie.page_s):
            return True
        return not from_host and not any(
            time.fit(horizon_s + time.page_s) for time in self.links.values() if time is not pcie
        )


def reach(
    rules: Rules, step: Step, turns: Sequence[Turn], known: Sequence[Missing]
) -> tuple[int, int]:
    """For how many turns pages are prefetched to the device, and to host memory. `known`: the pages
    that each turn lacks.

    If K is given: turns within K iterations. If K is derived from measured speeds: up to the last
    turn whose transfers, together with all before them, must begin before the next step but one
    (the latest start of earliest-deadline-first).
    """
    near = sum(turn.steps <= rules.lookahead for turn in turns) if rules.lookahead >= 0 else 0
    far = (
        sum(turn.steps <= rules.lookahead_ssd for turn in turns) if rules.lookahead_ssd >= 0 else 0
    )
    if rules.lookahead >= 0 and rules.lookahead_ssd >= 0:
        return near, max(near, far)
    pcie = step.links[Link.HOST_TO_DEVICE]
    soon_s = SOON * step.iteration_s
    latest = dict.fromkeys(map(id, step.links.values()), math.inf)
    latest_pcie = math.inf
    auto_near = auto_far = 0
    for place in range(len(turns) - 1, -1, -1):
        missing = known[place]
        if not missing.lacking:
            continue
        latest_pcie = (
            min(latest_pcie, turns[place].window_s * _EARLY) - missing.lacking * pcie.page_s
        )
        if latest_pcie <= soon_s + pcie.end_s and not auto_near:
            auto_near = place + 1
        for first, pages in step.firsts(missing) if missing.below else ():
            if not pages:
                continue
            latest_s = min(latest[id(first)], latest_pcie) - pages * first.page_s
            latest[id(first)] = latest_s
            if latest_s <= soon_s + first.end_s and not auto_far:
                auto_far = place + 1
    near = auto_near if rules.lookahead < 0 else near
    return near, max(near, auto_far if rules.lookahead_ssd < 0 else far)


def in_host(known: Sequence[Missing]) -> int:
    """Number of turns up to the last one with missing pages in host memory."""
    for place in range(len(known) - 1, -1, -1):
        for _, tier in known[place].runs:
            if tier is Tier.HOST:
                return place + 1
    return 0
