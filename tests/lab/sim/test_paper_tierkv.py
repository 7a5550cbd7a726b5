"""TierKV's printed tables are not obtained when bytes obey the link; its machine conserves tokens
and bytes.
"""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvtier.lab.papers.tierkv import (
    _POLICIES,
    HonestPager,
    PackingPager,
    Request,
    Run,
    Server,
    Steps,
    arrivals,
    measure,
    pager_of,
    printed,
    simulate,
    sweep_arrivals,
    sweep_server,
)

KV_BYTES = 524288


def test_all_printed_cells_of_the_levels_are_there() -> None:
    levels = ("1.0x", "1.5x", "2.0x", "3.0x", "5.0x")
    grid = {(level, policy) for level in levels for policy in _POLICIES}
    assert set(printed("5")) == set(printed("6")) == grid
    assert (len(printed("4")), len(printed("7"))) == (5 * 4, 3 * len(_POLICIES))
    assert sum(value is not None for value in printed("fig6").values()) == 7


def test_printed_stalls_of_a_policy_are_one_share_of_lrus_at_every_level() -> None:
    """What the conclusion of the page rests on: the paper's policies are constant factors."""
    p95 = printed("6")

    def stall(level: str, policy: str) -> float:
        there, without = p95[level, policy], p95["1.0x", policy]
        assert there is not None and without is not None
        return there - without

    for policy, share in (("Freq", 0.85), ("Static", 0.60), ("Attn-Pref.", 0.45)):
        for level in ("2.0x", "3.0x", "5.0x"):
            assert stall(level, policy) / stall(level, "LRU") == pytest.approx(share, abs=0.01)


def run_of(policy: str, level: float) -> Run:
    on = sweep_server(level)
    return simulate(on, sweep_arrivals(0), pager_of(on, policy))


@pytest.mark.slow
@pytest.mark.parametrize("level", [5.0, 1.5])
def test_when_bytes_obey_the_link_prefetch_is_not_flat_and_only_waiting_is(level: float) -> None:
    runs = [run_of(policy, level) for policy in ("Prefetch", "LRU", "Oracle")]
    prefetch, lru, oracle = (measure(run).tpot_ms for run in runs)
    assert prefetch > 100 * 4.07
    assert prefetch > 0.8 * lru
    assert oracle < 1.05 * 4.03
    assert sum(runs[2].waits_s) > 100 * sum(run_of("Oracle", 1.0).waits_s)


# --- the machine ----------------------------------------------------------------------------------


def server(hbm_tokens: int = 1 << 20, most_running: int = 256) -> Server:
    return Server(KV_BYTES, 0.003, 1e-5, hbm_tokens * KV_BYTES, most_running=most_running)


def batch_of(count: int, context: int, generate: int) -> list[Request]:
    return [Request(rid, 0.0, context, generate) for rid in range(count)]


def generated(run: Run) -> int:
    return sum(one.count * one.running for one in run.steps)


def moved_bytes(run: Run) -> float:
    return sum(one.count * (one.paging.demand_bytes + one.paging.ahead_bytes) for one in run.steps)


def test_a_request_that_comes_within_a_step_joins_at_the_next_one() -> None:
    on = server()
    at = 1.5 * on.compute_s(1)
    run = simulate(on, [Request(0, 0.0, 100, 10), Request(1, at, 100, 10)], HonestPager(on, "LRU"))
    assert sorted(run.waits_s) == pytest.approx([0, 2 * on.compute_s(1) - at])


@settings(max_examples=examples(8), deadline=None)
@given(
    seed=st.integers(0, 1000),
    requests=st.integers(1, 40),
    hbm_tokens=st.integers(8_000, 60_000),
    policy=st.sampled_from(_POLICIES),
)
def test_every_token_is_generated_once_whatever_pages(
    seed: int, requests: int, hbm_tokens: int, policy: str
) -> None:
    asked = arrivals(requests, 20_000, ((1, 128, 4096),), ((1, 1, 200),), seed)
    on = server(hbm_tokens, most_running=16)
    run = simulate(on, asked, pager_of(on, policy))
    assert generated(run) == sum(one.generate for one in asked)
    assert len(run.waits_s) == len(asked) and min(run.waits_s) >= 0
    # The link moved what the steps say, at no more than its bandwidth.
    assert moved_bytes(run) <= on.link_bytes_per_s * run.end_s * (1 + 1e-6)


# --- pagers ---------------------------------------------------------------------------------------


def full_steps(policy: str, requests: int = 24) -> Run:
    """A batch of prefixes of 2,048 tokens, of which HBM takes 20."""
    on = server(20 * 2048)
    return simulate(on, batch_of(requests, 2048, 64), pager_of(on, policy))


def test_lru_loses_nearly_everything_when_the_batch_is_a_little_larger_than_hbm() -> None:
    last = full_steps("LRU").steps[-1].paging
    # Five of six would fit. What is left are requests that run together with one that evicts them.
    assert last.hit_share < 0.25
    assert last.ahead_bytes == 0


@pytest.mark.parametrize("policy", _POLICIES)
def test_a_batch_that_fits_moves_nothing(policy: str) -> None:
    on = server(20 * 2048)
    run = simulate(on, batch_of(8, 2048, 64), pager_of(on, policy))
    assert moved_bytes(run) == 0
    assert measure(run).hit_share == 1


def test_the_packing_oracle_starts_only_what_it_can_serve_without_a_stall() -> None:
    on = server(20 * 2048)
    run = simulate(on, batch_of(24, 2048, 64), PackingPager(on))
    assert all(one.paging.demand_bytes == 0 for one in run.steps)
    assert all(one.seconds <= on.compute_s(one.running) * (1 + 1e-6) for one in run.steps)
    # The price is waiting: not everyone started at once.
    assert max(run.waits_s) > 0
    assert len(run.waits_s) == 24


# --- loads and measures ---------------------------------------------------------------------------


def test_the_p95_follows_the_tokens_of_steps() -> None:
    on, packing = server(), full_steps("Oracle").steps[0].paging
    for slow_tokens, p95_ms in ((4, 1.0), (6, 5.0)):
        steps = [
            Steps(0.001, 100 - slow_tokens, 1, 10, packing),
            Steps(0.005, slow_tokens, 1, 10, packing),
        ]
        assert measure(Run(steps, [0.0], 1.0)).p95_tpot_ms == pytest.approx(p95_ms)
    assert on.hbm_tokens == 1 << 20
