"""Two servers on one remote store in trouble: what is done, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import ctypes.util
import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Command
from fake_engine import FakeEngine

from sgl_kvtier.cli import main
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.server import remote
from sgl_kvtier.lab.stress.server.chaos import Chaos
from sgl_kvtier.lab.stress.server.log import FuzzLog
from sgl_kvtier.lab.stress.server.remote import Menace, fuzz_two, halves
from sgl_kvtier.lab.stress.server.run import FuzzOptions


class Run:
    """A run that ends after so many seconds, or fails."""

    def __init__(self, seconds: float, error: str = "") -> None:
        self.seconds = seconds
        self.error = error
        self.ended = False

    async def run(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.error:
            raise BenchError(self.error)
        self.ended = True


class Calm:
    """Trouble that makes none."""

    async def run(self) -> None:
        await asyncio.sleep(3600)


class Broken:
    async def run(self) -> None:
        raise BenchError("the master does not come back")


def test_requests_and_accidents_are_two_servers_own() -> None:
    one, two = halves(FuzzOptions("0-on-0", Chaos(seed=3), requests=501))
    assert (one.requests, two.requests) == (251, 250)
    assert one.chaos.seed != two.chaos.seed and one.run != two.run
    assert one.restored is two.restored is None


@pytest.mark.parametrize(
    ("runs", "menace", "said"),
    [([Run(0.0, "no server"), Run(60)], Calm(), "no server"), ([Run(60)], Broken(), "come back")],
)
def test_a_run_that_fails_and_trouble_that_fails_end_it_all(
    runs: Any, menace: Any, said: str
) -> None:
    with pytest.raises(BenchError, match=said):
        asyncio.run(fuzz_two(runs, [], menace))


def test_without_mooncake_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "missing_engine", lambda: "pip install 'sgl-kvtier[remote]'")
    with pytest.raises(BenchError, match="pip install"):
        Menace(FuzzLog(), 0)


def test_scenes_have_one_server(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "restore-fuzz", "--remote", "--scene", "storm"]
    assert main(words) == 1
    assert "--remote: not with --scene" in capsys.readouterr().err


SMALL = (
    *("bench", "restore-fuzz", "--remote", "--device", "cpu", "--trace", "generated:swe-mini"),
    *("--sessions", "3", "--turns", "3", "--divisor", "16", "--concurrency", "2"),
    *("--requests", "40", "--chaos", "abort,flush,switch"),
)


def test_two_servers_have_the_requests_together(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "missing_engine", lambda: "")
    monkeypatch.setattr(remote, "Servers", FakeEngine)
    done = kvtier(tmp_path, *SMALL)
    counts = done.result["counts"]
    assert counts["requests"] >= 40 and counts["compared"] > 0, done.err
    found = done.result["must_be_zero"]
    assert [counts[name] for name in found] == [0] * len(found)
    assert FakeEngine.live == 0
    assert done.result["remote"]["pages_read"] == 0
    assert done.status == 1, "stand-ins read nothing from elsewhere: the run showed nothing"


@pytest.mark.mooncake
@pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None or ctypes.util.find_library("ibverbs") is None,
    reason="Mooncake is not installed: pip install 'sgl-kvtier[remote]'",
)
def test_master_and_owner_are_killed_and_stopped_and_none_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("_CALM_S", "_STOPPED_S", "_GONE_S"):
        monkeypatch.setattr(remote, name, (0.05, 0.2))
    log = FuzzLog(tmp_path / "log")
    kinds = {f"{name} {what}" for name in ("master", "owner") for what in ("killed", "stopped")}

    async def menaced(menace: Menace) -> None:
        trouble = asyncio.create_task(menace.run())
        until = asyncio.get_running_loop().time() + 120
        while not kinds <= set(Counter(log.events)):
            assert not trouble.done() and asyncio.get_running_loop().time() < until
            await asyncio.sleep(0.2)
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)

    with Menace(log, 0) as menace:
        sections = menace.sections({"lab": {"faults": {"seed": 0, "lose_rate": 0.01}}})
        assert sections["remote"]["master"] == menace.engine.master
        assert sections["lab"]["faults"]["lose_rate"] == remote.LOST
        asyncio.run(menaced(menace))
    me = psutil.Process(os.getpid())
    assert not [one for one in me.children(recursive=True) if "mooncake" in one.name()]
