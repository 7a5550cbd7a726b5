"""`kvtier compare --harness aiperf` with a program that stands for aiperf, and fakes for servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command, Done

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import harness, measures
from sgl_kvtier.lab.experiment.scenarios import compare as scenario

REAL = harness.aiperf_program()
FAKE = Path(__file__).parents[1] / "fake_aiperf.py"
SMALL = [
    *("compare", "--device", "cpu", "--model", "tiny-qwen3", "--harness", "aiperf"),
    *("--trace", "generated:swe-mini", "--turns", "2", "--divisor", "16", "--gap-scale", "0"),
    *("--servers", "together", "--arms", "hicache-file,kvtier", "--rounds", "1"),
    *("--sessions", "2"),
]


@pytest.fixture
def compared(kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """kvtier compare on a small load by a fake of aiperf."""
    program = tmp_path / "aiperf"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(scenario, "aiperf_command", lambda: program)

    def run(*extra: str, task: str = "") -> Done:
        monkeypatch.setenv("FAKE_AIPERF", task)
        return kvtier(tmp_path, *SMALL, *extra)

    return run


def asked(folder: Path, arm: str) -> list[dict]:
    path = folder / "work" / "aiperf" / "aiperf" / f"{arm}-1" / "sessions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nothing_is_installed_for_a_comparison_that_cannot_be(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed() -> Path:
        raise AssertionError("1.2 GB")

    monkeypatch.setattr(scenario, "aiperf_command", installed)
    done = kvtier(tmp_path, *SMALL, "--arms", "none")
    assert done.status == 1 and "no configuration named none" in done.err


def test_a_result_on_standard_output_has_no_folder_of_the_clients_files(
    compared: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = compared("--json", "-")
    assert done.status == 0, done.err
    assert json.loads(done.out)["harness"]["name"] == "aiperf"
    assert not list(tmp_path.glob("*-aiperf"))


def test_the_figures_are_aiperfs_and_our_client_stands_beside_them(
    compared: Command, tmp_path: Path
) -> None:
    done = compared()
    assert done.status == 0, done.err
    result = done.result
    assert result["harness"]["name"] == "aiperf"
    assert [arm["requests"] for arm in result["arms"].values()] == [4, 4]
    kept = tmp_path / "out-aiperf" / "aiperf" / "kvtier-1"
    lines = (kept / "profile_export.jsonl").read_text().splitlines()
    theirs = sorted(json.loads(one)["metrics"]["time_to_first_token"]["value"] for one in lines)
    mine = sorted(row["ttft_ms"] for row in result["samples"] if row["arm"] == "kvtier")
    assert mine == pytest.approx(theirs)
    rows = [row for row in result["harness"]["agreement"] if row["arm"] == "kvtier"]
    assert {row["figure"] for row in rows} == set(harness.AGREED)
    for row in rows:
        assert row["own"] > 0
        assert row["ratio"] == pytest.approx(row["harness"] / row["own"])
    assert "by another client and by our own" in done.out


def test_aiperf_sends_what_our_client_sends(compared: Command, tmp_path: Path) -> None:
    result = compared().result
    sizes = [len(row["payload"]["prompt"]) for row in asked(tmp_path, "kvtier")]
    assert sum(sizes) == result["workload"]["prompt_tokens"]
    assert sum(sizes) == result["arms"]["kvtier"]["prompt_tokens"]
    # both clients got the same answers: all of them are those of the same prompts
    texts = {row["output_text"] for row in result["samples"] if row["arm"] == "kvtier"}
    log = tmp_path / "work" / "requests.jsonl"
    own = [json.loads(line) for line in log.read_text().splitlines()]
    assert texts == {row["output_text"] for row in own if row["arm"] == "kvtier"}


def test_sessions_begin_at_the_times_at_which_ours_do(compared: Command, tmp_path: Path) -> None:
    assert compared("--rate", "20", "--seed", "3").status == 0
    begins = [row["timestamp"] for row in asked(tmp_path, "kvtier") if "timestamp" in row]
    assert begins == pytest.approx([1000 * at_s for at_s in harness.arrivals(2, 20, 3)])


def test_a_request_that_aiperf_has_no_record_of_has_failed(compared: Command) -> None:
    result = compared(task="forget").result
    arm = result["arms"]["kvtier"]
    assert (arm["requests"], arm["errors"]) == (4, 1)
    assert arm["error_messages"] == ["aiperf 0.13.0 has no record of this request"]


def test_an_aiperf_that_fails_is_named_with_its_last_words(compared: Command) -> None:
    done = compared(task="fail")
    assert done.status == 1
    assert "aiperf ended with status 3: no server is there" in done.err


@pytest.mark.server
@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not installed")
def test_aiperf_itself_sends_the_load_and_its_records_are_read(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "aiperf_command", lambda: REAL)
    done = kvtier(tmp_path, *SMALL, "--max-output-tokens", "4")
    assert done.status == 0, done.err
    for arm in done.result["arms"].values():
        assert (arm["requests"], arm["errors"]) == (4, 0)
        assert arm["prompt_tokens"] == done.result["workload"]["prompt_tokens"]
        assert arm["output_tokens"] == done.result["workload"]["output_tokens"]
        assert arm["ttft_ms"]["p50"] > 0


def test_what_aiperf_cannot_do_is_refused(compared: Command) -> None:
    done = compared("--feedback", "server")
    assert done.status == 1
    assert "--harness aiperf has no --feedback server" in done.err


def test_several_loads_are_sent_by_aiperf_alone(compared: Command) -> None:
    result = compared("--concurrency", "1,2").result
    assert [cell["arms"]["kvtier"]["requests"] for cell in result["cells"]] == [4, 4]
    assert "harness" not in result


def test_an_installation_that_fails_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(harness.venv, "create", lambda folder, **_: None)
    monkeypatch.setattr(harness.subprocess, "run", fail)
    with pytest.raises(BenchError, match=r"could not be installed.*pip install aiperf==0\.13\.0"):
        harness.aiperf_command(tmp_path)


def test_an_installed_aiperf_is_used(tmp_path: Path) -> None:
    program = tmp_path / "kvtier" / "harness" / f"aiperf-{harness.AIPERF}" / "bin" / "aiperf"
    program.parent.mkdir(parents=True)
    program.write_text("")
    assert harness.aiperf_command(tmp_path) == program


def row(arm: str, ttft_ms: float | None, error: str | None = None) -> dict:
    return {"arm": arm, "ttft_ms": ttft_ms, "error": error}


def test_a_load_is_sustained_if_it_and_all_smaller_ones_keep_the_bound() -> None:
    loads = [
        (1.0, [row("kvtier", 100.0)] * 20),
        (2.0, [row("kvtier", 900.0)] * 20),
        # 2 of 20 are late: the 95th percentile is
        (3.0, [row("kvtier", 100.0)] * 18 + [row("kvtier", 5000.0)] * 2),
        (4.0, [row("kvtier", 100.0)] * 20),
    ]
    found = measures.sustained(loads, "kvtier", (50.0, 500.0, 1000.0, 9000.0))
    assert [one["load"] for one in found] == [None, 1.0, 2.0, 4.0]


def test_a_load_at_which_a_request_failed_is_not_sustained() -> None:
    loads = [(1.0, [row("kvtier", 1.0)] * 99 + [row("kvtier", None, "lost")])]
    assert measures.sustained(loads, "kvtier", (1000.0,))[0]["load"] is None
