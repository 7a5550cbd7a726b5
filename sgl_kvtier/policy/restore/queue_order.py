"""The order in which waiting requests run: the shortest predicted remaining restoration first, with
a bound on how long that keeps a request waiting.

Later requests overtake one that has come for at most `Rules.overtaking` times the work that stood
before it then, its own included. So each runs, and none waits longer than 1 + overtaking times what
the order of arrival would take. Work is predicted seconds. No clock: ranks that were told the same
order alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvtier.policy.messages import RunOrder, Waiter
from sgl_kvtier.policy.restore.modes import Forecast
from sgl_kvtier.policy.restore.under_way import UnderWay
from sgl_kvtier.types import Link


@dataclass(slots=True)
class _Place:
    """A waiting request: its predicted seconds, and for how many more it may be overtaken."""

    work_s: float
    credit_s: float


class QueueOrder:
    """The places of waiting requests, by request, in the order they came. One thread, no clock."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self._places: dict[str, _Place] = {}

    def order(self, question: RunOrder) -> tuple[str, ...]:
        """The requests in the order they should run. Takes note of those that came and went."""
        known = self._under_way
        overtaking = known.rules.overtaking if known.config.queue == "shortest" else 0.0
        self._charge({one.rid for one in question.waiting})
        before_s = 0.0
        for one in question.waiting:
            work_s = self._work_s(one)
            before_s += work_s
            place = self._places.get(one.rid)
            if place is None:
                self._places[one.rid] = _Place(work_s, overtaking * before_s)
            else:
                place.work_s = work_s
        return self._sorted([one.rid for one in question.waiting])

    def _charge(self, waiting: set[str]) -> None:
        """Those that wait no more have run, and have overtaken all that came earlier and wait."""
        gone_s = 0.0
        for rid in reversed(list(self._places)):
            place = self._places[rid]
            if rid in waiting:
                place.credit_s -= gone_s
            else:
                gone_s += place.work_s
                del self._places[rid]

    def _sorted(self, left: list[str]) -> tuple[str, ...]:
        found = []
        credits = [self._places[rid].credit_s for rid in left]
        works = [self._places[rid].work_s for rid in left]
        while left:
            least_s, best, credit_s = works[0], 0, credits[0]
            for place in range(1, len(left)):
                work_s = works[place]
                if work_s < least_s and work_s <= credit_s:
                    least_s, best = work_s, place
                credit_s = min(credit_s, credits[place])
            for place in range(best):
                credits[place] -= least_s
            found.append(left.pop(best))
            del credits[best], works[best]
        return tuple(found)

    def _work_s(self, one: Waiter) -> float:
        """Seconds until its prompt is there, with links and compute to itself."""
        known = self._under_way
        cost, bandwidth, engine = known.cost.cost, known.bandwidth, known.engine
        item = known.items.get(one.rid)
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
