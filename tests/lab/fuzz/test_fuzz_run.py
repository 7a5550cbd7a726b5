"""Whole fuzz runs through the command line, with a stand-in where SGLang would be: what it must
find, and must not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "fake_site"
SMALL = [
    "--device",
    "cpu",
    "--trace",
    "generated:swe-mini",
    "--sessions",
    "3",
    "--turns",
    "3",
    "--divisor",
    "16",
]
SMALL += ["--concurrency", "3", "--deadline", "5"]


def fuzz(
    tmp_path: Path, *extra: str, task: str = ""
) -> tuple[subprocess.CompletedProcess[str], dict]:
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "FAKE_SGLANG": task,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    start = "import sys; from sgl_kvtier.cli import main; sys.exit(main())"
    target = tmp_path / "out.json"
    command = [
        sys.executable,
        "-c",
        start,
        "bench",
        "restore-fuzz",
        *SMALL,
        "--folder",
        str(tmp_path / "work"),
    ]
    done = subprocess.run(
        [*command, "--json", str(target), *extra],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done, json.loads(target.read_text()) if target.exists() else {}


def test_a_sound_server_is_found_sound_whatever_is_done_to_it(tmp_path: Path) -> None:
    done, result = fuzz(tmp_path, "--requests", "60", "--kill-every", "25")
    assert done.returncode == 0, done.stdout + done.stderr
    found = result["counts"]
    assert result["schema"] == "kvtier.restore-fuzz/1"
    assert found["requests"] >= 60
    assert found["events"]["kill"] >= 2
    assert found["aborted"] + found["disconnected"] > 0
    assert found["restored"] > 0
    assert found["completed"] > 0
    assert [found[name] for name in result["must_be_zero"]] == [0] * len(result["must_be_zero"])


def test_answers_are_compared_with_those_of_a_server_that_computes(tmp_path: Path) -> None:
    done, result = fuzz(tmp_path, "--requests", "90", "--chaos", "flush", task="kvtier:wrong")
    assert done.returncode == 1
    assert result["counts"]["unequal_tokens"] > 0
    assert result["counts"]["unequal"][0]["mode"] in ("both", "auto", "load")


@pytest.mark.parametrize(
    ("task", "name"), [("hang", "hangs"), ("fail", "failed"), ("leak", "leaks")]
)
def test_what_a_server_must_not_do_is_counted(tmp_path: Path, task: str, name: str) -> None:
    done, result = fuzz(tmp_path, "--requests", "20", "--chaos", "none", task=f"kvtier:{task}")
    assert done.returncode == 1, done.stderr
    assert result["counts"][name] == 1
    others = [other for other in result["must_be_zero"] if other != name]
    assert [result["counts"][other] for other in others] == [0] * len(others)


def test_a_second_run_adds_to_the_first(tmp_path: Path) -> None:
    log = ["--log", str(tmp_path / "log.jsonl"), "--chaos", "none"]
    _, first = fuzz(tmp_path, "--requests", "10", *log)
    _, second = fuzz(tmp_path, "--requests", "12", "--overlap", "off", "--fault-rank", "1", *log)
    assert second["counts"]["requests"] == first["counts"]["requests"] + 12
    assert "--disable-overlap-schedule" in second["settings"]["extra"]
    assert (
        json.loads((tmp_path / "work" / "fuzzed" / "storage.json").read_text())["lab"]["faults"][
            "rank"
        ]
        == 1
    )


def test_a_run_ends_after_so_many_restored_requests(tmp_path: Path) -> None:
    _, result = fuzz(tmp_path, "--restored", "5", "--chaos", "flush")
    assert result["counts"]["restored"] >= 5


def test_host_memory_in_use_that_holds_no_page_is_a_leak(tmp_path: Path) -> None:
    done, result = fuzz(
        tmp_path, "--requests", "5", "--chaos", "none", "--lookahead", task="kvtier:hoard"
    )
    assert done.returncode == 1, done.stderr
    assert result["findings"] == ["leak: 32 tokens of host memory are in use, and the map has 0"]
