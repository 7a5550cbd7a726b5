"""Bytes obey the link: a block that is not in HBM at its request's turn in a step crosses it.

That is the most a paging policy could get. Attention takes the batch request by request, so a block
that was just used may make room for the next. A block has a copy in DRAM from the start, so
evicting it costs nothing. Fetches by lookahead overlap with the whole step's computing. The
product's TierMap, rules and Prefetcher decide which blocks stay and which are fetched ahead. Pages
here are runs of 1024 tokens, since the blocks of such a run fare alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.papers.tierkv.load import Request
from sgl_kvtier.lab.papers.tierkv.machine import Batch, Paging, Running, Server
from sgl_kvtier.lab.rules import LFU, TierKV
from sgl_kvtier.policy.ahead.prefetch import Prefetcher
from sgl_kvtier.policy.ahead.turns import Turn
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.pages.eviction import LRU, NextUse, Rule
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.types import Link, PageKey, Tier

_PAGE_TOKENS = 1024
_WAVES = 8
"""Parts of HBM: a step takes the batch in parts of at most an eighth of it. So there is room to
fetch the next part ahead.
"""
_STALE, _STALE_IN_HBM = 0.1, 0.3
"""The share of the batch that has come or gone since the last walk before a step is walked again.
Until then the walk's hits hold. The second value applies while all of the batch is in HBM.
"""
_RULES: dict[str, Callable[[], Rule]] = {
    "LRU": LRU,
    "Freq": LFU,
    "Attn-Pref.": LRU,
    "Prefetch": NextUse,
}
_EMA_KEEP = 0.5
"""Attn-Prefetch expects a request whose average of recent uses, one per step, is at least this."""


@dataclass(frozen=True, slots=True)
class _Walk:
    """The needs of one step through the whole batch, in tokens."""

    tokens: int
    demand: int
    ahead: int
    wasted_share: float
    """Share of the tokens fetched ahead since the last walk that left HBM before they were used."""


class HonestPager:
    """Pages with the rule of a policy. Where the policy looks ahead, it guesses what the next part
    needs.
    """

    def __init__(self, server: Server, policy: str, lookahead_steps: int = 1) -> None:
        self._server = server
        self._pages = max(_WAVES, server.hbm_tokens // _PAGE_TOKENS)
        self._map = TierMap(1 << 16, _RULES[policy](), LRU())
        # Algorithm 1 tests block by block, so a page counts as one of its blocks there.
        self._prefetcher = (
            _prefetcher(server, self._map, lookahead_steps) if policy == "Prefetch" else None
        )
        self._guesses: dict[int, float] | None = {} if policy == "Attn-Pref." else None
        self._keys: dict[int, tuple[PageKey, ...]] = {}
        self._changed = 0
        self._walk: _Walk | None = None

    def admits(self, request: Request, batch: Batch) -> bool:
        """Admits every request, up to the largest batch."""
        del request, batch
        return True

    def started(self, request: Request, batch: Batch) -> None:
        """Its context was just computed, so it comes in through HBM."""
        del request, batch
        self._changed += 1

    def ended(self, running: Running, batch: Batch) -> None:
        """Its pages are of no use to anyone."""
        rid = running.request.rid
        keys = self._keys.pop(rid, ())
        self._drop(keys, float(batch.step))
        self._map.dropped(keys, Tier.HOST)
        self._map.release(str(rid))
        if self._guesses is not None:
            self._guesses.pop(rid, None)
        self._changed += 1

    def step(self, batch: Batch, compute_s: float) -> Paging:
        """The bytes of the next step."""
        walk = self._walk
        overflows = batch.tokens > self._server.hbm_tokens
        stale = self._changed > (_STALE if overflows else _STALE_IN_HBM) * len(batch)
        if walk is None or stale or overflows != (walk.tokens > self._server.hbm_tokens):
            walk = self._walk = self._through(batch, compute_s)
            self._changed = 0
        missing = walk.demand + walk.ahead
        if not missing or not overflows:
            return Paging()
        # What was in HBM stays so; all that the batch has grown by since has to cross the link.
        now_missing = min(batch.tokens, missing + batch.tokens - walk.tokens)
        scale = max(0.0, now_missing / missing) * self._server.kv_bytes_per_token
        return Paging(
            demand_bytes=walk.demand * scale,
            ahead_bytes=walk.ahead * scale,
            wasted_bytes=walk.ahead * scale * walk.wasted_share,
            hit_share=1 - now_missing / batch.tokens,
        )

    def _through(self, batch: Batch, compute_s: float) -> _Walk:
        """Takes the batch part by part, as the next step will."""
        now = float(batch.step)
        demand = ahead = 0
        wasted_before = self._prefetcher.brought.wasted if self._prefetcher else 0
        waves = list(self._waves(batch, now))
        for place, wave in enumerate(waves):
            keys = [key for rid in wave for key in self._keys[rid]]
            self._map.pin(keys)
            demand += self._fetch(wave, now, len(keys))
            self._map.used(keys, now)
            self._map.unpin(keys)
            self._learn(wave)
            for rid in wave:
                self._map.expect(str(rid), now + 1 + place / len(waves))
            if len(waves) > 1:
                # After the last part comes the first one of the next step.
                coming = waves[(place + 1) % len(waves)]
                ahead += self._look_ahead(coming, now, now + (place + 1) / len(waves), compute_s)
        # Pages stand for tokens on average; the walk's shares are applied to the true count.
        pages = max(1, sum(len(keys) for keys in self._keys.values()))
        overflow = batch.tokens > self._server.hbm_tokens
        per_page = batch.tokens / pages if overflow else 0.0
        wasted = self._prefetcher.brought.wasted - wasted_before if self._prefetcher else 0
        return _Walk(
            batch.tokens,
            round(demand * per_page),
            round(ahead * per_page),
            wasted / ahead if ahead else 0.0,
        )

    def _waves(self, batch: Batch, now: float) -> Iterator[list[int]]:
        most = max(1, self._pages // _WAVES)
        wave: list[int] = []
        held = 0
        for rid, running in batch.running.items():
            pages = self._grow(rid, max(1, round(running.tokens(batch.step) / _PAGE_TOKENS)), now)
            if wave and held + pages > most:
                yield wave
                wave, held = [], 0
            wave.append(rid)
            held += pages
        if wave:
            yield wave

    def _grow(self, rid: int, pages: int, now: float) -> int:
        """Gives a request the pages it has filled by now: written in HBM, copied to DRAM."""
        have = self._keys.get(rid, ())
        if pages > len(have):
            fresh = tuple(PageKey(b"%d:%d" % (rid, page)) for page in range(len(have), pages))
            self._keys[rid] = have + fresh
            self._room_for(len(fresh), now)
            self._map.placed(fresh, Tier.HOST, now)
            self._map.placed(fresh, Tier.DEVICE, now)
            self._map.claim(str(rid), self._keys[rid], now)
        return len(self._keys[rid])

    def _fetch(self, wave: Sequence[int], now: float, pages: int) -> int:
        """Brings in what the wave lacks, all of it pinned; returns how many pages that were."""
        lacking = self._lacking(wave)
        if lacking:
            self._room_for(len(lacking), now)
            self._map.placed(lacking, Tier.DEVICE, now)
        assert len(lacking) <= pages
        return len(lacking)

    def _lacking(self, rids: Sequence[int]) -> list[PageKey]:
        return [
            key
            for rid in rids
            for span, _ in self._map.missing(str(rid)).runs
            for key in self._keys[rid][span.start : span.stop]
        ]

    def _room_for(self, pages: int, now: float) -> None:
        over = self._map.count(Tier.DEVICE) + pages - self._pages
        if over > 0:
            self._drop(self._map.victims(Tier.DEVICE, over), now)

    def _drop(self, keys: Sequence[PageKey], now: float) -> None:
        self._map.dropped(keys, Tier.DEVICE)
        if self._prefetcher is not None:
            self._prefetcher.dropped(keys, Tier.DEVICE, now)

    def _look_ahead(self, wave: Sequence[int], now: float, at: float, compute_s: float) -> int:
        if self._guesses is not None:
            expected = [rid for rid in wave if self._guesses.get(rid, 0.0) >= _EMA_KEEP]
            return self._fetch(expected, now, self._pages)
        if self._prefetcher is None:
            return 0
        turns = [Turn(str(rid), str(rid), 1, at - now) for rid in wave]
        plan = self._prefetcher.plan(now, turns, {Tier.DEVICE: self._pages}, compute_s)
        for evict in plan.evictions:
            self._drop(evict.keys, now)
        for move in plan.moves:
            self._map.placed(move.keys, Tier.DEVICE, now)
            self._prefetcher.placed(move.keys, Tier.DEVICE, now)
        return sum(len(move.keys) for move in plan.moves)

    def _learn(self, wave: Sequence[int]) -> None:
        if self._guesses is not None:
            for rid in wave:
                self._guesses[rid] = self._guesses.get(rid, 0.0) * _EMA_KEEP + (1 - _EMA_KEEP)
        if self._prefetcher is not None:
            for rid in wave:
                self._prefetcher.started(str(rid), self._keys[rid])


def _prefetcher(server: Server, tier_map: TierMap, steps: int) -> Prefetcher:
    """Algorithm 1 with K = `steps`: the product's prefetcher with the paper's rule."""
    rules = TierKV(lookahead=steps, lookahead_ssd=steps, scheduling_slack_s=server.schedule_s)
    speed = Bandwidth(
        {Link.HOST_TO_DEVICE: server.link_bytes_per_s}, {Link.HOST_TO_DEVICE: server.link_latency_s}
    )
    return Prefetcher(PolicyConfig(prefetch="on"), tier_map, speed, server.block_bytes, rules)
