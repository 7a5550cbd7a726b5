"""The anchor of a prefix, in models that need more than KV pages to continue after it: a sliding
window's rows (`windows`), or a state (`states`). It comes with the last pages of a restoration.

Both have slots of their own and are stored under the names of the KV pages. Scheduler's thread;
what a copy needs is for any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sgl_kvtier.runtime.sglang import compressed_pools, states, windows

if TYPE_CHECKING:
    import torch

POOLS = (windows.POOL, states.POOL, *compressed_pools.AT_WINDOWS)
"""SGLang's names for their pools, in host memory and in storage: those of windows and states, and
those that share the windows' slots.
"""


class Anchors(Protocol):
    """The slots of one tree's anchors, on the device and in host memory."""

    name: str
    """Name of the pool that has these slots, one of `POOLS`."""
    what: str
    """The plural in texts: windows or states."""
    one: str
    """The singular in texts."""
    pages: int
    """Pages of one anchor."""
    page_slots: int
    """Slots of an anchor per page."""
    page_bytes: int
    """Bytes of an anchor per page, in all layers and pools."""

    def available(self) -> int:
        """Number of empty device slots."""

    def claim(self, slots: int) -> torch.Tensor | None:
        """Allocates device slots, evicting unused ones; None when there is no room."""

    def is_short(self) -> bool:
        """Whether SGLang would find too few slots for one more request, with those held here."""

    def free(self, slots: torch.Tensor) -> None:
        """Frees device slots."""

    def spares(self, slots: int) -> bool:
        """Whether so many device slots may be allocated besides what running requests need."""

    def claim_host(self, slots: int) -> torch.Tensor | None:
        """Allocates host slots, evicting the least recently used; None when there is no room."""

    def free_host(self, slots: torch.Tensor) -> None:
        """Frees host slots that no I/O touches."""

    def take_over(
        self, req: Any, slots: torch.Tensor, own: torch.Tensor, front: int, stop: int
    ) -> None:
        """A request continues after token `stop` with the anchor in the slots `own`, and with KV
        slots for the tokens from `front` on; the anchor that it had is freed.
        """

    def drop_old_copy(self, req: Any) -> None:
        """A waiting request was matched again: drops what an earlier match has planned for it, if
        this match found something else.
        """

    def not_admitted(self, req: Any) -> None:
        """A matched request is not admitted: gives back what SGLang allocated for it at the
        match.
        """

    @staticmethod
    def evicted_with(params: Any) -> int:
        """How many of these device slots an eviction is to free."""


def of(tree: Any) -> Anchors | None:
    """The anchors of a tree, or None."""
    kinds = {kind.name for kind in getattr(tree, "tree_components", ())}
    if "SWA" in kinds:
        return windows.Windows(tree)
    return states.States(tree) if "MAMBA" in kinds else None


def unknown(tree: Any, kinds: list[str]) -> list[str]:
    """Those of these kinds of pages (SGLang's components except KV) that are not restored in this
    tree.
    """
    if len(kinds) > 1:
        return [kind.lower() for kind in kinds]
    why = {"SWA": windows.unknown, "MAMBA": states.unknown}
    told = [why[kind](tree) if kind in why else kind.lower() for kind in kinds]
    return [line for line in told if line]


def pools_in(names: Any) -> tuple[str, ...]:
    """Those of these pools whose pages are at the anchors' slots; the slots' owner comes first."""
    return tuple(pool for pool in POOLS if pool in names)


def is_asked_for(operation: Any) -> bool:
    """Whether storage was queried for the anchor at the end of this operation's hit."""
    return any(str(one.name) in POOLS for one in operation.pool_transfers or ())


def shorter_ends(operation: Any) -> list[int]:
    """Numbers of pages, less than the hit, at whose end this rank's storage has an anchor too."""
    result = operation.pool_storage_result
    return sorted(result.restorable_prefix_pages or ())


def given(tree: Any, pool: str, behind: int, host_slots: torch.Tensor, inserted: Any) -> None:
    """Gives an anchor that was read to the tree, at the end of host pages that were just inserted
    after the node `behind`. The tree frees what it does not take.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer, PoolTransferResult
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase

    kind = ComponentType.SWA if pool == windows.POOL else ComponentType.MAMBA
    done: list[Any] = []
    tree.tree_core.commit_hicache_transfers(
        behind,
        CacheTransferPhase.PREFETCH,
        {kind: [PoolTransfer(name=PoolName(pool), host_indices=host_slots)]},
        cache_actions=done,
        insert_result=inserted,
        pool_storage_result=PoolTransferResult(0, {PoolName(pool): len(host_slots)}),
    )
    tree._apply_cache_actions(done)


_IN_HOST = ("swa_host_hit_length", "mamba_host_hit_length")


def in_host(req: Any) -> tuple[int, ...]:
    """What the last match of this request found of anchors in host memory."""
    return tuple(int(getattr(req, name, 0)) for name in _IN_HOST)


def front_lacks(req: Any) -> bool:
    """Whether a request cannot start after its pages on the device: according to the last match,
    the window or state that it needs there is in host memory, or missing.
    """
    return req.prefix_len > 0 and (req.host_hit_length > 0 or any(in_host(req)))


def set_in_host(req: Any, found: tuple[int, ...] = (0, 0)) -> None:
    """Makes SGLang continue as if the match had found this."""
    for name, count in zip(_IN_HOST, found, strict=True):
        setattr(req, name, count)


def transfer(pool: str, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Any:
    """A copy of anchors' slots as SGLang describes it."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return PoolTransfer(name=PoolName(pool), host_indices=host_slots, device_indices=device_slots)
