"""Sessions that arrive at a rate, in virtual time: when each begins, and what stays in order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from test_replay import ENCODER, make_session, recorded_prompts

from sgl_kvtier.lab.outside.client import Completion
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample, arrivals, replay


class _Jumping(selectors.DefaultSelector):
    """Never sleeps: what it was to wait is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which waits for nothing but the clock."""
    loop = _Loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class TimedClient:
    """A client whose every request takes `answer_s`; keeps when each was sent and what it asked."""

    answer_s: float = 1.0
    dilation: float = 1.0
    sent: list[tuple[float, list[int]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def generate(
        self, input_ids: Sequence[int], count: int, *, session_id: str | None = None
    ) -> Completion:
        sent_s = asyncio.get_running_loop().time()
        self.sent.append((sent_s, list(input_ids)))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.answer_s * self.dilation)
        self.running -= 1
        return Completion(sent_s, self.answer_s, tuple(range(count)), (self.answer_s,) * count)


OPEN = ReplayOptions(concurrency=None, rate=0.5, seed=3)


def replayed(client: TimedClient, options: ReplayOptions, count: int, **how) -> list[Sample]:
    samples: list[Sample] = []
    sessions = [make_session(f"s{number}", **how) for number in range(count)]
    run_virtually(replay(sessions, client, ENCODER, options, samples))
    return samples


def begun(samples: list[Sample]) -> list[float]:
    """When each session's first request was sent."""
    return [s.completion.sent_s for s in sorted(samples, key=by_session) if s.turn == 1]


def by_session(sample: Sample) -> tuple[str, int]:
    return sample.session, sample.turn


def test_every_session_begins_when_it_arrives_whatever_the_server_does() -> None:
    client = TimedClient(answer_s=1000.0)
    slow = replayed(client, OPEN, 6)
    assert begun(slow) == pytest.approx(arrivals(6, 0.5, 3))
    assert (len(slow), client.most_running) == (18, 6)


def test_the_same_seed_gives_the_same_arrivals_to_every_arm_and_round() -> None:
    fast, slow = (begun(replayed(TimedClient(answer), OPEN, 5)) for answer in (0.1, 50.0))
    assert fast == pytest.approx(slow)
    assert arrivals(5, 0.5, 3) != arrivals(5, 0.5, 4)


def test_arrivals_come_at_the_rate_asked_for_on_average() -> None:
    times = arrivals(20_000, 4.0, 0)
    assert all(later >= sooner for sooner, later in pairwise(times))
    assert times[-1] / len(times) == pytest.approx(0.25, rel=0.03)


def test_the_turns_of_a_session_wait_for_their_answers_and_their_tools() -> None:
    client = TimedClient(answer_s=2.0)
    samples = sorted(replayed(client, OPEN, 1, turns=3, gap_s=5.0), key=by_session)
    assert [s.completion.sent_s for s in samples] == pytest.approx([5.0, 12.0, 19.0])
    assert [ids for _, ids in client.sent] == recorded_prompts(make_session("s0", 3))


def test_a_slower_device_has_as_much_later_arrivals() -> None:
    slower = begun(replayed(TimedClient(dilation=4.0), OPEN, 5))
    assert slower == pytest.approx([4 * at for at in arrivals(5, 0.5, 3)])
