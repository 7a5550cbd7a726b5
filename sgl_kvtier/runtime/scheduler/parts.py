"""The object that connects one scheduler process to kvtier, `kvtier` on SGLang's radix cache.

The cache, the hooks and the routes reach all modules through it. Without it SGLang's own code runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import LeftToEngine, RestoreOffered
from sgl_kvtier.runtime.ahead.engine import LookaheadEngine
from sgl_kvtier.runtime.ahead.turn_reads import TurnReads
from sgl_kvtier.runtime.metrics import PUBLISHER
from sgl_kvtier.runtime.proof.record import State
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.records.cost_profile import Learning
from sgl_kvtier.runtime.records.decision_file import DecisionFile
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.scheduler.notes import RestoreNotes
from sgl_kvtier.runtime.scheduler.queue import Queue
from sgl_kvtier.runtime.scheduler.tick import RestoreTick
from sgl_kvtier.runtime.scheduler.view import Views
from sgl_kvtier.runtime.sglang import stored_pages, tree_ranks
from sgl_kvtier.runtime.sglang.types import Handle, Operation, Req, Tree
from sgl_kvtier.runtime.step.context import StepContext

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class Parts:
    """The restore engine, reads in queue order, lookahead if enabled, the tick that drives them,
    and their records. Scheduler's thread.
    """

    def __init__(
        self,
        context: StepContext,
        mover: PageMover,
        planner: Learning,
        agreement: Agreement,
        policy: PolicyConfig,
        *,
        chunk_tokens: int,
        log: DecisionFile | None = None,
        look_ahead: Callable[[StepContext], LookaheadEngine] | None = None,
    ) -> None:
        """`look_ahead` constructs the lookahead engine."""
        self.context = context
        self.planner = planner
        self.agreement = agreement
        self.engine = engine = RestoreEngine(
            context, mover, policy.min_restore_tokens, self._why_left
        )
        self.turns = TurnReads(context, engine, planner, engine.counters.turn_reads)
        self.queue: Queue | None = Queue(planner, context.requests)
        # Pipeline stages with fewer layers may hold more tokens.
        self.views = Views(engine, chunk_tokens, agreement.least(context.host.kv_tokens))
        ahead = look_ahead(context) if look_ahead is not None else None
        self.tick = RestoreTick(engine, planner, agreement, self.turns, self.views, ahead)
        self.notes = RestoreNotes(policy, engine, planner, agreement, log)
        self.keeps_chunks_apart = False
        """Whether no step may have both a chunk and requests that decode."""
        self.planned: Callable[[str], Mapping[str, str]] = lambda _: {}
        """What each part of the planner knows of a request, as text."""

    @property
    def ahead(self) -> LookaheadEngine | None:
        """The lookahead engine; None if lookahead is off or has failed."""
        return self.tick.ahead

    def publish(self, replica: int) -> None:
        """Publishes all metrics in /metrics, labelled with this rank. `replica` is the
        data-parallel rank.
        """
        tree = self.context.tree
        ranks = {"tp_rank": tree_ranks.tensor_rank(tree), "pp_rank": tree_ranks.stage(tree)}
        labels = {name: str(number) for name, number in {**ranks, "dp_rank": replica}.items()}
        self.notes.metrics = PUBLISHER.add("restore_", self.notes.samples, labels)
        if self.ahead is not None:
            self.ahead.metrics = PUBLISHER.add("lookahead_", self.ahead.samples, labels)

    # --- called by SGLang -------------------------------------------------------------------------

    @property
    def queries_storage_once(self) -> list[str]:
        """Requests for which SGLang must not query storage again."""
        return [*self.engine.owned, *self.turns.kept_back]

    def takes(self, operation: Operation, hit_tokens: int) -> bool:
        """Whether SGLang has to drop a storage hit of a waiting request, because it is restored or
        read later.
        """
        page = self.context.page
        hit = hit_tokens // page
        names, tiers = stored_pages.up_to_the_last(operation, hit)
        self.tell_ahead(lambda ahead: ahead.found(names[:hit], tiers[:hit]))
        offered = self.engine.offers.hit(operation, hit_tokens)
        return offered or self.turns.hit(operation, hit_tokens)

    def order_queue(self, waiting: list[Req]) -> None:
        """Orders SGLang's queue, unless restored pages were found to be wrong. If ordering fails,
        the queue stays as it is.
        """
        if self.engine.proof.state is State.REFUTED:
            self.queue = None
        if self.queue is None or tree_ranks.stages(self.context.tree) > 1:
            return
        self._ask(lambda queue: queue.sort(waiting, self.context.moment()), None)

    def _ask(self, ask: Callable[[Queue], _T], otherwise: _T) -> _T:
        """Asks the queue. If it raises, the queue is given up and the result is `otherwise`."""
        assert self.queue is not None, "only where the planner orders"
        try:
            return ask(self.queue)
        except Exception:
            logger.exception("kvtier: ordering the queue failed; it stays in the order of arrival")
            self.queue = None
            return otherwise

    @property
    def orders(self) -> bool:
        """Whether waiting requests run in the planner's order."""
        return self.queue is not None and self.queue.in_force

    def chunk_beside(self, req: Req, left: int, most: int, room: int) -> int:
        """Tokens of the next chunk, `most` at most, of a request without a restoration that has
        `left` tokens to prefill. Short requests that run with it may allocate `room` device tokens.
        """
        return self._ask(lambda queue: queue.chunk(req, left, most, room), most)

    def held_back(self, req: Req) -> bool:
        """Whether a request that could be admitted waits because a session is about to return."""
        empty = self.context.host.available() // self.context.page
        return self._ask(lambda queue: queue.held_back(req, empty, self.context.moment()), False)

    def admissible(self, handle: Handle) -> bool | None:
        """Whether a waiting request may be admitted in this pass; None: SGLang decides."""
        admissible = self.engine.admissible(handle)
        return self.turns.admissible(handle) if admissible is None else admissible

    def forget(self, rid: str) -> None:
        """The request was finished, aborted or retracted."""
        self.engine.forget(rid)
        self.context.requests.forget(rid)

    def reset(self) -> None:
        """Called before the pools are emptied: blocks until no transfer into them is in flight."""
        self.engine.reset(self._on_all_ranks)
        self.tell_ahead(lambda ahead: ahead.reset())

    def _on_all_ranks(self, is_so: bool) -> bool:
        """Whether this is so on every rank, or with pipeline stages on every one of the first."""
        _, (agreed,) = self.agreement.reduce([], bytes([is_so]))
        return bool(agreed)

    def end_copies(self) -> bool:
        """Blocks until lookahead's copies to the device have ended; whether there were any. On all
        ranks in the same step.
        """
        return self.ahead is not None and self.ahead.promotions.end_copies()

    def is_idle(self, ends: bool) -> bool:
        """Whether we have no transfers or slots in SGLang's pools. With `ends` they are ended
        first.
        """
        ahead = self.ahead
        if ends:
            if self.engine.holds_memory:
                self.engine.reset(self._on_all_ranks)
            if ahead is not None and ahead.promotions.hangs:
                ahead.promotions.reset()
        hangs = (ahead is not None and ahead.promotions.hangs) or (
            self.agreement.alone and self.context.reads_hang
        )
        return not self.engine.holds_memory and not hangs

    def tell_ahead(self, tell: Callable[[LookaheadEngine], None]) -> None:
        """Reports to the lookahead engine. If it raises, lookahead ends, not the server."""
        if self.ahead is None:
            return
        try:
            tell(self.ahead)
        except Exception:
            logger.exception("kvtier: looking ahead failed")
            if self.agreement.alone:
                self.tick.stop_looking_ahead()
            elif self.ahead is not None:
                self.ahead.broken = True  # it takes part in reductions until all ranks know

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self.engine.close()
        self.agreement.close()
        self.notes.close()
        if self.ahead is not None:
            self.ahead.close()

    # --- what SGLang loads itself -----------------------------------------------------------------

    def _why_left(self, offer: RestoreOffered) -> str | None:
        """Asks the planner whether SGLang should load this prefix itself; returns the reason or
        None.
        """
        context = self.context
        try:
            assert context.scheduler is not None, "an offer is of a request that waits"
            view = self.views.of(context.scheduler, context.moment())
            before = self.views.before(view, context.scheduler, offer.rid)
            why = self.planner.query(LeftToEngine(offer, before))
            self.views.left(offer.rid, 0 if why is None else offer.unbroken * context.page)
            return why
        except Exception:
            logger.exception("kvtier: the restore planner failed; a prefix is left to SGLang")
            self.engine.counters.planner_failures += 1
            return "planner failed"


def parts_of(tree: Tree) -> Parts | None:
    """Our parts on this cache; None on another cache, and where nothing restores or looks ahead."""
    parts: Parts | None = getattr(tree, "kvtier", None)
    return parts
