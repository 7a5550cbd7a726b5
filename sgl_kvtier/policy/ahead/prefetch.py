"""Lookahead: pages of waiting requests are moved up before their turn (TierKV section 3, Algorithm
1).

Eq. 1: a transfer is hidden if it takes no longer than the iterations until the request's turn, plus
the scheduling slack. Eq. 2: a transfer takes a latency plus bytes over bandwidth. Two rules:

    tierkv   the paper's: requests of the next K iterations; each page is tested by itself against
             the whole window
    kvtier   pages share the links: requests in order of their turns, each page charged behind
             earlier pages and behind the work the links have already; K from measured speeds; a
             bounded share of the device. No page takes the place of one needed sooner, or of one
             that an earlier request will need. Pages of a session that is only expected evict no
             page that is needed before twice as long

    map = TierMap(1_000_000, NextUse(), NextUse())
    bandwidth = Bandwidth({Link.HOST_TO_DEVICE: 2e10, Link.STORAGE_TO_HOST: 3e9})
    prefetcher = Prefetcher(PolicyConfig(), map, bandwidth, page_bytes=1 << 20)
    map.placed(keys, Tier.HOST, now=0.0)
    map.claim("request 7", keys, next_use=0.2)
    turns = [Turn("request 7", "7", steps=1, window_s=0.2)]
    plan = prefetcher.plan(0.0, turns, {Tier.DEVICE: 512}, iteration_s=0.2)
    plan.moves         # (Move(keys, Tier.HOST, Tier.DEVICE, "7"),)

To measure the cost of a step, fill a map with 256 claims of 256 pages each and time `plan` with 256
turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from sgl_kvtier.policy.ahead.charge import FIRST_HOP, LinkTime, Room
from sgl_kvtier.policy.ahead.lacking import Lacking
from sgl_kvtier.policy.ahead.overlap import Overlap
from sgl_kvtier.policy.ahead.reach import SOON, Step, in_host, reach
from sgl_kvtier.policy.ahead.turns import Turn
from sgl_kvtier.policy.messages import Evict, Move
from sgl_kvtier.policy.pages.page_state import Missing
from sgl_kvtier.policy.rules import ToCome
from sgl_kvtier.types import Link, Span, Tier

SCOPE: Final = 32
"""Most turns with missing pages that one step considers. Later ones come nearer first."""
_COVER: Final = 1.5
"""Moves handed out cover this many iterations, so that no link waits for a plan."""
_REFILL: Final = 0.5
"""Links busy for more than this share of their horizon get nothing new: most steps plan nothing."""
_SPREAD: Final = 2.0
"""Pages of an expected session evict only pages that are not used before this many times its
predicted wait. With less between them, either may come first, and they would evict each other's
pages.
"""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The moves, in order, and the evictions. `lookahead` is the K used, `tests` are the overlap
    tests made in this step.
    """

    moves: tuple[Move, ...] = ()
    evictions: tuple[Evict, ...] = ()
    tests: tuple[Overlap, ...] = ()
    lookahead: int = 0


_NOTHING: Final = Prefetch()


class Prefetcher(Lacking):
    """Moves pages up for the given turns, and moves no page twice.

    The cost of a step grows with what has changed since the last one.
    """

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
        """The moves for now.

        `turns` are in the order of their windows. `free` pages per tier may be claimed, including
        those that are evictable. `busy_s` are seconds of other work queued on each link.
        `step_pages` of the device are claimed in this step anyway, and `ahead_pages` more until
        victims are named for them again. `empty` pages hold nothing, where the executor knows that.
        `owed_pages` of the device, besides the free ones, will be claimed by prompts that run.
        """
        for keys, tier in self._flights.late(now):
            self.late += len(keys)
            self._map.dropped(keys, tier)
            self.brought.given_up(keys, tier, now)
        off = self._config.prefetch == "off" or not self._rules.lookahead
        if off and not ahead_pages:
            return _NOTHING
        if off or (not turns and self._rules.shares_links):
            return self._make_room(now, free, step_pages, ahead_pages, empty or {})
        step = Step(
            now,
            max(iteration_s, 1e-6),
            self._links(now, busy_s or {}),
            self._rooms(free, empty or {}),
        )
        step.rooms[Tier.DEVICE].take(step_pages, now)
        step.rooms[Tier.DEVICE].pass_over(owed_pages)
        step.rooms[Tier.DEVICE].claim(ahead_pages)
        if not self._rules.prefetch(_Desk(self, step), turns):
            self._by_deadline(step, turns)
        if turns and not step.moves and self._rules.shares_links and self._rules.lookahead < 0:
            # What is due within two iterations was looked for, so the next look may wait as long.
            self._rest_until = now + SOON * step.iteration_s
        return Prefetch(
            tuple(step.moves), _evictions(step.rooms), tuple(step.tests), step.lookahead
        )

    def _make_room(
        self,
        now: float,
        free: Mapping[Tier, int],
        step_pages: int,
        ahead_pages: int,
        empty: Mapping[Tier, int],
    ) -> Prefetch:
        """Nothing is prefetched: makes room only for the pages that prefill will claim and those in
        flight already.
        """
        if not ahead_pages and not len(self._flights):
            device = Room(self._map, Tier.DEVICE, free.get(Tier.DEVICE, 0), empty.get(Tier.DEVICE))
            self.brought.capacity(self._map.count(Tier.DEVICE) + device.empty)
            device.take(step_pages, now)
            return _NOTHING
        rooms = self._rooms(free, empty)
        self.brought.capacity(self._map.count(Tier.DEVICE) + rooms[Tier.DEVICE].empty)
        rooms[Tier.DEVICE].take(step_pages, now)
        rooms[Tier.DEVICE].claim(ahead_pages)
        return Prefetch(evictions=_evictions(rooms))

    def idle(
        self, now: float, iteration_s: float, busy_s: Mapping[Link, float] | None = None
    ) -> bool:
        """Whether `plan` would find nothing to move, as far as can be said without the turns: all
        links have enough to do, or nothing was due and nothing has changed since.
        """
        if not self.refresh() or now < self._rest_until:
            return True
        return self._busy(self._links(now, busy_s or {}), iteration_s)

    def _busy(self, links: Mapping[Link, LinkTime], iteration_s: float) -> bool:
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
        device = step.rooms[Tier.DEVICE]
        self.brought.capacity(self._map.count(Tier.DEVICE) + device.empty)
        budget = int(
            self._config.prefetch_share * (self._map.count(Tier.DEVICE) + device.empty)
        ) - len(self.brought.unused[Tier.DEVICE])
        from_host = in_host(known[:near])
        for place in range(near):
            turn = turns[place]
            if step.spent(budget, horizon_s, place < from_host):
                room = budget > 0 and device.left > 0
                self._judge_others(step, turns[place:near], room)
                break
            missing, claimed = (
                self.missing(turn.owner) if step.moves else known[place],
                device.claimed,
            )
            if turn.before:
                device.take(turn.before, step.now + turn.window_s)
            new = missing.runs and turn.owner not in self.overlaps
            transfer_s = self._transfer_s(step, missing) if new else 0.0
            room = missing.lacking <= budget
            if missing.runs:
                if self.brought.may_move(turn.owner, turn.chance, Tier.DEVICE, step.now):
                    budget -= self._promote(step, turn, missing, budget, horizon_s)
                else:
                    room = False
            # Pages that it will claim when it runs are not for the turns behind it.
            lacking = missing.lacking - (device.claimed - claimed)
            own = missing.pages - missing.reach + lacking
            room = device.take(own, step.now + turn.window_s) == own and room
            if new:
                self._judge(step, turn, missing, transfer_s, room)
        host = step.rooms[Tier.HOST]
        ahead = self._rules.lookahead_ssd < 0 and host.empty > 0
        for place, (turn, missing) in enumerate(zip(turns, known, strict=True)):
            if (
                step.full(horizon_s)
                or not host.left
                or (place >= far and (not ahead or turn.rid is None))
            ):
                break
            if turn.before:
                host.take(turn.before, step.now + turn.window_s)
            if missing.below and self.brought.may_move(
                turn.owner, turn.chance, Tier.HOST, step.now
            ):
                self._stage(step, turn, self.missing(turn.owner), horizon_s, place < far)
            host.take(
                missing.pages - missing.reach + self.missing(turn.owner).below,
                step.now + turn.window_s,
            )

    def _needed_at(self, step: Step, turn: Turn) -> float:
        """The time up to which a page must be needed to be protected from this turn: pages needed
        later may be evicted for it. The map's next-use time of the turn counts too, so of two turns
        at most one can evict the other's pages.
        """
        number = self._map.owners.number(turn.owner)
        at = step.now + turn.window_s
        if number is not None and self._map.owners.turn(number) != math.inf:
            at = max(at, self._map.owners.turn(number))
        return at if turn.rid is not None else step.now + _SPREAD * (at - step.now)

    def _judge_others(self, step: Step, turns: Sequence[Turn], room: bool) -> None:
        """The same test for turns for which nothing can be prefetched in this step."""
        for turn in turns:
            if turn.owner not in self.overlaps:
                missing = self.missing(turn.owner)
                if missing.runs:
                    self._judge(step, turn, missing, self._transfer_s(step, missing), room)

    def _judge(
        self, step: Step, turn: Turn, missing: Missing, transfer_s: float, room: bool
    ) -> None:
        """Eq. 1 for all pages that are missing. Without room for them nothing is hidden."""
        window_s = turn.window_s + self._rules.scheduling_slack_s
        held = transfer_s <= window_s and room
        self.test(step, Overlap(turn.owner, missing.lacking, transfer_s, window_s, held))

    def _transfer_s(self, step: Step, missing: Missing) -> float:
        """Seconds until all pages that are missing are there, behind the charged ones."""
        pcie = step.links[Link.HOST_TO_DEVICE]
        transfer_s = pcie.end_s + pcie.seconds(missing.lacking)
        for first, below in step.firsts(missing) if missing.below else ():
            if below:
                first_s = first.end_s + first.seconds(below) + pcie.seconds(1)
                transfer_s = max(transfer_s, first_s)
        return transfer_s

    def _promote(
        self, step: Step, turn: Turn, missing: Missing, budget: int, horizon_s: float
    ) -> int:
        """Prefetches to the device the pages that will be there in time, from the front on: a
        prefix is useful up to its first gap. Returns their number.
        """
        links, pcie = step.links, step.links[Link.HOST_TO_DEVICE]
        nearest = missing.runs[0][1]
        if (
            budget <= 0
            or not step.rooms[Tier.DEVICE].left
            or (nearest is not None and nearest > Tier.HOST and links[FIRST_HOP[nearest]].closed)
        ):
            return 0
        until_s = turn.window_s + self._rules.scheduling_slack_s
        needed_at = self._needed_at(step, turn)
        brought = 0
        for span, tier in missing.runs:
            if tier is None:
                break
            pages = min(
                len(span), budget - brought, pcie.fit(min(until_s, horizon_s + pcie.page_s))
            )
            first = links[FIRST_HOP[tier]] if tier is not Tier.HOST else None
            if first is not None:
                until = min(until_s - pcie.seconds(1), horizon_s + first.page_s)
                pages = min(pages, first.fit(until))
            pages = step.rooms[Tier.DEVICE].take(max(0, pages), needed_at)
            if pages:
                pcie.charge(pages)
                if first is not None:
                    first.charge(pages)
                    pcie.end_s = max(pcie.end_s, first.end_s + pcie.seconds(1))
                self.emit(step, turn, Span(span.start, span.start + pages), tier, Tier.DEVICE)
            brought += pages
            if pages < len(span):
                break
        return brought

    def _stage(self, step: Step, turn: Turn, missing: Missing, horizon_s: float, due: bool) -> None:
        """Prefetches pages below to host memory; a turn that is not due gets only empty pages."""
        needed_at = self._needed_at(step, turn) if due else math.inf
        slack_s = turn.window_s + self._rules.scheduling_slack_s
        for span, tier in missing.runs:
            if tier is Tier.HOST or tier is None:
                continue
            first = step.links[FIRST_HOP[tier]]
            fits = first.fit(min(slack_s, horizon_s + first.page_s))
            pages = step.rooms[Tier.HOST].take(min(len(span), fits), needed_at)
            if pages:
                first.charge(pages)
                self.emit(step, turn, Span(span.start, span.start + pages), tier, Tier.HOST)
            if pages < len(span):
                break


class _Desk:
    """One step, for the rules (`rules.Desk`)."""

    def __init__(self, lacking: Lacking, step: Step) -> None:
        self._lacking = lacking
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
        return self._lacking.missing(turn.owner).runs

    def paused(self, turn: ToCome) -> bool:
        return self._lacking.brought.paused(turn.owner, self._step.now)

    def page_s(self, link: Link) -> float:
        return self._step.links[link].seconds(1)

    def judge(self, turn: ToCome, pages: int, transfer_s: float, window_s: float) -> None:
        test = Overlap(turn.owner, pages, transfer_s, window_s, transfer_s <= window_s)
        self._lacking.test(self._step, test)

    def bring(self, turn: ToCome, pages: Span, source: Tier) -> None:
        needed_at = self._step.now + turn.window_s
        found = self._step.rooms[Tier.DEVICE].take(len(pages), needed_at)
        if found:
            span = Span(pages.start, pages.start + found)
            self._lacking.emit(self._step, cast(Turn, turn), span, source, Tier.DEVICE)


def _evictions(rooms: Mapping[Tier, Room]) -> tuple[Evict, ...]:
    victims = [(rooms[tier].victims(), tier) for tier in (Tier.DEVICE, Tier.HOST)]
    return tuple(Evict(keys, tier) for keys, tier in victims if keys)
