"""SGLang's radix cache with restorations beside it: what the tree has to ask or tell the restore engine.

A subclass, because SGLang asks `isinstance(tree_cache, UnifiedRadixCache)`. It adds no state to the tree. Every override
runs on the scheduler's thread, and without an engine each is SGLang's own method.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_kvtier.runtime import restore_setup
from sgl_kvtier.runtime.restore_engine import RestoreEngine
from sgl_kvtier.runtime.restore_tick import RestoreTick


class KVTierRadixCache(UnifiedRadixCache):
    """The tree of a server that restores prefixes by computing and loading at once."""

    engine: RestoreEngine | None = None
    tick: RestoreTick | None = None
    _taken_over = False

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """After SGLang built host pools and the storage backend: storage hits are offered to the engine from now on."""
        super().init_hicache(server_args, params)
        self._allocate = self.cache_controller.allocate_storage_hit
        self.cache_controller.allocate_storage_hit = self._offer_or_allocate
        self.engine, self.tick = restore_setup.build(self, server_args)

    def check_hicache_events(self) -> None:
        """SGLang's own events. It would ask storage again for what it dropped in favour of a restoration."""
        super().check_hicache_events()
        if self.engine is not None:
            for rid in self.engine.owned:
                self.storage_prefetch_retries.cancel(rid)

    def _offer_or_allocate(self, operation: Any, hit_tokens: int, **how: Any) -> tuple[torch.Tensor | None, int]:
        """In place of reserving host pages for a hit: (None, n) makes SGLang drop its own transfer of what we restore."""
        if self.engine is not None and self.engine.offer_hit(operation, hit_tokens):
            self.discard_storage_prefetch_accounting(operation.handle)  # neither fulfilled nor dropped: it is ours now
            self._taken_over = True
            return None, hit_tokens
        return self._allocate(operation, hit_tokens, **how)

    def _log_storage_prefetch_deferred(self, num_tokens: int, reason: str) -> None:
        """The last thing SGLang does with a transfer it dropped for us; nothing was deferred, and nothing is retried."""
        if self._taken_over:
            self._taken_over = False
            return
        super()._log_storage_prefetch_deferred(num_tokens, reason)

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> bool | None:
        """When a request is queued, and when SGLang asks storage again for it."""
        if self.engine is not None and request.rid in self.engine.owned:
            return None
        answer = super().prefetch_from_storage(request, *args, **kwargs)
        if self.engine is not None and request not in self.ongoing_prefetch:
            self.engine.look_at(request)  # storage was not asked: what is in host memory may still be worth restoring
        return answer

    def revoke_pending_prefetch(self, request: Any) -> None:
        """Storage has nothing more for this request, or its transfer is ours now."""
        super().revoke_pending_prefetch(request)
        if self.engine is not None and not self._taken_over:
            self.engine.look_at(request)

    def check_prefetch_progress(self, request: Any) -> bool:
        """Whether a waiting request may be admitted in this pass."""
        if self.engine is not None:
            admissible = self.engine.admissible(request)
            if admissible is not None:
                return admissible
        return super().check_prefetch_progress(request)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """A new request's prefix: the tree's slots, and behind them those that were spliced at its admission."""
        spliced = None if self.engine is None else self.engine.take_prefix(req.rid)
        if spliced is None:
            return super().prefix_device_indices(req)
        path = self.tree_core.collect_full_device_indices(req.last_node, self.root_node_handle(req.extra_key))
        resident = req.prefix_len - len(spliced)
        assert len(path) >= resident, (req.rid, len(path), resident)
        return torch.cat([path[:resident], spliced])

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """A request gives its row back: finished, aborted or retracted."""
        if self.engine is not None:
            self.engine.forget(req.rid)
        super().on_release(req, checkpointed=checkpointed)

    def release_aborted_request(self, request: Any) -> None:
        """A waiting request, or one between two chunks, was aborted."""
        if self.engine is not None:
            self.engine.forget(request.rid)
        super().release_aborted_request(request)

    def evict_for_alloc(self, params: Any, **how: Any) -> Any:
        """Room is needed: what waiting restorations hold is given up after everything that can be evicted."""
        before = self.token_to_kv_pool_allocator.available_size()
        result = super().evict_for_alloc(params, **how)
        if self.engine is not None:
            short = before + params.num_tokens - self.token_to_kv_pool_allocator.available_size()
            if short > 0 and self.engine.give_room(short):
                return super().evict_for_alloc(params, **how)  # what they kept from eviction
        return result

    def reset(self) -> None:
        """Before the pools are emptied: no transfer may be under way into them."""
        if self.engine is not None:
            self.engine.reset()
        super().reset()

    def shutdown(self) -> None:
        """At the end of the process: the engine's thread first, then SGLang's."""
        if self.engine is not None:
            self.engine.close()
        if self.tick is not None:
            self.tick.agreement.close()
            if self.tick.notes is not None:
                self.tick.notes.close()
        super().shutdown()
