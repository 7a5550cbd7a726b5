"""The loop decide - do - observe, once per scheduler step: facts go to the planner, its plan to the
engines.

Runs right after SGLang's own cache events, so that loads are in flight and the next chunk is
decided before a batch is built. The prefill adder queries the plan's chunks and cut-offs in the
same step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sgl_kvtier.policy.messages import (
    Consulted,
    Fact,
    Load,
    LookaheadEnded,
    Mode,
    PagesLost,
    StepDone,
    TransferDone,
)
from sgl_kvtier.policy.restore.restorations import LINK_OF
from sgl_kvtier.runtime.ahead.engine import LookaheadEngine
from sgl_kvtier.runtime.ahead.turn_reads import TurnReads
from sgl_kvtier.runtime.hints import actions
from sgl_kvtier.runtime.hints.scheduler import count, result_of
from sgl_kvtier.runtime.proof.record import State
from sgl_kvtier.runtime.ranks.agreement import Agreement, SharedReduction
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.scheduler.view import Views
from sgl_kvtier.runtime.sglang import step
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Scheduler
from sgl_kvtier.runtime.step.chunk_clock import Chunk, ChunkClock
from sgl_kvtier.runtime.step.polls import agree, cut
from sgl_kvtier.types import Span

logger = logging.getLogger(__name__)

_PATIENCE = 4
"""Most steps in a row in which nothing happens at all."""
_LATER = 0.0
"""The time in facts noted before a step's time is agreed on."""
_SWEEP = 256
"""Requests that left without a call are searched for once in this many ticks."""
_STARVED_S = 5.0
"""Seconds that a request that is only loaded may wait without a load in flight."""


class RestoreTick:
    """Feeds the planner and carries its plans out. A planner that raises loses its restorations,
    not the server.
    """

    def __init__(
        self,
        engine: RestoreEngine,
        planner: Consulted,
        agreement: Agreement,
        turns: TurnReads,
        views: Views,
        ahead: LookaheadEngine | None = None,
    ) -> None:
        self.engine = engine
        self.context = engine.context
        self.planner = planner
        self.agreement = agreement
        self.steps = 0
        self._ticks = 0
        self._idle = 0
        self.turns = turns
        self.views = views
        self.ahead = ahead
        self.shared = SharedReduction(agreement)
        self._not_begun: list[Load] = []
        """Loads of a plan that is being carried out."""
        self.clock = ChunkClock(self.note_chunk)

    def note_chunk(self, chunk: Chunk, follows: bool = False) -> bool:
        """A prefill was launched, or has ended; `follows` where its launch was noted. Returns
        whether it is reported to the planner: several ranks have to agree on their facts, so only
        while a request is restored. The chunk launched now may be the one that ended a restoration
        in this step.
        """
        engine = self.engine
        if chunk.seconds == 0.0:
            engine.counters.untimed_chunks += 1
        agreed = self.agreement.alone or self.shares_reduction
        reported = agreed or engine.busy or engine.ending or follows
        if reported:
            self.context.facts.append(chunk)
        if self.ahead is not None:
            self.ahead.note_chunk(chunk)
        return reported

    # --- several ranks that look ahead ------------------------------------------------------------

    @property
    def shares_reduction(self) -> bool:
        """Whether what is agreed on goes with the reduction that SGLang makes in every tick."""
        return self.ahead is not None and not self.agreement.alone

    def reduction_input(self) -> list[int]:
        """This rank's input to SGLang's reduction by MIN: as many numbers on every rank. Events
        noted later in the same tick have no times and need no agreement.
        """
        ahead = self.ahead
        assert ahead is not None, "only ranks that look ahead share the reduction"
        own = [t for fact in self.context.facts for t in _own_times(fact)]
        return self.shared.reduction_input(
            self.engine.polls(), ahead.polls(), own, ahead.fingerprint()
        )

    def take_result(self, values: Sequence[int]) -> None:
        """Takes the reduction's result."""
        self.context.now = self.shared.take_result(values)

    def begin_tick(self) -> None:
        """Sets the clock of this tick, and tells what looking ahead waits for how far it is."""
        assert self.ahead is not None, "only for who looks ahead"
        if self.agreement.alone:
            self.context.now = time.monotonic()
            polls = self.ahead.polls()
            agree(polls, *self.agreement.local(polls))
        else:
            self.shared.report_polls()

    def run(self, scheduler: Scheduler) -> None:
        """One step. Nothing is reduced over the ranks while nothing is being restored."""
        self.context.scheduler = scheduler
        self.engine.computes = {}
        if self.engine.layers is not None:
            self.engine.layers.sweep()
        try:
            self._run(scheduler)
        except Exception:
            # The state after a wrong decision is known and can be ended; the requests are computed
            # as usual.
            logger.exception(
                "kvtier: the restore planner failed; restorations under way are given up"
            )
            self.engine.counters.planner_failures += 1
            # It counts these as restorations in progress: they end as well.
            self.context.facts[:] = [
                fact for fact in self.context.facts if isinstance(fact, PagesLost)
            ]
            self.context.facts += [
                PagesLost(load.rid, load.span, "failed", _LATER) for load in self._not_begun
            ]
            self._not_begun = []
            self.engine.abandon_all("planner failed")
            self.stop_looking_ahead()

    def _run(self, scheduler: Scheduler) -> None:
        engine = self.engine
        if self.agreement.alone and engine.proof.difference is not None:
            # Other ranks learn of it, all in one step, with the next page that ends here.
            self._refute()
        if self.shared.maps_differ and self.ahead is not None:
            logger.error("kvtier: the ranks' maps of pages differ")
            self.stop_looking_ahead()
        if self.ahead is not None:
            self.begin_tick()
            self.ahead.look(scheduler)
        self._ticks += 1
        if self._ticks % _SWEEP == 0:
            self.context.requests.sweep(step.all_requests(scheduler), self._vanished)
        self.turns.look(scheduler)
        if engine.offers.look_again():
            engine.counters.turn_reads["taken back"] += 1
        for rid in engine.offers.offer_stopped():
            self.turns.keep_back(rid)
        self._note_reads()
        if (
            not engine.busy
            and not self.context.facts
            and (self.ahead is None or not self.ahead.due(scheduler))
        ):
            return
        self.context.slots.free()
        engine.offers.make()
        if (
            not engine.busy
            and not self.context.facts
            and not self.agreement.alone
            and not self.shares_reduction
        ):
            return
        self._step(scheduler)

    def _vanished(self, rid: str) -> None:
        """A request has left the scheduler without a call."""
        self.engine.forget(rid)
        if self.ahead is not None:
            self.ahead.gone(rid)

    def _refute(self) -> None:
        """Restored pages are not what was stored: neither restorations nor prefetches bring any to
        the device from now on. On all ranks in the same step; idempotent.
        """
        self.engine.refute()
        if self.ahead is not None:
            self.stop_looking_ahead()

    def stop_looking_ahead(self) -> None:
        """For good: from now on where pages are is SGLang's business alone."""
        ahead, self.ahead = self.ahead, None
        self.context.looking_ahead = False
        if ahead is None:
            return
        self.planner.observe(LookaheadEnded(self.context.now))
        try:
            ahead.give_up()
        except Exception:
            logger.exception("kvtier: what looking ahead has under way could not be ended")

    def _note_reads(self) -> None:
        """Tells the planner how fast SGLang itself has read from storage while no load of ours,
        which goes first, was in flight. Otherwise a disk that has become slower would never be
        noticed while everything is left to SGLang. Clocks of several ranks differ, so only a single
        rank does.
        """
        context, now = self.context, self.context.moment()
        if self.engine.loads:
            context.loaded_at = now
        reads = getattr(store_of(context.tree.cache_controller), "own_reads", None)
        while reads:
            tier, nbytes, seconds = reads.popleft()
            if self.agreement.alone and now - seconds > context.loaded_at:
                self.context.facts.append(
                    TransferDone("", LINK_OF[tier], Span(0, 0), nbytes, seconds, _LATER)
                )

    def _step(self, scheduler: Scheduler) -> None:
        engine = self.engine
        now = self._observe(time.monotonic())
        if self.ahead is not None:
            self.ahead.facts_reported()
            self._pass_hints_on(now)
        elif not engine.restorations:
            return
        self.steps += 1
        view = self.views.of(scheduler, now)
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
        engine.computes = {
            compute.rid: compute for compute in plan.computes if compute.rid in engine.restorations
        }
        if self.ahead is not None and plan.moves:
            self.ahead.carry_out(plan.moves, self.views.owed_tokens(scheduler))
        self._unblock(scheduler, bool(plan.loads))
        self._end_starved()

    def _unblock(self, scheduler: Scheduler, tried: bool) -> None:
        """With nothing running, nothing loading and nothing granted, waiting restorations stand in
        each other's way: the youngest is given up, one per step. Loads that were `tried` and found
        no room are computed in time.
        """
        engine = self.engine
        granted = any(compute.tokens != 0 for compute in engine.computes.values())
        moves = granted or tried or engine.loads
        if moves or step.computes(scheduler) or not engine.restorations:
            self._idle = 0
            return
        self._idle += 1
        if self._idle >= _PATIENCE:
            engine.abandon(list(engine.restorations.values())[-1], "in the way")

    def _end_starved(self) -> None:
        """Requests that wait for their pages let others pass, and those may take all room there is:
        not for ever. Nor do pages that have landed wait for others, which are to be attached with
        them.
        """
        engine = self.engine
        for r in list(engine.restorations.values()):
            if self.context.now - r.moved_at <= _STARVED_S or not all(
                load.ended for load in r.loads
            ):
                continue
            waits = not r.admitted and r.rid not in engine.computes and r.mode is Mode.LOAD
            if waits or r.is_blocked:
                engine.abandon(r, "starved")

    def report_facts(self) -> None:
        """Tells the planner what was noted so far, without asking it anything."""
        now = self._observe(time.monotonic())
        if self.ahead is not None:
            self.ahead.facts_reported()
            self._pass_hints_on(now)

    def _pass_hints_on(self, now: float) -> None:
        """Carries out what requests that came or ended ask for in their `kv_hints`."""
        assert self.ahead is not None, "only for who looks ahead"
        hinted, self.ahead.hinted = self.ahead.hinted, []
        args = getattr(self.context.scheduler, "server_args", None)
        others = not getattr(args, "admin_api_key", None)
        for asking in hinted:
            try:
                answers = actions.carry_out(
                    self.planner, asking, now, others=others, retain=self.ahead.retain
                )
            except Exception:  # of one client's making: where ranks differ, their maps will tell
                logger.exception("kvtier: the kv_hints of a request were not carried out")
                continue
            for answer in answers:
                count(self.context.scheduler, result_of(answer))

    def compare_map(self, scheduler: Scheduler) -> None:
        """The planner's whole map against the truth, on an idle server that looks ahead: what
        differs is logged and counted.
        """
        assert self.ahead is not None, "only for who looks ahead"
        self.context.tree.check_hicache_events()
        self.begin_tick()
        self.ahead.look(scheduler)
        self.report_facts()
        self.ahead.compare()

    # --- facts ------------------------------------------------------------------------------------

    def _observe(self, now: float) -> float:
        """Agrees on what happened, tells the planner, and returns the agreed time."""
        engine = self.engine
        facts, self.context.facts = self.context.facts, []
        engine.ending = False
        polls, own = engine.polls(), [t for fact in facts for t in _own_times(fact)]
        if self.shares_reduction:
            times, states = self.shared.results(len(polls), len(own))
        else:
            local, ends = self.agreement.local(polls)
            times, states = self.agreement.reduce([now, *ends, *own], local)
        self.context.now = now = times[0]
        own_times = iter(times[1 + len(polls) :])
        for fact in facts:
            self.planner.observe(_agreed(fact, own_times, now))
        agreed, loads = list(cut(states, [len(poll.local) for poll in polls])), len(engine.loads)
        engine.settle_proof(agreed[loads:])
        engine.settle(agreed[:loads], times[1 : 1 + loads])
        if engine.proof.state is State.REFUTED:
            self._refute()
        landed, self.context.facts = self.context.facts, []
        for fact in landed:
            if not isinstance(fact, Chunk):  # chunks are noted between ticks only
                self.planner.observe(replace(fact, now=now))
        return now


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
