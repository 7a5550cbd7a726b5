"""What each rank finds out by itself, and all ranks have to know before any of them acts on it.

A poll goes with the loads of restorations into the agreement of a step: of every page's states on the ranks the smallest
counts, so it has ended when it has on every rank, and well only where it has on all of them (`restoration.OPEN` < lost <
`LANDED`). Ranks make the same polls in the same steps with the same numbers.
"""

from __future__ import annotations

from sgl_kvtier.runtime.restore.restoration import LANDED, OPEN


class Poll:
    """Pages that are waited for. `local` is what this rank knows, `seen` what all of them do; any thread may mark.

    `ended_at` are this rank's times per page, `seen_at` is when the last page that has ended did so on the first rank.
    """

    def __init__(self, number: int, pages: int) -> None:
        self.number = number
        self.local = bytearray(pages)
        self.ended_at = [0.0] * max(1, pages)
        self.seen = bytes(pages)
        self.seen_at = 0.0

    def mark(self, page: int, state: int, now: float) -> None:
        """A page has ended on this rank."""
        self.ended_at[page] = now
        self.local[page] = state

    def agreed(self, states: bytes, ended_at: float) -> None:
        """What all ranks know by now. Scheduler's thread."""
        self.seen, self.seen_at = states, ended_at

    @property
    def over(self) -> bool:
        """Every page has ended on every rank."""
        return OPEN not in self.seen

    @property
    def well(self) -> int:
        """So many pages, from the first on, have ended well on every rank."""
        return next((page for page, state in enumerate(self.seen) if state != LANDED), len(self.seen))
