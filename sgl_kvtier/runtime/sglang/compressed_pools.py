"""Access to DeepSeek V4's pools. Its KV pool only numbers pages. Their bytes are in side pools, a
page in one row of each layer: compressed latents and their index keys under the numbers of the KV
pages, the states of the compressors under those of the windows' pages. Any thread.
"""

from __future__ import annotations

from typing import Any

PREFIX = "deepseek_v4_"
"""Prefix of SGLang's names of these pools."""
AT_PAGES = tuple(PREFIX + name for name in ("c4", "c4_indexer", "c128"))
"""Pools that share the page numbers of the KV pool."""
AT_WINDOWS = tuple(PREFIX + name for name in ("c4_state", "c4_indexer_state"))
"""Pools that share the page numbers of the windows."""


def is_known(spec: Any, host: Any, page_tokens: int) -> bool:
    """Whether SGLang's description of a side pool, and its host pool, match a pool named above."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName
    from sglang.srt.mem_cache.memory_pool_host import (
        DeepSeekV4PagedHostPool,
        DeepSeekV4StateHostPool,
    )

    kind, source, policy = (
        (DeepSeekV4StateHostPool, PoolName.SWA, PoolHitPolicy.TRAILING_PAGES)
        if str(spec.pool_name) in AT_WINDOWS
        else (DeepSeekV4PagedHostPool, PoolName.KV, PoolHitPolicy.ALL_PAGES)
    )
    return (
        str(spec.pool_name) in (*AT_PAGES, *AT_WINDOWS)
        and type(host) is kind
        and (spec.indices_from_pool, spec.hit_policy) == (source, policy)
        and host.page_size == page_tokens
    )


def has_page_rows(host: Any) -> bool:
    """Whether a page of this host pool is one row of each layer."""
    from sglang.srt.mem_cache.memory_pool_host import (
        DeepSeekV4PagedHostPool,
        DeepSeekV4StateHostPool,
    )

    return isinstance(host, (DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool))


def device_rows(host: Any) -> list[Any]:
    """The device tensors [page, byte] of such a host pool by layer, a draft's layers last."""
    views = getattr(host, "device_page_views", None)
    return list(host.device_buffers if views is None else views)


def page_bytes(host: Any, tokens: int) -> int:
    """Bytes of a page of `tokens` tokens in all layers of any host pool."""
    if has_page_rows(host):
        return int(host.layer_num * host.size_per_token)  # here the bytes of a row
    return int(host.size_per_token * tokens)
