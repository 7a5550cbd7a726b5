"""The loop decide - do - observe, once per scheduler step: what happened goes to the planner, its plan to the hands.

Runs right after SGLang's own cache events, so that loads are under way and the next chunk is decided before a batch is
built. Chunks and cut-offs that follow from the plan are asked for by the prefill adder in the same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.policy.messages import (
    Fact,
    Load,
    Mode,
    PagesLost,
    Planner,
    RestoreOffered,
    StepDone,
    StepView,
    TransferDone,
)
from sgl_kvtier.runtime.ahead.engine import BROKEN, LookaheadEngine
from sgl_kvtier.runtime.ahead.turn_reads import TurnReads
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.ranks.polls import Poll
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.scheduler.notes import RestoreNotes
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.step.chunk_clock import Chunk, ChunkClock
from sgl_kvtier.types import Link, Span, Tier

logger = logging.getLogger(__name__)

_WAITING = 256
"""At most so many waiting requests are shown to the planner."""
_HOST_SHARE = 4
"""A quarter of the host pool may be bounce pages at any time."""
_CLIP = 4096
"""SGLang's own bound on the output reserved per running request (CLIP_MAX_NEW_TOKENS)."""
_PATIENCE = 4
"""So many steps in a row nothing may happen at all."""
_LATER = 0.0
"""The time in facts noted before a step's time is agreed on."""
_STARVED_S = 5.0
"""So long a request that is only loaded may wait without a load under way."""


@dataclass(frozen=True)
class _Asked:
    """What this rank has given into SGLang's reduction of a tick, by which the answer is read."""

    loads: int
    polls: list[Poll]
    times: int
    own_times: int
    check: int


class RestoreTick:
    """Feeds the planner and carries its plans out. A planner that raises loses its restorations, not the server."""

    def __init__(self, engine: RestoreEngine, planner: Planner, agreement: Agreement, chunk_tokens: int) -> None:
        self.engine = engine
        self.context = engine.context
        self.planner = planner
        self.agreement = agreement
        self.steps = 0
        self._idle = 0
        self.notes: RestoreNotes | None = None
        self.ahead: LookaheadEngine | None = None
        self._asked: _Asked | None = None
        self._heard: tuple[list[float], bytes] | None = None
        self._apart = False
        self._not_begun: list[Load] = []
        """Loads of a plan that is being carried out."""
        self.turns = TurnReads(engine.context, engine, engine.counters.turn_reads, lambda: time.monotonic() if agreement.alone else self.context.now)
        self.clock = ChunkClock(self.note_chunk)
        self._chunk_tokens = chunk_tokens
        self.left_to_engine: Callable[[RestoreOffered, StepView], str | None] = lambda _offer, _view: None
        engine.leave = self.leave
        # Pipeline stages with fewer layers may have room for more tokens.
        self._host_tokens = agreement.least(self.context.tree.cache_controller.mem_pool_host.anchor_entry.host_pool.size)

    def note_chunk(self, chunk: Chunk, follows: bool = False) -> bool:
        """A prefill was launched, or has ended; `follows` where its launch was noted. Returns whether it is told to the planner:
        several ranks have to agree on what they tell, so only while something is restored. What ended a restoration in this
        step may be the very chunk that is launched now."""
        engine = self.engine
        told = self.agreement.alone or self.rides or engine.busy or engine.ending or follows
        if told:
            self.context.facts.append(chunk)
        if self.ahead is not None:
            self.ahead.note_chunk(chunk)
        return told

    # --- several ranks that look ahead ------------------------------------------------------------------------------

    @property
    def rides(self) -> bool:
        """Whether what has to be agreed on goes with the reduction that SGLang makes in every tick."""
        return self.ahead is not None and not self.agreement.alone

    def ask(self) -> list[int]:
        """What this rank gives into SGLang's reduction by MIN: as many numbers on every rank. What is noted later in the same
        tick has no times and needs no agreement."""
        engine, ahead = self.engine, self.ahead
        assert ahead is not None, "only who looks ahead is asked"
        polls = ahead.polls()
        states, ends = self.agreement.local([*(load.poll for load in engine.loads), *polls])
        loads, own = len(engine.loads), [t for fact in self.context.facts for t in _own_times(fact)]
        clock = [time.monotonic(), *ends[:loads], *own, *ends[loads:]]
        check = ahead.fingerprint()
        self._asked = _Asked(loads, polls, len(clock), len(own), check)
        return [check, -check, *self.agreement.packed(clock, states)]

    def answer(self, values: Sequence[int]) -> None:
        """What came of it. Ranks whose maps differ stop looking ahead, all in the next step."""
        asked = self._asked
        assert asked is not None, "who was asked is answered"
        least, most = values[0], -values[1]
        self._apart = self._apart or least != most or least == BROKEN
        self._heard = self.agreement.unpacked(values[2:], asked.times)
        self.context.now = self._heard[0][0]

    def hear(self) -> None:
        """Sets the clock of this tick, and tells what looking ahead waits for how far it is."""
        assert self.ahead is not None, "only for who looks ahead"
        if self.agreement.alone:
            self.context.now = time.monotonic()
            polls = self.ahead.polls()
            states, ends = self.agreement.local(polls)
        elif self._asked is not None and self._heard is not None:
            polls, loads = self._asked.polls, self._asked.loads
            ends = self._heard[0][len(self._heard[0]) - len(polls) :] if polls else []
            states = self._heard[1][sum(len(load.poll.local) for load in self.engine.loads[:loads]) :]
        else:
            return
        for poll, state, ended_at in zip(polls, _cut(states, [len(poll.local) for poll in polls]), ends, strict=True):
            poll.agreed(state, ended_at)

    def leave(self, offer: RestoreOffered) -> str | None:
        """The planner's word on whether a prefix is better left to SGLang, at this moment or, with several ranks, at the last
        one they agreed on."""
        engine = self.engine
        now = time.monotonic() if self.agreement.alone else self.context.now
        try:
            view = self._view(self.context.scheduler, now)
            in_dram = sum(len(span) for span, tier in offer.sources if tier is Tier.DRAM)
            own = offer.prompt_tokens - (offer.resident + in_dram) * self.context.page  # what the view counts of it as fresh
            return self.left_to_engine(offer, replace(view, fresh_tokens=max(0, view.fresh_tokens - own)))
        except Exception:
            logger.exception("kvtier: the restore planner failed; a prefix is left to SGLang")
            engine.counters.planner_failures += 1
            return "planner failed"

    def run(self, scheduler: Any) -> None:
        """One step. Nothing is reduced over the ranks while nothing is being restored."""
        self.context.scheduler = scheduler
        self.engine.computes = {}
        try:
            self._run(scheduler)
        except Exception:
            # What a wrong decision leaves behind is known and can be ended; the requests are computed as usual.
            logger.exception("kvtier: the restore planner failed; restorations under way are given up")
            self.engine.counters.planner_failures += 1
            # It counts these among what is under way: they end as well.
            self.context.facts[:] = [fact for fact in self.context.facts if isinstance(fact, PagesLost)]
            self.context.facts += [PagesLost(load.rid, load.span, "failed", _LATER) for load in self._not_begun]
            self._not_begun = []
            self.engine.abandon_all("planner failed")
            self.stop_looking_ahead()

    def _run(self, scheduler: Any) -> None:
        engine = self.engine
        if self._apart and self.ahead is not None:
            logger.error("kvtier: the ranks' maps of pages differ")
            self.stop_looking_ahead()
        if self.ahead is not None:
            self.hear()
            self.ahead.look(scheduler)
        self.turns.look(scheduler)
        self._note_reads()
        if not engine.busy and not self.context.facts and (self.ahead is None or not self.ahead.due(scheduler)):
            return
        self.context.slots.free()
        engine.look_for_offers()
        if not engine.busy and not self.context.facts and not self.agreement.alone and not self.rides:
            return
        self._step(scheduler)

    def stop_looking_ahead(self) -> None:
        """For good: from now on where pages are is SGLang's business alone."""
        ahead, self.ahead, self.context.tree.ahead = self.ahead, None, None
        if ahead is None:
            return
        try:
            ahead.give_up()
        except Exception:
            logger.exception("kvtier: what looking ahead has under way could not be ended")

    def _note_reads(self) -> None:
        """Tells the planner how fast SGLang itself has read from storage, where nothing of ours was on the way at the time:
        otherwise a disk that has become slower would never be noticed while all is left to SGLang. Clocks of several ranks
        differ, so only one that is alone does."""
        reads = getattr(store_of(self.context.tree.cache_controller), "own_reads", None)
        while reads:
            nbytes, seconds = reads.popleft()
            if self.agreement.alone and not self.engine.loads:
                self.context.facts.append(TransferDone("", Link.SSD_TO_HBM, Span(0, 0), nbytes, seconds, _LATER))

    def _step(self, scheduler: Any) -> None:
        engine = self.engine
        now = self._observe(time.monotonic())
        if self.ahead is not None:
            self.ahead.told()
        elif not engine.restorations:
            return
        self.steps += 1
        view = self._view(scheduler, now)
        plan = self.planner.step(view)
        for start in plan.starts:
            engine.start(start)
        for cancel in plan.cancels:
            engine.cancel(cancel)
        self._not_begun = list(plan.loads)
        while self._not_begun:
            engine.load(self._not_begun[0])
            del self._not_begun[0]
        for r in [r for r in engine.restorations.values() if r.mode is None]:
            engine.abandon(r, "unanswered")  # held back for an answer, it would wait for ever
        engine.computes = {compute.rid: compute for compute in plan.computes if compute.rid in engine.restorations}
        if self.ahead is not None:
            self.ahead.carry_out(plan, view)
        self._unblock(scheduler)
        self._end_starved()

    def _unblock(self, scheduler: Any) -> None:
        """With nothing running, nothing loading and nothing granted, waiting restorations stand in each other's way: the
        youngest is given up, one per step."""
        engine = self.engine
        granted = any(compute.tokens != 0 for compute in engine.computes.values())
        running = scheduler.running_batch.reqs or scheduler.last_batch is not None or scheduler.chunked_req is not None
        if granted or running or engine.loads or not engine.restorations:
            self._idle = 0
            return
        self._idle += 1
        if self._idle >= _PATIENCE:
            engine.abandon(list(engine.restorations.values())[-1], "in the way")

    def _end_starved(self) -> None:
        """Requests that wait for their pages let others pass, and those may take all room there is: not for ever."""
        engine = self.engine
        for r in list(engine.restorations.values()):
            waits = not r.admitted and r.rid not in engine.computes and all(load.ended for load in r.loads)
            if waits and r.mode is Mode.LOAD and self.context.now - r.moved_at > _STARVED_S:
                engine.abandon(r, "starved")

    def tell(self) -> None:
        """Tells the planner what was noted so far, without asking it anything."""
        self._observe(time.monotonic())
        if self.ahead is not None:
            self.ahead.told()

    # --- facts ------------------------------------------------------------------------------------------------------

    def _observe(self, now: float) -> float:
        """Agrees on what happened, tells the planner, and returns the agreed time."""
        engine = self.engine
        facts, self.context.facts = self.context.facts, []
        engine.ending = False
        loads, own = len(engine.loads), [t for fact in facts for t in _own_times(fact)]
        if self.rides:
            times, states = self._ridden(loads, len(own))
        else:
            local, ends = self.agreement.local([load.poll for load in engine.loads])
            times, states = self.agreement.reduce([now, *ends, *own], local)
        self.context.now = now = times[0]
        own_times = iter(times[1 + loads :])
        for fact in facts:
            self.planner.observe(_agreed(fact, own_times, now))
        sizes = [len(load.poll.local) for load in engine.loads]
        engine.settle(list(_cut(states, sizes)), times[1 : 1 + loads])
        landed, self.context.facts = self.context.facts, []
        for fact in landed:
            if not isinstance(fact, Chunk):  # chunks are noted between ticks only
                self.planner.observe(replace(fact, now=now))
        return now

    def _ridden(self, loads: int, own_times: int) -> tuple[list[float], bytes]:
        """What went with SGLang's reduction of this tick. Raises KVTierError where it is not about what is known now."""
        asked, self._asked = self._asked, None
        heard, self._heard = self._heard, None
        if asked is None or heard is None or (asked.loads, asked.own_times) != (loads, own_times):
            raise KVTierError("what the ranks agreed on is not what there is to agree on")
        return heard

    # --- the view ---------------------------------------------------------------------------------------------------

    def _view(self, scheduler: Any, now: float) -> StepView:
        engine, chunked = self.engine, scheduler.chunked_req
        waiting = scheduler.waiting_queue
        running = scheduler.running_batch
        holder = chunked.rid if chunked is not None and chunked.rid in engine.restorations else None
        open_ = chunked is None and not running.batch_is_full and self.context.tree.req_to_token_pool.available_size() > 0
        fresh = sum(
            max(0, len(req.origin_input_ids) - req.prefix_len - req.host_hit_length)
            for req in waiting[:_WAITING]
            if req.rid not in engine.restorations
        )
        return StepView(
            now=now,
            waiting=tuple(req.rid for req in waiting[:_WAITING]),
            slot=holder,
            slot_open=open_,
            prefill_tokens=self._chunk_tokens,
            fresh_tokens=fresh,
            decoding=len(running.reqs),
            free_pages=self._free_pages(_decoding(scheduler), chunked),
            empty_pages=self.ahead.empty_pages() if self.ahead is not None else {},
            owed_pages=0 if chunked is None or holder is not None else _rest_tokens(chunked) // self.context.page,
        )

    def _free_pages(self, running: list[Any], chunked: Any) -> dict[Tier, int]:
        """What loads may claim: on the device, what is left when everything running gets the room it will need."""
        tree, page = self.context.tree, self.context.page
        pool = tree.token_to_kv_pool_allocator
        tokens = pool.available_size() + tree.evictable_size()
        for req in running:
            tokens -= _output_room(req, page)
        if chunked is not None:
            tokens -= _rest_tokens(chunked)
            tokens -= _output_room(chunked, page)
            r = self.engine.of(chunked.rid)
            if r is not None:
                # Its loads take from the room it needs anyway; where others load as well, what it has not asked for is still its own.
                tokens += (r.pages - r.front if len(self.engine.restorations) == 1 else len(r.owner)) * page
        bounce = self._host_tokens // _HOST_SHARE - self.context.slots.host_tokens
        return {Tier.HBM: max(0, int(tokens) // page), Tier.DRAM: max(0, bounce // page)}


def _own_times(fact: Fact | Chunk) -> tuple[float, ...]:
    """Times in a fact that every rank has measured for itself."""
    if isinstance(fact, Chunk):
        return fact.at, fact.seconds or 0.0
    return (fact.seconds,) if isinstance(fact, StepDone) else ()


def _agreed(fact: Fact | Chunk, own_times: Iterator[float], now: float) -> Fact:
    """The fact with the times all ranks agreed on."""
    if isinstance(fact, Chunk):
        return fact.fact(next(own_times), next(own_times))
    if isinstance(fact, StepDone):
        return replace(fact, seconds=next(own_times), now=now)
    return replace(fact, now=now)


def _decoding(scheduler: Any) -> list[Any]:
    """Requests that decode, and those whose prompt was in the last batch: they join in this step."""
    running, last = list(scheduler.running_batch.reqs), scheduler.last_batch
    if last is not None and last is not scheduler.running_batch and last.forward_mode.is_extend():
        running += [req for req in last.reqs if req is not scheduler.chunked_req]
    return running


def _rest_tokens(chunked: Any) -> int:
    """What is left of a prompt behind the chunk that is computed now."""
    return len(chunked.full_untruncated_fill_ids) - max(chunked.extend_end or 0, chunked.prefix_len)


def _output_room(req: Any, page: int) -> int:
    return min(max(0, req.sampling_params.max_new_tokens - len(req.output_ids)), _CLIP) + page


def _cut(states: bytes, sizes: list[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield states[start : start + size]
        start += size
