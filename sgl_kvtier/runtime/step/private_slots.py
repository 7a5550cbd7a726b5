"""Device and host pages that restorations hold: neither free, nor in the tree, nor in a request's
row.

SGLang's memory checks add up every device page, so these are counted until they are freed or given
to a row. Scheduler's thread only; every rank allocates and frees in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgl_kvtier.runtime.sglang.anchors import Anchors
from sgl_kvtier.runtime.sglang.device_slots import DeviceSlots
from sgl_kvtier.runtime.sglang.host_tier import HostTier


class AnchorSlots(NamedTuple):
    """Device and host slots of anchors, equally many, with `page` slots per page."""

    device: torch.Tensor
    host: torch.Tensor
    page: int

    def pages(self, first: int, stop: int) -> AnchorSlots:
        """The slots of pages [first, stop)."""
        some = slice(first * self.page, stop * self.page)
        return AnchorSlots(self.device[some], self.host[some], self.page)


class PrivateSlots:
    """Allocates whole pages from SGLang's pools and gives them back."""

    def __init__(self, device: DeviceSlots, host: HostTier, anchors: Anchors | None = None) -> None:
        self.device = device
        self.host = host
        self._anchors = anchors
        self._returned: list[torch.Tensor] = []
        self._returned_anchors: list[torch.Tensor] = []
        self.anchor_slots = 0
        """Device slots of anchors held or waiting to be freed."""
        self.tokens = 0
        """Device tokens held or waiting to be freed."""
        self.host_tokens = 0
        self.claiming = False
        """While true, SGLang evicts for us: no restoration gives up slots for it."""

    @property
    def waiting(self) -> bool:
        """Whether pages wait to be freed."""
        return bool(self._returned or self._returned_anchors)

    def free_up_device(self, tokens: int) -> int:
        """Evicts unused pages until `tokens` slots are empty; returns how many are."""
        self.claiming = True
        try:
            return self.device.free_up(tokens)
        finally:
            self.claiming = False

    def claim_device(self, tokens: int) -> torch.Tensor | None:
        """Allocates whole pages, evicting unused ones; None when there is no room."""
        self.claiming = True
        try:
            slots = self.device.claim(tokens)
        finally:
            self.claiming = False
        if slots is not None:
            self.tokens += tokens
        return slots

    def claim_host(self, tokens: int) -> torch.Tensor | None:
        """Allocates whole host pages, evicting by LRU; None when there is no room."""
        slots = self.host.claim(tokens)
        if slots is not None:
            self.host_tokens += tokens
        return slots

    def claim_anchors(self, pages: int) -> AnchorSlots | None:
        """Allocates the anchor slots of this many pages, on device and host: both or none."""
        assert self._anchors is not None, "of a model with anchors"
        slots = pages * self._anchors.page_slots
        self.claiming = True
        try:
            device = self._anchors.claim(slots)
        finally:
            self.claiming = False
        if device is None:
            return None
        self.anchor_slots += slots
        try:
            host = self.claim_host_anchors(pages)
        except Exception:
            self.put_back_anchors(device)
            raise
        if host is None:
            self.put_back_anchors(device)
            return None
        return AnchorSlots(device, host, self._anchors.page_slots)

    def claim_host_anchors(self, pages: int) -> torch.Tensor | None:
        """Allocates anchor slots of this many pages in host memory; None: no room."""
        assert self._anchors is not None, "of a model with anchors"
        return self._anchors.claim_host(pages * self._anchors.page_slots)

    def give_anchors(self, slots: int) -> None:
        """This many device slots of anchors belong to a request from now on."""
        self.anchor_slots -= slots

    def put_back_anchors(self, slots: torch.Tensor) -> None:
        """Returns device slots of anchors that no I/O touches; freed by the next `free`."""
        self._returned_anchors.append(slots)

    def put_back_host_anchors(self, slots: torch.Tensor) -> None:
        """Frees host slots of anchors that no I/O touches."""
        assert self._anchors is not None, "of a model with anchors"
        self._anchors.free_host(slots)

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
        self.host.free(slots)

    def free(self) -> None:
        """Frees what was put back. Not inside result processing, where SGLang groups frees."""
        returned, self._returned = self._returned, []
        for slots in returned:
            self.tokens -= len(slots)
            self.device.free(slots)
        anchors, self._returned_anchors = self._returned_anchors, []
        for slots in anchors:
            assert self._anchors is not None, "of a model with anchors"
            self.anchor_slots -= len(slots)
            self._anchors.free(slots)
