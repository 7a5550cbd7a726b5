"""A distributed engine as the child process sees it: five methods on names and addresses."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Code(enum.IntEnum):
    """How an engine's call ended for one object."""

    OK = 0
    KEPT = 1
    """It was there already: nothing was written."""
    MISS = 2
    CORRUPT = 3
    """There is something under this name that is not this page."""
    REFUSED = 4
    """No room."""
    FAILED = 5
    """A transfer failed, so its memory may still be written to."""
    UNREACHABLE = 6
    """The master does not answer."""
    LATE = 7
    """The caller's deadline passed first. No engine says this."""


class Removed(NamedTuple):
    """How the removal of one name ended. OK and MISS: nothing is left under it."""

    code: Code
    went: int = 0
    """Objects that went."""


class EngineError(Exception):
    """The engine cannot be used now. The text says what to do."""


class Engine(Protocol):
    """Objects by name. Any thread. A method may hang for ever, and raises nothing that says more
    than its codes.
    """

    def exists(self, names: Sequence[str]) -> list[Code]:
        """OK, MISS or UNREACHABLE, one per name."""

    def get(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        """Copies objects to addresses. CORRUPT for an object of another size."""

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        """Stores objects that are not there yet."""

    def remove(self, names: Sequence[str]) -> list[Removed]:
        """Removes objects. A name that ends in / stands for all that begin so."""

    def close(self) -> None:
        """Leaves the engine."""
