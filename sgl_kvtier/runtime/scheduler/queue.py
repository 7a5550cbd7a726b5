"""Orders SGLang's waiting requests as the planner decides, where SGLang's own policy is first come,
first served.

Another `--schedule-policy`, or request priorities, stay in force because the user chose them.
Scheduler's thread. All ranks give the planner the same input, so they order alike.
"""

from __future__ import annotations

from typing import Any

from sgl_kvtier.policy.messages import ChunkBeside, Consulted, HeldBack, RunOrder, Waiter
from sgl_kvtier.policy.restore.queue_order import ASK_AGAIN_S
from sgl_kvtier.runtime.sglang import requests
from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.tracked import Requests

_MOST = 64
"""Most requests that are ordered, the oldest ones. The others stay after them."""


class Queue:
    """The waiting requests of one scheduler, numbered by arrival."""

    def __init__(self, planner: Consulted, tracked: Requests) -> None:
        self._planner = planner
        self._tracked = tracked
        self._number = 0
        """How many requests have arrived."""
        self._round = 0
        """How often the queue was ordered."""
        self._sorted: list[str] = []
        self._asked_at = 0.0
        self._waiting: list[Req] = []
        self._known: frozenset[str] = frozenset()
        """Requests that the planner has ordered."""
        self._held = False
        """Whether a request was made to wait for a session since the planner last gave an order."""
        self.in_force = False
        """Whether SGLang's queue is in the planner's order."""

    def sort(self, queue: list[Req], now: float) -> None:
        """Sorts SGLang's queue in place. The planner is asked when requests have arrived or left,
        and at intervals. `now` is the agreed time in seconds.
        """
        self._waiting, self.in_force = queue, True
        if [req.rid for req in queue] == self._sorted and 0 <= now - self._asked_at < ASK_AGAIN_S:
            return
        came = self._arrivals(queue)
        self._asked_at = now
        if len(queue) > 1 or len(self._sorted) > 1 or self._held:
            self._held = False
            there = sorted(queue, key=lambda req: came[req.rid])[:_MOST]
            waiting = tuple([self._waiter(req) for req in there])
            self._known = frozenset(one.rid for one in waiting)
            order = self._planner.query(RunOrder(waiting, now))
            places = {rid: place for place, rid in enumerate(order)}
            queue.sort(key=lambda req: (places.get(req.rid, _MOST), came[req.rid]))
        self._sorted = [req.rid for req in queue]

    def _arrivals(self, queue: list[Req]) -> dict[str, int]:
        """The arrival numbers of these requests. One that was not in the queue at the last ordering
        counts as newly arrived.
        """
        self._round += 1
        came = {}
        for req in queue:
            if req.rid in came:
                continue
            record = self._tracked.record(req.rid)
            if record.order_round != self._round - 1 or not record.arrived:
                self._number += 1
                record.arrived = self._number
            record.order_round = self._round
            came[req.rid] = record.arrived
        return came

    def chunk(self, req: Req, left: int, most: int, room: int) -> int:
        """Tokens of this pass's chunk, `most` at most, for a request without a restoration that has
        `left` tokens to prefill. Others may allocate `room` device tokens. Requests already in this
        pass count as waiting too, since the whole batch delays them.
        """
        waiting = tuple([self._waiter(one) for one in self._waiting[:_MOST] if one is not req])
        if not waiting:
            return min(most, left)
        done = requests.prompt_tokens(req) - left
        return self._planner.query(ChunkBeside(done, left, most, room, waiting))

    def held_back(self, req: Req, host_empty: int, now: float) -> bool:
        """Whether a request waits for a session that is about to return. `host_empty`: empty pages
        of host memory.
        """
        if len(self._waiting) > 1 and req.rid not in self._known:
            return False  # too far back in the queue to be ordered
        question = HeldBack(self._waiter(req), host_empty, now)
        held: bool = self._planner.query(question)
        self._held = self._held or held
        return held

    def _waiter(self, req: Req) -> Waiter:
        there = requests.found(req)
        prompt = requests.prompt_tokens(req)
        read = self._tracked.turn_read(req.rid)
        stored = max(0, min(0 if read is None else read.end, prompt) - there.tokens)
        return Waiter(req.rid, prompt, there.device, there.host, stored)


def in_order_of_arrival(policy: Any) -> bool:
    """Whether SGLang's policy is first come, first served, without priorities."""
    return policy.policy.value == "fcfs" and not policy.enable_priority_scheduling
