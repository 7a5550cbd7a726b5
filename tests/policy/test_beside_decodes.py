"""Chunks of restorations beside requests that decode (`policy.max_stall_ms`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from virtual_hands import COST, ENGINE, profile_of, stored

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.learned.cost import CostModel, PrefillCost
from sgl_kvtier.policy.messages import ChunkDone, ChunkStarted, StepView
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.restore.forecast import slowed_by
from sgl_kvtier.policy.restore.restorations import _ALONE, Restorations
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.types import Span

PAGES, SUFFIX = 256, 64
TOKENS = PAGES * ENGINE.page_tokens
CHEAP = replace(COST, fixed_s=0.001)
WHOLE_S = CHEAP.chunk_seconds(0, ENGINE.chunk_tokens)
SLOW = 1e3
"""Bytes per second: all is computed."""


def planner(bound_ms: float, cost: PrefillCost = CHEAP) -> Planner:
    """`bound_ms`: what a chunk may take in a step of its own, a multiple of the setting."""
    config = PolicyConfig(restore="both", max_stall_ms=bound_ms / _ALONE)
    made = make_planner(config, ENGINE, profile_of(cost, SLOW))
    made.observe(stored())
    return made


def steps(made: Planner, decoding: int, *, mixes: bool = False, mixed: bool = False) -> list[int]:
    """Tokens computed in each step until the prefix is there, by one step after the other."""
    view = StepView(
        0.0, ("a",), None, prefill_tokens=ENGINE.chunk_tokens, decoding=decoding, mixes=mixes
    )
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
            view = replace(view, waiting=(), slot="a", mixed=mixed)
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


def test_a_chunk_is_never_so_short_that_its_fixed_cost_is_more_than_two_fifths() -> None:
    taken = steps(planner(0.001), decoding=4)
    assert all(CHEAP.chunk_seconds(0, tokens) > 2 * CHEAP.fixed_s for tokens in taken[:1])
    assert sum(taken) >= TOKENS


@pytest.mark.parametrize("share", [0.1, 0.4, 0.75])
def test_chunks_with_which_requests_decode_follow_each_other_and_each_keeps_the_bound(
    share: float,
) -> None:
    taken = steps(planner(_ALONE * share * WHOLE_S * 1000), 4, mixes=True, mixed=True)
    assert 0 not in taken
    at = 0
    for tokens in taken[:-1]:
        assert CHEAP.chunk_seconds(at, tokens) <= share * WHOLE_S
        at += tokens
    assert at + taken[-1] >= TOKENS


def test_a_step_comes_between_where_the_engine_did_not_mix_after_all() -> None:
    """Decoding may lack a page for the next token."""
    taken = steps(planner(_ALONE * WHOLE_S * 700), 1, mixes=True, mixed=False)
    assert all(not (a and b) for a, b in pairwise(taken))


def test_short_chunks_are_predicted_with_the_fixed_cost_of_each() -> None:
    state = Restorations(PolicyConfig(max_stall_ms=10.0), ENGINE, profile_of(COST, SLOW), Rules())
    fixed_s, per_token_s, per_position_s = 0.004, 1e-5, 1e-12
    state.cost = CostModel(PrefillCost(fixed_s, per_token_s, per_position_s))
    view = StepView(0.0, decoding=2, mixes=True)
    beside = state.cost_beside(view)
    tokens = (0.01 - fixed_s) / per_token_s  # of a chunk that takes 10 ms
    assert beside.range_seconds(0, 100 * tokens, ENGINE.chunk_tokens) == pytest.approx(
        100 * 0.01, rel=0.05
    )
    assert state.cost_beside(replace(view, decoding=0)) is state.cost.cost
    apart = state.cost_beside(replace(view, mixes=False))
    assert per_token_s < apart.per_token_s < beside.per_token_s


def test_a_mixed_step_takes_half_of_its_seconds_from_each_request_that_decodes() -> None:
    apart, mixed = StepView(0.0, decoding=3), StepView(0.0, decoding=3, mixes=True)
    assert (slowed_by(apart), slowed_by(mixed)) == (3, 1.5)
    assert slowed_by(replace(mixed, decoding=100)) == 4
