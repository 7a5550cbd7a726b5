"""How far one planning step of the prefetcher looks: for how many turns pages are prefetched, and
when no more can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from sgl_kvtier.policy.ahead.charge import LinkTime, Room
from sgl_kvtier.policy.ahead.overlap import Overlap
from sgl_kvtier.policy.ahead.turns import Turn
from sgl_kvtier.policy.messages import Move
from sgl_kvtier.policy.pages.page_state import Missing
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, Tier

_EARLY: Final = 0.5
"""With K from measured speeds, a turn is expected after this share of the predicted time."""
SOON: Final = 2.0
"""With K from measured speeds, transfers begin when due within this many iterations."""


class Step:
    """The state of one planning step."""

    def __init__(
        self, now: float, iteration_s: float, links: dict[Link, LinkTime], rooms: dict[Tier, Room]
    ) -> None:
        self.now = now
        self.iteration_s = iteration_s
        self.links = links
        self.rooms = rooms
        self.moves: list[Move] = []
        self.tests: list[Overlap] = []
        self.lookahead = 0

    def firsts(self, missing: Missing) -> list[tuple[LinkTime, int]]:
        """The first hops of an owner's pages below host memory, and how many each has to bring."""
        found = [(self.links[Link.STORAGE_TO_HOST], missing.below - missing.remote)]
        if missing.remote:
            found.append((self.links[Link.REMOTE_TO_HOST], missing.remote))
        return found

    def full(self, horizon_s: float) -> bool:
        """Whether every first hop has enough to do until the horizon."""
        return all(
            time.closed or time.end_s >= horizon_s
            for link, time in self.links.items()
            if link is not Link.HOST_TO_DEVICE
        )

    def spent(self, budget: int, horizon_s: float, from_host: bool) -> bool:
        """Whether no more pages can be prefetched to the device, for any turn: there is no room, or
        links have enough to do until the horizon. `from_host`: some turn has pages that only the
        second link has to bring.
        """
        pcie = self.links[Link.HOST_TO_DEVICE]
        if budget <= 0 or not self.rooms[Tier.DEVICE].left or not pcie.fit(horizon_s + pcie.page_s):
            return True
        return not from_host and not any(
            time.fit(horizon_s + time.page_s) for time in self.links.values() if time is not pcie
        )


def reach(
    rules: Rules, step: Step, turns: Sequence[Turn], known: Sequence[Missing]
) -> tuple[int, int]:
    """For how many turns pages are prefetched to the device, and to host memory. `known`: the pages
    each turn lacks.

    With K given: turns within K iterations. From measured speeds: up to the last turn whose
    transfers, with all before them, have to begin before the next step but one (the latest start of
    earliest-deadline-first).
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
    """Number of turns up to the last one that has missing pages in host memory."""
    for place in range(len(known) - 1, -1, -1):
        for _, tier in known[place].runs:
            if tier is Tier.HOST:
                return place + 1
    return 0
