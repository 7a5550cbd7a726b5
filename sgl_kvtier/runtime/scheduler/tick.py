"""Drives planner and engines once per scheduler step: reports facts to the planner, asks for a
plan, and carries it out.

Runs right after SGLang's own cache events, so that loads are in flight and the next chunk is
decided before a batch is built. The prefill adder reads the plan's chunks in the same step.
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
from sgl_kvtier.runtime.sglang import step, tree_ranks
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Scheduler
from sgl_kvtier.runtime.step.chunk_clock import Chunk, ChunkClock
from sgl_kvtier.runtime.step.polls import agree, cut
from sgl_kvtier.types import Span

logger = logging.getLogger(__name__)

_PATIENCE = 4
"""Most steps in a row in which nothing happens at all."""
_LATER = 0.0
"""Placeholder for the time in facts, until this step's time is agreed on."""
_SWEEP = 256
"""Ticks between two searches for requests that left without a call."""
_UNTIMED = 16
"""Most ticks without an agreed time while requests wait for each other. The planner measures by it
for how long one is overtaken.
"""
_STARVED_S = 5.0
"""Longest time, in seconds, that a request that only loads may wait without a load in flight."""


class RestoreTick:
    """Feeds the planner and carries out its plans. If the planner raises, restorations end, not the
    server.
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
        self._untimed = _UNTIMED
        """Ticks since the ranks agreed on the time."""
        self._idle = 0
        self.turns = turns
        self.views = views
        self.ahead = ahead
        self.shared = SharedReduction(agreement)
        self._not_begun: list[Load] = []
        """Loads of the current plan that are not started yet."""
        self.clock = ChunkClock(self.note_chunk)

    def note_chunk(self, chunk: Chunk, follows: bool = False) -> bool:
        """A prefill was launched, or has ended; `follows`: its launch was reported. Returns whether
        it is reported to the planner. Several ranks have to agree on facts, so they report chunks
        only while something is restored. The chunk launched now may be the one that ended a
        restoration in this step.
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

    # --- lookahead with several ranks -------------------------------------------------------------

    @property
    def shares_reduction(self) -> bool:
        """Whether agreed values go with the reduction that SGLang makes in every tick."""
        return self.ahead is not None and not self.agreement.alone

    def reduction_input(self) -> list[int]:
        """This rank's input to SGLang's reduction by MIN, of equal length on every rank. Events
        noted later in the same tick have no times and need no agreement.
        """
        ahead = self.ahead
        assert ahead is not None, "only ranks that look ahead share the reduction"
        own = [t for fact in self.context.facts for t in _own_times(fact)]
        return self.shared.reduction_input(
            self.engine.polls(), ahead.polls(), own, ahead.fingerprint()
        )

    def take_result(self, values: Sequence[int]) -> None:
        """Applies the reduction's result."""
        self.context.now = self.shared.take_result(values)

    def begin_tick(self) -> None:
        """Sets the clock of this tick and gives lookahead's polls their agreed states."""
        assert self.ahead is not None, "only for who looks ahead"
        if self.agreement.alone:
            self.context.now = time.monotonic()
            polls = self.ahead.polls()
            agree(polls, *self.agreement.local(polls))
        else:
            self.shared.report_polls()

    def run(self, scheduler: Scheduler) -> None:
        """Runs one step. While nothing is restored, nothing is reduced over the ranks, except the
        time now and then while requests wait for each other.
        """
        self.context.scheduler = scheduler
        self.engine.computes = {}
        if self.engine.layers is not None:
            self.engine.layers.sweep()
        try:
            self._run(scheduler)
        except Exception:
            # The state is known even now, so restorations can be ended; their requests are
            # computed.
            logger.exception(
                "kvtier: the restore planner failed; restorations under way are given up"
            )
            self.engine.counters.planner_failures += 1
            # The planner counts these as loads in flight, so they have to end as well.
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
        self._ticks += 1
        self._untimed += 1
        if self.agreement.alone and engine.proof.difference is not None:
            # With several ranks, all learn of it in one step, with the next page that ends here.
            self._refute()
        if self.shared.maps_differ and self.ahead is not None:
            logger.error("kvtier: the ranks' maps of pages differ")
            self.stop_looking_ahead()
        if self.ahead is not None:
            self.begin_tick()
            self.ahead.look(scheduler)
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
            and not self._needs_time(scheduler)
        ):
            return
        self.context.slots.free()
        engine.offers.make()
        if (
            not engine.busy
            and not self.context.facts
            and not self.agreement.alone
            and not self.shares_reduction
            and not self._needs_time(scheduler)
        ):
            return
        self._step(scheduler)

    def _needs_time(self, scheduler: Scheduler) -> bool:
        """Whether several ranks have to agree on the time although nothing is restored: their clock
        would stand still, and a request could be overtaken for ever. The same on all ranks.
        """
        return (
            not self.agreement.alone
            and not self.shares_reduction
            and self._untimed >= _UNTIMED
            and len(step.waiting(scheduler)) > 1
            and tree_ranks.stages(self.context.tree) == 1
        )

    def _vanished(self, rid: str) -> None:
        """A request has left the scheduler without a call."""
        self.engine.forget(rid)
        if self.ahead is not None:
            self.ahead.gone(rid)

    def _refute(self) -> None:
        """Restored pages differ from the stored ones: neither restorations nor prefetches bring
        pages to the device from now on. On all ranks in the same step; idempotent.
        """
        self.engine.refute()
        if self.ahead is not None:
            self.stop_looking_ahead()

    def stop_looking_ahead(self) -> None:
        """Ends lookahead for good: SGLang alone decides where pages are."""
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
        """Reports to the planner how fast SGLang itself read from storage while no load of ours,
        which has priority, was in flight. Otherwise a disk that became slower would never be
        noticed while SGLang loads everything. For a single rank only, since the clocks of several
        ranks differ.
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
            engine.abandon(r, "unanswered")  # otherwise its request would wait for ever
        engine.computes = {
            compute.rid: compute for compute in plan.computes if compute.rid in engine.restorations
        }
        if self.ahead is not None and plan.moves:
            self.ahead.carry_out(plan.moves, self.views.owed_tokens(scheduler))
        self._unblock(scheduler, bool(plan.loads))
        self._end_starved()

    def _unblock(self, scheduler: Scheduler, tried: bool) -> None:
        """If nothing runs, loads or may be computed, waiting restorations block each other: the
        youngest is ended, one per step. Not if loads were `tried`: pages that find no room are
        computed in time.
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
        """Ends restorations whose pages do not come. A request that only loads lets others pass,
        which may use all memory. And landed pages may wait for pages that must be attached with
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
        """Reports the facts noted so far to the planner, without asking for a plan."""
        now = self._observe(time.monotonic())
        if self.ahead is not None:
            self.ahead.facts_reported()
            self._pass_hints_on(now)

    def _pass_hints_on(self, now: float) -> None:
        """Carries out the `kv_hints` of requests that arrived or ended."""
        assert self.ahead is not None, "only for who looks ahead"
        hinted, self.ahead.hinted = self.ahead.hinted, []
        args = getattr(self.context.scheduler, "server_args", None)
        others = not getattr(args, "admin_api_key", None)
        for asking in hinted:
            try:
                answers = actions.carry_out(
                    self.planner, asking, now, others=others, retain=self.ahead.retain
                )
            except Exception:  # a client's mistake; if ranks differ now, their maps show it
                logger.exception("kvtier: the kv_hints of a request were not carried out")
                continue
            for answer in answers:
                count(self.context.scheduler, result_of(answer))

    def compare_map(self, scheduler: Scheduler) -> None:
        """Compares the planner's whole map with the real state, on an idle server with lookahead.
        Differences are logged and counted.
        """
        assert self.ahead is not None, "only for who looks ahead"
        self.context.tree.check_hicache_events()
        self.begin_tick()
        self.ahead.look(scheduler)
        self.report_facts()
        self.ahead.compare()

    # --- facts ------------------------------------------------------------------------------------

    def _observe(self, now: float) -> float:
        """Agrees on what happened, reports it to the planner, and returns the agreed time."""
        engine = self.engine
        self._untimed = 0
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
    """Times in a fact that each rank has measured for itself."""
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
