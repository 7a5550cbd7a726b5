"""How well a device kept pace, from the lines it wrote."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.paced import pace
from sgl_kvtier.lab.paced.pace import PaceLog


def log(path, *steps: dict) -> list[dict]:
    """The lines of steps given as (kind, requests, called, begin, end, returned)."""
    written = PaceLog(path)
    for step in steps:
        written.step(**{"waiting": set(), "kind": "decode", "rids": ["a"], **step})
    return pace.read(path)


FIRST = {"called": 0.0, "begin": 0.0, "end": 1.0, "returned": 0.1}
GAPS = {
    "the request served last goes on": ({"called": 1.25, "begin": 1.25}, 0.25),
    "launched before the last one ended": ({"called": 0.5, "begin": 1.0}, 0.0),
    "a pause between requests": ({"called": 9.0, "begin": 9.0, "rids": ["b"]}, 0.0),
    "waiting for pages": ({"called": 3.0, "begin": 3.0, "waiting": {"a"}}, 0.0),
}


@pytest.mark.parametrize("what", GAPS)
def test_time_is_lost_where_the_request_served_last_goes_on_late(tmp_path, what):
    step, gap_s = GAPS[what]
    end = step["begin"] + 1.0
    first, second = log(tmp_path / "log", FIRST, {"end": end, "returned": end, **step})
    assert (first["gap_s"], second["gap_s"]) == (0.0, gap_s)


def test_a_step_that_waits_for_pages_occupies_the_device_until_they_have_come(tmp_path):
    waits = {"called": 0.0, "begin": 0.0, "end": 3.0, "load_wait_s": 2.0, "returned": 1.5}
    first, second = log(
        tmp_path / "log", waits, {"called": 2.5, "begin": 3.0, "end": 4.0, "returned": 2.6}
    )
    assert (first["seconds"], first["late_s"], first["load_wait_s"]) == (1.0, 0.0, 2.0)
    assert second["gap_s"] == 0.0


def test_checking_longer_than_the_step_is_late(tmp_path):
    lines = log(tmp_path / "log", {**FIRST, "returned": 1.5})
    assert lines[0]["late_s"] == 0.5


def test_a_prefill_step_says_whose_prompts_it_computed_and_when(tmp_path):
    step = {"called": 1.0, "begin": 1.5, "end": 2.5, "returned": 1.1}
    prefill, decode = log(tmp_path / "log", {**step, "kind": "prefill", "rids": ["a", "b"]}, step)
    assert (prefill["rids"], prefill["begin"], prefill["seconds"]) == (["a", "b"], 1.5, 1.0)
    assert "rids" not in decode


def test_overrun_is_what_was_lost_of_all_steps(tmp_path):
    late = {"called": 1.05, "begin": 1.05, "end": 2.05, "returned": 1.1}
    found = pace.figures(log(tmp_path / "log", FIRST, late), dilation=2.0)
    assert found["overrun"] == pytest.approx(0.025)
    assert found["overrun_p99"] == pytest.approx(0.05)
    assert found["busy_s"] == pytest.approx(1.0)
    assert found["valid"] is True


def test_a_run_that_lost_a_tenth_of_its_time_is_not_valid(tmp_path):
    late = {"called": 1.3, "begin": 1.3, "end": 2.3, "returned": 1.4}
    lines = log(tmp_path / "log", FIRST, late)
    assert pace.figures(lines, dilation=1.0)["valid"] is False


def test_a_run_with_a_mismatch_is_not_valid(tmp_path):
    path = tmp_path / "log"
    log(path, FIRST)
    PaceLog(path).mismatch(0.5, "1 of 8 tokens", "a", "storage")
    found = pace.figures(pace.read(path), dilation=1.0)
    assert (found["mismatches"], found["valid"]) == (1, False)


def test_a_torn_last_line_is_left_away(tmp_path):
    path = tmp_path / "log"
    log(path, FIRST)
    with path.open("a") as file:
        file.write('{"step": "dec')
    assert len(pace.read(path)) == 1


def test_the_folder_of_a_log_is_made_for_this_user_alone(tmp_path):
    log(tmp_path / "store" / "log", FIRST)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_the_log_of_a_server_that_was_killed_goes_on_with_a_whole_line(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"step": "dec')
    log(path, FIRST)
    assert [row["step"] for row in pace.read(path)] == ["decode"]


def test_a_bounded_log_keeps_the_newest_lines_in_two_files(tmp_path):
    path = tmp_path / "log"
    for start in (0, 50):  # a server that is started again goes on in the same files
        written = PaceLog(path, most_bytes=1000)
        for at in range(start, start + 50):
            written.mismatch(float(at), "1 of 8 tokens", "a", "storage")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    kept = [row["at"] for row in [*pace.read(tmp_path / "log.1"), *pace.read(path)]]
    assert len(kept) > 10
    assert kept == [float(at) for at in range(100 - len(kept), 100)]


def test_nothing_measured_is_neither_valid_nor_invalid():
    assert pace.figures([], dilation=1.0)["valid"] is None


def test_a_reader_gives_every_line_once_and_waits_for_the_end_of_one(tmp_path):
    path = tmp_path / "log"
    reader = pace.Reader(path)
    assert reader.new() == []
    log(path, FIRST)
    with path.open("a") as file:
        file.write('{"mismatch": "1 of 8')
    assert [row["step"] for row in reader.new()] == ["decode"]
    with path.open("a") as file:
        file.write(' tokens", "at": 2.0}\n')
    assert [row["at"] for row in reader.new()] == [2.0]
    assert reader.new() == []


def test_the_time_of_our_own_tick_is_a_share_of_the_steps_time_without_dilation(tmp_path):
    step = {"called": 0.0, "begin": 0.0, "end": 0.2, "returned": 0.1, "scheduler_s": 0.010}
    rows = log(tmp_path / "log", {**step, "tick_s": 0.001}, {**step, "tick_s": 0.003})
    found = pace.figures(rows, 2.0)
    assert found["tick_ms_per_step"] == pytest.approx(2)
    assert found["tick_ms_p99"] == pytest.approx(3)
    assert found["tick_share"] == pytest.approx(0.004 / 0.2)
    stock = pace.figures([{**row, "tick_s": None} for row in rows], 2.0)
    assert (stock["tick_ms_per_step"], stock["tick_ms_p99"], stock["tick_share"]) == (None,) * 3


def test_copies_and_loads_have_lines_of_their_own_and_are_no_steps(tmp_path):
    path = tmp_path / "log"
    log = pace.PaceLog(path)
    log.copied("to_device", 1.0, 1.5, 64)
    log.loaded("storage-host", "a", 0.5, 1.0)
    assert pace.read(path) == [
        {"copy": "to_device", "at": 1.0, "end": 1.5, "bytes": 64},
        {"load": "storage-host", "at": 0.5, "end": 1.0, "rid": "a"},
    ]
    assert pace.figures(pace.read(path), dilation=1.0) == pace.figures([], dilation=1.0)
