"""Restored requests in a prefill pass: they are admitted while their loads are in flight, get
landed pages attached, or wait.

SGLang builds one adder per pass. It first asks for the request in the single chunked-prefill slot,
then for waiting ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sgl_kvtier.runtime.sglang import anchors, requests, step
from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.types import Span, Tier

_MOST_OVER = 8
"""Most requests that others may overtake in a pass with a cut chunk: each costs a prefix match."""


class KVTierPrefillAdder(PrefillAdder):
    """SGLang's adder, which follows the planner on restorations. `tree_cache`:
    `KVTierRadixCache`.
    """

    chunked_req_limit: int | None
    rem_chunk_tokens: int | None
    _is_cut = False
    """Whether a chunk of this pass was cut so that waiting requests can run with it."""
    _over = 0
    """Number of requests in this pass that need the chunked-prefill slot, which is taken."""

    # --- the request in the chunked-prefill slot --------------------------------------------------

    def add_chunked_req(self, req: Req) -> Any:
        """Attaches landed pages, then adds the chunk that the planner granted. If the request is
        returned without being added, it waits.
        """
        engine = self.tree_cache.kvtier.engine
        r = engine.restoration_of(req)
        if r is None:
            return self._add_beside_others(req)
        compute = engine.computes.get(req.rid)
        if compute is None:
            return self._park(r, req)
        # Pages attached in a pass that added no chunk are not attached again: the planner learns of
        # them with the next chunk.
        span = Span(max(compute.splice.start, r.front), max(compute.splice.stop, r.front))
        if span and span.start * self.page_size != req.prefix_len:
            engine.abandon(r, "unaligned")
        if r.closed or not engine.trusted(r, span):
            return self._add_what_fits(req)
        if span:
            self._splice_into_row(r, req, span)
        if compute.tokens is not None:
            tokens = self._whole_pages(
                min(compute.tokens, (r.barrier(r.front) - r.front) * self.page_size)
            )
            if tokens <= 0:
                return self._park(r, req)
            self.chunked_req_limit = min(self.chunked_req_limit or tokens, tokens)
        elif self._fits_in_part(req) and r.front < r.pages:
            # SGLang would end the chunk inside a page, at which no loaded page could be attached.
            tokens = self._whole_pages(self.rem_chunk_tokens or 0)
            self.chunked_req_limit = min(self.chunked_req_limit or tokens, tokens) or None
        added = len(self.can_run_list)
        left = self._add_what_fits(req)
        if len(self.can_run_list) == added:
            return self._park(r, req)
        engine.counters.unpark(r)
        self._reserve(r, req, req.extend_end)
        engine.advance(r, req.extend_end)
        return left

    def _add_beside_others(self, req: Req) -> Any:
        """Adds the next chunk of a request without a restoration. SGLang would use all tokens of
        the pass for it; the planner leaves room for waiting short requests.
        """
        tokens = self._chunk_beside(req, requests.prompt_tokens(req) - req.prefix_len)
        if tokens is None:
            return self._add_what_fits(req)
        self.chunked_req_limit = min(self.chunked_req_limit or tokens, tokens)
        added = len(self.can_run_list)
        again = self._add_what_fits(req)
        self._leave(
            req, tokens, req.extend_end if len(self.can_run_list) > added else req.prefix_len
        )
        return again

    def _chunk_beside(self, req: Req, left: int) -> int | None:
        """Tokens of this request's next chunk, if the planner cuts it; None: as many as fit. `left`
        tokens are to be prefilled.
        """
        parts, most = self.tree_cache.kvtier, self.rem_chunk_tokens
        if most is None or not parts.orders or not step.admits(self):
            return None
        room = int(self.rem_total_tokens) - self._rest_of(req, left)
        tokens: int = parts.chunk_beside(req, left, most, room)
        self._is_cut = tokens < min(most, left)
        return tokens if self._is_cut else None

    def _leave(self, req: Req, tokens: int, end: int) -> None:
        """Limits the requests admitted with a chunk of `tokens` that ends at `end`: to as many
        tokens as the chunk has, and to memory that its next chunks do not need.
        """
        self.rem_chunk_tokens = min(self.rem_chunk_tokens or 0, tokens)
        self.memory_budget.total_offset += self._rest_of(req, requests.prompt_tokens(req) - end)

    def _rest_of(self, req: Req, left: int) -> int:
        """Device tokens that a request with `left` tokens to prefill will still allocate."""
        return left + requests.whole_output_room(req, self.page_size)

    def _add_what_fits(self, req: Req) -> Any:
        """Adds the next chunk. SGLang assumes that there is memory for it, which slots held by
        restorations can make untrue for a while.
        """
        engine, most = (self.tree_cache.kvtier.engine, requests.prompt_tokens(req) - req.prefix_len)
        limits = [
            limit
            for limit in (most, self.rem_chunk_tokens, self.chunked_req_limit)
            if limit is not None
        ]
        room = self._room_for(min(limits))
        waits = engine.holds_memory or self.running_batch.reqs or engine.context.room.matters
        if room < min(limits) and waits:
            room = room // self.page_size * self.page_size
            if room <= 0:
                return req
            self.chunked_req_limit = room
        return super().add_chunked_req(req)

    def _room_for(self, tokens: int) -> int:
        """How many of `tokens` can be allocated, once waiting restorations gave up their slots."""
        budget, engine = self.memory_budget, self.tree_cache.kvtier.engine
        short = tokens + self.page_size - budget._available_and_evictable()
        if short > 0:
            engine.give_room(short)
        room = engine.context.room
        if not room.matters:
            return min(tokens, budget._available_and_evictable() - self.page_size)
        needed = tokens + int(budget.current_offset)
        free = room.free_up(needed)
        if free < needed and engine.give_room(needed - free):
            free = room.free_up(needed)
        return tokens - max(0, needed - free)

    def _fits_in_part(self, req: Req) -> bool:
        """Whether the tokens of the pass are too few for the rest of the prompt."""
        most = self.rem_chunk_tokens
        return most is not None and requests.prompt_tokens(req) - req.prefix_len > most

    def _whole_pages(self, tokens: int) -> int:
        """As many of a chunk's tokens as fit now, in whole pages. SGLang would cut it anywhere, or
        fail.
        """
        room = self._room_for(tokens)
        chunk = self.memory_budget.available_chunk_tokens(self.rem_chunk_tokens) or 0
        return max(0, min(chunk, room)) // self.page_size * self.page_size

    def _splice_into_row(self, r: Restoration, req: Req, span: Span) -> None:
        """Attaches pages: writes their slots into the request's row and moves the end of its prefix
        after them.
        """
        assert span.start * self.page_size == req.prefix_len, (req.rid, span, req.prefix_len)
        tiers = dict(r.spliced)
        slots = self.tree_cache.kvtier.engine.splice(r, span)
        stop = span.stop * self.page_size
        pool = self.tree_cache.req_to_token_pool
        pool.write(
            (req.kv.req_pool_idx, slice(req.prefix_len, stop)), slots.to(pool.req_to_token.dtype)
        )
        req.prefix_len = stop
        req.kv.kv_allocated_len = req.kv.kv_committed_len = stop
        self._count_cached(req, r, tiers)

    def _count_cached(self, req: Req, r: Restoration, before: dict[Tier, int]) -> None:
        """Adds tokens that are attached after the first chunk to SGLang's counts of cached tokens
        by tier, which it splits only once, at that chunk.
        """
        host, storage = (
            (now - then) * self.page_size
            for now, then in zip(_by_place(r.spliced), _by_place(before), strict=True)
        )
        self.log_hit_tokens += host + storage
        self.log_host_hit_tokens += host
        self.log_storage_hit_tokens += storage
        if not req.retracted_stain:
            req.cached_tokens_host += host
            req.cached_tokens_storage += storage

    def _park(self, r: Restoration, req: Req) -> Any:
        self.tree_cache.kvtier.engine.counters.park(r)
        self._reserve(r, req, req.prefix_len)
        return req

    def _reserve(self, r: Restoration, req: Req, end: int) -> None:
        """Reserves the tokens that this request still needs after `end`, since other requests may
        be admitted together with its small chunk, or while it waits.
        """
        held = len(r.owner) * self.page_size
        left = requests.prompt_tokens(req) - end
        if left > 0:
            output = requests.whole_output_room(req, self.page_size)
            self.memory_budget.total_offset += max(0, left - held) + output

    # --- waiting requests -------------------------------------------------------------------------

    def add_one_req(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> Any:
        """Admits a waiting request; one with a restoration gets its landed pages as prefix and the
        granted chunk.
        """
        engine = self.tree_cache.kvtier.engine
        anchored, r = engine.context.anchors, engine.restoration_of(req)
        if anchored is not None:
            anchored.drop_old_copy(req)
        if r is None:
            verdict = self._add_plain(req, has_chunked_req, truncation_align_size)
        else:
            verdict = self._add_restoring(r, req, has_chunked_req, truncation_align_size)
        if (
            verdict is AddReqResult.NO_TOKEN
            and not has_chunked_req
            and not self.can_run_list
            and not self.running_batch.reqs
        ):
            # Nothing runs that could free memory. Restorations after it in the queue wait for it,
            # so only they can.
            engine.give_room(engine.context.device.tokens, to=req.rid)
        added = self.can_run_list and self.can_run_list[-1] is req
        if anchored is not None and verdict is AddReqResult.CONTINUE and not added:
            anchored.not_admitted(req)
        return verdict

    def _add_plain(self, req: Req, has_chunked_req: bool, align: int | None) -> Any:
        """Admits a request without a restoration. If its prompt needs several chunks, its first
        chunk leaves room for others as well.
        """
        left = requests.prompt_tokens(req) - requests.found(req).tokens
        whole = self.rem_chunk_tokens is None or left <= self.rem_chunk_tokens
        if not whole and (has_chunked_req or self.new_chunked_req is not None):
            return self._passed_over() or super().add_one_req(req, has_chunked_req, align)
        if self._held_back(req):
            return AddReqResult.OTHER
        if whole:
            return super().add_one_req(req, has_chunked_req, align)
        tokens = self._chunk_beside(req, left)
        verdict = self._add_with_limit(req, has_chunked_req, align, tokens)
        if tokens is None or self.new_chunked_req is not req:
            return verdict
        self._leave(req, tokens, req.extend_end)
        return self.budget_state()

    def _held_back(self, req: Req) -> bool:
        """Whether a request that could be admitted waits because a session is about to return. Only
        if its admission would evict pages from the device.
        """
        parts = self.tree_cache.kvtier
        if not parts.orders or parts.ahead is None:
            return False
        left = requests.prompt_tokens(req) - requests.found(req).device
        needed = left + requests.output_room(req, self.page_size)
        empty = parts.context.device.available() - self.memory_budget.total_offset
        return empty < needed <= int(self.rem_total_tokens) and bool(parts.held_back(req))

    def _passed_over(self) -> AddReqResult | None:
        """CONTINUE for a request that needs the taken slot, if this pass has a cut chunk: SGLang
        then goes on with the requests after it. Otherwise None, also after `_MOST_OVER` requests.
        """
        self._over += 1
        return AddReqResult.CONTINUE if self._is_cut and self._over <= _MOST_OVER else None

    def _add_restoring(
        self, r: Restoration, req: Req, has_chunked_req: bool, align: int | None
    ) -> Any:
        engine, compute = (
            self.tree_cache.kvtier.engine,
            self.tree_cache.kvtier.engine.computes[req.rid],
        )
        anchored = engine.context.anchors is not None
        if req.prefix_len != r.resident * self.page_size or (anchored and anchors.front_lacks(req)):
            engine.offer_again(r)
            return AddReqResult.CONTINUE
        if compute.splice.start != r.front:
            engine.abandon(r, "mismatch")
            return AddReqResult.CONTINUE
        if not engine.trusted(r, compute.splice):
            return AddReqResult.CONTINUE
        if compute.tokens is not None and (
            has_chunked_req or self.new_chunked_req is not None or not compute.tokens
        ):
            return AddReqResult.CONTINUE
        found = requests.found(req)
        # SGLang is about to charge all its tokens after the attached pages; those that already have
        # a slot of a load cost nothing.
        held = (len(r.owner) - len(compute.splice)) * self.page_size
        self.memory_budget.total_offset -= held
        requests.set_found(req, requests.Found(compute.splice.stop * self.page_size, 0))
        anchor = anchors.in_host(req)
        anchors.set_in_host(req)
        read = requests.read_from_storage(req)
        requests.set_read_from_storage(req, Span(0, 0))  # SGLang would count it a second time
        verdict = self._add_with_limit(req, has_chunked_req, align, compute.tokens)
        if not (self.can_run_list and self.can_run_list[-1] is req):
            requests.set_found(req, found)
            anchors.set_in_host(req, anchor)
            requests.set_read_from_storage(req, read)
            self.memory_budget.total_offset += held
            return verdict
        prefix = engine.splice(r, compute.splice) if compute.splice else None
        there = Span(found.device, max(found.device, compute.splice.stop * self.page_size))
        self._count_admitted(req, r, there, read)
        self.memory_budget.total_offset += held
        self._reserve(r, req, req.extend_end)
        engine.admitted(r, prefix, req.extend_end)
        return self.budget_state()

    def _add_with_limit(
        self, req: Req, has_chunked_req: bool, align: int | None, tokens: int | None
    ) -> Any:
        """Adds a chunk of `tokens` even if more would fit: SGLang cuts a prompt where the tokens of
        the pass end.
        """
        if tokens is None:
            return super().add_one_req(req, has_chunked_req, align)
        whole = self.rem_chunk_tokens
        limit = tokens if whole is None else min(whole, tokens)
        self.rem_chunk_tokens = limit
        try:
            return super().add_one_req(req, has_chunked_req, align)
        finally:
            self.rem_chunk_tokens = (
                None if whole is None else whole - (limit - (self.rem_chunk_tokens or 0))
            )

    def _count_admitted(self, req: Req, r: Restoration, spliced: Span, read: Span) -> None:
        """Splits by tier the prefix that SGLang has just logged as the device's. Of the tokens
        `spliced` after the resident ones, those that SGLang `read` before count as storage's.
        """
        if req.retracted_stain:
            return
        host, storage = (pages * self.page_size for pages in _by_place(r.spliced))
        both = min(spliced.stop, read.stop) - max(spliced.start, read.start)
        moved = min(host, max(0, both))
        host, storage = host - moved, storage + moved
        self.log_device_hit_tokens -= host + storage
        self.log_host_hit_tokens += host
        self.log_storage_hit_tokens += storage
        req.cached_tokens_device = spliced.start
        req.cached_tokens_host = host
        req.cached_tokens_storage = storage
        req._cache_breakdown_computed = True

    def _select_prefill_admission(
        self, req: Req, *, total_tokens: int, has_chunked_req: bool = False, **how: Any
    ) -> Any:
        """Ensures that only one request is mid-prefill. SGLang's chunks leave no tokens for a
        second one in the pass. A cut chunk or a waiting restoration does, and the second would take
        the first one's slot.
        """
        admission = super()._select_prefill_admission(
            req, total_tokens=total_tokens, has_chunked_req=has_chunked_req, **how
        )
        taken = has_chunked_req or self.new_chunked_req is not None
        if isinstance(admission, AddReqResult):
            return admission
        if taken and admission.is_chunked:
            return self._passed_over() or AddReqResult.OTHER
        return self._lacks_room(req, total_tokens) or admission

    def _lacks_room(self, req: Req, tokens: int) -> AddReqResult | None:
        """Why a request that needs `tokens` more is not admitted although SGLang counts enough
        evictable memory; None if enough slots are empty. Its prefix on the device is locked.
        """
        context = self.tree_cache.kvtier.engine.context
        anchored, room = context.anchors, context.room
        if anchored is not None and context.slots.anchor_slots and anchored.is_short():
            return AddReqResult.OTHER  # restorations soon give theirs to a request, or free them
        if not room.matters:
            return None
        needed = int(self.memory_budget.total_offset) + tokens
        pin = context.host.pin(req.best_match_node) if requests.found(req).host else None
        try:
            if room.free_up(needed) >= needed:
                return None
        finally:
            if pin is not None:
                context.host.unpin(pin)
        # Transfers in flight end by themselves. Otherwise only restorations can give up slots.
        return AddReqResult.OTHER if room.transfers else AddReqResult.NO_TOKEN


def _by_place(pages: Mapping[Tier, int]) -> tuple[int, int]:
    """Pages from host memory, and from storage, which for SGLang includes remote servers' pages."""
    return pages.get(Tier.HOST, 0), pages.get(Tier.STORAGE, 0) + pages.get(Tier.REMOTE, 0)
