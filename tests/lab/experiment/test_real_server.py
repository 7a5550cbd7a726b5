"""The bench against the real SGLang server with a kvtier storage tier: one server for the whole
module.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.experiment.arms import Setup, prepare
from sgl_kvtier.lab.outside.client import Client, Completion, Metrics
from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.lab.outside.openai import OpenAIClient
from sgl_kvtier.lab.outside.server import Server
from sgl_kvtier.launch import detect_device, missing_packages

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        bool(missing_packages()), reason="sglang is not installed: pip install '.[sglang]'"
    ),
    pytest.mark.skipif(detect_device() != "cpu", reason="checks the CPU reference platform"),
]

T = TypeVar("T")
PROMPT = random.Random(5).choices(range(256), k=400)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model on kvtier, with a device pool of 1,024 tokens."""
    folder = tmp_path_factory.mktemp("kvtier")
    setup = Setup(
        model_path=str(write_model("tiny-qwen3", folder=tmp_path_factory.mktemp("models"))),
        served_name="tiny",
        device="cpu",
        dtype="float32",
        page_size=16,
        chunk_tokens=128,
        device_tokens=1024,
        context_tokens=1024,
        max_running=8,
        storage_bytes=1 << 28,
        prefetch_threshold=16,
    )
    with Server("kvtier", prepare("kvtier", setup, folder), folder) as running:
        running.wait_until_healthy(400)
        yield running


def with_client(server: Server, work: Callable[[Client], Awaitable[T]]) -> T:
    async def go() -> T:
        async with Client(server.url, timeout_s=120) as client:
            return await work(client)

    return asyncio.run(go())


async def stored(client: Client, tokens: int) -> None:
    for _ in range(200):
        written = (await client.metrics()).total("sglang:backuped_tokens_total")
        if (written or 0) >= tokens:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{tokens} tokens were not written to storage, only {written}")


def test_a_flushed_prompt_comes_back_from_storage_with_equal_tokens(server: Server) -> None:
    async def work(client: Client) -> tuple[Completion, Completion, Metrics]:
        first = await client.generate(PROMPT, 12)
        await stored(client, 400)
        await client.flush()
        return first, await client.generate(PROMPT, 12), await client.metrics()

    first, second, metrics = with_client(server, work)
    assert (first.error, second.error) == (None, None)
    assert first.cached is not None and first.cached.total == 0
    assert second.cached is not None and second.cached.sums_up
    assert second.cached.storage == 384  # all whole pages but the one that holds the last token
    assert second.output_ids == first.output_ids
    assert len(second.token_times_s) == 12
    assert len(set(second.output_ids)) > 3
    assert metrics.total("sglang:prefill_effective_tokens_total", mode="storage_hit") == 384
    assert metrics.total("sglang:hicache_backup_bytes_total")


def test_a_cleared_storage_gives_nothing_back(server: Server) -> None:
    async def work(client: Client) -> Completion:
        await client.generate(PROMPT[1:], 2)
        await client.flush()
        await client.clear_storage()
        return await client.generate(PROMPT[1:], 2)

    done = with_client(server, work)
    assert done.error is None
    assert done.cached is not None and done.cached.total == 0


def test_a_prompt_that_does_not_fit_is_an_error_of_that_request_alone(server: Server) -> None:
    async def work(client: Client) -> tuple[Completion, Completion]:
        return await client.generate([7] * 5000, 2), await client.generate([7] * 50, 2)

    too_long, good = with_client(server, work)
    assert too_long.error
    assert good.error is None


def test_replay_command_reports_every_request(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "replay.json", tmp_path / "log.jsonl"
    load = "--trace generated:swe-mini --sessions 3 --turns 3 --divisor 16 --gap-scale 0"
    words = ["replay", server.url, *load.split(), "--concurrency", "2"]
    assert main([*words, "--json", str(out), "--log", str(log)]) == 0
    result = json.loads(out.read_text())
    assert result["schema"] == "kvtier.replay/1"
    assert (result["figures"]["requests"], result["figures"]["errors"]) == (9, 0)
    assert result["figures"]["cached_tokens_check"]["requests_whose_tiers_do_not_sum"] == 0
    assert sum(result["figures"]["cached_tokens"].values()) > 0
    assert len(log.read_text().splitlines()) == 9
    assert "9 requests, 0 of them failed" in capsys.readouterr().out


def test_the_openai_route_measures_what_sglangs_own_does(server: Server) -> None:
    prompt = PROMPT[2:]

    async def ask() -> list[Completion]:
        async with Client(server.url) as own, OpenAIClient(server.url) as client:
            found = []
            for one in (own, client, own, client):
                found.append(await one.generate(prompt, 12))
                await stored(own, 384)
                await own.flush()
            return found

    computed, from_storage, ids, text = asyncio.run(ask())
    assert [done.error for done in (computed, from_storage, ids, text)] == [None] * 4
    assert [len(done.token_times_s) for done in (ids, text)] == [12, 12]
    assert from_storage.cached == ids.cached == text.cached
    assert text.cached is not None and text.cached.sums_up and text.cached.storage == 384
    assert text.prompt_tokens == ids.prompt_tokens == 398
    assert from_storage.text == text.text and text.text
    assert computed.output_ids == ids.output_ids


def test_the_replay_command_may_go_that_way_too(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "replay.json"
    load = ["--trace", "generated:swe-mini", "--sessions", "2", "--turns", "3", "--divisor", "16"]
    words = ["replay", server.url, *load, "--gap-scale", "0", "--route", "openai"]
    model = server.command[server.command.index("--model-path") + 1]
    assert main([*words, "--tokenizer", model, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["figures"]["requests"], result["figures"]["errors"]) == (6, 0)
    assert result["figures"]["cached_tokens_check"]["requests_whose_tiers_do_not_sum"] == 0


def test_memory_and_descriptors_of_the_whole_tree_are_seen(server: Server) -> None:
    usage = server.usage()
    assert usage.processes >= 3
    assert usage.rss_bytes > 500 << 20
    assert usage.open_files > 20
