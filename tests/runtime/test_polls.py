"""What ranks report of pages while other threads mark them, and what all of them agree on."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.step.polls import LANDED, LOST, OPEN, REASON, Poll, fresh_runs
from sgl_kvtier.store.base import ReadOutcome

MISS = LOST[ReadOutcome.MISS]


class Watched(bytearray):
    """States of pages; notes the page's time whenever one is marked."""

    poll: Poll
    times: list[float]

    def __setitem__(self, page: Any, state: Any) -> None:
        self.times.append(self.poll.ended_at[page])
        super().__setitem__(page, state)


class MarkedMeanwhile(Poll):
    """A poll whose page lands right after its states were read."""

    @property
    def local(self) -> bytearray:  # type: ignore[override]
        read = bytearray(self._states)
        self.mark_now()
        return read

    @local.setter
    def local(self, states: bytearray) -> None:
        self._states = states

    def mark_now(self) -> None:
        self.ended_at[0], self._states[0] = 7.0, LANDED


def test_a_pages_time_is_there_before_its_state() -> None:
    poll = Poll(1, 2)
    poll.local = watched = Watched(2)
    watched.poll, watched.times = poll, []
    poll.mark(1, LANDED, 5.0)
    assert (watched.times, poll.local[1]) == ([5.0], LANDED)


def test_no_page_is_reported_landed_without_its_time() -> None:
    agreement = Agreement(SimpleNamespace(), 1, True)  # type: ignore[arg-type]
    poll = MarkedMeanwhile(1, 1)
    reports = [agreement.local([poll]) for _ in range(2)]
    for states, times in reports:
        assert states[0] == OPEN or times == [7.0]
    assert reports[1][0] == bytes([LANDED])


def test_pages_that_landed_behind_one_that_has_not_are_not_counted() -> None:
    poll = Poll(1, 4)
    poll.agreed(bytes([LANDED, LANDED, MISS, LANDED]), 1.0)
    assert poll.well == 2
    poll.agreed(bytes([LANDED] * 4), 1.0)
    assert poll.well == 4


def test_only_what_ended_since_it_was_last_seen_is_fresh() -> None:
    seen, state = (
        bytearray([LANDED, OPEN, OPEN, OPEN, OPEN]),
        bytes([LANDED, LANDED, MISS, MISS, OPEN]),
    )
    assert fresh_runs(seen, state) == [(1, 2), (2, 4)]


SERIOUS = ["corrupt", "failed", "miss", "late", "cancelled"]


def agreed(*states: int) -> int:
    """Ranks reduce the states of a page by MIN."""
    return min(states)


@pytest.mark.parametrize(("worse", "better"), list(combinations(SERIOUS, 2)))
def test_of_two_ranks_reasons_the_more_serious_one_is_agreed_on(worse: str, better: str) -> None:
    codes = LOST[ReadOutcome(better)], LOST[ReadOutcome(worse)]
    assert REASON[agreed(*codes)] == worse


def test_a_page_is_open_until_all_ranks_ended_it_and_landed_only_on_all_of_them() -> None:
    assert set(LOST) == set(ReadOutcome) - {ReadOutcome.OK}
    for code in LOST.values():
        assert agreed(OPEN, code) == OPEN
        assert agreed(LANDED, code) == code
    assert agreed(LANDED, LANDED) == LANDED
