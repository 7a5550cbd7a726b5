"""Allocations and copies of a card's memory, as far as loads need them; and indices on their way to
the device, through pinned memory that is used again and again.

From pageable memory an upload may wait for all that its stream holds, with the interpreter held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_PLACES = 8
_TOKENS = 4096


class CardMemory:
    """Of one device. What is asynchronous runs on the calling thread's current stream."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def pinned(self, numel: int) -> torch.Tensor:
        """Host memory for `numel` indices (int64) that the copy engine can read."""
        return torch.empty(numel, dtype=torch.int64, pin_memory=True)

    def indices(self, numel: int) -> torch.Tensor:
        """Device memory for `numel` indices (int64), of the current stream."""
        return torch.empty(numel, dtype=torch.int64, device=self._device)

    def raw(self, nbytes: int) -> torch.Tensor:
        """Device memory. Raises torch.OutOfMemoryError."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def write(self, pinned: torch.Tensor, values: torch.Tensor) -> None:
        """The host writes pinned memory, now."""
        pinned.copy_(values)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One piece of pinned memory to one piece of device memory, asynchronously."""
        target.copy_(source, non_blocking=True)


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
