"""`kvtier compare --harness sglang` with a program that stands for SGLang's client, and with itself."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import Command, Done

from sgl_kvtier.lab.experiment.sglang_client import SGLangReplaying, arrivals
from sgl_kvtier.lab.outside.replay import ReplayOptions

FAKE = Path(__file__).parents[1] / "fake_bench_serving.py"
SMALL = [
    *("compare", "--device", "cpu", "--model", "tiny-qwen3", "--harness", "sglang"),
    *("--trace", "generated:swe-mini", "--turns", "3", "--divisor", "16", "--sessions", "2"),
    *("--servers", "together", "--arms", "hicache-file,kvtier", "--rounds", "1"),
    *("--max-output-tokens", "4"),
]


@pytest.fixture
def compared(kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """kvtier compare on a small load by a fake of SGLang's client."""
    monkeypatch.setattr(SGLangReplaying, "program", (sys.executable, str(FAKE)))

    def run(*extra: str, task: str = "") -> Done:
        monkeypatch.setenv("FAKE_SGLANG_CLIENT", task)
        return kvtier(tmp_path, *SMALL, *extra)

    return run


def sent(folder: Path) -> list[list[dict]]:
    path = folder / "work" / "sglang" / "sglang" / "kvtier-1" / "sessions.json"
    return json.loads(path.read_text())["conversations"]


def test_the_figures_are_those_of_sglangs_client_and_ours_stand_beside_them(
    compared: Command, tmp_path: Path
) -> None:
    done = compared()
    assert done.status == 0, done.err
    result = done.result
    assert result["harness"]["name"] == "sglang"
    kept = json.loads(
        (tmp_path / "out-sglang" / "sglang" / "kvtier-1" / "result.jsonl").read_text()
    )
    mine = sorted(row["ttft_ms"] for row in result["samples"] if row["arm"] == "kvtier")
    assert mine == pytest.approx(sorted(1000 * one for one in kept["ttfts"]))
    assert result["arms"]["kvtier"]["prompt_tokens"] == sum(kept["input_lens"])
    assert result["arms"]["kvtier"]["output_tokens"] == sum(kept["output_lens"]) == 6 * 4
    for row in result["harness"]["agreement"]:
        assert row["ratio"] == pytest.approx(row["harness"] / row["own"])
    assert "by another client and by our own" in done.out


def test_our_client_sends_the_same_chats_with_the_servers_answers_in_them(
    compared: Command, tmp_path: Path
) -> None:
    result = compared().result
    # the fake's answers follow from the whole prompt, so equal ones come from equal prompts
    log = (tmp_path / "work" / "requests.jsonl").read_text().splitlines()
    own = [row for row in map(json.loads, log) if row["arm"] == "kvtier"]
    by_turn = {(row["session"], row["turn"]): row["output_text"] for row in own}
    theirs = [row for row in result["samples"] if row["arm"] == "kvtier"]
    assert {(row["session"], row["turn"]): row["output_text"] for row in theirs} == by_turn
    assert len(by_turn) == 6


def test_a_message_is_as_long_as_it_is_in_the_load(compared: Command, tmp_path: Path) -> None:
    rows = compared().result["workload"]["rows"]
    for row, (first, *_) in zip(rows, sent(tmp_path), strict=True):
        # what the chat template of our models puts around each message
        around = sum(len(one["role"]) + 4 for one in first["messages"])
        letters = sum(len(one["content"]) for one in first["messages"])
        assert row["first_prompt_tokens"] <= letters + around <= row["first_prompt_tokens"] + 12


def test_returning_sessions_begin_with_their_second_prompt(
    compared: Command, tmp_path: Path
) -> None:
    compared()
    everything = sent(tmp_path)
    done = compared("--returning")
    assert done.status == 0, done.err
    samples = [one for one in done.result["samples"] if one["arm"] == "kvtier"]
    assert sorted(one["turn"] for one in samples) == [2, 2, 3, 3]
    for turns, before in zip(sent(tmp_path), everything, strict=True):
        assert len(turns) == len(before) - 1
        messages = turns[0]["messages"]
        first = before[0]["messages"]
        assert messages[: len(first)] == first
        assert messages[len(first)]["role"] == "assistant"
        assert messages[len(first) + 1 :] == before[1]["messages"]


def test_figures_that_are_missing_fail_the_configuration(compared: Command) -> None:
    done = compared(task="forget")
    assert done.status == 1
    assert "SGLang's client has 5 of 6 requests" in done.err


def test_a_client_that_fails_is_named_with_its_last_words(compared: Command) -> None:
    done = compared(task="fail")
    assert done.status == 1
    assert "sglang ended with status 3: serving.py: error: no such data set" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--pause", "2"), "has no pauses"),
        (("--gap-cap", "1"), "has no pauses"),
        (("--ablation",), "has no --ablation"),
        (("--max-output-tokens", "recorded"), "--max-output-tokens N"),
    ],
)
def test_what_sglangs_client_cannot_do_is_refused(
    compared: Command, words: tuple[str, ...], said: str
) -> None:
    done = compared(*words)
    assert done.status == 1
    assert said in done.err


def test_sessions_arrive_when_sglangs_client_lets_them() -> None:
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(3)
    pauses = [numpy.random.exponential(1 / 20) for _ in range(4)]
    found = arrivals(5, replace(ReplayOptions(), rate=20.0, seed=3))
    assert found == pytest.approx([0.0, *numpy.cumsum(pauses)])


@pytest.mark.server
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglangs_client_itself_sends_the_load_and_its_result_is_read(
    kvtier: Command, tmp_path: Path
) -> None:
    done = kvtier(tmp_path, *SMALL)
    assert done.status == 0, done.err
    for arm in done.result["arms"].values():
        assert (arm["requests"], arm["errors"]) == (6, 0)
        assert arm["output_tokens"] == 6 * 4
        assert arm["ttft_ms"]["p50"] > 0
    kept = tmp_path / "out-sglang" / "sglang" / "kvtier-1"
    assert json.loads((kept / "steady.jsonl").read_text())["completed"] > 0
