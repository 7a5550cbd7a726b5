"""How full each tier is over time, read from a server's /metrics while sessions are replayed."""

from __future__ import annotations

import asyncio
import time

from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.outside.client import Client, Metrics

PERIOD_S = 1.0
"""Seconds between two readings. One costs some ten milliseconds of the HTTP process, the same in
every arm.
"""


def occupancy(metrics: Metrics, before: Metrics, page_tokens: int) -> dict[str, float]:
    """Tokens in each tier: cached or in use on the device, in host memory, and in storage. A tier
    that is not there, or whose server counts nothing, is left out. SGLang's file backend counts
    what it has written, which it keeps.
    """
    found: dict[str, float | None] = {}
    used, evictable = (metrics.total(f"sglang:kv_{kind}_tokens") for kind in ("used", "evictable"))
    found["device"] = None if used is None else used + (evictable or 0.0)
    found["host"] = metrics.total("sglang:hicache_host_used_tokens")
    pages = metrics.total("kvtier:store_pages", tp_rank="0")
    written = metrics.total("sglang:backuped_tokens_total")
    if pages is not None:
        found["storage"] = pages * page_tokens
    elif written is not None:
        found["storage"] = written - (before.total("sglang:backuped_tokens_total") or 0.0)
    return {tier: tokens for tier, tokens in found.items() if tokens is not None}


async def watch(client: Client, one: Round, page_tokens: int, period_s: float = PERIOD_S) -> None:
    """Puts a reading into `one.occupancy` every period, until it is cancelled."""
    began = time.monotonic()
    while True:
        metrics = await client.metrics()
        one.occupancy.append(
            {"t_s": time.monotonic() - began, **occupancy(metrics, one.before, page_tokens)}
        )
        await asyncio.sleep(period_s)
