"""`kvtier compare restore` as a command, with a stand-in where SGLang would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import Command, Done, child, environment, result_in

SMALL = [
    "compare",
    "restore",
    "--device",
    "cpu",
    "--models",
    "tiny-qwen3",
    "--lengths",
    "512",
    "--foreign",
    "99",
]


@pytest.fixture
def restore(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare restore on one short prompt, its files in the test's folder."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, *SMALL, "--log", str(tmp_path / "log.jsonl"), *extra, task=task)

    return run


def test_a_grid_becomes_a_table_a_result_and_a_page(restore: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    decisions = tmp_path / "decisions.jsonl"
    options = ("--rounds", "1", "--load-over-compute", "1/2,1")
    written = ("--html", str(page), "--decision-log", str(decisions))
    done = restore(*options, *written)
    result = done.result
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "work/tiny-qwen3/storage.json").read_text())["policy"][
        "decision_log"
    ] == str(decisions)
    assert [(cell["length"], cell["load_over_compute"]) for cell in result["cells"]] == [
        (512, 0.5),
        (512, 1.0),
    ]
    assert set(result["cells"][0]["ttft_ms"]) == {"compute", "load", "stock_timeout", "kvtier"}
    assert "Time to first token of a stored prompt" in done.out
    assert page.read_text().startswith("<!DOCTYPE html>")
    key = result["settings"]["server_commands"]["tiny-qwen3"]
    assert "***" in key, "the admin key is not published"


def test_an_answer_that_differs_ends_with_status_1(restore: Command) -> None:
    done = restore("--load-over-compute", "1", "--rounds", "1", task="kvtier:wrong")
    assert done.status == 1
    assert done.result["summary"]["equal_tokens"] is False


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(
    restore: Command, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    extra = ["--load-over-compute", "1", "--rounds", "200", "--log", str(log)]
    process = subprocess.Popen(
        child(tmp_path, *SMALL, *extra),
        env={**os.environ, **environment(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while (
        not (log.exists() and '"grid"' in log.read_text())
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    first = result_in(tmp_path)
    assert first["interrupted"]
    assert len(first["cells"]) == 1
    done = restore("--load-over-compute", "1", "--rounds", "2")
    second = done.result
    assert done.status == 0, done.err
    assert second["cells"][0]["rounds"]["kvtier"] >= max(
        first["cells"][0]["rounds"].get("kvtier", 0), 2
    )
    assert any("were in the log" in note for note in second["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "many"], "must be lengths of at least 256 tokens"),
        (["--load-over-compute", "1/0"], "must be ratios above 0"),
        (["--lengths", "1000"], "whole pages"),
        (["--arms", "kvtier"], "must be among them"),
        (["--hole", "first", "--at-once", "2"], "--at-once: not with --hole"),
    ],
)
def test_a_mistake_is_told_before_any_server_starts(
    restore: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = restore(*arguments)
    assert done.status in (1, 2)
    assert message in done.err
    assert not (tmp_path / "work").exists()
