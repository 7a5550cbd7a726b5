"""The planner's view of a step: the queue, the slot for chunked prefill, and how many pages may be
claimed.
"""

from __future__ import annotations

from dataclasses import replace

from sgl_kvtier.policy.messages import StepView
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.sglang import requests, step
from sgl_kvtier.runtime.sglang.types import Req, Scheduler
from sgl_kvtier.types import Tier

_WAITING = 256
"""At most this many waiting requests are shown to the planner."""
_HOST_SHARE = 4
"""A quarter of the host pool may be bounce pages at any time."""


class Views:
    """Builds views of one scheduler's steps. Scheduler's thread; changes nothing."""

    def __init__(self, engine: RestoreEngine, chunk_tokens: int, host_tokens: int) -> None:
        """`host_tokens` are those of the smallest host pool of all ranks."""
        self._engine = engine
        self._context = engine.context
        self._chunk_tokens = chunk_tokens
        self._host_tokens = host_tokens

    def left(self, rid: str, tokens: int) -> None:
        """Notes that SGLang loads the first `tokens` of a waiting request."""
        self._context.requests.record(rid).sglang_loads = tokens

    def before(self, view: StepView, scheduler: Scheduler, rid: str) -> StepView:
        """The view as of one request: of those that restore nothing only those before it in the
        queue count; all that wait, where it is not in the queue yet.
        """
        fresh = wanted = 0
        for req in step.waiting(scheduler)[:_WAITING]:
            if req.rid == rid:
                break
            fresh += self._fresh(req)
            wanted += self._wanted(req)
        return replace(view, fresh_tokens=fresh, wanted_tokens=wanted, fresh=())

    def _wanted(self, req: Req) -> int:
        """Tokens of a waiting request that are not on the device; none of one that restores: the
        planner counts those from its answer on.
        """
        r = self._engine.restoration(req.rid)
        if r is not None and r.mode is not None:
            return 0
        return max(0, requests.prompt_tokens(req) - requests.found(req).device)

    def _fresh(self, req: Req) -> int:
        """Tokens of a waiting request that are neither in memory nor left to SGLang to load; none
        of one that restores.
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
        return StepView(
            now=now,
            waiting=tuple(req.rid for req in waiting),
            slot=holder,
            slot_open=step.slot_is_open(scheduler, self._context.tree.req_to_token_pool),
            prefill_tokens=self._chunk_tokens,
            fresh_tokens=sum(fresh),
            fresh=fresh if any(fresh) else (),
            wanted_tokens=sum(self._wanted(req) for req in waiting),
            decoding=step.decoding_count(scheduler),
            free_pages=self.free_pages(step.decoding(scheduler), chunked),
            empty_pages=self._empty_pages() if self._context.looking_ahead else {},
            owed_pages=0
            if chunked is None or holder is not None
            else requests.rest_tokens(chunked) // self._context.page,
        )

    def _empty_pages(self) -> dict[Tier, int]:
        """Pages of the pools that hold nothing."""
        context, page = self._context, self._context.page
        return {
            Tier.DEVICE: context.device.available() // page,
            Tier.HOST: context.host.available() // page,
        }

    def owed_tokens(self, scheduler: Scheduler) -> int:
        """Device slots that must stay claimable: what runs, and the prompt in the slot, will claim
        them.
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
        """The pages that loads may claim: on the device, those left when everything running gets
        the room it will need.
        """
        page = self._context.page
        tokens = self._context.device.claimable() - self._owed(running, chunked)
        r = None if chunked is None else self._engine.restoration(chunked.rid)
        if r is not None and len(self._engine.restorations) == 1:
            # Its loads take from the room it needs anyway; where other requests load as well, pages
            # it has not claimed yet are still reserved for it.
            tokens += (r.pages - r.front - len(r.owner)) * page
        bounce = self._host_tokens // _HOST_SHARE - self._context.slots.host_tokens
        return {Tier.DEVICE: max(0, int(tokens) // page), Tier.HOST: max(0, bounce // page)}
