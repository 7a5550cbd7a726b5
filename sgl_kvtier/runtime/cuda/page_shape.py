"""The layout of a page in a host pool, in the store and in staging; which pools can be staged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_kvtier.runtime.sglang.slot_pools import has_unequal_widths

LAYOUTS = ("page_first", "page_first_direct")
"""Host layouts in which K of a page is contiguous, and V too, made of whole token rows."""


@dataclass(frozen=True)
class PageShape:
    """K, or V, of a page: `tokens` x `layers` rows of `row_bytes`, all heads of a token and layer.

    `layer_major`: rows of a layer are contiguous (page_first_direct); otherwise those of a token
    (page_first).
    """

    tokens: int
    layers: int
    row_bytes: int
    layer_major: bool

    @property
    def half_bytes(self) -> int:
        """Bytes of K, or of V."""
        return self.tokens * self.layers * self.row_bytes

    @property
    def layer_step(self) -> int:
        """Bytes from a row to that of the same token in the next layer."""
        return self.row_bytes * (self.tokens if self.layer_major else 1)

    @property
    def token_step(self) -> int:
        """Bytes from a row to that of the next token in the same page and layer."""
        return self.row_bytes * (1 if self.layer_major else self.layers)


def host_pool_of(controller: Any) -> Any:
    """The host pool of KV pages that a HiCache controller copies from."""
    group = controller.mem_pool_host
    anchor = getattr(group, "anchor_entry", None)
    return group if anchor is None else anchor.host_pool


def shape_of(pool: Any) -> PageShape:
    """The page shape of a pool that is not `unfit`."""
    row = pool.head_num * pool.head_dim * pool.dtype.itemsize
    return PageShape(pool.page_size, pool.layer_num, row, pool.layout == "page_first_direct")


def unfit(controller: Any) -> str | None:
    """Why pages of this pool cannot be staged, and the remedy if there is one; or None."""
    pool = host_pool_of(controller)
    if pool.layout not in LAYOUTS:
        return f"host pages of layout {pool.layout} (--hicache-mem-layout page_first)"
    if has_unequal_widths(pool):
        return "K and V of different widths"
    if not getattr(pool, "device_v_buffers", None) or pool.kv_buffer.shape[0] != 2:
        return "pages of latents or of several kinds"
    if not pool.device_rows_packed or len(pool.device_k_buffers) != pool.layer_num:
        return "device rows that lie apart"
    if getattr(controller.mem_pool_device, "host_transfer_translate", None) is not None:
        return "device slots with other numbers than the pool's"
    return None
