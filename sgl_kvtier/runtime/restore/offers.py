"""Finds restore candidates, with the tier of each page, and offers them to the planner.

Prefixes rejected here are loaded by SGLang and counted by reason. Scheduler's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from sgl_kvtier.policy.messages import RestoreOffered
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.sglang import anchors, requests, storage_ops, stored_pages
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Handle, Operation, Req
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.page_names import from_hex
from sgl_kvtier.runtime.step.restoration import Load, Restoration, Stored
from sgl_kvtier.runtime.step.tracked import Candidate, Look, Tracked, Waits
from sgl_kvtier.types import Span, Tier

LATER = 0.0
"""Placeholder for the time in facts noted between two ticks; the tick sets the agreed time."""


_SHORT = 32
"""A run of fewer pages than this is merged into the source of the pages before it, if both tiers
are below host memory: each source costs the planner time in every step.
"""


_MOST_STOPPING_S = 2.0
"""Longest time, in seconds, that a request waits for a stopped read to end."""
_MOST_STOPPING_TICKS = 10_000
"""The same in ticks, for several ranks, which share no clock."""


class Offers:
    """Offers prefixes to the planner: storage hits, stored pages after a missing one, and host
    pages of waiting requests. `loads` are the engine's; `begin` registers an offered restoration
    with the engine.
    """

    def __init__(
        self,
        context: StepContext,
        begin: Callable[[Restoration], None],
        loads: list[Load],
        counters: RestoreCounters,
        min_tokens: int,
        why_declined: Callable[[RestoreOffered], str | None],
    ) -> None:
        """`why_declined` returns the planner's reason for leaving a prefix to SGLang, or None."""
        self.min_tokens = min_tokens
        self._is_on = True
        self.paused_until = -math.inf
        """No restoration starts before this time in seconds of `StepContext.moment`."""
        self.shorten: Callable[[Restoration, int], None] | None = None
        """For the proof: leaves the last page out of some restorations of more than so many
        tokens.
        """
        self._context = context
        self._begin = begin
        self._loads = loads
        self._counters = counters
        self._why_declined = why_declined
        self._requests = context.requests

    @property
    def is_on(self) -> bool:
        """Whether prefixes are restored at all; otherwise SGLang loads all of them."""
        return self._is_on and not self.is_paused

    @is_on.setter
    def is_on(self, value: bool) -> None:
        self._is_on = value

    @property
    def is_paused(self) -> bool:
        """Whether restoration is paused."""
        return self._context.moment() < self.paused_until

    @property
    def open(self) -> bool:
        """Whether `make` has anything to do."""
        return any(
            record.look is not None or _waits(record, Waits.OLD_LOADS)
            for record in self._requests.candidates.values()
        )

    @property
    def delayed(self) -> list[str]:
        """Requests offered once earlier loads, or SGLang's stopped read of their prefix, have
        ended.
        """
        return [
            rid
            for rid, record in self._requests.candidates.items()
            if _waits(record, Waits.OLD_LOADS) or _waits(record, Waits.READ_STOPS)
        ]

    def is_delayed(self, handle: Handle) -> bool:
        """Whether this request is in `delayed`."""
        record = self._requests.candidates.get(handle.rid)
        there = record.candidate if record is not None else None
        if there is None or there.waits is Waits.SGLANG_READS:
            return False
        return there.handle == handle

    def hit(self, operation: Operation, hit_tokens: int) -> bool:
        """A storage hit of a waiting request, before SGLang reserves host pages. True: restored."""
        req = self._context.waiting(operation.handle)
        if req is not None and store_of(self._context.tree.cache_controller) is None:
            return self._fall_back("another backend")
        if req is None:
            return False
        stored = stored_of(operation, hit_tokens, self._context.page)
        if (anchored := self._context.anchors) is not None:
            if not anchors.is_asked_for(operation):
                return self._fall_back(f"{anchored.one} not stored")
            if self._context.alone:  # several ranks have agreed on the longest end only
                shorter = anchors.shorter_ends(operation)
                ends = [stored.start + pages for pages in shorter if pages < len(stored.keys)]
                stored = stored._replace(ends=tuple(ends))
        offered = self._offer(req, stored)
        if self.is_on and not offered:
            claimable = self._context.device.claimable()
            read = Candidate(Waits.SGLANG_READS, operation.handle, operation, claimable)
            self._set(self._requests.record(req.rid), read)
        return offered

    def look_again(self) -> bool:
        """Asks the planner again about the prefix that SGLang is reading, if more device slots can
        be allocated than before: it may have been rejected for lack of memory. Returns whether that
        read was stopped in favour of a restoration. Once per tick.
        """
        tree, being_read = self._context.tree, list[tuple[Tracked, Candidate]]()
        for record, read in self._candidates_for(Waits.SGLANG_READS):
            if storage_ops.asked(tree, read.handle):
                being_read.append((record, read))
            else:
                self._set(record, None)
        if not being_read or not self.is_on:
            return False
        claimable = self._context.device.claimable()
        for _, read in being_read:
            read.lowest_claimable = min(read.lowest_claimable, claimable)
        record, read = being_read[0]  # SGLang reads in this order
        if claimable <= read.lowest_claimable:
            return False
        read.lowest_claimable = claimable
        operation = read.operation
        assert operation is not None, "SGLang's read has an operation"
        stored = self._takes_back(operation)
        if stored is None:
            return False
        since = self._context.moment()
        self._set(record, Candidate(Waits.READ_STOPS, read.handle, stored=stored, since=since))
        storage_ops.stop(tree, operation)
        return True

    def offer_stopped(self) -> list[str]:
        """Offers prefixes whose stopped reads have ended. Returns ids of requests whose remaining
        pages SGLang has to read after all. Once per tick.
        """
        tree, again = self._context.tree, list[str]()
        for record, stopped in self._candidates_for(Waits.READ_STOPS):
            stopped.ticks += 1
            ended = not storage_ops.asked(tree, stopped.handle)  # pages read so far are in the tree
            if not ended and not self._hangs(stopped):
                continue
            self._set(record, None)
            req = self._context.waiting(stopped.handle)
            if ended and req is not None and not self._offer(req, stopped.stored):
                again.append(req.rid)
        return again

    def _takes_back(self, operation: Operation) -> Stored | None:
        """What storage has for a request whose prefix SGLang is reading, if the planner would
        restore it now. Pages read so far count as host pages.
        """
        context, page = self._context, self._context.page
        req = context.waiting(operation.handle)
        if (
            req is None
            or self._requests.restoration(req.rid) is not None
            or operation.is_terminated()
            or context.host.write_back  # pages read so far could not be restored
            or context.anchors is not None  # nor could they without their anchor
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
        return stored if self._why_declined(_offer_of(context, found)) is None else None

    def _hangs(self, stopped: Candidate) -> bool:
        """Whether a stopped read has taken too long to end. SGLang then ends it, and the request
        runs with the pages read so far.
        """
        context = self._context
        if not context.alone:
            return stopped.ticks > _MOST_STOPPING_TICKS
        return context.moment() - stopped.since > _MOST_STOPPING_S

    def look_at(self, handle: Handle, operation: Operation | None = None) -> None:
        """Notes a waiting request for which SGLang reads nothing. In the next tick it may be
        offered: stored pages after a missing one, found by `operation`, or else its host pages.
        """
        if not self.is_on or self._context.anchors is not None:
            return
        stored = None
        if operation is not None and not operation.is_terminated():
            hit_tokens = operation.storage_hit_count
            page = self._context.page
            found = stored_of(operation, hit_tokens, page)
            stored = found if len(found.keys) * page > hit_tokens else None
        record = self._requests.record(handle.rid)
        record.look = Look(handle, stored)
        self._requests.note_candidate(record)

    def again(self, r: Restoration) -> None:
        """Offers the prefix of a restoration that has ended."""
        below = tuple((span, tier) for span, tier in r.sources if tier > Tier.HOST)
        ends = () if r.stored is None else r.stored.ends
        self._offer(r.req, Stored(r.pages - len(r.keys), r.keys, below, ends), taken=True)

    def instead(self, r: Restoration, stored: Stored) -> None:
        """Offers a shorter prefix in place of a restoration that has ended; its request waits."""
        self._offer(r.req, stored, taken=True)

    def make(self) -> None:
        """Offers candidates noted by `look_at`, and those whose earlier loads have ended."""
        looks = [
            (record, record.look)
            for record in self._requests.candidates.values()
            if record.look is not None
        ]
        again = self._candidates_for(Waits.OLD_LOADS)
        for record, _ in again:
            self._set(record, None)
        for record, _ in looks:
            record.look = None
            self._requests.note_candidate(record)
        for _, candidate in again:
            assert candidate.req is not None, "it was offered before"
            self._offer(candidate.req, candidate.stored, taken=True)
        for _, look in looks:
            req = self._context.waiting(look.handle)
            if (
                req is None
                or self._requests.restoration(req.rid) is not None
                or storage_ops.asked(self._context.tree, look.handle)
            ):
                continue
            if look.stored is not None and self._offer(req, look.stored):
                continue
            if requests.found(req).host >= self.min_tokens:
                self._offer(req, None)

    def _candidates_for(self, waits: Waits) -> list[tuple[Tracked, Candidate]]:
        """Records and candidates that wait for `waits`, in the order in which they became
        candidates.
        """
        return [
            (record, record.candidate)
            for record in self._requests.candidates.values()
            if record.candidate is not None and record.candidate.waits is waits
        ]

    def _set(self, record: Tracked, candidate: Candidate | None) -> None:
        record.candidate = candidate
        self._requests.note_candidate(record)

    def _offer(self, req: Req, stored: Stored | None, taken: bool = False) -> bool:
        """Offers a prefix. `taken`: SGLang has dropped its own transfer, so it cannot load the
        pages.
        """
        reason = (
            "again"
            if self._requests.restoration(req.rid) is not None
            else requests.left_to_sglang(req)
            if self.is_on
            else "paused"
            if self.is_paused
            else "switched off"
        )
        found = reason or find(self._context, req, stored)
        if isinstance(found, Restoration) and found.tokens(self._context.page) < max(
            1, self.min_tokens
        ):
            found = "short"
        if isinstance(found, Restoration):
            offer = _offer_of(self._context, found)
            found = found if taken and found.keys else self._why_declined(offer) or found
        if isinstance(found, str):
            return self._fall_back(found)
        if any(load.restoration.rid == req.rid and not load.written_off for load in self._loads):
            # Loads of its earlier restoration are still in flight; their reports must not be taken
            # for the new one's.
            waits = Candidate(Waits.OLD_LOADS, req.cache_request_handle, stored=stored, req=req)
            self._set(self._requests.record(req.rid), waits)
            return True
        if self.shorten is not None:
            self.shorten(found, self.min_tokens)
            offer = _offer_of(self._context, found)
        found.node_lock = self._context.tree.lock(req.last_node)
        if len(found.host_slots):
            found.host_pin = self._context.host.pin(req.best_match_node)
        self._begin(found)
        self._context.facts.append(offer)
        return True

    def _fall_back(self, why: str) -> bool:
        """Leaves a hit to SGLang and counts the reason."""
        self._counters.declined[why] += 1
        return False


def _waits(record: Tracked, waits: Waits) -> bool:
    return record.candidate is not None and record.candidate.waits is waits


def _offer_of(context: StepContext, r: Restoration) -> RestoreOffered:
    offer = RestoreOffered(r.rid, LATER, r.prompt_tokens, r.resident, r.pages, r.sources)
    if context.anchors is None:
        return offer
    pages = len(r.anchor)
    return replace(offer, anchor_pages=pages, anchor_bytes=pages * context.anchors.page_bytes)


def stored_of(operation: Operation, hit_tokens: int, page: int) -> Stored:
    """What storage has of a waiting request's prompt: the hit of `hit_tokens`, and stored pages
    after the first missing one.
    """
    start, hit = operation.storage_start // page, hit_tokens // page
    names, tiers = stored_pages.up_to_the_last(operation, hit)
    return Stored(start, from_hex(names), _sources_of(tiers, start))


def _sources_of(tiers: Sequence[Tier | None], start: int) -> tuple[tuple[Span, Tier], ...]:
    """Sources of the pages from `start` on, by each page's tier (None: missing). A run shorter than
    `_SHORT` takes the tier before it; it is still read from the server's own disk if it is there.
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
    """Matches a waiting request against the tree and returns its restoration, or the reason why it
    has none. There must be no gap between the tree's pages and those in storage; pages in both
    count as the tree's.
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
        # SGLang frees host copies of pages that are on the device too, pinned or not.
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
    anchor = Span(0, 0)
    if context.anchors is not None:
        anchor = Span(max(resident, end - context.anchors.pages), end)
        lies_in_host = anchor.start < in_tree and (resident < in_tree or end == in_tree)
        if lies_in_host or anchors.front_lacks(req):
            return f"{context.anchors.one} in host memory"
    return Restoration(
        rid=req.rid,
        req=req,
        prompt_tokens=requests.prompt_tokens(req),
        resident=resident,
        pages=end,
        sources=tuple((span, tier) for span, tier in sources if span),
        keys=stored.keys[in_tree - stored.start :],
        host_slots=host,
        anchor=anchor,
        stored=stored if anchor else None,
    )
