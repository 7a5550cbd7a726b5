"""`kvtier compare --ablation`: SGLang's best flags are found first, every mechanism has an
arm of its own, and the shares add up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import fake_arms
import pytest
from commands import Command
from fake_arms import ThreadServer

from sgl_kvtier.lab.experiment import ablation, rounds
from sgl_kvtier.lab.experiment.ablation import ABLATION_ARMS, MEASURED_ARMS, variants
from sgl_kvtier.lab.experiment.arms import Setup, prepare
from sgl_kvtier.lab.experiment.rounds import Outcome
from sgl_kvtier.lab.pages.ablation import ABLATION, shares, without
from sgl_kvtier.runtime.settings import from_extra_config

LOAD = [
    *("compare", "--ablation", "--device", "cpu", "--model", "tiny-qwen3"),
    *("--trace", "generated:swe-mini", "--sessions", "2", "--turns", "2", "--divisor", "16"),
    *("--gap-scale", "0", "--rounds", "2", "--max-output-tokens", "4"),
]
BEST = ("--hicache-storage-prefetch-policy", "timeout", "--schedule-policy", "lpm")


def test_sglangs_flags_are_tried_first_and_the_best_ones_are_compared(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    prepared = rounds.prepare

    def noted(arm: str, setup: Setup, folder: Path):
        started.append(arm)
        return prepared(arm, setup, folder)

    monkeypatch.setattr(rounds, "prepare", noted)
    done = kvtier(tmp_path, *LOAD, "--arms", "sglang-best,kvtier", "--html", str(tmp_path / "p"))
    assert done.status == 0, done.err
    assert started[:9] == [
        *("sglang-timeout", "sglang-best_effort", "sglang-wait_complete", "sglang-mixed-chunk"),
        *("sglang-lpm", "sglang-hrrn", "sglang-write_back", "sglang-slru", "sglang-tlru"),
    ]
    (load,) = done.result["loads"]
    (best,) = [one for one in load["tried"] if one["best"]]
    assert best["ttft_ms"]["mean"] == min(one["ttft_ms"]["mean"] for one in load["tried"])
    command = done.result["settings"]["commands"]["sglang-best"]
    assert all(word in command for word in best["arguments"])
    assert list(load["arms"]) == ["sglang-best", "kvtier"]
    for arm in load["arms"].values():
        assert (arm["requests"], arm["errors"], arm["equal_tokens_fraction"]) == (8, 0, 1.0)
    (gain,) = load["share"]
    assert gain == "store + reads + queue + hold + restore + lookahead"
    assert load["share"][gain]["share"]["value"] in (1.0, None)
    assert "What each mechanism is worth" in (tmp_path / "p").read_text()
    assert "Without one mechanism" in done.out


def test_a_flag_with_which_sglang_does_not_survive_the_load_is_out(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake_arms, "task_of", lambda arguments: "die" if "write_back" in arguments else ""
    )
    done = kvtier(tmp_path, *LOAD, "--arms", "sglang-best,kvtier")
    assert done.status == 0, done.err
    (load,) = done.result["loads"]
    (out,) = [one for one in load["tried"] if "write_back" in one["arguments"]]
    assert "the end is near" in out["failure"]
    assert not out["best"] and out["ttft_ms"]["mean"] is None
    assert load["arms"]["sglang-best"]["errors"] == 0


def test_a_load_of_several_rates_is_one_load_each_and_its_log_has_them_all(
    kvtier: Command, tmp_path: Path
) -> None:
    words = (*LOAD, "--arms", "store,kvtier", "--rate", "500,1000", "--log", str(tmp_path / "log"))
    done = kvtier(tmp_path, *words)
    assert done.status == 0, done.err
    assert [load["name"] for load in done.result["loads"]] == ["rate 500", "rate 1000"]
    assert done.result["settings"]["rate"] == [500, 1000]
    again = kvtier(tmp_path, *words)
    assert again.result["loads"] == done.result["loads"]


def test_rounds_with_other_flags_are_measured_again(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = ablation._tried
    words = (*LOAD, "--arms", "sglang-best,kvtier", "--log", str(tmp_path / "log"))
    for best in ("lpm", "hrrn"):

        def fastest(outcome: Outcome, name: str, flags: Sequence[str], best: str = best):
            mean = 1.0 if best in flags else 2.0
            return {**tried(outcome, name, flags), "ttft_ms": {"mean": mean}}

        monkeypatch.setattr(ablation, "_tried", fastest)
        done = kvtier(tmp_path, *words)
        assert done.status == 0, done.err
        assert best in done.result["settings"]["commands"]["sglang-best"]


def test_every_load_has_servers_with_what_was_chosen_for_it(
    kvtier: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Noted(ThreadServer):
        def start(self) -> None:
            started.append(self.name)
            super().start()

    monkeypatch.setattr(rounds, "Server", Noted)
    words = ("--arms", "sglang-best,kvtier", "--rate", "500,1000", "--servers", "together")
    done = kvtier(tmp_path, *LOAD, *words)
    assert done.status == 0, done.err
    assert [arm for arm in started if arm in ("sglang-best", "kvtier")] == [
        *("sglang-best", "kvtier", "sglang-best", "kvtier")
    ]


def test_the_arm_without_lookahead_is_measured_once(kvtier: Command, tmp_path: Path) -> None:
    done = kvtier(tmp_path, *LOAD, "--arms", "kvtier,kvtier-without-lookahead")
    assert done.status == 0, done.err
    arms = done.result["loads"][0]["arms"]
    assert list(arms) == ["restore", "kvtier", "kvtier-without-lookahead"]
    assert arms["restore"] == arms["kvtier-without-lookahead"]
    assert {sample["arm"] for sample in done.result["samples"]} == {"restore", "kvtier"}
    refused = kvtier(tmp_path, *LOAD, "--arms", "hicache-file")
    assert refused.status == 1
    assert ", ".join(ABLATION_ARMS) in refused.err


def test_every_arm_is_a_server_whose_settings_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    setup = Setup("model", "model", "cpu", 16, 512, variants=variants(BEST, "/patched"))
    found = {}
    for arm in MEASURED_ARMS:
        launch = prepare(arm, setup, tmp_path / arm)
        settings = json.loads((tmp_path / arm / "storage.json").read_text())
        words = launch.arguments
        flag = "--schedule-policy"
        order = words[words.index(flag) + 1] if flag in words else None
        if arm.startswith("sglang-"):
            assert words[-4:] == BEST if arm == "sglang-best" else words[-2:] == BEST[-2:]
            patched = arm == "sglang-patched"
            assert launch.env.get("PYTHONPATH") == ("/patched" if patched else None)
            assert ("TORCH_EXTENSIONS_DIR" in launch.env) == patched
            assert settings == {"prefetch_threshold": 256}
            continue
        policy = from_extra_config(settings).policy
        found[arm] = (
            policy.restore,
            policy.rules.rpartition(":")[2],
            policy.queue,
            policy.prefetch,
            policy.eviction,
            order,
        )
    off = ("off", "lru")
    assert found == {
        "store": ("off", "", "shortest", *off, "lpm"),
        "reads": ("auto", "NeverRestores", "arrival", *off, "lpm"),
        "queue": ("auto", "NeverHolds", "shortest", *off, None),
        "hold": ("auto", "NeverRestores", "shortest", *off, None),
        "restore": ("auto", "", "shortest", *off, None),
        "kvtier": ("auto", "", "shortest", "auto", "auto", None),
        "kvtier-without-restore": ("off", "", "shortest", "on", "next-use", None),
        "kvtier-without-queue": ("auto", "", "arrival", "auto", "auto", None),
        "kvtier-without-mixed-chunk": ("auto", "", "shortest", "auto", "auto", None),
        "kvtier-sglang-order": ("auto", "", "shortest", "auto", "auto", "lpm"),
    }  # fmt: skip


def rows(times: dict[str, list[list[float]]]) -> list[dict]:
    """Requests: by arm, for each round the times of its sessions, in ms."""
    return [
        {"arm": arm, "round": number, "session": session, "ttft_ms": ms}
        for arm, found in times.items()
        for number, sessions in enumerate(found, 1)
        for session, ms in enumerate(sessions)
    ]


def test_shares_are_those_of_the_means_and_add_up() -> None:
    times = {
        "sglang-best": [[1000.0, 900.0], [1100.0, 1000.0]],
        "reads": [[600.0, 500.0], [700.0, 600.0]],
        "kvtier": [[500.0, 500.0], [500.0, 500.0]],
    }
    found = shares(rows(times), list(times))
    assert list(found) == ["store + reads", "queue + hold + restore + lookahead"]
    first, second = found.values()
    assert first["ms"] == {"value": 400.0, "low": 400.0, "high": 400.0}, "equal in every draw"
    assert second["ms"]["value"] == 100.0
    assert second["ms"]["low"] < 100.0 < second["ms"]["high"]
    assert first["share"]["value"] + second["share"]["value"] == pytest.approx(1.0)
    times["restore"], times["kvtier-without-restore"] = times["reads"], times["sglang-best"]
    left = without(rows(times), list(times))
    assert {name: one["value"] for name, one in left.items()} == {
        "all": 2.0,
        "restore": 2.0,
        "lookahead": 1.2,
    }
    whole = [{**row, "e2e_ms": row["ttft_ms"] + 500.0} for row in rows(times)]
    assert without(whole, list(times), "e2e_ms")["all"]["value"] == 1.5


@pytest.mark.parametrize(("whole", "shown"), [({"value": 1.25}, "1.25"), ({}, "–")])
def test_ratios_of_whole_requests_stand_beside_those_of_the_first_token(
    whole: dict, shown: str
) -> None:
    first = {"value": 2.0, "low": 1.5, "high": 2.5}
    load = {"name": "load", "without": {"all": first}, "without_e2e": {"all": whole}}
    load |= {"tried": [], "share": {}, "arms": {}}
    tables = ABLATION.tables({"loads": [load], "notes": [], "rounds": 1})
    (table,) = (one for one in tables if one.title.startswith("Without one"))
    ((_, _, ratio, _, _, ratio_of_whole, *_),) = table.cells()
    assert (ratio, ratio_of_whole) == ("2.00", shown)


def test_a_gain_that_may_be_none_has_no_shares() -> None:
    times = {"sglang-best": [[500.0], [900.0]], "kvtier": [[400.0], [950.0]]}
    (only,) = shares(rows(times), list(times)).values()
    assert only["ms"] == {"value": 25.0, "low": -50.0, "high": 100.0}
    assert only["share"] == {"value": None, "low": None, "high": None}


def test_what_was_not_measured_has_no_share() -> None:
    assert shares([], ["sglang-best", "kvtier"]) == {}
    assert without(rows({"store": [[1.0]]}), ["store", "kvtier"]) == {}
    half = rows({"store": [[2.0], [9.0]], "kvtier": [[1.0]]})
    (gain,) = shares(half, ["store", "kvtier"]).values()
    assert gain["ms"]["value"] == 1.0, "rounds without a partner make no pair"


def test_a_load_without_a_round_of_all_has_a_page_and_a_lost_pace_is_said() -> None:
    arm = {
        "ttft_ms": {"mean": 1.0},
        "requests": 2,
        "errors": 0,
        "rounds": [{"complete": True}],
        "pace": {"valid": False},
    }
    load = {
        "name": "load",
        "tried": [],
        "arms": {"sglang-best": arm, "kvtier": arm},
        "share": {},
        "without": {},
    }
    result = {"settings": {}, "samples": [], "notes": [], "rounds": 2, "loads": [load]}
    result["device"] = {"paced": {"profile": "h100-llama8b"}}
    lost = "The paced device did not keep pace: sglang-best at load, kvtier at load."
    assert lost in ABLATION.page(result)


def test_returning_sessions_have_an_ablation_of_their_requests_after_the_first(
    kvtier: Command, tmp_path: Path
) -> None:
    words = ("--returning", "--host-ratio", "4", "--rate", "500", "--arms", "sglang-best,kvtier")
    done = kvtier(tmp_path, *LOAD, *words)
    assert done.status == 0, done.err
    (load,) = done.result["loads"]
    assert {row["turn"] for row in done.result["samples"]} == {2}
    for arm in load["arms"].values():
        assert (arm["requests"], arm["errors"], arm["equal_tokens_fraction"]) == (4, 0, 1.0)
    assert all(one["ttft_ms"]["mean"] is not None for one in load["tried"])
