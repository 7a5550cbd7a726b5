"""Rooms between the bus and the slots: who gets the last one, and when one is filled again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_kvtier.runtime.cuda.page_shape import PageShape
from sgl_kvtier.runtime.cuda.staging import Staging, staging_bytes

SHAPE = PageShape(tokens=16, layers=4, row_bytes=64 << 10, layer_major=True)
MEMORY: Any = SimpleNamespace(raw=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def test_pages_that_cannot_leave_their_room_yet_never_get_the_last_one() -> None:
    staging = Staging(MEMORY, SHAPE)
    early = []
    while (room := staging.take(early=True)) is not None:
        early.append(room)
    assert len(early) == staging_bytes(SHAPE) // (2 * SHAPE.half_bytes * staging.pages) - 1
    last = staging.take(early=False)
    assert last is not None and last not in early
    assert staging.take(early=False) is None
    staging.give(early[0], left=7)
    assert staging.take(early=True) is None
    again = staging.take(early=False)
    assert again is early[0] and again.left == 7
