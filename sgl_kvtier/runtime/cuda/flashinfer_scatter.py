"""The second step of a staged copy by FlashInfer: one launch per layer, to compare on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.staging import Room


class FlashInferScatter:
    """Only for pages of layout page_first, in which the rows of a layer have one stride."""

    def __init__(
        self,
        shape: PageShape,
        room_pages: int,
        buffers: list[torch.Tensor],
        append: Callable[..., None] | None = None,
    ) -> None:
        """`buffers` as for `TritonScatter`, [slot, heads, dim]; slots are a whole number of pages.
        Raises ValueError for another layout, ImportError without FlashInfer.
        """
        if shape.layer_major:
            raise ValueError("FlashInfer appends from pages of layout page_first only")
        self._append, self._shape = append or _append(), shape
        # SGLang stores 8-bit floats as bytes, for which FlashInfer has no kernel.
        if buffers[0].dtype == torch.uint8:
            buffers = [buffer.view(torch.float8_e4m3fn) for buffer in buffers]
        paged = [buffer.view(-1, shape.tokens, *buffer.shape[1:]) for buffer in buffers]
        self._pools = list(zip(paged[: shape.layers], paged[shape.layers :], strict=True))
        self._row, self._dtype = buffers[0].shape[1:], buffers[0].dtype
        whole, device = room_pages * shape.tokens, buffers[0].device
        self._sequence = torch.zeros(whole, dtype=torch.int32, device=device)
        self._positions = torch.arange(whole, dtype=torch.int32, device=device)
        self._bounds = [
            torch.tensor([0, pages], dtype=torch.int32, device=device)
            for pages in range(room_pages + 1)
        ]
        self._full = torch.tensor([shape.tokens], dtype=torch.int32, device=device)

    @staticmethod
    def is_compiled() -> bool:
        """Whether FlashInfer's module is compiled already. Compiling takes nvcc a minute, and a
        second process waits for it.
        """
        try:
            from flashinfer.jit.page import gen_page_module

            return bool(gen_page_module().is_compiled)
        except Exception:  # another FlashInfer, or none, may raise anything
            return False

    def prepare(self) -> Any:
        """Loads FlashInfer's module, compiling it with nvcc if it was not delivered compiled."""
        from flashinfer.page import get_page_module  # needs a GPU

        return get_page_module()

    def launch(self, room: Room, slots: torch.Tensor) -> None:
        """Launches on the current stream."""
        tokens, page, layers = len(slots), self._shape.tokens, self._shape.layers
        pages = tokens // page
        into = (slots[::page] // page).to(torch.int32)
        k, v = (self._rows(room.piece(half, 0, pages), tokens, layers) for half in (0, 1))
        for layer, pool in enumerate(self._pools):
            self._append(
                k[:, layer], v[:, layer], self._sequence[:tokens], self._positions[:tokens], pool,
                into, self._bounds[pages], self._full, kv_layout="NHD",
            )  # fmt: skip

    def _rows(self, piece: torch.Tensor, tokens: int, layers: int) -> Any:
        return piece.view(self._dtype).view(tokens, layers, *self._row)


def _append() -> Callable[..., None]:
    # Only callers that have FlashInfer get here.
    from flashinfer.page import append_paged_kv_cache

    found: Callable[..., None] = append_paged_kv_cache
    return found
