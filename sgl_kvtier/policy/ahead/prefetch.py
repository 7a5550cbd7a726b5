"""Lookahead: pages of waiting requests are prefetched before they run (TierKV section 3, Algorithm
1).

Eq. 1: a transfer is hidden if it takes no longer than the iterations until the request runs, plus
the scheduling slack. Eq. 2: a transfer takes a latency plus bytes over bandwidth. There are two
rules:

    tierkv   the paper's rule: requests of the next K iterations; each page is tested by itself
             against the whole window
    kvtier   pages share the links: requests in the order in which they run, each page charged
             after earlier pages and after the work that the links already have; K from measured
             speeds; a bounded share of the device. No page replaces one that is needed sooner, or
             one that an earlier request will need. Pages of a session that is only expected evict
             no page that is needed before twice as long

    map = TierMap(1_000_000, NextUse(), NextUse())
    bandwidth = Bandwidth({Link.HOST_TO_DEVICE: 2e10, Link.STORAGE_TO_HOST: 3e9})
    prefetcher = Prefetcher(PolicyConfig(prefetch="on"), map, bandwidth, 1 << 20)
    map.placed(keys, Tier.HOST, now=0.0)
    map.claim("request 7", keys, next_use=0.2)
    turns = [Turn("request 7", "7", steps=1, window_s=0.2)]
    plan = prefetcher.plan(0.0, turns, {Tier.DEVICE: 512}, iteration_s=0.2)
    plan.moves         # (Move(keys, Tier.HOST, Tier.DEVICE, "7"),)

To measure the cost of a step, add 256 owners of 256 pages each to a map and time `plan` with 256
turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.budget import (
    FIRST_HOP,
    SOON,
    LinkBudget,
    Step,
    TierBudget,
    Turn,
    hops,
    in_host,
    reach,
    restored_over,
)
from sgl_kvtier.policy.ahead.moves import InFlight, Overlap, Overlaps, Prefetched
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import Evict, Move
from sgl_kvtier.policy.pages.page_state import Missing
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.rules import Rules, ToCome
from sgl_kvtier.types import Link, PageKey, Span, Tier

_LATE: Final = 4.0
"""A move has failed after this many times its predicted time, and load_deadline_s more."""
SCOPE: Final = 32
"""Upper bound of turns with missing pages that one step considers. Later turns get closer first."""
_COVER: Final = 1.5
"""Moves cover this many iterations, so that no link becomes idle before the next plan."""
_REFILL: Final = 0.5
"""Links busy for more than this share of their horizon get no work: most steps plan nothing."""
_SPREAD: Final = 2.0
"""Pages of an expected session evict only pages that are not needed before this multiple of its
predicted wait. With a smaller margin either could be used first, and they would evict each other.
"""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The decisions of one planning step."""

    moves: tuple[Move, ...] = ()
    """In order of execution."""
    evictions: tuple[Evict, ...] = ()
    """Pages to evict first, by tier."""
    tests: tuple[Overlap, ...] = ()
    """The overlap tests of this step."""
    lookahead: int = 0
    """The K used."""


_NOTHING: Final = Prefetch()


class Prefetcher:
    """Prefetches pages for the given turns, and moves no page twice. It reads the map and marks the
    pages that it moves there. The executor's facts about pages that arrive go to `placed`, those
    about pages that leave or do not arrive to `dropped`, and all of them to the map as well. The
    cost of a step grows with what has changed since the last one. One thread, no clock.
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
        self._in_flight = InFlight()
        self.known: dict[str, Missing] = {}
        """The pages that owners lack, as of the last `refresh`; not every owner is listed."""
        self._wanting: dict[str, None] = {}
        """Watched owners that may lack pages."""
        self._watched: dict[str, None] = {}
        """Owners that have yet to run."""
        self._rest_until = -math.inf
        """Nothing is due before this time, unless something changes."""
        self.prefetched = Prefetched(self._in_flight, config.prefetch_waste)
        self.overlaps = Overlaps()

    # --- facts ------------------------------------------------------------------------------------

    def placed(self, keys: Sequence[PageKey], tier: Tier, now: float) -> None:
        """Pages are in a tier from now on."""
        if tier is Tier.DEVICE and len(self.overlaps):
            # Not prefetched: the engine loads them in the step that admits their request. Other
            # owners may share all pages but the last.
            page = self._map.page(keys[-1]) if keys and keys[-1] not in self._in_flight else None
            for owner in () if page is None or Tier.HOST not in page.tiers else page.owners:
                self.overlaps.fetched(owner)
        if len(self._in_flight):
            self._in_flight.ended(keys, tier, now)

    def dropped(self, keys: Sequence[PageKey], tier: Tier, now: float) -> None:
        """Pages have left a tier, or will not arrive there."""
        halfway = (
            [key for key in keys if self._is_halfway(key)]
            if tier is Tier.DEVICE and len(self._in_flight)
            else []
        )
        if halfway:
            self.prefetched.halfway(halfway)
            self._in_flight.ended(halfway, tier, now)
        self.prefetched.left(keys, tier, now, self._watched)
        if len(self._in_flight):
            self._in_flight.ended(keys, tier, now)

    def _is_halfway(self, key: PageKey) -> bool:
        """Whether a page in flight through host memory to the device has reached host memory."""
        page = self._map.page(key) if self._in_flight.from_below_host(key) else None
        return page is not None and Tier.HOST in page.tiers

    def started(self, owner: str, keys: Sequence[PageKey]) -> None:
        """An owner begins to run on these pages."""
        self.overlaps.started(owner, not self.missing(owner).runs)
        self.prefetched.used(owner, keys)

    def watch(self, owner: str) -> None:
        """Tracks whether an owner that has yet to run lacks pages."""
        self._watched[owner] = None
        self._wanting[owner] = None

    def unwatch(self, owner: str) -> None:
        """The owner runs now, or will not run."""
        self._watched.pop(owner, None)
        self._wanting.pop(owner, None)

    def forget(self, owner: str) -> None:
        self.unwatch(owner)
        self.known.pop(owner, None)
        self.prefetched.forget(owner)
        self.overlaps.forget(owner)

    def refresh(self) -> Mapping[str, None]:
        """Reads the map's changes. Returns the watched owners that may lack pages."""
        if self._map.has_changed:
            for changed in self._map.take_changed():
                self.known.pop(changed, None)
                if changed in self._watched:
                    self._wanting[changed] = None
                    self._rest_until = -math.inf
        return self._wanting

    def missing(self, owner: str) -> Missing:
        """The pages that an owner lacks on the device, looked up again only after they changed."""
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
        """Number of pages in flight."""
        return len(self._in_flight)

    # --- decisions --------------------------------------------------------------------------------

    def plan(
        self,
        now: float,
        turns: Sequence[Turn],
        free: Mapping[Tier, int],
        iteration_s: float,
        busy_s: Mapping[Link, float] | None = None,
        step_pages: int = 0,
        ahead_pages: int = 0,
        empty: Mapping[Tier, int] | None = None,
        owed_pages: int = 0,
    ) -> Prefetch:
        """The moves to begin now.

        `turns`: in order of their windows. `free`: pages per tier that can be allocated, evictable
        ones included. `busy_s`: seconds of other work queued on each link. `step_pages`: device
        pages that this step allocates anyway. `ahead_pages`: those that prefill allocates until
        victims are named for them again. `empty`: pages that hold no data, if the executor knows.
        `owed_pages`: device pages besides the free ones that running prompts will allocate.
        """
        for keys, tier in self._in_flight.late(now):
            self._map.dropped(keys, tier)
            self.prefetched.given_up(keys, tier, now)
        off = self._config.prefetch != "on" or not self._rules.lookahead
        if off and not ahead_pages:
            return _NOTHING
        if off or (not turns and self._rules.shares_links):
            return self._make_room(now, free, step_pages, ahead_pages, empty or {})
        step = Step(
            now,
            max(iteration_s, 1e-6),
            self._link_budgets(now, busy_s or {}),
            self._tier_budgets(free, empty or {}),
        )
        step.tiers[Tier.DEVICE].reserve(step_pages, now)
        step.tiers[Tier.DEVICE].pass_over(owed_pages)
        step.tiers[Tier.DEVICE].fill(ahead_pages)
        if not self._rules.prefetch(_Desk(self, step), turns):
            self._by_deadline(step, turns)
        if turns and not step.moves and self._rules.shares_links and self._rules.lookahead < 0:
            # Everything due within two iterations was considered, so the next search may wait as
            # long.
            self._rest_until = now + SOON * step.iteration_s
        return Prefetch(
            tuple(step.moves), _evictions(step.tiers), tuple(step.tests), step.lookahead
        )

    def _make_room(
        self,
        now: float,
        free: Mapping[Tier, int],
        step_pages: int,
        ahead_pages: int,
        empty: Mapping[Tier, int],
    ) -> Prefetch:
        """Without prefetches: makes room for pages that prefill allocates and those in flight."""
        if not ahead_pages and not len(self._in_flight):
            device = TierBudget(
                self._map, Tier.DEVICE, free.get(Tier.DEVICE, 0), empty.get(Tier.DEVICE)
            )
            self.prefetched.capacity(self._map.count(Tier.DEVICE) + device.empty)
            device.reserve(step_pages, now)
            return _NOTHING
        tiers = self._tier_budgets(free, empty)
        self.prefetched.capacity(self._map.count(Tier.DEVICE) + tiers[Tier.DEVICE].empty)
        tiers[Tier.DEVICE].reserve(step_pages, now)
        tiers[Tier.DEVICE].fill(ahead_pages)
        return Prefetch(evictions=_evictions(tiers))

    def idle(
        self, now: float, iteration_s: float, busy_s: Mapping[Link, float] | None = None
    ) -> bool:
        """Whether `plan` would find nothing to move, as far as can be said without the turns: all
        links have enough work, or nothing was due and nothing has changed since.
        """
        if not self.refresh() or now < self._rest_until:
            return True
        return self._busy(self._link_budgets(now, busy_s or {}), iteration_s)

    def _busy(self, links: Mapping[Link, LinkBudget], iteration_s: float) -> bool:
        enough_s = _REFILL * self._horizon(iteration_s)
        return self._rules.shares_links and all(
            time.closed or time.end_s > enough_s for time in links.values()
        )

    def _horizon(self, iteration_s: float) -> float:
        return max(self._rules.load_horizon_s, _COVER * iteration_s)

    def _by_deadline(self, step: Step, turns: Sequence[Turn]) -> None:
        horizon_s = self._horizon(step.iteration_s)
        if self._busy(step.links, step.iteration_s):
            return
        known = [self.missing(turn.owner) for turn in turns]
        near, far = reach(self._rules, step, turns, known)
        step.lookahead = turns[near - 1].steps if near else 0
        device = step.tiers[Tier.DEVICE]
        self.prefetched.capacity(self._map.count(Tier.DEVICE) + device.empty)
        budget = int(
            self._config.prefetch_share * (self._map.count(Tier.DEVICE) + device.empty)
        ) - len(self.prefetched.unused[Tier.DEVICE])
        from_host = in_host(known[:near])
        for place in range(near):
            turn = turns[place]
            if step.spent(budget, horizon_s, place < from_host):
                room = budget > 0 and device.left > 0
                self._judge_others(step, turns[place:near], room)
                break
            missing, filled = (
                self.missing(turn.owner) if step.moves else known[place],
                device.filled,
            )
            if turn.before:
                device.reserve(turn.before, step.now + turn.window_s)
            new = missing.runs and turn.owner not in self.overlaps
            transfer_s = self._transfer_s(step, missing) if new else 0.0
            room = missing.lacking <= budget
            if missing.runs:
                if self.prefetched.may_move(turn.owner, turn.chance, Tier.DEVICE, step.now):
                    budget -= self._to_device(step, turn, missing, budget, horizon_s)
                else:
                    room = False
            # Pages that it will allocate when it runs are not available to later turns.
            lacking = missing.lacking - (device.filled - filled)
            own = missing.pages - missing.reach + lacking
            room = device.reserve(own, step.now + turn.window_s) == own and room
            if new:
                self._judge(step, turn, missing, transfer_s, room)
        host = step.tiers[Tier.HOST]
        ahead = self._rules.lookahead_ssd < 0 and host.empty > 0
        for place, (turn, missing) in enumerate(zip(turns, known, strict=True)):
            if (
                step.full(horizon_s)
                or not host.left
                or (place >= far and (not ahead or turn.rid is None))
            ):
                break
            if turn.before:
                host.reserve(turn.before, step.now + turn.window_s)
            if missing.below and self.prefetched.may_move(
                turn.owner, turn.chance, Tier.HOST, step.now
            ):
                self._to_host(step, turn, self.missing(turn.owner), horizon_s, place < far)
            host.reserve(
                missing.pages - missing.reach + self.missing(turn.owner).below,
                step.now + turn.window_s,
            )

    def _needed_at(self, step: Step, turn: Turn) -> float:
        """Pages that are needed by this time are protected from this turn; those needed later may
        be evicted for it. The map's next-use time of the turn counts too, so of two turns at most
        one can evict the other's pages.
        """
        number = self._map.owners.number(turn.owner)
        at = step.now + turn.window_s
        if number is not None and self._map.owners.turn(number) != math.inf:
            at = max(at, self._map.owners.turn(number))
        return at if turn.rid is not None else step.now + _SPREAD * (at - step.now)

    def _judge_others(self, step: Step, turns: Sequence[Turn], room: bool) -> None:
        """Tests turns for which nothing can be prefetched in this step."""
        for turn in turns:
            if turn.owner not in self.overlaps:
                missing = self.missing(turn.owner)
                if missing.runs:
                    self._judge(step, turn, missing, self._transfer_s(step, missing), room)

    def _judge(
        self, step: Step, turn: Turn, missing: Missing, transfer_s: float, room: bool
    ) -> None:
        """Tests Eq. 1 for all missing pages. Without room for them nothing is hidden."""
        window_s = turn.window_s + self._rules.scheduling_slack_s
        held = transfer_s <= window_s and room
        self.test(step, Overlap(turn.owner, missing.lacking, transfer_s, window_s, held))

    def _transfer_s(self, step: Step, missing: Missing) -> float:
        """Seconds until all missing pages have arrived, after the charged ones."""
        pcie = step.links[Link.HOST_TO_DEVICE]
        transfer_s = pcie.end_s + pcie.seconds(missing.lacking)
        for first, below in step.firsts(missing) if missing.below else ():
            if below:
                first_s = first.end_s + first.seconds(below) + pcie.seconds(1)
                transfer_s = max(transfer_s, first_s)
        return transfer_s

    def _to_device(
        self, step: Step, turn: Turn, missing: Missing, budget: int, horizon_s: float
    ) -> int:
        """Prefetches the pages that will arrive in time to the device, from the first one on, since
        a prefix is only useful up to its first gap. Returns their number.
        """
        links, pcie = step.links, step.links[Link.HOST_TO_DEVICE]
        nearest = missing.runs[0][1]
        if (
            budget <= 0
            or not step.tiers[Tier.DEVICE].left
            or (nearest is not None and nearest > Tier.HOST and links[FIRST_HOP[nearest]].closed)
        ):
            return 0
        until_s = turn.window_s + self._rules.scheduling_slack_s
        needed_at = self._needed_at(step, turn)
        prefetched = 0
        for span, tier in missing.runs:
            if tier is None:
                break
            pages = min(
                len(span), budget - prefetched, pcie.fit(min(until_s, horizon_s + pcie.page_s))
            )
            first = links[FIRST_HOP[tier]] if tier is not Tier.HOST else None
            if first is not None:
                until = min(until_s - pcie.seconds(1), horizon_s + first.page_s)
                pages = min(pages, first.fit(until))
            pages = step.tiers[Tier.DEVICE].reserve(max(0, pages), needed_at)
            if pages:
                pcie.charge(pages)
                if first is not None:
                    first.charge(pages)
                    pcie.end_s = max(pcie.end_s, first.end_s + pcie.seconds(1))
                self.move(step, turn, Span(span.start, span.start + pages), tier, Tier.DEVICE)
            prefetched += pages
            if pages < len(span):
                break
        return prefetched

    def _to_host(
        self, step: Step, turn: Turn, missing: Missing, horizon_s: float, due: bool
    ) -> None:
        """Prefetches pages from below host memory. A turn that is not due gets only empty pages."""
        needed_at = self._needed_at(step, turn) if due else math.inf
        slack_s = turn.window_s + self._rules.scheduling_slack_s
        for span, tier in missing.runs:
            if tier is Tier.HOST or tier is None:
                continue
            first = step.links[FIRST_HOP[tier]]
            fits = first.fit(min(slack_s, horizon_s + first.page_s))
            pages = step.tiers[Tier.HOST].reserve(min(len(span), fits), needed_at)
            if pages:
                first.charge(pages)
                self.move(step, turn, Span(span.start, span.start + pages), tier, Tier.HOST)
            if pages < len(span):
                break

    # --- moves ------------------------------------------------------------------------------------

    def demote(self, owner: str, source: Tier, target: Tier, most: int, now: float) -> Move | None:
        """Copies up to `most` of an owner's pages in `source` to a lower tier, where none has a
        copy.
        """
        link = Link.DEVICE_TO_HOST if source is Tier.DEVICE else Link.HOST_TO_STORAGE
        keys = self._in_flight.others(self._map.without_copy(owner, source, target))[:most]
        if not keys:
            return None
        late_at = now + _LATE * self._bandwidth.seconds(link, len(keys) * self._page_bytes)
        self._in_flight.begin(keys, target, (link,), now, late_at + self._config.load_deadline_s)
        self._map.moving(keys, target)
        return Move(keys, source, target)

    def move(self, step: Step, turn: Turn, span: Span, source: Tier, target: Tier) -> None:
        """Adds a move to the step. `target` has reserved pages for it."""
        keys = self._in_flight.others(self._map.keys_of(turn.owner, span))
        if not keys:
            return
        if target is Tier.HOST:
            links: tuple[Link, ...] = (FIRST_HOP[source],)
        else:
            links = hops(source)
        taken_s = max(
            step.links[link].seconds(self._in_flight.pages(link) + len(keys)) for link in links
        )
        late_at = step.now + _LATE * taken_s + self._config.load_deadline_s
        self._in_flight.begin(keys, target, links, step.now, late_at, turn.owner)
        self._map.moving(keys, target)
        step.tiers[target].fill(len(keys))
        self.prefetched.begun(keys, target, turn.owner, turn.chance)
        step.moves.append(Move(keys, source, target, turn.rid))

    def test(self, step: Step, test: Overlap) -> None:
        """Records a prediction of this step."""
        if self.overlaps.tested(test):
            step.tests.append(test)

    def _link_budgets(self, now: float, busy_s: Mapping[Link, float]) -> dict[Link, LinkBudget]:
        factor = 1 + self._rules.prefetch_margin if self._rules.shares_links else 1.0
        # The network counts as a link only if remote pages are known.
        below = Tier.REMOTE if self._map.count(Tier.REMOTE) else Tier.STORAGE
        firsts = [hop for tier, hop in FIRST_HOP.items() if tier <= below]
        links = {
            link: LinkBudget(self._bandwidth, link, self._page_bytes, factor)
            for link in (*firsts, Link.HOST_TO_DEVICE)
        }
        for link, time in links.items():
            time.end_s = busy_s.get(link, 0.0) + self._in_flight.backlog_seconds(
                link, time.page_s, now
            )
        # Restorations read the same device, and their pages go on to the GPU without a stop. A
        # request waits for them.
        for hop in firsts:
            restoring_s = busy_s.get(restored_over(hop), 0.0)
            links[hop].end_s += restoring_s
            links[hop].closed = restoring_s > 0 and self._rules.shares_links
        return links

    def _tier_budgets(
        self, free: Mapping[Tier, int], empty: Mapping[Tier, int]
    ) -> dict[Tier, TierBudget]:
        return {
            tier: TierBudget(
                self._map, tier, free.get(tier, 0), empty.get(tier), self._in_flight.coming(tier)
            )
            for tier in (Tier.DEVICE, Tier.HOST)
        }


class _Desk:
    """One step, as rules see it (`rules.Desk`)."""

    def __init__(self, prefetcher: Prefetcher, step: Step) -> None:
        self._prefetcher = prefetcher
        self._step = step

    @property
    def now(self) -> float:
        return self._step.now

    @property
    def iteration_s(self) -> float:
        return self._step.iteration_s

    @property
    def lookahead(self) -> int:
        return self._step.lookahead

    @lookahead.setter
    def lookahead(self, steps: int) -> None:
        self._step.lookahead = steps

    def lacks(self, turn: ToCome) -> Sequence[tuple[Span, Tier | None]]:
        return self._prefetcher.missing(turn.owner).runs

    def paused(self, turn: ToCome) -> bool:
        return self._prefetcher.prefetched.paused(turn.owner, self._step.now)

    def page_s(self, link: Link) -> float:
        return self._step.links[link].seconds(1)

    def judge(self, turn: ToCome, pages: int, transfer_s: float, window_s: float) -> None:
        test = Overlap(turn.owner, pages, transfer_s, window_s, transfer_s <= window_s)
        self._prefetcher.test(self._step, test)

    def bring(self, turn: ToCome, pages: Span, source: Tier) -> None:
        needed_at = self._step.now + turn.window_s
        found = self._step.tiers[Tier.DEVICE].reserve(len(pages), needed_at)
        if found:
            span = Span(pages.start, pages.start + found)
            self._prefetcher.move(self._step, cast(Turn, turn), span, source, Tier.DEVICE)


def _evictions(tiers: Mapping[Tier, TierBudget]) -> tuple[Evict, ...]:
    victims = [(tiers[tier].victims(), tier) for tier in (Tier.DEVICE, Tier.HOST)]
    return tuple(Evict(keys, tier) for keys, tier in victims if keys)
