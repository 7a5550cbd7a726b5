"""Events that each rank observes by itself, and that all ranks must know of before any acts on
them.

Polls are reduced over the ranks together with the loads of restorations, once per step. The state
of each page is the minimum over all ranks (`OPEN` < lost < `LANDED`). So a page has ended once it
has ended on every rank, and it has landed only if it has landed on all. All ranks make the same
polls in the same steps with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sgl_kvtier.store.base import ReadOutcome

OPEN = 0
LANDED = 100
"""States of a page, one byte. The minimum over the ranks counts: open before lost before landed."""

_MOST_SERIOUS_FIRST = (
    ReadOutcome.CORRUPT,
    ReadOutcome.FAILED,
    ReadOutcome.MISS,
    ReadOutcome.LATE,
    ReadOutcome.CANCELLED,
)
DIFFERS = 1
"""The state of a page that is on the device and differs from its source. It is the smallest of the
lost states, so every rank sees it in the same step, whatever else was lost on others.
"""
LOST = {outcome: code for code, outcome in enumerate(_MOST_SERIOUS_FIRST, start=DIFFERS + 1)}
"""The state of a lost page by its outcome. Where a page is lost on several ranks for different
reasons, the smallest code is the one that all of them count and report. So a page that is damaged
on one rank is reported as damaged, and not as the cancelled read of another rank.
"""
REASON = {DIFFERS: "differs", **{code: outcome.value for outcome, code in LOST.items()}}


class Poll:
    """The states of pages in flight. `local` is what this rank knows, and any thread may set it;
    `seen` is what all ranks agreed on.

    `ended_at` are this rank's times per page. `seen_at` is when, on the first rank, the last of the
    ended pages ended.
    """

    def __init__(self, number: int, pages: int) -> None:
        self.number = number
        self.local = bytearray(pages)
        self.ended_at = [0.0] * max(1, pages)
        self.seen = bytearray(pages)
        self.seen_at = 0.0

    def mark(self, page: int, state: int, now: float) -> None:
        """Sets the state of a page that has ended on this rank."""
        self.ended_at[page] = now
        self.local[page] = state

    def agreed(self, states: bytes, ended_at: float) -> None:
        """Sets the states that all ranks agreed on. Scheduler's thread."""
        self.seen[:], self.seen_at = states, ended_at

    @property
    def over(self) -> bool:
        """Every page has ended on every rank."""
        return OPEN not in self.seen

    @property
    def well(self) -> int:
        """Number of pages, from the first on, that have landed on every rank."""
        return next(
            (page for page, state in enumerate(self.seen) if state != LANDED), len(self.seen)
        )


def fresh_runs(seen: bytearray, state: bytes) -> list[tuple[int, int]]:
    """Runs [first, stop) of pages that ended since they were last seen, each run of one state."""
    runs: list[tuple[int, int]] = []
    for offset, (before, now) in enumerate(zip(seen, state, strict=True)):
        if before != OPEN or now == OPEN:
            continue
        if runs and runs[-1][1] == offset and state[offset - 1] == now:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs


def runs_of(states: bytearray, wanted: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Runs [low, high) within [first, stop) whose bytes equal `wanted`."""
    runs: list[tuple[int, int]] = []
    for offset in range(first, stop):
        if states[offset] != wanted:
            continue
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs


def agree(polls: Sequence[Poll], states: bytes, ended_at: Sequence[float]) -> None:
    """Sets the states and the times that all ranks agreed on in these polls."""
    for poll, state, ended in zip(
        polls, cut(states, [len(poll.local) for poll in polls]), ended_at, strict=True
    ):
        poll.agreed(state, ended)


def cut(states: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Splits states into parts of these sizes."""
    start = 0
    for size in sizes:
        yield states[start : start + size]
        start += size
