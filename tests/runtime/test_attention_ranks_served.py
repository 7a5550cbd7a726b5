"""Data-parallel attention: each of two ranks restores on its own, also the other's pages."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import until
from restore_lab import BOTH_ENDS, CHECKED, CHUNK, LONG, SLOW_DISK
from serving import Answer, Served, changed, flags, prompts
from shared import Shared

from sgl_kvtier.policy.decision_log import Reader
from sgl_kvtier.policy.messages import StepView

pytestmark = pytest.mark.server


@pytest.fixture
def server(servers: Shared) -> Served:
    pools = {"chunked_prefill_size": 2 * CHUNK, "page_size": 16, "max_total_tokens": 8192}
    launch = flags("tiny-qwen3", tp_size=2, attn_dp_size=2, **pools)
    sections = {"throttle": SLOW_DISK, "policy": {**BOTH_ENDS, "proof": "all"}}
    return servers.get(launch, sections, {**CHECKED, **changed(PLAIN_COPIES=Path("yes"))})


def by_rank(server: Served, metric: str, **labels: str) -> list[float]:
    """A counter's value on each of the two ranks, over all series with these labels."""
    sums = [0.0, 0.0]
    for name, found, value in server.samples("kvtier:restore_"):
        if name == metric and labels.items() <= found.items():
            sums[int(found["dp_rank"])] += value
    return sums


def test_each_rank_restores_its_own_and_the_others_pages_beside_the_other(server: Served) -> None:
    asked, own = prompts(4, tokens=LONG, seed=7), [0, 1, 0, 1]

    def ask(ids: list[int], rank: int) -> Answer:
        return server.ask(ids, routed_dp_rank=rank)

    first = list(map(ask, asked, own))
    for ranks in (own, [1 - rank for rank in own]):
        server.flush()
        with ThreadPoolExecutor(len(asked)) as pool:
            again = list(pool.map(ask, asked, ranks))
        assert [a.tokens for a in again] == [a.tokens for a in first]
        assert all(a.storage > 0 for a in again)
        assert all(a.device == a.host == 0 for a in again)  # the flush has reached both ranks
    time.sleep(1.2)  # counters are published twice a second
    assert by_rank(server, "ended_total", how="met") == [4.0, 4.0]
    assert min(by_rank(server, "loaded_tokens_total", tier="storage")) > 0
    assert by_rank(server, "planner_failures_total") == [0.0, 0.0]
    assert min(by_rank(server, "proof_pages_total", result="equal")) > 0
    assert by_rank(server, "proof_pages_total", result="differs") == [0.0, 0.0]
    assert by_rank(server, "proof_attaches_total", result="differs") == [0.0, 0.0]


def test_a_rank_counts_the_requests_that_the_other_one_decodes(server: Served) -> None:
    long, stored = prompts(2, tokens=LONG, seed=11)
    server.ask(stored, routed_dp_rank=1)
    server.flush()
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(server.ask, long, 400, routed_dp_rank=0)
        until(lambda: server.metric("sglang:num_running_reqs") > 0)
        again = server.ask(stored, routed_dp_rank=1)
        assert not decoding.done() and again.storage > 0
    time.sleep(1.2)  # the log is written by a thread of its own
    log = server.server.folder / "decisions-dp1.jsonl"
    records = map(Reader().decode, log.read_text().splitlines()[1:])
    counted = {one.decoding for one in records if isinstance(one, StepView) and one.slot}
    assert 1 in counted, "while it restores"
