"""Rooms of staging with known pages, and where their rows belong."""

from __future__ import annotations

import torch

from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.staging import Room


def staged_room(
    shape: PageShape, heads: int, dim: int, pages: int, of: int
) -> tuple[Room, torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """A room of `of` pages with `pages` page-first ones of float32; slots, empty K and V buffers,
    and the rows that belong there, of every buffer.
    """
    chance = torch.Generator().manual_seed(3)
    room = Room(
        torch.randn(of * shape.half_bytes // 2, generator=chance).view(torch.uint8),
        of,
        shape.half_bytes,
    )
    order = torch.randperm(8, generator=chance)[:pages]
    slots = (order[:, None] * shape.tokens + torch.arange(shape.tokens)).flatten()
    k, v = (
        [torch.zeros(8 * shape.tokens, heads, dim) for _ in range(shape.layers)] for _ in range(2)
    )
    wanted = [
        room.piece(half, 0, pages).view(torch.float32).view(len(slots), shape.layers, heads, dim)[:, layer]
        for half in (0, 1)
        for layer in range(shape.layers)
    ]  # fmt: skip
    return room, slots, k, v, wanted
