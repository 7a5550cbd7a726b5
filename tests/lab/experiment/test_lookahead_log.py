"""A comparison in pieces: trials kept in a file give the same figures as those just made."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_lookahead_result import BEFORE, counted, round_of

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.lookahead.log import LookaheadLog, Trial
from sgl_kvtier.lab.experiment.machine import CpuShare
from sgl_kvtier.lab.experiment.measures import arm_figures, sample_rows
from sgl_kvtier.lab.outside.server import Usage

ABOUT = {
    "workload": {"source": "generated:swe-mini", "requests": 3},
    "page_size": 16,
    "extra": ("--x",),
}


def trial(arm: str, number: int) -> Trial:
    one = round_of(
        arm, number, 0.2, counted(1000, 100, 30) if arm == "kvtier" else BEFORE, storage=20
    )
    one.cpu, one.usage, one.disk_bytes = (
        CpuShare(1.0, 0.5, 0.1, 0.0),
        Usage(1, 2, 3, 4.0, 5),
        (6, 7),
    )
    return Trial("3x, pause 0.5 s", arm, number, one, 30.0, ("python", "-m", "x"))


def test_figures_of_a_log_are_those_of_its_trials(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    made = [trial("recompute", 1), trial("kvtier", 1), trial("kvtier", 2)]
    log = LookaheadLog.open(path, ABOUT)
    for one in made:
        log.keep(one)
    read = LookaheadLog.open(path, ABOUT)
    assert [(one.arm, one.number, one.start_s, one.command) for one in read.trials] == [
        (one.arm, one.number, one.start_s, one.command) for one in made
    ]
    for arm in ("recompute", "kvtier"):
        before, after = ([one.one for one in trials] for trials in (made, read.trials))
        assert arm_figures(arm, after, sample_rows(after)) == arm_figures(
            arm, before, sample_rows(before)
        )
    assert read.trials[1].one.occupancy == made[1].one.occupancy
    assert read.find("3x, pause 0.5 s", "kvtier", 2) is not None
    assert (
        read.find("3x, pause 0.5 s", "kvtier", 3) is None
        and read.find("5x, pause 0.5 s", "kvtier", 2) is None
    )


def test_a_torn_last_line_is_dropped_and_another_load_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LookaheadLog.open(path, ABOUT)
    log.keep(trial("kvtier", 1))
    with path.open("a") as file:
        file.write('{"cell": "3x')
    assert len(LookaheadLog.open(path, ABOUT).trials) == 1
    with pytest.raises(BenchError, match="page_size"):
        LookaheadLog.open(path, {**ABOUT, "page_size": 64})
    path.write_text("nothing\n{}\n")
    with pytest.raises(BenchError, match="not a line"):
        LookaheadLog.open(path, ABOUT)
