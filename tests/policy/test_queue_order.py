"""The order of waiting requests: shortest first, and none waits longer than the bound allows."""

from __future__ import annotations

import random

import pytest

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.messages import RunOrder, Waiter
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.policy.shape import EngineShape

ENGINE = EngineShape(page_tokens=16, page_bytes=1 << 16, chunk_tokens=1 << 20)
PROFILE = {
    "prefill": {"fixed_s": 0.0, "per_token_s": 0.001, "per_token_position_s": 0.0},
    "links": {"host-device": 1e12, "storage-device": 1e9},
}


def planner(overtaking: float = 1.0):
    return make_planner(PolicyConfig(), ENGINE, PROFILE, Rules(overtaking=overtaking))


def order(queue, *waiting: Waiter, now: float = 0.0) -> tuple[str, ...]:
    return queue.query(RunOrder(waiting, now))


def test_the_shortest_runs_first() -> None:
    found = order(planner(), Waiter("long", 900), Waiter("short", 100), Waiter("middle", 500))
    assert found == ("short", "middle", "long")


def test_what_lies_in_memory_is_not_computed_again() -> None:
    found = order(planner(), Waiter("new", 500), Waiter("known", 4000, device_tokens=3900))
    assert found == ("known", "new")


def test_what_is_stored_takes_its_link() -> None:
    # 1,000 tokens of 4 KiB take 4.1 ms at 1 GB/s; 100 tokens are computed in 100 ms.
    found = order(planner(), Waiter("new", 100), Waiter("stored", 1001, stored_tokens=1000))
    assert found == ("stored", "new")


def test_equal_work_runs_in_the_order_of_arrival() -> None:
    found = order(planner(), *(Waiter(name, 100) for name in "abcd"))
    assert found == tuple("abcd")


def test_without_overtaking_the_order_is_that_of_arrival() -> None:
    found = order(planner(0.0), Waiter("long", 900), Waiter("short", 100))
    assert found == ("long", "short")


def test_one_that_was_overtaken_for_long_enough_runs_next() -> None:
    """The long one takes 0.9 s, so it is due after 1.8 s: eight short ones surely go first."""
    queue = planner()
    for number in range(8):
        asked = Waiter("long", 900), Waiter(f"short {number}", 100)
        assert order(queue, *asked, now=number * 0.1)[0] != "long"
    assert order(queue, Waiter("long", 900), Waiter("short 9", 100), now=0.9)[0] == "long"


def test_in_a_server_slower_than_predicted_the_order_becomes_that_of_arrival() -> None:
    queue, asked = planner(), (Waiter("long", 900), Waiter("short", 100), Waiter("new", 50))
    assert order(queue, *asked)[0] == "new"
    assert order(queue, *asked, now=60.0) == ("long", "short", "new")


def test_one_that_came_back_is_due_anew() -> None:
    queue, asked = planner(), (Waiter("long", 900), Waiter("short", 100))
    order(queue, *asked)
    order(queue, Waiter("short", 100), now=59.0)
    assert order(queue, Waiter("short", 100), Waiter("long", 900), now=60.0) == ("short", "long")


@pytest.mark.parametrize(("overtaking", "arrivals"), [(1.0, 10_000), (0.25, 1000), (3.0, 1000)])
def test_nobody_waits_longer_than_the_bound(overtaking: float, arrivals: int) -> None:
    """None waits longer than 1 + overtaking times the work that stood before it when it came, its
    own included, and all run.
    """
    draw, queue = random.Random(7), planner(overtaking)
    clock_s, came, waiting, due_s = 0.0, 0, dict[str, int](), dict[str, float]()
    while came < arrivals or waiting:
        if came < arrivals and (not waiting or (draw.random() < 0.55 and len(waiting) < 20)):
            rid, came = f"r{came}", came + 1
            waiting[rid] = int(draw.paretovariate(1.2) * 50)
            due_s[rid] = clock_s + (1 + overtaking) * sum(waiting.values()) * 0.001
            order(queue, *(Waiter(one, tokens) for one, tokens in waiting.items()), now=clock_s)
            continue
        asked = [Waiter(rid, tokens) for rid, tokens in waiting.items()]
        first = order(queue, *asked, now=clock_s)[0]
        clock_s += waiting.pop(first) * 0.001
        assert clock_s <= due_s.pop(first) + 1e-6, first
    assert not due_s


def test_an_equal_history_gives_equal_orders() -> None:
    one, other = planner(), planner()
    draw = random.Random(1)
    for _ in range(200):
        waiting = [Waiter(f"r{draw.randrange(30)}", draw.randrange(1, 5000)) for _ in range(9)]
        waiting = list({each.rid: each for each in waiting}.values())
        assert order(one, *waiting) == order(other, *waiting)
