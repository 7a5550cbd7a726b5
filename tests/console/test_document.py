"""JSON results: the envelope, the environment and how files are written."""

from __future__ import annotations

import enum
import json
import os
import stat
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy
import pytest

import sgl_kvtier
from sgl_kvtier.console import check_target, envelope, environment, to_json, write_json, write_text
from sgl_kvtier.console.document import plain
from sgl_kvtier.errors import KVTierError


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclass(frozen=True)
class Point:
    x: float
    where: Path


def test_the_envelope_goes_first_and_the_results_follow() -> None:
    result = envelope("kvtier.compare/1", ["kvtier", "compare"], {"rounds": 3, "notes": []})
    assert list(result) == ["schema", "command", "environment", "rounds", "notes"]
    assert result["schema"] == "kvtier.compare/1"
    assert result["command"] == ["kvtier", "compare"]


def test_results_may_not_overwrite_the_envelope() -> None:
    with pytest.raises(ValueError, match="schema"):
        envelope("kvtier.compare/1", [], {"schema": "another"})


def test_the_environment_says_what_the_result_was_measured_on() -> None:
    found = environment()
    assert set(found) == {
        "date",
        "kvtier",
        "git_commit",
        "planner",
        "python",
        "platform",
        "cpu",
        "memory_bytes",
        "memory_limit_bytes",
        "packages",
        "gpus",
    }
    assert datetime.fromisoformat(found["date"]).utcoffset() == timedelta(0)
    assert found["kvtier"] == sgl_kvtier.__version__
    assert found["packages"]["numpy"] == numpy.__version__
    assert found["planner"] in ("compiled", "source")
    assert found["cpu"]["count"] >= 1
    assert found["memory_bytes"] > 1 << 20
    assert json.loads(to_json(found)) == found


def test_the_environment_survives_a_machine_without_any_tool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    found = environment()
    assert found["gpus"] == []
    assert found["git_commit"] is None


def test_the_environment_names_the_accelerators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["gpus"] == [
        {"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "570.1"}
    ]


def test_what_json_cannot_say_becomes_null_and_the_rest_keeps_its_value() -> None:
    value = {
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf")],
        "numpy": [numpy.float32(1.5), numpy.int64(2), numpy.float64("nan"), numpy.bool_(True)],
        "array": numpy.array([[1, 2]]),
        "tuple": (1, "a"),
        "none": None,
        "path": Path("a/b"),
        "enums": [Colour.RED, Level.LOW],
        "point": Point(0.5, Path("c")),
        Colour.RED: True,
        7: "seven",
    }
    assert json.loads(to_json(value)) == {
        "nan": None,
        "inf": [None, None],
        "numpy": [1.5, 2, None, True],
        "array": [[1, 2]],
        "tuple": [1, "a"],
        "none": None,
        "path": "a/b",
        "enums": ["red", 1],
        "point": {"x": 0.5, "where": "c"},
        "red": True,
        "7": "seven",
    }


def test_a_value_without_a_json_form_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match="object"):
        plain({"a": object()})
    with pytest.raises(TypeError, match="key"):
        plain({None: 1})


def test_a_dash_writes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": 1}, "-")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1}
    assert captured.err == ""


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "result.json"
    write_json({"a": 1}, str(target))
    write_json({"a": 2}, str(target))
    assert json.loads(target.read_text()) == {"a": 2}
    assert os.listdir(target.parent) == ["result.json"]


def test_a_file_gets_the_permissions_the_user_asked_for(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_json({}, str(tmp_path / "result.json"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o640


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    write_text("old", str(target))
    with pytest.raises(UnicodeEncodeError):
        write_text("x" * 100_000 + "\udc80", str(target))
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_link_stays_a_link_and_a_device_stays_a_device(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    write_json({"a": 1}, str(link))
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"a": 1}
    write_json({}, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_target_that_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file" / "result.json"):
        with pytest.raises(KVTierError, match=r"cannot write .*Choose a file"):
            check_target(str(target))
        with pytest.raises(KVTierError, match=r"cannot write .*Choose a file"):
            write_json({}, str(target))
    check_target(str(tmp_path / "deep" / "result.json"))
    check_target("-")
