"""The smallest hands there are: one request, one link, one engine, all in virtual time. Tests drive
planners with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import (
    CANCELLED,
    ChunkDone,
    ChunkStarted,
    Compute,
    Mode,
    PagesLost,
    RequestArrived,
    RequestFinished,
    RestoreOffered,
    StepView,
    TransferDone,
)
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Link, Span, Tier

ENGINE = EngineShape(page_tokens=16, page_bytes=16 * 16384, chunk_tokens=512)
COST = PrefillCost(fixed_s=0.02, per_token_s=1 / 3800, per_token_position_s=3.5e-8)
TICK_S = 0.001


@dataclass
class Outcome:
    """What happened to the one request; tokens and virtual seconds."""

    seconds: float = 0.0
    ended: bool = False
    """The prefix is there."""
    mode: Mode | None = None
    chunks: list[Span] = field(default_factory=list)
    spliced: list[Span] = field(default_factory=list)
    loads: list[Span] = field(default_factory=list)
    busy_s: dict[Link, float] = field(default_factory=dict)
    """Seconds that each link was busy."""
    cancels: list[Span] = field(default_factory=list)


def profile_of(
    cost: PrefillCost, bytes_per_second: float, remote_bytes_per_second: float | None = None
) -> dict:
    prefill = {
        "fixed_s": cost.fixed_s,
        "per_token_s": cost.per_token_s,
        "per_token_position_s": cost.per_token_position_s,
    }
    links = {Link.STORAGE_TO_DEVICE.value: bytes_per_second}
    if remote_bytes_per_second is not None:
        links[Link.REMOTE_TO_DEVICE.value] = remote_bytes_per_second
    return {"prefill": prefill, "links": links}


def balance(prefix: int, ratio: float = 1.0) -> float:
    """Bytes per second at which loading the prefix takes 1/ratio of the time of computing it."""
    nbytes = prefix * ENGINE.page_bytes / ENGINE.page_tokens
    return ratio * nbytes / COST.range_seconds(0, prefix, ENGINE.chunk_tokens)


def planner_of(bytes_per_second: float, rules: Rules | None = None, **settings: object) -> Planner:
    """A planner that knows the cost of computing and the storage's link."""
    config = PolicyConfig(**settings)  # type: ignore[arg-type]
    return make_planner(config, ENGINE, profile_of(COST, bytes_per_second), rules)


def stored(
    rid: str = "a",
    pages: int = 256,
    *spans: tuple[Span, Tier],
    now: float = 0.0,
    resident: int = 0,
    rest: int = 64,
    tier: Tier = Tier.STORAGE,
) -> RestoreOffered:
    """A prompt of so many pages and `rest` tokens more. All pages lie in `tier`, or in `spans`."""
    total = pages * ENGINE.page_tokens + rest
    return RestoreOffered(
        rid, now, total, resident, pages, spans or ((Span(resident, pages), tier),)
    )


def best_seconds(
    prefix: int, suffix: int, bytes_per_second: float, cost: PrefillCost = COST
) -> float:
    """T_opt: the best split on the cost curve, without any granularity but the page, then the
    suffix.
    """
    per_token_s = ENGINE.page_bytes / ENGINE.page_tokens / bytes_per_second
    meets = range(0, prefix + 1, ENGINE.page_tokens)
    ends = (
        max(cost.range_seconds(0, x, ENGINE.chunk_tokens), (prefix - x) * per_token_s)
        for x in meets
    )
    return min(ends) + cost.chunk_seconds(prefix, suffix)


def islands(span: Span, holes: frozenset[int]) -> list[Span]:
    """The pages of a span as runs without those in `holes`."""
    runs: list[Span] = []
    for page in range(span.start, span.stop):
        if page in holes:
            continue
        grows = runs and runs[-1].stop == page
        runs[-1:] = (
            [Span(runs[-1].start, page + 1)] if grows else [*runs[-1:], Span(page, page + 1)]
        )
    return runs


def restore(
    prefix: int,
    bytes_per_second: float,
    *,
    suffix: int = 64,
    config: PolicyConfig | None = None,
    rules: Rules | None = None,
    profile: dict | None = None,
    failing: frozenset[int] = frozenset(),
    holes: frozenset[int] = frozenset(),
    slow_after_s: float = float("inf"),
    slow_factor: float = 1.0,
    free_pages: int | None = None,
    lasts: Callable[[float, int], float] | None = None,
    planner: Planner | None = None,
    begin_s: float = 0.0,
    own_s: float = 0.0,
    decoding: int = 0,
    remote_from: int | None = None,
    remote_bytes_per_second: float = 0.0,
    anchor_pages: int = 0,
    anchor_bytes: int = 0,
) -> Outcome:
    """Runs one restoration to its end. Pages in `failing` are lost, those in `holes` are stored
    nowhere; after `slow_after_s` the link is slower by a factor, or `lasts` says how many seconds a
    transfer of so many bytes takes that begins then. `planner` goes on from `begin_s` on; the chunk
    behind the prefix begins `own_s` late, and requests decode beside. Pages from `remote_from` on
    come over a network of `remote_bytes_per_second`. With the last `anchor_pages` come
    `anchor_bytes` more.
    """
    planner = planner or make_planner(config or PolicyConfig(), ENGINE, profile, rules)
    pages, total, page = prefix // ENGINE.page_tokens, prefix + suffix, ENGINE.page_tokens
    planner.observe(RequestArrived("a", begin_s, total))
    local = pages if remote_from is None else remote_from
    halves = ((Span(0, local), Tier.STORAGE), (Span(local, pages), Tier.REMOTE))
    sources = tuple((span, tier) for half, tier in halves for span in islands(half, holes))
    rates = {
        Link.STORAGE_TO_DEVICE: bytes_per_second,
        Link.REMOTE_TO_DEVICE: remote_bytes_per_second,
    }
    planner.observe(
        RestoreOffered("a", begin_s, total, 0, pages, sources, anchor_pages, anchor_bytes)
    )
    first = pages - anchor_pages if anchor_pages else 0
    out, now, front, slot = Outcome(), begin_s, 0, None
    queue: list[tuple[float, float, Span, Link]] = []  # begun, ends, pages
    for _ in range(100_000):
        for entry in [entry for entry in queue if entry[1] <= now + 1e-12]:
            queue.remove(entry)
            begun, ends, span, link = entry
            if any(number in failing for number in range(span.start, span.stop)):
                planner.observe(PagesLost("a", span, "failed", now))
            else:
                nbytes = len(span) * ENGINE.page_bytes
                planner.observe(TransferDone("a", link, span, nbytes, ends - begun, now))
                out.busy_s[link] = out.busy_s.get(link, 0.0) + ends - begun
        free = {}
        if free_pages is not None:
            free = {Tier.DEVICE: free_pages - sum(len(entry[2]) for entry in queue)}
        view = StepView(now, () if slot else ("a",), slot, prefill_tokens=ENGINE.chunk_tokens)
        plan = planner.step(replace(view, decoding=decoding, free_pages=free))
        for start in plan.starts:
            out.mode = start.mode
        for cancel in plan.cancels:
            out.cancels.append(cancel.span)
            low, high = cancel.span.start, cancel.span.stop
            inside = [e for e in queue if low <= e[2].start and e[2].stop <= high]
            assert inside, f"no load lies within what is asked back, {cancel.span}"
            for entry in [e for e in inside if e[0] > now]:
                queue.remove(entry)
                planner.observe(PagesLost("a", entry[2], CANCELLED, now))
        for load in plan.loads:
            begun = max([now, *(entry[1] for entry in queue if entry[3] is load.link)])
            rate = rates[load.link] / (slow_factor if begun >= slow_after_s else 1.0)
            nbytes = len(load.span) * ENGINE.page_bytes
            if anchor_pages:
                anchored = max(0, load.span.stop - max(load.span.start, first))
                nbytes += anchor_bytes * anchored // anchor_pages
            ends = begun + (lasts(begun, nbytes) if lasts else nbytes / rate)
            queue.append((begun, ends, load.span, load.link))
            assert holes.isdisjoint(range(load.span.start, load.span.stop))
            out.loads.append(load.span)
        compute = plan.computes[0] if plan.computes else None
        if "a" not in planner.restoring:
            compute = Compute("a", Span(0, 0), None)
        if compute is None or compute.tokens == 0:
            assert queue, f"stuck at {now}: nothing is computed and nothing is in flight"
            now = max(now + TICK_S, min(entry[1] for entry in queue))
            continue
        if compute.splice:
            assert front >= first * page or compute.splice.stop == pages, "no window there"
            out.spliced.append(compute.splice)
            front = compute.splice.stop * page
        tokens = compute.tokens
        if tokens is None:
            tokens = min(ENGINE.chunk_tokens, total - front)
        slot, chunk = "a", Span(front, front + tokens)
        seconds = COST.chunk_seconds(front, tokens)
        now += own_s if front >= prefix and not out.ended else 0.0
        out.ended = out.ended or front >= prefix
        planner.observe(ChunkStarted("a", chunk, now))
        now += seconds + TICK_S
        planner.observe(ChunkDone("a", chunk, seconds, now))
        out.chunks.append(chunk)
        front = chunk.stop
        if front >= total:
            planner.observe(RequestFinished("a", now))
            out.seconds = now
            return out
    raise AssertionError("the restoration never ended")
