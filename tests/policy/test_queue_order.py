"""The order of waiting requests: shortest first, and none waits longer than the bound allows."""

from __future__ import annotations

import random

import pytest

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.rules import LeastBudget, SmallestHeld, Unbounded
from sgl_kvtier.policy.messages import ChunkBeside, RunOrder, Waiter
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


def test_nearly_equal_work_runs_in_the_order_of_arrival() -> None:
    assert order(planner(), Waiter("a", 100), Waiter("b", 85)) == ("a", "b")
    assert order(planner(), Waiter("a", 100), Waiter("b", 75)) == ("b", "a")


def test_without_overtaking_the_order_is_that_of_arrival() -> None:
    found = order(planner(0.0), Waiter("long", 900), Waiter("short", 100))
    assert found == ("long", "short")


def test_rules_may_order_by_something_else() -> None:
    """Bidaw's order: what needs storage comes last; Cascade's: the least budget first."""
    small, stored = Waiter("small", 300), Waiter("stored", 200, stored_tokens=190)
    held = make_planner(PolicyConfig(), ENGINE, PROFILE, SmallestHeld())
    assert order(held, Waiter("long", 900), stored, small) == ("small", "long", "stored")
    budget = make_planner(PolicyConfig(), ENGINE, PROFILE, LeastBudget())
    assert order(budget, Waiter("short", 100), Waiter("long", 900)) == ("long", "short")
    # The short one has waited for 2 s, the long one takes 0.9 s and comes now.
    late = make_planner(PolicyConfig(), ENGINE, PROFILE, LeastBudget())
    assert order(late, Waiter("short", 100)) == ("short",)
    assert order(late, Waiter("long", 900), Waiter("short", 100), now=2.0) == ("short", "long")


def test_without_a_bound_a_long_one_is_overtaken_for_ever() -> None:
    free, long = make_planner(PolicyConfig(), ENGINE, PROFILE, Unbounded()), Waiter("long", 900)
    for turn in range(100):
        short = Waiter(f"short {turn}", 100)
        assert order(free, long, short, now=10.0 * turn) == (short.rid, "long")


def test_one_that_was_overtaken_for_long_enough_runs_next() -> None:
    """The long one takes 0.9 s, and is overtaken for as long from 5.0 s on, when the first leaves."""
    queue, long = planner(), Waiter("long", 900)
    order(queue, long, Waiter("short", 100), now=0.0)
    order(queue, long, Waiter("short", 100), now=5.0)
    assert order(queue, long, Waiter("new", 100), now=5.0)[0] == "new"
    assert order(queue, long, Waiter("new", 100), now=5.75)[0] == "new"
    assert order(queue, long, Waiter("new", 100), now=5.85) == ("long", "new")


def test_waiting_for_those_that_run_is_not_being_overtaken() -> None:
    queue, asked = planner(), (Waiter("long", 900), Waiter("short", 100))
    assert order(queue, *asked) == ("short", "long")
    assert order(queue, *asked, now=60.0) == ("short", "long")


def test_those_behind_are_not_overtaken_by_one_that_came_earlier() -> None:
    queue, later = planner(), (Waiter("long", 900), Waiter("new", 100))
    order(queue, Waiter("first", 10), *later)
    assert order(queue, *later, now=60.0) == ("new", "long")
    assert order(queue, *later, now=120.0) == ("new", "long")


def test_one_that_came_back_is_overtaken_anew() -> None:
    queue, asked = planner(), (Waiter("long", 900), Waiter("short", 100))
    order(queue, *asked)
    order(queue, Waiter("long", 900))
    order(queue, now=59.0)
    assert order(queue, *asked, now=60.0) == ("short", "long")


@pytest.mark.parametrize(("overtaking", "arrivals"), [(1.0, 3000), (0.25, 1000), (3.0, 1000)])
def test_nobody_waits_longer_than_the_bound(overtaking: float, arrivals: int) -> None:
    """None waits longer than 1 + overtaking times the work that stood before it when it came, its
    own included, and all run.
    """
    draw, queue = random.Random(7), planner(overtaking)
    clock_s, came, waiting, due_s = 0.0, 0, dict[str, int](), dict[str, float]()

    def ordered() -> tuple[str, ...]:
        return order(queue, *(Waiter(rid, n) for rid, n in waiting.items()), now=clock_s)

    while came < arrivals or waiting:
        if came < arrivals and (not waiting or (draw.random() < 0.55 and len(waiting) < 20)):
            rid, came = f"r{came}", came + 1
            waiting[rid] = int(draw.paretovariate(1.2) * 50)
            due_s[rid] = clock_s + (1 + overtaking) * sum(waiting.values()) * 0.001
            ordered()
            continue
        first = ordered()[0]
        tokens = waiting.pop(first)
        ordered()  # it runs
        clock_s += tokens * 0.001
        assert clock_s <= due_s.pop(first) + 1e-6, first
    assert not due_s


# --- the chunk of a long prompt beside those that wait ---------------------------------------------

CHUNKED = EngineShape(page_tokens=16, page_bytes=1 << 16, chunk_tokens=1024)


def chunk(
    *waiting: Waiter, left: int = 8000, room: int = 1 << 20, config: PolicyConfig | None = None
) -> int:
    """A long prompt's next chunk, of at most 1,024 tokens."""
    queue = make_planner(config or PolicyConfig(), CHUNKED, PROFILE, Rules())
    return queue.query(ChunkBeside(4096, left, 1024, room, waiting))


def test_a_chunk_leaves_room_for_a_short_one_and_is_short_itself() -> None:
    assert chunk() == 1024
    assert chunk(Waiter("hit", 4100, host_tokens=4000)) == 256
    assert chunk(Waiter("new", 200), Waiter("other", 100)) == 256
    assert chunk(*(Waiter(f"w{n}", 4016, device_tokens=4000) for n in range(64))) == 256


def test_a_chunk_leaves_no_room_for_one_that_cannot_run_beside_it() -> None:
    assert chunk(Waiter("long", 4000)) == 1024
    assert chunk(Waiter("stored", 4100, stored_tokens=4000)) == 1024
    assert chunk(Waiter("hit", 4100, host_tokens=4000), room=4000) == 1024
    assert chunk(Waiter("hit", 4100, device_tokens=4000), room=4000) == 256
    assert chunk(Waiter("no less", 250), left=300) == 300


def test_a_chunk_has_at_least_half_of_what_is_computed() -> None:
    assert chunk(Waiter("as much", 256)) == 256
    assert chunk(Waiter("more", 257)) == 1024
    both = Waiter("a", 200), Waiter("b", 200)  # only one fits beside it
    assert chunk(*both, room=400) == 256


def test_what_is_left_of_a_prompt_is_cut_no_further_than_needed() -> None:
    hit = Waiter("hit", 4016, device_tokens=4000)
    assert chunk(hit, left=200) == 200
    assert chunk(hit, left=257) == 256


def test_a_chunk_is_whole_where_the_order_is_that_of_arrival() -> None:
    hit = Waiter("hit", 4016, device_tokens=4000)
    assert chunk(hit, config=PolicyConfig(queue="arrival")) == 1024
    alone = make_planner(PolicyConfig(), CHUNKED, PROFILE, Rules(beside=0.0))
    assert alone.query(ChunkBeside(4096, 8000, 1024, 1 << 20, (hit,))) == 1024
