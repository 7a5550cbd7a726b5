"""Access to SGLang's pool of states: linear layers (Mamba, gated delta nets) keep one state per
request, and SGLang keeps the states after some pages, in slots of their own.

To continue after a prefix, a forward needs the state at its end. That state comes with the last
page of a restoration, and replaces the request's own when the pages are attached, as with pages
that SGLang's external linker has loaded. Scheduler's thread; what a copy needs is for any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

POOL = "mamba"
"""SGLang's name for these pools, in host memory and in storage."""

INTERVAL = 256
"""SGLang's default of `--mamba-track-interval`."""

_A_REQUEST = 4
"""Slots that SGLang allocates for a request at admission: its own state, two that are kept on the
way, and the one in the tree that it starts from and that cannot be evicted meanwhile.
"""


class States:
    """The state slots of one tree, on the device and in host memory."""

    name, what, one = POOL, "states", "state"
    pages = 1
    page_slots = 1

    def __init__(self, tree: Any) -> None:
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        self._tree = tree
        self._component = tree.components[ComponentType.MAMBA]
        self._slots = tree.req_to_token_pool.mamba_allocator
        self._size = int(tree.req_to_token_pool.mamba_pool.size)
        self._host = tree.cache_controller.mem_pool_host.entry_map[POOL].host_pool
        self.page_bytes = int(self._host.size_per_token)

    def available(self) -> int:
        """Number of empty device slots."""
        return int(self._slots.available_size())

    def _claimable(self) -> int:
        return self.available() + int(self._tree.mamba_evictable_size())

    def claim(self, slots: int) -> torch.Tensor | None:
        """Allocates device slots, evicting unused ones; None when there is no room. SGLang ends
        when it finds no slot for a running request, so some are left: one for each of those, and
        those of one more request.
        """
        if not self.spares(slots):
            return None
        if (short := slots - self.available()) > 0:
            self._evict(short)
        claimed: torch.Tensor | None = self._slots.alloc(slots)
        return claimed

    def spares(self, slots: int) -> bool:
        """Whether so many may be allocated in addition to what running requests need."""
        claimable = self._claimable()
        return claimable - slots >= (self._size - claimable) // 2 + _A_REQUEST

    def _evict(self, slots: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=slots))

    def is_short(self) -> bool:
        """Whether SGLang would find too few slots for one more request, with those held here."""
        return self._claimable() < 2 * _A_REQUEST

    def free(self, slots: torch.Tensor) -> None:
        """Frees device slots."""
        self._slots.free(slots)

    def claim_host(self, slots: int) -> torch.Tensor | None:
        """Allocates host slots, evicting the least recently used; None when there is no room."""
        claimed: torch.Tensor | None = self._component.alloc_prefetch_staging(slots)
        return claimed

    def free_host(self, slots: torch.Tensor) -> None:
        """Frees host slots that no I/O touches."""
        self._host.free(slots)

    def take_over(
        self, req: Any, slots: torch.Tensor, states: torch.Tensor, front: int, stop: int
    ) -> None:
        """A request continues after token `stop` with this state; its own slot is freed. Its next
        forward writes the slot's number into the request's row.
        """
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
        from sglang.srt.mem_cache.unified_cache.components.base import ExternalLinkerLoadPhase

        del front
        self._component.update_external_linker_load(
            ExternalLinkerLoadPhase.PREPARE,
            req,
            PoolTransfer(name=PoolName.KV, device_indices=slots),
            PoolTransfer(name=PoolName.MAMBA, device_indices=states),
            stop,
        )
        # A branch that the loaded part covers is not needed: the request inserts all of it.
        if req.mamba_branching_seqlen is not None and req.mamba_branching_seqlen <= stop:
            req.mamba_branching_seqlen = None

    def drop_old_copy(self, req: Any) -> None:
        """At a match, SGLang plans to copy the device's state at its end into the request's slot,
        right before the forward. It keeps that plan if it skips the request. If the next match ends
        at a state in host memory, the old copy would overwrite the state that is loaded.
        """
        if req.mamba_host_hit_length > 0:
            req.kv.mamba_cow_src_index = None

    def not_admitted(self, req: Any) -> None:
        """Frees its slot and drops its planned copy, as SGLang does when it stops admitting."""
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        if req.kv.holds_mamba and not getattr(req, "session", None):
            self._slots.free(req.kv.mamba_pool_idx.unsqueeze(-1))
            req.kv.mamba_pool_idx = None

    @staticmethod
    def evicted_with(params: Any) -> int:
        """How many of these device slots an eviction is to free."""
        return int(params.mamba_num)


def kept_at(page_tokens: int) -> str:
    """Makes SGLang keep a state wherever a page may end while a request generates tokens, so that
    the session's next turn finds all of the answer but its last few tokens. A request only hands
    over its latest state, so this costs a copy on the device each time but no memory. An interval
    chosen by the operator stays. Returns a text for the log. Called before the first request.
    """
    from sglang.srt.runtime_context import get_context, get_exec, mamba_checkpoint_grid

    interval, finest = (
        int(get_exec().mamba.mamba_track_interval),
        mamba_checkpoint_grid(page_tokens),
    )
    if interval == INTERVAL and finest < interval and INTERVAL % finest == 0:
        get_context().override("kvtier", mamba_track_interval=finest)
        interval = finest
    more = f"; {finest} would find more" if finest < interval else ""
    return (
        f"a next turn finds the answer before it up to a multiple of {interval} tokens "
        f"(--mamba-track-interval{more})"
    )


def unknown(tree: Any) -> str | None:
    """Why the states of this tree are not restored, or None."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    pool = tree.req_to_token_pool
    # Other pools number states virtually, or keep those of the tree in 8-bit numbers.
    if type(pool) is not HybridReqToTokenPool or pool.mamba_ckpt_pool is not None:
        return f"states in a {type(pool).__name__}"
    if pool.mamba_pool.replayssm_write_pos is not None or getattr(
        pool.mamba_pool, "replayssm_spec_write_pos", None
    ):
        return "states that lag behind (ReplaySSM)"
    entry = tree.cache_controller.mem_pool_host.entry_map.get(POOL)
    if entry is None or type(entry.host_pool) is not MambaPoolHost:
        return "states without host memory"
    return None
