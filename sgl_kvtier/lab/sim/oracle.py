"""The planner that knows the requests to come: the best that lookahead, eviction by next use and
exact costs could do.

It restores by the planner's own rule, told the true costs, and keeps in device and host what the
next requests will ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.policy.messages import (
    Consulted,
    Evict,
    Fact,
    Move,
    PagesDropped,
    PagesPlaced,
    Question,
    RequestArrived,
    RequestFinished,
    StepPlan,
    StepView,
)
from sgl_kvtier.types import PageKey, Tier

_MOVE_PAGES = 32
"""Pages per prefetch, so that demand loads do not wait long behind one."""
_AHEAD = 4
"""Prefetches on each link at a time."""

_A = TypeVar("_A")
_Next: TypeAlias = tuple[str, tuple[float, tuple[PageKey, ...]]]
"""A request to come: its id, when, and its pages."""


class Oracle:
    """Looks ahead with known requests; `inner` restores. Pages are moved up before their request
    arrives and evicted farthest next use first.

    Of each client it knows the next request as soon as that is determined: a session's next turn
    when the present one ends. `device_pages` and `host_pages` bound what it tries to keep there
    (None: no limit, all of it).
    """

    def __init__(
        self,
        inner: Consulted,
        requests: Sequence[SimRequest],
        device_pages: int | None = None,
        host_pages: int | None = None,
    ) -> None:
        self._inner = inner
        self._room = {Tier.DEVICE: device_pages, Tier.HOST: host_pages}
        self._requests = {request.rid: request for request in requests}
        self._followers: dict[str, list[SimRequest]] = {}
        self._next: dict[str, tuple[float, tuple[PageKey, ...]]] = {}
        for request in requests:
            if request.after is None:
                self._next[request.rid] = (request.arrival_s, request.keys)
            else:
                self._followers.setdefault(request.after, []).append(request)
        self._in: dict[Tier, dict[PageKey, None]] = {
            Tier.DEVICE: {},
            Tier.HOST: {},
            Tier.STORAGE: {},
        }
        self._moving: dict[Tier, dict[PageKey, None]] = {Tier.DEVICE: {}, Tier.HOST: {}}
        self._stale = True

    def observe(self, fact: Fact) -> None:
        """Passes everything on, and keeps track of places and of the requests to come."""
        self._inner.observe(fact)
        if isinstance(fact, PagesPlaced):
            self._in[fact.tier].update(dict.fromkeys(fact.keys))
            self._stale |= bool(self._end_moves(fact.tier, fact.keys))
        elif isinstance(fact, PagesDropped):
            for key in fact.keys:
                self._in[fact.tier].pop(key, None)
            # A move that found no room is not asked for again before something else has changed.
            self._end_moves(fact.tier, fact.keys)
        elif isinstance(fact, RequestArrived):
            self._next[fact.rid] = (fact.now, fact.keys)
            self._stale = True
        elif isinstance(fact, RequestFinished):
            self._next.pop(fact.rid, None)
            for follower in self._followers.pop(fact.rid, ()):
                self._next[follower.rid] = (fact.now + follower.arrival_s, follower.keys)
            self._stale = True

    def query(self, question: Question[_A]) -> _A:
        """The inner planner's answer."""
        return self._inner.query(question)

    def step(self, view: StepView) -> StepPlan:
        """The inner plan, with prefetches and an order of eviction."""
        plan = self._inner.step(view)
        if not self._stale:
            return plan
        soonest = sorted(self._next.items(), key=lambda item: (item[1][0], item[0]))
        moves = [
            # Requests that wait need the device more than those to come.
            *self._moves(
                soonest,
                Tier.DEVICE,
                Tier.HOST,
                0 if view.waiting else view.free_pages.get(Tier.DEVICE, 0),
            ),
            *self._moves(
                soonest,
                Tier.HOST,
                Tier.STORAGE,
                0 if view.waiting else view.free_pages.get(Tier.HOST, 0),
            ),
        ]
        # Host memory is left to last use: ordered by next use as well, it would hold the same pages
        # as the device a second time.
        evictions = (self._eviction(soonest, Tier.DEVICE),)
        self._stale = False
        return dataclasses.replace(
            plan, moves=(*plan.moves, *moves), evictions=(*plan.evictions, *evictions)
        )

    def _end_moves(self, tier: Tier, keys: Iterable[PageKey]) -> int:
        moving = self._moving.get(tier, {})
        return sum(moving.pop(key, 0) is None for key in keys)

    def _moves(self, soonest: Sequence[_Next], target: Tier, source: Tier, free: int) -> list[Move]:
        """Up to a few prefetches, for the soonest requests first, as long as all before them fit as
        well.
        """
        moving, here, there = self._moving[target], self._in[target], self._in[source]
        room = self._room[target]
        moves: list[Move] = []
        kept: dict[PageKey, None] = {}
        for _, (_, keys) in soonest:
            kept.update(dict.fromkeys(keys))
            if room is not None and len(kept) > room:
                break
            missing = [
                key for key in keys if key not in here and key not in moving and key in there
            ]
            for start in range(0, len(missing), _MOVE_PAGES):
                if len(moves) + len(moving) // _MOVE_PAGES >= _AHEAD:
                    return moves
                part = tuple(missing[start : start + _MOVE_PAGES])
                free -= len(part)
                if free < 0:
                    return moves
                moving.update(dict.fromkeys(part))
                # For no request: one that is being restored by now must not take the move for
                # one of its loads.
                moves.append(Move(part, source, target))
        return moves

    def _eviction(self, soonest: Sequence[_Next], tier: Tier) -> Evict:
        """Pages that no request will ask for, then those of the latest request from its end on."""
        rank: dict[PageKey, None] = {}
        for _, (_, keys) in soonest:
            rank.update(dict.fromkeys(keys))
        here = self._in[tier]
        unwanted = [key for key in here if key not in rank]
        return Evict((*unwanted, *(key for key in reversed(rank) if key in here)), tier)
