"""Whole comparisons through the command line, with a stand-in where SGLang would be: processes,
rounds, failures, files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import Command, Done, child, environment, parsed, run_child

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import argtypes, rounds
from sgl_kvtier.lab.experiment.scenarios import compare as scenario
from sgl_kvtier.lab.experiment.scenarios.compare import CompareOptions

LOAD = (
    "--trace generated:swe-mini --sessions 2 --turns 2 --divisor 16 --gap-scale 0 "
    "--servers together"
)
WAITS = "--gap-scale 1000 --gap-cap 3600 --rounds 1 --arms recompute,kvtier"
COMPUTED = ["--device", "cpu", "--model", "tiny-qwen3"]
PACED = ["--device", "paced:h100-llama8b", "--dilation", "2"]


@pytest.fixture
def compare(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare on a small load, its files in the test's folder."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, "compare", *COMPUTED, *LOAD.split(), *extra, task=task)

    return run


@pytest.fixture
def paced(kvtier: Command, tmp_path: Path) -> Command:
    """The same on a paced device."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, "compare", *PACED, *LOAD.split(), *extra, task=task)

    return run


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without plots: drawing them takes seconds."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def servers_left(tmp_path: Path) -> list[str]:
    left = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "sglang.launch_server" in line and str(tmp_path) in line:
            left.append(line)
    return left


def test_every_arm_replays_every_request_in_every_round(compare: Command, tmp_path: Path) -> None:
    done = compare("--rounds", "2", "--html", str(tmp_path / "page.html"))
    assert done.status == 0, done.err
    result = done.result
    assert result["schema"] == "kvtier.compare/1"
    assert list(result["arms"]) == ["recompute", "hicache", "hicache-file", "kvtier"]
    for arm in result["arms"].values():
        assert (arm["requests"], arm["errors"]) == (2 * 2 * 2, 0)
        assert arm["equal_tokens_fraction"] == 1.0
        assert [one["complete"] for one in arm["rounds"]] == [True, True]
    assert result["arms"]["kvtier"]["cached_tokens"]["storage"] > 0
    assert result["arms"]["hicache"]["cached_tokens"]["storage"] == 0
    assert result["arms"]["kvtier"]["bytes"]["written"] > 0
    assert not [
        note for note in result["notes"] if "not cold" in note or "did not come back" in note
    ]
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "two rounds: too few to tell" in result["summary"]
    assert result["summary"] in page


def test_sessions_that_return_find_their_first_prompt_in_storage_alone(compare: Command) -> None:
    done = compare("--rounds", "2", "--arms", "recompute,kvtier", "--returning")
    assert done.status == 0, done.err
    samples = done.result["samples"]
    assert [sample["turn"] for sample in samples] == [2] * (2 * 2 * 2)
    cached = {
        arm: [s["cached"] for s in samples if s["arm"] == arm] for arm in ("recompute", "kvtier")
    }
    assert all(tiers["storage"] > 0 for tiers in cached["kvtier"])
    assert not any(tiers["total"] for tiers in cached["recompute"])
    assert done.result["settings"]["returning"]
    assert not [note for note in done.result["notes"] if "not cold" in note]
    assert any("Sessions return" in note for note in done.result["notes"])


def test_fresh_servers_are_restarted_before_sessions_return(
    compare: Command, tmp_path: Path
) -> None:
    words = ("--servers", "fresh", "--rounds", "1", "--arms", "kvtier", "--returning")
    done = compare(*words, "--folder", str(tmp_path / "work"))
    assert done.status == 0, done.err
    assert [sample["turn"] for sample in done.result["samples"]] == [2, 2]
    assert any("stopped and started again" in note for note in done.result["notes"])
    (log,) = (tmp_path / "work").rglob("server.log")
    assert log.read_text().count("ready") == 2


def test_a_sentence_and_one_table_are_printed_and_where_the_others_are(compare: Command) -> None:
    done = compare("--rounds", "1", "--arms", "recompute,kvtier")
    assert done.out.startswith(done.result["summary"])
    titles = [line for line in done.out.splitlines() if line.startswith("Time ")]
    assert titles == ["Time to first token of later turns"]
    assert "kvtier report FILE" in done.out


def test_arms_may_be_asked_by_the_route_that_openais_api_has(compare: Command) -> None:
    done = compare("--route", "openai", "--rounds", "1", "--arms", "recompute,kvtier")
    assert done.status == 0, done.err
    result = done.result
    assert result["settings"]["route"] == "openai"
    assert result["arms"]["kvtier"]["equal_tokens_fraction"] == 1.0
    assert {sample["output_text"] is not None for sample in result["samples"]} == {True}
    assert [sample["output_ids"] for sample in result["samples"]] == [[]] * 8


def test_the_order_of_arms_moves_on_from_round_to_round(compare: Command) -> None:
    result = compare("--rounds", "2", "--arms", "recompute,hicache,kvtier").result
    order: list[tuple[int, str]] = []
    for sample in result["samples"]:
        if (sample["round"], sample["arm"]) not in order:
            order.append((sample["round"], sample["arm"]))
    assert order == [
        (1, "recompute"),
        (1, "hicache"),
        (1, "kvtier"),
        (2, "hicache"),
        (2, "kvtier"),
        (2, "recompute"),
    ]


def test_other_tokens_than_recomputes_are_noticed(compare: Command) -> None:
    done = compare("--rounds", "1", "--arms", "recompute,kvtier", task="kvtier:wrong")
    assert done.result["arms"]["kvtier"]["equal_tokens_fraction"] == 0.0
    assert done.status == 0


def test_an_arm_that_does_not_start_is_shown_and_the_others_go_on(tmp_path: Path) -> None:
    arms = ("--arms", "recompute,hicache,kvtier")
    done = run_child(
        tmp_path, "compare", *COMPUTED, *LOAD.split(), "--rounds", "1", *arms, task="hicache:refuse"
    )
    result = done.result
    assert done.status == 1
    assert "no memory left for you" in done.err
    assert "Going on without hicache" in done.err
    assert "ended with status 3" in result["arms"]["hicache"]["failure"]
    assert result["arms"]["hicache"]["requests"] == 0
    assert result["arms"]["kvtier"]["requests"] == 4
    assert servers_left(tmp_path) == []


def test_an_arm_that_dies_in_a_round_keeps_what_it_measured(compare: Command) -> None:
    done = compare("--rounds", "2", "--arms", "recompute,kvtier", task="kvtier:die")
    result = done.result
    assert done.status == 1
    assert "the end is near" in done.err
    assert "in round 1" in result["arms"]["kvtier"]["failure"]
    assert {sample["round"] for sample in result["samples"] if sample["arm"] == "kvtier"} == {1}
    assert [one["complete"] for one in result["arms"]["kvtier"]["rounds"]] == [False]
    assert result["ratios"]["kvtier/recompute"]["ttft_ms"]["n"] == 0
    assert "Not complete, and so in no ratio: round 1 of kvtier." in result["notes"]
    assert result["arms"]["kvtier"]["errors"] > 0
    assert result["arms"]["recompute"]["requests"] == 8


def test_a_server_that_ends_while_it_is_emptied_is_started_anew(compare: Command) -> None:
    done = compare("--rounds", "2", "--arms", "recompute,kvtier", task="kvtier:flushed")
    result = done.result
    assert done.status == 0, done.err
    arm = result["arms"]["kvtier"]
    assert arm["failure"] is None
    assert (arm["requests"], arm["errors"]) == (8, 0)
    assert [one["complete"] for one in arm["rounds"]] == [True, True]
    assert "Failed to stop HiCache storage threads cleanly." in done.err
    begin = "kvtier: its server failed before round 2 and was started anew: "
    assert any(note.startswith(begin) for note in result["notes"])


def test_when_every_arm_fails_the_command_says_so(compare: Command) -> None:
    done = compare("--arms", "recompute", task="recompute:refuse")
    assert (done.status, done.result) == (1, {})
    assert "no configuration could be measured" in done.err
    assert "no memory left for you" in done.err


def test_a_comparison_goes_on_from_its_log_and_measures_nothing_twice(
    compare: Command, tmp_path: Path
) -> None:
    log = ("--log", str(tmp_path / "log.jsonl"), "--arms", "recompute,kvtier")
    first = compare("--rounds", "1", *log).result
    second = compare("--rounds", "2", *log).result
    assert [sample for sample in second["samples"] if sample["round"] == 1] == first["samples"]
    assert [arm["requests"] for arm in second["arms"].values()] == [8, 8]
    assert second["ratios"]["kvtier/recompute"]["ttft_ms"]["n"] == 2
    requests = (tmp_path / "work" / "requests.jsonl").read_text().splitlines()
    assert {json.loads(line)["round"] for line in requests} == {2}
    refused = compare("--rounds", "2", *log, "--chunk", "128")
    assert refused.status == 1
    assert "Name another --log" in refused.err


def test_what_was_noted_of_a_round_stands_in_every_result_that_has_it(
    compare: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "not_cold", lambda one: [f"round {one.number} was not cold"])
    log = ("--log", str(tmp_path / "log.jsonl"), "--arms", "recompute,kvtier")
    compare("--rounds", "1", *log)
    result = compare("--rounds", "2", *log).result
    found = [note for note in result["notes"] if "not cold" in note]
    assert found == ["round 1 was not cold", *2 * ["round 2 was not cold"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_comparison_leaves_no_server_and_writes_what_it_has(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "work" / "requests.jsonl"
    process = subprocess.Popen(
        child(tmp_path, "compare", *COMPUTED, *LOAD.split(), *WAITS.split()),
        env={**os.environ, **environment(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while (
        not (log.exists() and log.read_text())
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["interrupted"]
    assert result["arms"]["recompute"]["requests"] >= 1
    assert servers_left(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "recompute,lmcache"], "no configuration named lmcache"),
        (["--trace", "no_such_trace"], "no trace 'no_such_trace'"),
        (["--device-tokens", "16"], "less than the longest request needs"),
        (["--json", "/proc/nowhere/out.json"], "/proc/nowhere/out.json"),
        (["--rounds", "0"], "must be a whole number of at least 1"),
    ],
)
def test_a_mistake_is_told_before_any_server_starts(
    compare: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = compare(*arguments)
    assert done.status in (1, 2)
    assert message in done.err
    assert not (tmp_path / "work" / "recompute").exists()


def test_steps_that_an_earlier_run_left_in_the_folder_do_not_count(
    paced: Command, tmp_path: Path
) -> None:
    left = tmp_path / "work" / "kvtier" / "pace.jsonl"
    left.parent.mkdir(parents=True)
    step = {"step": "prefill", "at": 1e12, "seconds": 1.0, "late_s": 0.0, "gap_s": 0.0}
    left.write_text(json.dumps(step) + "\n")
    result = paced("--rounds", "1", "--arms", "kvtier").result
    assert "INVALID: kvtier: the paced device wrote no step." in result["notes"]


def test_a_comparison_on_a_paced_device_is_marked_as_such_everywhere(
    paced: Command, tmp_path: Path, no_plots: None
) -> None:
    done = paced("--rounds", "1", "--html", str(tmp_path / "out.html"))
    assert done.status == 1, "a device that wrote no step is not known to have kept pace"
    result = done.result
    assert "INVALID: kvtier: the paced device wrote no step." in result["notes"]
    scale = result["device"]["paced"]["bytes_scale"]
    moved = f"The modelled machine moves {scale:g} times as many."
    assert any(note.endswith(moved) for note in result["notes"])
    device = result["device"]["paced"]
    assert (device["profile"], device["dilation"], device["bytes_scale"]) == (
        "h100-llama8b",
        2.0,
        512.0,
    )
    assert "aiconfigurator" in device["source"]["database"]
    assert list(result["arms"]) == ["recompute", "hicache", "hicache-file", "kvtier", "oracle"]
    assert result["arms"]["kvtier"]["ttft_later_ms"]["n"] == 2
    assert result["settings"]["page_size"] == 64
    assert result["settings"]["concurrency"] == len(result["workload"]["rows"]) == 2
    assert result["settings"]["chunk_tokens"] == 8192
    said = "INVALID: the paced device did not keep pace in "
    assert result["summary"].startswith(said)
    assert done.out.startswith(said)
    assert "(paced h100-llama8b, not computed)" in done.out
    assert "paced h100-llama8b, not computed" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize("other", ["/some/model", "lab-mha"])
def test_another_model_on_a_paced_device_is_refused(paced: Command, other: str) -> None:
    done = paced("--model", other)
    assert done.status == 1
    assert "brings a model of its own" in done.err


@pytest.fixture
def no_nixl(compare: Command, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine without NIXL's wheel; the arms that were looked for."""
    asked: list[str] = []

    def missing(arm: str) -> str | None:
        asked.append(arm)
        return "NIXL cannot be used (no nixl)" if arm == "hicache-nixl" else None

    monkeypatch.setattr(rounds, "missing", missing)
    return asked


def test_an_arm_whose_wheel_is_missing_is_skipped_with_the_reason(
    compare: Command, no_nixl: list[str], tmp_path: Path, no_plots: None
) -> None:
    page = tmp_path / "page.html"
    arms = ("--arms", "recompute,hicache-nixl,kvtier")
    done = compare("--rounds", "2", *arms, "--html", str(page))
    assert done.status == 0, done.err
    found = done.result["arms"]
    assert found["hicache-nixl"]["skipped"] == "NIXL cannot be used (no nixl)"
    assert found["hicache-nixl"]["failure"] is None
    assert [arm["requests"] for arm in found.values()] == [8, 0, 8]
    said = "hicache-nixl was skipped: NIXL cannot be used (no nixl)."
    assert said in done.out
    assert said in page.read_text()
    assert no_nixl.count("hicache-nixl") == 1


def test_a_comparison_of_nothing_but_skipped_arms_fails(
    compare: Command, no_nixl: list[str]
) -> None:
    done = compare("--rounds", "1", "--arms", "hicache-nixl")
    assert (done.status, done.result) == (1, {})
    assert (
        "no configuration could be measured.\nhicache-nixl is skipped: NIXL cannot be used"
        in done.err
    )
    assert no_nixl == ["hicache-nixl"]


def test_a_skipped_arm_beside_one_that_failed_is_no_success(
    compare: Command, no_nixl: list[str]
) -> None:
    arms = ("--arms", "recompute,hicache-nixl,kvtier")
    done = compare("--rounds", "1", *arms, task="kvtier:refuse")
    assert done.status == 1
    assert done.result["arms"]["kvtier"]["failure"] is not None
    assert "hicache-nixl" in no_nixl


def test_recompute_is_measured_once_on_a_paced_device_and_all_are_compared_with_it(
    paced: Command,
) -> None:
    result = paced("--rounds", "2", "--arms", "recompute,kvtier").result
    rounds = {name: [one["round"] for one in arm["rounds"]] for name, arm in result["arms"].items()}
    assert rounds == {"recompute": [1], "kvtier": [1, 2]}
    assert result["arms"]["kvtier"]["compared_requests"] == 2 * 2 * 2


@pytest.mark.parametrize(
    ("here", "options", "device", "dilation", "model"),
    [
        ("cpu", "", "paced:h100-llama8b", 2.0, None),
        ("cpu", "--dilation 3", "paced:h100-llama8b", 3.0, None),
        ("cpu", "--quick", "paced:h100-llama8b", 1.0, None),
        ("cpu", "--model lab-gqa", "cpu", 1.0, "lab-gqa"),
        ("cpu", "--device cpu", "cpu", 1.0, "lab-mha"),
        ("cuda", "", "cuda", 1.0, "lab-mha"),
    ],
)
def test_without_a_card_servers_are_paced_unless_a_model_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    options: str,
    device: str,
    dilation: float,
    model: str | None,
) -> None:
    monkeypatch.setattr(scenario, "detect_device", lambda: here)
    args = scenario.choose_device(CompareOptions.of(parsed(scenario, *options.split())))
    assert (args.device, args.dilation, args.model) == (device, dilation, model)


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "compare"), ("paced:h100-llama8b", "compare-paced")]
)
def test_a_result_in_a_folder_is_named_by_the_device_and_the_time(device: str, name: str) -> None:
    words = ("--device", device, "--json", "results/", "--html", "results/")
    args = scenario.name_outputs(CompareOptions.of(parsed(scenario, *words)))
    assert re.fullmatch(rf"results/{name}-\d{{8}}T\d{{6}}Z\.json", args.json or "")
    assert args.html == (args.json or "").removesuffix("json") + "html"


def test_a_model_is_one_of_ours_a_folder_or_a_name_with_its_organization(tmp_path: Path) -> None:
    def model(name: str) -> str:
        return argtypes.model_of(CompareOptions(model=name), "cpu")

    assert model(str(tmp_path)) == str(tmp_path)
    assert model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    with pytest.raises(BenchError, match=r"--model Qwen3-8B: no folder.*lab-mha.*smollm2"):
        model("Qwen3-8B")
