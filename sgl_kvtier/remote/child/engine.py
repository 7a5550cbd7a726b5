"""The interface of a distributed engine in the child process: five methods on object names."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Code(enum.IntEnum):
    """How an engine's call ended for one object."""

    OK = 0
    KEPT = 1
    """The object existed already; nothing was written."""
    MISS = 2
    CORRUPT = 3
    """The object under this name is not this page."""
    REFUSED = 4
    """The engine has no space."""
    FAILED = 5
    """A transfer failed. It may still write to its memory."""
    UNREACHABLE = 6
    """The master does not respond."""
    LATE = 7
    """The caller's deadline passed first. Set by the link, never by an engine."""


class Removed(NamedTuple):
    """How the removal of one name ended. After OK or MISS no object has it."""

    code: Code
    went: int = 0
    """Number of objects removed."""


class EngineError(Exception):
    """The engine cannot be used now. The message says what to do."""


class Engine(Protocol):
    """Stores objects by name. Any thread. A method may hang for ever, or raise."""

    def exists(self, names: Sequence[str]) -> list[Code]:
        """OK, MISS or UNREACHABLE, one per name."""

    def get(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        """Copies objects to addresses. CORRUPT if an object has another size."""

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[Code]:
        """Stores objects that do not exist yet."""

    def remove(self, names: Sequence[str]) -> list[Removed]:
        """Removes objects. A name that ends in / is a prefix."""

    def close(self) -> None:
        """Disconnects from the engine."""
