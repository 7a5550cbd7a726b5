"""`kvtier compare --harness` with programs that stand for aiperf and SGLang's client and with the
clients themselves, and fakes for servers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import Command, Done

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import harness, measures
from sgl_kvtier.lab.experiment.scenarios import compare as scenario
from sgl_kvtier.lab.experiment.sglang_client import SGLangReplaying, arrivals
from sgl_kvtier.lab.outside.replay import ReplayOptions

REAL = harness.aiperf_program()
FAKE = Path(__file__).parents[1] / "fake_clients.py"
LOAD = (
    "compare --device cpu --model tiny-qwen3 --trace generated:swe-mini --sessions 2 --divisor 16 "
    "--servers together --arms hicache-file,kvtier --rounds 1"
)
SMALL = {
    "aiperf": [*LOAD.split(), "--harness", "aiperf", "--turns", "2", "--gap-scale", "0"],
    "sglang": [*LOAD.split(), "--harness", "sglang", "--turns", "3", "--max-output-tokens", "4"],
}


@pytest.fixture
def compared(kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """kvtier compare on a small load by a fake of the client that is named first."""
    program = tmp_path / "aiperf"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" aiperf "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(scenario, "aiperf_command", lambda: program)
    monkeypatch.setattr(SGLangReplaying, "program", (sys.executable, str(FAKE), "sglang"))

    def run(client: str, *extra: str, task: str = "") -> Done:
        monkeypatch.setenv("FAKE_CLIENT", task)
        return kvtier(tmp_path, *SMALL[client], *extra)

    return run


@pytest.mark.parametrize("client", SMALL)
def test_a_client_that_fails_is_named_with_its_last_words(compared: Command, client: str) -> None:
    done = compared(client, task="fail")
    assert done.status == 1
    assert f"{client} ended with status 3: no server is there" in done.err


@pytest.mark.parametrize(
    ("client", "words", "said"),
    [
        ("aiperf", "--feedback server", "--harness aiperf has no --feedback server"),
        ("sglang", "--pause 2", "has no pauses"),
        ("sglang", "--gap-cap 1", "has no pauses"),
        ("sglang", "--ablation", "has no --ablation"),
        ("sglang", "--max-output-tokens recorded", "--max-output-tokens N"),
    ],
)
def test_what_a_client_cannot_do_is_refused(
    compared: Command, client: str, words: str, said: str
) -> None:
    done = compared(client, *words.split())
    assert done.status == 1
    assert said in done.err


# aiperf


def asked(folder: Path, arm: str) -> list[dict]:
    path = folder / "work" / "aiperf" / "aiperf" / f"{arm}-1" / "sessions.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nothing_is_installed_for_a_comparison_that_cannot_be(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed() -> Path:
        raise AssertionError("1.2 GB")

    monkeypatch.setattr(scenario, "aiperf_command", installed)
    done = kvtier(tmp_path, *SMALL["aiperf"], "--arms", "none")
    assert done.status == 1 and "no configuration named none" in done.err


def test_a_result_on_standard_output_has_no_folder_of_the_clients_files(
    compared: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = compared("aiperf", "--json", "-")
    assert done.status == 0, done.err
    assert json.loads(done.out)["harness"]["name"] == "aiperf"
    assert not list(tmp_path.glob("*-aiperf"))


def test_the_figures_are_aiperfs_and_our_client_stands_beside_them(
    compared: Command, tmp_path: Path
) -> None:
    done = compared("aiperf")
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
    result = compared("aiperf").result
    sizes = [len(row["payload"]["prompt"]) for row in asked(tmp_path, "kvtier")]
    assert sum(sizes) == result["workload"]["prompt_tokens"]
    assert sum(sizes) == result["arms"]["kvtier"]["prompt_tokens"]
    # both clients got the same answers: all of them are those of the same prompts
    texts = {row["output_text"] for row in result["samples"] if row["arm"] == "kvtier"}
    log = tmp_path / "work" / "requests.jsonl"
    own = [json.loads(line) for line in log.read_text().splitlines()]
    assert texts == {row["output_text"] for row in own if row["arm"] == "kvtier"}


def test_sessions_begin_at_the_times_at_which_ours_do(compared: Command, tmp_path: Path) -> None:
    assert compared("aiperf", "--rate", "20", "--seed", "3").status == 0
    begins = [row["timestamp"] for row in asked(tmp_path, "kvtier") if "timestamp" in row]
    assert begins == pytest.approx([1000 * at_s for at_s in harness.arrivals(2, 20, 3)])


def test_a_request_that_aiperf_has_no_record_of_has_failed(compared: Command) -> None:
    result = compared("aiperf", task="forget").result
    arm = result["arms"]["kvtier"]
    assert (arm["requests"], arm["errors"]) == (4, 1)
    assert arm["error_messages"] == ["aiperf 0.13.0 has no record of this request"]


@pytest.mark.server
@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not installed")
def test_aiperf_itself_sends_the_load_and_its_records_are_read(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "aiperf_command", lambda: REAL)
    done = kvtier(tmp_path, *SMALL["aiperf"], "--max-output-tokens", "4")
    assert done.status == 0, done.err
    for arm in done.result["arms"].values():
        assert (arm["requests"], arm["errors"]) == (4, 0)
        assert arm["prompt_tokens"] == done.result["workload"]["prompt_tokens"]
        assert arm["output_tokens"] == done.result["workload"]["output_tokens"]
        assert arm["ttft_ms"]["p50"] > 0


def test_several_loads_are_sent_by_aiperf_alone(compared: Command) -> None:
    result = compared("aiperf", "--concurrency", "1,2").result
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


# SGLang's client


def sent(folder: Path) -> list[list[dict]]:
    path = folder / "work" / "sglang" / "sglang" / "kvtier-1" / "sessions.json"
    return json.loads(path.read_text())["conversations"]


def test_the_figures_are_those_of_sglangs_client_and_ours_stand_beside_them(
    compared: Command, tmp_path: Path
) -> None:
    done = compared("sglang")
    assert done.status == 0, done.err
    result = done.result
    assert result["harness"]["name"] == "sglang"
    kept = json.loads(
        (tmp_path / "out-sglang" / "sglang" / "kvtier-1" / "result.jsonl").read_text()
    )
    mine = sorted(row["ttft_ms"] for row in result["samples"] if row["arm"] == "kvtier")
    assert mine == pytest.approx(sorted(1000 * one for one in kept["ttfts"]))
    assert result["arms"]["kvtier"]["prompt_tokens"] == sum(kept["input_lens"])
    assert result["arms"]["kvtier"]["output_tokens"] == sum(kept["output_lens"]) == 6 * 4
    for row in result["harness"]["agreement"]:
        assert row["ratio"] == pytest.approx(row["harness"] / row["own"])
    assert "by another client and by our own" in done.out


def test_our_client_sends_the_same_chats_with_the_servers_answers_in_them(
    compared: Command, tmp_path: Path
) -> None:
    result = compared("sglang").result
    # the fake's answers follow from the whole prompt, so equal ones come from equal prompts
    log = (tmp_path / "work" / "requests.jsonl").read_text().splitlines()
    own = [row for row in map(json.loads, log) if row["arm"] == "kvtier"]
    by_turn = {(row["session"], row["turn"]): row["output_text"] for row in own}
    theirs = [row for row in result["samples"] if row["arm"] == "kvtier"]
    assert {(row["session"], row["turn"]): row["output_text"] for row in theirs} == by_turn
    assert len(by_turn) == 6


def test_a_message_is_as_long_as_it_is_in_the_load(compared: Command, tmp_path: Path) -> None:
    rows = compared("sglang").result["workload"]["rows"]
    for row, (first, *_) in zip(rows, sent(tmp_path), strict=True):
        # what the chat template of our models puts around each message
        around = sum(len(one["role"]) + 4 for one in first["messages"])
        letters = sum(len(one["content"]) for one in first["messages"])
        assert row["first_prompt_tokens"] <= letters + around <= row["first_prompt_tokens"] + 12


def test_returning_sessions_begin_with_their_second_prompt(
    compared: Command, tmp_path: Path
) -> None:
    compared("sglang")
    everything = sent(tmp_path)
    done = compared("sglang", "--returning")
    assert done.status == 0, done.err
    samples = [one for one in done.result["samples"] if one["arm"] == "kvtier"]
    assert sorted(one["turn"] for one in samples) == [2, 2, 3, 3]
    for turns, before in zip(sent(tmp_path), everything, strict=True):
        assert len(turns) == len(before) - 1
        messages = turns[0]["messages"]
        first = before[0]["messages"]
        assert messages[: len(first)] == first
        assert messages[len(first)]["role"] == "assistant"
        assert messages[len(first) + 1 :] == before[1]["messages"]


def test_figures_that_are_missing_fail_the_configuration(compared: Command) -> None:
    done = compared("sglang", task="forget")
    assert done.status == 1
    assert "SGLang's client has 5 of 6 requests" in done.err


def test_sessions_arrive_when_sglangs_client_lets_them() -> None:
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(3)
    pauses = [numpy.random.exponential(1 / 20) for _ in range(4)]
    found = arrivals(5, replace(ReplayOptions(), rate=20.0, seed=3))
    assert found == pytest.approx([0.0, *numpy.cumsum(pauses)])


@pytest.mark.server
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglangs_client_itself_sends_the_load_and_its_result_is_read(
    kvtier: Command, tmp_path: Path
) -> None:
    done = kvtier(tmp_path, *SMALL["sglang"])
    assert done.status == 0, done.err
    for arm in done.result["arms"].values():
        assert (arm["requests"], arm["errors"]) == (6, 0)
        assert arm["output_tokens"] == 6 * 4
        assert arm["ttft_ms"]["p50"] > 0
    kept = tmp_path / "out-sglang" / "sglang" / "kvtier-1"
    assert json.loads((kept / "steady.jsonl").read_text())["completed"] > 0
