"""Whole comparisons through the command line, with a stand-in where SGLang would be: processes,
rounds, failures, files.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SITE = Path(__file__).parents[1] / "fake_site"
SMALL = [
    "--device",
    "cpu",
    "--lab-model",
    "tiny-qwen3",
    "--trace",
    "generated:swe-mini",
    "--sessions",
    "2",
    "--turns",
    "2",
]
SMALL += ["--divisor", "16", "--gap-scale", "0", "--servers", "together"]


def environment(tmp_path: Path, task: str = "") -> dict[str, str]:
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "FAKE_SGLANG": task,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def command(tmp_path: Path, *extra: str) -> list[str]:
    # A shell's background job ignores SIGINT and so would this child: Ctrl-C is put back to what it
    # is at a terminal.
    ctrl_c = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{ctrl_c}; import sys; from sgl_kvtier.cli import main; sys.exit(main())"
    folder = ["--folder", str(tmp_path / "work"), "--json", str(tmp_path / "out.json")]
    return [sys.executable, "-c", start, "compare", *SMALL, *folder, *extra]


def compare(
    tmp_path: Path, *extra: str, task: str = ""
) -> tuple[subprocess.CompletedProcess[str], dict]:
    done = subprocess.run(
        command(tmp_path, *extra),
        env=environment(tmp_path, task),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    path = tmp_path / "out.json"
    return done, json.loads(path.read_text()) if path.exists() else {}


def servers_left(tmp_path: Path) -> list[str]:
    left = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "sglang.launch_server" in line and str(tmp_path) in line:
            left.append(line)
    return left


def test_every_arm_replays_every_request_in_every_round(tmp_path: Path) -> None:
    done, result = compare(tmp_path, "--rounds", "2", "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert result["schema"] == "kvtier.compare/1"
    assert list(result["arms"]) == ["recompute", "hicache", "hicache-file", "kvtier"]
    for arm in result["arms"].values():
        assert (arm["requests"], arm["errors"]) == (2 * 2 * 2, 0)
        assert arm["equal_tokens_fraction"] == 1.0
        assert [one["complete"] for one in arm["rounds"]] == [True, True]
    assert result["arms"]["kvtier"]["cached_tokens"]["storage"] > 0
    assert result["arms"]["hicache"]["cached_tokens"]["storage"] == 0
    assert result["arms"]["kvtier"]["bytes"]["written"] > 0
    assert not [
        note for note in result["notes"] if "not cold" in note or "did not come back" in note
    ]
    assert "Time to first token" in done.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert servers_left(tmp_path) == []


def test_the_order_of_arms_moves_on_from_round_to_round(tmp_path: Path) -> None:
    _, result = compare(tmp_path, "--rounds", "2", "--arms", "recompute,hicache,kvtier")
    order: list[tuple[int, str]] = []
    for sample in result["samples"]:
        if (sample["round"], sample["arm"]) not in order:
            order.append((sample["round"], sample["arm"]))
    assert order == [
        (1, "recompute"),
        (1, "hicache"),
        (1, "kvtier"),
        (2, "hicache"),
        (2, "kvtier"),
        (2, "recompute"),
    ]


def test_every_request_of_every_arm_is_in_the_log_of_requests(tmp_path: Path) -> None:
    _, result = compare(tmp_path, "--rounds", "1", "--arms", "recompute,kvtier")
    lines = [
        json.loads(line) for line in (tmp_path / "work" / "requests.jsonl").read_text().splitlines()
    ]
    assert len(lines) == len(result["samples"]) == 2 * 4
    assert {line["arm"] for line in lines} == {"recompute", "kvtier"}


def test_other_tokens_than_recomputes_are_noticed(tmp_path: Path) -> None:
    done, result = compare(
        tmp_path, "--rounds", "1", "--arms", "recompute,kvtier", task="kvtier:wrong"
    )
    assert result["arms"]["kvtier"]["equal_tokens_fraction"] == 0.0
    assert done.returncode == 0


def test_an_arm_that_does_not_start_is_shown_and_the_others_go_on(tmp_path: Path) -> None:
    done, result = compare(
        tmp_path, "--rounds", "1", "--arms", "recompute,hicache,kvtier", task="hicache:refuse"
    )
    assert done.returncode == 1
    assert "no memory left for you" in done.stderr
    assert "Going on without hicache" in done.stderr
    assert "ended with status 3" in result["arms"]["hicache"]["failure"]
    assert result["arms"]["hicache"]["requests"] == 0
    assert result["arms"]["kvtier"]["requests"] == 4
    assert servers_left(tmp_path) == []


def test_an_arm_that_dies_in_a_round_keeps_what_it_measured(tmp_path: Path) -> None:
    done, result = compare(
        tmp_path, "--rounds", "2", "--arms", "recompute,kvtier", task="kvtier:die"
    )
    assert done.returncode == 1
    assert "the end is near" in done.stderr
    assert "in round 1" in result["arms"]["kvtier"]["failure"]
    assert {sample["round"] for sample in result["samples"] if sample["arm"] == "kvtier"} == {1}
    assert [one["complete"] for one in result["arms"]["kvtier"]["rounds"]] == [False]
    assert result["ratios"]["kvtier/recompute"]["ttft_ms"]["n"] == 0
    assert "Not complete, and so in no ratio: round 1 of kvtier." in result["notes"]
    assert result["arms"]["kvtier"]["errors"] > 0
    assert result["arms"]["recompute"]["requests"] == 8


def test_when_every_arm_fails_the_command_says_so(tmp_path: Path) -> None:
    done, _ = compare(tmp_path, "--arms", "recompute", task="recompute:refuse")
    assert done.returncode == 1
    assert "no arm could be measured" in done.stderr
    assert "no memory left for you" in done.stderr


def test_fresh_servers_per_round_measure_the_same_requests(tmp_path: Path) -> None:
    done, result = compare(
        tmp_path, "--servers", "fresh", "--rounds", "2", "--arms", "recompute,kvtier"
    )
    assert done.returncode == 0, done.stderr
    assert all(arm["requests"] == 8 for arm in result["arms"].values())
    assert not [note for note in result["notes"] if "not cold" in note]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_comparison_leaves_no_server_and_writes_what_it_has(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "work" / "requests.jsonl"
    extra = [
        "--gap-scale",
        "1000",
        "--gap-cap",
        "3600",
        "--rounds",
        "1",
        "--arms",
        "recompute,kvtier",
    ]
    process = subprocess.Popen(
        command(tmp_path, *extra),
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while (
        not (log.exists() and log.read_text())
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["interrupted"]
    assert result["arms"]["recompute"]["requests"] >= 1
    assert servers_left(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "recompute,lmcache"], "no arm named lmcache"),
        (["--trace", "no_such_trace"], "no trace 'no_such_trace'"),
        (["--device-tokens", "16"], "less than the longest request needs"),
        (["--json", "/proc/nowhere/out.json"], "/proc/nowhere/out.json"),
        (["--rounds", "0"], "must be a whole number of at least 1"),
    ],
)
def test_a_mistake_is_told_before_any_server_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done, _ = compare(tmp_path, *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert not (tmp_path / "work" / "recompute").exists()


def test_a_comparison_on_a_paced_device_is_marked_as_such_everywhere(tmp_path: Path) -> None:
    paced = ["--device", "paced:h100-llama8b", "--dilation", "2", "--rounds", "1"]
    done, result = compare(tmp_path, *paced, "--html", str(tmp_path / "out.html"))
    assert done.returncode == 0, done.stderr
    device = result["device"]["paced"]
    assert (device["profile"], device["dilation"], device["bytes_scale"]) == (
        "h100-llama8b",
        2.0,
        512.0,
    )
    assert "aiconfigurator" in device["source"]["database"]
    assert list(result["arms"]) == ["hicache-file", "kvtier"]
    assert result["arms"]["kvtier"]["ttft_later_ms"]["n"] == 2
    assert result["settings"]["page_size"] == 64
    assert result["settings"]["chunk_tokens"] == 8192
    titles = [line for line in done.stdout.splitlines() if "not computed" in line]
    assert len(titles) >= 5
    assert "paced h100-llama8b, not computed" in (tmp_path / "out.html").read_text()


def test_another_model_on_a_paced_device_is_refused(tmp_path: Path) -> None:
    done, _ = compare(tmp_path, "--device", "paced:h100-llama8b", "--model-path", "/some/model")
    assert done.returncode == 1
    assert "brings a model of its own" in done.stderr
