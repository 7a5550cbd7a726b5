"""The lookahead half of a planner: the order of the next runs, and what follows from it for pages.

It builds the TierMap from facts, derives turns from waiting requests and expected sessions, and
decides once per step which pages to move and which to evict first. A planner passes each fact to it
and adds the result of `step` to its plan:

    # The planner's own Bandwidth, which learns from TransferDone facts.
    ahead = Lookahead(config, engine, bandwidth)
    ahead.observe(fact)
    busy_s = links.backlogs(view.now)
    evictions, moves = ahead.step(view, busy_s=busy_s, restoring=planner.restoring)

The executor reports each page that enters or leaves a tier, as PagesPlaced and PagesDropped. A Move
that fails is a PagesDropped in the target tier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.budget import TierBudget, Turn
from sgl_kvtier.policy.ahead.idle import MOST_IDLE, IdleSessions
from sgl_kvtier.policy.ahead.prefetch import SCOPE, Prefetcher
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    Evict,
    Fact,
    HeldBack,
    HintAnswer,
    Hinted,
    Move,
    PagesDropped,
    PagesPlaced,
    RequestArrived,
    RequestFinished,
    SessionsWith,
    StepDone,
    StepView,
    Tally,
)
from sgl_kvtier.policy.pages.eviction import eviction_of
from sgl_kvtier.policy.pages.owners import owner_of, session_of
from sgl_kvtier.policy.pages.page_state import Missing
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.sessions import Sessions
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, PageKey, Tier

_KEEP: Final = 0.8
_STEADY: Final = 0.1
"""A turn's time in the map is updated if it changed by more than this share of the time left."""
_ROUNDS: Final = 4
"""Once in this many steps, victims are named for the pages that prefill will allocate until the
next time, each turn's time reaches the map, and the queue is measured.
"""


@dataclass(slots=True)
class _Request:
    owner: str
    """The owner of its pages in the map: the request itself, or its session."""
    session: str | None
    """The session of which it is a turn; None if it has none, or if that runs another request."""
    prompt_tokens: int
    keys: tuple[PageKey, ...]
    """Keys of its full prompt pages, in order."""
    running: bool = False

    def __str__(self) -> str:
        return (
            f"prompt of {self.prompt_tokens} tokens, {len(self.keys)} pages owned as {self.owner}, "
            f"{'running' if self.running else 'waiting'}"
        )


class _Queue(NamedTuple):
    """What follows from the waiting requests for pages."""

    turns: list[Turn]
    """The turns of the first requests that lack pages."""
    tokens: int
    """Tokens that the whole queue has to compute, if sessions are due."""
    pages_after: int
    """Device pages that requests after the last turn will allocate, if sessions are due."""


class Lookahead:
    """The map, the prefetcher and the sessions, fed with facts. Never raises on unknown ids."""

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        bandwidth: Bandwidth,
        rules: Rules | None = None,
    ) -> None:
        rules = Rules() if rules is None else rules
        rule = eviction_of(config.eviction)
        self._config = config
        self._rules = rules
        self._engine = engine
        self._bandwidth = bandwidth
        self.map = TierMap(config.map_pages, rule(), rule())
        self.prefetcher = Prefetcher(config, self.map, bandwidth, engine.page_bytes, rules)
        self.sessions = Sessions(config.session_idle_s, config.hint_limit_s, MOST_IDLE)
        self._requests: dict[str, _Request] = {}
        self._active: dict[str, None] = {}
        self._idle = IdleSessions(config, engine, bandwidth, self.map, self.prefetcher, rules)
        self._iteration_s = 0.0
        self._round = 0
        self._queued_s = 0.0
        self._observers: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._arrived,
            RequestFinished: self._finished,
            ChunkStarted: self._started,
            StepDone: self._stepped,
            PagesPlaced: self._placed,
            PagesDropped: self._dropped,
        }

    @property
    def active(self) -> bool:
        """Whether any request or session is known. Otherwise there is nothing to do."""
        return bool(self._requests) or len(self._idle) > 0

    def observe(self, fact: Fact) -> None:
        """Records a fact."""
        observer = self._observers.get(type(fact))
        if observer is not None:
            observer(fact)

    def hint(self, question: Hinted) -> HintAnswer:
        """Applies a client's hint on when its session returns, and returns its effect."""
        session, now = question.session, question.now
        said = self.sessions.hint(session, question.hint, now)
        expected = self.sessions.expected(session, now)
        at = expected.at if expected is not None and expected.at < math.inf else None
        answer = HintAnswer(said.accepted, said.reason, at)
        if not answer.accepted or expected is None:
            return answer
        if session in self._idle:
            self._idle.expect(expected, now, self._iteration())
        elif expected.at < math.inf and self._idle.gave_up(session):
            # The time of its return was unknown, so its pages had no owner.
            self._idle.find(expected, now, self._iteration())
        return answer

    def tally(self) -> Tally:
        """The results of its moves so far. Any thread."""
        return Tally(self.prefetcher.prefetched.wasted, dict(self.prefetcher.overlaps.counts))

    def known(self, rid: str) -> str | None:
        """The record of a request as text, or None."""
        found = self._requests.get(rid)
        return None if found is None else str(found)

    def claimable(self, view: StepView, pages: int, until: float) -> int:
        """How many of these device pages can be allocated now without evicting a page that is
        needed before `until`, in seconds of the executor's clock. Leaves later decisions unchanged.
        """
        free, empty = view.free_pages[Tier.DEVICE], view.empty_pages.get(Tier.DEVICE)
        return self._claimable(Tier.DEVICE, free, empty, pages, until)

    def returns_into(self, question: HeldBack, within_s: float) -> bool:
        """Whether a session with pages in memory probably returns within this time, and host memory
        lacks room for the request's pages in addition to those needed until then, or until the end
        of the queue. False if waiting could not make that room. Leaves later decisions unchanged.
        """
        one, empty, page = question.request, question.host_empty, self._engine.page_tokens
        new = -(-(one.prompt_tokens - one.device_tokens - one.host_tokens) // page)
        until, free = question.now + within_s, empty + self.map.evictable(Tier.HOST)
        room = self._claimable(Tier.HOST, free, empty, new, max(until, self._idle.deferred_until))
        return room < new <= free and self._idle.comes_by(until)

    def sessions_with(self, question: SessionsWith) -> tuple[str, ...]:
        """The sessions that have this page in their prompts, abandoned ones included."""
        key = question.key
        page = self.map.page(key)
        owners = () if page is None else page.owners
        known = [session for owner in owners if (session := session_of(owner)) is not None]
        return tuple(dict.fromkeys([*known, *self._idle.lost_with(key)]))

    def step(
        self,
        view: StepView,
        busy_s: Mapping[Link, float] | None = None,
        restoring: Collection[str] = (),
    ) -> tuple[tuple[Evict, ...], tuple[Move, ...]]:
        """The pages to evict, and the pages to move. `restoring` requests are omitted, since their
        restoration loads their pages.
        """
        for expected in self.sessions.changed(view.now):
            if expected.session in self._idle:
                self._idle.expect(expected, view.now, self._iteration())
        if not view.waiting and not view.owed_pages and view.slot is None:
            self._queued_s = 0.0
        elif len(self._idle) and (not self._round or not self._queued_s):
            self._queued_s = self._queue_s(view, restoring)
        self._idle.look(view.now, self._queued_s, self._soon_s(view))
        idle = self.prefetcher.idle(view.now, self._iteration(), busy_s)
        turns = [] if idle else self._turns(view, restoring)
        self._round = (self._round + 1) % _ROUNDS
        busy = view.waiting or view.slot is not None or view.owed_pages
        claimed = view.prefill_tokens // self._engine.page_tokens if busy else 0
        ahead = 0 if self._round else _ROUNDS * claimed
        decided = self.prefetcher.plan(
            view.now,
            turns,
            view.free_pages,
            self._iteration(),
            busy_s,
            max(0, claimed - view.owed_pages),
            ahead,
            view.empty_pages,
            view.owed_pages,
        )
        return decided.evictions, decided.moves + self._idle.demotions(view)

    def _claimable(self, tier: Tier, free: int, empty: int | None, pages: int, until: float) -> int:
        self.map.owners.asked_aside = True
        try:
            return TierBudget(self.map, tier, free, empty).reserve(pages, until)
        finally:
            self.map.owners.asked_aside = False

    # --- facts ------------------------------------------------------------------------------------

    def _arrived(self, fact: RequestArrived) -> None:
        owner = f"request {fact.rid}"
        session = fact.session if self._config.sessions else None
        if session is not None and session not in self._active:
            # A session owns its pages from turn to turn, so only the new ones are added.
            owner = owner_of(session)
            self.sessions.returned(session, fact.now)
            self._idle.back(session)
            self._active[session] = None
        else:
            session = None
        self.map.claim(owner, fact.keys, fact.now + self._iteration() * (1 + len(self._requests)))
        self.prefetcher.watch(owner)
        self._requests[fact.rid] = _Request(owner, session, fact.prompt_tokens, fact.keys)

    def _started(self, fact: ChunkStarted) -> None:
        request = self._requests.get(fact.rid)
        if request is None or request.running:
            return
        request.running = True
        self.prefetcher.started(request.owner, request.keys)
        self.prefetcher.unwatch(request.owner)
        self.map.used(request.keys, fact.now)
        self.map.expect(request.owner, -math.inf)

    def _finished(self, fact: RequestFinished) -> None:
        if fact.restoration_only or fact.rid not in self._requests:
            return
        request = self._requests.pop(fact.rid)
        keys = request.keys
        if fact.keys:
            keys = fact.keys
            self.map.claim(request.owner, keys)
        self.map.used(keys, fact.now)
        self.prefetcher.forget(request.owner)
        if request.session is None:
            self.map.release(request.owner)
            return
        del self._active[request.session]
        self._idle.expect(
            self.sessions.left(request.session, fact.now), fact.now, self._iteration()
        )

    def _stepped(self, fact: StepDone) -> None:
        if fact.prefill_tokens > 0:
            self._iteration_s = (
                self._iteration_s * _KEEP + fact.seconds * (1 - _KEEP)
                if self._iteration_s
                else fact.seconds
            )

    def _placed(self, fact: PagesPlaced) -> None:
        self.map.placed(fact.keys, fact.tier, fact.now)
        self.prefetcher.placed(fact.keys, fact.tier, fact.now)

    def _dropped(self, fact: PagesDropped) -> None:
        self.map.dropped(fact.keys, fact.tier)
        self.prefetcher.dropped(fact.keys, fact.tier, fact.now)

    # --- turns ------------------------------------------------------------------------------------

    def _iteration(self) -> float:
        return self._iteration_s or self._rules.load_horizon_s

    def _turns(self, view: StepView, restoring: Collection[str]) -> list[Turn]:
        """The next runs in order of their windows, of waiting requests and of expected sessions."""
        turns, queued_tokens, pages_after = self._waiting_turns(view, restoring)
        if not self._idle.due:
            return turns
        iteration_s, page = self._iteration(), self._engine.page_tokens
        for missing, tokens in self._restored(restoring):
            queued_tokens += max(1, tokens - missing.reach * page)
            pages_after += missing.pages - missing.reach
        queue_s = queued_tokens // (view.prefill_tokens or self._engine.chunk_tokens) * iteration_s
        due: list[Turn] = []
        for session, expected in self._idle.due.items():
            # Waiting requests run before a session that has yet to return, and get their pages
            # first.
            window_s = max(iteration_s, queue_s, expected.early - view.now)
            due.append(
                Turn(
                    owner_of(session),
                    None,
                    int(window_s / iteration_s),
                    window_s,
                    chance=expected.chance,
                )
            )
        due.sort(key=lambda turn: turn.window_s)
        due[0] = due[0]._replace(before=pages_after)
        return turns + due

    def _soon_s(self, view: StepView) -> float:
        """Sessions that return within this time run before waiting requests. It is the time for
        which the request with the most to compute would wait for a session.
        """
        rules, tokens = self._rules, max(view.fresh, default=0)
        if self._config.queue != "shortest" or rules.overtaking <= 0:
            return 0.0
        step_tokens = view.prefill_tokens or self._engine.chunk_tokens
        return rules.holding * tokens / step_tokens * self._iteration()

    def _queue_s(self, view: StepView, restoring: Collection[str]) -> float:
        """Seconds to compute running and waiting requests, except pages that restorations load."""
        page = self._engine.page_tokens
        tokens = view.owed_pages * page
        if view.waiting:
            tokens += view.fresh_tokens + sum(
                tokens - missing.reach * page for missing, tokens in self._restored(restoring)
            )
        holder = self._requests.get(view.slot or "")
        if holder is not None:
            tokens += max(
                0, holder.prompt_tokens - self.prefetcher.missing(holder.owner).reach * page
            )
        return tokens / (view.prefill_tokens or self._engine.chunk_tokens) * self._iteration()

    def _restored(self, restoring: Collection[str]) -> list[tuple[Missing, int]]:
        """(the pages it lacks, its prompt tokens) of each waiting request that is being restored.
        Their loads have reserved their pages.
        """
        found = [self._requests[rid] for rid in restoring if rid in self._requests]
        return [
            (self.prefetcher.missing(request.owner), request.prompt_tokens)
            for request in found
            if not request.running
        ]

    def _waiting_turns(self, view: StepView, restoring: Collection[str]) -> _Queue:
        """The turns of the first waiting requests that lack pages. A request that lacks none only
        counts with its time and its device pages.
        """
        wanting, known = self.prefetcher.refresh(), self.prefetcher.known
        turns: list[Turn] = []
        page, iteration_s = self._engine.page_tokens, self._iteration()
        step_tokens = view.prefill_tokens or self._engine.chunk_tokens
        ahead, before = view.owed_pages * page, 0
        if not wanting:
            return _Queue(turns, 0, 0)
        requests, due = self._requests, bool(self._idle.due)
        # At most these owners lack pages; some of them are restored, run, or are sessions.
        most = min(SCOPE, len(wanting))
        for rid in view.waiting:
            if len(turns) >= most and not due:
                break
            if rid in restoring:
                continue
            request = requests.get(rid)
            if request is None or request.running:
                continue
            missing = known.get(request.owner) or self.prefetcher.missing(request.owner)
            if missing.runs and len(turns) < most:
                steps = ahead // step_tokens
                turns.append(Turn(request.owner, rid, steps, steps * iteration_s, before))
                before = 0
            else:
                before += missing.pages - missing.reach + missing.lacking
            ahead += max(1, request.prompt_tokens - missing.reach * page)
        for turn in turns[self._round :: _ROUNDS]:
            self._move_turn(turn.owner, view.now, turn.window_s)
        return _Queue(turns, ahead, before)

    def _move_turn(self, owner: str, now: float, window_s: float) -> None:
        number = self.map.owners.number(owner)
        if (
            number is not None
            and abs(self.map.owners.turn(number) - now - window_s)
            > _STEADY * window_s + self._iteration()
        ):
            self.map.owners.expect(number, now + window_s)
