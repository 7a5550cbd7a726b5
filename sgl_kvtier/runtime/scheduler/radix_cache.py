"""SGLang's radix cache with restorations and lookahead: the methods in which the tree calls their
engines.

It is a subclass, because SGLang asks `isinstance(tree_cache, UnifiedRadixCache)`. Our engines are
reached by `kvtier`. Every override runs on the scheduler's thread, and without `kvtier` it is
SGLang's own method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheAck
from sglang.srt.mem_cache.l2_transfer import make_timing_event_pair
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_kvtier.runtime.ahead.engine import LookaheadEngine
from sgl_kvtier.runtime.ahead.host_pins import evict_others
from sgl_kvtier.runtime.scheduler import setup as restore_setup
from sgl_kvtier.runtime.scheduler.parts import Parts
from sgl_kvtier.runtime.sglang import slot_pools, storage_ops, tree_ranks
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.stored_pages import StoredPages
from sgl_kvtier.runtime.sglang.types import Operation, Req
from sgl_kvtier.runtime.step.page_names import from_hex
from sgl_kvtier.types import PageKey, Tier

logger = logging.getLogger(__name__)


class KVTierRadixCache(UnifiedRadixCache):
    """The tree of a server that restores prefixes by computing and loading at the same time."""

    kvtier: Parts | None = None
    """Our parts; None where restoration and lookahead are off."""
    _taken_over = False
    _in_reduction = False
    _built_for: Any = None
    """The server's arguments, once host pools and storage backend are built."""
    _drafts = frozenset[str]()
    """Names of pools that SGLang registers later for a draft model, and has not yet."""

    def init_hicache(self, server_args: Any, params: Any) -> None:
        """Builds host pools and storage backend; our parts follow when all pools exist."""
        super().init_hicache(server_args, params)
        self._built_for = server_args
        self._drafts = frozenset(slot_pools.registered_later(params))
        if not self._drafts:
            self._take_storage_hits()

    def register_sidecar_pool(self, spec: Any, entry: Any = None) -> None:
        """Registers one more pool whose pages share the slots of another pool."""
        super().register_sidecar_pool(spec, entry)
        if self._drafts:
            self._drafts -= {str(spec.pool_name)}
            if not self._drafts:
                self._take_storage_hits()
        elif self.kvtier is not None:  # it copies and counts only the pools it was built with
            logger.warning(
                "kvtier: prefixes are restored SGLang's own way: the pool %s came too late",
                spec.pool_name,
            )
            parts, self.kvtier = self.kvtier, None
            parts.close()

    def _take_storage_hits(self) -> None:
        """Constructs our parts when all pools exist; storage hits go to the engine from then on."""
        found = restore_setup.lacks(self, self._built_for) or restore_setup.build(
            self, self._built_for
        )
        if isinstance(found, str):
            logger.warning("%s", found)
            return
        self._allocate = self.cache_controller.allocate_storage_hit
        self.cache_controller.allocate_storage_hit = self._offer_or_allocate
        self.kvtier = found
        # With several stages SGLang looks up pages on the first one alone. No anchor is usable
        # after a gap.
        if tree_ranks.stages(self) == 1 and self.kvtier.context.anchors is None:
            StoredPages(self.cache_controller, self.kvtier.agreement.alone)

    def check_hicache_events(self) -> None:
        """Runs SGLang's own events, and keeps SGLang from querying storage again for transfers that
        it dropped in favour of a restoration.
        """
        super().check_hicache_events()
        if self.kvtier is not None:
            for rid in self.kvtier.queries_storage_once:
                self.storage_prefetch_retries.cancel(rid)

    def _sync_hicache_ready_counts(self) -> Any:
        """SGLang's reduction of a tick. Ranks with lookahead add the values that they have to agree
        on.
        """
        self._in_reduction = self.kvtier is not None and self.kvtier.tick.shares_reduction
        try:
            return super()._sync_hicache_ready_counts()
        finally:
            self._in_reduction = False

    def _all_reduce(self, data: torch.Tensor, tp_reduce_op: Any) -> None:
        """Reduces over all ranks, in place."""
        if not self._in_reduction or self.kvtier is None:
            return super()._all_reduce(data, tp_reduce_op)
        whole = torch.cat(
            [data, torch.tensor(self.kvtier.tick.reduction_input(), dtype=data.dtype)]
        )
        super()._all_reduce(whole, tp_reduce_op)
        data.copy_(whole[: len(data)])
        self.kvtier.tick.take_result(whole[len(data) :].tolist())

    def _offer_or_allocate(
        self, operation: Operation, hit_tokens: int, **how: Any
    ) -> tuple[torch.Tensor | None, int]:
        """Replaces the allocation of host pages for a hit. Returning (None, n) makes SGLang drop
        its own transfer, because we restore the pages or read them later.
        """
        if self.kvtier is not None and self.kvtier.takes(operation, hit_tokens):
            self.discard_storage_prefetch_accounting(
                operation.handle
            )  # neither fulfilled nor dropped: we take over
            self._taken_over = True
            return None, hit_tokens
        return self._allocate(operation, hit_tokens, **how)

    def _log_storage_prefetch_deferred(self, num_tokens: int, reason: str) -> None:
        """SGLang's last call for a transfer that it dropped for us. Nothing is logged, since
        nothing was deferred or is retried.
        """
        if self._taken_over:
            self._taken_over = False
            return
        super()._log_storage_prefetch_deferred(num_tokens, reason)

    def prefetch_from_storage(
        self, request: Any, last_host_node_id: Any, new_input_tokens: Any, *args: Any, **kwargs: Any
    ) -> bool | None:
        """Called when a request is queued, and when storage is queried again for it."""
        parts = self.kvtier
        if parts is not None and request.rid in parts.engine.owned:
            return None
        if parts is not None and self.enable_storage:
            there = len(kwargs.get("matched_prefix_tokens") or ())
            if parts.turns.declines(request, len(new_input_tokens), there):
                return None
        answer = super().prefetch_from_storage(
            request, last_host_node_id, new_input_tokens, *args, **kwargs
        )
        if parts is not None and request not in self.ongoing_prefetch:
            # Storage was not queried; the pages in host memory may still be worth restoring.
            parts.engine.offers.look_at(request)
        return answer

    def revoke_pending_prefetch(self, request: Any) -> None:
        """SGLang drops a request's prefetch: storage has no more pages without a gap, or we took
        over its transfer.
        """
        operation = storage_ops.of(self, request)
        super().revoke_pending_prefetch(request)
        if self.kvtier is not None and not self._taken_over:
            self.kvtier.engine.offers.look_at(request, operation)

    def _handle_prefetch_result(self, operation: Operation) -> None:
        """SGLang has read a waiting request's pages to host memory; they go into the tree."""
        super()._handle_prefetch_result(operation)
        if self.kvtier is not None:
            self.kvtier.turns.landed(operation)

    def check_prefetch_progress(self, request: Any) -> bool:
        """Whether a waiting request may be admitted in this pass."""
        admissible = None if self.kvtier is None else self.kvtier.admissible(request)
        return super().check_prefetch_progress(request) if admissible is None else admissible

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """A new request's prefix: the tree's slots, then those attached at its admission."""
        spliced = None if self.kvtier is None else self.kvtier.engine.take_prefix(req)
        if spliced is None:
            return super().prefix_device_indices(req)
        path = self.tree_core.collect_full_device_indices(
            req.last_node, self.root_node_handle(req.extra_key)
        )
        resident = req.prefix_len - len(spliced)
        assert len(path) >= resident, (req.rid, len(path), resident)
        return torch.cat([path[:resident], spliced])

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """A request gives up its row: it was finished, aborted or retracted."""
        if self.kvtier is not None:
            self.kvtier.engine.releasing(req)
            self.kvtier.forget(req.rid)
        self._tell_ahead(lambda ahead: ahead.released(req))
        super().on_release(req, checkpointed=checkpointed)

    def release_aborted_request(self, request: Any) -> None:
        """A waiting request, or one between two chunks, was aborted."""
        if self.kvtier is not None:
            self.kvtier.forget(request.rid)
        self._tell_ahead(lambda ahead: ahead.gone(request.rid))
        super().release_aborted_request(request)

    def evict_for_alloc(self, params: Any, **how: Any) -> Any:
        """Evicts for an allocation. If that is not enough, waiting restorations give up slots."""
        if self.kvtier is None:
            return super().evict_for_alloc(params, **how)
        context = self.kvtier.context
        before = context.available()
        result = super().evict_for_alloc(params, **how)
        anchors = context.anchors
        asked = (params.num_tokens, 0 if anchors is None else anchors.evicted_with(params))
        short = max(
            had + tokens - has
            for had, tokens, has in zip(before, asked, context.available(), strict=False)
        )
        if short > 0 and self.kvtier.engine.give_room(short):
            return super().evict_for_alloc(params, **how)  # pages that they had locked
        return result

    def reset(self) -> None:
        """Called before the pools are emptied: no transfer into them may be in flight."""
        if self.kvtier is not None:
            self.kvtier.reset()
        super().reset()

    # --- for lookahead ----------------------------------------------------------------------------

    def clear_storage_backend(self) -> bool:
        """An operator has emptied the store, on every rank in the same step."""
        cleared = super().clear_storage_backend()
        if cleared:
            self._tell_ahead(lambda ahead: ahead.store_cleared())
        return cleared

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Inserts a request's tokens into the tree."""
        before = int(req.kv.cache_protected_len)
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        kept = None if self.kvtier is None else self.kvtier.engine.kept
        prompt = len(req.origin_input_ids) // self.page_size * self.page_size
        if kept is not None and req.kv.cache_protected_len >= prompt:
            kept.drop(req.rid)  # its whole prompt is in the tree, which took the pages it can use
        self._tell_ahead(lambda ahead: ahead.checkpointed(req, before))

    def _evict_components(
        self, request_by_type: Any, tracker: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Evicts from the device: first in the planner's order, then in SGLang's."""
        ahead = self._ahead
        if ahead is not None:
            ahead.evict(request_by_type[BASE_COMPONENT_TYPE], tracker)
        super()._evict_components(request_by_type, tracker, *args, **kwargs)

    def _evict_device_leaf(self, node_id: int, tracker: Any) -> Any:
        """Evicts a node from the device; with write-back perhaps after its backup, by `_demote`."""
        keys: tuple[PageKey, ...] = ()

        def note(ahead: LookaheadEngine) -> None:
            nonlocal keys
            keys = ahead.facts.node_keys(node_id)

        self._tell_ahead(note)
        backup = super()._evict_device_leaf(node_id, tracker)
        if backup is None:
            self._tell_ahead(lambda ahead: ahead.facts.dropped(keys, Tier.DEVICE))
        return backup

    def _demote(self, node_id: int, tracker: Any) -> None:
        super()._demote(node_id, tracker)
        self._tell_ahead(
            lambda ahead: ahead.facts.dropped(ahead.facts.node_keys(node_id), Tier.DEVICE)
        )

    def evict_host(self, num_tokens: int, component_type: Any = BASE_COMPONENT_TYPE) -> int:
        """Evicts from host memory. Pages read for waiting requests, and paths of sessions that
        return soon, are protected as long as there are others.
        """
        kept = None if self.kvtier is None else self.kvtier.engine.kept
        if component_type != BASE_COMPONENT_TYPE or kept is None:
            return self._evict_host(num_tokens, component_type)
        freed, ahead = self._evict_host(num_tokens, component_type), self._ahead
        if ahead is not None and ahead.promotions.claiming_for is not None:
            return freed  # a prefetch takes no kept pages from running requests
        return freed + (kept.give_room(num_tokens - freed) if freed < num_tokens else 0)

    def _evict_host(self, num_tokens: int, component_type: Any) -> int:
        if self.kvtier is None or component_type != BASE_COMPONENT_TYPE:
            return super().evict_host(num_tokens, component_type)
        nodes, least, ahead = self.kvtier.turns.nodes(), True, self._ahead
        if ahead is not None:
            wanted, least = ahead.wanted_in_host()
            nodes += wanted
        host = self.kvtier.context.host
        freed = evict_others(host, num_tokens, nodes, super().evict_host, least=least)
        if ahead is not None and nodes:
            ahead.counters.host_victims += freed // self.page_size
        return freed

    def _execute_kv_backup(
        self, node_id: int, device_value: torch.Tensor, comp_xfers: Any, sidecar_xfers: Any
    ) -> torch.Tensor | None:
        """Copies a new node to host memory, except pages whose bounce pages were kept. Side pools
        share the slots of KV pages (`slot_pools`), so a kept page is one of all pools.
        """
        kept = None if self.kvtier is None else self.kvtier.engine.kept
        keys = [] if kept is None else from_hex(self.tree_core.get_hash_values(node_id))
        plain = len(keys) * self.page_size == len(device_value) and not any(comp_xfers.values())
        taken = kept.take(keys) if kept is not None and plain else {}
        if kept is None or not taken:
            return super()._execute_kv_backup(node_id, device_value, comp_xfers, sidecar_xfers)
        fresh = [place for place in range(len(keys)) if place not in taken]
        copied: torch.Tensor | None = torch.empty(0, dtype=torch.int64)
        if fresh:
            pages = device_value.view(-1, self.page_size)
            part = torch.cat([pages[first:stop] for first, stop in _neighbours(fresh)]).flatten()
            copied = super()._execute_kv_backup(node_id, part, comp_xfers, sidecar_xfers)
        else:
            self._acknowledge(node_id)
        if copied is None:
            kept.put_back(keys, taken)
            return None
        new = iter(copied.view(-1, self.page_size))
        return torch.cat(
            [taken[place][1] if place in taken else next(new) for place in range(len(keys))]
        )

    def _acknowledge(self, node_id: int) -> None:
        """Queues the acknowledgement that SGLang waits for after a copy, where there was none."""
        start, finish, _ = make_timing_event_pair()
        start.record()
        finish.record()
        self.cache_controller.ack_write_queue.append(HiCacheAck(start, finish, [node_id]))

    def _drain_host_frees(self, host_frees: Any) -> None:
        """The tree frees host pages."""
        self._tell_ahead(
            lambda ahead: ahead.facts.host_freed(host_frees.get(BASE_COMPONENT_TYPE, ()))
        )
        super()._drain_host_frees(host_frees)

    def ready_to_load_host_cache(self) -> int:
        """The layer counter that the batch being built waits for. Lookahead's copies in flight may
        be of its prefix. Copies run in order on one stream, so the newer of two counters covers the
        older.
        """
        own = super().ready_to_load_host_cache()
        ahead = self._ahead
        return ahead.promotions.consumer if own < 0 and ahead is not None else own

    @property
    def _ahead(self) -> LookaheadEngine | None:
        return None if self.kvtier is None else self.kvtier.ahead

    def _tell_ahead(self, tell: Callable[[LookaheadEngine], None]) -> None:
        """Reports to lookahead."""
        if self.kvtier is not None:
            self.kvtier.tell_ahead(tell)

    def release_host_resources(self) -> None:
        """Called at a graceful end, before SGLang unmaps host memory: nothing may be read into it
        any more. Writes what was learned.
        """
        try:
            if self.kvtier is not None:
                self.kvtier.close()
            backend = None if self.cache_controller is None else store_of(self.cache_controller)
            if backend is not None:
                backend.close()
        except Exception:
            logger.exception("kvtier: not everything could be closed")
        super().release_host_resources()

    def shutdown(self) -> None:
        """Called at the end of the process: ends our threads first, then SGLang's."""
        if self.kvtier is not None:
            self.kvtier.close()
        super().shutdown()


def _neighbours(places: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs [first, stop)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs
