"""Restoration decided request by request: where the two pointers should meet, and whether to split
at all.

All predictions are seconds from now. Compute of a request can begin `compute_at_s` from now, and
each link has a backlog; the best meeting page is where both ends are predicted to finish together
(CacheFlow Eq. 1 with a cost curve instead of a constant rate, so that it reaches T_opt and not only
T* = Tc Tl / (Tc + Tl)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.policy.restore.meeting import Pace, Split, best_split, open_of
from sgl_kvtier.policy.restore.two_pointer import TwoPointer
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

LINK_OF: Final[Mapping[Tier, Link]] = {
    Tier.DRAM: Link.DRAM_TO_HBM,
    Tier.SSD: Link.SSD_TO_HBM,
    Tier.REMOTE: Link.SSD_TO_HBM,
}
"""The link a restoration loads over, by where the page lies."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What distinguishes our rule from the papers'."""

    balanced_chunks: bool
    """Chunks are cut so that both ends meet together; otherwise whole chunks as long as the next
    one is not taken.
    """
    fallback: bool
    """One resource alone where splitting would lose; otherwise always both."""
    io_order: str


RULES: Final[Mapping[str, Rule]] = {
    "kvtier": Rule(balanced_chunks=True, fallback=True, io_order="arrival"),
    "cake": Rule(balanced_chunks=False, fallback=False, io_order="arrival"),
    "cacheflow": Rule(balanced_chunks=False, fallback=False, io_order="longest"),
}


def rule_of(config: PolicyConfig) -> Rule:
    """The rule a configuration asks for."""
    rule = RULES[config.rule]
    if config.io_order == "auto":
        return rule
    return Rule(rule.balanced_chunks, rule.fallback, config.io_order)


def fixed_share(config: PolicyConfig) -> float | None:
    """The share of every prefix that the settings have computed, whatever happens; None where it is
    decided on the way.
    """
    return config.fixed_split if config.restore == "both" and config.fixed_split >= 0 else None


@dataclass(slots=True)
class Restoration:
    """One request's restoration as the planner sees it. Pages; `order` is the place of its offer
    among all offers.
    """

    rid: str
    order: int
    prompt_tokens: int
    pointer: TwoPointer
    sources: tuple[tuple[Span, Tier], ...]
    mode: Mode = Mode.BOTH
    yields: int = 0
    cancelled: int = 0
    """Loads below this page were asked back, and it is not known yet which of them were not begun.
    """
    in_flight: dict[Link, int] = field(default_factory=dict)
    """Pages under way, by link."""
    unread: dict[Link, None] = field(default_factory=dict)
    """Links over which pages of it could still be asked for."""
    by_link: tuple[tuple[Link, tuple[Span, ...]], ...] = ()
    """The sources again, by link."""
    meet: int = -1
    """Where its ends were to meet when last looked for."""
    charged_meet: int = -1
    """The same with compute charged for those that wait behind it."""
    copied: int = 0
    """Pages below this one are not computed but copied from DRAM, since that is sooner; but for
    those that fail to come.
    """
    stuck_since: float = -1.0
    """When it first waited for a slot with nothing under way, without having had anything since;
    -1: it does not.
    """
    fixed_meet: int = -1
    """Compute takes all below this page, loads all others, whatever happens; -1: as it is predicted
    best on the way.
    """

    def __post_init__(self) -> None:
        self.unread = {LINK_OF[tier]: None for _, tier in self.sources}
        self.by_link = tuple(
            (link, tuple(span for span, tier in self.sources if LINK_OF[tier] is link))
            for link in self.unread
        )

    def read_out(self, link: Link) -> bool:
        """Notes a link as used up when nothing is left to ask of it; True when it was noted now."""
        for other, spans in self.by_link:
            if other is link and any(map(self.pointer.free_in, spans)):
                return False
        del self.unread[link]
        return True

    def opened(self, span: Span) -> list[Link]:
        """Notes that pages can be asked for again; the links that had been used up until now."""
        links = [
            LINK_OF[tier]
            for source, tier in self.sources
            if source.start < span.stop and span.start < source.stop
        ]
        new = [link for link in dict.fromkeys(links) if link not in self.unread]
        self.unread.update(dict.fromkeys(new))
        return new

    def behind_copies(
        self, front: int, bandwidth: Bandwidth, engine: EngineShape
    ) -> tuple[int, float]:
        """The first page from `front` on that is not copied from DRAM anyway, and the seconds until
        those are there.
        """
        if front >= self.copied:
            return front, 0.0
        runs = self.pointer.unlanded_runs(front)
        pages = sum(min(stop, self.copied) - start for start, stop in runs if start < self.copied)
        return self.copied, bandwidth.seconds(Link.DRAM_TO_HBM, pages * engine.page_bytes)

    def remaining_span(self, start: int | None = None) -> Span:
        """From the front, or from a page the front is about to step to, to the end."""
        return Span(self.pointer.front if start is None else start, self.pointer.units)

    def link_pages(self, span: Span) -> dict[Link, int]:
        """Pages of `span` that could still be loaded, by link."""
        pages: dict[Link, int] = {}
        for source, tier in self.sources:
            low, high = max(source.start, span.start), min(source.stop, span.stop)
            if low < high:
                pages[LINK_OF[tier]] = pages.get(LINK_OF[tier], 0) + self.pointer.free_in(
                    Span(low, high)
                )
        return pages


class Forecast:
    """Predicted finish times of one restoration, from the learned costs and the state of links and
    compute.
    """

    def __init__(
        self,
        engine: EngineShape,
        cost: PrefillCost,
        bandwidth: Bandwidth,
        compute_at_s: float,
        backlog_s: Mapping[Link, float],
    ) -> None:
        self._engine = engine
        self._cost = cost
        self._bandwidth = bandwidth
        self._compute_at_s = compute_at_s
        self._backlog_s = backlog_s
        self._pace = Pace(
            engine.page_tokens, engine.page_bytes, engine.chunk_tokens, cost, bandwidth, backlog_s
        )

    def compute_seconds(self, start_page: int, pages: int) -> float:
        """Until `pages` open pages from `start_page` on are computed."""
        tokens = pages * self._engine.page_tokens
        start = start_page * self._engine.page_tokens
        return self._compute_at_s + self._cost.range_seconds(
            start, tokens, self._engine.chunk_tokens
        )

    def compute_only(self, item: Restoration) -> float:
        """Computing all that is open."""
        span = item.remaining_span()
        return self.compute_seconds(
            span.start, item.pointer.free_in(span) + item.pointer.lost_in(span)
        )

    def load_only(self, item: Restoration) -> float:
        """Loading all that is open, behind what its links have to do; what other links do is
        nothing to it.
        """
        end = 0.0
        for link, pages in item.link_pages(item.remaining_span()).items():
            if pages or item.in_flight.get(link):
                seconds = self._bandwidth.seconds(link, pages * self._engine.page_bytes)
                end = max(end, self._backlog_s.get(link, 0.0) + seconds)
        return end

    def both(self, item: Restoration) -> Split:
        """The best meeting page."""
        front, copied_s = item.behind_copies(item.pointer.front, self._bandwidth, self._engine)
        left = open_of(self._pace, item.pointer, item.by_link, front, item.in_flight)
        split = best_split(self._pace, self._compute_at_s + copied_s, left, front)
        return Split(split.meet, split.compute_tokens, max(split.seconds, copied_s))

    def copies_first(self, item: Restoration) -> int:
        """Where the pages end that lie in DRAM at the front and are copied sooner than computed;
        its start otherwise.
        """
        source, tier = item.sources[0] if item.sources else (Span(0, 0), Tier.SSD)
        start = item.pointer.front
        if tier is not Tier.DRAM or source.start != start:
            return start
        copied_s = self._bandwidth.seconds(Link.DRAM_TO_HBM, len(source) * self._engine.page_bytes)
        return (
            source.stop
            if copied_s < self.compute_seconds(start, len(source)) - self._compute_at_s
            else start
        )


_OWN_COST_S: Final = 0.02
"""A restoration has to save this much over an engine's own load: in a server on a CPU it ended 20
ms or more above the best split (docs/results/restore.md), and with less than this it lost at fast
links.
"""


def choose_mode(
    forecast: Forecast, item: Restoration, config: PolicyConfig, known: bool
) -> tuple[Mode, str]:
    """One resource or both, with the reason. Unmeasured costs (`known` False) mean both: it adapts
    by itself.
    """
    if config.restore in ("both", "load", "compute"):
        return Mode(config.restore), "configured"
    if not rule_of(config).fallback:
        return Mode.BOTH, "rule"
    if not known:
        return Mode.BOTH, "not measured yet"
    compute_s, load_s = forecast.compute_only(item), forecast.load_only(item)
    if _split_wins(forecast, item, config, min(compute_s, load_s)):
        return Mode.BOTH, "split is faster"
    return (
        (Mode.LOAD, "loading is faster")
        if load_s <= compute_s
        else (Mode.COMPUTE, "computing is faster")
    )


def leave(
    forecast: Forecast,
    item: Restoration,
    config: PolicyConfig,
    known: bool,
    learns: bool = False,
    crowded: bool = False,
) -> str | None:
    """Why this prefix is not to be restored but left to an engine that can load by itself, or None.

    Such an engine copies what lies in DRAM in the step that admits the request, and reads the rest
    ahead into DRAM: where all is to be loaded anyway, it needs no HBM before the request's turn,
    and no step to splice pages in. What has to be won against is loading; computing all of it is no
    alternative for pages that lie in DRAM. `crowded`: HBM is short for what waits, so that loads
    into it would only push out what others are about to use. `learns`: what is not `known` will be
    after a load of the engine's own, so nothing has to be tried on this request.
    """
    if config.restore != "auto" or not rule_of(config).fallback:
        return None
    in_dram = all(tier is Tier.DRAM for _, tier in item.sources)
    if crowded:
        return "no room"
    if not known:
        return "host memory" if in_dram else "not measured yet" if learns else None
    compute_s, load_s = forecast.compute_only(item), forecast.load_only(item)
    if not in_dram and compute_s < load_s:
        return None
    if _split_wins(forecast, item, config, load_s - _OWN_COST_S):
        return None
    return "host memory" if in_dram else "loading is faster"


def _split_wins(
    forecast: Forecast, item: Restoration, config: PolicyConfig, single_s: float
) -> bool:
    """Whether both at once saves enough of what one resource alone takes: a share, and seconds."""
    return forecast.both(item).seconds <= min(
        single_s * (1 - config.split_margin), single_s - config.split_gain_s
    )


def chunk_tokens(split: Split, barrier_tokens: int, engine: EngineShape, rule: Rule) -> int:
    """Tokens of the next chunk: a multiple of the page, at most one engine chunk, up to the first
    page a load has taken.

    Balanced: the tokens compute is to take in all are cut into equal chunks, so that the last ends
    at the meeting.
    """
    page = engine.page_tokens
    whole = max(page, engine.chunk_tokens // page * page)
    if not rule.balanced_chunks:
        return min(whole, barrier_tokens)
    if split.compute_tokens <= 0:
        return 0
    chunks = math.ceil(split.compute_tokens / whole)
    return min(math.ceil(split.compute_tokens / chunks / page) * page, whole, barrier_tokens)


def layer_split(cost: PrefillCost, tokens: int, load_s: float, layers: int) -> tuple[int, float]:
    """Layer-wise restoration of one chunk: layers below the cut are computed, the rest loaded from
    the top down.

    Returns the cut and its seconds (CacheFlow section 3.1: one pass over all tokens, so a short
    prefix pays the fixed part of a chunk only in proportion to the layers it computes).
    """
    compute_s = cost.chunk_seconds(0, tokens)
    times = [
        max(cut / layers * compute_s, (layers - cut) / layers * load_s) for cut in range(layers + 1)
    ]
    cut = min(range(layers + 1), key=lambda place: (times[place], place))
    return cut, times[cut]


def token_split(
    cost: PrefillCost, tokens: int, load_s: float, chunk: int, unit: int
) -> tuple[int, float]:
    """Token-wise restoration in units of `unit` tokens: how many tokens to compute, and the seconds
    it takes.
    """

    def seconds(computed: int) -> float:
        return max(cost.range_seconds(0, computed, chunk), load_s * (tokens - computed) / tokens)

    places = [*range(0, tokens, unit), tokens]
    best = min(places, key=lambda computed: (seconds(computed), computed))
    return best, seconds(best)


def crossover_tokens(
    cost: PrefillCost, seconds_per_token: float, layers: int, chunk: int, unit: int, longest: int
) -> int | None:
    """CacheFlow's L_delta: the shortest prefix, in steps of `unit`, from which splitting by tokens
    is no slower than by layers. None when there is none up to `longest`.
    """
    for tokens in range(unit, longest + 1, unit):
        load_s = tokens * seconds_per_token
        if (
            token_split(cost, tokens, load_s, chunk, unit)[1]
            <= layer_split(cost, tokens, load_s, layers)[1]
        ):
            return tokens
    return None
