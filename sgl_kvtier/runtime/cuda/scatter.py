"""Copies staged pages into their slots of all layers: the interface, and a kernel of our own that
does it in one launch.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.staging import Room

_ROWS = 8
_COLUMNS = 256


class Scatter(Protocol):
    """A way of copying from staging into slots."""

    def prepare(self) -> Any:
        """Compiles what a launch needs, for the current device. Raises what a compiler raises."""

    def launch(self, room: Room, slots: torch.Tensor) -> None:
        """Copies a room's first pages, on the current stream; a slot (int64, device) per token."""


class TritonScatter:
    """One launch for K and V of all layers. Rows of 16, 32, ... bytes move 16 bytes at a time."""

    def __init__(self, shape: PageShape, room_pages: int, buffers: list[torch.Tensor]) -> None:
        """`buffers`: K of every layer, then V of every layer, [slot, ...] with packed rows. They
        must outlive this object.
        """
        from sgl_kvtier.runtime.cuda.triton_kernel import scatter_rows  # needs Triton

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
        """Compiles the kernel for the current device, which saves Triton's lookup in every launch.
        Raises what Triton raises. Returns Triton's compiled kernel.
        """
        pointers = (torch.uint8, torch.int64, torch.int64)
        compiled = self._kernel.warmup(*pointers, 1, grid=(1, 1, 1), **self._constants)
        # An empty launch: a Triton version that takes other arguments fails now.
        nothing = (self._tables, self._tables, self._tables, 0)
        compiled[(0, self._layers, 2)](*nothing, *self._constants.values())
        self._compiled = compiled
        return compiled

    def launch(self, room: Room, slots: torch.Tensor) -> None:
        """Launches on the current stream. `slots` are aligned to 16 bytes, as whole pages are."""
        tokens = len(slots)
        grid = (-(-tokens // _ROWS), self._layers, 2)
        if self._compiled is None:
            self._kernel[grid](room.memory, self._tables, slots, tokens, **self._constants)
        else:
            known = self._constants.values()
            self._compiled[grid](room.memory, self._tables, slots, tokens, *known)


def constants(shape: PageShape, room_pages: int, aligned: bool) -> dict[str, Any]:
    """The constants that the kernel is compiled with, in its order. Steps are in words, of 4 bytes
    if rows are a multiple of that.
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
