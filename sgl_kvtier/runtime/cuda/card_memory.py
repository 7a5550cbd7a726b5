"""Allocations and copies of a card's memory, as far as loads need them."""

from __future__ import annotations

import torch


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
