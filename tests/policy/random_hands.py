"""Hands that do everything hands may do, in any order: they grant less, finish late, fail, cancel,
abort. They check as they go that the planner keeps to the protocol, and at the end that every
request comes through.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from virtual_hands import islands

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import (
    CANCELLED,
    NO_ROOM_YET,
    ChunkDone,
    ChunkStarted,
    Load,
    Mode,
    Move,
    PagesDropped,
    PagesLost,
    PagesPlaced,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    StepDone,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, PageKey, Span, Tier

PAGE = 16
MOST_REFUSED = 20
"""Loads for which there is no room for a moment, in one run."""
ENGINE = EngineShape(page_tokens=PAGE, page_bytes=1 << 14, chunk_tokens=8 * PAGE)
PROFILE = {
    "prefill": {"fixed_s": 0.01, "per_token_s": 1e-4, "per_token_position_s": 1e-9},
    "links": {link.value: 1e7 for link in Link},
    "restore": {"own_s": 0.0},
}


def key(document: int, page: int) -> PageKey:
    return PageKey(document.to_bytes(16, "big") + page.to_bytes(16, "big"))


@dataclass
class Request:
    rid: str
    tokens: int
    keys: tuple[PageKey, ...]
    resident: int
    pages: int
    holes: frozenset[int]
    front: int = 0
    """Tokens that are part of the prefix."""
    state: dict[int, str] = field(default_factory=dict)
    anchor: int = 0
    """So many of the last pages bring what is needed to go on from the end."""
    mode: Mode | None = None

    @property
    def restoring(self) -> bool:
        """Whether the planner has yet to bring pages of its prefix."""
        return self.mode is not None and self.mode.restores and self.front < self.pages * PAGE

    @property
    def whole(self) -> bool:
        """Whether landed pages can be attached up to the end only."""
        return bool(self.anchor) and self.front < (self.pages - self.anchor) * PAGE


class RandomHands:
    """One run. `chance` decides all; `facts` and `plans` are what was told and answered, to be
    played again.
    """

    def __init__(
        self,
        chance: random.Random,
        config: PolicyConfig,
        profiled: bool,
        rules: Rules | None = None,
        anchors: bool = False,
    ) -> None:
        self.anchors = anchors
        self.chance = chance
        self.config = config
        self.rules = rules
        self.profile = PROFILE if profiled else None
        self.planner = make_planner(config, ENGINE, self.profile, rules)
        self.log: list = []
        self.plans: list[StepPlan] = []
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.slot: str | None = None
        self.loads: list[Load] = []
        self.moves: list[Move] = []
        self.flying: dict[PageKey, Tier] = {}
        self.chunks: list[tuple[str, Span]] = []
        self.arrived = self.refused = 0
        self.draining = False
        self.finished: list[str] = []

    def tell(self, fact) -> None:
        if isinstance(fact, PagesPlaced | PagesDropped):
            # Whoever brought a page there: for the planner the move to that tier is over.
            self.flying = {
                page: tier
                for page, tier in self.flying.items()
                if tier != fact.tier or page not in fact.keys
            }
        self.log.append(fact)
        self.planner.observe(fact)

    def act(self) -> None:
        self.now += self.chance.choice((0.0, 0.001, 0.02, 0.5))
        actions = [
            self.arrive,
            self.step,
            self.step,
            self.end_load,
            self.end_load,
            self.end_chunk,
            self.end_move,
        ]
        self.chance.choice([*actions, self.abort] if self.chance.random() < 0.2 else actions)()

    # --- requests ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if len(self.requests) >= 5:
            return
        self.arrived += 1
        rid = f"r{self.arrived}"
        document = self.chance.randrange(3)
        pages = self.chance.randint(1, 40)
        resident = self.chance.randrange(pages) if self.chance.random() < 0.3 else 0
        tokens = pages * PAGE + self.chance.randint(1, 3 * PAGE)
        keys = tuple(key(document, n) for n in range(tokens // PAGE))
        cuts = sorted(self.chance.randint(resident, pages) for _ in range(2))
        tiers = self.chance.choice(
            (
                (Tier.HOST, Tier.STORAGE, Tier.REMOTE),
                (Tier.STORAGE, Tier.REMOTE, Tier.REMOTE),
                (Tier.STORAGE, Tier.HOST, Tier.STORAGE),
                (Tier.STORAGE, Tier.REMOTE, Tier.STORAGE),
                (Tier.STORAGE, Tier.STORAGE, Tier.STORAGE),
            )
        )
        bounds = zip((resident, *cuts), (*cuts, pages), strict=True)
        spans = tuple(zip((Span(*bound) for bound in bounds), tiers, strict=True))
        holes = frozenset(
            self.chance.sample(range(pages), self.chance.choice((0, 0, 0, 0, 1, pages // 4)))
        )
        sources = tuple((island, tier) for span, tier in spans for island in islands(span, holes))
        for span, tier in (*sources, (Span(0, resident), Tier.DEVICE)):
            if span:
                self.tell(PagesPlaced(keys[span.start : span.stop], tier, self.now))
        session = f"s{self.chance.randrange(3)}" if self.chance.random() < 0.7 else None
        self.tell(RequestArrived(rid, self.now, tokens, keys, session))
        request = Request(rid, tokens, keys, resident, pages, holes, resident * PAGE)
        if self.anchors:
            request.anchor = self.chance.randint(0, min(6, pages - resident))
        self.requests[rid] = request
        if self.chance.random() < 0.7:
            nbytes = request.anchor * self.chance.choice((1, 1 << 14)) if request.anchor else 0
            self.tell(
                RestoreOffered(
                    rid, self.now, tokens, resident, pages, sources, request.anchor, nbytes
                )
            )
        else:
            request.mode = Mode.COMPUTE

    def abort(self) -> None:
        if self.requests:
            self.finish(self.chance.choice(list(self.requests)), aborted=True)

    def finish(self, rid: str, aborted: bool) -> None:
        request = self.requests.pop(rid)
        self.chunks = [chunk for chunk in self.chunks if chunk[0] != rid]
        self.slot = None if self.slot == rid else self.slot
        self.tell(
            RequestFinished(
                rid, self.now, aborted, request.keys if self.chance.random() < 0.5 else ()
            )
        )
        self.finished.append(rid)

    # --- ends of what was begun -------------------------------------------------------------------------------------

    def end_load(self) -> None:
        if not self.loads:
            return
        load = self.loads.pop(self.chance.randrange(len(self.loads)))
        cut = load.span.start
        if self.chance.random() < 0.3:
            cut = self.chance.randint(load.span.start, load.span.stop)
        lost, landed = Span(load.span.start, cut), Span(cut, load.span.stop)
        if lost:
            self.settle(load.rid, lost, "lost")
            self.tell(PagesLost(load.rid, lost, "failed", self.now))
        if landed:
            self.settle(load.rid, landed, "landed")
            seconds = self.chance.choice((0.001, 0.1, 1.0))
            self.tell(
                TransferDone(
                    load.rid, load.link, landed, len(landed) * ENGINE.page_bytes, seconds, self.now
                )
            )

    def settle(self, rid: str, span: Span, state: str) -> None:
        request = self.requests.get(rid)
        if request is None:
            return
        took = [page for page in range(span.start, span.stop) if request.state[page] == "loading"]
        # Pages before a lost one were given to compute with it.
        assert request.anchor or len(took) == len(span)
        request.state |= dict.fromkeys(took, state)
        if state == "lost" and took and request.whole:
            first = request.front // PAGE
            request.state |= dict.fromkeys(range(first, max(first, took[-1] + 1)), "lost")

    def end_chunk(self) -> None:
        if not self.chunks:
            return
        rid, tokens = self.chunks.pop(0)
        seconds = 0.01 + len(tokens) * 1e-4
        self.tell(ChunkDone(rid, tokens, seconds, self.now, self.chance.choice((0, 0, 8))))
        self.tell(StepDone(seconds, len(tokens), self.chance.randrange(4), self.now))
        request = self.requests.get(rid)
        if request is not None:
            placed = request.keys[tokens.start // PAGE : tokens.stop // PAGE]
            if placed:
                self.tell(PagesPlaced(placed, Tier.DEVICE, self.now))
            if tokens.stop == request.tokens:
                delivered = {
                    page
                    for page, state in request.state.items()
                    if state in ("computed", "spliced")
                }
                assert delivered.issuperset(range(request.resident, request.pages))
                self.finish(rid, aborted=False)

    def end_move(self) -> None:
        if not self.moves:
            return
        move = self.moves.pop(self.chance.randrange(len(self.moves)))
        fact = PagesDropped if self.chance.random() < 0.2 else PagesPlaced
        self.tell(fact(move.keys, move.target, self.now))

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, generous: bool = False) -> bool:
        """One step; says whether anything was begun."""
        free = {Tier.DEVICE: self.chance.randrange(200), Tier.HOST: self.chance.randrange(60)}
        view = StepView(
            now=self.now,
            waiting=tuple(rid for rid in self.requests if rid != self.slot),
            slot=self.slot,
            slot_open=generous or self.chance.random() < 0.8,
            prefill_tokens=8 * PAGE
            if generous
            else self.chance.choice((0, PAGE - 1, PAGE, 4 * PAGE, 8 * PAGE)),
            fresh_tokens=0 if generous else self.chance.choice((0, 0, 100, 1000)),
            decoding=self.chance.randrange(3),
            free_pages={Tier.DEVICE: 1000, Tier.HOST: 1000} if generous else free,
        )
        self.log.append(view)
        plan = self.planner.step(view)
        self.plans.append(plan)
        self.check_room(plan, view)
        for start in plan.starts:
            self.requests[start.rid].mode = start.mode
        self.cancel(plan)
        for load in plan.loads:
            self.begin(load)
        self.begin_moves(plan)
        began = [self.compute(compute, view) for compute in plan.computes]
        began.append(self.compute_ordinary(view))
        return bool(plan.loads or plan.cancels or any(began))

    def check_room(self, plan: StepPlan, view: StepView) -> None:
        computed = sum((compute.tokens or 0) // PAGE for compute in plan.computes)
        loaded = sum(len(load.span) for load in plan.loads)
        moved = sum(len(move.keys) for move in plan.moves if move.target is Tier.DEVICE)
        assert loaded + moved <= max(0, view.free_pages[Tier.DEVICE] - (computed if loaded else 0))
        staged = sum(len(move.keys) for move in plan.moves if move.target is Tier.HOST)
        assert staged <= view.free_pages[Tier.HOST]

    def cancel(self, plan: StepPlan) -> None:
        for cancel in plan.cancels:
            low, high = cancel.span.start, cancel.span.stop
            inside = [
                load
                for load in self.loads
                if load.rid == cancel.rid and low <= load.span.start and load.span.stop <= high
            ]
            assert inside, f"no load lies within what is asked back, {cancel}"
            for load in inside:
                if self.chance.random() < 0.6:
                    self.loads.remove(load)
                    for page in (
                        range(load.span.start, load.span.stop) if load.rid in self.requests else ()
                    ):
                        if self.requests[load.rid].state[page] == "loading":
                            del self.requests[load.rid].state[page]
                        else:
                            assert self.requests[load.rid].anchor
                    self.tell(PagesLost(load.rid, load.span, CANCELLED, self.now))

    def begin(self, load: Load) -> None:
        request = self.requests[load.rid]
        assert load.span and request.resident <= load.span.start and load.span.stop <= request.pages
        for page in range(load.span.start, load.span.stop):
            assert page not in request.holes, f"page {page} of {load.rid} is in no tier"
            assert page not in request.state, (
                f"page {page} of {load.rid} is loaded, but it was {request.state[page]} before"
            )
        if self.refused < MOST_REFUSED and self.chance.random() > 0.9:
            self.refused += 1  # an executor does not refuse for ever
            self.tell(PagesLost(load.rid, load.span, NO_ROOM_YET, self.now))
            return
        request.state |= dict.fromkeys(range(load.span.start, load.span.stop), "loading")
        self.loads.append(load)

    def begin_moves(self, plan: StepPlan) -> None:
        for move in plan.moves:
            for page in move.keys:
                assert page not in self.flying, (
                    f"{page.hex()} is moved to {move.target} and to {self.flying[page]}"
                )
                self.flying[page] = move.target
            self.moves.append(move)

    def compute(self, compute, view: StepView) -> bool:
        request = self.requests[compute.rid]
        start = request.front
        if compute.splice:
            assert request.front == compute.splice.start * PAGE
            start = compute.splice.stop * PAGE
            assert not request.whole or compute.splice.stop == request.pages, (
                f"{compute.rid} cannot go on from page {compute.splice.stop}"
            )
        for page in range(compute.splice.start, compute.splice.stop):
            assert request.state[page] == "landed"
        if compute.tokens == 0:
            return False
        if compute.tokens is None:
            assert all(
                state in ("spliced", "computed", "landed", "lost")
                for state in request.state.values()
            )
            tokens = self.engine_chunk(request.tokens - start, view)
        else:
            assert compute.tokens % PAGE == 0
            assert start + compute.tokens <= request.pages * PAGE
            tokens = compute.tokens
            assert tokens <= view.prefill_tokens
        if self.slot not in (None, compute.rid) and start + tokens < request.tokens:
            return False
        if not self.draining and self.chance.random() < 0.1:
            tokens = tokens // PAGE // 2 * PAGE
        if tokens <= 0:
            return False
        for page in range(compute.splice.start, compute.splice.stop):
            request.state[page] = "spliced"
        self.launch(request, Span(start, start + tokens))
        return True

    @staticmethod
    def engine_chunk(rest: int, view: StepView) -> int:
        """A chunk of the engine's own choice ends at a page or at the prompt's end, as SGLang's do."""
        return rest if rest <= view.prefill_tokens else view.prefill_tokens // PAGE * PAGE

    def compute_ordinary(self, view: StepView) -> bool:
        """Requests the planner has let go are prefilled as the engine likes."""
        holder = self.slot if self.slot is not None else next(iter(self.requests), None)
        request = self.requests.get(holder or "")
        if request is None or request.mode is None or request.restoring:
            return False
        tokens = self.engine_chunk(request.tokens - request.front, view)
        if tokens <= 0:
            return False
        self.launch(request, Span(request.front, request.front + tokens))
        return True

    def launch(self, request: Request, tokens: Span) -> None:
        for page in range(tokens.start // PAGE, min(-(-tokens.stop // PAGE), request.pages)):
            state = request.state.get(page)
            assert state in (None, "lost") or (
                state == "computed" and page == tokens.start // PAGE
            ), (page, state)
            request.state[page] = "computed"
        request.front = tokens.stop
        self.slot = (
            request.rid
            if tokens.stop < request.tokens
            else (None if self.slot == request.rid else self.slot)
        )
        self.tell(ChunkStarted(request.rid, tokens, self.now))
        self.chunks.append((request.rid, tokens))

    # --- the end ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Everything that was begun ends, and every request comes through: nobody is stuck."""
        self.draining = True
        idle = 0
        for _ in range(3000):
            self.now += 0.05
            if not self.requests and not self.loads:
                return
            began = self.step(generous=True)
            idle = 0 if began or self.loads or self.chunks else idle + 1
            assert idle < 10, (
                f"stuck: {list(self.requests)}, slot {self.slot}, restoring "
                f"{[rid for rid, one in self.requests.items() if one.restoring]}"
            )
            self.end_load()
            self.end_chunk()
            self.end_move()
        raise AssertionError(f"never ended: {list(self.requests)}")

    def replay(self) -> list[StepPlan]:
        """What another planner answers to the same facts and views."""
        planner = make_planner(self.config, ENGINE, self.profile, self.rules)
        plans = []
        for entry in self.log:
            if isinstance(entry, StepView):
                plans.append(planner.step(entry))
            else:
                planner.observe(entry)
        return plans
