"""Chunks of restorations beside requests that decode (`policy.max_stall_ms`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from virtual_hands import COST, ENGINE, profile_of, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.policy.messages import ChunkDone, ChunkStarted, StepView
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.types import Span

PAGES, SUFFIX = 256, 64
TOKENS = PAGES * ENGINE.page_tokens
CHEAP = replace(COST, fixed_s=0.001)
WHOLE_S = CHEAP.chunk_seconds(0, ENGINE.chunk_tokens)
SLOW = 1e3
"""Bytes per second: all is computed."""


def planner(stall_ms: float, cost: PrefillCost = CHEAP) -> Planner:
    config = PolicyConfig(restore="both", max_stall_ms=stall_ms)
    made = make_planner(config, ENGINE, profile_of(cost, SLOW))
    made.observe(stored())
    return made


def steps(made: Planner, decoding: int) -> list[int]:
    """Tokens computed in each step until the prefix is there, by one step after the other."""
    view = StepView(0.0, ("a",), None, prefill_tokens=ENGINE.chunk_tokens, decoding=decoding)
    taken, at = [], 0
    while at < TOKENS:
        plan = made.step(view)
        tokens = next((c.tokens for c in plan.computes if c.rid == "a"), 0)
        if tokens is None:
            tokens = min(ENGINE.chunk_tokens, TOKENS + SUFFIX - at)
        taken.append(tokens)
        if tokens:
            chunk = Span(at, at + tokens)
            seconds = CHEAP.chunk_seconds(at, tokens)
            made.observe(ChunkStarted("a", chunk, view.now))
            made.observe(ChunkDone("a", chunk, seconds, view.now + seconds))
            at += tokens
            view = replace(view, waiting=(), slot="a")
        view = replace(view, now=view.now + 1.0)
        assert len(taken) < 1000
    return taken


def gaps(taken: list[int]) -> list[float]:
    """Seconds of compute between two steps in which requests decode."""
    found, at, gap = [], 0, 0.0
    for tokens in (*taken, 0):
        if not tokens:
            found.append(gap)
            gap = 0.0
        else:
            gap += CHEAP.chunk_seconds(at, tokens)
            at += tokens
    return found


@pytest.mark.parametrize("share", [0.4, 0.75, 1.1, 2.5])
def test_no_gap_that_chunks_make_is_longer_than_the_bound(share: float) -> None:
    taken = steps(planner(share * WHOLE_S * 1000), decoding=4)
    assert 0 < max(gaps(taken)) <= share * WHOLE_S
    assert sum(taken) >= TOKENS
    assert all(tokens % ENGINE.page_tokens == 0 for tokens in taken[:-1])


def test_a_step_without_a_chunk_comes_between_two_that_together_take_longer() -> None:
    taken = steps(planner(WHOLE_S * 700), decoding=1)
    assert all(not (a and b) for a, b in pairwise(taken))


def test_without_a_bound_or_requests_that_decode_chunks_are_whole_and_follow_each_other() -> None:
    unbounded = steps(planner(0.0), decoding=4)
    assert unbounded == steps(planner(WHOLE_S * 100), decoding=0)
    assert 0 not in unbounded


def test_a_chunk_is_never_so_short_that_its_fixed_cost_is_more_than_a_quarter() -> None:
    taken = steps(planner(0.001), decoding=4)
    assert all(CHEAP.chunk_seconds(0, tokens) > 3 * CHEAP.fixed_s for tokens in taken[:1])
    assert sum(taken) >= TOKENS
