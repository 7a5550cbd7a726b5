"""SGLang's real server on a paced device: MLA, stock's file backend, and a page damaged on its disk."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.lab.experiment.arms import Setup, prepare
from sgl_kvtier.lab.outside.server import Server, end_on_signals
from sgl_kvtier.lab.paced import launching, pace

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]
LONG, DEVICE = 6000, 8192


def test_pages_come_back_right_from_every_tier_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    paced = launching.parse("paced:h100x8-deepseek-v3")
    setup = Setup(
        model_path=str(paced.model()),
        served_name="paced",
        device="paced:h100x8-deepseek-v3",
        page_size=64,
        chunk_tokens=2048,
        dtype="float32",
        device_tokens=DEVICE,
        host_ratio=3.0,
        storage_bytes=1 << 28,
        context_tokens=DEVICE,
        max_running=4,
    )
    server = Server("stock", prepare("hicache-file", setup, tmp_path), tmp_path)
    with end_on_signals(), server:
        server.wait_until_healthy(1500)
        prompt = tokens(1)
        cold = ask(server, prompt)
        ask(server, tokens(2))
        assert ask(server, prompt)["output_ids"] == cold["output_ids"]
        flush(server)
        stored = ask(server, prompt)
        assert stored["output_ids"] == cold["output_ids"]
        assert stored["meta_info"]["cached_tokens_details"]["storage"] > 5000
        assert wrong(tmp_path) == []
        flush(server)
        for file in (tmp_path / "storage").glob("*.bin"):
            damage(file)
        damaged = ask(server, prompt)
    assert damaged["output_ids"] != cold["output_ids"]
    first = wrong(tmp_path)[0]
    assert (first["rid"], first["tier"]) == (damaged["meta_info"]["id"], "storage")
    assert "came from storage, in layer" in first["mismatch"]


def tokens(seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, 250), k=LONG)


def post(server: Server, path: str, body: Any = None) -> str:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()


def ask(server: Server, prompt: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    found = post(server, "/generate", {"input_ids": prompt, "sampling_params": sampling})
    answer: dict[str, Any] = json.loads(found)
    return answer


def flush(server: Server) -> None:
    """Empties the device and host memory, once what is being written has been."""
    time.sleep(3.0)
    post(server, "/flush_cache?timeout=60")


def wrong(folder: Path) -> list[dict[str, Any]]:
    return [row for row in pace.read(folder / launching.LOG) if "mismatch" in row]


def damage(file: Path) -> None:
    """Changes one bit in the middle of a page."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
