"""Files of JSON lines: what a kill leaves behind, and what is somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_lookahead_log import ABOUT, trial

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.json_lines import JsonLines
from sgl_kvtier.lab.experiment.lookahead.log import LookaheadLog
from sgl_kvtier.lab.experiment.restore.log import PRIME, RestoreLog
from sgl_kvtier.lab.experiment.restore.trial import Trial
from sgl_kvtier.lab.fuzz.log import FuzzLog


def lines(path: Path) -> list[Any]:
    found: list[Any] = []
    JsonLines(path).read(lambda _, data: found.append(data))
    return found


def restore_log(path: Path) -> list[Trial]:
    log = RestoreLog.open(path, {"seed": 0})
    log.keep(Trial("fake", 512, PRIME, "compute", 0, 0.0))
    return log.trials


def lookahead_log(path: Path) -> list[Any]:
    log = LookaheadLog.open(path, ABOUT)
    log.keep(trial("kvtier", 1))
    return log.trials


def fuzz_log(path: Path) -> list[str]:
    log = FuzzLog.open(path)
    log.find("leak: 16 tokens")
    return log.findings


@pytest.mark.parametrize("run", [restore_log, lookahead_log, fuzz_log])
def test_runs_go_on_behind_a_line_that_was_torn(
    run: Callable[[Path], list[Any]], tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    run(path)
    run(path)
    for count in (3, 4):
        with path.open("a") as file:
            file.write('{"trial": {"mod')
        assert len(run(path)) == count
    assert len(run(path)) == 5


def test_a_torn_end_is_cut_off_only_when_something_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"b"')
    log = JsonLines(path)
    assert lines(path) == [{"a": 1}]
    assert log.read(lambda _, data: None)
    assert path.read_text() == '{"a": 1}\n{"b"'
    log.append({"c": 2})
    log.append({"d": 3})
    assert path.read_text() == '{"a": 1}\n{"c": 2}\n{"d": 3}\n'


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}')
    log = JsonLines(path)
    log.read(lambda _, data: None)
    log.append({"c": 3})
    assert lines(path) == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_what_is_not_known_is_refused_with_its_place_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk")
    with pytest.raises(
        BenchError, match=r"notes\.txt:1: not a line of this bench.*Name another --log"
    ):
        lines(path)
    for damage in ("[" * 200_000, "1" * 5000):
        path.write_text('{"a": 1}\n' + damage + '\n{"c": 3}\n')
        with pytest.raises(BenchError, match=r"notes\.txt:2") as found:
            lines(path)
        assert len(str(found.value)) < 500
    path.write_text('{"a": 1}\nbuy milk\n{"c": 3}\n')
    with pytest.raises(BenchError, match=r"notes\.txt:2"):
        lines(path)


def test_without_a_file_there_is_nothing_and_without_a_path_nothing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    assert not JsonLines(path).read(lambda _, data: None)
    JsonLines(path).append({"a": 1})
    assert lines(path) == [{"a": 1}]
    JsonLines(None).append({"a": 1})
    assert not JsonLines(None).read(lambda _, data: None)
