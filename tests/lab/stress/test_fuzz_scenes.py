"""Scenes of trouble through the command line, with a stand-in where SGLang would be."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command, run_child
from test_fuzz_run import SMALL

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.server.scenes import SCENES, parse_scenes


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
