"""`kvtier compare restore` as a command, with a stand-in where SGLang would be: one prefix at a time,
and several.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import Command, Done, child, environment, result_in

from sgl_kvtier.lab.experiment.restore.arms import DEFAULT_BATCH_ARMS

BASE = ("compare", "restore", "--device", "cpu", "--models", "tiny-qwen3", "--foreign", "99")
GRID = ("--lengths", "512", "--load-over-compute", "1", "--rounds", "1")
BATCH = ("--at-once", "2,3", "--lengths", "256,512", "--rounds", "1")


@pytest.fixture
def restore(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare restore on short prompts, its files in the test's folder."""

    def run(*words: str, task: str = "") -> Done:
        return kvtier(tmp_path, *BASE, *words, task=task)

    return run


def policy_in(folder: Path) -> dict:
    found = json.loads((folder / "work/tiny-qwen3/storage.json").read_text())["policy"]
    assert isinstance(found, dict)
    return found


def test_a_grid_becomes_a_table_a_result_and_a_page(restore: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = restore(*GRID, "--load-over-compute", "1/2,1", "--html", str(page))
    assert done.status == 0, done.err
    found = [(cell["length"], cell["load_over_compute"]) for cell in done.result["cells"]]
    assert found == [(512, 0.5), (512, 1.0)]
    arms = {"compute", "load", "stock_timeout", "kvtier"}
    assert set(done.result["cells"][0]["ttft_ms"]) == arms
    assert "Time to first token of a stored prompt" in done.out
    assert page.read_text().startswith("<!DOCTYPE html>")
    command = done.result["settings"]["server_commands"]["tiny-qwen3"]
    assert "***" in command, "the admin key is not published"


def test_batches_become_a_table_a_result_and_a_page(restore: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = restore(*BATCH, "--html", str(page))
    assert done.status == 0, done.err
    assert done.result["schema"] == "kvtier.restore.batches/1"
    assert [cell["at_once"] for cell in done.result["cells"]] == [2, 3]
    for cell in done.result["cells"]:
        assert tuple(cell["arms"]) == DEFAULT_BATCH_ARMS
        for arm in cell["arms"].values():
            assert arm["ttft_ms"]["n"] == cell["at_once"]
            assert arm["equal_tokens_fraction"] == arm["beside_equal_fraction"] == 1.0
            assert arm["token_gap_ms"]["max"] >= arm["token_gap_ms"]["p99"] > 0
    assert "Several restorations at once" in done.out
    assert page.read_text().startswith("<!DOCTYPE html>")
    # The server has rules that take turns, and room for all at once.
    assert policy_in(tmp_path)["rules"] == "sgl_kvtier.lab.rules:InTurn"
    command = done.result["settings"]["server_commands"]["tiny-qwen3"]
    option = dict(itertools.pairwise(command))
    assert int(option["--max-total-tokens"]) > 3 * 512 + 4 * 4096
    assert int(option["--max-running-requests"]) >= 3 + 4
    assert "--incremental-streaming-output" in command


@pytest.mark.parametrize("words", [GRID, (*BATCH, "--arms", "compute,kvtier")])
def test_an_answer_that_differs_ends_with_status_1(restore: Command, words: tuple) -> None:
    done = restore(*words, task="kvtier:wrong")
    assert done.status == 1
    assert done.result["summary"]["equal_tokens"] is False


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(
    restore: Command, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    process = subprocess.Popen(
        child(tmp_path, *BASE, *GRID, "--rounds", "200", "--log", str(log)),
        env={**os.environ, **environment(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        if log.exists() and '"grid"' in log.read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    first = result_in(tmp_path)
    assert first["interrupted"]
    assert len(first["cells"]) == 1
    done = restore(*GRID, "--rounds", "2", "--log", str(log))
    assert done.status == 0, done.err
    before = first["cells"][0]["rounds"].get("kvtier", 0)
    assert done.result["cells"][0]["rounds"]["kvtier"] >= max(before, 2)
    assert any("were in the log" in note for note in done.result["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lengths many", "must be lengths of at least 256 tokens"),
        ("--lengths 1000", "whole pages"),
        ("--load-over-compute 1/0", "must be ratios above 0"),
        ("--arms kvtier", "must be among them"),
        ("--arms compute,load,magic", "no configuration named magic"),
        ("--hole first --at-once 2", "--at-once: not with --hole"),
        ("--at-once 2,2", "each once, as 2,4,8"),
        ("--at-once 0", "must be"),
        (
            "--at-once 2 --arms kvtier,load_kvtier",
            "no configuration named load_kvtier. There are: stock",
        ),
        ("--device paced:h100-llama8b --page-size 16", "--page-size 16: paced:h100-llama8b has 64"),
        ("--device paced:h100-llama8b", "--models: paced:h100-llama8b brings a model of its own"),
    ],
)
def test_a_mistake_is_told_before_any_server_starts(
    restore: Command, tmp_path: Path, words: str, message: str
) -> None:
    done = restore(*words.split())
    assert done.status in (1, 2)
    assert message in done.err
    assert not (tmp_path / "work").exists()
