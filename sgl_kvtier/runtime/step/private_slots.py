"""Device and host pages that belong to restorations: neither free, nor the tree's, nor in a
request's row.

SGLang's memory checks add up every device page, so these are counted until they are freed or given
to a row. Scheduler's thread only; every rank claims and frees in the same order.
"""

from __future__ import annotations

import torch

from sgl_kvtier.runtime.sglang.device_slots import DeviceSlots
from sgl_kvtier.runtime.sglang.host_tier import HostTier


class PrivateSlots:
    """Claims slots page by page from SGLang's pools and gives them back."""

    def __init__(self, device: DeviceSlots, host: HostTier) -> None:
        self._device = device
        self._host = host
        self._returned: list[torch.Tensor] = []
        self.tokens = 0
        """Device tokens held or waiting to be freed."""
        self.host_tokens = 0
        self.claiming = False
        """While true, an eviction is for a claim of ours: no restoration gives up slots for it."""

    @property
    def waiting(self) -> bool:
        """Whether pages wait to be freed."""
        return bool(self._returned)

    def claim_device(self, tokens: int) -> torch.Tensor | None:
        """Claims whole pages, evicting unused ones; None when there is no room."""
        self.claiming = True
        try:
            slots = self._device.claim(tokens)
        finally:
            self.claiming = False
        if slots is not None:
            self.tokens += tokens
        return slots

    def claim_host(self, tokens: int) -> torch.Tensor | None:
        """Whole host pages, evicting the least recently used; None when there is no room."""
        slots = self._host.claim(tokens)
        if slots is not None:
            self.host_tokens += tokens
        return slots

    def give(self, tokens: int) -> None:
        """This many device tokens belong to a request's row from now on."""
        self.tokens -= tokens

    def give_host(self, tokens: int) -> None:
        """This many host tokens belong to the tree from now on."""
        self.host_tokens -= tokens

    def put_back(self, slots: torch.Tensor) -> None:
        """Returns whole device pages that no I/O touches; freed by the next `free`."""
        self._returned.append(slots)

    def put_back_host(self, slots: torch.Tensor) -> None:
        """Frees host pages that no I/O touches."""
        self.host_tokens -= len(slots)
        self._host.free(slots)

    def free(self) -> None:
        """Frees what was put back. Not inside result processing, where SGLang groups frees."""
        returned, self._returned = self._returned, []
        for slots in returned:
            self.tokens -= len(slots)
            self._device.free(slots)
