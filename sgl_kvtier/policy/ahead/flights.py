"""Pages that this planner moves between tiers, until the executor reports their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvtier.types import Link, PageKey, Tier


@dataclass(slots=True)
class _Move:
    owner: str
    target: Tier
    links: tuple[Link, ...]
    pages: dict[PageKey, None]
    late_at: float


class Flights:
    """Each page is in flight to one tier at most. Seconds of the executor's clock; memory grows
    with the pages in flight.
    """

    def __init__(self) -> None:
        self._of: dict[PageKey, _Move] = {}
        self._moves: dict[int, _Move] = {}
        self._serial = 0
        self._pages: dict[Link, int] = {}
        self._coming = {Tier.DEVICE: 0, Tier.HOST: 0, Tier.STORAGE: 0, Tier.REMOTE: 0}
        self._since: dict[Link, float] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._of

    def others(self, keys: tuple[PageKey, ...]) -> tuple[PageKey, ...]:
        """Those of these pages that are not in flight."""
        return (
            keys
            if self._of.keys().isdisjoint(keys)
            else tuple(key for key in keys if key not in self._of)
        )

    def pages(self, link: Link) -> int:
        """Number of pages that have yet to come over a link."""
        return self._pages.get(link, 0)

    def coming(self, tier: Tier) -> int:
        """Number of pages on their way to a tier."""
        return self._coming[tier]

    def owners(self, keys: Sequence[PageKey], target: Tier) -> tuple[str, ...]:
        """The owners of those of these pages that are on their way to a tier."""
        if self._of.keys().isdisjoint(keys):
            return ()
        moves = (self._of.get(key) for key in keys)
        return tuple(
            dict.fromkeys(
                move.owner for move in moves if move is not None and move.target is target
            )
        )

    def from_below_host(self, key: PageKey) -> bool:
        """Whether a page is on its way through host to device."""
        move = self._of.get(key)
        return move is not None and move.target is Tier.DEVICE and len(move.links) > 1

    def begin(
        self,
        keys: Sequence[PageKey],
        target: Tier,
        links: tuple[Link, ...],
        now: float,
        late_at: float,
        owner: str = "",
    ) -> None:
        """A move begins, for an owner; from `late_at` on it counts as failed."""
        move = _Move(owner, target, links, dict.fromkeys(keys), late_at)
        self._coming[target] += len(keys)
        self._serial += 1
        self._moves[self._serial] = move
        assert self._of.keys().isdisjoint(keys), "a page in flight is not moved again"
        self._of.update(dict.fromkeys(keys, move))
        for link in links:
            if not self._pages.get(link):
                self._since[link] = now
            self._pages[link] = self._pages.get(link, 0) + len(keys)

    def ended(self, keys: Sequence[PageKey], target: Tier, now: float) -> int:
        """Pages have come to a tier, or will not. Returns how many of them were in flight to it."""
        count = 0
        if self._of.keys().isdisjoint(keys):
            return count
        for key in keys:
            move = self._of.get(key)
            if move is None or move.target is not target:
                continue
            del self._of[key], move.pages[key]
            count += 1
            self._coming[target] -= 1
            for link in move.links:
                self._pages[link] -= 1
                self._since[link] = now
        return count

    def backlog_seconds(self, link: Link, seconds_per_page: float, now: float) -> float:
        """Seconds until a link brought all pages in flight, less those since the last arrival."""
        pages = self._pages.get(link, 0)
        return max(0.0, pages * seconds_per_page - (now - self._since[link])) if pages else 0.0

    def late(self, now: float) -> list[tuple[tuple[PageKey, ...], Tier]]:
        """Removes and returns the moves that are overdue, looking at the oldest ones first."""
        overdue = []
        while self._moves:
            serial = next(iter(self._moves))
            move = self._moves[serial]
            if move.pages and move.late_at > now:
                break
            del self._moves[serial]
            if move.pages:
                keys = tuple(move.pages)
                self.ended(keys, move.target, now)
                overdue.append((keys, move.target))
        return overdue
