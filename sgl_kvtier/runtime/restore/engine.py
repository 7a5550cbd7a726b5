"""Carries out restorations in SGLang: allocates device slots, starts loads, attaches loaded pages
to requests, and cleans up however a restoration ends. The planner makes all decisions.

There is one engine per scheduler process. Everything runs on the scheduler's thread; the page
mover's threads only mark the pages of loads as landed or lost. Commands come from the planner
through the tick. The prefill adder queries what a request may do in this pass.

A load is kept until each of its pages has landed or was lost on every rank, even when its request
is long gone: until then its device slots and bounce pages (host staging memory) must not be reused.
Attaching writes slots into the request's row, and the row owns them from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from sgl_kvtier.policy import messages
from sgl_kvtier.policy.messages import (
    CANCELLED,
    NO_ROOM_YET,
    Compute,
    Mode,
    PagesLost,
    RequestFinished,
    RestoreOffered,
    TransferDone,
)
from sgl_kvtier.runtime.proof.attach import AttachProof
from sgl_kvtier.runtime.proof.decoding import PAUSE_S, SLOWER, DecodeGuard
from sgl_kvtier.runtime.proof.pages import SecondLook
from sgl_kvtier.runtime.proof.record import Proof
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.restore.kept_pages import KeptPages
from sgl_kvtier.runtime.restore.offers import LATER, Offers
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.sglang import requests, step, storage_ops
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Handle, Req
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import (
    DIFFERS,
    LANDED,
    LOST,
    OPEN,
    REASON,
    Poll,
    fresh_runs,
    runs_of,
)
from sgl_kvtier.runtime.step.private_slots import AnchorSlots
from sgl_kvtier.runtime.step.restoration import Load, Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Link, Span, Tier

logger = logging.getLogger(__name__)

_RESET_S = 30.0
"""Longest time, in seconds, that `reset` waits for transfers in flight."""
_ROOM_S, _SLOT_ROOM_S = 2.0, 0.2
"""Seconds without progress, after which pages that found no free slots are computed: for a waiting
request, and for the one in the chunked-prefill slot, which blocks all other prefills.
"""
_NO_ROOM, _HUNG = "no room", "hung"
"""Reasons for lost pages that do not come from the store."""
_CANCELLED = LOST[ReadOutcome.CANCELLED]


class RestoreEngine:
    """All restorations of a scheduler and their loads. `StepContext.slots` counts their slots."""

    def __init__(
        self,
        context: StepContext,
        mover: PageMover,
        min_tokens: int,
        why_declined: Callable[[RestoreOffered], str | None],
    ) -> None:
        """`why_declined` returns the planner's reason for leaving a prefix to SGLang, or None."""
        self.context = context
        self.mover = mover
        self.restorations: dict[str, Restoration] = {}
        """Restorations in progress by request id, oldest first; each is in its request's record,
        too.
        """
        self.loads: list[Load] = []
        self.computes: dict[str, Compute] = {}
        self.counters = RestoreCounters()
        self.offers = Offers(
            context, self.begin, self.loads, self.counters, min_tokens, why_declined
        )
        self.kept: KeptPages | None = None
        """Bounce pages kept for SGLang's write-through; None where none are kept."""
        self._link_ended: dict[Link, float] = {}
        self.audit: Any = None
        """Compares attached pages with their source (setting `lab.audit`); None when off."""
        self.layers: Any = None
        """Restores by layers (setting `lab.layer_parts`); None when off."""
        self.ending = False
        """Whether a restoration has ended since facts were last reported to the planner."""
        self.proof = Proof()
        """What the checks of restored pages have shown on this server."""
        self.attach: AttachProof | None = None
        """Checks KV that is computed after loaded pages; None unless `policy.proof` asks for it."""
        self.guard: DecodeGuard | None = None
        """Pauses restoration where it slows decoding; on accelerators only."""
        self.second_look: SecondLook | None = None
        """Compares one page of a request again after its prefill; None where no pages are
        compared.
        """

    # --- called by SGLang -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a tick has work: restorations, loads in flight, or slots to be freed."""
        return bool(
            self.restorations
            or self.loads
            or self.context.slots.waiting
            or self.offers.open
            or (self.attach is not None and self.attach.polls())
            # Ranks learn only from an agreed time, so from a tick, that a pause is over.
            or (not self.context.alone and self.offers.is_paused)
        )

    @property
    def is_on(self) -> bool:
        """Whether prefixes are restored at all."""
        return self.offers.is_on

    @property
    def holds_memory(self) -> bool:
        """Whether loads are in flight or slots are held in SGLang's pools."""
        return bool(self.loads or self.context.slots.tokens)

    @property
    def owned(self) -> list[str]:
        """Ids of requests whose prefix SGLang need not query storage for."""
        return [*self.restorations, *self.offers.delayed]

    def restoration(self, rid: str) -> Restoration | None:
        """This request's restoration, from its offer until the prefill cursor reaches its end."""
        return self.context.requests.restoration(rid)

    def begin(self, r: Restoration) -> None:
        """Registers a restoration whose prefix was just offered to the planner."""
        self.restorations[r.rid] = r
        self.context.requests.record(r.rid).restoration = r

    def admissible(self, handle: Handle) -> bool | None:
        """Whether a waiting request may be admitted in this pass; None: SGLang decides."""
        if handle.rid in self.restorations:
            return handle.rid in self.computes
        if self.offers.is_delayed(handle):
            return False
        if not self.is_on:
            return None
        # The result of the storage query is there within a step or two, so the request waits for it
        # under any prefetch policy.
        return False if storage_ops.answer_is_due(self.context.tree, handle) else None

    def restoration_of(self, req: Req) -> Restoration | None:
        """This request's restoration, and not that of another request with the same id."""
        r = self.restoration(req.rid)
        return None if r is None or r.req is not req else r

    def take_prefix(self, req: Req) -> torch.Tensor | None:
        """Returns the slots attached at this request's admission, and forgets them."""
        found = self.context.requests.get(req.rid)
        if found is None or found.prefix is None or found.prefix[0] is not req:
            return None
        (_, prefix), found.prefix = found.prefix, None
        return prefix

    def forget(self, rid: str) -> None:
        """The request was finished, aborted or retracted. Called before its record is forgotten."""
        if self.layers is not None:
            self.layers.forget(rid)
        r = self.restorations.get(rid)
        if r is not None:
            self.abandon(r, "aborted")
        if self.attach is not None:
            self.attach.forget(rid)
        if self.kept is not None:
            self.kept.drop(rid)
        if self.second_look is not None:
            self.second_look.forget(rid)

    def result_processed(self, batch: Any) -> None:
        """Called after SGLang has processed a batch's results and released finished requests."""
        if self.second_look is not None and self.second_look.waits:
            for req in batch.reqs:
                self.second_look.prefilled(req)

    def releasing(self, req: Req) -> None:
        """Called when a request gives up its row, before its slots can be reused."""
        if self.second_look is not None:
            self.second_look.look(req)

    def give_room(self, tokens: int, to: str | None = None) -> bool:
        """Frees device memory when nothing is left to evict: waiting restorations are ended,
        youngest first, until `tokens` slots that they hold or lock in the tree are free. For a
        waiting request `to`, only those after it in the queue are ended. Returns whether any was.
        """
        before = len(self.restorations)
        if self.context.slots.claiming:
            return False
        first = self._up_to(to) if to is not None else set[str]()
        for r in reversed(list(self.restorations.values())):
            if tokens <= 0:
                break
            held = (sum(sum(load.held) for load in r.loads) + r.resident) * self.context.page
            if held and not r.admitted and r.rid not in first:
                self.abandon(r, "gave room")
                tokens -= held
        self.context.slots.free()
        return len(self.restorations) < before

    def _up_to(self, rid: str) -> set[str]:
        """This waiting request and the requests before it in the queue."""
        waiting = [req.rid for req in step.waiting(self.context.scheduler)]
        return set(waiting[: waiting.index(rid) + 1]) if rid in waiting else {rid}

    def abandon_all(self, how: str) -> None:
        """Ends every restoration; their requests are computed as usual."""
        for r in list(self.restorations.values()):
            self.abandon(r, how)

    def refute(self) -> None:
        """Ends restoration for good after restored pages differed from the stored ones: SGLang
        loads every prefix from now on. Called in the same step on all ranks. Idempotent.
        """
        self.offers.is_on = False
        self.abandon_all("differs")
        self.proof.refute()

    def reset(self, on_all_ranks: Callable[[bool], bool] = bool) -> None:
        """Ends everything before the pools are emptied. Blocks while transfers are in flight, for
        `_RESET_S` at most. `on_all_ranks`: whether something is so on every rank. If a transfer
        hangs on one, loads stay on all, since ranks always have the same ones.
        """
        self.abandon_all("flushed")
        if self.attach is not None:
            self.attach.reset()
        if self.layers is not None:
            self.layers.reset()
        end = time.monotonic() + _RESET_S
        while any(OPEN in load.poll.local for load in self.loads) and time.monotonic() < end:
            self.mover.wait_news(0.01)
        ended = not any(OPEN in load.poll.local for load in self.loads)
        # States are not reduced here: a page that was open when ranks last agreed counts as lost.
        if self.loads and on_all_ranks(ended) and ended:
            over = [bytes(state or _CANCELLED for state in load.poll.seen) for load in self.loads]
            self.settle(over, [0.0] * len(over))
        self.context.slots.free()
        if self.kept is not None:
            self.kept.give_room(self.kept.tokens)
        if self.loads:
            logger.error(
                "kvtier: %d loads are still under way after %.0f s", len(self.loads), _RESET_S
            )

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        for load in self.loads:
            load.cancel()
        self.mover.close()
        if self.second_look is not None:
            self.second_look.close()
        if self.audit is not None:
            self.audit.close()
        if self.attach is not None:
            self.attach.close()

    def offer_again(self, r: Restoration) -> None:
        """Ends a restoration because the tree now holds more of its prefix, and offers the rest
        anew.
        """
        self.abandon(r, "grown")
        self.offers.again(r)

    # --- commands of the planner ------------------------------------------------------------------

    def start(self, command: messages.RestoreStart) -> None:
        """Carries out the planner's decision on a restore candidate."""
        r = self.restorations.get(command.rid)
        if r is not None:
            r.mode, r.moved_at = command.mode, self.context.now
            self.counters.starts[f"{command.mode.value}: {command.reason}"] += 1
            if not command.mode.restores:
                layers = self.layers if command.mode is Mode.LAYERS else None
                begun = layers is not None and layers.begin(r)
                self._close(r, "by layers" if begun else "computed")

    def load(self, command: messages.Load) -> None:
        """Allocates device slots, and bounce pages if the source is storage, and starts the
        transfer.
        """
        r, span = self.restorations.get(command.rid), command.span
        if not span:
            return
        owns_host = command.source > Tier.HOST
        slots = self._claim(r, span, owns_host) if r is not None else None
        if (
            r is None or r.closed
        ):  # an earlier load of this plan ended it; the planner counts this load as in flight
            self.context.facts.append(PagesLost(command.rid, span, "failed", LATER))
            return
        if slots is None:
            patience_s = _SLOT_ROOM_S if r.admitted else _ROOM_S
            if self.context.now - r.moved_at < patience_s:
                self.context.facts.append(PagesLost(r.rid, span, NO_ROOM_YET, LATER))
            else:
                self._lose(r, span, _NO_ROOM, span.stop)
            return
        device, host, anchor = slots
        due = self.context.now + 2 * command.deadline_s
        load = Load(
            r,
            span,
            command.link,
            device,
            host,
            owns_host,
            self.context.now,
            due,
            Poll(self.context.next_number(), len(span)),
            anchor=anchor,
        )
        r.loads.append(load)
        r.moved_at = self.context.now
        self.loads.append(load)
        if self.guard is not None:
            self.guard.load_begins()
        for offset, page in enumerate(range(span.start, span.stop)):
            r.owner[page] = (load, offset)
        self.mover.submit(load, store_of(self.context.tree.cache_controller), command.deadline_s)

    def _claim(
        self, r: Restoration, span: Span, owns_host: bool
    ) -> tuple[torch.Tensor, torch.Tensor, AnchorSlots | None] | None:
        """Allocates device and host slots for these pages and for the anchor that comes with them:
        all or none. If a pool raises, the restoration is abandoned and the request computed.
        """
        page, slots = self.context.page, self.context.slots
        anchored = max(0, span.stop - max(span.start, r.anchor.start)) if r.anchor else 0
        device = host = anchor = None
        try:
            device = slots.claim_device(len(span) * page)
            if device is not None and anchored:
                anchor = slots.claim_anchors(anchored)
            if device is not None and (anchor is not None or not anchored):
                host = self._host_slots(r, span, owns_host)
        except Exception:
            logger.exception("kvtier: %s: no pages could be claimed; it is computed instead", r.rid)
            self.abandon(r, "failed")
        if device is not None and host is not None:
            return device, host, anchor
        if device is not None:
            slots.put_back(device)
        if anchor is not None:
            slots.put_back_anchors(anchor.device)
            slots.put_back_host_anchors(anchor.host)
        return None

    def cancel(self, command: messages.Cancel) -> None:
        """Cancels this request's loads inside the span; pages whose read has started still end."""
        r = self.restorations.get(command.rid)
        for load in r.loads if r is not None else ():
            if (
                not load.ended
                and command.span.start <= load.span.start
                and load.span.stop <= command.span.stop
            ):
                load.cancel()

    def splice(self, r: Restoration, span: Span) -> torch.Tensor:
        """Attaches the landed pages of a span: returns their device slots, which the caller then
        owns.
        """
        pieces = []
        anchor, front = list[torch.Tensor](), r.front
        kept = r.to_look_at_again
        if self.second_look is not None and kept is not None and kept.page in span:
            load, offset = r.owner[kept.page]
            slots = load.device_pages(offset, offset + 1, self.context.page)
            self.second_look.attached(r.rid, kept, slots)
        for load, first, stop in r.landed_runs(span):
            load.held[first:stop] = bytes(stop - first)
            pieces.append(load.device_pages(first, stop, self.context.page))
            beside = load.anchor_of(first, stop)
            if beside is not None:
                anchor.append(beside.device)
        for page in range(span.start, span.stop):
            tier = r.tier_of(page)
            r.spliced[tier] = r.spliced.get(tier, 0) + 1
            del r.owner[page]
        self.context.slots.give(len(span) * self.context.page)
        r.front = span.stop
        r.jumps += 1
        slots = torch.cat(pieces)
        if r.anchor:
            self._take_over(r, slots, torch.cat(anchor), Span(front, span.stop))
        if self.attach is not None:
            self.attach.attached(r, span)
        if self.audit is not None:
            self.audit.look(r, span, slots)
        return slots

    def _take_over(
        self, r: Restoration, slots: torch.Tensor, anchor: torch.Tensor, span: Span
    ) -> None:
        """Hands the anchor (window or state) at the end of the span over to the request."""
        page = self.context.page
        assert self.context.anchors is not None, "of a model with anchors"
        self.context.slots.give_anchors(len(anchor))
        self.context.anchors.take_over(r.req, slots, anchor, span.start * page, span.stop * page)

    def trusted(self, r: Restoration, span: Span) -> bool:
        """Whether these pages have landed and may be attached. Otherwise planner and executor
        disagree, and the restoration is abandoned: slots of a page that has not landed are never
        used.
        """
        ends = not span or not r.whole or span.stop == r.pages
        if ends and all(r.is_landed(page) for page in range(span.start, span.stop)):
            return True
        logger.error(
            "kvtier: %s: pages [%d, %d) were to be used before they landed, or end too early",
            r.rid,
            span.start,
            span.stop,
        )
        self.abandon(r, "mismatch")
        return False

    def admitted(self, r: Restoration, prefix: torch.Tensor | None, end: int) -> None:
        """A waiting request was admitted with these attached slots after those of the tree, and
        prefills up to token `end`.
        """
        r.admitted = True
        if prefix is not None:
            self.context.requests.record(r.rid).prefix = r.req, prefix
        self._unlock(r)
        self.advance(r, end)

    def advance(self, r: Restoration, end: int) -> None:
        """The request's prefill up to token `end` was put into a batch. A page that the prefill has
        started counts as computed, as in the planner: when memory is short, SGLang ends a chunk
        inside a page.
        """
        r.front = max(r.front, min(-(-end // self.context.page), r.pages))
        if r.front == r.pages:
            self._close(r, "met")

    # --- loads that have ended --------------------------------------------------------------------

    def polls(self) -> list[Poll]:
        """The polls that all ranks agree on in this step: those of loads, then those of the
        proof.
        """
        proof = [] if self.attach is None else self.attach.polls()
        guard = [] if self.guard is None else [self.guard.poll]
        return [*(load.poll for load in self.loads), *proof, *guard]

    def settle_proof(self, states: list[bytes]) -> None:
        """Applies the agreed states of the proof's polls, in the order of `polls`."""
        if self.guard is not None and self.guard.settle(states.pop()):
            self.offers.paused_until = self.context.now + PAUSE_S
            self.counters.paused[SLOWER] += 1
        if self.attach is not None and self.attach.settle(states):
            self.refute()

    def settle(self, states: list[bytes], ended_at: list[float]) -> None:
        """Applies the agreed states of `loads`, in their order, and removes loads that have
        ended.
        """
        differs = False
        for load, state, ended in zip(list(self.loads), states, ended_at, strict=True):
            differs |= DIFFERS in state
            if OPEN in state and self.context.now > load.due and not load.written_off:
                self._write_off(load, state)
            for first, stop in fresh_runs(load.poll.seen, state):
                load.poll.seen[first:stop] = state[first:stop]
                self._settled(load, first, stop, ended)
            if load.ended:
                self.loads.remove(load)  # before `_ended`, which may raise
                self._ended(load)
        if differs:
            self.refute()
        self.proof.conclude()

    def _settled(self, load: Load, first: int, stop: int, ended: float) -> None:
        r, span = load.restoration, Span(load.span.start + first, load.span.start + stop)
        landed = load.poll.seen[first] == LANDED
        r.moved_at = self.context.now
        if r.closed or load.written_off or not landed:
            self._drop(load, first, stop)
        if load.written_off:
            return
        if landed:
            if not r.closed:
                for low, high in self._given_up(load, first, stop):
                    self._drop(load, low, high)
            beside = self._anchor_bytes(load, first, stop)
            nbytes = len(span) * self.context.page_bytes + beside
            self.counters.bytes_loaded[load.link] += nbytes
            agreed = len(span) * self.context.agreed_page_bytes + beside
            seconds = self._busy_seconds(load, ended)
            if load.link is Link.HOST_TO_DEVICE:
                storage_ops.count_copied(self.context.tree, nbytes, seconds)
            self.context.facts.append(TransferDone(r.rid, load.link, span, agreed, seconds, LATER))
            return
        lost = self._disown(load, span)
        self._lose(r, span, REASON[load.poll.seen[first]], lost)

    def _given_up(self, load: Load, first: int, stop: int) -> list[tuple[int, int]]:
        """Runs [first, stop) of a load's pages that its restoration no longer waits for."""
        owner, start = load.restoration.owner, load.span.start
        mine = bytearray(owner.get(start + at) == (load, at) for at in range(first, stop))
        return [(first + low, first + high) for low, high in runs_of(mine, 0, 0, len(mine))]

    def _anchor_bytes(self, load: Load, first: int, stop: int) -> int:
        """Bytes of the anchor that came with these pages."""
        anchor = load.anchor_of(first, stop)
        if anchor is None or self.context.anchors is None:
            return 0
        return len(anchor.device) // anchor.page * self.context.anchors.page_bytes

    def _disown(self, load: Load, span: Span) -> int:
        """Takes lost pages out of the load's restoration. Returns the end of those that it still
        waited for; 0 if it waited for none.
        """
        owner, end = load.restoration.owner, 0
        for page in range(span.start, span.stop):
            if owner.get(page) == (load, page - load.span.start):
                del owner[page]
                end = page + 1
        return end

    def _write_off(self, load: Load, state: bytes) -> None:
        """The device hangs: open pages are to be computed instead. The load keeps their slots until
        every page has ended.
        """
        for first, stop in runs_of(bytearray(state), OPEN, 0, len(state)):
            span = Span(load.span.start + first, load.span.start + stop)
            lost = self._disown(load, span)
            self._lose(load.restoration, span, _HUNG, lost)
        for first, stop in fresh_runs(load.poll.seen, state):
            load.poll.seen[first:stop] = state[first:stop]
            self._settled(load, first, stop, self.context.now)
        load.cancel()
        load.written_off = True

    def _busy_seconds(self, load: Load, ended: float) -> float:
        """Seconds the link was busy with what just ended: since the load, or the page before."""
        before = max(load.begun_at, self._link_ended.get(load.link, 0.0))
        self._link_ended[load.link] = max(ended, before)
        return max(ended - before, 0.0)

    def _ended(self, load: Load) -> None:
        r = load.restoration
        self.proof.note_load(load.poll.seen.count(LANDED) * self.context.agreed_page_bytes)
        if load.owns_host:
            self._leave_host(load)
        if load.anchor is not None:
            self.context.slots.put_back_host_anchors(load.anchor.host)
        if r.closed:
            self._unpin(r)

    def _leave_host(self, load: Load) -> None:
        """Keeps a load's landed bounce pages for the tree's write-through, and frees the others."""
        r, kept, page = load.restoration, self.kept, self.context.page
        if kept is None or r.closed or load.written_off or not self.context.host.write_through:
            self.context.slots.put_back_host(load.host_slots)
            return
        pages, states = load.host_slots.view(-1, page), load.poll.seen
        landed = [place for place, state in enumerate(states) if state == LANDED]
        lost = [place for place, state in enumerate(states) if state != LANDED]
        keys = r.keys_of(load.span)[::-1]  # `keys_of` starts with the highest page
        self.context.slots.give_host(len(landed) * page)
        kept.keep(r.rid, [keys[place] for place in landed], pages[landed].flatten())
        self.context.slots.put_back_host(pages[lost].flatten())

    def _lose(self, r: Restoration, span: Span, reason: str, end: int) -> None:
        """Reports lost pages. `end`: the end of those that the restoration waited for."""
        self.counters.lost_pages[reason] += len(span)
        self.context.facts.append(PagesLost(r.rid, span, reason, LATER))
        if not r.closed and r.whole and end > r.front and reason != CANCELLED:
            self._give_up_to(r, end, retry=reason not in (_NO_ROOM, _HUNG))

    def _give_up_to(self, r: Restoration, end: int, retry: bool) -> None:
        """Pages below `end` can no longer be attached, so they are computed. If the request still
        waits and storage has an anchor below them, a shorter prefix ending there is offered
        instead.
        """
        if retry and end > r.anchor.start and not r.admitted:
            shorter, anchored = r.shorter(end - 1), self.context.anchors
            if shorter is not None and anchored is not None:
                self.abandon(r, f"{anchored.one} lost")
                self.offers.instead(r, shorter)
                return
        for page in range(r.front, end):
            place = r.owner.pop(page, None)
            if place is not None and place[0].poll.seen[place[1]] == LANDED:
                self._drop(place[0], place[1], place[1] + 1)
        for load in r.loads:
            if not load.ended and load.span.stop <= end:
                load.cancel()

    def _drop(self, load: Load, first: int, stop: int) -> None:
        """Frees pages of a load that no I/O touches and that will not be used."""
        for low, high in runs_of(load.held, 1, first, stop):
            load.held[low:high] = bytes(high - low)
            self.context.slots.put_back(load.device_pages(low, high, self.context.page))
            anchor = load.anchor_of(low, high)
            if anchor is not None:
                self.context.slots.put_back_anchors(anchor.device)
            if load.poll.seen[low] == LANDED:
                self.counters.unused_pages += high - low

    # --- restorations that end --------------------------------------------------------------------

    def abandon(self, r: Restoration, how: str) -> None:
        """Ends an incomplete restoration and tells the planner. Its request is computed."""
        self._close(r, how)
        self.context.facts.append(
            RequestFinished(r.rid, LATER, aborted=True, restoration_only=True)
        )

    def _close(self, r: Restoration, how: str) -> None:
        """Ends a restoration: frees landed pages that are not attached now, and those in flight
        when they have ended.
        """
        del self.restorations[r.rid]
        self.context.requests.record(r.rid).restoration = None
        self.ending = True
        self.computes.pop(r.rid, None)
        r.closed = True
        r.owner.clear()
        for load in r.loads:
            if not load.ended:
                load.cancel()
            for first, stop in runs_of(load.poll.seen, LANDED, 0, len(load.poll.seen)):
                self._drop(load, first, stop)
        if self.kept is not None and r.keys and r.front < r.pages:
            first = r.pages - len(r.keys)
            self.kept.drop_keys(r.rid, r.keys[max(0, r.front - first) :])
        self._unlock(r)
        self._unpin(r)
        if self.attach is not None:
            self.attach.closed(r, how)
        self.counters.note_end(r, how)
        host = r.spliced.get(Tier.HOST, 0) * self.context.page
        attached = sum(r.spliced.values()) * self.context.page
        storage_ops.count_loaded(self.context.tree, host, attached - host)
        if r.mode is not None:
            page, seconds = self.context.page, time.monotonic() - r.offered_at
            facts = {
                "kvtier.pages": r.pages - r.resident,
                "kvtier.computed_tokens": max(0, (r.front - r.resident) * page - attached),
                "kvtier.loaded_tokens": attached,
                "kvtier.seconds": seconds,
                "kvtier.ending": how,
            }
            requests.add_span(r.req, "kvtier.restore", seconds, facts)

    def _unlock(self, r: Restoration) -> None:
        lock, r.node_lock = r.node_lock, None
        self.context.tree.unlock(lock)

    def _unpin(self, r: Restoration) -> None:
        """Releases the tree's host pages once the last load from them has ended."""
        if r.host_pin is not None and all(load.ended or load.owns_host for load in r.loads):
            pin, r.host_pin = r.host_pin, None
            self.context.host.unpin(pin)

    def _host_slots(self, r: Restoration, span: Span, bounce: bool) -> torch.Tensor | None:
        tokens, first = len(span) * self.context.page, (span.start - r.resident) * self.context.page
        return (
            self.context.slots.claim_host(tokens)
            if bounce
            else r.host_slots[first : first + tokens]
        )
