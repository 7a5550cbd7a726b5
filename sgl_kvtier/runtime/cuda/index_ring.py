"""Indices on their way to the device, through pinned memory that is used again and again.

From pageable memory an upload may wait for all that its stream holds, with the interpreter held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvtier.runtime.cuda.card_memory import CardMemory

_PLACES = 8
_TOKENS = 4096


@dataclass
class _Place:
    pinned: torch.Tensor
    ended: Any = None
    """The event behind its last upload."""


class IndexRing:
    """Used by one thread, the mover's."""

    def __init__(self, module: Any, memory: CardMemory) -> None:
        self._module, self._memory = module, memory
        self._places = [_Place(memory.pinned(_TOKENS)) for _ in range(_PLACES)]
        self._next = 0

    def upload(self, slots: torch.Tensor) -> torch.Tensor:
        """These host indices in device memory, on the current stream. Blocks only while all places
        of the ring are under way.
        """
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        if place.ended is not None:
            place.ended.synchronize()
        if len(slots) > len(place.pinned):
            place.pinned = self._memory.pinned(len(slots))
        pinned, device = place.pinned[: len(slots)], self._memory.indices(len(slots))
        self._memory.write(pinned, slots)
        self._memory.copy(device, pinned)
        place.ended = self._module.Event(blocking=True)
        place.ended.record()
        return device
