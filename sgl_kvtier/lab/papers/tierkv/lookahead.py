"""Algorithm 1 as TierKV's readings ask it: through the product's own Prefetcher, with the paper's
rule.
"""

from __future__ import annotations

from functools import lru_cache

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.papers.tierkv.machine import Server
from sgl_kvtier.lab.rules import TierKV
from sgl_kvtier.policy.ahead.prefetch import Prefetcher
from sgl_kvtier.policy.ahead.turns import Turn
from sgl_kvtier.policy.learned.bandwidth import Bandwidth
from sgl_kvtier.policy.pages.eviction import LRU, NextUse
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.types import Link, PageKey, Tier

_BLOCK = PageKey(b"block")
_OWNER = "request"


def paper_prefetcher(
    server: Server, tier_map: TierMap, page_bytes: int, bytes_per_s: float, steps: int
) -> Prefetcher:
    """The product's prefetcher set to the paper's rule with K = `steps`, on a link from DRAM of
    that speed.
    """
    rules = TierKV(lookahead=steps, lookahead_ssd=steps, scheduling_slack_s=server.schedule_s)
    speed = Bandwidth(
        {Link.HOST_TO_DEVICE: bytes_per_s}, {Link.HOST_TO_DEVICE: server.link_latency_s}
    )
    return Prefetcher(PolicyConfig(prefetch="on"), tier_map, speed, page_bytes, rules)


@lru_cache(maxsize=4096)
def brings_one_block(server: Server, bytes_per_s: float, iteration_s: float, steps: int) -> bool:
    """Would Algorithm 1 with K = `steps` fetch one block that lies in DRAM and is needed in the
    next iteration?
    """
    tier_map = TierMap(1, NextUse(), LRU())
    tier_map.placed((_BLOCK,), Tier.HOST, now=0.0)
    tier_map.claim(_OWNER, (_BLOCK,), next_use=iteration_s)
    prefetcher = paper_prefetcher(server, tier_map, server.block_bytes, bytes_per_s, steps)
    plan = prefetcher.plan(
        0.0, [Turn(_OWNER, _OWNER, 1, iteration_s)], {Tier.DEVICE: 1}, iteration_s
    )
    return bool(plan.moves)
