"""The words every room shares. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""SGLang's chained SHA-256 page hash as its 32 raw bytes. It names all tokens from the first to the
page's last.
"""


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

    HBM = 0
    DRAM = 1
    SSD = 2
    REMOTE = 3


class Link(enum.Enum):
    """A path that bytes take. Each has its own bandwidth estimate; SSD to HBM is both hops as
    one.
    """

    # Members are unique, and Enum's own hash is a Python call that would cost the planner a tenth
    # of its step.
    __hash__ = object.__hash__

    SSD_TO_DRAM = "ssd-dram"
    DRAM_TO_HBM = "dram-hbm"
    SSD_TO_HBM = "ssd-hbm"
    HBM_TO_DRAM = "hbm-dram"
    DRAM_TO_SSD = "dram-ssd"


PLACES = {Tier.HBM: "device", Tier.DRAM: "host", Tier.SSD: "storage", Tier.REMOTE: "remote"}
"""Tiers in metrics and results, named in SGLang's words."""
ROUTES = {
    Link.SSD_TO_DRAM: "storage-host",
    Link.DRAM_TO_HBM: "host-device",
    Link.SSD_TO_HBM: "storage-device",
    Link.HBM_TO_DRAM: "device-host",
    Link.DRAM_TO_SSD: "host-storage",
}
"""Links in the same words. Decision logs and learned profiles have a link's own value."""


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
