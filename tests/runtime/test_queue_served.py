"""A real server runs waiting requests in the planner's order, and gives the same answers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ahead_lab import one_at_a_time
from restore_lab import change
from serving import ADMIN, Served, prompts
from shared import Shared

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

LENGTHS = (1500, 100)
"""Sent in this order."""
PAUSES_S = (0.1, 0.03, 0.01, 0.003)
"""The longer one is overtaken for half of the time that it takes, which a fast machine makes short:
both wait for one of these times.
"""


def finished(
    served: Served, asked: list[list[int]], seed: int, pause_s: float
) -> tuple[list[int], dict]:
    """Lengths in the order in which their requests finish, one running at a time, and the answers.
    All wait behind a request that is running.
    """
    order: list[int] = []
    answers = {}

    def ask(prompt: list[int]) -> None:
        answers[len(prompt)] = served.ask(prompt, 4).tokens
        order.append(len(prompt))

    with ThreadPoolExecutor(len(asked) + 1) as pool:
        first = prompts(1, 64, seed=seed)[0]
        blocker = pool.submit(served.ask, first, 1500, rid=f"runs-{seed}")
        time.sleep(0.5)
        sent = []
        for prompt in asked:
            sent.append(pool.submit(ask, prompt))
            time.sleep(pause_s)
        assert not blocker.done(), "all of them wait at once"
        told = {"rid": f"runs-{seed}", "abort_all": False}
        served.call("POST", "/abort_request", told, ADMIN, raw=True)
        for one in sent:
            one.result()
    return order, answers


def test_the_shortest_runs_first_and_the_answers_are_the_same(servers: Shared) -> None:
    served = one_at_a_time(servers)
    served.ask(prompts(1, 1200, seed=1)[0], 1)  # what prefill costs is learned
    asked = [prompts(1, length, seed=length)[0] for length in LENGTHS]
    for place, pause_s in enumerate(PAUSES_S):
        shortest, answers = finished(served, asked, 2 + place, pause_s)
        served.flush()
        if shortest == [100, 1500]:
            break
    else:
        raise AssertionError("the longer one ran first, however short both waited")
    assert change(served, policy__queue=1)
    arrived, again = finished(served, asked, 10, PAUSES_S[0])
    assert change(served, policy__queue=0)
    assert arrived == [1500, 100]
    assert again == answers
