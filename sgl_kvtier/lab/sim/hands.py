"""Executor of plans in virtual time: loads, cancels and moves as transfers, pages claimed and given
back, and what is known of each request meanwhile.

Commands about a request are checked independently of the planner's own two pointers. A plan stops
the simulation if it takes a page twice, splices one that has not landed, or computes one that a
transfer has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import simpy

from sgl_kvtier.lab.sim.links import Transfer, Transfers
from sgl_kvtier.lab.sim.memory import Caches
from sgl_kvtier.lab.sim.requests import RequestResult, SimRequest
from sgl_kvtier.policy.messages import Fact, Load, PagesLost, StepPlan, TransferDone
from sgl_kvtier.policy.restore.restorations import LINK_OF
from sgl_kvtier.types import PLACES, Link, PageKey, Span, Tier

# --- a request inside the server ------------------------------------------------------------------

_FREE, _LOADING, _LANDED = 0, 1, 2


class Restoring:
    """Pages [resident, pages) of one request by state. Raises AssertionError on commands that
    contradict it.
    """

    def __init__(
        self, rid: str, resident: int, pages: int, sources: tuple[tuple[Span, Tier], ...]
    ) -> None:
        self.rid = rid
        self.pages = pages
        self.sources = sources
        self._front = resident
        self._state = bytearray(pages)

    @property
    def front(self) -> int:
        """Pages below are part of the prefix or being computed."""
        return self._front

    def begin_load(self, span: Span, tier: Tier, known_places: bool) -> None:
        """A load of these pages is accepted. `known_places`: they lie where they were offered.
        Otherwise they may have been moved since, and pages not there when the load begins are lost.
        """
        assert span and span.stop <= self.pages, (
            f"{self.rid}: load of {span}, but only {self.pages} pages are offered"
        )
        assert span.start >= self._front, (
            f"{self.rid}: load of {span}, but the front is at {self._front}"
        )
        taken = (
            self._state.find(_LOADING, span.start, span.stop),
            self._state.find(_LANDED, span.start, span.stop),
        )
        assert taken == (-1, -1), f"{self.rid}: pages of {span} are claimed twice"
        there = not known_places or any(
            s.start <= span.start and span.stop <= s.stop and t == tier for s, t in self.sources
        )
        assert there, f"{self.rid}: pages {span} do not all lie in {PLACES[tier]}: {self.sources}"
        self._paint(span, _LOADING)

    def land(self, span: Span) -> None:
        """These pages are on the device."""
        self._paint(span, _LANDED)

    def lose(self, span: Span) -> None:
        """These pages will not come."""
        self._paint(span, _FREE)

    def loading(self) -> int:
        """Pages on their way."""
        return self._state.count(_LOADING)

    def landed(self) -> int:
        """Pages on the device that are not part of the prefix yet."""
        return self._state.count(_LANDED)

    def unclaimed(self) -> int:
        """Pages neither computed nor loaded nor on their way."""
        return self._state.count(_FREE, self._front)

    def landed_in(self, span: Span) -> int:
        """The same within a span."""
        return self._state.count(_LANDED, span.start, span.stop)

    def check_splice(self, span: Span) -> None:
        """A plan wants these pages to become part of the prefix."""
        assert span.start == self._front, (
            f"{self.rid}: splice of {span}, but the front is at {self._front}"
        )
        landed = self._state.count(_LANDED, span.start, span.stop)
        assert landed == len(span), (
            f"{self.rid}: splice of {span}, of which only {landed} pages have landed"
        )

    def check_compute(self, span: Span) -> None:
        """A plan wants these pages computed."""
        taken = (
            self._state.find(_LOADING, span.start, span.stop),
            self._state.find(_LANDED, span.start, span.stop),
        )
        assert taken == (-1, -1), (
            f"{self.rid}: compute reaches into pages a transfer has taken: {span}"
        )

    def advance(self, splice: Span, front: int) -> None:
        """The splice is done and pages below `front` are being computed."""
        self._paint(splice, _FREE)
        self._front = front

    def _paint(self, span: Span, state: int) -> None:
        self._state[span.start : span.stop] = bytes([state]) * len(span)


@dataclass(slots=True, eq=False)
class Live:
    """One request that has arrived. `done_tokens` of its prompt are on the device, of which
    `resident_pages` were found there. `pinned` are named pages it holds, in order; `private` counts
    pages of its own.
    """

    spec: SimRequest
    result: RequestResult
    page_tokens: int
    done_tokens: int = 0
    resident_pages: int = 0
    pinned: list[PageKey] = field(default_factory=list)
    private: int = 0
    restoring: Restoring | None = None
    offered: Restoring | None = None
    left: bool = False
    """The engine loads its prefix, not the planner."""
    fetching: bool = False
    """It waits until the engine has fetched its stored pages to host memory."""
    copying: bool = False
    """The engine copies its pages from host memory to the device, `copied`: has copied."""
    copied: bool = False
    reads: int = 0
    """Times that the engine was told of its stored pages."""
    reserved: bool = False
    """It owns every page it will ever take."""
    due_offer: bool = False
    """Something of it lies in lower tiers, and it will be offered when the device can take it."""
    load_link: Link | None = None
    """Over which it was loaded last."""
    out_tokens: int = 0
    token_s: float = 0.0
    """When its last output token came."""

    @property
    def rid(self) -> str:
        """Its id."""
        return self.spec.rid

    @property
    def left_tokens(self) -> int:
        """Prompt tokens that are not on the device."""
        return self.spec.prompt_tokens - self.done_tokens

    @property
    def restores(self) -> bool:
        """Its prefix is being restored by the planner, or may be."""
        if self.left:
            return False
        return self.due_offer or self.offered is not None or self.restoring is not None

    @property
    def fresh_tokens(self) -> int:
        """Prompt tokens that are computed, where the planner restores nothing: those that were in
        no tier when it was last looked up.
        """
        found = sum(self.result.hit_tokens.values()) if self.left else 0
        return self.spec.prompt_tokens - max(found, self.done_tokens)

    @property
    def whole_pages(self) -> int:
        """Pages it takes from admission to its end: prompt and output."""
        return -(-(self.spec.prompt_tokens + self.spec.output_tokens) // self.page_tokens)

    @property
    def missing_pages(self) -> int:
        """Of those, pages it does not own yet."""
        return self.whole_pages - len(self.pinned) - self.private

    @property
    def restorable_pages(self) -> int:
        """Whole pages below the prompt's last token, which is always computed."""
        return (self.spec.prompt_tokens - 1) // self.page_tokens


# --- plans carried out ----------------------------------------------------------------------------


class Hands:
    """Owns the tiers and the links, and collects facts until the next step asks for them."""

    def __init__(
        self,
        env: simpy.Environment,
        transfers: Transfers,
        capacities: dict[Tier, int | None],
        page_tokens: int,
        page_bytes: int,
        *,
        staged: bool,
        write_down: bool,
    ) -> None:
        self._env = env
        self._transfers = transfers
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._staged = staged
        self._write_down = write_down
        self._facts: list[Fact] = []
        self.caches = Caches(capacities, transfers, page_bytes, self.tell, lambda: env.now)
        self.wake: Callable[[], None] = lambda: None

    # --- facts ------------------------------------------------------------------------------------

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there is a fact, and when a transfer has ended."""
        self.wake = self._transfers.on_end = wake

    @property
    def has_facts(self) -> bool:
        """Whether the planner has not heard of everything yet."""
        return bool(self._facts)

    @property
    def pending(self) -> int:
        """Transfers that will end by themselves."""
        return self._transfers.pending

    def tell(self, fact: Fact) -> None:
        """Takes a fact for the planner."""
        self._facts.append(fact)
        self.wake()

    def take_facts(self) -> list[Fact]:
        """The facts since the last call, in order."""
        self.caches.tell_drops()
        facts, self._facts = self._facts, []
        return facts

    # --- a request's pages ------------------------------------------------------------------------

    def look_up(self, live: Live) -> tuple[int, tuple[tuple[Span, Tier], ...]]:
        """Pages on the device from the start, and where those behind them lie; noted in the
        request's result.
        """
        most = live.restorable_pages
        if live.spec.cached:
            spans = [
                (Span(s.start, min(s.stop, most)), tier)
                for s, tier in live.spec.cached
                if s.start < most
            ]
            resident = spans[0][0].stop if spans and spans[0][1] == Tier.DEVICE else 0
            sources: tuple[tuple[Span, Tier], ...] = tuple(
                span for span in spans if span[1] != Tier.DEVICE
            )
        else:
            resident, sources = self.caches.look_up(live.spec.keys[:most])
        hits = {Tier.DEVICE: resident * self._page_tokens} if resident else {}
        for span, tier in sources:
            hits[tier] = hits.get(tier, 0) + len(span) * self._page_tokens
        live.result.hit_tokens = hits
        self._set_resident(live, resident)
        return resident, sources

    def hold_resident(self, live: Live) -> None:
        """Pages of the prefix found on the device stay there for this request."""
        fresh = live.spec.keys[len(live.pinned) : live.resident_pages]
        self.caches.device.pin(fresh)
        live.pinned += fresh

    def refresh(self, live: Live) -> None:
        """A request about to run without restoring takes what is on the device by now."""
        if live.spec.keys:
            self._set_resident(
                live, self.caches.device.prefix(live.spec.keys[: live.restorable_pages])
            )

    def reserve(self, live: Live) -> bool:
        """Claims all pages the request is going to need, once; False when there is no room."""
        if live.reserved:
            return True
        device, held = self.caches.device, len(live.pinned)
        self.hold_resident(live)
        if live.missing_pages > device.available:
            device.unpin(live.pinned[held:])
            del live.pinned[held:]
            return False
        missing = live.missing_pages
        device.claim(missing)
        live.private += missing
        live.reserved = True
        device.use(live.pinned)
        live.result.resident_tokens = live.resident_pages * self._page_tokens
        return True

    def in_host(self, live: Live) -> int:
        """Pages of the prompt in host memory behind those on the device."""
        keys = live.spec.keys[live.resident_pages : live.restorable_pages]
        return self.caches.host.prefix(keys)

    def copy_up(self, live: Live) -> None:
        """The engine's own way: copies these to the device, which has room for the request."""
        assert live.reserved, f"{live.rid} has no room on the device"
        span = Span(live.resident_pages, live.resident_pages + self.in_host(live))
        keys, host = live.spec.keys[span.start : span.stop], self.caches.host
        host.pin(keys)
        live.copying = True

        def done(transfer: Transfer, seconds: float) -> None:
            host.unpin(keys)
            host.touch(keys)
            live.copying, live.copied = False, True
            live.done_tokens = span.stop * self._page_tokens
            live.result.spliced_tokens += len(span) * self._page_tokens
            nbytes = len(span) * self._page_bytes
            self.tell(TransferDone("", transfer.link, Span(0, 0), nbytes, seconds, self._env.now))

        self._transfers.submit(Transfer(Link.HOST_TO_DEVICE, "", span, _at_once, done, _never))

    def keep_prompt(self, live: Live) -> None:
        """The prompt's pages get their names and are copied down."""
        self._name(live, live.spec.keys)

    def let_go(self, live: Live) -> None:
        """The request has ended: named pages stay as cache, its own are free."""
        self._name(live, live.spec.final_keys)
        device = self.caches.device
        device.release(live.private)
        device.unpin(live.pinned)
        live.private, live.pinned = 0, []

    def abandon(self, live: Live) -> None:
        """A waiting request gives up all it holds; nothing of it is under way."""
        restoring, device = live.restoring, self.caches.device
        if restoring is not None:
            assert not restoring.loading(), f"{live.rid} is given up while loads are under way"
            for span, tier in restoring.sources:
                landed = restoring.landed_in(span)
                link = live.load_link or LINK_OF[tier]
                self._transfers.results[link].wasted_bytes += landed * self._page_bytes
        device.release(live.private)
        device.unpin(live.pinned)
        live.private, live.pinned, live.restoring, live.reserved = 0, [], None, False
        live.copied = False
        self._set_resident(live, 0)

    def _set_resident(self, live: Live, pages: int) -> None:
        live.resident_pages = pages
        live.done_tokens = pages * self._page_tokens

    def _name(self, live: Live, keys: tuple[PageKey, ...]) -> None:
        device = self.caches.device
        device.chain(keys)
        fresh = []
        for key in keys[len(live.pinned) :]:
            live.private -= 1
            if device.name_private(key):
                fresh.append(key)
            live.pinned.append(key)
        self.caches.place(fresh, Tier.DEVICE)
        if fresh and self._write_down:
            self.caches.write_down(fresh)

    # --- plans ------------------------------------------------------------------------------------

    def carry_out(self, plan: StepPlan, lives: Mapping[str, Live]) -> None:
        """Everything of a plan but the computes, which are the batch's. `lives`: requests waiting
        or in a slot.
        """
        for start in plan.starts:
            live = lives.get(start.rid)
            assert live is not None and live.offered is not None, f"{start} answers no offer"
            live.result.restore_mode = start.mode.value
            if start.mode.restores and live.left:
                live.fetching = True
            elif start.mode.restores:
                live.restoring = live.offered
        for live in lives.values():
            self._close_offer(live)
        for cancel in plan.cancels:
            self._transfers.cancel(cancel.rid, cancel.span)
        for load in plan.loads:
            live = lives.get(load.rid)
            assert live is not None and live.restoring is not None, (
                f"{load} is for a request that restores nothing"
            )
            self._load(live, load)
        for evict in plan.evictions:
            self.caches.evict(evict)
        for move in plan.moves:
            self.caches.carry_out(move)

    def _close_offer(self, live: Live) -> None:
        """Forgets an offer that was not taken up. Pages held for it may go, unless it has its room
        already.
        """
        if live.offered is not None and live.restoring is None and not live.reserved:
            self.caches.device.unpin(live.pinned)
            live.pinned = []
        live.offered = None

    def _load(self, live: Live, load: Load) -> None:
        restoring, device = live.restoring, self.caches.device
        assert restoring is not None
        restoring.begin_load(load.span, load.source, known_places=not live.spec.keys)
        staging = len(load.span) if self._staged and load.source > Tier.HOST else 0
        if not self.reserve(live):
            assert len(load.span) <= device.available, (
                f"{load} exceeds the {device.available} free pages of the device"
            )
            device.claim(len(load.span))
            live.private += len(load.span)
        if staging:
            assert staging <= self.caches.host.available, (
                f"{load} exceeds the free pages of host memory"
            )
            self.caches.host.claim(staging)
        self.caches.tell_drops()
        live.load_link = load.link
        source, staged = self.caches.tiers.get(load.source), staging > 0

        def keys(transfer: Transfer) -> tuple[PageKey, ...]:
            return live.spec.keys[transfer.span.start : transfer.span.stop]

        def begin(transfer: Transfer) -> bool:
            """Its turn has come: are the pages still there? They stay while they are read."""
            if source is None:
                return True
            if any(key not in source for key in keys(transfer)):
                lost(transfer, transfer.span, "missing")
                return False
            source.pin(keys(transfer))
            return True

        def done(transfer: Transfer, seconds: float) -> None:
            if source is not None:
                source.unpin(keys(transfer))
                source.touch(keys(transfer))
            restoring.land(transfer.span)
            self._unstage(transfer.span, staged)
            nbytes, now = self._transfers.nbytes(transfer), self._env.now
            self.tell(TransferDone(live.rid, load.link, transfer.span, nbytes, seconds, now))

        def lost(transfer: Transfer, span: Span, reason: str) -> None:
            del transfer
            restoring.lose(span)
            self._unstage(span, staged)
            if not live.reserved:
                device.release(len(span))
                live.private -= len(span)
            live.result.lost_tokens += len(span) * self._page_tokens
            self.tell(PagesLost(live.rid, span, reason, self._env.now))

        own, page_bytes = live.spec.by_layers, None
        if own is not None:
            page_bytes = own.tokens / own.layers * self._page_bytes / self._page_tokens
        due_s = self._env.now + load.deadline_s
        self._transfers.submit(
            Transfer(load.link, live.rid, load.span, begin, done, lost, due_s, page_bytes)
        )

    def _unstage(self, span: Span, staged: bool) -> None:
        if staged:
            self.caches.host.release(len(span))


def _at_once(transfer: Transfer) -> bool:
    del transfer
    return True


def _never(transfer: Transfer, span: Span, reason: str) -> None:
    raise AssertionError(f"a copy over {transfer.link.value} was taken back: {span} {reason}")
