"""`kvtier compare restore` as a command, with a stand-in where SGLang would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "fake_site"
SMALL = ["--device", "cpu", "--models", "tiny-qwen3", "--lengths", "512", "--foreign", "99"]


def command(
    tmp_path: Path, *extra: str, words: tuple[str, ...] = ("compare", "restore")
) -> list[str]:
    # A shell's background job ignores SIGINT and so would this child: Ctrl-C is put back to what it
    # is at a terminal.
    ctrl_c = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{ctrl_c}; import sys; from sgl_kvtier.cli import main; sys.exit(main())"
    files = [
        "--folder",
        str(tmp_path / "work"),
        "--json",
        str(tmp_path / "out.json"),
        "--log",
        str(tmp_path / "log.jsonl"),
    ]
    return [sys.executable, "-c", start, *words, *SMALL, *files, *extra]


def environment(tmp_path: Path, task: str = "") -> dict[str, str]:
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "FAKE_SGLANG": task,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def restore(
    tmp_path: Path, *extra: str, task: str = ""
) -> tuple[subprocess.CompletedProcess[str], dict]:
    done = subprocess.run(
        command(tmp_path, *extra),
        env=environment(tmp_path, task),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    path = tmp_path / "out.json"
    return done, json.loads(path.read_text()) if path.exists() else {}


def test_a_grid_becomes_a_table_a_result_and_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    decisions = tmp_path / "decisions.jsonl"
    options = [
        "--rounds",
        "2",
        "--fluctuate",
        "1",
        "--html",
        str(page),
        "--decision-log",
        str(decisions),
    ]
    done, result = restore(tmp_path, "--load-over-compute", "1/2,1", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "work/tiny-qwen3/storage.json").read_text())["policy"][
        "decision_log"
    ] == str(decisions)
    assert [(cell["length"], cell["load_over_compute"]) for cell in result["cells"]] == [
        (512, 0.5),
        (512, 1.0),
    ]
    assert set(result["cells"][0]["ttft_ms"]) == {"compute", "load", "stock_timeout", "kvtier"}
    assert len(result["fluctuation"]["cells"]) == 3
    assert "Time to first token of a stored prompt" in done.stdout
    assert page.read_text().startswith("<!DOCTYPE html>")
    key = result["settings"]["server_commands"]["tiny-qwen3"]
    assert "***" in key, "the admin key is not published"


def test_an_answer_that_differs_ends_with_status_1(tmp_path: Path) -> None:
    done, result = restore(
        tmp_path, "--load-over-compute", "1", "--rounds", "1", task="kvtier:wrong"
    )
    assert done.returncode == 1
    assert result["summary"]["equal_tokens"] is False


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    extra = ["--load-over-compute", "1", "--rounds", "200"]
    process = subprocess.Popen(
        command(tmp_path, *extra),
        env=environment(tmp_path),
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
    first = json.loads((tmp_path / "out.json").read_text())
    assert first["interrupted"]
    assert len(first["cells"]) == 1
    done, second = restore(tmp_path, "--load-over-compute", "1", "--rounds", "2")
    assert done.returncode == 0, done.stderr
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
        (["--no-grid"], "add --fluctuate"),
        (["--url", "http://127.0.0.1:1", "--decision-log", "d.jsonl"], "names its own"),
    ],
)
def test_a_mistake_is_told_before_any_server_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done, _ = restore(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert not (tmp_path / "work").exists()
