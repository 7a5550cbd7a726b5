"""SGLang's real server on a paced device: latents, FP8, stock's file backend and our store, and pages
damaged on their way and on the disk.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_kvtier.lab.experiment.arms import OURS, Setup, prepare
from sgl_kvtier.lab.outside.server import Launch, Server, end_on_signals
from sgl_kvtier.lab.paced import launching, pace
from sgl_kvtier.lab.paced.signatures import answer_of

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]
LONG, DEVICE, OUTPUTS = 6000, 8192, 8
STOCK = "hicache-file"
FP8 = ("--kv-cache-dtype", "fp8_e4m3")


@pytest.mark.parametrize(
    ("arm", "name", "words"),
    [
        pytest.param(STOCK, "h100x8-deepseek-v3", (), id="stock, MLA"),
        pytest.param(STOCK, "h100-llama8b", FP8, id="stock, FP8", marks=pytest.mark.slow),
        pytest.param(OURS, "h100-llama8b", FP8, id="kvtier, FP8", marks=pytest.mark.slow),
        pytest.param(
            OURS, "h100x8-deepseek-v3", FP8, id="kvtier, MLA, FP8", marks=pytest.mark.slow
        ),
    ],
)
def test_pages_come_back_right_from_every_tier_and_a_damaged_one_is_named(
    arm: str, name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    paced = launching.parse(f"paced:{name}", words=words)
    sections = paced.sections()
    # What damages a page is to be found by the check of rows, so nothing else may find it before.
    sections["policy"] |= {"restore": "both", "proof": "off"}
    setup = setup_of(
        paced, device=f"paced:{name}", storage_bytes=1 << 28, extra=words, sections=sections
    )
    launch = prepare(arm, setup, tmp_path)
    damaging = replace(paced, damage="device").env(tmp_path / launching.LOG)
    server = Server(arm, Launch(launch.arguments, launch.env | damaging), tmp_path)
    prompt = tokens(1)
    right = list(answer_of(np.array(prompt), OUTPUTS))
    with end_on_signals(), server:
        server.wait_until_healthy(1500)
        assert ask(server, prompt)["output_ids"] == right
        ask(server, tokens(2))
        assert wrong(tmp_path) == []
        copied = ask(server, prompt)
        assert copied["output_ids"] != right
        (first, *_) = wrong(tmp_path)
        assert (first["rid"], first["tier"]) == (copied["meta_info"]["id"], "host memory")
        flush(server)
        known, checked = len(wrong(tmp_path)), checked_tokens(tmp_path)
        stored = ask(server, prompt)
        assert stored["output_ids"] == right
        assert len(wrong(tmp_path)) == known
        assert checked_tokens(tmp_path) > checked + 3000
        if arm == STOCK:
            assert stored["meta_info"]["cached_tokens_details"]["storage"] > 5000
            rows = pace.read(tmp_path / launching.LOG)
            assert {row["copy"] for row in rows if "copy" in row} == {"to_device", "to_host"}
            read = [row for row in rows if row.get("rid") == stored["meta_info"]["id"]]
            assert [row["load"] for row in read if "load" in row] == ["storage-host"]
            assert read[0]["at"] < read[0]["end"]
        else:
            time.sleep(1.5)  # counters are published twice a second
            assert metric(server, "kvtier:restore_ended_total", 'how="met"') > 0
            assert metric(server, "kvtier:restore_loaded_tokens_total", 'tier="storage"') > 0
        flush(server)
        for file in (tmp_path / "storage").glob("*.bin" if arm == STOCK else "**/seg-*"):
            damage(file)
        damaged = ask(server, prompt)
        if arm == OURS:  # our store compares checksums: what is damaged is computed again
            time.sleep(1.5)
            assert metric(server, "kvtier:pages_corrupt_total") > 0
            assert damaged["output_ids"] == right
            assert len(wrong(tmp_path)) == known
            return
    assert damaged["output_ids"] != right
    first = wrong(tmp_path)[known]
    assert (first["rid"], first["tier"]) == (damaged["meta_info"]["id"], "storage")
    assert "came from storage, in layer" in first["mismatch"]


def test_a_page_damaged_on_its_way_is_found_before_a_forward_reads_it(tmp_path: Path) -> None:
    name = "h100-llama8b"
    paced = launching.parse(f"paced:{name}")
    sections = paced.sections()
    sections["policy"]["restore"] = "load"
    setup = setup_of(paced, device=f"paced:{name}", storage_bytes=1 << 28, sections=sections)
    launch = prepare(OURS, setup, tmp_path)
    damaging = replace(paced, damage="device").env(tmp_path / launching.LOG)
    server = Server(OURS, Launch(launch.arguments, launch.env | damaging), tmp_path)
    prompt = tokens(1)
    right = list(answer_of(np.array(prompt), OUTPUTS))
    with end_on_signals(), server:
        server.wait_until_healthy(1500)
        for _ in range(3):
            assert ask(server, prompt)["output_ids"] == right
            flush(server)
        time.sleep(1.5)
        assert metric(server, "kvtier:restore_proof_pages_total", 'result="differs"') == 1
        assert metric(server, "kvtier:restore_proof_pages_total", 'result="equal"') > 0
        assert metric(server, "kvtier:restore_proof", "") == 0
    assert wrong(tmp_path) == []


def setup_of(paced: launching.Paced, **more: Any) -> Setup:
    """What a small server on this device is started with, and what is said of it besides."""
    usual = {
        "model_path": str(paced.model()),
        "served_name": "paced",
        "page_size": 64,
        "chunk_tokens": 2048,
        "dtype": "float32",
        "device_tokens": DEVICE,
        "host_ratio": 3.0,
        "context_tokens": DEVICE,
        "max_running": 4,
    }
    return Setup(**{**usual, **more})


def tokens(seed: int) -> list[int]:
    return random.Random(seed).choices(range(16, 250), k=LONG)


def post(server: Server, path: str, body: Any = None) -> str:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read().decode()


def ask(server: Server, prompt: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": OUTPUTS, "temperature": 0, "ignore_eos": True}
    found = post(server, "/generate", {"input_ids": prompt, "sampling_params": sampling})
    answer: dict[str, Any] = json.loads(found)
    return answer


def flush(server: Server) -> None:
    """Empties the device and host memory, once what is being written has been."""
    time.sleep(3.0)
    post(server, "/flush_cache?timeout=60")


def wrong(folder: Path) -> list[dict[str, Any]]:
    return [row for row in pace.read(folder / launching.LOG) if "mismatch" in row]


def checked_tokens(folder: Path) -> int:
    return sum(row.get("checked", 0) for row in pace.read(folder / launching.LOG))


def metric(server: Server, name: str, label: str = "") -> float:
    """The sum of a counter's samples with this label."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [one for one in lines if one.startswith(name + "{") and label in one]
    return sum(float(one.rpartition(" ")[2]) for one in found)


def damage(file: Path) -> None:
    """Changes one bit in every 4 KiB, so in every page, under an open file too."""
    data = np.fromfile(file, np.uint8)
    data[2048::4096] ^= 4
    with file.open("r+b") as there:
        there.write(data.tobytes())
