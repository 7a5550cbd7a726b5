"""Builds the planner's view of a step: the queue, the chunked-prefill slot, and the pages that may
be allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgl_kvtier.policy.messages import StepView
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.sglang import requests, step
from sgl_kvtier.runtime.sglang.types import Req, Scheduler
from sgl_kvtier.types import Tier

_WAITING = 256
"""Most waiting requests that the planner sees."""
_HOST_SHARE = 4
"""At most a quarter of the host pool may be bounce pages at any time."""


class Views:
    """Builds the views of one scheduler's steps. Scheduler's thread; changes nothing but notes."""

    def __init__(self, engine: RestoreEngine, chunk_tokens: int, host_tokens: int) -> None:
        """`host_tokens` is the size of the smallest host pool of all ranks."""
        self._engine = engine
        self._context = engine.context
        self._chunk_tokens = chunk_tokens
        self._host_tokens = host_tokens
        self._elsewhere = 0

    def passed(self, batch: Any) -> None:
        """SGLang has chosen this batch for the step, or None."""
        self._elsewhere = step.decoding_elsewhere(batch)

    def left(self, rid: str, tokens: int) -> None:
        """Notes that SGLang loads the first `tokens` tokens of a waiting request."""
        self._context.requests.record(rid).sglang_loads = tokens

    def before(self, view: StepView, scheduler: Scheduler, rid: str) -> StepView:
        """The view for one request: among requests without a restoration, only those before it in
        the queue count; all of them if it is not in the queue yet.
        """
        fresh = wanted = 0
        for req in step.waiting(scheduler)[:_WAITING]:
            if req.rid == rid:
                break
            fresh += self._fresh(req)
            wanted += self._wanted(req)
        return replace(view, fresh_tokens=fresh, wanted_tokens=wanted, fresh=())

    def _wanted(self, req: Req) -> int:
        """Tokens of a waiting request that are not on the device. 0 for a restoration in progress,
        which the planner counts itself from its decision on.
        """
        r = self._engine.restoration(req.rid)
        if r is not None and r.mode is not None:
            return 0
        return max(0, requests.prompt_tokens(req) - requests.found(req).device)

    def _fresh(self, req: Req) -> int:
        """Tokens of a waiting request that are neither in memory nor loaded by SGLang; 0 if it has
        a restoration.
        """
        known = self._context.requests.get(req.rid)
        if known is None:
            return requests.missing_tokens(req)
        if known.restoration is not None:
            return 0
        stored = known.sglang_loads - requests.found(req).tokens
        return max(0, requests.missing_tokens(req) - max(0, stored))

    def of(self, scheduler: Scheduler, now: float) -> StepView:
        """The view of this step. `now` is the agreed time in seconds."""
        engine, chunked = self._engine, step.in_slot(scheduler)
        waiting = step.waiting(scheduler)[:_WAITING]
        holder = chunked.rid if chunked is not None and engine.restoration(chunked.rid) else None
        fresh = tuple(self._fresh(req) for req in waiting)
        decoding, mixes = step.decoding_count(scheduler), step.mixes(scheduler)
        return StepView(
            now=now,
            waiting=tuple(req.rid for req in waiting),
            slot=holder,
            slot_open=step.slot_is_open(scheduler, self._context.tree.req_to_token_pool),
            prefill_tokens=max(0, self._chunk_tokens - (decoding if mixes else 0)),
            fresh_tokens=sum(fresh),
            fresh=fresh if any(fresh) else (),
            wanted_tokens=sum(self._wanted(req) for req in waiting),
            decoding=decoding + self._elsewhere,
            mixes=mixes,
            mixed=step.mixed(scheduler),
            free_pages=self.free_pages(step.decoding(scheduler), chunked),
            empty_pages=self._empty_pages() if self._context.looking_ahead else {},
            owed_pages=0
            if chunked is None or holder is not None
            else requests.rest_tokens(chunked) // self._context.page,
        )

    def _empty_pages(self) -> dict[Tier, int]:
        """Pages of device and host pool that hold nothing."""
        context, page = self._context, self._context.page
        return {
            Tier.DEVICE: context.device.available() // page,
            Tier.HOST: context.host.available() // page,
        }

    def owed_tokens(self, scheduler: Scheduler) -> int:
        """Device slots to be reserved for running requests and the prompt in the chunked-prefill
        slot.
        """
        return self._owed(step.decoding(scheduler), step.in_slot(scheduler))

    def _owed(self, running: list[Req], chunked: Req | None) -> int:
        page = self._context.page
        tokens = sum(requests.output_room(req, page) for req in running)
        if chunked is not None:
            tokens += requests.rest_tokens(chunked) + requests.output_room(chunked, page)
            r = self._engine.restoration(chunked.rid)
            tokens -= 0 if r is None else len(r.owner) * page
        return int(tokens)

    def free_pages(self, running: list[Req], chunked: Req | None) -> dict[Tier, int]:
        """Pages that loads may allocate, by tier. On the device: those left after reserving what
        running requests will need.
        """
        page = self._context.page
        tokens = self._context.device.claimable() - self._owed(running, chunked)
        r = None if chunked is None else self._engine.restoration(chunked.rid)
        if r is not None and len(self._engine.restorations) == 1:
            # Its own loads may use what is reserved for it. If other requests load as well, the
            # pages that it has not allocated yet stay reserved.
            tokens += (r.pages - r.front - len(r.owner)) * page
        bounce = self._host_tokens // _HOST_SHARE - self._context.slots.host_tokens
        return {Tier.DEVICE: max(0, int(tokens) // page), Tier.HOST: max(0, bounce // page)}
