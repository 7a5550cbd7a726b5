"""A request inside the simulated server: its progress, its pages, and checks of commands about it.

The checks are written independently of the planner's own two pointers. A plan stops the simulation
if it takes a page twice, splices one that has not landed, or computes one that a transfer has
taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_kvtier.lab.sim.requests import RequestResult, SimRequest
from sgl_kvtier.types import PLACES, Link, PageKey, Span, Tier

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
    running: bool = False
    load_link: Link | None = None
    """Over which it was loaded last."""
    out_tokens: int = 0

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
    def wanted_tokens(self) -> int:
        """Prompt tokens that are not on the device yet."""
        return self.left_tokens

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
