"""Port to DeepSeek V4's pools. Its KV pool only numbers pages. Their bytes lie in pools beside it,
a page in one row of each layer: compressed latents and their index keys under the numbers of the
KV pages, the states of the compressors under those of the windows' pages. Any thread.
"""

from __future__ import annotations

from typing import Any

PREFIX = "deepseek_v4_"
"""What SGLang's names of these pools begin with."""
AT_PAGES = tuple(PREFIX + name for name in ("c4", "c4_indexer", "c128"))
"""Pools with the numbers of the KV pages."""
AT_WINDOWS = tuple(PREFIX + name for name in ("c4_state", "c4_indexer_state"))
"""Pools with the numbers of the windows' pages."""


def is_known(spec: Any, host: Any, page_tokens: int) -> bool:
    """Whether SGLang's description of a side pool, and its host pool, are those of a pool named
    above.
    """
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
    """By layer the device's tensors [page, byte] behind such a host pool, a draft's layers last."""
    views = getattr(host, "device_page_views", None)
    return list(host.device_buffers if views is None else views)


def page_bytes(host: Any, tokens: int) -> int:
    """Bytes of a page of so many tokens in all layers of any host pool."""
    if has_page_rows(host):
        return int(host.layer_num * host.size_per_token)  # which is SGLang's word for a row
    return int(host.size_per_token * tokens)
