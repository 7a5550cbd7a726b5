"""The order in which waiting requests run: the shortest predicted remaining restoration first, with
a bound on how long that keeps a request waiting.

A request is due after 1 + `Rules.overtaking` times the predicted work that stood before it when it
came, its own included. Shorter ones go first only while it and those that came before it can still
be done by then. So in a server that is slower than predicted, requests run in the order of arrival.
"""

from __future__ import annotations

from sgl_kvtier.policy.messages import RunOrder, Waiter
from sgl_kvtier.policy.restore.modes import Forecast
from sgl_kvtier.policy.restore.under_way import UnderWay
from sgl_kvtier.types import Link


class QueueOrder:
    """The times at which waiting requests are due, by request. One thread, no clock."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self._due: dict[str, float] = {}

    def order(self, question: RunOrder) -> tuple[str, ...]:
        """The requests in the order they should run. Takes note of those that came and went."""
        known = self._under_way
        waiting = [one.rid for one in question.waiting]
        if known.config.queue != "shortest" or known.rules.overtaking <= 0:
            return tuple(waiting)
        due, now, before_s = dict[str, float](), question.now, 0.0
        works, slacks = list[float](), list[float]()
        for one in question.waiting:
            work_s = self._work_s(one)
            before_s += work_s
            due_at = self._due.get(one.rid, -1.0)
            if due_at < 0:
                due_at = now + (1 + known.rules.overtaking) * before_s
            due[one.rid] = due_at
            works.append(work_s)
            slacks.append(due_at - now - before_s)
        self._due = due
        return _shortest_first(waiting, works, slacks)

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


def _shortest_first(left: list[str], works: list[float], slacks: list[float]) -> tuple[str, ...]:
    """Requests by work. One that came earlier is overtaken for no longer than its slack, in
    seconds.
    """
    found = []
    while left:
        best, least_s, slack_s = 0, works[0], slacks[0]
        for place in range(1, len(left)):
            work_s = works[place]
            if work_s < least_s and work_s <= slack_s:
                best, least_s = place, work_s
            slack_s = min(slack_s, slacks[place])
        for place in range(best):
            slacks[place] -= least_s
        found.append(left.pop(best))
        del slacks[best], works[best]
    return tuple(found)
