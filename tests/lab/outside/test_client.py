"""The client: what it reads from a stream, and that no failure escapes it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_restore import RestoringServer
from fake_sglang import FakeServer

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside import client as client_module
from sgl_kvtier.lab.outside.client import MOST_LINE_BYTES, Cached, Client, Completion, Metrics

SGLANG_KEEPS_OPEN_S = 5
"""What Uvicorn has if SGLANG_TIMEOUT_KEEP_ALIVE does not say otherwise."""


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
    assert sum(done.token_gaps_s) == pytest.approx(4 * done.tpot_s)
    assert done.cached == Cached(storage=16, total=16)
    assert done.prompt_tokens == 3
    assert done.server_queue_s == 0.5
    assert done.rid == "chosen by the server"


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
            with pytest.raises(BenchError, match="kvtier serve"):
                await client.model_info()
            return await client.generate([1], 1), await client.metrics()

    done, metrics = asyncio.run(run())
    assert "127.0.0.1:9" in (done.error or "")
    assert metrics.total("sglang:anything") is None


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
        "a NaN\nb +Inf\nc 1e999\n"
    )
    assert metrics.total("sglang:x_total") == 107.5
    assert metrics.total("sglang:x_total", reason="a b") == 7.5
    assert metrics.total("sglang:x_total", tp_rank="1", reason="a b") == 4.5
    assert metrics.total("up") == 1
    assert {metrics.total(name) for name in ("sglang:y_total", "a", "b", "c")} == {None}


def test_settings_aborts_and_policies_go_to_their_routes_with_the_admin_key() -> None:
    server = RestoringServer()

    async def go() -> None:
        async with server.up(), Client(server.url, admin_key="secret") as client:
            await client.set_policy(restore="compute")
            await client.set_state({"kvtier.throttle.read_gbps": 0.5})
            await client.set_prefetch_policy("kvtier", "wait_complete")
            await client.abort("r1")
            await client.reconnect()
            assert (await client.generate([1, 2], 1)).error is None

    asyncio.run(go())
    assert (server.restore, server.gbps, server.prefetch, server.aborted) == (
        "compute",
        0.5,
        "wait_complete",
        {"r1"},
    )


def test_a_connection_that_its_server_may_be_closing_is_not_used_again(
    fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client_module.KEEP_OPEN_S < SGLANG_KEEPS_OPEN_S
    monkeypatch.setattr(client_module, "KEEP_OPEN_S", 0.05)

    async def go() -> None:
        async with fake_server.up(), Client(fake_server.url) as client:
            for _ in range(2):
                await client.metrics()
                await asyncio.sleep(0.2)

    asyncio.run(go())
    assert len(set(fake_server.peers)) == 2


@pytest.mark.parametrize("incremental", [False, True])
def test_log_probs_are_kept_where_they_were_asked_for(incremental: bool) -> None:
    server = RestoringServer(incremental=incremental)

    async def go() -> tuple[Completion, Completion]:
        async with server.up(), Client(server.url) as client:
            return await client.generate([1, 2], 3, logprobs=True), await client.generate(
                [1, 2], 3, rid="named"
            )

    asked, not_asked = asyncio.run(go())
    assert asked.logprobs == tuple(-token / 256 for token in asked.output_ids)
    assert not_asked.logprobs == ()
    assert server.requests[1]["rid"] == "named"


class HostileServer:
    """Answers whatever it is asked with the same bytes; `endless` are sent after them until the
    client is gone.
    """

    def __init__(self, answer: bytes, endless: bytes | None = b"", close: bool = True) -> None:
        self._answer = answer
        self._endless = endless
        self._close = close
        self.url = ""

    @asynccontextmanager
    async def up(self) -> AsyncIterator[HostileServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(self._answer)
            await writer.drain()
            while self._endless:
                writer.write(self._endless)
                await writer.drain()
            if not self._close:
                await reader.read()  # until the client has gone
        writer.close()


def http(
    body: bytes, head: bytes = b"content-type: text/event-stream", status: bytes = b"200 OK"
) -> bytes:
    return b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\nconnection: close\r\n\r\n" + body


def events(*events: Any) -> bytes:
    texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in events]
    return http(b"".join(b"data: " + text + b"\n\n" for text in texts) + b"data: [DONE]\n\n")


DONE = {"finish_reason": {"type": "length"}, "completion_tokens": 1}
WRONG: list[Any] = [
    *(5, -1, "x", True, [1], {"a": 1}, [None], [[]], ["x"], math.nan, math.inf, 1e308, 10**400),
    *([10**400], [-1], [1.5], [True]),
]
RIGHT = {
    "prompt_tokens": [5],
    "cached_tokens": [5],
    "cached_tokens_details": [{"a": 1}],
    "queue_time": [5, -1],
    "storage_prefetch_wait": [5, -1],
    "id": ["x"],
    "output_token_logprobs": [],
    "finish_reason": [],
}
"""The fields of an event's `meta_info`, and which of `WRONG` are right there."""


def said(**meta: Any) -> bytes:
    """An answer of one token with these fields."""
    return events({"output_ids": [1], "meta_info": {**DONE, **meta}})


CHUNKED = b"transfer-encoding: chunked"
# name: what the server answers.
MALFORMED: dict[str, bytes] = {
    **{
        f"output_ids {n}": events({"output_ids": value, "meta_info": DONE})
        for n, value in enumerate(WRONG)
        if value != [1]
    },
    **{
        f"meta_info {n}": events({"output_ids": [1], "meta_info": value})
        for n, value in enumerate(WRONG)
    },
    **{
        f"{name} {n}": said(**{name: value})
        for name, right in RIGHT.items()
        for n, value in enumerate(WRONG)
        if value not in right
    },
    **{f"event {n}": events(value) for n, value in enumerate([*WRONG, None, [], {}])},
    "error is a list": events({"error": []}),
    "error is deep": events({"error": {"message": [[["x" * 1_000_000]]]}}),
    "tier is a text": said(cached_tokens=1, cached_tokens_details={"host": "x"}),
    "abort with a list": said(finish_reason={"type": "abort", "message": []}),
    "reason is deep": said(finish_reason={"type": [[]]}),
    "more tokens than asked for": events({"output_ids": list(range(100_000)), "meta_info": DONE}),
    "deep nesting": events(b"[" * 200_000),
    "deep objects": events(b'{"a":' * 100_000),
    "not UTF-8": events(b'{"error": "\xff\xfe"}'),
    "digits": events(b'{"output_ids": [' + b"1" * 5000 + b"]}"),
    "not JSON": events(b"x" * 3_000_000),
    "half a line": http(b'data: {"output_ids": [1], "meta_info"'),
    "nothing": http(b""),
    "a chunk that is cut off": http(b"ffffff\r\ndata: ", CHUNKED),
    "a chunk without a size": http(b"zz\r\n", CHUNKED),
    "less than announced": http(b"data: ", b"content-length: 100"),
    "a length that is none": http(b"data: ", b"content-length: -7"),
    "not packed": http(b"xxxxxxxx", b"content-encoding: gzip"),
    "packed without end": http(
        gzip.compress(bytes(4 * MOST_LINE_BYTES), 1), b"content-encoding: gzip"
    ),
    "no HTTP": b"\0\xff" * 1000,
    "no answer": b"",
    "refused in no charset": http(b"\xff", b"content-type: text/plain; charset=klingon", b"500 Oh"),
    "sent away": http(b"", b"location: nowhere://", b"302 Found"),
}
TOKEN = b'data: {"output_ids": [1], "meta_info": {"completion_tokens": 7}}\n\n'
# name: what the server answers, and what it sends behind that until the client has gone.
ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "endless line": (http(b"data: "), b"x" * 65536),
    "endless lines": (http(b""), b"\n" * 65536),
    "endless events": (http(b""), TOKEN),
    "a head without end": (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 65536),
    "refused at length": (http(b"", status=b"400 Bad Request"), b"x" * 65536),
}
SERVERS = {
    **{name: HostileServer(answer) for name, answer in MALFORMED.items()},
    **{name: HostileServer(*answer) for name, answer in ENDLESS.items()},
    "a chunk that never ends": HostileServer(http(b"ffffff\r\ndata: ", CHUNKED), close=False),
    "silence": HostileServer(b"", close=False),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_whatever_a_server_answers_wrongly_is_an_error_of_that_request(kind: str) -> None:
    async def run() -> Completion:
        async with SERVERS[kind].up() as server, Client(server.url, timeout_s=1.0) as client:
            return await asyncio.wait_for(client.generate([1, 2], 4, logprobs=True), 60)

    done = asyncio.run(run())
    assert done.error
    assert len(done.error) < 500
    assert "\n" not in done.error
    numbers = (done.prompt_tokens, done.server_queue_s, done.storage_wait_s)
    json.dumps([*numbers, *done.output_ids, *done.logprobs], allow_nan=False)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"5", b"{}", b'{"result": ' + b"[" * 100_000, b"\xff", b"x" * 100_000],
    ids=len,
)
def test_what_other_routes_answer_wrongly_is_a_bench_error(body: bytes) -> None:
    async def run() -> None:
        async with (
            HostileServer(http(body)).up() as server,
            Client(server.url, timeout_s=1.0) as client,
        ):
            with pytest.raises(BenchError):
                await client.hint("a", {"ttl_s": 1})
            if body != b"{}":
                with pytest.raises(BenchError, match="no server answers"):
                    await client.model_info()
            assert (await client.metrics()).total("up") is None

    asyncio.run(run())


@pytest.mark.parametrize(
    "head", [b"content-type: text/plain; charset=klingon", b"content-encoding: gzip"]
)
def test_metrics_that_cannot_be_read_are_none(head: bytes) -> None:
    async def run() -> Metrics:
        async with (
            HostileServer(http(b"up 1\n\xff", head)).up() as server,
            Client(server.url, timeout_s=1.0) as client,
        ):
            return await client.metrics()

    assert asyncio.run(run()).total("down") is None


def test_what_a_dilated_server_took_is_divided_by_its_dilation() -> None:
    done = Completion(5.0, 4.0, (1, 2), (1.0, 3.0), server_queue_s=0.5, storage_wait_s=None)
    same = done.undilated(2.0)
    assert (same.sent_s, same.e2e_s, same.ttft_s, same.tpot_s) == (5.0, 2.0, 0.5, 1.0)
    assert (same.server_queue_s, same.storage_wait_s) == (0.25, None)


def test_a_client_of_a_dilated_server_waits_as_much_longer() -> None:
    async def limit_s() -> float | None:
        async with Client("http://127.0.0.1:9", timeout_s=30.0, dilation=1e6) as client:
            return client._timeout.total

    assert asyncio.run(limit_s()) == 3e7
