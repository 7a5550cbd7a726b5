"""Types that all packages of sgl_kvtier share. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""SGLang's chained SHA-256 page hash, 32 bytes. It identifies the page and all tokens before it."""


PACED = "paced:"
"""Prefix of the names of emulated devices, which only take an accelerator's time."""


class Lookup(enum.Enum):
    """The result of a page lookup."""

    HIT = "hit"
    PENDING = "pending"
    """The page is being written. Look it up again, or treat it as a miss."""
    MISS = "miss"


class Tier(enum.IntEnum):
    """Where a page can be, nearest to the GPU first: SGLang's L1, L2, L3, and remote memory."""

    DEVICE = 0
    HOST = 1
    STORAGE = 2
    REMOTE = 3


class Link(enum.Enum):
    """A transfer path between two tiers. Each has its own bandwidth estimate. Storage or remote to
    device is both hops as one path.
    """

    # Members are unique, and Enum's own hash is a Python call that would cost the planner a tenth
    # of its step.
    __hash__ = object.__hash__

    STORAGE_TO_HOST = "storage-host"
    HOST_TO_DEVICE = "host-device"
    STORAGE_TO_DEVICE = "storage-device"
    DEVICE_TO_HOST = "device-host"
    HOST_TO_STORAGE = "host-storage"
    REMOTE_TO_HOST = "remote-host"
    REMOTE_TO_DEVICE = "remote-device"


PLACES = {Tier.DEVICE: "device", Tier.HOST: "host", Tier.STORAGE: "storage", Tier.REMOTE: "remote"}
"""Names of the tiers in metrics and results, as SGLang names them."""


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, stop) of pages or of tokens; the field that holds it says which."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.stop < self.start:
            raise ValueError(f"not a range: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop
