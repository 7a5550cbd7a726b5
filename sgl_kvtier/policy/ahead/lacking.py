"""Pages that owners lack on the device, and the moves begun for them.

The facts behind `prefetch.py`'s decisions: what was moved, has come, was used or was lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.brought import Brought
from sgl_kvtier.policy.ahead.charge import FIRST_HOP, LinkTime, Room, hops, restored_over
from sgl_kvtier.policy.ahead.flights import Flights
from sgl_kvtier.policy.ahead.overlap import Overlap, Overlaps
from sgl_kvtier.policy.ahead.reach import Step
from sgl_kvtier.policy.ahead.turns import Turn
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import Move
from sgl_kvtier.policy.pages.page_state import Missing
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Link, PageKey, Span, Tier

_LATE: Final = 4.0
"""A move that takes this many times its predicted time, and load_deadline_s more, has failed."""


class Lacking:
    """Reads the map and marks there the pages it moves. The executor reports arrivals to `placed`,
    and pages that left or did not come to `dropped`, besides telling the map. One thread, no clock.
    """

    def __init__(
        self,
        config: PolicyConfig,
        tier_map: TierMap,
        bandwidth: Bandwidth,
        page_bytes: int,
        rules: Rules | None = None,
    ) -> None:
        self._config = config
        self._rules = Rules() if rules is None else rules
        self._map = tier_map
        self._bandwidth = bandwidth
        self._page_bytes = page_bytes
        self._flights = Flights()
        self.known: dict[str, Missing] = {}
        """The pages owners lack, as of the last `refresh`; not every owner is in it."""
        self._wanting: dict[str, None] = {}
        self._watched: dict[str, None] = {}
        self._rest_until = -math.inf
        self.brought = Brought(self._flights, config.prefetch_waste)
        self.overlaps = Overlaps()
        self.moved: dict[Tier, int] = {Tier.DEVICE: 0, Tier.HOST: 0}
        """Pages moved so far, by target."""
        self.late = 0
        """Pages whose move took too long."""

    # --- facts ------------------------------------------------------------------------------------

    def placed(self, keys: Sequence[PageKey], tier: Tier, now: float) -> None:
        """Pages are in a tier from now on."""
        if tier is Tier.DEVICE and len(self.overlaps):
            # Not moved ahead: the engine brings them in the step that admits their request. Others
            # may share all but the last.
            page = self._map.page(keys[-1]) if keys and keys[-1] not in self._flights else None
            for owner in () if page is None or Tier.HOST not in page.tiers else page.owners:
                self.overlaps.fetched(owner)
        if len(self._flights):
            self._flights.ended(keys, tier, now)

    def dropped(self, keys: Sequence[PageKey], tier: Tier, now: float) -> None:
        """Pages have left a tier, or will not come to it."""
        halfway = (
            [key for key in keys if self._is_halfway(key)]
            if tier is Tier.DEVICE and len(self._flights)
            else []
        )
        if halfway:
            self.brought.halfway(halfway)
            self._flights.ended(halfway, tier, now)
        self.brought.left(keys, tier, now, self._watched)
        if len(self._flights):
            self._flights.ended(keys, tier, now)

    def _is_halfway(self, key: PageKey) -> bool:
        """Whether a page that was on its way through host to device is in host memory now."""
        page = self._map.page(key) if self._flights.from_below_host(key) else None
        return page is not None and Tier.HOST in page.tiers

    def started(self, owner: str, keys: Sequence[PageKey]) -> None:
        """An owner runs from now on, on these pages."""
        self.overlaps.started(owner, not self.missing(owner).runs)
        self.brought.used(owner, keys)

    def watch(self, owner: str) -> None:
        """An owner's turn is to come: track whether it lacks pages."""
        self._watched[owner] = None
        self._wanting[owner] = None

    def unwatch(self, owner: str) -> None:
        """The owner's turn has come, or will not."""
        self._watched.pop(owner, None)
        self._wanting.pop(owner, None)

    def forget(self, owner: str) -> None:
        """Forgets an owner."""
        self.unwatch(owner)
        self.known.pop(owner, None)
        self.brought.forget(owner)
        self.overlaps.forget(owner)

    def refresh(self) -> Mapping[str, None]:
        """Watched owners that may lack pages, after reading the map's changes."""
        if self._map.has_changed:
            for changed in self._map.take_changed():
                self.known.pop(changed, None)
                if changed in self._watched:
                    self._wanting[changed] = None
                    self._rest_until = -math.inf
        return self._wanting

    def missing(self, owner: str) -> Missing:
        """The pages an owner lacks on the device, looked up again only after a change for it."""
        if self._map.has_changed:
            self.refresh()
        known = self.known.get(owner)
        if known is None:
            known = self.known[owner] = self._map.missing(owner)
            if not known.runs:
                self._wanting.pop(owner, None)
        return known

    @property
    def in_flight(self) -> int:
        """Number of pages being moved."""
        return len(self._flights)

    # --- moves ------------------------------------------------------------------------------------

    def demote(self, owner: str, source: Tier, target: Tier, most: int, now: float) -> Move | None:
        """Copies up to `most` of an owner's pages from `source` to a lower tier, those with no copy
        at or below it.
        """
        link = Link.DEVICE_TO_HOST if source is Tier.DEVICE else Link.HOST_TO_STORAGE
        keys = self._flights.others(self._map.without_copy(owner, source, target))[:most]
        if not keys:
            return None
        late_at = now + _LATE * self._bandwidth.seconds(link, len(keys) * self._page_bytes)
        self._flights.begin(keys, target, (link,), now, late_at + self._config.load_deadline_s)
        self._map.moving(keys, target)
        self.moved[target] = self.moved.get(target, 0) + len(keys)
        return Move(keys, source, target)

    def emit(self, step: Step, turn: Turn, span: Span, source: Tier, target: Tier) -> None:
        """Adds a move of pages that have room in `target` to the step."""
        keys = self._flights.others(self._map.keys_of(turn.owner, span))
        if not keys:
            return
        if target is Tier.HOST:
            links: tuple[Link, ...] = (FIRST_HOP[source],)
        else:
            links = hops(source)
        taken_s = max(
            step.links[link].seconds(self._flights.pages(link) + len(keys)) for link in links
        )
        late_at = step.now + _LATE * taken_s + self._config.load_deadline_s
        self._flights.begin(keys, target, links, step.now, late_at, turn.owner)
        self._map.moving(keys, target)
        self.moved[target] += len(keys)
        step.rooms[target].claim(len(keys))
        self.brought.begun(keys, target, turn.owner, turn.chance)
        step.moves.append(Move(keys, source, target, turn.rid))

    def test(self, step: Step, test: Overlap) -> None:
        """Notes a prediction of this step."""
        if self.overlaps.tested(test):
            step.tests.append(test)

    def _links(self, now: float, busy_s: Mapping[Link, float]) -> dict[Link, LinkTime]:
        factor = 1 + self._rules.prefetch_margin if self._rules.shares_links else 1.0
        # The network is a link only where it has something to bring.
        below = Tier.REMOTE if self._map.count(Tier.REMOTE) else Tier.STORAGE
        firsts = [hop for tier, hop in FIRST_HOP.items() if tier <= below]
        links = {
            link: LinkTime(self._bandwidth, link, self._page_bytes, factor)
            for link in (*firsts, Link.HOST_TO_DEVICE)
        }
        for link, time in links.items():
            time.end_s = busy_s.get(link, 0.0) + self._flights.backlog_seconds(
                link, time.page_s, now
            )
        # Restorations read the same device, and their pages go on to the device without a stop. A
        # request waits for those.
        for hop in firsts:
            restoring_s = busy_s.get(restored_over(hop), 0.0)
            links[hop].end_s += restoring_s
            links[hop].closed = restoring_s > 0 and self._rules.shares_links
        return links

    def _rooms(self, free: Mapping[Tier, int], empty: Mapping[Tier, int]) -> dict[Tier, Room]:
        return {
            tier: Room(
                self._map, tier, free.get(tier, 0), empty.get(tier), self._flights.coming(tier)
            )
            for tier in (Tier.DEVICE, Tier.HOST)
        }
