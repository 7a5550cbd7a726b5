"""A short, seeded run of every kind of torture; `kvtier bench torture` is the long one."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import parsed

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.stress.store import command, faults, power
from sgl_kvtier.lab.stress.store.command import PARTS, QUICK, bad, torture
from sgl_kvtier.lab.stress.store.faults import POINTS, engines
from sgl_kvtier.lab.stress.store.oracle import Oracle, content, open_at, page_key
from sgl_kvtier.store.base import PageWrite


def compiled(by_engine: dict[str, dict[str, int]]) -> list[dict[str, int]]:
    """The faults of stores with compiled I/O threads, by the call that failed."""
    assert by_engine.keys() == engines().keys()
    return [by for engine, by in by_engine.items() if engine != "python"]


def in_compiled_threads(by_call: dict[str, int]) -> int:
    """Faults of calls that an I/O thread in C made."""
    return sum(by_call.values()) - by_call["calls of Python"]


DONE = {
    "kills": lambda r: r["kills"] >= QUICK.kills and r["recovered_share"] == 1,
    "points": lambda r: r["points"] == dict.fromkeys(map(" ".join, POINTS), QUICK.per_point),
    "deletes": lambda r: (
        r["kills"] >= QUICK.delete_kills and r["deletes"] > 10 and r["pages_checked"] > 10
    ),
    "sweep": lambda r: (
        r["io_faults"] > 100
        and r["io_calls"] > 200
        and sum(r["io_faults_by_kind"].values()) == r["io_faults"]
        and all(in_compiled_threads(by) > 100 for by in compiled(r["io_faults_by_engine"]))
    ),
    "power": lambda r: (
        r["power_loss_states"] == QUICK.power_states
        and r["synced"] > 100
        and r["engine"]["power"] == ["python"]
    ),
    "damage": lambda r: r["corruptions"] >= QUICK.corruptions and len(r["damage_by_kind"]) == 9,
    "crowd": lambda r: r["crowd_pages"] > 100,
    "stall": lambda r: r["stall"]["late_pages"] > 0,
    "together": lambda r: (
        r["together"]["kill"] + r["together"]["stop"] >= QUICK.together.ends
        and r["together"]["opened"] > 6
        and min(r["together"]["put"], r["together"]["compared"]) > 100
        and r["deletes"] > 5
        and r["recovered_share"] == 1
    ),
}


def test_the_oracle_tells_a_page_that_was_deleted_from_one_that_is_wrong(tmp_path: Path) -> None:
    oracle, store = Oracle(), open_at(str(tmp_path))
    for name in (0, 1, 2):
        store.put([PageWrite(page_key(name), [memoryview(content(name, 7))])])
        oracle.intends(name, 7 if name < 2 else 8)
    oracle.deleted(1)
    verdict = oracle.check(store, range(3))
    store.close()
    assert (verdict.right, verdict.resurrected, verdict.wrong) == (1, 1, 1)
    assert bad(torture(str(tmp_path), QUICK, seed=1, parts=()) | {"resurrected": 1}) == 1


LONG = ("sweep", "points")


@pytest.mark.parametrize(
    "part", [pytest.param(p, marks=pytest.mark.slow) if p in LONG else p for p in PARTS]
)
def test_nothing_is_wrong_after(tmp_path: Path, part: str) -> None:
    result = torture(str(tmp_path), QUICK, seed=3, parts=(part,))
    assert bad(result) == 0, {name: value for name, value in result.items() if value}
    assert DONE[part](result)


class UnsyncedPages(power.RecordingEnv):
    """Records no sync of a segment: a store whose acknowledged pages a power loss may take."""

    def around(self, call: str, act: Callable[..., Any], *args: Any) -> Any:
        if call == "sync" and os.path.basename(self._paths[args[0]]).startswith("seg-"):
            return act(*args)
        return super().around(call, act, *args)


def test_synced_pages_that_a_power_loss_takes_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "RecordingEnv", UnsyncedPages)
    few = dataclasses.replace(QUICK, power_states=20)
    result = torture(str(tmp_path), few, seed=3, parts=("power",))
    assert bad(result) == result["lost_pages"] > 0


def test_a_point_that_every_opening_passes_is_met_with_pages_in_the_folder(tmp_path: Path) -> None:
    few = dataclasses.replace(QUICK, points=(("list", "after"), ("lock", "after")))
    result = torture(str(tmp_path), few, seed=3, parts=("points",))
    assert bad(result) == 0
    assert result["recent_found"] == result["recent"] >= 60


def test_the_command_says_what_it_did_in_json(tmp_path: Path) -> None:
    out = tmp_path / "torture.json"
    words = ("--quick", "--only", "stall", "--dir", str(tmp_path), "--json", str(out))
    assert command.run(parsed(command, *words)) == 0
    data = json.loads(out.read_text())
    assert data["schema"] == "kvtier.torture/1"
    assert {
        "kills",
        "failed_opens",
        "wrong_pages",
        "corruptions",
        "undetected",
        "false_alarms",
        "io_faults",
    } <= data.keys()
    assert data["engine"] == {"stall": sorted(engines().keys() - {"python"})}
    assert list(tmp_path.iterdir()) == [out]


def test_without_threads_that_fail_the_command_says_how_to_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "BUILT", False)
    with pytest.raises(BenchError, match=r"not built here.*pip install"):
        command.run(parsed(command, "--quick", "--only", "sweep", "--dir", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
