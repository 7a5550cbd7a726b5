"""A real server runs waiting requests in the planner's order, on all its ranks, and gives the same
answers.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ahead_lab import AHEAD, looking_ahead, one_at_a_time
from restore_lab import CHECKED, change, counts
from serving import ADMIN, Served, changed, prompts

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

LENGTHS = (1500, 100)
"""Sent in this order."""
WAITING = (1500, 100, 700, 300)
"""The same, of the server with two ranks."""
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


def test_the_shortest_runs_first_and_the_answers_are_the_same(servers):
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


def ran(folder: Path) -> list[list[list[int]]]:
    """Every prefill so far, the same on both ranks: of each request its prompt's tokens, the first
    one computed, and how many.
    """
    first, second = ((folder / rank).read_text().splitlines() for rank in "01")
    assert first == second
    return [json.loads(line) for line in first]


def begun(steps: list[list[list[int]]]) -> list[int]:
    """Lengths of the prompts that wait, in the order in which they were first run."""
    lengths = (row[0] for step in steps for row in step)
    return [length for length in dict.fromkeys(lengths) if length in WAITING]


@pytest.mark.slow
def test_two_ranks_run_all_that_waits_in_the_same_order(tmp_path):
    """The second one's disk is late."""
    policy = {**AHEAD, "restore": "both", "sessions": False}
    late = {"faults": {"stall_ms": 40, "seed": 4, "rank": 1}}
    env = {**CHECKED, **changed(RAN=tmp_path)}
    pools = {"tp_size": 2, "max_total_tokens": 4096, "max_running_requests": 1}
    asked = [prompts(1, length, seed=length)[0] for length in WAITING]
    with looking_ahead(tmp_path, policy, late, env, model="tiny-llama", **pools) as served:
        served.ask(prompts(1, 1200, seed=1)[0], 1)  # what prefill costs is learned
        orders, answers, done = [], [], len(ran(tmp_path))
        for place, queue in enumerate((0, 0, 1)):  # computed, then stored, then by arrival
            assert change(served, policy__queue=queue)
            answers.append(finished(served, asked, 20 + place, PAUSES_S[-1])[1])
            steps = ran(tmp_path)[done:]
            done += len(steps)
            orders.append(begun(steps))
            served.flush()
        found = counts(served)
    print(orders, found)
    assert all(sorted(order) == sorted(WAITING) for order in orders)
    assert orders[0][0] == min(WAITING) and orders[2] == list(WAITING)
    assert answers[0] == answers[1] == answers[2]
    assert sum(count for name, count in found.items() if name.startswith("started_total both")) > 0
    assert found["planner_failures_total"] == 0
    assert "Traceback" not in (tmp_path / "server.log").read_text(errors="replace")
