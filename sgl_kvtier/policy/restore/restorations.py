"""The state of all restorations in progress: requests, loaded pages, running chunks, and transfers
on each link. Facts and the commands of a step change it; the other modules of a RestorePlanner read
it. One thread, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.bandwidth import Bandwidth, LinkQueues
from sgl_kvtier.policy.learned.cost import GUESS, CostModel, FixedOverhead, PrefillCost, guess_s
from sgl_kvtier.policy.messages import (
    CANCELLED,
    NO_ROOM_YET,
    ChunkDone,
    ChunkStarted,
    Compute,
    Fact,
    Mode,
    PagesLost,
    PolicyChanged,
    RequestFinished,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.restore.meeting import OpenPages, Speeds, open_of, stages_of
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

LINK_OF: Final[Mapping[Tier, Link]] = {
    Tier.HOST: Link.HOST_TO_DEVICE,
    Tier.STORAGE: Link.STORAGE_TO_DEVICE,
    Tier.REMOTE: Link.REMOTE_TO_DEVICE,
}
"""The link over which a restoration loads a page, by the page's tier."""

_ALONE: Final = 6
"""A chunk that is not mixed with decoding may take so many times `policy.max_stall_ms`: a decode
step follows it, in which nothing is restored.
"""
_FIXED_SHARE: Final = 0.4
"""The fixed cost of a chunk cut by this bound is at most this share of its time."""

Source: TypeAlias = tuple[Span, Tier]


def islands(sources: Sequence[Source]) -> list[list[Source]]:
    """The sources, grouped into runs without a hole between them."""
    runs: list[list[Source]] = []
    for source in sources:
        if runs and runs[-1][-1][0].stop == source[0].start:
            runs[-1].append(source)
        else:
            runs.append([source])
    return runs


@dataclass(slots=True)
class Restoration:
    """The planner's record of one request's restoration."""

    rid: str
    order: int
    """Sequence number of its candidate among all candidates."""
    prompt_tokens: int
    pointer: TwoPointer
    """The state of each page."""
    sources: tuple[Source, ...]
    """Disjoint page spans that can be loaded, in ascending order, with the tier of each."""
    mode: Mode = Mode.BOTH
    yields: int = 0
    """Number of steps in a row in which it has yielded to fresh prefill."""
    cancelled: int = 0
    """Loads below this page were cancelled; which of them had started is not reported yet."""
    in_flight: dict[Link, int] = field(default_factory=dict)
    """Number of pages in flight, by link."""
    unread: dict[Link, None] = field(default_factory=dict)
    """Links over which pages of it could still be loaded."""
    load_order: tuple[Source, ...] = ()
    """The sources in loading order: pages before a hole first, as it is computed after them."""
    by_link: tuple[tuple[Link, tuple[Span, ...]], ...] = ()
    """The sources by link."""
    stages: tuple[int, ...] = ()
    """First pages of its stages but the lowest (`meeting.stages_of`)."""
    meet: int = -1
    """The meeting page of the last search; -1: none."""
    charged_meet: int = -1
    """The same for the search in which compute is weighted for the requests that wait or decode."""
    copied: int = 0
    """Pages below this one are copied from host memory, which is faster than computing them. They
    are computed only if their load fails.
    """
    stuck_since: float = -1.0
    """Since when it has waited for a slot with no load in flight; -1: it does not."""
    predicted_end: float = -1.0
    """Predicted end in seconds of the executor's clock, from the speed of compute and links alone;
    -1: unknown, or it shared them with other requests.
    """
    holes: bool = False
    """Whether pages of it were in no tier when it was offered."""
    fixed_meet: int = -1
    """The meeting page, if the rules fix it: pages below are computed, all others loaded; else -1.
    """
    anchor_bytes: int = 0
    """Bytes of the anchor, in addition to those of its pages; 0 without an anchor."""

    def __post_init__(self) -> None:
        self.load_order = tuple(
            source for island in islands(self.sources) for source in reversed(island)
        )
        self.unread = {LINK_OF[tier]: None for _, tier in self.sources}
        self.by_link = tuple(
            (link, tuple(span for span, tier in self.sources if LINK_OF[tier] is link))
            for link in self.unread
        )
        # Without stages if it has an anchor: loaded pages of a lower stage could not be attached
        # before those of a higher one.
        self.stages = () if self.pointer.whole else stages_of(self.by_link)

    def __str__(self) -> str:
        """One line for debugging."""
        loads = ", ".join(
            f"{pages} pages over {link.value}" for link, pages in self.in_flight.items()
        )
        return (
            f"{self.mode.value}, prompt of {self.prompt_tokens} tokens, meets at page {self.meet}, "
            f"in flight: {loads or 'nothing'}, predicted end: {self.predicted_end:.3f} s"
        )

    def open_pages(self, speeds: Speeds, front: int, taken_back: bool = False) -> OpenPages:
        """Its open pages from page `front` on (`meeting.open_of`)."""
        return open_of(
            speeds,
            self.pointer,
            self.by_link,
            front,
            self.in_flight,
            taken_back,
            self.stages,
            self.anchor_left(),
        )

    def anchor_left(self) -> int:
        """Bytes of the anchor that are still to be loaded: those of its untouched pages."""
        if not self.anchor_bytes:
            return 0
        span = self.pointer.anchor
        return self.anchor_bytes * self.pointer.free_in(span) // len(span)

    def read_out(self, link: Link) -> bool:
        """Records if a link has no page left to load. True if so."""
        for other, spans in self.by_link:
            if other is link and any(map(self.pointer.free_in, spans)):
                return False
        del self.unread[link]
        return True

    def opened(self, span: Span) -> list[Link]:
        """Records that pages can be loaded again. Returns the links that had none left before."""
        links = [
            LINK_OF[tier]
            for source, tier in self.sources
            if source.start < span.stop and span.start < source.stop
        ]
        new = [link for link in dict.fromkeys(links) if link not in self.unread]
        self.unread.update(dict.fromkeys(new))
        return new

    def after_copies(
        self, front: int, bandwidth: Bandwidth, engine: EngineShape
    ) -> tuple[int, float]:
        """The first page from `front` on that is not copied from host memory in any case, and the
        seconds until the copies before it are done.
        """
        if front >= self.copied:
            return front, 0.0
        runs = self.pointer.unlanded_runs(front)
        pages = sum(min(stop, self.copied) - start for start, stop in runs if start < self.copied)
        return self.copied, bandwidth.seconds(Link.HOST_TO_DEVICE, pages * engine.page_bytes)

    def last_link(self) -> Link | None:
        """The link that loads the last page and the anchor; None if the last page is in no tier."""
        last = self.pointer.units - 1
        return next((LINK_OF[tier] for source, tier in self.sources if last in source), None)

    def remaining_span(self) -> Span:
        """The pages from the prefill cursor to the end."""
        return Span(self.pointer.front, self.pointer.units)

    def link_pages(self, span: Span) -> dict[Link, int]:
        """Number of pages of `span` that could still be loaded, by link."""
        pages: dict[Link, int] = {}
        for source, tier in self.sources:
            low, high = max(source.start, span.start), min(source.stop, span.stop)
            if low < high:
                pages[LINK_OF[tier]] = pages.get(LINK_OF[tier], 0) + self.pointer.free_in(
                    Span(low, high)
                )
        return pages


class Restorations:
    """All restorations from their start to their end, and the learned costs. `profile` is from an
    earlier run, and each part may be missing: `links`, bytes per second by link name; `prefill`,
    the coefficients of a PrefillCost; `restore`, the `own_s` of a FixedOverhead.
    """

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        profile: Mapping[str, Mapping[str, float]],
        rules: Rules,
    ) -> None:
        prefill = profile.get("prefill")
        self.config = config
        self.rules = rules
        self.engine = engine
        self.profiled = prefill is not None
        self.cost = CostModel(PrefillCost(**prefill) if prefill else GUESS)
        self.bandwidth = Bandwidth(
            {Link(name): float(rate) for name, rate in profile.get("links", {}).items()}
        )
        self.overhead = FixedOverhead(
            float(profile.get("restore", {}).get("own_s", guess_s(engine)))
        )
        self.links = LinkQueues(self.bandwidth, engine.page_bytes)
        self.items: dict[str, Restoration] = {}
        """By request id, in the order they were offered."""
        self.complete: dict[str, Compute] = {}
        """Restorations that only have to attach loaded pages, with their Compute command."""
        self.readers: dict[Link, int] = {}
        """Number of restorations that could load pages over each link."""
        self.busy_until = 0.0
        """When the running chunks should be done, in seconds of the executor's clock."""
        self.stalled_s = 0.0
        """Seconds of restorations' chunks since running requests last decoded."""
        self._chunked = False
        self._running: list[tuple[str, int]] = []
        self._observers: dict[type, Callable[[Any], None]] = {
            TransferDone: self._transferred,
            PagesLost: self._lost,
            ChunkStarted: self._chunk_started,
            ChunkDone: self._chunk_done,
            RequestFinished: self._finished,
            PolicyChanged: self._configured,
        }

    def observe(self, fact: Fact) -> None:
        """Records a fact. Facts about unknown requests change nothing but the learned estimates."""
        observer = self._observers.get(type(fact))
        if observer is not None:
            observer(fact)

    def next_step(self, view: StepView) -> None:
        """A new step is decided. If the last one had no chunk, or a mixed one, running requests
        decoded in it.
        """
        if not self._chunked or view.mixed:
            self.stalled_s = 0.0
        self._chunked = False
        for item in self.items.values():
            if item.predicted_end >= 0 and not _alone(item, view):
                item.predicted_end = -1.0

    def begin(self, item: Restoration) -> None:
        """Begins a restoration."""
        if self.items:
            for other in (item, *self.items.values()):
                other.predicted_end = -1.0
        self.items[item.rid] = item
        for link in item.unread:
            self.readers[link] = self.readers.get(link, 0) + 1

    def give_up(self) -> None:
        """Ends all restorations, and forgets all transfers and chunks."""
        self.items.clear()
        self.complete.clear()
        self.readers.clear()
        self.links.clear()
        self._running.clear()
        self.busy_until = 0.0

    def longest_chunk_s(self, view: StepView) -> float:
        """The most seconds that a restoration's chunk may take, for the sake of requests that
        decode; 0: as long as it likes.
        """
        stall_s = self.config.max_stall_ms / 1000
        if not stall_s or not view.decoding:
            return 0.0
        return max(stall_s * (1 if view.mixes else _ALONE), self.cost.cost.fixed_s / _FIXED_SHARE)

    def cost_beside(self, view: StepView) -> PrefillCost:
        """The cost of compute in chunks of that length. Their fixed cost is spread over tokens."""
        cost, longest_s = self.cost.cost, self.longest_chunk_s(view)
        if not longest_s:
            return cost
        longer = longest_s / (longest_s - cost.fixed_s)
        return PrefillCost(0.0, cost.per_token_s * longer, cost.per_token_position_s * longer)

    @property
    def costs_known(self) -> bool:
        """Whether the cost of compute was measured, here or in an earlier run."""
        return self.profiled or self.cost.seen > 0

    # --- facts ------------------------------------------------------------------------------------

    def _configured(self, fact: PolicyChanged) -> None:
        self.config = fact.config

    def _transferred(self, fact: TransferDone) -> None:
        self.bandwidth.saw(fact.link, fact.nbytes, fact.seconds)
        self._settle(fact.rid, fact.link, fact.span, fact.now)
        item = self.items.get(fact.rid)
        if item is None or not item.pointer.land(fact.span):
            return
        run = item.pointer.landed_run()
        if run.stop == item.pointer.units:
            self.complete[fact.rid] = Compute(fact.rid, run, None)

    def _lost(self, fact: PagesLost) -> None:
        for link in Link:
            self._settle(fact.rid, link, fact.span, fact.now)
        item = self.items.get(fact.rid)
        if item is None:
            return
        if fact.reason in (CANCELLED, NO_ROOM_YET):
            if fact.reason == NO_ROOM_YET:
                item.predicted_end = -1.0
            if item.pointer.give_back(fact.span):
                item.cancelled = 0
                for link in item.opened(fact.span):
                    self.readers[link] = self.readers.get(link, 0) + 1
        elif item.pointer.lose(fact.span):
            item.predicted_end = -1.0
            if item.mode is Mode.LOAD:
                item.mode = Mode.BOTH

    def _settle(self, rid: str, link: Link, span: Span, now: float) -> None:
        pages = self.links.ended(link, rid, span, now)
        if pages and (item := self.items.get(rid)):
            item.in_flight[link] = item.in_flight.get(link, 0) - pages

    def _chunk_started(self, fact: ChunkStarted) -> None:
        seconds = self.cost.cost.chunk_seconds(fact.tokens.start, len(fact.tokens))
        begin = max(fact.now, self.busy_until)
        self.busy_until = begin + seconds
        self._running.append((fact.rid, fact.tokens.stop))
        item = self.items.get(fact.rid)
        if item is None:
            return
        self.stalled_s += seconds
        self._chunked = True
        page = self.engine.page_tokens
        pointer = item.pointer
        start = min(fact.tokens.start // page, pointer.units)
        # A page in which a chunk ends is computed as a whole.
        stop = min(-(-fact.tokens.stop // page), pointer.units)
        if start > pointer.front:
            pointer.attach(Span(pointer.front, start))
        claimed = pointer.take_front(stop - pointer.front)
        if claimed.stop < stop:
            raise ValueError(
                f"{fact.rid}: pages up to {stop} are computed, but a transfer has taken page "
                f"{claimed.stop}"
            )
        item.yields = 0
        if pointer.met:
            if item.predicted_end >= 0 and fact.tokens.start >= pointer.units * page:
                self.overhead.saw(begin - item.predicted_end)
            self._forget(fact.rid)
        elif fact.rid in self.complete:
            self.complete[fact.rid] = Compute(fact.rid, pointer.landed_run(), None)

    def _chunk_done(self, fact: ChunkDone) -> None:
        # Less than a page activates few experts, so its time says nothing of the fixed cost of a
        # chunk.
        if not fact.shared_tokens and len(fact.tokens) >= self.engine.page_tokens:
            self.cost.saw(fact.tokens.start, len(fact.tokens), fact.seconds)
        if (fact.rid, fact.tokens.stop) in self._running:
            self._running.remove((fact.rid, fact.tokens.stop))
        if not self._running:
            self.busy_until = fact.now

    def _finished(self, fact: RequestFinished) -> None:
        self._forget(fact.rid)
        self._running = [running for running in self._running if running[0] != fact.rid]
        if not self._running:
            self.busy_until = min(self.busy_until, fact.now)

    def _forget(self, rid: str) -> None:
        item = self.items.pop(rid, None)
        if item is None:
            return
        self.complete.pop(rid, None)
        for link in item.unread:
            self.readers[link] -= 1


def _alone(item: Restoration, view: StepView) -> bool:
    """Whether nothing else runs, waits or is in the slot."""
    return (
        not view.decoding
        and all(rid == item.rid for rid in view.waiting)
        and (view.slot == item.rid or (view.slot is None and view.slot_open))
    )


def in_run_order(state: Restorations, view: StepView) -> Iterator[Restoration]:
    """The restoration in the slot, then those of waiting requests in queue order, then all others
    in the order they were offered.
    """
    seen = {}
    for rid in (view.slot, *view.waiting):
        item = state.items.get(rid) if rid is not None else None
        if item is not None and rid not in seen:
            seen[rid] = True
            yield item
    if len(seen) < len(state.items):
        yield from [item for rid, item in state.items.items() if rid not in seen]
