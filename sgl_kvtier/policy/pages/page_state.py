"""A page's state in one byte, and what a row of such bytes says.

Bit t says that tier t holds the page, bit t + 4 that it is on its way there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from sgl_kvtier.types import PageKey, Span, Tier

RESIDENT: Final = 0x0F
MOVING: Final = 0xF0
ON_DEVICE: Final = 0x01
IN_HOST: Final = 0x02
SHELVED: Final = 0x03
"""Bits of the tiers whose pages are kept in the order of eviction."""
COLD: Final = 4
"""A bit of a page's listing besides ON_DEVICE and IN_HOST: in neither, unpinned, not moving,
without an owner.
"""
LISTING: Final = bytes(
    0 if state & MOVING or not state else state & SHELVED or COLD for state in range(256)
)
TIERS: Final = tuple(Tier)


def _letter(state: int) -> int:
    """The tier from which lookahead would take a page: D H S R resident, d h on its way to
    device or host, . nowhere.
    """
    for tier, there, coming in (
        (Tier.DEVICE, "D", "d"),
        (Tier.HOST, "H", "h"),
        (Tier.STORAGE, "S", ""),
        (Tier.REMOTE, "R", ""),
    ):
        if state >> tier & 1:
            return ord(there)
        if coming and state >> (4 + tier) & 1:
            return ord(coming)
    return ord(".")


_LETTERS: Final = bytes(_letter(state) for state in range(256))
_RUNS: Final = re.compile(rb"HH*|hh*|SS*|RR*")
"""Letters first, so that characters between runs are skipped and not tried."""
_TIER_OF: Final = {
    ord("H"): Tier.HOST,
    ord("S"): Tier.STORAGE,
    ord("R"): Tier.REMOTE,
    ord("h"): None,
}


@dataclass(frozen=True, slots=True)
class PageInfo:
    """Everything known of a page. Seconds of the executor's clock; `next_use` infinite: unknown."""

    tiers: tuple[Tier, ...]
    in_flight: tuple[Tier, ...]
    pins: int
    last_use: float
    next_use: float
    owners: tuple[str, ...]


class PageView(Protocol):
    """A planner's map of pages, for its executor to read. Only facts change it."""

    def __len__(self) -> int:
        """Known pages."""

    def page(self, key: PageKey) -> PageInfo | None:
        """All that is known of a page; None if nothing is."""

    def count(self, tier: Tier) -> int:
        """Known pages that are resident in a tier."""

    def resident(self, tier: Tier) -> Iterator[PageKey]:
        """Every key said to be in a tier. O(known pages)."""

    def resident_part(
        self, tier: Tier, place: int, count: int
    ) -> tuple[tuple[PageKey, ...], int | None]:
        """The same a part at a time: keys among `count` places from `place` on, and where the next
        part begins.
        """

    def victims_aside(self, tier: Tier, count: int) -> tuple[PageKey, ...]:
        """The pages that leave a tier first, the first one first."""

    def turn_of(self, owner: str) -> float | None:
        """When an owner should run next, in seconds; infinity where that is not known, None where
        the owner is not.
        """


@dataclass(frozen=True, slots=True)
class Missing:
    """The pages of an owner's prompt that the device lacks. Spans are pages of its prompt,
    ascending.

    `runs`: pages of [0, reach) not on the device and not on their way there, with the nearest tier
    that holds them (None: on their way to host memory). `reach`: the first page that is in no tier;
    from there on everything must be computed. `pages`: its full prompt pages.
    """

    runs: tuple[tuple[Span, Tier | None], ...] = ()
    reach: int = 0
    pages: int = 0
    lacking: int = 0
    """Number of pages in `runs`."""
    below: int = 0
    """Number of those whose nearest copy is below host memory."""
    remote: int = 0
    """Number of those that only other servers share."""


def missing_of(states: bytes) -> Missing:
    """The pages that the device lacks of a prompt whose pages have these states. A few
    regular-expression steps per run of pages.
    """
    letters = states.translate(_LETTERS)
    reach = letters.find(b".")
    reach = len(letters) if reach < 0 else reach
    runs = []
    for run in _RUNS.finditer(letters, 0, reach):
        start, stop = run.span()
        runs.append((Span(start, stop), _TIER_OF[letters[start]]))
    remote = letters.count(b"R", 0, reach)
    below = letters.count(b"S", 0, reach) + remote
    lacking = below + letters.count(b"H", 0, reach) + letters.count(b"h", 0, reach)
    return Missing(tuple(runs), reach, len(letters), lacking, below, remote)
