"""Whole fuzz runs and scenes of trouble through the command line, with a stand-in where SGLang would be: what it must
find, and must not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command, Done, run_child

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.server.scenes import SCENES, parse_scenes

LOAD = "--device cpu --trace generated:swe-mini --sessions 3 --turns 3 --divisor 16 --concurrency 3"
SMALL = ["bench", "restore-fuzz", *LOAD.split()]


@pytest.fixture
def fuzz(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier bench restore-fuzz on a small load, its files in the test's folder."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, *SMALL, "--deadline", "2", *extra, task=task)

    return run


def test_a_sound_server_is_found_sound_whatever_is_done_to_it(tmp_path: Path) -> None:
    done = run_child(tmp_path, *SMALL, "--requests", "60", "--kill-every", "25")
    assert done.status == 0, done.out + done.err
    result = done.result
    found = result["counts"]
    assert result["schema"] == "kvtier.restore-fuzz/1"
    assert found["requests"] >= 60
    assert found["events"]["kill"] >= 2
    assert found["aborted"] + found["disconnected"] > 0
    assert found["restored"] > 0
    assert found["completed"] > 0
    assert [found[name] for name in result["must_be_zero"]] == [0] * len(result["must_be_zero"])


def test_answers_are_compared_with_those_of_a_server_that_computes(fuzz: Command) -> None:
    done = fuzz("--requests", "90", "--chaos", "flush", task="kvtier:wrong")
    result = done.result
    assert done.status == 1
    assert result["counts"]["unequal_tokens"] > 0
    assert result["counts"]["unequal"][0]["mode"] in ("both", "auto", "load")


@pytest.mark.parametrize(
    ("task", "name"), [("hang", "hangs"), ("fail", "failed"), ("leak", "leaks")]
)
def test_what_a_server_must_not_do_is_counted(fuzz: Command, task: str, name: str) -> None:
    done = fuzz("--requests", "20", "--chaos", "none", task=f"kvtier:{task}")
    result = done.result
    assert done.status == 1, done.err
    assert result["counts"][name] == 1
    others = [other for other in result["must_be_zero"] if other != name]
    assert [result["counts"][other] for other in others] == [0] * len(others)


def test_a_second_run_adds_to_the_first(fuzz: Command, tmp_path: Path) -> None:
    log = ["--log", str(tmp_path / "log.jsonl"), "--chaos", "none"]
    first = fuzz("--requests", "10", *log).result
    second = fuzz("--requests", "12", "--overlap", "off", "--fault-rank", "1", *log).result
    assert second["counts"]["requests"] == first["counts"]["requests"] + 12
    assert "--disable-overlap-schedule" in second["settings"]["extra"]
    assert (
        json.loads((tmp_path / "work" / "fuzzed" / "storage.json").read_text())["lab"]["faults"][
            "rank"
        ]
        == 1
    )


def test_a_run_that_ended_before_anything_was_compared_is_no_success(fuzz: Command) -> None:
    done = fuzz("--minutes", "0", "--chaos", "none")
    assert done.status == 1
    assert "No answer was compared" in done.out
    assert done.result["counts"]["compared"] == 0


def test_a_run_in_which_kvtier_completed_no_restoration_is_no_success(fuzz: Command) -> None:
    done = fuzz("--requests", "20", "--chaos", "flush", task="kvtier:unmet")
    counts = done.result["counts"]
    assert counts["compared"] > 0
    assert [counts[name] for name in done.result["must_be_zero"]] == [0] * len(
        done.result["must_be_zero"]
    )
    assert done.status == 1
    assert "kvtier completed no restoration" in done.out


def test_a_run_ends_after_so_many_restored_requests(fuzz: Command) -> None:
    result = fuzz("--restored", "5", "--chaos", "flush").result
    assert result["counts"]["restored"] >= 5


def settings(folder: Path) -> dict:
    return json.loads((folder / "work" / "fuzzed" / "storage.json").read_text())


def test_a_floor_is_measured_once_and_every_loaded_page_is_compared(
    fuzz: Command, tmp_path: Path
) -> None:
    log = ("--log", str(tmp_path / "log.jsonl"))
    words = ("--requests", "20", "--chaos", "flush", "--floor", *log)
    result = fuzz(*words).result
    assert result["floor"]["answers"] > 0
    assert result["counts"]["audited_pages"]["equal"] > 0
    assert settings(tmp_path)["lab"]["audit"] is True
    chunks = [path.name for path in (tmp_path / "work").glob("computed*")]
    assert sorted(chunks) == ["computed", "computed-48"]
    done = fuzz(*words, task="kvtier:altered")
    assert done.status == 1 and done.result["floor"] == result["floor"]
    assert done.result["counts"]["mismatches"] == 1


def test_without_one_pages_are_not_read_back_and_with_it_not_where_reads_fail(
    fuzz: Command, tmp_path: Path
) -> None:
    assert fuzz("--requests", "5", "--chaos", "flush").result["floor"] is None
    assert settings(tmp_path)["lab"]["audit"] is False
    fuzz("--requests", "5", "--chaos", "errors", "--floor")
    assert settings(tmp_path)["lab"]["audit"] is False


def test_host_memory_in_use_that_holds_no_page_is_a_leak(fuzz: Command) -> None:
    done = fuzz("--requests", "5", "--chaos", "none", "--lookahead", task="kvtier:hoard")
    result = done.result
    assert done.status == 1, done.err
    assert result["findings"] == ["leak: 32 tokens of host memory are in use, and the map has 0"]


# Scenes.


def test_scenes_are_named_on_the_command_line_and_played_in_their_own_order() -> None:
    assert parse_scenes("all") == tuple(SCENES)
    assert parse_scenes("restarts, storm") == ("storm", "restarts")
    for text in ("fire", "", "storm,fire"):
        with pytest.raises(BenchError, match="There are: all, storm"):
            parse_scenes(text)


@pytest.mark.slow
def test_a_sound_server_is_found_sound_after_every_scene(tmp_path: Path) -> None:
    scenes = ["--scene", "storm,slow-disk,restarts", "--scale", "0.02", "--concurrency", "2"]
    done = run_child(tmp_path, *SMALL, *scenes)
    result = done.result
    assert done.status == 0, done.out + done.err
    assert [one["scene"] for one in result["scenes"]] == ["storm", "slow-disk", "restarts"]
    assert [result["counts"][name] for name in result["must_be_zero"]] == [0] * len(
        result["must_be_zero"]
    )
    storm, slow, restarts = result["scenes"]
    assert storm["given_up"] == storm["requests"] > 0
    assert slow["requests"] > 0
    assert restarts["amount"] == "1 by SIGKILL, 1 by SIGTERM"
    assert all(one["restored_after"] > 0 for one in result["scenes"])


@pytest.mark.parametrize(
    ("task", "scene", "finding"),
    [
        ("forgetful", "slow-disk", "nothing was restored after it"),
        ("", "stop", "there was no scheduler process to stop"),
        pytest.param("", "routes", "was answered 500", marks=pytest.mark.slow),
    ],
)
def test_what_a_scene_finds_fails_the_run(
    kvtier: Command, tmp_path: Path, task: str, scene: str, finding: str
) -> None:
    small = ("--scale", "0.02", "--concurrency", "2")
    done = kvtier(tmp_path, *SMALL, "--scene", scene, *small, task=f"kvtier:{task}")
    result = done.result
    assert done.status == 1, done.err
    assert result["counts"]["scenes"] > 0
    assert any(finding in text for text in result["scenes"][0]["findings"])


def test_scenes_end_by_themselves(kvtier: Command, tmp_path: Path) -> None:
    done = kvtier(tmp_path, *SMALL, "--scene", "storm", "--requests", "10")
    assert done.status == 1
    assert "--scale" in done.err
