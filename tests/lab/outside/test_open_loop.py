"""Sessions that arrive at a rate, in virtual time: when each begins, and what stays in order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from test_replay import ENCODER, make_session, recorded_prompts
from virtual_time import TimedClient, run_virtually

from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample, arrivals, replay

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
    slow = replayed(TimedClient(answer_s=1000.0), OPEN, 6)
    assert begun(slow) == pytest.approx(arrivals(6, 0.5, 3))
    assert len(slow) == 18


def test_sessions_that_arrive_while_others_run_are_not_held_back() -> None:
    client = TimedClient(answer_s=1000.0)
    replayed(client, OPEN, 6)
    assert client.most_running == 6


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
