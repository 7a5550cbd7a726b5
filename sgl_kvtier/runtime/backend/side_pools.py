"""Side pools of hybrid models (window or state pages), stored under the keys of the KV pages: the
prefix that they leave usable, and their transfers. Threads as in `storage.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransferResult

from sgl_kvtier.runtime.backend.host_pages import bytes_of, is_page_contiguous, parts_of
from sgl_kvtier.store.base import KV

logger = logging.getLogger(__name__)

_BLOCK_GROUPS = getattr(PoolHitPolicy, "BLOCK_GROUPS", None)  # SGLang has it from 0.5.22 on

Has = Callable[[Sequence[str], str], list[bool]]
"""Whether each page of the pool with this name is stored."""
Move = Callable[[Sequence[str], Sequence[Sequence[memoryview]], str], list[bool]]
"""Reads or stores pages of a pool; returns for each page whether that was done."""


def leading(have: Sequence[bool]) -> int:
    """How many entries, from the first on, are True without a gap."""
    for count, there in enumerate(have):
        if not there:
            return count
    return len(have)


def usable_prefix(keys: list[str], transfers: Sequence[Any], has: Has) -> PoolTransferResult:
    """The usable prefix if side pools must be stored too, by each pool's rule."""
    kv_pages = leading(has(keys, KV))
    hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
    restorable = list(range(1, kv_pages + 1))
    for transfer in transfers:
        if not restorable or transfer.hit_policy == _BLOCK_GROUPS:
            # block groups never limit the hit; SGLang ignores a pool without a verdict
            continue
        have = has(keys[:kv_pages], str(transfer.name))
        window = 0
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            window = max(1, len(transfer.keys or ()))
        fits = _restorable(have, window)
        if fits:
            hits[transfer.name] = max(fits)
        restorable = [pages for pages in restorable if pages in fits]
    return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)


def read_pages(
    transfers: Sequence[Any], pools: Mapping[str, Any], read: Move
) -> dict[str, list[bool]]:
    """Reads the pages of side pools into their host slots."""

    def into(name: str, pool: Any, keys: list[str], slots: torch.Tensor) -> list[bool]:
        pages = [pool.get_dummy_flat_data_page() for _ in keys]
        done = read(keys, [[bytes_of(page)] for page in pages], name)
        for i, ok in enumerate(done):
            if ok:
                pool.set_from_flat_data_page(slots[i * _per_page(pool)].item(), pages[i])
        return done

    return {one.name: _moved(one, pools, read, into) for one in transfers}


def write_pages(
    transfers: Sequence[Any], pools: Mapping[str, Any], write: Move
) -> dict[str, list[bool]]:
    """Writes the pages of side pools from their host slots."""

    def out_of(name: str, pool: Any, keys: list[str], slots: torch.Tensor) -> list[bool]:
        pages = [
            pool.get_data_page(slots[i * _per_page(pool)].item(), flat=True).contiguous()
            for i in range(len(keys))
        ]
        return write(keys, [[bytes_of(page)] for page in pages], name)

    return {one.name: _moved(one, pools, write, out_of) for one in transfers}


def _moved(
    transfer: Any,
    pools: Mapping[str, Any],
    move: Move,
    copied: Callable[[str, Any, list[str], torch.Tensor], list[bool]],
) -> list[bool]:
    """Runs one pool's transfer, in place if its pages allow it. A transfer whose slots do not match
    its keys moves nothing.
    """
    name, keys, slots = str(transfer.name), transfer.keys or [], transfer.host_indices
    pool = pools.get(name)
    if pool is None or slots is None or slots.numel() != len(keys) * _per_page(pool):
        logger.error(
            "kvtier: pool %s: %d keys do not fit its slots; nothing moved", name, len(keys)
        )
        return [False] * len(keys)
    if is_page_contiguous(pool) and hasattr(pool, "get_page_buffer_meta"):
        return move(keys, parts_of(pool, len(keys), slots), name)
    return copied(name, pool, keys, slots)


def _per_page(pool: Any) -> int:
    return getattr(pool, "page_size", 1) or 1


def _restorable(have: Sequence[bool], window: int) -> list[int]:
    """Prefix lengths for which a pool has enough: all pages (window 0), or the last `window`."""
    if window == 0:
        return list(range(1, leading(have) + 1))
    return [n for n in range(1, len(have) + 1) if all(have[max(0, n - window) : n])]
