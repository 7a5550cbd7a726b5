"""The client: what it reads from a stream, and that no failure escapes it."""

from __future__ import annotations

import asyncio
import re

import pytest
from fake_restore import RestoringServer
from fake_sglang import FakeServer

from sgl_kvtier.bench.client import Cached, Client, Completion, Metrics
from sgl_kvtier.errors import BenchError


def ask(server: FakeServer, prompt: list[int], count: int, timeout_s: float = 30.0) -> Completion:
    async def run() -> Completion:
        async with server.up(), Client(server.url, timeout_s=timeout_s) as client:
            return await client.generate(prompt, count)

    return asyncio.run(run())


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_and_their_times_are_read_from_either_kind_of_stream(incremental: bool) -> None:
    server = FakeServer(incremental=incremental, storage_tokens=16)
    done = ask(server, [1, 2, 3], 5)
    assert done.error is None
    assert list(done.output_ids) == server.answer([1, 2, 3], 5)
    assert len(done.token_times_s) == 5
    assert list(done.token_times_s) == sorted(done.token_times_s)
    assert done.ttft_s == done.token_times_s[0]
    assert done.tpot_s == (done.token_times_s[4] - done.token_times_s[0]) / 4
    assert done.cached == Cached(storage=16, total=16)
    assert done.prompt_tokens == 3
    assert done.server_queue_s == 0.5


def test_generation_is_greedy_and_of_a_fixed_length(fake_server: FakeServer) -> None:
    ask(fake_server, [9], 3)
    assert fake_server.requests == [
        {
            "input_ids": [9],
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        }
    ]


def test_a_very_long_event_is_read_whole(fake_server: FakeServer) -> None:
    done = ask(fake_server, list(range(1000)), 3000)
    assert len(done.output_ids) == 3000


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("refuse", "HTTP 400: .*too long"),
        ("break", "ended before the answer did"),
        ("error", "out of luck"),
        ("abort", "aborted by the server: no room"),
    ],
)
def test_a_failed_request_is_a_completion_with_an_error(failure: str, message: str) -> None:
    done = ask(FakeServer(fail_when=lambda ids: failure), [1], 4)
    assert done.error is not None
    assert re.search(message, done.error)


def test_a_request_without_end_becomes_an_error_at_the_time_limit(fake_server: FakeServer) -> None:
    fake_server.fail_when = lambda ids: "hang"
    done = ask(fake_server, [1], 4, timeout_s=0.2)
    assert done.error == "no end after 0.2 s"
    assert done.ttft_s is None


def test_a_server_that_is_not_there_is_an_error_not_an_exception() -> None:
    async def run() -> tuple[Completion, Metrics]:
        async with Client("http://127.0.0.1:9") as client:
            return await client.generate([1], 1), await client.metrics()

    done, metrics = asyncio.run(run())
    assert "127.0.0.1:9" in (done.error or "")
    assert metrics.total("sglang:anything") is None


def test_asking_about_the_model_of_no_server_says_how_to_start_one() -> None:
    async def run() -> None:
        async with Client("http://127.0.0.1:9") as client:
            await client.model_info()

    with pytest.raises(BenchError, match="kvtier serve"):
        asyncio.run(run())


def test_flush_and_clear_reach_the_server_and_a_refusal_is_raised(fake_server: FakeServer) -> None:
    async def run() -> None:
        async with fake_server.up(), Client(fake_server.url) as client:
            await client.flush()
            await client.clear_storage()
        async with Client("http://127.0.0.1:9") as client:
            with pytest.raises(BenchError, match="did not flush its cache"):
                await client.flush()

    asyncio.run(run())
    assert fake_server.calls == ["/flush_cache", "/hicache/storage-backend/clear"]


def test_metrics_are_summed_over_the_labels_not_asked_for() -> None:
    metrics = Metrics.parse(
        "# HELP sglang:x_total about\n"
        'sglang:x_total{tp_rank="0",reason="a b",le="+Inf"} 3.0\n'
        'sglang:x_total{tp_rank="1",reason="a b"} 4.5\n'
        'sglang:x_total{tp_rank="1",reason="say \\"no\\""} 1e2 1700000000\n'
        "up 1\n"
        "broken{ no number\n"
    )
    assert metrics.total("sglang:x_total") == 107.5
    assert metrics.total("sglang:x_total", reason="a b") == 7.5
    assert metrics.total("sglang:x_total", tp_rank="1", reason="a b") == 4.5
    assert metrics.total("up") == 1
    assert metrics.total("sglang:y_total") is None


def test_tiers_that_do_not_add_up_are_noticed() -> None:
    assert Cached(device=16, host=16, storage=32, total=64).sums_up
    assert not Cached(device=16, total=64).sums_up


def test_settings_aborts_and_policies_go_to_their_routes_with_the_admin_key() -> None:
    server = RestoringServer()

    async def go() -> None:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            await client.set_state({"kvtier.policy.restore": 3.0, "kvtier.throttle.read_gbps": 0.5})
            await client.set_prefetch_policy("kvtier", "wait_complete")
            await client.abort("r1")
            await client.reconnect()
            assert (await client.generate([1, 2], 1)).error is None

    asyncio.run(go())
    assert (server.restore, server.gbps, server.prefetch, server.aborted) == ("compute", 0.5, "wait_complete", {"r1"})


def test_a_setting_that_is_refused_is_an_error() -> None:
    server = RestoringServer(refuses=("kvtier.policy.restore",))

    async def go() -> None:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            await client.set_state({"kvtier.policy.restore": 3.0})

    with pytest.raises(BenchError, match=r"kvtier\.policy\.restore"):
        asyncio.run(go())


@pytest.mark.parametrize("incremental", [False, True])
def test_log_probs_are_kept_where_they_were_asked_for(incremental: bool) -> None:
    server = RestoringServer(incremental=incremental)

    async def go() -> tuple[Completion, Completion]:
        async with server.up(), Client(server.url) as client:
            return await client.generate([1, 2], 3, logprobs=True), await client.generate([1, 2], 3, rid="named")

    asked, not_asked = asyncio.run(go())
    assert asked.logprobs == tuple(-token / 256 for token in asked.output_ids)
    assert not_asked.logprobs == ()
    assert server.requests[1]["rid"] == "named"
