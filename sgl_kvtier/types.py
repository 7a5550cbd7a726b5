"""The words every room shares. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

PageKey = NewType("PageKey", bytes)
"""SGLang's chained SHA-256 page hash as its 32 raw bytes. It names all tokens from the start up to the page's end."""


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
