"""`kvtier sim` as people call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.sim.experiment import Load, Machine, outcome, run_policy
from sgl_kvtier.lab.sim.policies import AHEAD
from sgl_kvtier.lab.sim.replay import MOST_LINE, whole_lines

LOAD = [
    *("--trace=generated:swe-mini", "--sessions=2", "--max-prompt-tokens=6000"),
    *("--device-size=1GiB", "--host-size=1GiB", "--draws=1"),
]


def test_run_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["sim", "run", *LOAD, "--policy", "kvtier,stock", "--json", str(out)]) == 0
    assert "stock" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["schema"] == "kvtier.sim.run/1"
    assert [row["policy"] for row in result["policies"]] == ["kvtier", "stock"]
    assert result["policies"][0]["ttft_s"]["p50"] > 0


def test_the_policy_section_of_kvtier_json_steers_the_run(tmp_path: Path) -> None:
    config = tmp_path / "kvtier.json"
    computed = []
    for restore in ("compute", "load"):
        policy = {"restore": restore, "prefetch": "off", "min_restore_tokens": 0}
        config.write_text(json.dumps({"policy": policy}))
        out = tmp_path / f"{restore}.json"
        command = ["sim", "run", *LOAD, "--policy", "kvtier", "--config", str(config)]
        assert main([*command, "--json", str(out)]) == 0
        computed.append(json.loads(out.read_text())["policies"][0]["loaded_tokens"])
    assert computed[0] < computed[1]  # the engine itself copies what lies in host memory


@pytest.mark.parametrize(
    ("policy", "ahead"),
    [
        ({}, ("on", "next-use")),
        ({"eviction": "lru"}, ("on", "lru")),
        ({"restore": "off"}, ("off", "lru")),
    ],
)
def test_what_kvtier_json_leaves_open_is_as_on_one_gpu(
    tmp_path: Path, policy: dict[str, str], ahead: tuple[str, str]
) -> None:
    config, out = tmp_path / "kvtier.json", tmp_path / "out.json"
    config.write_text(json.dumps({"policy": policy}))
    command = ["sim", "run", *LOAD, "--policy", "recompute", "--config", str(config)]
    assert main([*command, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["setup"]["policy"]
    assert (found["prefetch"], found["eviction"]) == ahead


def test_draws_are_summed_up_with_their_spread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    command = ["sim", "run", *LOAD, "--policy", "recompute", "--start-every", "5", "--seed", "3"]
    assert main([*command, "--draws", "3", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [row["seed"] for row in result["policies"]] == [3, 4, 5]
    means = sorted(row["ttft_s"]["mean"] for row in result["policies"])
    (over,) = result["draws"]
    assert over["policy"] == "recompute" and over["n"] == 3
    assert over["ttft_s.mean"] == {"median": means[1], "least": means[0], "most": means[2]}
    assert means[0] < means[2]
    assert "least to most" in capsys.readouterr().out


def test_a_random_load_is_drawn_six_times_unless_its_decisions_are_logged(tmp_path: Path) -> None:
    out, load = tmp_path / "out.json", LOAD[:-1]
    command = ["sim", "run", *load, "--policy", "recompute", "--json", str(out)]
    assert main(command) == 0
    assert [row["n"] for row in json.loads(out.read_text())["draws"]] == [6]
    logged = [*command[:-1], str(out), "--log", str(tmp_path / "run.log")]
    logged[logged.index("recompute")] = "kvtier"
    assert main(logged) == 0
    assert [row["n"] for row in json.loads(out.read_text())["draws"]] == [1]


def test_steps_are_mixed_only_where_asked() -> None:
    steps = []
    for mixed in (False, True):
        machine = Machine(mixed=mixed)
        _, requests = Load("generated:swe-mini", 2, most_prompt_tokens=6000).requests(
            machine.page_tokens
        )
        steps.append(outcome("stock", run_policy("stock", machine, requests, AHEAD))["steps"])
    assert steps[0] > steps[1]


def test_json_to_standard_output_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", *LOAD, "--policy", "recompute", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["policies"][0]["policy"] == "recompute"


def test_a_logged_run_replays_and_a_changed_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, config = tmp_path / "run.log", tmp_path / "kvtier.json"
    config.write_text(json.dumps({"policy": {"restore": "both", "min_restore_tokens": 0}}))
    command = ["sim", "run", *LOAD, "--policy", "kvtier", "--log", str(log)]
    assert main([*command, "--config", str(config)]) == 0
    lines = log.read_text().splitlines()
    log.write_text(log.read_text() + '{"type":"StepV')  # a line that was being written
    assert main(["sim", "replay-log", str(log)]) == 0
    said = capsys.readouterr().out
    assert "are identical" in said
    assert re.search(r"A planner step took \d+ us of CPU time in the median, \d+ us in p99", said)
    place = next(i for i, line in enumerate(lines) if '"reason":"' in line)
    lines[place] = lines[place].replace('"reason":"', '"reason":"not ')
    log.write_text("\n".join(lines) + "\n")
    assert main(["sim", "replay-log", str(log)]) == 1
    assert f"line {place + 1}" in capsys.readouterr().err


def test_a_papers_table_has_published_and_ours(tmp_path: Path) -> None:
    out = tmp_path / "cells.json"
    assert main(["sim", "paper", "cake", "--table", "4", "--json", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert cells
    assert {"table", "row", "column", "published", "ours"} <= set(cells[0])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", *LOAD, "--policy", "best"], "no policy 'best'"),
        (
            ["run", *LOAD, "--policy", "kvtier,stock", "--log", "x"],
            "--log writes the decisions of one policy",
        ),
        (["run", *LOAD, "--policy", "kvtier", "--draws", "2", "--log", "x"], "in one draw"),
        (["run", *LOAD, "--device-size", "1MiB"], "--device-size: a page of Llama-3.1-8B takes 8"),
        (["run", *LOAD[:3], "--model", "Llama-3.1-70B"], "leaves no HBM for KV on H100"),
        (["run", "--trace", "nowhere"], "no trace 'nowhere'"),
        (["paper", "cake", "--table", "99"], "cake has no table '99'"),
        (["replay-log", "/does/not/exist"], "cannot read"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *arguments]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x" * (MOST_LINE + 1), "line 1 .* longer than 64 MiB"),
        (b"a\n\xff\n", "line . .* not UTF-8"),
    ],
    ids=[0, 1],
)
def test_lines_that_cannot_be_read_are_named(
    tmp_path: Path, content: str | bytes, says: str
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with path.open(encoding="utf-8") as file, pytest.raises(TraceError, match=says):
        list(whole_lines(file))
