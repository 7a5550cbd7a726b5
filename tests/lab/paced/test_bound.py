"""The least time for a round of requests, on a device whose times can be added up by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from sgl_kvtier.lab.paced.bound import Asked, Machine, both_ends, bound, missing, reused
from sgl_kvtier.lab.profile import Profile, Table

PAGE = 10


def profile() -> Profile:
    """1 ms a token whatever stands before it, 5 ms a decode step of any batch, a link of 4,000
    tokens a second.
    """
    prefill = Table((1, 1000), (0, 100), ((0.001, 0.001), (1.0, 1.0)))
    decode = Table((1, 8), (0, 100), ((0.005, 0.005), (0.005, 0.005)))
    return Profile("by-hand", {}, 1, "mha", 1000, 0.004, 0.004, prefill, decode)


def machine(**changed: object) -> Machine:
    """The disk reads 2,000 tokens a second."""
    own = {
        "profile": profile(),
        "page": PAGE,
        "chunk": 100,
        "device_tokens": 1000,
        "memory_tokens": 1000,
        "disk_gbytes_per_s": 0.002,
        "at_a_time": 2,
    }
    return Machine(**{**own, **changed})  # type: ignore[arg-type]


def asked(session: str, turn: int, pages: int, *, more: int = 5, output: int = 1) -> Asked:
    """Pages of its session's own from the first on, and `more` tokens behind them."""
    names = tuple(hash((session, k)) for k in range(pages))
    return Asked(session, turn, pages * PAGE + more, names, output)


def test_a_page_is_reused_behind_the_request_that_had_it_first_whoever_that_was():
    shared = Asked("b", 1, 35, (*asked("a", 1, 2).pages, 7), 1)
    assert reused([asked("a", 1, 3), shared, asked("a", 2, 5)], PAGE) == [0, 2, 3]


def test_the_last_token_of_a_prompt_is_computed_in_any_case():
    assert reused([asked("a", 1, 3), asked("a", 2, 3, more=0)], PAGE) == [0, 2]


def test_of_two_sessions_in_turn_a_pool_for_one_keeps_one_of_them():
    order = [asked(name, turn, 4) for turn in (1, 2, 3) for name in "ab"]
    kept = reused(order, PAGE)
    assert kept == [0, 0, 4, 4, 4, 4]
    assert missing(order, kept, 8) == [0] * 6
    assert sum(missing(order, kept, 4)) == 8  # one of them comes back twice
    assert sum(missing(order, kept, 0)) == 16


def test_no_way_to_evict_misses_less():
    drawn = random.Random(7)
    for _ in range(200):
        order = [Asked("s", 2, 99, tuple(drawn.sample(range(4), 2)), 1) for _ in range(5)]
        kept = reused(order, PAGE)
        capacity = drawn.randrange(4)
        assert sum(missing(order, kept, capacity)) == _fewest(order, kept, capacity)


def _fewest(order: list[Asked], kept: list[int], capacity: int) -> int:
    """By trying all ways: after each request any of the pages at hand may be kept."""
    states = {frozenset[int](): 0}
    for one, reuse in zip(order, kept, strict=True):
        after: dict[frozenset[int], int] = {}
        for pool, misses in states.items():
            missed = misses + sum(name not in pool for name in one.pages[:reuse])
            at_hand = pool | set(one.pages)
            for count in range(min(capacity, len(at_hand)) + 1):
                for some in itertools.combinations(sorted(at_hand), count):
                    left = frozenset(some)
                    after[left] = min(after.get(left, missed), missed)
        states = after
    return min(states.values())


def test_both_ends_meet_where_both_are_done():
    # 10 s for 90 tokens computed at 1 a second, or loaded at 8 a second beside it
    assert both_ends(0.0, 90, 1.0, 0.125) == pytest.approx(10.0)
    # and all of them are loaded while something else is computed
    assert both_ends(50.0, 90, 1.0, 0.125) == 50.0


def test_the_bound_of_a_session_that_returns_is_its_fresh_tokens_alone():
    found = bound([asked("a", 1, 10), asked("a", 2, 12)], machine())
    # 105 tokens, then 125 of which 100 are reused: at 1 ms each
    assert found["ttft_later_ms"] == pytest.approx(25)
    assert found["ttft_later_on_demand_ms"] == pytest.approx(25)
    assert found["computed_tokens"] == 130
    assert found["compute_s"] == pytest.approx(0.130)
    assert (found["missing_on_device_tokens"], found["missing_in_memory_tokens"]) == (0, 0)
    assert found["makespan_s"] == pytest.approx(0.130)


def test_what_the_device_cannot_keep_is_loaded_and_computed_at_once():
    order = [asked(name, turn, 10) for turn in (1, 2) for name in "ab"]
    found = bound(order, machine(device_tokens=100))
    # one of two sessions of 100 tokens; 5 fresh tokens each at 1 ms, the link 0.25 ms a token
    assert found["missing_on_device_tokens"] == 100
    assert found["ttft_later_ms"] == pytest.approx(5)
    assert found["ttft_later_on_demand_ms"] == pytest.approx(1e3 * (100 + 10) / (1000 + 4000) / 2)
    # the whole round has 220 tokens to compute meanwhile, so that nothing has to wait for a link
    assert found["makespan_s"] == pytest.approx(0.220)


def test_what_no_memory_can_keep_comes_over_the_disk():
    order = [asked(name, turn, 10) for turn in (1, 2) for name in "ab"]
    found = bound(order, machine(device_tokens=0, memory_tokens=0))
    assert found["missing_in_memory_tokens"] == 200
    # the disk takes 0.5 ms a token, the link of the device half of that
    assert found["ttft_later_on_demand_ms"] == pytest.approx(1e3 * (200 + 10) / (1000 + 2000) / 2)


def test_a_round_takes_no_less_than_its_longest_session_with_its_pauses():
    waiting = Asked("a", 2, 125, asked("a", 2, 12).pages, 3, wait_s=7.0)
    found = bound([asked("a", 1, 10), waiting], machine())
    assert found["session_s"] == pytest.approx(0.105 + 7.0 + 0.025 + 2 * 0.005)
    assert found["makespan_s"] == found["session_s"]


def test_a_decode_step_is_shared_by_as_many_as_there_can_be():
    found = bound([asked("a", 1, 10, output=11)], machine())
    assert found["compute_s"] == pytest.approx(0.105 + 10 * 0.005 / 2)


def test_a_prompt_longer_than_a_chunk_takes_several_steps():
    found = bound([asked("a", 1, 25)], machine())
    assert found["session_s"] == pytest.approx(0.255)
