"""A continuous-batching server in virtual time: an executor for any planner.

Each engine step it tells the planner what happened, shows it a view, carries out the plan, and runs
a batch. The batch has decoding sequences and the requests that hold a slot for chunked prefill.
Waiting requests join in order of arrival while the token budget and the device have room. Transfers
go on beside it. A plan that contradicts itself stops the run with AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, cast

import simpy

from sgl_kvtier.lab.sim.hands import Hands, Live, Restoring
from sgl_kvtier.lab.sim.hardware import Batch, Cost
from sgl_kvtier.lab.sim.requests import RequestResult, SimRequest
from sgl_kvtier.policy.messages import (
    ChunkBeside,
    ChunkDone,
    ChunkStarted,
    Compute,
    Consulted,
    Fact,
    HeldBack,
    LeftToEngine,
    Planner,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    RunOrder,
    StepDone,
    StepView,
    Waiter,
)
from sgl_kvtier.policy.restore.queue_order import ASK_AGAIN_S
from sgl_kvtier.types import Span, Tier

_MOST_RUNNING = 256
"""Requests of a batch that decode."""
_PATIENCE = 64
"""Times that a planner that lets nothing run is asked again at one instant, before a request is
taken back.
"""
_MOST_ASKED = 16
"""Times that a planner is asked at one instant while something is under way."""
_MOST_READS = 3
"""Lost pages of a request are read again so often, then they are computed."""
_WORTH_READING = 256
"""The fewest tokens for which SGLang asks storage."""
_LOOK_S = 0.01
"""A server with nothing to run asks its planner this often, for sessions return as time goes by."""
_POLL_S = 1e-3
"""Seconds between two looks of an idle engine that has facts to report."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The engine. Pages and tokens; None = no limit.

    `step_tokens` is the token budget of a step, of which decoding takes one per sequence. Requests
    here get `share` of the rest (Cake 5.1: the others' tokens run in the same step). Without
    `mixed`, a step holds prefill or decode, not both.
    `staged`: loads from below host memory need host pages while they are in flight. `write_down`:
    pages new on the device are copied to host memory and storage behind the request's back.
    A restoration is offered when the device can take the whole request, which then owns its pages.
    With `fetches` it is offered at once: the planner has stored pages fetched to host memory, and
    the engine copies them to the device when the request's turn has come. `consulted`: the planner
    is asked what a server asks it, in which order waiting requests run and which prefixes are left
    to the engine (`baselines.Served`).
    """

    page_tokens: int = 16
    step_tokens: int = 512
    share: float = 1.0
    device_pages: int | None = None
    host_pages: int | None = None
    storage_pages: int | None = None
    mixed: bool = False
    staged: bool = False
    write_down: bool = True
    fetches: bool = False
    consulted: bool = False


@dataclass(slots=True, eq=False)
class _Part:
    """One request's prefill in the batch being formed."""

    live: Live
    tokens: Span
    splice: Span

    @property
    def by_layers(self) -> tuple[int, float] | None:
        """Tokens of the prefix, and the share of its layers that this computes; None: by tokens."""
        own, page = self.live.spec.by_layers, self.live.page_tokens
        if own is None or self.tokens.stop > own.layers * page:
            return None
        return own.tokens, len(self.tokens) / page / own.layers

    @property
    def prefill(self) -> Span:
        """The tokens computed in all layers, by their place in the prompt."""
        own = self.live.spec.by_layers
        if own is None or self.by_layers:
            return self.tokens if own is None else Span(0, 0)
        moved = own.tokens - own.layers * self.live.page_tokens
        return Span(self.tokens.start + moved, self.tokens.stop + moved)


@dataclass(slots=True)
class _Forming:
    """The batch being formed and what is left of its budget."""

    budget: int
    room: int = 0
    """Tokens of requests that the engine may still prepare beside those in the batch."""
    cut: bool = False
    """A chunk was cut for those that wait: one that needs its slot does not keep them waiting."""
    parts: list[_Part] = field(default_factory=list)


class Server:
    """The step loop. `run` is the process to start; `submit` puts a request in the queue at the
    present moment.
    """

    def __init__(
        self, env: simpy.Environment, planner: Planner, spec: ServerSpec, cost: Cost, hands: Hands
    ) -> None:
        self._env = env
        self._planner = planner
        self._spec = spec
        self._cost = cost
        self._hands = hands
        self._waiting: list[Live] = []
        self._slots: list[Live] = []
        """Who is inside chunked prefill: one at most, as in SGLang."""
        self._running: list[Live] = []
        self._refused = ("", 0)
        self._instant, self._asked = -1.0, 0
        self._came: dict[str, int] = {}
        self._told: tuple[Waiter, ...] = ()
        self._told_at = 0.0
        self._held = False
        """A request that could run waits for a session to return."""
        self._wake = env.event()
        self.on_finish: Callable[[SimRequest], None] = lambda _: None
        """Called when a request has its last token."""
        self.results: list[RequestResult] = []
        self.steps = 0
        self.compute_busy_s = 0.0
        self.gaps_s: list[float] = []
        hands.listen(self.wake)

    # --- what comes in ----------------------------------------------------------------------------

    def submit(self, request: SimRequest) -> None:
        """A request arrives now."""
        result = RequestResult(request.rid, request.session, self._env.now, request.prompt_tokens)
        self.results.append(result)
        live = Live(request, result, self._spec.page_tokens)
        resident, sources = self._hands.look_up(live)
        self._enqueue(live, len(self._waiting))
        live.due_offer = bool(sources)
        live.left = self._spec.fetches
        if sources and self._spec.consulted:
            offer = _offer_of(live, self._env.now, resident, sources)
            question = LeftToEngine(offer, self._view(before=live))
            live.left = cast(Consulted, self._planner).query(question) is not None
        result.left = live.left
        if live.left:
            self._offer(live)

    def wake(self) -> None:
        """Something happened that an idle engine should look at."""
        if not self._wake.triggered:
            self._wake.succeed()

    def _enqueue(self, live: Live, place: int) -> None:
        spec = live.spec
        self._waiting.insert(place, live)
        self._came.setdefault(live.rid, len(self._came))
        self._tell(
            RequestArrived(live.rid, self._env.now, spec.prompt_tokens, spec.keys, spec.session)
        )

    def _offer(self, live: Live) -> bool:
        """Tells of what could be loaded for a request. False when that has to wait for room in
        the device.
        """
        resident, sources = self._hands.look_up(live)
        live.due_offer = False
        if not sources:
            return True
        if not live.left:
            if not self._hands.reserve(live):
                live.due_offer = True
                return False
            self._hands.hold_resident(live)
        live.reads += 1
        offer = _offer_of(live, self._env.now, resident, sources)
        live.offered = Restoring(live.rid, resident, offer.pages, sources)
        self._tell(offer)
        return True

    def _make_due_offers(self) -> None:
        """Offers that waited for room, in order; the first without room keeps those behind it
        waiting.
        """
        caches = self._hands.caches
        available, caches.wanted_pages = caches.device.available, 0
        for live in self._waiting:
            if not live.due_offer:
                continue
            if (live.rid, available) == self._refused or not self._offer(live):
                self._refused = (live.rid, available)
                caches.wanted_pages = live.missing_pages
                break

    def _tell(self, fact: Fact) -> None:
        self._hands.tell(fact)

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Steps for ever; idle while there is nothing to do."""
        fruitless = 0
        while True:
            something = self._waiting or self._slots or self._running or self._hands.has_facts
            if not something and not self._spec.consulted:
                yield from self._idle()
                continue
            self._make_due_offers()
            for fact in self._hands.take_facts():
                self._planner.observe(fact)
            self._order()
            plan = self._planner.step(self._view())
            self._hands.carry_out(plan, {live.rid: live for live in (*self._slots, *self._waiting)})
            parts = self._form(plan.computes)
            decoding = self._running if self._spec.mixed or not parts else []
            if parts or decoding:
                yield from self._step(parts, list(decoding))
                fruitless = 0
                continue
            if self._held:
                fruitless = 0
                yield self._env.timeout(_POLL_S)
                continue
            if self._hands.pending or not (self._waiting or self._slots):
                fruitless = 0
                yield from self._idle()
                continue
            fruitless += 1
            if fruitless > _PATIENCE:
                self._retract_or_stop()
                fruitless = 0

    def _order(self) -> None:
        """Waiting requests in the planner's order, asked for when something has changed."""
        if not self._spec.consulted or not (self._told or len(self._waiting) > 1):
            return
        there = sorted(self._waiting, key=lambda live: self._came[live.rid])
        waiting = tuple(_waiter(live) for live in there)
        now = self._env.now
        if waiting == self._told and now - self._told_at < ASK_AGAIN_S:
            return
        self._told, self._told_at = waiting, now
        order = cast(Consulted, self._planner).query(RunOrder(waiting, now))
        places = {rid: place for place, rid in enumerate(order)}
        self._waiting.sort(key=lambda live: places[live.rid])

    def _idle(self) -> Generator[simpy.Event, Any, None]:
        """Waits until something happens. An idle engine polls. A planner may ask for what cannot
        be, such as a move without room. It is then asked again at once a few times, and from then
        on once per poll.
        """
        if self._env.now > self._instant:
            self._instant, self._asked = self._env.now, 0
        self._asked += 1
        self._wake = self._env.event()
        if not self._hands.has_facts:
            yield self._wake | self._env.timeout(_LOOK_S) if self._spec.consulted else self._wake
        elif self._asked > _MOST_ASKED:
            yield self._wake | self._env.timeout(_POLL_S)

    def _view(self, before: Live | None = None) -> StepView:
        """The view of this step, or of a question about one waiting request: then of those that
        restore nothing only those before it count.
        """
        restoring = [live for live in self._slots if live.restoring is not None]
        there = [*self._slots, *self._waiting]
        if before is not None:
            there = self._waiting[: self._waiting.index(before)]
        plain = [live for live in there if not live.restores]
        fresh = [0 if live.restores else live.fresh_tokens for live in self._waiting]
        return StepView(
            now=self._env.now,
            waiting=tuple(live.rid for live in self._waiting),
            slot=restoring[0].rid if restoring else None,
            slot_open=not self._slots and len(self._running) < _MOST_RUNNING,
            prefill_tokens=self._budget(),
            fresh_tokens=sum(live.fresh_tokens for live in plain),
            wanted_tokens=sum(live.left_tokens for live in plain),
            fresh=tuple(fresh) if before is None else (),
            decoding=len(self._running),
            mixes=self._spec.mixed,
            mixed=self._spec.mixed,
            free_pages=self._free_pages(),
        )

    def _free_pages(self) -> dict[Tier, int]:
        """The pages that loads may claim: empty or evictable ones, and those restoring requests own
        and have not filled.
        """
        caches = self._hands.caches
        free = {tier: memory.available for tier, memory in caches.tiers.items()}
        free[Tier.DEVICE] = max(0, free[Tier.DEVICE] - caches.wanted_pages)
        for live in (*self._slots, *self._waiting):
            if live.restoring is not None:
                free[Tier.DEVICE] += live.restoring.unclaimed()
        return free

    def _budget(self) -> int:
        left = max(0, self._spec.step_tokens - (len(self._running) if self._spec.mixed else 0))
        own = int(left * self._spec.share)
        return (
            own
            if self._spec.share >= 1
            else max(1, own // self._spec.page_tokens) * self._spec.page_tokens
        )

    # --- the batch --------------------------------------------------------------------------------

    def _form(self, computes: tuple[Compute, ...]) -> list[_Part]:
        """The prefill of this step: the plan's for restoring requests, then others in their
        order.
        """
        self._held = False
        forming = _Forming(self._budget())
        by_rid = {live.rid: live for live in (*self._slots, *self._waiting)}
        ordered: dict[str, Span] = {}
        for compute in computes:
            live = by_rid.get(compute.rid)
            if live is not None and live.fetching and compute.tokens is None:
                live.fetching = False
                continue
            assert live is not None and live.restoring is not None, (
                f"{compute} is about a request that restores nothing"
            )
            live.restoring.check_splice(compute.splice)
            if compute.tokens is None:
                rest = Span(compute.splice.stop, live.restoring.pages)
                live.restoring.check_compute(rest)
                ordered[compute.rid] = compute.splice
            elif compute.tokens > 0:
                self._add_restoring(forming, live, compute)
        forming.room = forming.budget
        # What was copied up has its room: a server admits it with its copy, before all others.
        waiting = sorted(self._waiting, key=lambda live: not live.copied)
        for live in [*self._slots, *waiting]:
            if live.due_offer:
                break
            if live.fetching or live.copying:
                continue
            if live.restoring is None or live.rid in ordered:
                if any(part.live is live for part in forming.parts):
                    continue
                if self._held_back(live, forming):
                    break
                if not self._add_ordinary(forming, live, ordered.get(live.rid)):
                    break
        return forming.parts

    def _add_restoring(self, forming: _Forming, live: Live, compute: Compute) -> None:
        restoring, page = live.restoring, self._spec.page_tokens
        assert restoring is not None and compute.tokens is not None
        assert compute.tokens % page == 0, (
            f"{compute}: tokens must be a multiple of the page, {page}"
        )
        tokens = min(compute.tokens, forming.budget // page * page)
        start = compute.splice.stop
        asked = Span(start, start + compute.tokens // page)
        assert asked.stop <= restoring.pages, (
            f"{compute} goes beyond the {restoring.pages} pages to be restored"
        )
        restoring.check_compute(asked)
        if live not in self._slots:
            assert not self._slots, f"{compute}: no slot is free, {self._slots[0].rid} holds it"
            if not tokens or not self._admit(live):
                return
            self._slots.append(live)
        if tokens:
            # A pass through a layer takes all tokens of its prefix, and so the step.
            forming.budget -= tokens if live.spec.by_layers is None else forming.budget
            forming.parts.append(
                _Part(live, Span(start * page, start * page + tokens), compute.splice)
            )

    def _add_ordinary(self, forming: _Forming, live: Live, splice: Span | None) -> bool:
        """Adds a request that has nothing (more) to load. False: no room, so nothing behind it may
        start either.
        """
        start = live.done_tokens if splice is None else splice.stop * self._spec.page_tokens
        if not live.reserved and splice is None:
            self._hands.refresh(live)
            start = live.done_tokens
        if splice is None and (ready := self._loads_itself(live, forming)) is not None:
            return ready
        left = live.spec.prompt_tokens - start
        holds = live in self._slots
        tokens = min(left, forming.budget)
        if splice is None and (holds or (tokens < left and not self._slots)):
            tokens = self._beside(live, left, tokens)
            forming.cut = forming.cut or tokens < min(left, forming.budget)
        forming.room -= left
        if tokens < left:
            tokens = tokens // self._spec.page_tokens * self._spec.page_tokens
            if not holds and self._slots:
                return forming.cut
        if tokens <= 0 or not self._admit(live):
            return False
        if tokens < left and not holds:
            self._slots.append(live)
        forming.budget -= tokens
        if forming.cut and live in self._slots:
            forming.budget = min(forming.budget, tokens)
        forming.parts.append(_Part(live, Span(start, start + tokens), splice or Span(0, 0)))
        return True

    def _beside(self, live: Live, left: int, most: int) -> int:
        """The tokens of a chunk, up to `most`, of a prompt that restores nothing and has `left` to
        compute: a server that asks its planner leaves room for short ones that wait.
        """
        waiting = tuple(_waiter(other) for other in self._waiting if other is not live)
        if not self._spec.consulted or not waiting:
            return most
        missing = 0 if live.reserved else live.missing_pages
        room = (self._hands.caches.device.available - missing) * self._spec.page_tokens
        done = live.spec.prompt_tokens - left
        question = ChunkBeside(done, left, most, room, waiting)
        return cast(Consulted, self._planner).query(question)

    def _loads_itself(self, live: Live, forming: _Forming) -> bool | None:
        """The engine's own way for a request whose turn has come: its stored pages are read again
        where they were lost, those in host memory are copied to the device. None: nothing (more)
        to load; else whether requests behind it may run before it.
        """
        engine_loads = self._spec.fetches or self._spec.consulted
        if not engine_loads or live.copied or live.result.chunks:
            return None
        count = self._hands.in_host(live)
        if self._spec.consulted and live.left and live.reads <= _MOST_READS:
            behind = live.spec.keys[live.resident_pages + count : live.restorable_pages]
            if self._hands.caches.storage.prefix(behind) * self._spec.page_tokens >= _WORTH_READING:
                self._offer(live)
                return True
        if not count:
            return None
        left = live.left_tokens - count * self._spec.page_tokens
        whole = left <= forming.budget or not self._slots
        if forming.room <= 0 or not whole or not self._admit(live):
            return False
        self._hands.copy_up(live)
        forming.room -= left
        return True

    def _admit(self, live: Live) -> bool:
        """Gives a request all pages it will ever take; False when device or batch are full."""
        if live in self._slots:
            return True
        running = len(self._running) + len(self._slots)
        return running < _MOST_RUNNING and self._hands.reserve(live)

    def _held_back(self, live: Live, forming: _Forming) -> bool:
        """Whether the planner has a request that could run wait for a session to return."""
        whole = live.left_tokens <= forming.budget or not self._slots
        if (
            not self._spec.consulted
            or not whole
            or live.reserved
            or live in self._slots
            or live.restoring is not None
        ):
            return False
        caches = self._hands.caches
        device, pages = caches.device, live.whole_pages - live.resident_pages
        if not device.capacity - device.used < pages <= device.available:
            return False
        question = HeldBack(_waiter(live), caches.host.capacity - caches.host.used, self._env.now)
        held = cast(Consulted, self._planner).query(question)
        self._held = self._held or held
        return held

    def _step(self, parts: list[_Part], decoding: list[Live]) -> Generator[simpy.Event, Any, None]:
        """Runs one batch."""
        background = 0
        if self._spec.share < 1 and parts:
            background = max(
                0, self._spec.step_tokens - len(decoding) - sum(len(part.tokens) for part in parts)
            )
        kv_tokens = sum(live.spec.prompt_tokens + live.out_tokens for live in decoding)
        batch = Batch(
            tuple(span for part in parts if (span := part.prefill)),
            len(decoding),
            kv_tokens,
            background,
            tuple(own for part in parts if (own := part.by_layers) is not None),
        )
        for part in parts:
            self._launch(part)
        seconds = self._cost.seconds(batch)
        yield self._env.timeout(seconds)
        self.steps += 1
        self.compute_busy_s += seconds
        everything = batch.prefill_tokens + batch.decodes + batch.background
        for part in parts:
            shared = everything - len(part.tokens)
            self._tell(ChunkDone(part.live.rid, part.tokens, seconds, self._env.now, shared))
        self._tell(
            StepDone(seconds, batch.prefill_tokens + background, len(decoding), self._env.now)
        )
        for live in decoding:
            self._token(live)
        for part in parts:
            if part.live.left_tokens == 0:
                self._prefilled(part.live)

    def _launch(self, part: _Part) -> None:
        live = part.live
        if live in self._waiting:
            self._waiting.remove(live)
        if live.result.first_chunk_s is None:
            live.result.first_chunk_s = self._env.now
        live.result.chunks += 1
        live.result.computed_tokens += len(part.tokens)
        live.result.spliced_tokens += len(part.splice) * self._spec.page_tokens
        live.done_tokens = part.tokens.stop
        restoring = live.restoring
        if restoring is not None:
            restoring.advance(
                part.splice, min(part.tokens.stop // self._spec.page_tokens, restoring.pages)
            )
            if restoring.front >= restoring.pages:
                assert not restoring.loading() and not restoring.landed()
                live.restoring = None
        self._tell(ChunkStarted(live.rid, part.tokens, self._env.now))

    def _prefilled(self, live: Live) -> None:
        """The prompt is whole: the first token is out."""
        if live in self._slots:
            self._slots.remove(live)
        live.result.first_token_s = self._env.now
        self._hands.keep_prompt(live)
        self._running.append(live)
        self._token(live)

    def _token(self, live: Live) -> None:
        if live.out_tokens:
            self.gaps_s.append(self._env.now - live.token_s)
        live.token_s = self._env.now
        live.out_tokens += 1
        if live.out_tokens < live.spec.output_tokens:
            return
        self._running.remove(live)
        live.result.finished_s = self._env.now
        self._hands.let_go(live)
        keys = live.spec.final_keys or live.spec.keys
        self._tell(RequestFinished(live.rid, self._env.now, keys=keys))
        self.on_finish(live.spec)

    def _retract_or_stop(self) -> None:
        """Nothing moves: the last waiting request that holds pages gives them up, and will be
        computed.
        """
        holders = [live for live in self._waiting if live.private or live.pinned]
        assert len(holders) > 1 or (holders and holders[0] is not self._waiting[0]), (
            f"stuck at {self._env.now:.6f} s: waiting {[live.rid for live in self._waiting[:4]]}, "
            f"slots {[live.rid for live in self._slots]}, free {self._view().free_pages}"
        )
        live = holders[-1]
        place = self._waiting.index(live)
        del self._waiting[place]
        self._hands.abandon(live)
        self._tell(RequestFinished(live.rid, self._env.now, aborted=True))
        live.result.retracted += 1
        self._enqueue(live, place)


def _offer_of(
    live: Live, now: float, resident: int, sources: tuple[tuple[Span, Tier], ...]
) -> RestoreOffered:
    pages = sources[-1][0].stop
    return RestoreOffered(live.rid, now, live.spec.prompt_tokens, resident, pages, sources)


def _waiter(live: Live) -> Waiter:
    """A waiting request as the planner is told of it: where its prompt lay when it was last looked
    up.
    """
    there = live.result.hit_tokens
    host = there.get(Tier.HOST, 0)
    stored = sum(there.values()) - there.get(Tier.DEVICE, 0) - host
    return Waiter(live.rid, live.spec.prompt_tokens, there.get(Tier.DEVICE, 0), host, stored)
