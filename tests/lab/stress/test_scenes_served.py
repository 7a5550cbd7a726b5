"""Scenes of trouble against the real SGLang server, each for seconds: one server for all of them,
and one that is restarted.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sgl_kvtier.lab.experiment.arms import OURS, Setup
from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.lab.stress.server.chaos import Chaos
from sgl_kvtier.lab.stress.server.clock import OwnClock
from sgl_kvtier.lab.stress.server.log import MUST_BE_ZERO, FuzzLog, counts, prompt_name
from sgl_kvtier.lab.stress.server.run import Asked, FuzzOptions, take_references
from sgl_kvtier.lab.stress.server.scenes import SCENES
from sgl_kvtier.lab.stress.server.server import FuzzServer
from sgl_kvtier.lab.stress.server.stage import GBPS, Stage, check_store
from sgl_kvtier.launch import detect_device, missing_packages

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        bool(missing_packages()), reason="sglang is not installed: pip install '.[sglang]'"
    ),
    pytest.mark.skipif(detect_device() != "cpu", reason="checks the CPU reference platform"),
]
OUTPUTS = 6
DEVICE_TOKENS = 4096


@dataclass
class Lab:
    """A stage, its server's log, and where its store is."""

    stage: Stage
    log: FuzzLog
    store: Path


def sessions() -> list[list[Asked]]:
    """Prompts that share nothing: twice what the device pool holds."""
    rng, made = random.Random(7), []
    for place in range(12):
        ids = tuple(rng.randrange(4, 500) for _ in range(700))
        made.append([Asked(ids, OUTPUTS, prompt_name(ids, OUTPUTS), place)])
    return made


def started(
    folder: Path, host_ratio: float, signals: tuple[signal.Signals, ...], clock: OwnClock | None
) -> Iterator[Lab]:
    """A server that is asked everything once while nothing is stored: those answers are what later
    ones are compared with.
    """
    model = write_model("lab-mha")  # a smaller one computes these prompts sooner than it restores
    setup = Setup(
        model_path=str(model), served_name="tiny", device="cpu", dtype="float32", page_size=16, chunk_tokens=256,
        device_tokens=DEVICE_TOKENS, context_tokens=DEVICE_TOKENS, host_ratio=host_ratio, storage_bytes=1 << 28,
        prefetch_threshold=32, max_running=8,
    )  # fmt: skip
    ahead = {"prefetch": "on", "eviction": "next-use", "sessions": True}
    log, asked = FuzzLog(), sessions()
    sections = {"policy": ahead, "lab": {"throttle": {"read_gbps": GBPS}}}
    server = FuzzServer(OURS, setup, folder, log, sections, clock.env if clock else None, signals)
    options = FuzzOptions("scenes", Chaos(), concurrency=6, ahead=True)
    stage = Stage(options, 0.05, server, asked, log, clock)

    async def begin() -> None:
        async with stage.client() as client:
            await take_references(client, asked, log, lambda: None)
        await stage.open()

    try:
        server.start()
        asyncio.run(begin())
        yield Lab(stage, log, folder / "storage")
    finally:
        server.stop()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Small in every way that a scene needs: a host pool of few prompts, and a time of day that can
    be moved.
    """
    folder = tmp_path_factory.mktemp("scenes")
    yield from started(folder / "server", 0.5, (signal.SIGKILL,), OwnClock(folder / "clock"))


def play(lab: Lab, name: str) -> dict:
    before = counts(lab.log)
    played = asyncio.run(lab.stage.play(name, SCENES[name].scene))
    assert played["findings"] == []
    after = counts(lab.log)
    assert {what: after[what] - before[what] for what in MUST_BE_ZERO} == dict.fromkeys(
        MUST_BE_ZERO, 0
    ), after["error_messages"]
    assert played["restored_after"] > 0
    return played


@pytest.mark.parametrize("name", [name for name in SCENES if name != "restarts"])
def test_a_server_serves_on_and_restores_after(lab: Lab, name: str) -> None:
    assert play(lab, name)["requests"] > 0


def test_what_is_stored_is_whole_at_the_end(lab: Lab) -> None:
    lab.stage.server.stop()
    found = len(lab.log.findings)
    checked = check_store(lab.store, lab.log)
    assert lab.log.findings[found:] == []
    assert checked is not None and sum(rank["good"] for rank in checked["ranks"]) > 0


def test_every_restart_under_load_finds_the_store(tmp_path: Path) -> None:
    for one in started(tmp_path / "server", 1.0, (signal.SIGTERM, signal.SIGKILL), None):
        assert play(one, "restarts")["amount"] == "1 by SIGKILL, 1 by SIGTERM"
