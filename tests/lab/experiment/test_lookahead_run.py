"""Whole runs of `kvtier compare lookahead`, with a stand-in where SGLang would be: cells, fresh
servers, figures, files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command, Done

SMALL = [
    "compare",
    "lookahead",
    "--device",
    "cpu",
    "--lab-model",
    "tiny-qwen3",
    "--trace",
    "generated:swe-mini",
    "--sessions",
    "4",
    "--turns",
    "2",
    "--divisor",
    "16",
]


@pytest.fixture
def compare(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare lookahead on a small load, its files in the test's folder."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, *SMALL, *extra, task=task)

    return run


@pytest.fixture(scope="module")
def measured(kvtier: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, str]:
    folder = tmp_path_factory.mktemp("ahead")
    extra = ["--gaps", "0,0.05", "--oversubscription", "1.5", "--rounds", "2"]
    arms = ("--arms", "recompute,hicache-file,restore,kvtier,oracle")
    done = kvtier(folder, *SMALL, *extra, *arms, "--html", str(folder / "page.html"))
    assert done.status == 0, done.err
    return done.result, folder, done.out


def test_every_arm_replays_every_request_in_every_cell_and_round(
    measured: tuple[dict, Path, str],
) -> None:
    result, _, _ = measured
    assert result["schema"] == "kvtier.compare.lookahead/1"
    assert [(cell["oversubscription"], cell["gap_s"]) for cell in result["cells"]] == [
        (1.5, 0.0),
        (1.5, 0.05),
    ]
    requests = result["workload"]["requests"]
    for cell in result["cells"]:
        assert list(cell["arms"]) == ["recompute", "hicache-file", "restore", "kvtier", "oracle"]
        assert {one["requests"] for one in cell["arms"].values()} == {2 * requests}
        assert {one["equal_tokens_fraction"] for one in cell["arms"].values()} == {1.0}
    assert {one["requests"] for one in result["arms"].values()} == {4 * requests}
    assert {(s["round"], s["gap_s"]) for s in result["samples"]} == {
        (1, 0.0),
        (2, 0.0),
        (3, 0.05),
        (4, 0.05),
    }


def test_every_trial_has_a_server_of_its_own_and_arms_take_turns(
    measured: tuple[dict, Path, str],
) -> None:
    result, folder, _ = measured
    for cell in ("1.5x-0s", "1.5x-0.05s"):
        assert (folder / "work" / cell / "kvtier" / "server.log").read_text().count("ready") == 2
    order = list(dict.fromkeys((s["round"], s["arm"]) for s in result["samples"]))
    assert [arm for number, arm in order if number == 1] == [
        "recompute",
        "hicache-file",
        "restore",
        "kvtier",
        "oracle",
    ]
    assert [arm for number, arm in order if number == 2] == [
        "hicache-file",
        "restore",
        "kvtier",
        "oracle",
        "recompute",
    ]


def test_requests_name_their_session_and_pauses_are_the_cells(
    measured: tuple[dict, Path, str],
) -> None:
    result, _, _ = measured
    assert result["settings"]["arms"]["kvtier"]["policy"]["sessions"] is True
    assert not any("not cold" in note for note in result["notes"])


def test_a_failing_arm_spares_the_others(compare: Command) -> None:
    extra = "--gaps 0 --rounds 1 --arms recompute,hicache-file,oracle --oversubscription 1.5"
    done = compare(*extra.split(), task="hicache-file:refuse")
    result = done.result
    assert done.status == 1
    assert "no memory left for you" in result["arms"]["hicache-file"]["failure"]
    assert result["arms"]["oracle"]["requests"] == result["workload"]["requests"]


def test_too_much_oversubscription_is_refused_before_anything_starts(compare: Command) -> None:
    done = compare("--oversubscription", "50")
    assert (done.status, done.result) == (1, {})
    assert "take more with --sessions" in done.err


def test_a_comparison_in_pieces_measures_every_trial_once_and_the_oracle_once_per_pause(
    compare: Command, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    arms = ("--arms", "recompute,kvtier,oracle", "--gaps", "0", "--rounds", "1", "--log", str(log))
    none = compare(*arms, "--oversubscription", "1.5", "--minutes", "0")
    assert none.status == 0, none.err
    assert not none.result["samples"]
    assert any("Time is up" in note for note in none.result["notes"])
    one = compare(*arms, "--oversubscription", "1.5").result
    both = compare(*arms, "--oversubscription", "1.5,1.2").result
    requests = one["workload"]["requests"]
    assert [
        {arm: figures["requests"] for arm, figures in cell["arms"].items()}
        for cell in both["cells"]
    ] == [{"recompute": requests, "kvtier": requests, "oracle": requests}] * 2
    assert both["cells"][0]["arms"] == one["cells"][0]["arms"]
    assert (
        both["cells"][1]["arms"]["oracle"]["ttft_ms"]
        == one["cells"][0]["arms"]["oracle"]["ttft_ms"]
    )
    made = [json.loads(line)["round"] for line in log.read_text().splitlines()[1:]]
    assert [(kept["place"], kept["arm"]) for kept in made] == [
        ("1.5x, pause 0 s", "recompute"), ("1.5x, pause 0 s", "kvtier"), ("pause 0 s", "oracle"),
        ("1.2x, pause 0 s", "recompute"), ("1.2x, pause 0 s", "kvtier"),
    ]  # fmt: skip
    other = compare(*arms, "--oversubscription", "1.5", "--lookahead", "2")
    assert other.status == 1
    assert "made with rules" in other.err
