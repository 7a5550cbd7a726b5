"""Access to pools whose pages share the slots of the KV pages: a draft's keys and values, index
keys of sparse attention (DSA), and DeepSeek V4's compressed latents.

SGLang keeps each of them in a host pool of its own with the slot numbers of the KV pool, and calls
them side pools with the indices of another one. A page consists of its parts in all of them: it is
read, copied and counted as one. A server whose model has other side pools does not restore
(`foreign`). Scheduler's thread; `transfers` on any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from sgl_kvtier.runtime.sglang import anchors, compressed_pools, states, windows

if TYPE_CHECKING:
    import torch


def beside(controller: Any) -> list[Any]:
    """SGLang's entries of side pools that share the KV pages' slots, on a server that restores."""
    group = controller.mem_pool_host
    return [entry for entry in _entries(group) if entry is not group.anchor_entry]


def others(controller: Any) -> list[str]:
    """Names of all pools of a load except the KV pages', including those of windows or states."""
    group = controller.mem_pool_host
    entries = getattr(group, "entries", ())
    return [str(entry.name) for entry in entries if entry is not group.anchor_entry]


def has_anchors(controller: Any) -> bool:
    """Whether windows or a state may come with a load."""
    return bool(anchors.pools_in(others(controller)))


def has_windows(controller: Any) -> bool:
    """Whether windows may come with a load."""
    return windows.POOL in others(controller)


def has_states(controller: Any) -> bool:
    """Whether a state may come with a load."""
    return states.POOL in others(controller)


def _entries(group: Any) -> list[Any]:
    """A group's entries, without those of windows or states, which have slots of their own."""
    return [entry for entry in getattr(group, "entries", ()) if entry.name not in anchors.POOLS]


def page_bytes(group: Any, tokens: int) -> int:
    """Bytes of a page of so many tokens in all layers of a host pool, or of all pools of a group
    that share the KV pages' slots.
    """
    whole = getattr(group, "entries", None) is None
    pools = [group] if whole else [entry.host_pool for entry in _entries(group)]
    return sum(compressed_pools.page_bytes(pool, tokens) for pool in pools)


Slots: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Slots in host memory, and on the device."""


def transfers(
    controller: Any,
    host_slots: torch.Tensor,
    device_slots: torch.Tensor,
    window: Slots | None = None,
) -> list[Any]:
    """A load of these slots as SGLang describes it, one L2Transfer for each host pool and device
    pool: KV pages, layers of a draft in them, side pools, and the slots of windows or states.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    sides = [
        PoolTransfer(name=entry.name, host_indices=host_slots, device_indices=device_slots)
        for entry in beside(controller)
    ]
    if window is not None:
        pools = anchors.pools_in(others(controller))
        assert pools, "of a model with anchors"
        sides += [anchors.transfer(pool, *window) for pool in pools]
    described: list[Any] = controller._l2_load_transfers(
        host_slots, device_slots, *([sides] if sides else [])
    )
    return described


def has_unequal_widths(host: Any) -> bool:
    """Whether heads of K and V of a host pool have different widths, as in MiMo V2."""
    width = getattr(host, "head_dim", None)
    return bool(width != getattr(host, "v_head_dim", width))


def any_unequal_widths(controller: Any) -> bool:
    """The same for any host pool of a load, including that of windows."""
    entries = getattr(controller.mem_pool_host, "entries", ())
    return any(has_unequal_widths(entry.host_pool) for entry in entries)


def foreign(tree: Any) -> list[str]:
    """Names of this tree's side pools whose pages share the slots of neither KV pages nor windows,
    or are of an untested kind.
    """
    return [str(spec.pool_name) for spec in tree.sidecar_pool_specs if not _is_known(tree, spec)]


def _is_known(tree: Any, spec: Any) -> bool:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    group = tree.cache_controller.mem_pool_host
    keys_and_values = (MHATokenToKVPoolHost, MLATokenToKVPoolHost)
    kinds = {
        PoolName.DRAFT: keys_and_values,
        PoolName.DRAFT_INDEXER: (DSAIndexerPoolHost,),
        PoolName.INDEXER: (DSAIndexerPoolHost,),
    }
    host = group.entry_map[spec.pool_name].host_pool
    return (
        spec.indices_from_pool == PoolName.KV
        and spec.hit_policy == PoolHitPolicy.ALL_PAGES
        # Pools derived from these have more than rows, such as scales.
        and type(host) in kinds.get(spec.pool_name, ())
    ) or compressed_pools.is_known(spec, host, tree.page_size)


def registered_later(params: Any) -> set[str]:
    """Names of the pools that SGLang registers for a draft after it has built its cache with these
    parameters (`build_full_draft_pools` and `build_swa_draft_pools`). Releases before 0.5.23 do not
    announce them: a draft's pool comes too late there, and the server does not restore.
    """
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    names = set[str]()
    for draft in getattr(params, "sidecar_draft_device_pools", ()):
        if isinstance(draft, BaseSWAKVPool):
            names.add(str(PoolName.DRAFT_SWA))
            continue
        pool = getattr(draft, "full_kv_pool", draft)
        if pool.layer_num:
            names.add(str(PoolName.DRAFT))
            if isinstance(pool, DSATokenToKVPool) and pool.index_k_with_scale_buffer:
                names.add(str(PoolName.DRAFT_INDEXER))
    return names
