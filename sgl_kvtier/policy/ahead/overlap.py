"""Whether transfers were predicted to be hidden, and whether the prediction was right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """One test of Eq. 1: loading all pages that `owner` lacks takes `transfer_s` behind earlier
    loads, and `window_s` are left.
    """

    owner: str
    pages: int
    transfer_s: float
    window_s: float
    held: bool


class Overlaps:
    """Counts tests and outcomes: of each turn the first test. Memory is bounded by open turns."""

    def __init__(self) -> None:
        self._open: dict[str, bool] = {}
        self.counts = {
            "held": 0,
            "failed": 0,
            "held_right": 0,
            "held_wrong": 0,
            "failed_right": 0,
            "failed_wrong": 0,
        }
        """held_right: predicted to be hidden, and all pages were there at the turn. failed_wrong:
        predicted not to be hidden, but they were there.
        """
        self._fetched: set[str] = set()

    def __contains__(self, owner: str) -> bool:
        """Whether this turn was tested before."""
        return owner in self._open

    def tested(self, test: Overlap) -> bool:
        """Records a test; False if this turn was tested before."""
        if test.owner in self._open:
            return False
        self._open[test.owner] = test.held
        self.counts["held" if test.held else "failed"] += 1
        return True

    def __len__(self) -> int:
        """How many turns are still to come."""
        return len(self._open)

    def fetched(self, owner: str) -> None:
        """Its turn has come, and the engine brings pages that were missing."""
        if owner in self._open:
            self._fetched.add(owner)

    def started(self, owner: str, complete: bool) -> None:
        """It runs; `complete`: no page is missing. With pages just fetched some were."""
        held = self._open.pop(owner, None)
        if held is not None:
            complete = complete and owner not in self._fetched
            self._fetched.discard(owner)
            self.counts[
                ("held_" if held else "failed_") + ("right" if held is complete else "wrong")
            ] += 1

    def forget(self, owner: str) -> None:
        """The turn will not come."""
        self._open.pop(owner, None)
        self._fetched.discard(owner)
