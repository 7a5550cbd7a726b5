"""The order in which waiting requests run: the request with the shortest predicted time to its
first token goes first, with a bound on how long a request can be overtaken.

A request can be overtaken for at most `Rules.overtaking` times the predicted work before it when it
arrived, its own included. The time starts when the first later request overtakes it. It is wall
time, because work is predicted from compute and links alone and memory may be short as well. After
that, this request and all that arrived before it run in order of arrival.

A session that returns soon and finds its pages in memory can overtake as well. So if memory is
short, a request waits for the session, within the same bound.

A long prompt that is computed in chunks uses all tokens of every step, and all requests after it
wait for its end. So its chunk leaves part of the step to requests with little to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sgl_kvtier.policy.messages import ChunkBeside, HeldBack, RunOrder, Waiter
from sgl_kvtier.policy.restore.forecast import Forecast
from sgl_kvtier.policy.restore.restorations import Restorations
from sgl_kvtier.types import Link

ASK_AGAIN_S: Final = 0.05
"""An executor asks again after this many seconds, since pages may have arrived."""

_SHORT: Final = 0.25
"""A request waits for a session only as long as the session could still overtake it afterwards with
this share of the request's work.
"""


@dataclass(slots=True)
class _Place:
    """The record of a waiting request."""

    credit_s: float
    """Seconds for which it can be overtaken."""
    since: float
    """Time of arrival, in seconds of the executor's clock."""
    overtaken_at: float = -1.0
    """When it was first overtaken, in seconds of the executor's clock; -1: it was not."""

    def __str__(self) -> str:
        overtaken = f"since {self.overtaken_at:.3f} s" if self.overtaken_at >= 0 else "by none"
        return f"may be overtaken for {self.credit_s:.3f} s, is overtaken {overtaken}"

    def slack_s(self, now: float) -> float:
        """Seconds for which it can still be overtaken."""
        return self.credit_s - (now - self.overtaken_at if self.overtaken_at >= 0 else 0.0)


class QueueOrder:
    """The waiting requests, and the order in which they run. One thread, no clock."""

    def __init__(self, state: Restorations) -> None:
        self._state = state
        self._places: dict[str, _Place] = {}

    def order(self, question: RunOrder) -> tuple[str, ...]:
        """The requests in the order they should run. Records which arrived and which left."""
        state, now = self._state, question.now
        waiting = [one.rid for one in question.waiting]
        if state.config.queue != "shortest" or state.rules.overtaking <= 0:
            return tuple(waiting)
        self._note_gone(frozenset(waiting), now)
        works, slacks, before_s = list[float](), list[float](), 0.0
        keys = list[float]()
        for one in question.waiting:
            work_s = self._work_s(one)
            before_s += work_s
            place = self._place(one.rid, before_s, now)
            works.append(work_s)
            slacks.append(place.slack_s(now))
            keys.append(state.rules.urgency(one, work_s, now - place.since))
        return _least_first(waiting, keys, works, slacks, state.rules.clearly)

    def known(self, rid: str) -> str | None:
        """The record of a request as text, or None."""
        place = self._places.get(rid)
        return None if place is None else str(place)

    def chunk_beside(self, question: ChunkBeside) -> int:
        """Size in tokens of the chunk in the slot. If waiting requests have clearly less work than
        what is left of its prompt, it is the `beside` share of the step's tokens, and they get as
        many.
        """
        state, page = self._state, self._state.engine.page_tokens
        most = min(question.most, question.left_tokens)
        share = int(question.most * state.rules.beside)
        if state.config.queue != "shortest" or state.rules.overtaking <= 0 or share < page:
            return most
        left_s = state.cost.cost.range_seconds(
            question.done_tokens, question.left_tokens, state.engine.chunk_tokens
        )
        taken, room = 0, question.room
        for one in question.waiting:
            own = -(-(one.prompt_tokens - one.device_tokens - one.host_tokens) // page) * page
            needed = one.prompt_tokens - one.device_tokens
            loads = one.stored_tokens > 0 or one.rid in state.items
            if loads or needed > room or taken + own > share:
                continue
            if self._work_s(one) < state.rules.clearly * left_s:
                taken, room = taken + own, room - needed
        return most if not taken or most <= share else share // page * page

    def patience_s(self, question: HeldBack) -> float:
        """For how many seconds a request should wait for a session that will then overtake it."""
        rules, work_s = self._state.rules, self._work_s(question.request)
        if self._state.config.queue != "shortest" or rules.overtaking <= 0:
            return 0.0
        place = self._places.get(question.request.rid) or _Place(
            rules.overtaking * work_s, question.now
        )
        return min(rules.holding * work_s, place.slack_s(question.now) - _SHORT * work_s)

    def hold(self, question: HeldBack) -> None:
        """The request waits for a session, so it counts as overtaken from now on."""
        place = self._place(question.request.rid, self._work_s(question.request), question.now)
        if place.overtaken_at < 0:
            place.overtaken_at = question.now

    def _place(self, rid: str, before_s: float, now: float) -> _Place:
        """The record of a request; a new one has `before_s` seconds of work before it, its own
        included.
        """
        place = self._places.get(rid)
        if place is None:
            place = self._places[rid] = _Place(self._state.rules.overtaking * before_s, now)
        return place

    def _note_gone(self, waiting: frozenset[str], now: float) -> None:
        """Requests that left the queue have overtaken all that arrived earlier and still wait."""
        overtaken = False
        for rid in reversed(list(self._places)):
            place = self._places[rid]
            if rid not in waiting:
                overtaken = True
                del self._places[rid]
            elif overtaken and place.overtaken_at < 0:
                place.overtaken_at = now

    def _work_s(self, one: Waiter) -> float:
        """Seconds until its prompt is computed if it had links and compute to itself."""
        state = self._state
        cost, bandwidth, engine = state.cost.cost, state.bandwidth, state.engine
        item = state.items.get(one.rid)
        if item is not None:
            reach = item.pointer.units * engine.page_tokens
            seconds = Forecast(engine, cost, bandwidth, 0.0, {}).both(item).seconds
        else:
            reach = one.device_tokens + one.host_tokens + one.stored_tokens
            token_bytes = engine.page_bytes / engine.page_tokens
            seconds = bandwidth.seconds(
                Link.HOST_TO_DEVICE, (one.host_tokens + one.stored_tokens) * token_bytes
            ) + bandwidth.seconds(Link.STORAGE_TO_DEVICE, one.stored_tokens * token_bytes)
        return seconds + cost.range_seconds(
            reach, max(1, one.prompt_tokens - reach), engine.chunk_tokens
        )


def _least_first(
    left: list[str], keys: list[float], works: list[float], slacks: list[float], clearly: float
) -> tuple[str, ...]:
    """Sorts requests by key. A request goes before an earlier one only if its key is clearly
    smaller, and if its work, in seconds, fits in the slack of every request it overtakes.
    """
    found = []
    while left:
        best, least, slack_s = 0, keys[0], slacks[0]
        for place in range(1, len(left)):
            if keys[place] < clearly * least and works[place] <= slack_s:
                best, least = place, keys[place]
            slack_s = min(slack_s, slacks[place])
        for place in range(best):
            slacks[place] -= works[best]
        found.append(left.pop(best))
        del slacks[best], works[best], keys[best]
    return tuple(found)
