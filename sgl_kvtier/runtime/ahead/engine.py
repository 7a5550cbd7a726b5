"""Lookahead in SGLang: reports requests, sessions and pages to the planner, and carries out its
moves and evictions.

There is one engine per scheduler process with lookahead; without it every hook is SGLang's own. The
planner makes all decisions: its map gives the eviction order, its moves the prefetches. Everything
runs on the scheduler's thread.

With several ranks, each has an engine, a map and a planner, and all get the same facts in the same
steps. Facts about requests and the tree are equal on all ranks anyway, times are the first rank's,
and everything else is polled (`polls.py`).
"""

from __future__ import annotations

import heapq
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.idle import MOST_IDLE
from sgl_kvtier.policy.messages import Fact, Move, RequestArrived, RequestFinished, StepDone
from sgl_kvtier.policy.pages.owners import owner_of, session_of
from sgl_kvtier.policy.planner import Planner
from sgl_kvtier.runtime.ahead.counters import LookaheadCounters
from sgl_kvtier.runtime.ahead.host_pins import MOST_PINS
from sgl_kvtier.runtime.ahead.promotions import Promotions
from sgl_kvtier.runtime.ahead.store_votes import StoreVotes
from sgl_kvtier.runtime.ahead.tier_check import TierCheck
from sgl_kvtier.runtime.ahead.tier_facts import TierFacts
from sgl_kvtier.runtime.ahead.victims import Victims
from sgl_kvtier.runtime.metrics import Sample, Source
from sgl_kvtier.runtime.ranks.agreement import BROKEN
from sgl_kvtier.runtime.sglang import requests, step
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Req, Scheduler
from sgl_kvtier.runtime.step.chunk_clock import Chunk
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.page_names import SessionNames, compact
from sgl_kvtier.runtime.step.polls import Poll
from sgl_kvtier.runtime.step.tracked import Announced, Asking, Path
from sgl_kvtier.types import PageKey, Tier

logger = logging.getLogger(__name__)

_LATER = 0.0
_ARRIVED, _ENDED = "request_arrival", "request_completion"
_IDLE_PERIOD_S = 0.01
"""Seconds between two plans of a server that has nothing to run."""
_MOST_IDLE_TOKENS = 64_000_000
"""Most tokens of idle sessions that are kept to find their pages again, at 4 bytes each."""


class LookaheadEngine:
    """Carries out the plans of a lookahead planner. It shares facts, slots and numbers with
    restorations through the context.
    """

    def __init__(
        self, context: StepContext, planner: Planner, config: PolicyConfig,
        *, orders_evictions: bool, alone: bool = True,
    ) -> None:  # fmt: skip
        """`alone`: there is only one rank."""
        tree = context.tree
        context.looking_ahead = True
        self.context = context
        self.planner = planner
        self.pages = pages = planner.pages
        self.counters = LookaheadCounters()
        self.facts = TierFacts(tree, self._tell, pages)
        self.promotions = Promotions(context, self.facts, self._tell, self.counters)
        self.victims = Victims(tree, pages, self.facts, self.counters) if orders_evictions else None
        self.check = TierCheck(tree, pages, self.facts)
        self._votes = None if alone else StoreVotes(tree, pages, self.facts, context.next_number)
        self.sessions = SessionNames()
        self.metrics: Source | None = None
        self.hinted: list[Asking] = []
        """Requests whose `kv_hints` are carried out when the planner has the facts noted so far."""
        self.broken = False
        """Lookahead failed on this rank: all ranks end it in the next step."""
        self.off: dict[str, int] = {}
        """Differences found by the last comparison of the whole map."""
        self._config = config
        self._requests = context.requests
        self._idle: dict[str, Path] = {}
        self._idle_tokens = 0
        self._next: list[Path] | None = None
        """Paths of idle sessions in the order in which they return, as many as may be pinned; None:
        to be determined.
        """
        self._expected = 0
        """Number of idle sessions that are expected to return."""
        self._backend: Any = None
        self._step_at = 0.0
        self._planned_at = 0.0
        self._ticks = 0

    # --- called by SGLang -------------------------------------------------------------------------

    def checkpointed(self, req: Req, before: int) -> None:
        """A request's tokens [before, cache_protected_len) were inserted into the tree."""
        after = int(req.kv.cache_protected_len)
        known = self._known(req)
        if known is None:
            return
        page = self.context.page
        if after // page > len(known.keys):
            names = self.context.names
            tokens = requests.tokens_of(req)[: names.tokens_naming(after // page)]
            known.keys = names.keys_of(tokens, req, known.keys)
        known.node, known.kept = req.last_node, after
        if after <= before:
            return  # all of it was in the tree: a repeated prompt
        self.facts.placed(known.keys[before // page : after // page], Tier.DEVICE)

    def released(self, req: Req) -> None:
        """A request gives up its row. A retracted one will run again under the same record."""
        known = self._known(req)
        if known is None or not req.finished():
            return
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        self._requests.drop_announced(req.rid)
        page = self.context.page
        keys = known.keys[: known.kept // page]
        aborted = isinstance(req.finished_reason, FINISH_ABORT)
        self._tell(RequestFinished(req.rid, _LATER, aborted, keys))
        self._hint(req, _ENDED, known.session, keys)
        self.sessions.ended(known.session, keys)
        if self._config.sessions and keys:
            self._park(
                known.session,
                Path(
                    compact(requests.tokens_of(req)[: self.context.names.tokens_naming(len(keys))]),
                    keys,
                    req.extra_key,
                    req.cache_salt,
                    known.node,
                ),
            )

    def gone(self, rid: str) -> None:
        """A waiting request was aborted: its session is idle again, with the pages it had."""
        known = self._requests.drop_announced(rid)
        if known is not None:
            if known.path is not None:
                self._park(known.session, known.path)
            self._tell(RequestFinished(rid, _LATER, aborted=True))

    def note_chunk(self, chunk: Chunk) -> None:
        """A prefill was launched, or has ended."""
        if chunk.seconds is None:
            known = self._requests.announced(chunk.rid)
            if known is not None and not known.scheduled:
                known.scheduled, known.path = True, None
                self._count_hits(known, chunk.tokens.start)
        elif chunk.at != self._step_at:  # only once for all chunks of a batch
            self._step_at = chunk.at
            tokens = len(chunk.tokens) + chunk.shared_tokens
            self._tell(StepDone(chunk.seconds, tokens, 0, _LATER))

    def reset(self) -> None:
        """Called before the pools are emptied. A prompt that arrives after it begins a session."""
        self.sessions = SessionNames()
        self.promotions.reset()
        self.facts.dropped(self.facts.cleared(), Tier.HOST)
        self.facts.dropped(tuple(self.pages.resident(Tier.DEVICE)), Tier.DEVICE)
        for path in (
            *self._idle.values(),
            *(known.path for known in self._announced() if known.path is not None),
        ):
            path.node = None

    def store_cleared(self) -> None:
        """An operator emptied the storage. This does not count as drift of the map."""
        self._forget_stored()
        if self._votes is None and self._backend is not None:
            self._backend.take_seen()
            self._backend.take_seen(Tier.REMOTE)

    def give_up(self) -> None:
        """Ends lookahead: SGLang does everything itself. Waits for moves in flight."""
        logger.error("kvtier: not looking ahead any more")
        self.counters.failures += 1
        self.facts.stop()
        if self._votes is not None:
            self._votes.stop()
        elif self._backend is not None:
            self._backend.unwatch_pages()
        self.promotions.reset()

    def close(self) -> None:
        """Publishes its metrics a last time. Idempotent."""
        if self.metrics is not None:
            self.metrics.close()

    def found(self, hashes: Sequence[str], tiers: Sequence[Tier | None]) -> None:
        """A storage query has found these pages in these tiers on every rank."""
        if self._votes is not None:
            self._votes.found(hashes, tiers)

    # --- once per step ----------------------------------------------------------------------------

    def polls(self) -> list[Poll]:
        """The polls in progress, in the same order on every rank."""
        return self.promotions.polls() + (self._votes.polls() if self._votes is not None else [])

    def fingerprint(self) -> int:
        """A number that is equal on all ranks while their maps are; `BROKEN` if this rank's map is
        not maintained any more.
        """
        if self.broken:
            return BROKEN
        known = self.pages
        tiers = [known.count(tier) for tier in Tier]
        state = (
            len(known),
            *tiers,
            sum(1 for _ in self._announced()),
            len(self._idle),
            self._idle_tokens,
            self.facts.unused,
            self._ticks,
            self.victims is None,
        )
        return zlib.crc32(repr(state).encode())

    def look(self, scheduler: Scheduler) -> None:
        """Notes new requests and what has ended, before facts are reported to the planner."""
        self._ticks += 1
        self._next = None
        for req in step.waiting(scheduler):
            if self._requests.announced(req.rid) is None:
                self._arrive(req)
        for record in self._requests:
            if record.restoration is not None and record.announced is not None:
                record.announced.restored = record.restoration
        self.promotions.look()
        self._look_at_store()

    def due(self, scheduler: Scheduler) -> bool:
        """Whether the planner needs a step although nothing happened, because sessions return as
        time passes.
        """
        if step.waiting(scheduler) or step.in_slot(scheduler) is not None:
            return True
        return self.planner.looks_ahead and self.context.now - self._planned_at >= _IDLE_PERIOD_S

    def facts_reported(self) -> None:
        """The planner has all facts noted so far."""
        self.facts.told()
        self._planned_at = self.context.now

    def carry_out(self, moves: tuple[Move, ...], owed_tokens: int) -> None:
        """Begins a plan's moves. `owed_tokens` device slots stay reserved. The plan's evictions are
        not used: pages are evicted in the map's order when memory is needed.
        """
        scheduler = self.context.scheduler
        if scheduler is not None and scheduler.weight_updater.offload_tags:
            self.promotions.refuse(moves, "released")  # device memory is offloaded at present
        else:
            deadline_s = self._config.load_deadline_s
            self.promotions.carry_out(moves, self._path_of, owed_tokens, deadline_s)

    def compare(self) -> None:
        """Compares the whole map with the real state, on an idle server with all facts reported."""
        self.off = self.check.whole()
        self.counters.drift += sum(self.off.values())
        self.counters.checks += 1
        logger.info(
            "kvtier: the map of %d pages compared with the truth: %s", len(self.pages), self.off
        )

    # --- evictions --------------------------------------------------------------------------------

    def evict(self, tokens: int, tracker: dict[Any, int]) -> None:
        """Evicts before SGLang's own eviction from the device, which then frees the rest."""
        if self.victims is not None:
            self._guarded(lambda: self.victims.evict(tokens, tracker))  # type: ignore[union-attr]

    def wanted_in_host(self) -> tuple[list[int], bool]:
        """Last nodes of the paths whose host pages should stay, and whether eviction must free the
        full amount nevertheless.

        The paths are those of sessions whose request waits, then of idle sessions, soonest return
        first. If memory is needed to prefetch a path: of all sessions that return no later.
        Otherwise: of the half that returns first, so that SGLang's order decides on the others.
        """
        if self.victims is None or self._config.eviction != "next-use":
            return [], True
        claiming = self.promotions.claiming_for
        due = self._look_up_order() if self._next is None else self._next
        stop = -(-self._expected // 2)
        if claiming is not None:
            stop = (
                next((place for place, path in enumerate(due) if path is claiming), len(due) - 1)
                + 1
            )
        waiting = [known.path for known in self._announced() if known.path is not None]
        nodes = [path.node for path in (*waiting, *due[:stop]) if path.node is not None]
        return nodes, claiming is None

    def _look_up_order(self) -> list[Path]:
        """Determines `_next`. At most once per step, because every node that is written through
        evicts host pages.
        """
        pages = self.pages
        turns = ((pages.turn_of(owner_of(session)), path) for session, path in self._idle.items())
        due = [(turn, path) for turn, path in turns if turn is not None]
        self._expected = len(due)
        self._next = [
            path for _, path in heapq.nsmallest(MOST_PINS, due, key=lambda entry: entry[0])
        ]
        return self._next

    # --- private ----------------------------------------------------------------------------------

    def _announced(self) -> Iterator[Announced]:
        """All requests that the planner was told of."""
        return (record.announced for record in self._requests if record.announced is not None)

    def _known(self, req: Req) -> Announced | None:
        """What the planner was told of this request; nothing of one that shares another's id, whose
        pages have other names.
        """
        known = self._requests.announced(req.rid)
        return None if known is None or known.req is not req else known

    def _tell(self, fact: Fact) -> None:
        self.context.facts.append(fact)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            logger.exception("kvtier: choosing victims failed; SGLang chooses from now on")
            self.counters.failures += 1
            self.victims = None

    def _arrive(self, req: Req) -> None:
        tokens = requests.tokens_of(req)
        keys = self.context.names.keys_of(tokens[: max(0, len(tokens) - 1)], req)
        session = self.sessions.of(req, keys)
        self._requests.record(req.rid).announced = Announced(
            req, keys, session, len(tokens), path=self._unpark(session)
        )
        self._tell(RequestArrived(req.rid, _LATER, len(tokens), keys, session))
        self._hint(req, _ARRIVED, session, keys)

    def retain(self, session: str, keys: Sequence[PageKey], seconds: float) -> int:
        """Keeps a session's pages on this server's disk; returns how many, counted from the
        first.
        """
        backend = store_of(self.context.tree.cache_controller)
        if backend is None:
            return len(keys)
        kept: int = backend.retain(session, keys, min(seconds, self._config.hint_limit_s))
        return kept

    def _hint(self, req: Req, when: str, session: str, keys: Sequence[PageKey]) -> None:
        envelope = getattr(req, "kv_hints", None)  # of SGLang 0.5.23
        if envelope is not None and self._config.sessions:
            self.hinted.append(Asking(when, envelope, session, keys))

    def _park(self, session: str, path: Path) -> None:
        self._unpark(session)
        self._idle[session] = path
        self._idle_tokens += len(path.tokens)
        while self._idle_tokens > _MOST_IDLE_TOKENS or len(self._idle) > MOST_IDLE:
            self._unpark(next(iter(self._idle)))

    def _unpark(self, session: str) -> Path | None:
        path = self._idle.pop(session, None)
        self._next = None
        if path is not None:
            self._idle_tokens -= len(path.tokens)
        return path

    def _path_of(self, move: Move) -> Path | None:
        """The path of a move's pages: that of its waiting request, or of the idle session they
        belong to.
        """
        if move.rid is not None:
            known = self._requests.announced(move.rid)
            if known is None or known.scheduled:
                return None
            req = known.req
            return Path(requests.tokens_of(req), known.keys, req.extra_key, req.cache_salt)
        page = self.pages.page(move.keys[-1])
        owners = page.owners if page is not None else ()
        return next(
            (
                self._idle[name]
                for name in map(session_of, owners)
                if name is not None and name in self._idle
            ),
            None,
        )

    def _look_at_store(self) -> None:
        """Reports pages written to the store, found in it or dropped by it since the last tick."""
        controller = self.context.tree.cache_controller
        backend = store_of(controller)
        if backend is not self._backend:
            self._backend = backend
            self._forget_stored()
            if self._votes is None and backend is not None:
                backend.watch_pages()
        if self._votes is not None:
            self.counters.drift += self._votes.look(self.context.now)
            return
        if backend is not None:
            self.facts.placed(backend.take_seen(), Tier.STORAGE)
            self.facts.placed(backend.take_seen(Tier.REMOTE), Tier.REMOTE)
        self.counters.drift += self.check.roll(self.context.now)

    def _forget_stored(self) -> None:
        """Reports that all of the map's stored pages are gone."""
        for tier in (Tier.STORAGE, Tier.REMOTE):
            self.facts.dropped(tuple(self.pages.resident(tier)), tier)
        self.check.forget()
        if self._votes is not None:
            self._votes.forget()

    def _count_hits(self, known: Announced, prefix: int) -> None:
        """Counts a prompt's tokens by tier when it first runs. Pages that a restoration has landed
        by then count as on the device.
        """
        req, r, hits = known.req, known.restored, self.counters.hit_tokens
        below: dict[Tier, int] = {}
        if r is not None and r.admitted:
            first = prefix // self.context.page
            for span, tier in r.sources:
                pages = max(0, span.stop - max(span.start, first))
                below[tier] = below.get(tier, 0) + pages * self.context.page
            device = prefix
        else:
            device = req.cached_tokens_device
            below = {Tier.HOST: req.cached_tokens_host, Tier.STORAGE: req.cached_tokens_storage}
        hits[Tier.DEVICE] += device
        for tier, tokens in below.items():
            hits[tier] += tokens
        hits[None] += max(0, known.prompt_tokens - device - sum(below.values()))

    # --- metrics ----------------------------------------------------------------------------------

    def samples(self) -> list[Sample]:
        """All counters and the map's size, for /metrics. Any thread."""
        tally, known = self.planner.tally(), self.pages
        wasted = (tally.wasted_pages + self.facts.wasted) * self.context.page_bytes
        return [
            *self.counters.counts(wasted),
            *(("overlap", {"result": name}, count) for name, count in tally.overlaps.items()),
            ("map_pages", {}, len(known)),
            ("map_device_pages", {}, known.count(Tier.DEVICE)),
            ("map_host_pages", {}, known.count(Tier.HOST)),
            ("map_storage_pages", {}, known.count(Tier.STORAGE)),
            ("map_remote_pages", {}, known.count(Tier.REMOTE)),
            ("sessions", {}, len(self._idle)),
        ]
