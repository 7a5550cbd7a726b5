"""`kvtier compare remote`: what its arms are, and whole comparisons with stand-ins for SGLang and
Mooncake. Its figures are in `tests/lab/test_scenarios.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Done
from fake_engine import FakeCluster, FakeEngine

from sgl_kvtier.config import load_config
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import Setup, prepare
from sgl_kvtier.lab.experiment.remote.run import (
    NEW_TOKENS,
    REMOTE,
    REMOTE_ARMS,
    REMOTE_LOAD,
    Cell,
    Moved,
    MovedLog,
    prompts,
)
from sgl_kvtier.lab.experiment.scenarios import remote as scenario
from sgl_kvtier.lab.pages import kinds

SETUP = Setup("/m", "m", "cpu", 16, 512, device_tokens=8192, storage_bytes=1 << 30)
FULL = Cell(0.0)
WORDS = ("--model", "tiny-qwen3", "--tokens", "256", "--sessions", "2")
ONE = ("--gbps", "0", "--rounds", "1")


@pytest.fixture
def moved(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare remote on a small load, its files in the test's folder."""

    def run(*words: str, task: str = "") -> Done:
        return kvtier(tmp_path, "compare", "remote", *WORDS, *words, task=task)

    return run


def turn(arm: str, ttft_s: float) -> Moved:
    place = {"cell": FULL.name, "session": 1, "number": 1, "server": 1, "moved": True}
    return Moved("lab-mha", 2048, "turn", arm, 1, 0.0, prompt_tokens=2112, ttft_s=ttft_s, **place)  # type: ignore[arg-type]


def test_a_sessions_prompts_go_on_and_no_two_sessions_share_a_page() -> None:
    one, again, other = (prompts((0, cell, 1), 256) for cell in ("a", "a", "b"))
    assert one == again
    assert one[1][:256] == one[0] and len(one[1]) == 256 + NEW_TOKENS
    assert one[0][:16] != other[0][:16]


def test_only_arms_that_share_have_a_remote_store(tmp_path: Path) -> None:
    for name, arm in REMOTE_ARMS.items():
        if arm.kind != "kvtier":
            continue
        prepare("kvtier", arm.setup(SETUP, "10.0.0.1:1"), tmp_path / name)
        config = load_config(tmp_path / name / "storage.json")
        assert config.remote.engine == ("mooncake" if arm.shares else "off")
        assert config.policy.restore == ("load" if name == REMOTE_LOAD else "auto")


def test_stock_has_its_own_backend_over_the_same_master(tmp_path: Path) -> None:
    arm = REMOTE_ARMS["hicache-mooncake"]
    prepare(arm.kind, arm.setup(SETUP, "10.0.0.1:1"), tmp_path)
    settings = json.loads((tmp_path / "storage.json").read_text())
    assert settings["master_server_address"] == "10.0.0.1:1"
    assert settings["global_segment_size"] == 0
    assert "store" not in settings and "remote" not in settings


def test_shared_memory_holds_the_prompts_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usual, long = (
        scenario.Moving(scenario.RemoteOptions(model="lab-mha", tokens=tokens))
        for tokens in (2048, 65536)
    )
    assert usual.segment_bytes() == 1 << 30
    assert long.segment_bytes() > long.token_bytes() * 65536 * (4 + 1)


@pytest.mark.parametrize(
    "other", [{"server_arg": ["--kv-cache-dtype=fp8"]}, {"storage_size": 1 << 30}, {"threads": 2}]
)
def test_turns_of_other_servers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, options = tmp_path / "log", scenario.RemoteOptions(model="lab-mha", tokens=2048)
    MovedLog.open(path, scenario.Moving(options).about())
    with pytest.raises(BenchError, match="Name another --log"):
        MovedLog.open(path, scenario.Moving(replace(options, **other)).about())


def test_a_cell_that_was_begun_and_played_again_counts_once() -> None:
    log = MovedLog()
    for seconds in (0.9, 0.1):
        log.take("turn", turn(REMOTE, seconds))
    assert [one.ttft_s for one in log.turns] == [0.1]


def test_a_page_of_a_run_that_was_stopped_early_has_what_there_is() -> None:
    log = MovedLog()
    log.take("turn", turn("recompute", 0.1))
    cells = [(FULL, 0.0), (Cell(None, 1.0), 2.0), (Cell(None, 4.0), 0.5)]
    result = {"settings": {}, **scenario.remote_results(log, ["recompute", REMOTE], cells)}
    assert kinds.REMOTE.page(result).startswith("<!DOCTYPE html>")
    (table,) = kinds.REMOTE.tables(result)
    assert len(table.rows) == 1


def test_every_arm_has_every_speed(moved: Command) -> None:
    done = moved("--rounds", "1")
    assert done.status == 0, done.err
    result = done.result
    assert result["schema"] == "kvtier.compare.remote/1"
    assert [cell["load_over_compute"] for cell in result["cells"]] == [None, 0.25, 1, 4]
    for cell in result["cells"]:
        assert list(cell["arms"]) == list(REMOTE_ARMS)
        for arm in cell["arms"].values():
            assert arm["ttft_ms"]["n"] == 2
            assert (arm["errors"], arm["equal_tokens_fraction"]) == (0, 1.0)
    assert FakeEngine.live == FakeCluster.live == 0


def test_a_session_goes_on_at_the_other_server_but_for_the_oracles(moved: Command) -> None:
    done = moved("--arms", "kvtier-local,oracle", *ONE)
    found: dict[str, list[tuple[int, bool]]] = {}
    for one in done.result["turns"]:
        if one["session"] == 1:
            found.setdefault(one["arm"], []).append((one["server"], one["moved"]))
    assert found == {"kvtier-local": [(0, False), (1, True)], "oracle": [(1, False), (1, True)]}


def test_moved_turns_are_asked_for_at_the_cells_speed_and_written_at_full(moved: Command) -> None:
    FakeCluster.speeds.clear()
    done = moved("--arms", "kvtier-remote", "--gbps", "3", "--rounds", "1")
    assert done.status == 0, done.err
    assert FakeCluster.speeds == [0.0, 0.0, 3.0, 0.0]


def test_derived_speeds_need_the_time_that_computing_takes(moved: Command) -> None:
    done = moved("--arms", "kvtier-remote", "--quick")
    assert done.status == 1
    assert "measure recompute first" in done.err


def test_a_run_goes_on_from_its_log(moved: Command, tmp_path: Path) -> None:
    log = ("--quick", "--log", str(tmp_path / "turns"))
    first = moved("--arms", "recompute", *log)
    second = moved("--arms", "recompute,kvtier-remote", *log)
    assert second.status == 0, second.err
    assert [cell["load_over_compute"] for cell in second.result["cells"]] == [None, 1]
    assert second.result["scale"] == first.result["scale"]
    kept = [one for one in second.result["turns"] if one["arm"] == "recompute"]
    assert kept == first.result["turns"]
    other = moved("--arms", "recompute", *log, "--tokens", "512")
    assert "tokens" in other.err and "Name another --log" in other.err


def test_an_arm_whose_server_dies_is_left_out_and_the_others_go_on(moved: Command) -> None:
    done = moved("--arms", "recompute,kvtier-local", *ONE, task="kvtier:refuse")
    assert done.status == 1
    assert "kvtier-local failed" in " ".join(done.result["notes"])
    assert done.result["cells"][0]["arms"]["recompute"]["ttft_ms"]["n"] == 2


def test_an_answer_that_differs_fails_the_comparison(moved: Command) -> None:
    done = moved("--arms", "recompute,kvtier-local", *ONE, task="kvtier:wrong")
    assert done.status == 1
    assert done.result["cells"][0]["arms"]["kvtier-local"]["equal_tokens_fraction"] == 0


def test_wrong_arms_are_refused(moved: Command) -> None:
    assert "no configuration named none" in moved("--arms", "recompute,none").err


def test_without_mooncake_it_says_what_to_install(
    moved: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "missing_engine", lambda: "pip install 'sgl-kvtier[remote]'")
    assert "pip install" in moved().err


def test_a_comparison_with_mooncake_starts_and_ends_its_engine(
    kvtier: Command, tmp_path: Path
) -> None:
    load = ("--trace", "generated:swe-mini", "--sessions", "1", "--turns", "2", "--divisor", "16")
    arms = ("--arms", "recompute,hicache-mooncake", "--rounds", "1", "--gap-scale", "0")
    computed = ("--device", "cpu", "--model", "tiny-qwen3")
    done = kvtier(tmp_path, "compare", *computed, *load, *arms)
    assert done.status == 0, done.err
    assert done.result["arms"]["hicache-mooncake"]["requests"] == 2
    assert FakeEngine.live == 0
