"""Two servers on one remote store: what is asked where, what figures follow, what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.cli import main
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
from sgl_kvtier.lab.experiment.restore.log import Scale
from sgl_kvtier.lab.experiment.scenarios import remote as scenario
from sgl_kvtier.lab.outside.client import Cached
from sgl_kvtier.lab.pages import kinds

SETUP = Setup("/m", "m", "cpu", 16, 512, device_tokens=8192, storage_bytes=1 << 30)
FULL, BALANCE = Cell(0.0), Cell(None, 1.0)
SCALE = Scale("lab-mha", 2048, 16, 32 << 20, 1.0)


def turn(arm: str, cell: Cell, ttft_ms: float, session: int = 1, **more: Any) -> Moved:
    given: dict[str, Any] = {
        "ttft_s": ttft_ms / 1000,
        "prompt_tokens": 2112,
        "output_ids": (1, 2),
        "cached": Cached(storage=2048, total=2048),
        "moved": True,
        "number": 1,
        "server": 1,
    } | more
    gbps = cell.gbps or 0.0
    ratio = cell.load_over_compute
    return Moved(
        "lab-mha", 2048, "turn", arm, 1, gbps, ratio, cell=cell.name, session=session, **given
    )


def log_of(*turns: Moved) -> MovedLog:
    log = MovedLog()
    log.take("scale", SCALE)
    for one in turns:
        log.take("turn", one)
    return log


def results(log: MovedLog) -> dict[str, Any]:
    arms = list(dict.fromkeys(one.arm for one in log.turns))
    cells = [(cell, log.gbps(cell) or 0.0) for cell in (FULL, BALANCE)]
    return {"settings": {"tokens": 2048}, **scenario.remote_results(log, arms, cells)}


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


def test_answers_are_compared_with_recomputes() -> None:
    log = log_of(
        turn(REMOTE, FULL, 100, output_ids=(1, 3)),
        turn(REMOTE, FULL, 100, session=2),
        turn("recompute", FULL, 100),
        turn("recompute", FULL, 100, session=2),
    )
    found = results(log)
    assert found["cells"][0]["arms"][REMOTE]["equal_tokens_fraction"] == 0.5
    assert not scenario.is_sound(found["summary"])


def test_a_request_that_failed_makes_the_result_unsound() -> None:
    log = log_of(turn(REMOTE, FULL, 100), turn(REMOTE, FULL, 100, session=2, error="HTTP 500"))
    found = results(log)
    assert found["summary"]["errors"] == 1
    assert not scenario.is_sound(found["summary"])


def test_bandwidths_follow_from_the_time_that_computing_takes() -> None:
    assert log_of().gbps(BALANCE) == pytest.approx((32 << 20) * 8e-9)
    assert MovedLog().gbps(BALANCE) is None


def missed(balance: float, mooncake: float, recompute: float, full: float = 100) -> list[str]:
    log = log_of(
        turn(REMOTE, FULL, full),
        turn("hicache-mooncake", FULL, 100),
        turn("recompute", FULL, 1000),
        turn(REMOTE, BALANCE, balance),
        turn("hicache-mooncake", BALANCE, mooncake),
        turn("recompute", BALANCE, recompute),
    )
    return results(log)["summary"]["missed"]


def test_what_is_aimed_at_and_not_reached_is_said() -> None:
    assert missed(500, 1000, 1000) == []
    assert len(missed(700, 1000, 1000)) == 2
    (text,) = missed(500, 1000, 1000, full=105)
    assert "full speed: 0.95 times as fast as the better" in text
    assert len(missed(1100, 1000, 1000)) == 3


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    log = MovedLog.open(tmp_path / "log", {"tokens": 2048})
    log.add("scale", SCALE)
    log.add("turn", turn(REMOTE, BALANCE, 100, session=0))
    log.add("turn", turn(REMOTE, BALANCE, 100))
    again = MovedLog.open(tmp_path / "log", {"tokens": 2048})
    assert again.turns == log.turns and again.scales == [SCALE]
    assert again.has(REMOTE, 1, BALANCE, 2) and not again.has(REMOTE, 1, BALANCE, 3)
    assert not again.has(REMOTE, 1, FULL, 1)
    with pytest.raises(BenchError, match="tokens"):
        MovedLog.open(tmp_path / "log", {"tokens": 4096})


def test_a_cell_that_was_begun_and_played_again_counts_once() -> None:
    log = log_of(turn(REMOTE, FULL, 900), turn(REMOTE, FULL, 100))
    assert [one.ttft_s for one in log.turns] == [0.1]


def test_a_page_of_a_run_that_was_stopped_early_has_what_there_is() -> None:
    other = Cell(None, 4.0)
    log = log_of(turn("recompute", FULL, 100))
    cells = [(cell, log.gbps(cell) or 0.0) for cell in (FULL, BALANCE, other)]
    arms = ["recompute", REMOTE]
    result = {"settings": {}, **scenario.remote_results(log, arms, cells)}
    assert kinds.REMOTE.page(result).startswith("<!DOCTYPE html>")
    (table,) = kinds.REMOTE.tables(result)
    assert len(table.rows) == 1


def test_wrong_arms_are_refused_in_one_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "missing_engine", lambda: "")
    assert main(["compare", "remote", "--arms", "recompute,none"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "no arm named none" in line


def test_without_mooncake_it_says_what_to_install(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "missing_engine", lambda: "pip install 'sgl-kvtier[remote]'")
    assert main(["compare", "remote"]) == 1
    assert "pip install" in capsys.readouterr().err


def test_cells_are_full_speed_and_three_ratios_unless_others_are_named() -> None:
    parser = argparse.ArgumentParser()
    scenario.add_arguments(parser)
    names = {
        words: [
            cell.name
            for cell in scenario._cells(scenario.RemoteOptions.of(parser.parse_args(words.split())))
        ]
        for words in ("", "--quick", "--gbps 1,2", "--gbps 1 --load-over-compute 1/2")
    }
    assert names == {
        "": ["0 Gbit/s", "load/compute 0.25", "load/compute 1", "load/compute 4"],
        "--quick": ["0 Gbit/s", "load/compute 1"],
        "--gbps 1,2": ["1 Gbit/s", "2 Gbit/s"],
        "--gbps 1 --load-over-compute 1/2": ["1 Gbit/s", "load/compute 0.5"],
    }


def test_shared_memory_holds_the_prompts_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usual, long = (
        scenario.Moving(scenario.RemoteOptions(lab_model="lab-mha", tokens=tokens))
        for tokens in (2048, 65536)
    )
    assert usual.segment_bytes() == 1 << 30
    assert long.segment_bytes() > long.token_bytes() * 65536 * (4 + 1)
