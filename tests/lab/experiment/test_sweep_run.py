"""Whole comparisons at rising load through the command line, with fakes for servers: one comparison for each load, on
the same servers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Done
from fake_arms import ThreadServer

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import rounds
from sgl_kvtier.lab.experiment.scenarios import compare as scenario

SMALL = [
    *("compare", "--device", "cpu", "--model", "tiny-qwen3"),
    *("--trace", "generated:swe-mini", "--turns", "2", "--divisor", "16", "--gap-scale", "0"),
    *("--servers", "together", "--arms", "hicache-file,kvtier", "--rounds", "1"),
]


@pytest.fixture
def sweep(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare on a small load, its files in the test's folder."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, *SMALL, *extra, task=task)

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, kvtier: Command) -> list[str]:
    """The arms whose servers were started, in order."""
    arms: list[str] = []

    class Counted(ThreadServer):
        def start(self) -> None:
            arms.append(self.name)
            super().start()

    monkeypatch.setattr(rounds, "Server", Counted)
    return arms


LOADS = ("--concurrency", "1,3", "--sessions", "3")


def test_every_load_is_one_comparison_of_the_same_arms_on_the_same_servers(
    sweep: Command, started: list[str]
) -> None:
    done = sweep(*LOADS)
    assert done.status == 0, done.err
    assert started == ["hicache-file", "kvtier"]
    result = done.result
    assert result["schema"] == "kvtier.sweep/1"
    assert result["settings"]["concurrency"] == [1, 3]
    assert [cell["concurrency"] for cell in result["cells"]] == [1, 3]
    for cell in result["cells"]:
        assert list(cell["arms"]) == ["hicache-file", "kvtier"]
        assert [arm["requests"] for arm in cell["arms"].values()] == [6, 6]
        assert cell["ratios"]["kvtier/hicache-file"]["ttft_ms"]["n"] == 1
        first = next(s for s in result["samples"] if s["concurrency"] == cell["concurrency"])
        assert first["arm"] == ("hicache-file" if cell["concurrency"] == 1 else "kvtier")
    assert [arm["requests"] for arm in result["arms"].values()] == [12, 12]
    assert not [note for note in result["notes"] if "not cold" in note]
    assert "Throughput and time to first token" in done.out


def test_goodput_counts_the_requests_whose_first_token_came_in_time(
    sweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "BOUND_MS", 60_000.0)
    result = sweep("--concurrency", "1,2", "--sessions", "2").result
    cell = result["cells"][0]
    for arm in cell["arms"].values():
        wall_s = sum(one["wall_s"] for one in arm["rounds"])
        assert arm["goodput_requests_per_s"] == pytest.approx(arm["requests"] / wall_s)
    monkeypatch.setattr(scenario, "BOUND_MS", 0.001)
    late = sweep("--concurrency", "1,2", "--sessions", "2").result
    assert [a["goodput_requests_per_s"] for a in late["cells"][0]["arms"].values()] == [0.0, 0.0]


def test_the_largest_load_within_a_bound_of_the_ttft_is_named(
    sweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "SUSTAINED_MS", (0.001, 60_000.0))
    done = sweep("--concurrency", "1,2", "--sessions", "2")
    for arm in done.result["arms"].values():
        assert [one["load"] for one in arm["sustained"]] == [None, 2]
    assert "Sessions sustained" in done.out
    assert "TTFT p95 within 60000 ms" in done.out


def test_a_load_is_sustained_only_where_a_round_of_it_was_completed(
    sweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = rounds.Replaying.measure

    async def torn(self: rounds.Replaying, *args: Any) -> None:
        await measure(self, *args)
        if self.options.concurrency == 2:
            raise BenchError("the server ended")

    monkeypatch.setattr(rounds.Replaying, "measure", torn)
    monkeypatch.setattr(scenario, "SUSTAINED_MS", (60_000.0,))
    result = sweep("--concurrency", "1,2", "--sessions", "2").result
    assert {row["concurrency"] for row in result["samples"] if not row["error"]} == {1, 2}
    for arm in result["arms"].values():
        assert [one["load"] for one in arm["sustained"]] == [1]


def test_as_many_sessions_are_replayed_as_are_at_a_time(sweep: Command) -> None:
    assert sweep("--quick", "--concurrency", "5,7").result["workload"]["sessions"] == 7
    refused = sweep("--concurrency", "1,4", "--sessions", "3")
    assert refused.status == 1
    assert "--sessions 3: --concurrency 4 needs at least 4 sessions" in refused.err


def test_an_arm_that_died_at_one_load_is_started_anew_at_the_next(
    sweep: Command, started: list[str]
) -> None:
    done = sweep(*LOADS, task="kvtier:die")
    assert done.status == 1
    assert started == ["hicache-file", "kvtier", "kvtier"]
    assert [cell["arms"]["hicache-file"]["errors"] for cell in done.result["cells"]] == [0, 0]
    assert any(note.startswith("concurrency 1: kvtier failed") for note in done.result["notes"])


def test_a_sweep_goes_on_from_its_log_with_a_place_for_each_cell(
    sweep: Command, started: list[str], tmp_path: Path
) -> None:
    log = ("--log", str(tmp_path / "log.jsonl"), "--sessions", "3")
    first = sweep("--concurrency", "2,3", *log).result
    again = sweep("--concurrency", "2,3", *log)
    assert started == ["hicache-file", "kvtier"], "nothing is left to measure the second time"
    assert again.result["cells"] == first["cells"]
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert {json.loads(line)["round"]["place"] for line in lines[1:]} == {
        "concurrency 2",
        "concurrency 3",
    }


@pytest.mark.parametrize("words", [("--concurrency", "0,1"), ("--rate", "0"), ("--rate", "1,1")])
def test_a_load_that_is_none_is_refused(sweep: Command, words: tuple[str, str]) -> None:
    done = sweep(*words)
    assert done.status == 2
    assert "must be" in done.err
