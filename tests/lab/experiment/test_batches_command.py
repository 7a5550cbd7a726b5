"""`kvtier compare restore --at-once` as a command, with a stand-in where SGLang would be."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from commands import Command, Done

from sgl_kvtier.cli import main
from sgl_kvtier.lab.experiment.restore.arms import DEFAULT_BATCH_ARMS

SMALL = [
    *("compare", "restore", "--at-once", "2,3", "--device", "cpu", "--models", "tiny-qwen3"),
    *("--lengths", "256,512", "--rounds", "1", "--foreign", "99"),
]


@pytest.fixture
def restore(kvtier: Command, tmp_path: Path) -> Command:
    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, *SMALL, *extra, task=task)

    return run


def test_batches_become_a_table_a_result_and_a_page(restore: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = restore("--html", str(page))
    assert done.status == 0, done.err
    assert done.result["schema"] == "kvtier.restore.batches/1"
    assert [cell["at_once"] for cell in done.result["cells"]] == [2, 3]
    for cell in done.result["cells"]:
        assert tuple(cell["arms"]) == DEFAULT_BATCH_ARMS
        for arm in cell["arms"].values():
            assert arm["ttft_ms"]["n"] == cell["at_once"]
            assert arm["equal_tokens_fraction"] == arm["beside_equal_fraction"] == 1.0
            assert arm["token_gap_ms"]["max"] >= arm["token_gap_ms"]["p99"] > 0
    assert "Several restorations at once" in done.out
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_server_has_rules_that_take_turns_and_room_for_all_at_once(
    restore: Command, tmp_path: Path
) -> None:
    done = restore("--arms", "compute,kvtier")
    policy = json.loads((tmp_path / "work/tiny-qwen3/storage.json").read_text())["policy"]
    assert policy["rules"] == "sgl_kvtier.lab.rules:InTurn"
    command = done.result["settings"]["server_commands"]["tiny-qwen3"]
    option = dict(itertools.pairwise(command))
    assert int(option["--max-total-tokens"]) > 3 * 512 + 4 * 4096
    assert int(option["--max-running-requests"]) == 8
    assert "--incremental-streaming-output" in command


def test_a_report_draws_the_same_tables(
    restore: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = restore("--arms", "cake,kvtier")
    assert main(["report", str(tmp_path / "out.json")]) == 0
    table = capsys.readouterr().out.split("\n\n")[0]
    assert "cake" in table
    assert table in done.out


def test_a_stream_tells_the_longest_wait_and_ours_over_its_variants(restore: Command) -> None:
    done = restore("--poisson", "4", "--arms", "kvtier,by-arrival,stall-any")
    for cell in done.result["cells"]:
        assert list(cell["vs_variants"]) == ["by-arrival", "stall-any"]
        for arm in cell["arms"].values():
            assert arm["ttft_ms"]["max"] >= arm["ttft_ms"]["p99"]
    assert "longest" in done.out.splitlines()[1]
    assert "as a stream of load 4: kvtier over by-arrival: mean TTFT" in done.out


def test_an_answer_that_differs_ends_with_status_1(restore: Command) -> None:
    done = restore("--arms", "compute,kvtier", task="kvtier:wrong")
    assert done.status == 1
    assert done.result["summary"]["equal_tokens"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at-once", "2,2"], "each once, as 2,4,8"),
        (["--at-once", "0"], "must be"),
        (["--arms", "kvtier,load_kvtier"], "no arm named load_kvtier. There are: stock"),
        (["--poisson", "1", "--arms", "cake-shortest-first"], "sends all together"),
        (["--lengths", "1000"], "whole pages"),
    ],
)
def test_a_mistake_is_told_before_any_server_starts(
    restore: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = restore(*arguments)
    assert done.status in (1, 2)
    assert message in done.err
    assert not (tmp_path / "work").exists()


def test_what_is_about_batches_needs_one(kvtier: Command, tmp_path: Path) -> None:
    done = kvtier(tmp_path, "compare", "restore", "--device", "cpu", "--poisson", "1")
    assert done.status == 1
    assert "add --at-once" in done.err
