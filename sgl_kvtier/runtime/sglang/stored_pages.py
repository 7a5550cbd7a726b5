"""Which pages of a prompt are stored after the first missing one, on every rank, and which of all
pages every rank has on its own disk.

SGLang queries storage for the number of a prompt's pages without a gap, and takes the minimum over
all ranks. The tier of each page is added to that reduction: no collective is added, and all ranks
know the same. SGLang's prefetch thread makes the query, the scheduler's thread reads the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.types import Operation
from sgl_kvtier.types import Tier

logger = logging.getLogger(__name__)

_ANSWER = "kvtier_stored"
"""Attribute of an operation with one byte for each page that it queries."""
_OWN, _SHARED = 2, 1
"""Bytes for pages that every rank has on its own disk, and that every rank can get."""
_BYTE = {Tier.STORAGE: _OWN, Tier.REMOTE: _SHARED, None: 0}
_TIER = {byte: tier for tier, byte in _BYTE.items()}


class StoredPages:
    """Looks up pages after the gap for one controller's operations, while our store is attached.
    Replaces methods of the controller, which has no callbacks.
    """

    def __init__(self, controller: Any, alone: bool) -> None:
        """`alone`: there is only one rank."""
        self._controller = controller
        self._agree: Callable[[Any, int], int] = controller._sync_prefetch_hit_query
        self._reduce: Callable[[torch.Tensor, Any, Any], None] = controller._all_reduce
        self._mine: torch.Tensor | None = None
        controller._sync_prefetch_hit_query = self._ask
        if not alone:
            controller._all_reduce = self._reduce_both

    def _ask(self, operation: Any, hit_tokens: int) -> int:
        """Replaces SGLang's reduction of one operation's hit."""
        self._mine = self._there(operation, hit_tokens // self._controller.page_size)
        try:
            agreed = self._agree(operation, hit_tokens)
            setattr(operation, _ANSWER, bytes(self._mine.tolist()))
        finally:
            self._mine = None
        return agreed

    def _reduce_both(self, data: torch.Tensor, op: Any, groups: Any) -> None:
        mine = self._mine
        if mine is None or groups is not self._controller.prefetch_hits_sync_groups:
            self._reduce(data, op, groups)
            return
        whole = torch.cat([data, mine.to(data.dtype)])
        self._reduce(whole, op, groups)
        data.copy_(whole[: len(data)])
        self._mine = whole[len(data) :]

    def _there(self, operation: Any, hit: int) -> torch.Tensor:
        """The tier byte of each page of the operation on this rank. Has the same length on every
        rank, also if the operation was terminated or storage could not be queried.
        """
        there = torch.zeros(len(operation.token_ids) // self._controller.page_size, dtype=torch.int)
        there[:hit] = _OWN
        names, backend = operation.all_hash_values, store_of(self._controller)
        if backend is None or not names:
            return there
        try:
            # Pages of the hit are stored. If servers share pages, they may be in either tier.
            first = 0 if backend.shares else hit
            asked = names[first : len(there)]
            if asked:
                found = torch.tensor([_BYTE[tier] for tier in backend.stored(asked)])
                there[first : first + len(asked)] = found
                there[:hit].clamp_(min=_SHARED)
        except Exception:
            logger.exception("kvtier: storage could not be asked where pages are")
        return there


def up_to_the_last(operation: Operation, hit: int) -> tuple[Sequence[str], list[Tier | None]]:
    """Names of an operation's pages up to the last one that every rank has, and the tier of each:
    every rank's own disk, shared, or None. The first `hit` pages are its hit.
    """
    there = bytearray(getattr(operation, _ANSWER, b"")).rstrip(b"\0")
    tiers = [_TIER[byte] for byte in there]
    if len(tiers) <= hit:
        tiers = [tier or Tier.STORAGE for tier in tiers[:hit]]
        return operation.hash_value[:hit], tiers + [Tier.STORAGE] * (hit - len(tiers))
    return (operation.all_hash_values or ())[: len(tiers)], tiers
