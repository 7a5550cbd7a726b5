"""What of a request's prefix lies where when it is offered to the planner.

Whatever is refused here goes SGLang's own way and is counted under the reason. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_kvtier.policy.messages import RestoreOffered
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.restore.restoration import Load, Restoration
from sgl_kvtier.runtime.sglang import requests, storage_ops
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Handle, Operation, Req
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.types import PageKey, Span, Tier

LATER = 0.0
"""The time in facts noted between two ticks; the tick puts the agreed one in."""


class Offers:
    """Which prefixes are offered to the planner: hits of storage, and host pages of requests that
    wait. `restorations` and `loads` are the engine's; what is offered becomes one of the former.
    """

    def __init__(
        self,
        context: StepContext,
        restorations: dict[str, Restoration],
        loads: list[Load],
        counters: RestoreCounters,
        min_tokens: int,
        leave: Callable[[RestoreOffered], str | None],
    ) -> None:
        """`leave`: the planner's word on why a prefix is better left to SGLang than offered."""
        self.min_tokens = min_tokens
        self.taking = True
        """Whether hits are taken over at all; otherwise all of it is SGLang's own way."""
        self._context = context
        self._restorations = restorations
        self._loads = loads
        self._counters = counters
        self._leave = leave
        self._looking: dict[Any, None] = {}
        self._again: dict[Any, tuple[Any, int | None, tuple[PageKey, ...]]] = {}

    @property
    def open(self) -> bool:
        """Whether `make` has anything to do."""
        return bool(self._looking or self._again)

    @property
    def delayed(self) -> list[str]:
        """Requests that are offered when loads of their earlier restoration have ended."""
        return [handle.rid for handle in self._again]

    def is_delayed(self, handle: Handle) -> bool:
        """Whether this request is one of those."""
        return handle in self._again

    def forget(self, rid: str) -> None:
        """A request is gone."""
        if self._again:
            self._again = {
                handle: offer for handle, offer in self._again.items() if handle.rid != rid
            }

    def hit(self, operation: Operation, hit_tokens: int) -> bool:
        """A storage hit of a waiting request, before SGLang reserves host pages. True: restored."""
        keys = tuple(
            PageKey(bytes.fromhex(h))
            for h in operation.hash_value[: hit_tokens // self._context.page]
        )
        req = self._context.waiting(operation.handle)
        if req is not None and store_of(self._context.tree.cache_controller) is None:
            return self._fall_back("another backend")
        return req is not None and self._offer(
            req, operation.storage_start // self._context.page, keys
        )

    def look_at(self, handle: Handle) -> None:
        """A waiting request without pages in storage: its host pages may be offered next tick."""
        if self.taking:
            self._looking[handle] = None

    def again(self, r: Restoration) -> None:
        """Offers what a restoration that has ended was made of."""
        self._offer(r.req, r.pages - len(r.keys), r.keys, taken=True)

    def make(self) -> None:
        """Offers host pages of requests queued, or looked up in storage, since the last tick."""
        looking, self._looking = self._looking, {}
        again, self._again = self._again, {}
        for req, storage_start, keys in again.values():
            self._offer(req, storage_start, keys, taken=True)
        for handle in looking:
            req = self._context.waiting(handle)
            if (
                req is None
                or handle.rid in self._restorations
                or storage_ops.asked(self._context.tree, handle)
            ):
                continue
            if requests.found(req).host >= self.min_tokens:
                self._offer(req, None, ())

    def _offer(
        self, req: Req, storage_start: int | None, keys: tuple[PageKey, ...], taken: bool = False
    ) -> bool:
        """`taken`: SGLang has dropped its own transfer from storage, so no pages are left to it."""
        reason = (
            "again"
            if req.rid in self._restorations
            else requests.left_to_sglang(req)
            if self.taking
            else "switched off"
        )
        found = reason or find(self._context, req, storage_start, keys)
        if isinstance(found, Restoration) and (
            found.pages - found.resident
        ) * self._context.page < max(1, self.min_tokens):
            found = "short"
        if isinstance(found, Restoration):
            offer = RestoreOffered(
                req.rid, LATER, found.prompt_tokens, found.resident, found.pages, found.sources
            )
            found = found if taken and found.keys else self._leave(offer) or found
        if isinstance(found, str):
            return self._fall_back(found)
        if any(load.restoration.rid == req.rid and not load.written_off for load in self._loads):
            # Loads of an earlier restoration of it are still in flight; their reports must not be
            # taken for this one's.
            self._again[req.cache_request_handle] = (req, storage_start, keys)
            return True
        found.node_lock = self._context.tree.lock(req.last_node)
        if len(found.host_slots):
            found.host_pin = self._context.host.pin(req.best_match_node)
        self._restorations[req.rid] = found
        self._context.facts.append(offer)
        return True

    def _fall_back(self, why: str) -> bool:
        """Leaves a hit to SGLang's own way, and counts why: every hit that is not restored."""
        self._counters.declined[why] += 1
        return False


def find(
    context: StepContext, req: Req, storage_start: int | None, keys: tuple[PageKey, ...]
) -> Restoration | str:
    """A waiting request's restoration by a fresh match, or why there is none. `keys` are pages in
    storage from page `storage_start` of the prompt on. Between the tree's pages and those there
    must be no gap; pages that are in both count as the tree's.
    """
    page = context.page
    there = requests.match(req, context.tree)
    if there.device % page or there.host % page:
        return "unaligned"
    resident, in_tree = there.device // page, there.tokens // page
    host = context.host.slots_below(req.best_match_node)
    if len(host) != there.host:
        return "host pages in use"
    if in_tree > resident and context.host.write_back:
        # SGLang frees host copies of pages that are on the device too, pinned or not
        return "write-back"
    if storage_start is None:
        storage_start = in_tree
    if storage_start > in_tree:
        return "gap"
    end = max(storage_start + len(keys), in_tree)
    sources = ((Span(resident, in_tree), Tier.HOST), (Span(in_tree, end), Tier.STORAGE))
    return Restoration(
        rid=req.rid,
        req=req,
        prompt_tokens=requests.prompt_tokens(req),
        resident=resident,
        pages=end,
        sources=tuple((span, tier) for span, tier in sources if span),
        keys=keys[in_tree - storage_start :],
        host_slots=host,
    )
