"""`kvtier replay` against a server that says it is on a paced device, with a fake for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_openai import FakeOpenAI
from fake_sglang import FakeServer, in_a_thread

from sgl_kvtier.cli import main
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import rounds
from sgl_kvtier.lab.experiment.scenarios import replay as scenario
from sgl_kvtier.lab.outside.client import Metrics
from sgl_kvtier.lab.outside.replay import replay
from sgl_kvtier.lab.paced import launching

SAID = 'kvtier:paced_dilation{profile="h100-llama8b"} 4.0\n'
SMALL = ("--trace", "generated:swe-mini", "--sessions", "2", "--turns", "2", "--divisor", "16")


def replayed(
    tmp_path: Path, fake: FakeServer | FakeOpenAI, *words: str, status: int = 0
) -> dict[str, Any]:
    out = tmp_path / "out.json"
    model = str(launching.parse("paced:h100-llama8b").model())
    with in_a_thread(fake) as url:
        files = ("--tokenizer", model, "--json", str(out))
        assert main(["replay", url, *SMALL, "--gap-scale", "0", *files, *words]) == status
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_times_of_a_paced_server_are_divided_by_the_dilation_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(metrics_text=SAID)  # its queue takes 0.5 s
    result = replayed(tmp_path, fake)
    assert {sample["queue_ms"] for sample in result["samples"]} == {125.0}
    assert result["device"]["paced"]["dilation"] == 4.0
    assert result["notes"][0].startswith("Paced, not computed: the server says")
    assert "Replay (paced h100-llama8b, not computed)" in capsys.readouterr().out


def test_a_server_that_computes_is_not_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replayed(tmp_path, FakeServer())
    assert {sample["queue_ms"] for sample in result["samples"]} == {500.0}
    assert "device" not in result
    assert "paced" not in capsys.readouterr().out


def test_what_a_server_does_not_count_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replayed(tmp_path, FakeOpenAI(), "--route", "openai")
    assert result["figures"]["bytes"] == {"read": None, "written": None}
    said = capsys.readouterr().out
    assert "prompt tokens: how many came from a cache is not known" in said
    assert "storage read not known, written not known" in said


def test_an_interrupted_replay_reads_the_counters_once_they_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writing(FakeServer):
        async def metrics(self, request: web.Request) -> web.Response:
            tokens = 10 * min(len(self.peers), 5)
            grown = {"backuped_tokens": tokens, "hicache_backup_tokens": tokens}
            grown["hicache_backup_bytes"] = 2 * tokens
            self.metrics_text = "".join(f"sglang:{k}_total {v}\n" for k, v in grown.items())
            return await super().metrics(request)

    async def interrupted(*args: Any, **more: Any) -> None:
        await replay(*args, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "LOOK_S", 0.01)
    monkeypatch.setattr(scenario, "replay", interrupted)
    result = replayed(tmp_path, Writing(), status=130)
    assert result["interrupted"]
    assert result["figures"]["bytes"]["written"] == 40 * 2, "the first 10 were there before"


def test_a_profile_that_is_not_known_here_is_refused_with_those_that_are() -> None:
    said = Metrics.parse('kvtier:paced_dilation{profile="h900"} 1.0').to_json()
    with pytest.raises(BenchError, match=r"no profile named 'h900'. There are: .*h100-llama8b"):
        launching.of_server(said)
