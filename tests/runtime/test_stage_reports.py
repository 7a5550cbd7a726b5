"""Pipeline stages tell the first one what has ended on them; both ends of the pipe are real. One
test starts a server.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from restore_lab import CHUNK, GBPS, LONG, counts
from serving import config_file, flags, prompts, serving

from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.ranks.stage_reports import StageReports
from sgl_kvtier.runtime.step.polls import LANDED, LOST, OPEN, REASON, Poll, fresh_runs
from sgl_kvtier.store.base import ReadOutcome

CORRUPT = LOST[ReadOutcome.CORRUPT]


def stages(count: int) -> Iterator[list[StageReports]]:
    """The ends of one pipeline's pipe, the first stage first. They wait for each other, so each is
    built on a thread.
    """
    address: Queue[torch.Tensor] = Queue()

    def build(rank: int) -> StageReports:
        def sync(data: torch.Tensor) -> None:
            if rank:
                data.copy_(address.get(timeout=30))
                return
            for _ in range(count - 1):
                address.put(data.clone())

        return StageReports(SimpleNamespace(pp_rank=rank, pp_size=count, _pp_sync=sync))

    with ThreadPoolExecutor(count) as pool:
        ends = list(pool.map(build, range(count)))
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def three() -> Iterator[list[StageReports]]:
    yield from stages(3)


def until(first: StageReports, mine: Poll, wanted: bytes) -> None:
    """Takes what comes until the agreed state is this; messages between threads need a moment."""
    for _ in range(200):
        first.exchange([mine])
        if first.state(mine) == wanted:
            return
        time.sleep(0.01)
    raise AssertionError(f"{list(first.state(mine))} instead of {list(wanted)}")


@pytest.mark.parametrize("folder", ["short", "x" * 100], ids=["short", "no socket's path"])
def test_the_sockets_leave_no_file_behind(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    for ends in stages(2):
        assert list((tmp_path / folder).glob("kvtier-*")) == []
        mine, theirs = Poll(1, 4), Poll(1, 4)
        for their in (mine, theirs):
            their.mark(0, LANDED, 1.0)
        ends[1].exchange([theirs])
        until(ends[0], mine, bytes([LANDED, OPEN, OPEN, OPEN]))


def test_a_page_has_landed_when_it_has_on_every_stage(three):
    first, *later = three
    mine, theirs = Poll(1, 4), [Poll(1, 4), Poll(1, 4)]
    for page in range(4):
        mine.mark(page, LANDED, 1.0)
    first.exchange([mine])
    assert first.state(mine) == bytes(4)
    theirs[0].mark(3, LANDED, 1.0)
    theirs[1].mark(3, LANDED, 1.0)
    theirs[1].mark(2, CORRUPT, 1.0)
    for end, their in zip(later, theirs, strict=True):
        end.exchange([their])
    until(first, mine, bytes([OPEN, OPEN, OPEN, LANDED]))
    theirs[0].mark(2, LANDED, 1.0)
    later[0].exchange([theirs[0]])
    until(first, mine, bytes([OPEN, OPEN, CORRUPT, LANDED]))
    assert first.ended_at(mine) > 1.0


def test_what_has_not_changed_is_not_sent_again_and_what_is_over_is_forgotten(three):
    first, second, third = three
    mine, theirs = Poll(7, 4), Poll(7, 4)
    theirs.mark(0, LANDED, 1.0)
    mine.mark(0, LANDED, 1.0)
    second.exchange([theirs])
    third.exchange([theirs])
    until(first, mine, bytes([LANDED, OPEN, OPEN, OPEN]))
    first.exchange([])  # the load is over here
    second.exchange([theirs])
    first.exchange([mine])
    assert first.state(mine) == bytes(4)


def test_without_later_stages_a_rank_speaks_for_itself():
    mine = Poll(1, 4)
    mine.mark(2, LANDED, 5.0)
    agreement = Agreement(None, 1, first=True)
    assert agreement.local([mine]) == (bytes([OPEN, OPEN, LANDED, OPEN]), [5.0])
    assert agreement.least(7) == 7


@pytest.mark.slow
@pytest.mark.server
def test_two_pipeline_stages_restore_from_both_ends_although_each_loses_pages_of_its_own(tmp_path):
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {"restore": "both", "min_restore_tokens": 64},
        "faults": {"read_error_rate": 0.02, "corrupt_rate": 0.02, "seed": 4},
    }
    arguments = flags(
        "tiny-llama", chunked_prefill_size=CHUNK, page_size=16, max_total_tokens=8192, pp_size=2
    )
    env = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    asked = prompts(4, tokens=LONG, seed=3)
    with serving(tmp_path, arguments, config_file(tmp_path, **sections), **env) as server:
        first = [server.ask(ids) for ids in asked]
        for _ in range(2):
            server.flush()
            with ThreadPoolExecutor(len(asked)) as pool:
                again = list(pool.map(server.ask, asked))
            assert [a.tokens for a in again] == [a.tokens for a in first]
            assert sum(a.storage for a in again) > 0
        time.sleep(1.0)  # counters are published twice a second
        found = counts(server)
        assert found["ended_total met"] == found["started_total both configured"] == 2 * len(asked)
        assert found["computed_tokens_total"] > 0
        assert found["planner_failures_total"] == 0
        assert sum(found.get(f"lost_pages_total {why}", 0) for why in ("failed", "corrupt")) > 0


def test_nothing_has_ended_before_every_later_stage_has_reported(three):
    first, second, third = three
    mine, theirs = Poll(1, 2), Poll(1, 2)
    for poll in (mine, theirs):
        poll.mark(0, LANDED, 1.0)
    second.exchange([theirs])
    for _ in range(200):
        first.exchange([mine])
        if mine.number in first._reports:
            break
        time.sleep(0.01)
    assert mine.number in first._reports and first.state(mine) == bytes(2)
    third.exchange([theirs])
    until(first, mine, bytes([LANDED, OPEN]))


# What ranks report of pages while other threads mark them, and what all of them agree on.


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
    def local(self) -> bytearray:
        read = bytearray(self._states)
        self.mark_now()
        return read

    @local.setter
    def local(self, states: bytearray) -> None:
        self._states = states

    def mark_now(self) -> None:
        self.ended_at[0], self._states[0] = 7.0, LANDED


def test_a_pages_time_is_there_before_its_state():
    poll = Poll(1, 2)
    poll.local = watched = Watched(2)
    watched.poll, watched.times = poll, []
    poll.mark(1, LANDED, 5.0)
    assert (watched.times, poll.local[1]) == ([5.0], LANDED)


def test_no_page_is_reported_landed_without_its_time():
    agreement = Agreement(SimpleNamespace(), 1, True)
    poll = MarkedMeanwhile(1, 1)
    reports = [agreement.local([poll]) for _ in range(2)]
    for states, times in reports:
        assert states[0] == OPEN or times == [7.0]
    assert reports[1][0] == bytes([LANDED])


def test_pages_that_landed_behind_one_that_has_not_are_not_counted():
    poll = Poll(1, 4)
    poll.agreed(bytes([LANDED, LANDED, MISS, LANDED]), 1.0)
    assert poll.well == 2
    poll.agreed(bytes([LANDED] * 4), 1.0)
    assert poll.well == 4


def test_only_what_ended_since_it_was_last_seen_is_fresh():
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
def test_of_two_ranks_reasons_the_more_serious_one_is_agreed_on(worse, better):
    codes = LOST[ReadOutcome(better)], LOST[ReadOutcome(worse)]
    assert REASON[agreed(*codes)] == worse


def test_a_page_is_open_until_all_ranks_ended_it_and_landed_only_on_all_of_them():
    assert set(LOST) == set(ReadOutcome) - {ReadOutcome.OK}
    for code in LOST.values():
        assert agreed(OPEN, code) == OPEN
        assert agreed(LANDED, code) == code
    assert agreed(LANDED, LANDED) == LANDED
