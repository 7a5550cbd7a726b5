"""The words every room shares: page keys, tiers, links and half-open ranges. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""SGLang's chained SHA-256 page hash as its 32 raw bytes. It names all tokens from the start up to the page's end."""


def page_key(hex_digest: str) -> PageKey:
    """The key for a page hash as SGLang writes it (hexadecimal text). Raises ValueError on anything else."""
    return PageKey(bytes.fromhex(hex_digest))


class Tier(enum.IntEnum):
    """Where a page lives, nearest first. SGLang calls the first three L1, L2 and L3."""

    HBM = 0
    DRAM = 1
    SSD = 2
    REMOTE = 3


class Lookup(enum.Enum):
    """The answer to "do you have this page?"."""

    HIT = "hit"
    PENDING = "pending"
    """Being written at this moment: ask again, or treat as a miss."""
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range [start, stop) of pages or tokens; which one is said where it is used."""

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
