"""Staged pages into their slots of all layers: what the ways to do it have in common, and a kernel
of our own that does it in one launch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.staging import Room

_ROWS = 8
_COLUMNS = 256


class Scatter(Protocol):
    """A way from staging into slots."""

    def prepare(self) -> Any:
        """Compiles what a launch needs, for the current device. Raises what a compiler raises."""

    def launch(self, room: Room, slots: torch.Tensor) -> None:
        """On the current stream: the first pages of a room, a slot (int64, device) per token."""


class TritonScatter:
    """One launch for K and V of all layers. Rows of 16, 32, ... bytes move 16 bytes at a time."""

    def __init__(self, shape: PageShape, room_pages: int, buffers: list[torch.Tensor]) -> None:
        """`buffers`: of every layer K, then of every layer V, [slot, ...] with packed rows. They
        have to outlive this.
        """
        from sgl_kvtier.runtime.cuda.triton_kernel import scatter_rows  # asks for Triton

        assert len(buffers) == 2 * shape.layers
        self._kernel, self._layers = scatter_rows, shape.layers
        self._tables = torch.tensor(
            [buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=buffers[0].device
        )
        self._keep = buffers
        aligned = all(buffer.data_ptr() % 16 == 0 for buffer in buffers)
        self._constants = constants(shape, room_pages, aligned)
        self._compiled: Any = None

    def prepare(self) -> Any:
        """Compiles the kernel for the current device, and keeps Triton's search for it out of every
        launch. Raises what Triton raises. Returns Triton's compiled kernel.
        """
        pointers = (torch.uint8, torch.int64, torch.int64)
        compiled = self._kernel.warmup(*pointers, 1, grid=(1, 1, 1), **self._constants)
        # A launch of nothing: another Triton that takes other arguments says so now.
        nothing = (self._tables, self._tables, self._tables, 0)
        compiled[(0, self._layers, 2)](*nothing, *self._constants.values())
        self._compiled = compiled
        return compiled

    def launch(self, room: Room, slots: torch.Tensor) -> None:
        """On the current stream. `slots` begin at 16 bytes, as those of whole pages do."""
        tokens = len(slots)
        grid = (-(-tokens // _ROWS), self._layers, 2)
        if self._compiled is None:
            self._kernel[grid](room.memory, self._tables, slots, tokens, **self._constants)
        else:
            known = self._constants.values()
            self._compiled[grid](room.memory, self._tables, slots, tokens, *known)


def constants(shape: PageShape, room_pages: int, aligned: bool) -> dict[str, Any]:
    """What the kernel is compiled for, in its order; steps in words, of 4 bytes where rows are made
    of such.
    """
    word = next(n for n in (4, 2, 1) if shape.row_bytes % n == 0)
    words = shape.row_bytes // word
    return {
        "WORD_BYTES": word,
        "LAYERS": shape.layers,
        "PAGE": shape.tokens,
        "WORDS": words,
        "LAYER_STEP": shape.layer_step // word,
        "TOKEN_STEP": shape.token_step // word,
        "PAGE_STEP": shape.half_bytes // word,
        "HALF_STEP": room_pages * shape.half_bytes // word,
        "WIDE": aligned and shape.row_bytes % 16 == 0,
        "COLUMNS": min(_COLUMNS, 1 << (words - 1).bit_length()),
        "ROWS": _ROWS,
    }
