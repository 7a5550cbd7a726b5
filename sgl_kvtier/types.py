"""The words every room shares. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""SGLang's chained SHA-256 page hash, 32 bytes: it names all tokens up to the page's last."""


PACED = "paced:"
"""Begins the name of a device that computes nothing and takes an accelerator's time."""


class Lookup(enum.Enum):
    """The answer to a look-up of a page."""

    HIT = "hit"
    PENDING = "pending"
    """Being written at this moment: look it up again, or treat it as a miss."""
    MISS = "miss"


class Tier(enum.IntEnum):
    """Where a page can be; a smaller number is nearer to the compute. SGLang calls the first three
    L1, L2, L3.
    """

    DEVICE = 0
    HOST = 1
    STORAGE = 2
    REMOTE = 3


class Link(enum.Enum):
    """A path that bytes take. Each has its own bandwidth estimate; storage or remote to device is
    both hops as one.
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
"""Tiers in metrics and results, named in SGLang's words."""


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, stop) of pages or tokens; the place of use says of which."""

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
