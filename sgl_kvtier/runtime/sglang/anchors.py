"""What stands at the end of a prefix, of models that need more than its KV pages to go on from
there: a sliding window's rows (`windows`), or a state (`states`). It is the anchor of a
restoration, and comes with its last pages.

Both are kept in slots of their own, by the names that the KV pages have. Scheduler's thread; what a
copy needs on any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sgl_kvtier.runtime.sglang import compressed_pools, states, windows

if TYPE_CHECKING:
    import torch

POOLS = (windows.POOL, states.POOL, *compressed_pools.AT_WINDOWS)
"""SGLang's names for their pools, of host memory and in storage: of windows, of states, and of what
has the windows' slots.
"""


class Anchors(Protocol):
    """The slots of one tree's anchors, on the device and in host memory."""

    name: str
    """Of the pool that has these slots, one of `POOLS`."""
    what: str
    """The word for them: windows or states."""
    one: str
    """The word for one of them."""
    pages: int
    """Pages of one anchor."""
    page_slots: int
    """Slots that come with a page."""
    page_bytes: int
    """Bytes that come with a page, in all layers and pools."""

    def available(self) -> int:
        """Device slots that hold nothing."""

    def claim(self, slots: int) -> torch.Tensor | None:
        """Device slots, evicting unused ones; None when there is no room."""

    def is_short(self) -> bool:
        """Whether SGLang would find too few slots for one more request beside those held here."""

    def free(self, slots: torch.Tensor) -> None:
        """Gives device slots back."""

    def spares(self, slots: int) -> bool:
        """Whether so many device slots may be taken beside what running requests need."""

    def claim_host(self, slots: int) -> torch.Tensor | None:
        """Host slots, evicting the least recently used; None when there is no room."""

    def free_host(self, slots: torch.Tensor) -> None:
        """Gives host slots back that no I/O touches."""

    def take_over(
        self, req: Any, slots: torch.Tensor, own: torch.Tensor, front: int, stop: int
    ) -> None:
        """A request goes on behind token `stop` with the anchor in the slots `own`, after KV slots
        for the tokens from `front` on; what it had in its place is given back.
        """

    def drop_old_copy(self, req: Any) -> None:
        """A waiting request was matched anew: it does not begin with what an earlier match found,
        if this one has found another.
        """

    def not_admitted(self, req: Any) -> None:
        """A waiting request that was matched is passed over: it gives back what SGLang took for it
        at the match.
        """

    @staticmethod
    def evicted_with(params: Any) -> int:
        """How many device slots of these an eviction is asked for."""


def of(tree: Any) -> Anchors | None:
    """The anchors of a tree that has some."""
    kinds = {kind.name for kind in getattr(tree, "tree_components", ())}
    if "SWA" in kinds:
        return windows.Windows(tree)
    return states.States(tree) if "MAMBA" in kinds else None


def unknown(tree: Any, kinds: list[str]) -> list[str]:
    """Which of these kinds of pages beside the KV pages (SGLang's names of its components) are not
    restored in this tree.
    """
    if len(kinds) > 1:
        return [kind.lower() for kind in kinds]
    why = {"SWA": windows.unknown, "MAMBA": states.unknown}
    told = [why[kind](tree) if kind in why else kind.lower() for kind in kinds]
    return [line for line in told if line]


def pools_in(names: Any) -> tuple[str, ...]:
    """Pools among these whose pages lie at the anchors' slots, those that have the slots first."""
    return tuple(pool for pool in POOLS if pool in names)


def is_asked_for(operation: Any) -> bool:
    """Whether storage was asked for the anchor at the end of this operation's hit."""
    return any(str(one.name) in POOLS for one in operation.pool_transfers or ())


def shorter_ends(operation: Any) -> list[int]:
    """Numbers of pages, fewer than its hit, at whose end this rank's storage has an anchor too."""
    result = operation.pool_storage_result
    return sorted(result.restorable_prefix_pages or ())


def given(tree: Any, pool: str, behind: int, host_slots: torch.Tensor, inserted: Any) -> None:
    """Gives an anchor that was read to the tree, at the end of host pages that were just put into
    it behind a node. What the tree does not take it frees.
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
    """Whether a request cannot begin behind its pages on the device: as far as the last match
    knows, the window or state that it needs there is in host memory, or nowhere.
    """
    return req.prefix_len > 0 and (req.host_hit_length > 0 or any(in_host(req)))


def set_in_host(req: Any, found: tuple[int, ...] = (0, 0)) -> None:
    """Has SGLang go on as if so much had been found."""
    for name, count in zip(_IN_HOST, found, strict=True):
        setattr(req, name, count)


def transfer(pool: str, host_slots: torch.Tensor, device_slots: torch.Tensor) -> Any:
    """A copy of anchors' slots as SGLang describes it."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return PoolTransfer(name=PoolName(pool), host_indices=host_slots, device_indices=device_slots)
