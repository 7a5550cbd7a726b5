"""Several servers on one network: who serves what, what goes over the network, and when it is full."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.lab.pages.figure import plots_available
from sgl_kvtier.lab.sim.experiment import Machine
from sgl_kvtier.lab.sim.fleet import Chats, Fleet, routed, run_fleet
from sgl_kvtier.lab.sim.policies import AHEAD

MACHINE = Machine(device_bytes=8 << 30, host_bytes=16 << 30, page_tokens=256)
CONFIG = replace(AHEAD, prefetch="off", eviction="lru")
CHATS = Chats(sessions=2, turns=3)


def test_turns_go_to_another_server_than_the_one_before_as_often_as_they_should():
    load = routed(Fleet(8, 0.5, chats=Chats(sessions=20, turns=6)), 256)
    sessions = {}
    for request in load.requests:
        sessions.setdefault(request.session, []).append(request)
    assert len(sessions) == 160
    moved = 0
    for turns in sessions.values():
        for before, after in pairwise(turns):
            assert after.after == before.rid
            assert after.keys[: len(before.keys)] == before.keys
            changes = load.server[before.rid] != load.server[after.rid]
            assert changes == (after.rid in load.moved)
            moved += changes
    assert moved / (160 * 5) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_goes_over_the_network_where_nothing_moves(share):
    out = run_fleet(Fleet(2, share, chats=CHATS), MACHINE, "restore", CONFIG)
    assert out["requests"] == 2 * 2 * 3
    assert (out["network_bytes"] > 0) == (share > 0)
    assert out["moved_ttft_s"]["n"] == (2 * 2 * 2 if share else 0)


def test_what_another_server_wrote_is_not_computed_again():
    fleet = Fleet(2, 1.0, chats=CHATS)
    loaded, computed = (run_fleet(fleet, MACHINE, p, CONFIG) for p in ("restore", "recompute"))
    assert loaded["moved_computed_tokens"] < 0.6 * computed["moved_computed_tokens"]
    assert computed["network_bytes"] == 0


def test_a_slower_network_is_fuller_and_more_is_computed():
    fast, slow = (
        run_fleet(Fleet(4, 1.0, gbps, chats=CHATS), MACHINE, "restore", CONFIG)
        for gbps in (100.0, 5.0)
    )
    assert slow["network_full"] > 2 * fast["network_full"]
    assert slow["moved_computed_tokens"] > 1.2 * fast["moved_computed_tokens"]
    assert slow["moved_ttft_s"]["mean"] > fast["moved_ttft_s"]["mean"]


def test_the_same_arguments_give_the_same_numbers():
    fleet = Fleet(2, 0.5, seed=4, chats=CHATS)
    assert len({json.dumps(run_fleet(fleet, MACHINE, "restore", CONFIG)) for _ in range(2)}) == 1


def test_the_command_writes_a_table_json_and_a_plot(tmp_path: Path, capsys):
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    command = ["sim", "network", "--servers", "1,2", "--moved", "50", "--policy", "recompute"]
    if plots_available():
        command += ["--svg", str(plot)]
    assert main([*command, "--draws", "2", "--json", str(out)]) == 0
    assert "50% moved" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["schema"] == "kvtier.sim.network/1"
    assert [(one["servers"], one["seed"]) for one in result["fleets"]] == [
        (1, 1),
        (2, 1),
        (1, 2),
        (2, 2),
    ]
    assert plot.exists() == plots_available()
    assert main(["sim", "network", "--servers", "0"]) == 1


def test_every_key_of_the_result_is_documented_and_no_other(capsys):
    command = ["sim", "network", "--servers", "1", "--moved", "100", "--policy", "recompute"]
    assert main([*command, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    text = (Path(__file__).parents[3] / "docs" / "manual" / "json.md").read_text("utf-8")
    section = text.split("\n## `kvtier.sim.network/1`\n", 1)[1].split("\n## ", 1)[0]
    top, fleets = section.split("\n### `fleets`\n", 1)
    for part, found in (
        (top, set(result) - {"schema", "command", "environment"}),
        (fleets, set(result["fleets"][0])),
    ):
        cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
        assert {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)} == found
