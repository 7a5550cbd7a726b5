"""What of a request's prefix lies where when it is offered to the planner.

Whatever is refused here goes SGLang's own way and is counted under the reason. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from sgl_kvtier.policy.messages import RestoreOffered
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.restore.restoration import Load, Restoration
from sgl_kvtier.runtime.sglang import requests, storage_ops, stored_pages
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Handle, Operation, Req
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.page_names import from_hex
from sgl_kvtier.types import PageKey, Span, Tier

LATER = 0.0
"""The time in facts noted between two ticks; the tick puts the agreed one in."""


_SHORT = 32
"""Fewer neighbouring pages of one tier below host memory are no source of their own between those
of the other: each costs the planner time in every step.
"""


_MOST_STOPPING_S = 2.0
"""Longest time, in seconds, for which a request waits for the end of a read that was stopped."""
_MOST_STOPPING_TICKS = 10_000
"""The same in ticks, where ranks have no common clock."""


class Stored(NamedTuple):
    """Pages of a prompt below host memory: from page `start` on those of `keys`. `sources` are
    their tiers, ascending; what is in none of them is a hole.
    """

    start: int
    keys: tuple[PageKey, ...]
    sources: tuple[tuple[Span, Tier], ...]


@dataclass
class _Left:
    """A read that was left to SGLang, and the fewest device slots that could be claimed
    since it was last asked.
    """

    operation: Operation
    lowest: int


@dataclass
class _Stopped:
    """A read of SGLang's that was stopped, so that its request is restored when it has ended."""

    stored: Stored
    since: float
    ticks: int = 0


class Offers:
    """Which prefixes are offered to the planner: hits of storage, what it has behind a missing
    page, and host pages of requests that wait. `restorations` and `loads` are the engine's; what is
    offered becomes one of the former.
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
        self._looking: dict[Any, Stored | None] = {}
        self._again: dict[Any, tuple[Any, Stored | None]] = {}
        self._left: dict[Handle, _Left] = {}
        self._stopped: dict[Handle, _Stopped] = {}

    @property
    def open(self) -> bool:
        """Whether `make` has anything to do."""
        return bool(self._looking or self._again)

    @property
    def delayed(self) -> list[str]:
        """Requests that are offered when loads of their earlier restoration, or SGLang's read that
        was stopped for this one, have ended.
        """
        return [handle.rid for handle in (*self._again, *self._stopped)]

    def is_delayed(self, handle: Handle) -> bool:
        """Whether this request is one of those."""
        return handle in self._again or handle in self._stopped

    def forget(self, rid: str) -> None:
        """A request is gone."""
        for there in (self._again, self._left, self._stopped):
            for handle in [handle for handle in there if handle.rid == rid]:
                del there[handle]

    def hit(self, operation: Operation, hit_tokens: int) -> bool:
        """A storage hit of a waiting request, before SGLang reserves host pages. True: restored."""
        req = self._context.waiting(operation.handle)
        if req is not None and store_of(self._context.tree.cache_controller) is None:
            return self._fall_back("another backend")
        if req is None:
            return False
        offered = self._offer(req, stored_of(operation, hit_tokens, self._context.page))
        if self.taking and not offered:
            self._left[operation.handle] = _Left(operation, self._context.device.claimable())
        return offered

    def look_again(self) -> bool:
        """Asks the planner again about the prefix that SGLang reads now, where more device slots
        can be claimed than before: it may have been left for want of room. Returns whether that
        read was stopped for a restoration. Once per tick.
        """
        tree = self._context.tree
        for handle in [handle for handle in self._left if not storage_ops.asked(tree, handle)]:
            del self._left[handle]
        if not self._left or not self.taking:
            return False
        claimable = self._context.device.claimable()
        for left in self._left.values():
            left.lowest = min(left.lowest, claimable)
        handle, left = next(iter(self._left.items()))  # reads are made in this order
        if claimable <= left.lowest:
            return False
        left.lowest = claimable
        stored = self._takes_back(left.operation)
        if stored is None:
            return False
        del self._left[handle]
        self._stopped[handle] = _Stopped(stored, self._context.moment())
        storage_ops.stop(tree, left.operation)
        return True

    def offer_stopped(self) -> list[str]:
        """Offers prefixes whose reads were stopped and have ended. Returns the requests whose rest
        SGLang has to read after all. Once per tick.
        """
        tree, again = self._context.tree, list[str]()
        for handle, stopped in list(self._stopped.items()):
            stopped.ticks += 1
            ended = not storage_ops.asked(tree, handle)  # what was read is in the tree
            if not ended and not self._hangs(stopped):
                continue
            del self._stopped[handle]
            req = self._context.waiting(handle)
            if ended and req is not None and not self._offer(req, stopped.stored):
                again.append(req.rid)
        return again

    def _takes_back(self, operation: Operation) -> Stored | None:
        """What storage has for a request whose pages SGLang reads, if the planner wants to restore
        it now. What was read so far lies in host memory then.
        """
        context, page = self._context, self._context.page
        req = context.waiting(operation.handle)
        if (
            req is None
            or req.rid in self._restorations
            or operation.is_terminated()
            or context.host.write_back  # what was read could not be restored
        ):
            return None
        stored = stored_of(operation, operation.storage_hit_count, page)
        found = find(context, req, stored)
        if isinstance(found, str):
            return None
        read = max(found.resident, stored.start + operation.completed_tokens // page)
        below = tuple(
            (Span(max(span.start, read), span.stop), tier)
            for span, tier in found.sources
            if span.stop > read
        )
        if sum(len(span) for span, _ in below) * page < max(1, self.min_tokens):
            return None
        host = ((Span(found.resident, read), Tier.HOST),) if read > found.resident else ()
        found.sources = (*host, *below)
        return stored if self._leave(_offer_of(found)) is None else None

    def _hangs(self, stopped: _Stopped) -> bool:
        """Whether a read has not ended long after it was stopped. SGLang ends it then, and the
        request runs with what was read.
        """
        context = self._context
        if not context.alone:
            return stopped.ticks > _MOST_STOPPING_TICKS
        return context.moment() - stopped.since > _MOST_STOPPING_S

    def look_at(self, handle: Handle, operation: Operation | None = None) -> None:
        """A waiting request for which SGLang reads nothing. Pages that storage has behind a missing
        one, by this operation, may be offered next tick, else its host pages.
        """
        if not self.taking:
            return
        self._looking[handle] = None
        if operation is not None and not operation.is_terminated():
            hit_tokens = operation.storage_hit_count
            page = self._context.page
            stored = stored_of(operation, hit_tokens, page)
            self._looking[handle] = stored if len(stored.keys) * page > hit_tokens else None

    def again(self, r: Restoration) -> None:
        """Offers what a restoration that has ended was made of."""
        below = tuple((span, tier) for span, tier in r.sources if tier > Tier.HOST)
        self._offer(r.req, Stored(r.pages - len(r.keys), r.keys, below), taken=True)

    def make(self) -> None:
        """Offers host pages of requests queued, or looked up in storage, since the last tick."""
        looking, self._looking = self._looking, {}
        again, self._again = self._again, {}
        for req, stored in again.values():
            self._offer(req, stored, taken=True)
        for handle, stored in looking.items():
            req = self._context.waiting(handle)
            if (
                req is None
                or handle.rid in self._restorations
                or storage_ops.asked(self._context.tree, handle)
            ):
                continue
            if stored is not None and self._offer(req, stored):
                continue
            if requests.found(req).host >= self.min_tokens:
                self._offer(req, None)

    def _offer(self, req: Req, stored: Stored | None, taken: bool = False) -> bool:
        """`taken`: SGLang has dropped its own transfer from storage, so no pages are left to it."""
        reason = (
            "again"
            if req.rid in self._restorations
            else requests.left_to_sglang(req)
            if self.taking
            else "switched off"
        )
        found = reason or find(self._context, req, stored)
        if isinstance(found, Restoration) and found.tokens(self._context.page) < max(
            1, self.min_tokens
        ):
            found = "short"
        if isinstance(found, Restoration):
            offer = _offer_of(found)
            found = found if taken and found.keys else self._leave(offer) or found
        if isinstance(found, str):
            return self._fall_back(found)
        if any(load.restoration.rid == req.rid and not load.written_off for load in self._loads):
            # Loads of an earlier restoration of it are still in flight; their reports must not be
            # taken for this one's.
            self._again[req.cache_request_handle] = (req, stored)
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


def _offer_of(r: Restoration) -> RestoreOffered:
    return RestoreOffered(r.rid, LATER, r.prompt_tokens, r.resident, r.pages, r.sources)


def stored_of(operation: Operation, hit_tokens: int, page: int) -> Stored:
    """What storage has of a waiting request's prompt: a hit of `hit_tokens`, and the pages behind
    its end.
    """
    start, hit = operation.storage_start // page, hit_tokens // page
    names, tiers = stored_pages.up_to_the_last(operation, hit)
    return Stored(start, from_hex(names), _sources_of(tiers, start))


def _sources_of(tiers: Sequence[Tier | None], start: int) -> tuple[tuple[Span, Tier], ...]:
    """Sources of the pages from `start` on. A short run takes the tier of what is before it, and is
    read from its own disk where it lies there all the same.
    """
    runs = list[tuple[int, int, Tier | None]]()
    for tier, pages in groupby(tiers):
        low = runs[-1][1] if runs else 0
        high = low + len(list(pages))
        before = runs[-1][2] if runs else None
        if tier is not None and before is not None and (before is tier or high - low < _SHORT):
            runs[-1] = (runs[-1][0], high, before)
        else:
            runs.append((low, high, tier))
    return tuple(
        (Span(start + low, start + high), tier) for low, high, tier in runs if tier is not None
    )


def find(context: StepContext, req: Req, stored: Stored | None) -> Restoration | str:
    """A waiting request's restoration by a fresh match, or why there is none. Between the tree's
    pages and those in storage must be no gap; pages that are in both count as the tree's.
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
    if stored is None:
        stored = Stored(in_tree, (), ())
    if stored.start > in_tree:
        return "gap"
    end = max(stored.start + len(stored.keys), in_tree)
    below = tuple(
        (Span(max(span.start, in_tree), span.stop), tier)
        for span, tier in stored.sources
        if span.stop > in_tree
    )
    sources = ((Span(resident, in_tree), Tier.HOST), *below)
    return Restoration(
        rid=req.rid,
        req=req,
        prompt_tokens=requests.prompt_tokens(req),
        resident=resident,
        pages=end,
        sources=tuple((span, tier) for span, tier in sources if span),
        keys=stored.keys[in_tree - stored.start :],
        host_slots=host,
    )
