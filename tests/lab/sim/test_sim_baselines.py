"""Stock HiCache, the oracle, and the named policies on one small machine."""

from __future__ import annotations

import pytest
from scenes import COST, MODEL, PAGE, Scripted, keys, machine, serve

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.sim.baselines import StockHiCache
from sgl_kvtier.lab.sim.hardware import Hardware, planner_profile
from sgl_kvtier.lab.sim.oracle import Oracle
from sgl_kvtier.lab.sim.policies import POLICIES, Setting, policy
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.run import engine_shape, simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import PagesPlaced, StepView
from sgl_kvtier.types import Link, Span, Tier

SPEC = ServerSpec(page_tokens=PAGE, step_tokens=32, device_pages=12, host_pages=12)
SHAPE = engine_shape(SPEC, MODEL)


def _sessions(turns: int = 4) -> list[SimRequest]:
    """Three sessions that take turns, so that HBM and DRAM, which hold one each, have always given
    up the next one's.
    """
    requests = []
    for turn in range(turns):
        for name in "abc":
            chain = keys(name, 10)
            before = f"{name}{turn - 1}" if turn else None
            start_s = 40.0 if turn else 10.0 * "abc".index(name)
            requests.append(
                SimRequest(
                    f"{name}{turn}",
                    start_s,
                    130 + turn * PAGE,
                    2,
                    chain[: 8 + turn],
                    session=name,
                    after=before,
                )
            )
    return requests


def _run(name: str, requests: list[SimRequest], hardware: Hardware | None = None) -> SimResult:
    hardware = hardware or machine()
    chosen = policy(name)
    config = PolicyConfig(load_tokens=PAGE, min_restore_tokens=0)
    planner = chosen.make(
        Setting(config, SHAPE, planner_profile(hardware, COST, SHAPE), SPEC, requests)
    )
    return simulate(planner, hardware, MODEL, requests, server=chosen.server(SPEC), cost=COST)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_request_and_accounts_for_every_token(name: str) -> None:
    requests = _sessions()
    result = _run(name, requests)
    assert len(result.requests) == len(requests)
    for request in result.requests:
        assert request.finished_s is not None
        delivered = request.computed_tokens + request.spliced_tokens + request.resident_tokens
        assert delivered == request.prompt_tokens
    for used in result.links.values():
        assert 0 <= used.wasted_bytes <= used.nbytes


def test_recompute_loads_nothing_and_load_computes_only_what_no_tier_has() -> None:
    requests = _sessions()
    recompute, load = _run("recompute", requests), _run("load", requests)
    assert sum(request.spliced_tokens for request in recompute.requests) == 0
    later = [request for request in load.requests if not request.rid.endswith("0")]
    assert all(request.computed_tokens < 2 * PAGE + 2 for request in later)


def test_stock_leaves_a_prefix_below_its_threshold_on_storage() -> None:
    spec = ServerSpec(
        page_tokens=PAGE, step_tokens=32, device_pages=12, host_pages=12, fetches=True
    )
    planner = StockHiCache(SHAPE, 100_000)
    result = simulate(planner, machine(), MODEL, _sessions(), server=spec, cost=COST)
    assert result.links[Link.STORAGE_TO_HOST].nbytes == 0


def test_stock_needs_pages_with_names() -> None:
    request = SimRequest("r", 0.0, 129, cached=((Span(0, 8), Tier.STORAGE),))
    with pytest.raises(AssertionError, match="give the request keys"):
        serve(StockHiCache(SHAPE, 0), [request], fetches=True)


def test_the_oracle_is_not_slower_than_the_planner_it_tells_what_comes() -> None:
    requests = _sessions()
    oracle, ours = _run("oracle", requests), _run("kvtier", requests)
    assert sum(oracle.ttfts()) <= sum(ours.ttfts()) * (1 + 1e-9)


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'mru'\. There are: kvtier"):
        policy("mru")


def test_the_oracle_orders_the_device_and_leaves_host_memory_to_last_use() -> None:
    """Ordered by next use as well, DRAM would hold the pages of HBM a second time: fewer are found
    anywhere above SSD.
    """
    oracle = Oracle(Scripted(), _sessions(), 12, 12)
    for tier in (Tier.DEVICE, Tier.HOST, Tier.STORAGE):
        oracle.observe(PagesPlaced(keys("a", 10), tier, 0.0))
    assert [evict.tier for evict in oracle.step(StepView(0.0)).evictions] == [Tier.DEVICE]
