"""The state of a page in one byte, and what follows from a prompt's sequence of such bytes.

Bit t: tier t holds the page. Bit t + 4: the page is in flight to tier t.
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
"""The tiers whose pages are kept in order of eviction: device and host."""
COLD: Final = 4
"""A bit of a page's listing, in addition to ON_DEVICE and IN_HOST: the page is in neither tier, and
is unpinned, not in flight and without an owner.
"""
LISTING: Final = bytes(
    0 if state & MOVING or not state else state & SHELVED or COLD for state in range(256)
)
TIERS: Final = tuple(Tier)


def _letter(state: int) -> int:
    """A letter for the tier from which lookahead would copy a page: D H S R resident, d h in flight
    to device or host, . in no tier.
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
"""Each alternative starts with a letter, so characters between runs are skipped, not tried."""
_TIER_OF: Final = {
    ord("H"): Tier.HOST,
    ord("S"): Tier.STORAGE,
    ord("R"): Tier.REMOTE,
    ord("h"): None,
}


@dataclass(frozen=True, slots=True)
class PageInfo:
    """Everything known of a page. Seconds of the executor's clock; `next_use` infinity: unknown."""

    tiers: tuple[Tier, ...]
    in_flight: tuple[Tier, ...]
    pins: int
    last_use: float
    next_use: float
    owners: tuple[str, ...]


class PageView(Protocol):
    """The planner's map of pages, as its executor may read it. Only facts change it."""

    def __len__(self) -> int:
        """Number of known pages."""

    def page(self, key: PageKey) -> PageInfo | None:
        """Everything known of a page, or None."""

    def count(self, tier: Tier) -> int:
        """Known pages that are resident in a tier."""

    def resident(self, tier: Tier) -> Iterator[PageKey]:
        """The keys of all pages in a tier, according to the facts. O(known pages)."""

    def resident_part(
        self, tier: Tier, place: int, count: int
    ) -> tuple[tuple[PageKey, ...], int | None]:
        """The same in parts: keys among `count` places from `place` on, and the next place."""

    def victims_aside(self, tier: Tier, count: int) -> tuple[PageKey, ...]:
        """The pages of a tier to evict first, in order of eviction."""

    def turn_of(self, owner: str) -> float | None:
        """When an owner should run next, in seconds; infinity: unknown. None: unknown owner."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The pages of an owner's prompt that are not on the device. Spans are pages of the prompt, in
    ascending order.

    `runs`: spans of pages in [0, reach) neither on the device nor in flight to it, each with the
    nearest tier that holds them (None: in flight to host memory). `reach`: the first page that is
    in no tier, from which on everything must be computed. `pages`: number of full prompt pages.
    """

    runs: tuple[tuple[Span, Tier | None], ...] = ()
    reach: int = 0
    pages: int = 0
    lacking: int = 0
    """Number of pages in `runs`."""
    below: int = 0
    """Number of these pages whose nearest copy is below host memory."""
    remote: int = 0
    """Number of these pages that are only in the remote tier."""


def missing_of(states: bytes) -> Missing:
    """The missing pages of a prompt with these page states. A few regex steps per run of pages."""
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
