"""Reads stored pages of waiting requests, where SGLang loads them, in queue order, and reads them
again when they were evicted.

SGLang queries storage for a request once, when it arrives, and reads its prefix into host memory.
There the pages are not protected until the request runs. A request that arrives while SGLang's read
budget is used up may never be read. So reads of requests whose pages do not fit yet are deferred
until they do (`policy/ahead/budget.py` gives the order). A request that finds less when it is its
turn than storage had is read again. Scheduler's thread; everything follows from facts that all
ranks share, so they act alike. Not used with pipeline stages, where SGLang decides on the first
one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sgl_kvtier.policy.messages import Consulted, Queued, ReadsDue
from sgl_kvtier.runtime.sglang import requests, step, storage_ops, tree_ranks
from sgl_kvtier.runtime.sglang.types import Handle, Operation, Req, Scheduler
from sgl_kvtier.runtime.step.context import Restoring, StepContext
from sgl_kvtier.runtime.step.tracked import TurnRead

_MOST_READS = 3
"""Most reads for a request that loses its pages again and again; after that it is computed."""
_MOST_IDLE_S = 2.0
"""Longest time, in seconds, in which nothing runs while requests are deferred. Then the first of
them runs with the pages it has, since a device may hang.
"""
_MOST_IDLE_PASSES = 10_000
"""The same in passes of the scheduler, for several ranks, which share no clock. Such a pass takes
at least a millisecond, unless pages land meanwhile.
"""


class TurnReads:
    """One per scheduler process. With several ranks the time may stand still."""

    def __init__(
        self, context: StepContext, restoring: Restoring, planner: Consulted, counts: Counter[str]
    ) -> None:
        """The planner decides whose turn it is. `counts` counts what was done, by kind."""
        self._context = context
        self._restoring = restoring
        self._planner = planner
        self._counts = counts
        self._tree = context.tree
        self._requests = context.requests
        self._idle_since = 0.0
        self._idle_passes = 0

    @property
    def active(self) -> bool:
        """Whether reads are deferred at all: only if something is restored or prefetched, and if
        requests may wait for their pages.
        """
        tree = self._tree
        return (
            tree_ranks.stages(tree) == 1
            and tree.prefetch_stop_policy != "best_effort"
            and (self._restoring.is_on or self._context.looking_ahead)
        )

    @property
    def kept_back(self) -> list[str]:
        """Requests whose read is deferred, for which SGLang must not query storage by itself."""
        return [
            record.rid
            for record in self._requests
            if record.turn_read is not None and record.turn_read.deferred
        ]

    def declines(self, handle: Handle, tokens: int, start: int) -> bool:
        """Called before SGLang queries storage for `tokens` of a request from `start` on. True:
        deferred, because SGLang's read budget is used up.
        """
        if (
            not self.active
            or not storage_ops.worth_asking(self._tree, tokens)
            or not storage_ops.limited(self._tree)
        ):
            return False
        self._note(handle.rid, start + tokens)
        self._keep_back(handle.rid)
        return True

    def hit(self, operation: Operation, hit_tokens: int) -> bool:
        """SGLang is about to read these tokens of a waiting request. True: deferred."""
        rid = operation.handle.rid
        if not self.active:
            return False
        self._note(rid, operation.storage_start + hit_tokens)
        if rid in self._due(rid):
            return False
        self._keep_back(rid)
        return True

    def keep_back(self, rid: str) -> None:
        """Defers the read of the rest of this waiting request's stored pages."""
        if self.active and self._requests.turn_read(rid) is not None:
            self._keep_back(rid)

    def landed(self, operation: Operation) -> None:
        """SGLang's read of a prefix has ended. Pages that failed or were late are not read again,
        unless the read was stopped for a restoration.
        """
        stored = self._requests.turn_read(operation.handle.rid)
        req = self._context.waiting(operation.handle)
        if stored is None or req is None:
            return
        short = operation.completed_tokens < operation.storage_hit_count
        if short and req.rid not in self._restoring.owned:
            stored.end = operation.storage_start + operation.completed_tokens
        requests.match(req, self._tree)
        stored.node = req.best_match_node

    def nodes(self) -> list[Any]:
        """Last nodes of the paths read for waiting requests, in queue order. They should stay in
        host memory until then.
        """
        waiting = step.waiting(self._context.scheduler)
        found = (self._requests.turn_read(req.rid) for req in waiting)
        return [stored.node for stored in found if stored is not None and stored.node is not None]

    def look(self, scheduler: Scheduler) -> None:
        """Starts deferred reads that fit now. Once per tick."""
        if not self.kept_back:
            return
        if storage_ops.limited(self._tree):
            return
        ready = dict.fromkeys(self._due())
        for req in [req for req in step.waiting(scheduler) if req.rid in ready]:
            stored = self._requests.turn_read(req.rid)
            deferred = stored is not None and stored.deferred
            if deferred and not storage_ops.limited(self._tree):
                self._ask(scheduler, req)

    def admissible(self, handle: Handle) -> bool | None:
        """False while this waiting request's read is deferred, so that it is not admitted in this
        pass; otherwise None: SGLang decides.
        """
        stored = self._requests.turn_read(handle.rid)
        return False if stored is not None and stored.deferred and self.active else None

    def at_turn(self, scheduler: Scheduler, req: Req) -> bool:
        """Called after a fresh match, right before a request may be admitted. Returns whether it
        has to wait because pages that were read for it or found in storage are gone.
        """
        stored, restored = self._requests.turn_read(req.rid), self._requests.restoration(req.rid)
        if stored is None or restored is not None or not self.active:
            return False
        if not storage_ops.worth_asking(self._tree, stored.end - requests.found(req).tokens):
            return False
        if stored.reads >= _MOST_READS:
            self._let_go(stored)
            return False
        self._counts["read again"] += 1
        stored.reads += 1
        if storage_ops.limited(self._tree) or req.rid not in self._due(req.rid):
            stored.deferred = True
            return True
        return self._ask(scheduler, req)

    def passed(self, ran: bool) -> None:
        """Called after the scheduler has looked for a batch; `ran`: it has one."""
        kept = [] if ran else self.kept_back
        if not kept:
            self._idle_passes = 0
            return
        now = self._context.moment()
        self._idle_since = self._idle_since if self._idle_passes else now
        self._idle_passes += 1
        if now - self._idle_since >= _MOST_IDLE_S or self._idle_passes >= _MOST_IDLE_PASSES:
            self._idle_passes = 0
            self._let_go(self._turn_read(kept[0]))

    # --- private ----------------------------------------------------------------------------------

    def _let_go(self, stored: TurnRead) -> None:
        """Lets the request run with the pages it has."""
        self._counts["given up"] += 1
        stored.end, stored.deferred = 0, False

    def _turn_read(self, rid: str) -> TurnRead:
        """What storage has of its prompt; a new record if nothing was noted."""
        record = self._requests.record(rid)
        if record.turn_read is None:
            record.turn_read = TurnRead(0)
        return record.turn_read

    def _note(self, rid: str, end: int) -> None:
        self._turn_read(rid).end = end

    def _keep_back(self, rid: str) -> None:
        self._turn_read(rid).deferred = True
        self._counts["kept back"] += 1

    def _ask(self, scheduler: Scheduler, req: Req) -> bool:
        """Makes SGLang query storage again; returns whether it does."""
        stored = self._turn_read(req.rid)
        stored.deferred, stored.end = False, 0  # the query will tell how much there is
        return storage_ops.ask(scheduler, self._tree, req)

    def _due(self, asking: str = "") -> tuple[str, ...]:
        """Requests whose pages may be read now. `asking` is a request to be considered in addition
        to the deferred ones.
        """
        device, host = self._context.device, self._context.host
        if host.write_back:
            # Pages are copied to host memory before they leave the device. If reads in flight
            # occupied all of it, nothing could leave, and SGLang would end with "Prefill out of
            # memory".
            room = host.tokens // 2
        else:
            # Pages on the device have host copies, which cannot be evicted: the rest is the room.
            room = host.tokens - (device.tokens - device.available())
        pages = max(0, room) // self._context.page
        return self._planner.query(ReadsDue(self._waiting(asking, pages), pages))

    def _waiting(self, asking: str, room: int) -> tuple[Queued, ...]:
        """Waiting requests in queue order, up to the first that exceeds `room` pages."""
        context, found = self._context, list[Queued]()
        for req in step.waiting(context.scheduler):
            if self._requests.restoration(req.rid) is not None:
                continue  # a restoration has slots of its own
            stored = self._requests.turn_read(req.rid)
            there = requests.found(req)
            end = max(there.tokens, stored.end) if stored is not None else there.tokens
            unread = req.rid == asking or (stored is not None and stored.deferred)
            found.append(Queued(req.rid, max(0, end - there.device) // context.page, unread))
            room -= found[-1].pages
            if room < 0 and len(found) > 1:
                break
        return tuple(found)
