"""TierKV's decode-paging machine: conservation, and bytes that obey the link."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvtier.lab.papers.tierkv.honest import HonestPager
from sgl_kvtier.lab.papers.tierkv.load import Lengths, Load, Request, arrivals
from sgl_kvtier.lab.papers.tierkv.machine import Run, Server, simulate
from sgl_kvtier.lab.papers.tierkv.measures import measure, weighted_quantile
from sgl_kvtier.lab.papers.tierkv.placed import PackingPager, StaticPager
from sgl_kvtier.lab.papers.tierkv.runs import pager_of
from sgl_kvtier.lab.papers.tierkv.setup import POLICIES

KV_BYTES = 524288


def server(hbm_tokens: int = 1 << 20, most_running: int = 256, block_tokens: int = 16) -> Server:
    return Server(
        kv_bytes_per_token=KV_BYTES,
        step_s=0.003,
        step_s_per_request=1e-5,
        hbm_bytes=hbm_tokens * KV_BYTES,
        dram_bytes=512e9,
        most_running=most_running,
        link_bytes_per_s=64e9,
        link_latency_s=1e-6,
        schedule_s=1e-4,
        block_tokens=block_tokens,
    )


def batch_of(count: int, context: int, generate: int) -> list[Request]:
    return [Request(rid, 0.0, context, generate) for rid in range(count)]


def generated(run: Run) -> int:
    return sum(one.count * one.running for one in run.steps)


def moved_bytes(run: Run) -> float:
    return sum(one.count * (one.paging.demand_bytes + one.paging.ahead_bytes) for one in run.steps)


# --- the machine ----------------------------------------------------------------------------------------------------


def test_a_request_that_fits_takes_one_compute_step_per_token():
    on = server()
    run = simulate(on, batch_of(1, 100, 50), HonestPager(on, "LRU"))
    assert generated(run) == 50
    assert run.end_s == pytest.approx(50 * on.compute_s(1))
    assert [one.generated for one in run.finished] == [50]


def test_a_request_that_comes_within_a_step_joins_at_the_next_one():
    on = server()
    first, second = Request(0, 0.0, 100, 10), Request(1, 1.5 * on.compute_s(1), 100, 10)
    run = simulate(on, [first, second], HonestPager(on, "LRU"))
    joined = next(one for one in run.finished if one.rid == 1)
    assert joined.admitted_s == pytest.approx(2 * on.compute_s(1))


def test_the_batch_never_holds_more_than_it_may():
    on = server(most_running=3)
    run = simulate(on, batch_of(10, 100, 20), HonestPager(on, "LRU"))
    assert max(one.running for one in run.steps) == 3
    assert len(run.finished) == 10


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    requests=st.integers(1, 40),
    hbm_tokens=st.integers(8_000, 60_000),
    policy=st.sampled_from(POLICIES),
)
def test_every_token_is_generated_once_whatever_pages(
    seed: int, requests: int, hbm_tokens: int, policy: str
):
    load = Load(requests, 20_000, Lengths(((1, 128, 4096),)), Lengths(((1, 1, 200),)))
    asked = arrivals(load, seed)
    on = server(hbm_tokens, most_running=16)
    run = simulate(on, asked, pager_of(on, policy))
    assert generated(run) == sum(one.generate for one in asked)
    assert sorted(one.rid for one in run.finished) == [one.rid for one in asked]
    assert all(one.arrived_s <= one.admitted_s < one.ended_s for one in run.finished)
    # The link moved exactly what the steps say, at no more than its bandwidth.
    assert run.link.nbytes == pytest.approx(moved_bytes(run), rel=1e-6, abs=len(run.steps))
    assert run.link.nbytes <= on.link_bytes_per_s * run.end_s * (1 + 1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_load_gives_the_same_run_twice(policy: str):
    on = server(20_000)
    asked = arrivals(Load(60, 9_000, Lengths(((1, 128, 4096),)), Lengths(((1, 8, 300),))), seed=5)
    first, second = (simulate(on, asked, pager_of(on, policy)) for _ in range(2))
    assert first == second


# --- pagers -------------------------------------------------------------------------------------------------------


def full_steps(
    policy: str, requests: int = 24, context: int = 2048, hbm_tokens: int = 20 * 2048
) -> Run:
    on = server(hbm_tokens)
    return simulate(on, batch_of(requests, context, 64), pager_of(on, policy))


def test_lru_loses_nearly_everything_when_the_batch_is_a_little_larger_than_hbm():
    last = full_steps("LRU").steps[-1].paging
    # Five of six would fit. What is left are requests that run together with one that evicts them.
    assert last.hit_share < 0.25
    assert last.ahead_bytes == 0


def test_next_use_misses_only_what_does_not_fit_and_fetches_it_ahead():
    on_hbm, needed = 20 * 2048, 24 * 2048
    last = full_steps("Prefetch").steps[-1]
    assert last.paging.hit_share == pytest.approx(on_hbm / needed, abs=0.06)
    assert last.paging.demand_bytes <= 0.1 * last.paging.ahead_bytes
    assert last.paging.wasted_bytes == 0


def test_a_lookahead_of_zero_fetches_nothing_ahead():
    on = server(20 * 2048)
    run = simulate(on, batch_of(24, 2048, 64), HonestPager(on, "Prefetch", lookahead_steps=0))
    assert all(one.paging.ahead_bytes == 0 for one in run.steps)
    assert run.steps[-1].paging.demand_bytes > 0


def test_what_is_fetched_ahead_hides_behind_computing_and_no_more():
    on = server(20 * 2048)
    run = full_steps("Prefetch")
    for one in run.steps:
        transfer_s = one.paging.ahead_bytes / on.link_bytes_per_s
        demand_s = one.paging.demand_bytes / on.link_bytes_per_s
        assert one.seconds == pytest.approx(
            max(transfer_s, on.compute_s(one.running)) + demand_s, rel=1e-6
        )
    assert run.steps[-1].seconds > 10 * on.compute_s(24)


def test_a_batch_that_fits_moves_nothing():
    for policy in POLICIES:
        run = full_steps(policy, requests=8)
        assert moved_bytes(run) == 0
        assert measure(run).hit_share == 1


def test_static_placement_reads_what_found_no_room_in_every_step():
    on = server(20 * 2048)
    run = simulate(on, batch_of(24, 2048, 64), StaticPager(on))
    first = run.steps[0]
    assert first.paging.demand_bytes == (24 - 20) * 2048 * KV_BYTES


def test_the_packing_oracle_starts_only_what_it_can_serve_without_a_stall():
    on = server(20 * 2048)
    run = simulate(on, batch_of(24, 2048, 64), PackingPager(on))
    assert all(one.paging.demand_bytes == 0 for one in run.steps)
    assert all(one.seconds <= on.compute_s(one.running) * (1 + 1e-6) for one in run.steps)
    # The price is waiting: not everyone started at once.
    assert max(one.admitted_s for one in run.finished) > 0
    assert len(run.finished) == 24


# --- loads and measures -------------------------------------------------------------------------------------------


def test_lengths_stay_in_their_ranges_and_average_as_they_say():
    lengths = Lengths(((0.7, 128, 256), (0.3, 256, 512)))
    drawn = [
        one.context for one in arrivals(Load(4000, 1.0, lengths, Lengths(((1, 1, 1),))), seed=1)
    ]
    assert all(128 <= one <= 512 for one in drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(lengths.mean, rel=0.02)


def test_shares_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="add up to 1"):
        Lengths(((0.5, 1, 2),))


def test_a_quantile_follows_the_weights():
    assert weighted_quantile([(1.0, 90.0), (5.0, 10.0)], 0.9) == 1.0
    assert weighted_quantile([(1.0, 90.0), (5.0, 10.0)], 0.95) == 5.0


def test_throughput_times_token_time_is_the_batch():
    on = server()
    run = simulate(on, batch_of(7, 100, 40), HonestPager(on, "LRU"))
    seen = measure(run)
    assert seen.tokens_per_s * seen.tpot_ms / 1e3 == pytest.approx(7)
    assert [one.decode_s for one in run.finished] == pytest.approx([run.end_s] * 7)
