"""Run with TRITON_INTERPRET=1: cases of the scatter against torch. Prints those that differ."""

from __future__ import annotations

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from sgl_kvtier.runtime.cuda.page_shape import shape_of
from sgl_kvtier.runtime.cuda.scatter import TritonScatter
from sgl_kvtier.runtime.cuda.staging import Room

SLOTS, LAYERS = 96, 3
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn)
ROWS = ((2, 32), (1, 128), (3, 8), (1, 9), (5, 2), (1, 300))
"""Heads and their width: rows of 16 bytes and more, of 4, of 2 and of 1; wider than a step."""
PAGES = ((16, 2, 2), (2, 3, 4))
"""Tokens of a page, pages that are scattered, and pages of the room."""


def differs(dtype: torch.dtype, row: Any, pages: Any, layout: str) -> bool:
    """One case: a room whose first pages go to slots here and there."""
    (heads, dim), (page, count, most) = row, pages
    count = min(count, most)
    pool = SimpleNamespace(
        head_num=heads, head_dim=dim, dtype=dtype, page_size=page, layer_num=LAYERS, layout=layout
    )
    shape, chance = shape_of(pool), torch.Generator().manual_seed(7)
    room = Room(
        torch.randint(0, 255, (2 * most * shape.half_bytes,), dtype=torch.uint8, generator=chance),
        most,
        shape.half_bytes,
    )
    k, v = ([torch.zeros(SLOTS, heads, dim, dtype=dtype) for _ in range(LAYERS)] for _ in range(2))
    order = torch.randperm(SLOTS // page, generator=chance)[:count]
    slots = (order[:, None] * page + torch.arange(page)).flatten()
    TritonScatter(shape, most, [*k, *v]).launch(room, slots)
    for half, buffers in enumerate((k, v)):
        staged = room.piece(half, 0, count)
        rows = staged.view(count, *((LAYERS, page) if shape.layer_major else (page, LAYERS)), -1)
        for layer, buffer in enumerate(buffers):
            wanted = torch.zeros_like(buffer).view(torch.uint8).view(SLOTS, -1)
            mine = rows[:, layer] if shape.layer_major else rows[:, :, layer]
            wanted[slots] = mine.reshape(len(slots), -1)
            if not torch.equal(buffer.view(torch.uint8).view(SLOTS, -1), wanted):
                return True
    return False


def chosen() -> list[tuple[Any, ...]]:
    """Every dtype with every row, and every row with every way that pages lie: the interpreter
    takes a tenth of a second for a case.
    """
    lie = list(itertools.product(PAGES, ("page_first", "page_first_direct")))
    pairs = itertools.product(DTYPES[1:], ROWS)
    return [
        *((DTYPES[0], row, *way) for row in ROWS for way in lie),
        *((*pair, *lie[number % len(lie)]) for number, pair in enumerate(pairs)),
    ]


if __name__ == "__main__":
    cases = chosen()
    wrong = [str(case) for case in cases if differs(*case)]
    json.dump({"cases": len(cases), "wrong": wrong}, sys.stdout)
