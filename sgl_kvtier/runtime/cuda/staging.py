"""Staging buffers in device memory, for pages between the bus and their slots: a ring of rooms."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvtier.runtime.cuda.card_memory import CardMemory
from sgl_kvtier.runtime.cuda.page_shape import PageShape

ROOM_BYTES = 16 << 20
"""Bytes of a room: from this size on, a bus reaches its full bandwidth. A load may use several
rooms. This and the next are smaller on a scaled-down device.
"""
MOST_BYTES = 256 << 20
"""Most bytes of all rooms, unless there are fewer than `_FEWEST`."""
_ROOMS = 8
_FEWEST = 3


@dataclass(eq=False)
class Room:
    """One staging buffer: `memory` holds K of `pages` pages, then V of as many, in bytes."""

    memory: torch.Tensor
    pages: int
    half_bytes: int
    """Bytes of K, or of V, of one page."""
    left: Any = None
    """The event after the last scatter from here, to be waited for before it is filled again."""

    def __post_init__(self) -> None:
        self.place = self.memory.data_ptr(), self.pages
        """Its address and number of pages."""

    def piece(self, half: int, page: int, pages: int) -> torch.Tensor:
        """K (0) or V (1) of `pages` pages from `page` on."""
        first = (half * self.pages + page) * self.half_bytes
        return self.memory[first : first + pages * self.half_bytes]


class Staging:
    """Rooms that copies take, and give back when their scatter was launched. One thread."""

    def __init__(self, memory: CardMemory, shape: PageShape) -> None:
        self.pages = pages_of_room(shape)
        nbytes = self.pages * 2 * shape.half_bytes
        self._rooms = [
            Room(memory.raw(nbytes), self.pages, shape.half_bytes) for _ in range(_rooms(nbytes))
        ]
        """All rooms, kept because the driver may still write to one whose copy was dropped."""
        self._free = deque(self._rooms)
        self.rooms = len(self._rooms)

    def take(self, early: bool) -> Room | None:
        """A room, or None. `early`: its pages cannot leave it yet. Such pages never get the last
        room, so that they cannot block others.
        """
        if len(self._free) <= (1 if early else 0):
            return None
        return self._free.popleft()

    def give(self, room: Room, left: Any) -> None:
        """Returns a room. It is not filled before the event `left` is reached."""
        room.left = left
        self._free.append(room)


def pages_of_room(shape: PageShape) -> int:
    """Pages that are copied at once, at least one."""
    return max(1, ROOM_BYTES // (2 * shape.half_bytes))


def staging_bytes(shape: PageShape) -> int:
    """Device memory that staging takes, in bytes."""
    nbytes = pages_of_room(shape) * 2 * shape.half_bytes
    return nbytes * _rooms(nbytes)


def _rooms(nbytes: int) -> int:
    return max(_FEWEST, min(_ROOMS, MOST_BYTES // nbytes))
