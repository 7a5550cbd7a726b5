"""The page store behind SGLang's external linker: another door to the folders that the HiCache
backend writes.

A test double, and an alarm: it uses SGLang's documented interface for linkers out of its tree, the
store, the neutral description of pages and nothing of the backend's. Everything happens in the call
that asks for it, on the scheduler's thread: a load blocks its step. One rank and ordinary KV pages.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from sgl_kvtier.config import parse_config
from sgl_kvtier.runtime.backend.host_pages import bytes_of
from sgl_kvtier.runtime.backend.identity import identity_of
from sgl_kvtier.runtime.backend.page_shape import PageShape, RankShare
from sgl_kvtier.store.base import PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.engine import open_store
from sgl_kvtier.types import Lookup, PageKey


class StoreLinker(UnifiedCacheLinker):
    """`extra_config`: `kvtier`, the sections of a kvtier.json, and `events`, a file to which a JSON
    object is added for all that is opened, loaded and stored.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.runtime_context import get_server_args

        del server_args, components
        extra = extra_config or {}
        self.forward_stream = forward_stream
        self.pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: self.pool}
        self.layer_done_counter = LayerWiseLoadCounter(self.pool.layer_num)
        self.page = params.page_size
        self._events = Path(extra["events"])
        self._queued: dict[str, Any] = {}
        self._offloaded: deque[bool] = deque()
        keys, values = self.pool.k_buffer[0], self.pool.v_buffer[0]
        shape = PageShape(
            layout="page_first_direct",
            page_size=self.page,
            dtype=str(keys.dtype),
            head_num=keys.shape[1],
            head_dim=keys.shape[2],
            v_head_dim=values.shape[2],
        )
        rank = RankShare()
        who = identity_of(resolving_view(get_server_args()), rank, {"kv": shape})
        self.store = open_store(parse_config(extra["kvtier"]).store, who, rank.folder())
        self._note("opened", folder=who.directory_name, pages=self.store.stats().pages)

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        found = self.store.lookup(_names(_kv(transfers).keys))
        there = next((i for i, how in enumerate(found) if how is not Lookup.HIT), len(found))
        return list(range(1, there + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self._queued[rid] = _kv(transfers)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        index = self.layer_done_counter.update_producer()
        loads, self._queued = list(self._queued.values()), {}
        try:
            for transfer in loads:
                self._load(transfer)
        except OSError as error:  # pages that went away since `lookup` told of them
            self.layer_done_counter.fail(index, error)
            return index
        for layer in range(self.pool.layer_num):
            self.layer_done_counter.complete(index, layer)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        transfer = _kv(transfers)
        for event in self.record_offload_ready():
            event.synchronize()
        pages = zip(_names(transfer.keys), self._slots(transfer), strict=True)
        outcomes = self.store.put(
            [PageWrite(key, [bytes_of(part) for part in self._parts(rows)]) for key, rows in pages]
        )
        self._note(
            "stored", pages=outcomes.count(PutOutcome.STORED), kept=outcomes.count(PutOutcome.KEPT)
        )
        self._offloaded.append(PutOutcome.REFUSED not in outcomes)
        return True

    def num_completed_offloads(self) -> int:
        return len(self._offloaded)

    def pop_completed_offload(self) -> bool:
        return self._offloaded.popleft()

    def reset(self) -> None:
        self._queued.clear()
        self._offloaded.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self.store.close()

    def _load(self, transfer: Any) -> None:
        """Reads pages into the device slots of a transfer. Raises OSError if one is lost."""
        slots = self._slots(transfer)
        pages = [self._parts(rows) for rows in slots]  # of the right sizes; what is in them is lost
        names = _names(transfer.keys)
        job = self.store.read(
            [
                PageRead(key, [bytes_of(part) for part in parts])
                for key, parts in zip(names, pages, strict=True)
            ]
        )
        job.wait()
        if any(outcome is not ReadOutcome.OK for outcome in job.outcomes):
            raise OSError(f"pages were lost: {job.outcomes}")
        for rows, (keys, values) in zip(slots, pages, strict=True):
            for layer in range(self.pool.layer_num):
                self.pool.k_buffer[layer][rows] = keys[layer]
                self.pool.v_buffer[layer][rows] = values[layer]
        self._note("loaded", pages=len(pages))

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """A page's two pieces as `page_first_direct` has them: layer, token, head, number."""
        buffers = (self.pool.k_buffer, self.pool.v_buffer)
        return [torch.stack([layer[rows] for layer in layers]).cpu() for layers in buffers]

    def _slots(self, transfer: Any) -> torch.Tensor:
        """Device slots of a transfer, a row per page."""
        return transfer.device_indices.to(torch.int64).view(-1, self.page)

    def _note(self, event: str, **what: Any) -> None:
        with self._events.open("a") as file:
            file.write(json.dumps({"event": event, **what}) + "\n")


def _kv(transfers: list[Any]) -> Any:
    (transfer,) = transfers
    assert transfer.name == PoolName.KV
    return transfer


def _names(keys: list[str]) -> list[PageKey]:
    return [PageKey(bytes.fromhex(key)) for key in keys]
