"""Whole comparisons of two servers on one remote store through the command line, with stand-ins for
SGLang and Mooncake.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command, Done
from fake_engine import FakeCluster, FakeEngine

WORDS = ("--lab-model", "tiny-qwen3", "--tokens", "256", "--sessions", "2", "--rounds", "2")


@pytest.fixture
def moved(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare remote on a small load, its files in the test's folder."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, "compare", "remote", *WORDS, *extra, task=task)

    return run


def test_every_arm_has_every_speed_and_round(moved: Command, tmp_path: Path) -> None:
    done = moved("--html", str(tmp_path / "page.html"))
    assert done.status == 0, done.err
    result = done.result
    assert result["schema"] == "kvtier.compare.remote/1"
    assert [cell["load_over_compute"] for cell in result["cells"]] == [None, 0.25, 1, 4]
    arms = ["recompute", "kvtier-local", "hicache-mooncake", "kvtier-remote"]
    arms += ["kvtier-remote-load", "oracle"]
    for cell in result["cells"]:
        assert list(cell["arms"]) == arms
        for arm in cell["arms"].values():
            assert arm["ttft_ms"]["n"] == 2 * 2
            assert (arm["errors"], arm["equal_tokens_fraction"]) == (0, 1.0)
    assert FakeEngine.live == FakeCluster.live == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_moved_turns_are_asked_for_at_the_cells_speed_and_written_at_full(moved: Command) -> None:
    FakeCluster.speeds.clear()
    done = moved("--arms", "kvtier-remote", "--gbps", "3", "--rounds", "1")
    assert done.status == 0, done.err
    assert FakeCluster.speeds == [0.0, 0.0, 3.0, 0.0]


def test_a_session_goes_on_at_the_other_server_but_for_the_oracles(moved: Command) -> None:
    done = moved("--arms", "kvtier-local,oracle", "--gbps", "0", "--rounds", "1")
    found = {
        arm: [
            (turn["server"], turn["moved"])
            for turn in done.result["turns"]
            if (turn["arm"], turn["session"]) == (arm, 1)
        ]
        for arm in ("kvtier-local", "oracle")
    }
    assert found == {"kvtier-local": [(0, False), (1, True)], "oracle": [(1, False), (1, True)]}


def test_derived_speeds_need_the_time_that_computing_takes(moved: Command) -> None:
    done = moved("--arms", "kvtier-remote", "--load-over-compute", "1")
    assert done.status == 1
    assert "measure recompute first" in done.err


def test_a_run_goes_on_from_its_log(moved: Command, tmp_path: Path) -> None:
    log = ("--log", str(tmp_path / "turns"))
    first = moved("--arms", "recompute", "--load-over-compute", "1", *log)
    second = moved("--arms", "recompute,kvtier-remote", "--load-over-compute", "1", *log)
    assert second.status == 0, second.err
    assert second.result["scale"] == first.result["scale"]
    kept = [one for one in second.result["turns"] if one["arm"] == "recompute"]
    assert kept == first.result["turns"]


def test_an_arm_whose_server_dies_is_left_out_and_the_others_go_on(moved: Command) -> None:
    done = moved("--arms", "recompute,kvtier-local", "--gbps", "0", task="kvtier:refuse")
    assert done.status == 1
    assert "kvtier-local failed" in " ".join(done.result["notes"])
    assert done.result["cells"][0]["arms"]["recompute"]["ttft_ms"]["n"] == 4


def test_an_answer_that_differs_fails_the_comparison(moved: Command) -> None:
    done = moved("--arms", "recompute,kvtier-local", "--gbps", "0", task="kvtier:wrong")
    assert done.status == 1
    assert done.result["cells"][0]["arms"]["kvtier-local"]["equal_tokens_fraction"] == 0


def test_a_comparison_with_mooncake_starts_and_ends_its_engine(
    kvtier: Command, tmp_path: Path
) -> None:
    load = ("--trace", "generated:swe-mini", "--sessions", "1", "--turns", "2", "--divisor", "16")
    arms = ("--arms", "recompute,hicache-mooncake", "--rounds", "1", "--gap-scale", "0")
    computed = ("--device", "cpu", "--lab-model", "tiny-qwen3")
    done = kvtier(tmp_path, "compare", *computed, *load, *arms)
    assert done.status == 0, done.err
    assert done.result["arms"]["hicache-mooncake"]["requests"] == 2
    assert FakeEngine.live == 0
