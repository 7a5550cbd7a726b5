"""`kvtier compare lookahead`: what differs between its arms, how large their pools are, and whole
runs with a stand-in where SGLang would be.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Command, Done

from sgl_kvtier.config import load_config
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import BASELINE, OURS, Setup, has_storage, prepare
from sgl_kvtier.lab.experiment.scenarios.lookahead import (
    AUTO,
    LOOKAHEAD_ARMS,
    ORACLE,
    arm_names,
    arm_setup,
    pools,
)
from sgl_kvtier.policy.rules import rules_of

PAGE = 16
KVTIER = ("restore", "lookahead", "next-use", OURS)
SETUP = Setup(
    *("model", "m", "cpu", PAGE, 512),
    sections={"policy": {"min_restore_tokens": 64}, "lab": {"throttle": {"read_gbps": 2.0}}},
)
SMALL = (
    *("compare", "lookahead", "--device", "cpu", "--lab-model", "tiny-qwen3"),
    *("--trace", "generated:swe-mini", "--sessions", "4", "--turns", "2", "--divisor", "16"),
)


def load(contexts: int = 8, tokens: int = 1000) -> Any:
    rows = [{"output_tokens": 50, "longest_tokens": tokens} for _ in range(contexts)]
    return SimpleNamespace(
        context_tokens=contexts * tokens, longest_tokens=tokens, rows=rows, sessions=rows
    )


def launched(folder: Path, *lookahead: int) -> dict[str, tuple[tuple[str, ...], dict]]:
    """Per arm its arguments, and its settings file without the store's own folder."""
    setup = arm_setup(SETUP, pools(load(), 3.0, PAGE), "auto", lookahead)
    found = {}
    for arm in arm_names(None, lookahead):
        launch = prepare(arm, setup, folder / arm)
        settings = {}
        if has_storage(arm, setup):
            settings = json.loads((folder / arm / "storage.json").read_text())
            if "store" in settings:
                load_config(folder / arm / "storage.json")  # every setting is one the server takes
                del settings["store"]
        arguments = tuple(word for word in launch.arguments if str(folder) not in word)
        found[arm] = (arguments, settings)
    return found


def test_kvtier_arms_differ_in_the_policy_section_only_by_one_part_each(tmp_path: Path) -> None:
    arms = launched(tmp_path, AUTO)
    assert list(arms) == ["recompute", "hicache-file", *KVTIER, "oracle"]
    assert len({arms[name][0] for name in KVTIER}) == 1
    settings = [arms[name][1] for name in KVTIER]
    policies = [one.pop("policy") for one in settings]
    assert all(one == settings[0] for one in settings)
    assert settings[0]["lab"] == {"throttle": {"read_gbps": 2.0}}
    changed = [{k for k in b if a[k] != b[k]} for a, b in itertools.pairwise(policies)]
    assert changed == [{"prefetch"}, {"eviction"}, {"sessions"}]
    assert policies[0] == {
        "min_restore_tokens": 64, "prefetch": "off", "eviction": "lru", "sessions": False, "restore": "auto", "rules": "",
    }  # fmt: skip


def test_the_oracle_is_recompute_with_a_device_pool_for_everything(tmp_path: Path) -> None:
    arms = launched(tmp_path, AUTO)
    plain, oracle = (list(arms[name][0]) for name in (BASELINE, ORACLE))
    at = plain.index("--max-total-tokens") + 1
    small, large = int(plain.pop(at)), int(oracle.pop(at))
    assert plain == oracle
    assert small == pools(load(), 3.0, PAGE).device
    assert large > 8 * 1000 + 8 * 50


@pytest.mark.parametrize("over", [1.0, 1.5, 3.0, 5.0])
def test_the_device_pool_is_the_share_asked_for_and_host_memory_has_half_of_the_rest(
    over: float,
) -> None:
    sizes = pools(load(), over, PAGE)
    assert sizes.needed / over <= sizes.device < sizes.needed / over + PAGE
    rest = sizes.needed - sizes.device
    assert sizes.device + rest / 2 <= sizes.host < sizes.device + rest / 2 + 3 * PAGE
    assert sizes.device % PAGE == sizes.host % PAGE == sizes.oracle % PAGE == 0
    assert sizes.host_ratio > 1


def test_a_device_pool_that_cannot_hold_one_request_is_refused_with_what_is_possible() -> None:
    with pytest.raises(BenchError, match=r"at most 7\.8 is possible: take more with --sessions"):
        pools(load(), 8.0, PAGE)


def test_several_lookaheads_make_an_arm_each_and_auto_keeps_the_name(tmp_path: Path) -> None:
    arms = launched(tmp_path, 0, 2, AUTO)
    swept = ("kvtier-k0", "kvtier-k2", OURS)
    assert list(arms) == ["recompute", "hicache-file", *KVTIER[:3], *swept, "oracle"]
    policies = {name: arms[name][1]["policy"] for name in ("lookahead", *swept)}
    assert {name: policy.pop("rules") for name, policy in policies.items()} == {
        "lookahead": "",
        "kvtier-k0": "sgl_kvtier.lab.rules:K0",
        "kvtier-k2": "sgl_kvtier.lab.rules:K2",
        "kvtier": "",
    }
    assert policies["kvtier"] == policies["kvtier-k0"]


def test_one_lookahead_is_that_of_every_arm_that_moves_pages_ahead(tmp_path: Path) -> None:
    arms, four = launched(tmp_path, 4), "sgl_kvtier.lab.rules:K4"
    assert [arms[name][1]["policy"]["rules"] for name in KVTIER] == ["", four, four, four]
    assert (rules_of(four).lookahead, rules_of("").lookahead) == (4, AUTO)


@pytest.mark.parametrize("wanted", [["recompute", "nonsense"], [], ["oracle", "oracle"]])
def test_wrong_arms_are_refused_with_those_there_are(wanted: list[str]) -> None:
    with pytest.raises(BenchError, match=", ".join(LOOKAHEAD_ARMS)):
        arm_names(wanted, [AUTO])


@pytest.fixture
def compare(kvtier: Command, tmp_path: Path) -> Command:
    """kvtier compare lookahead on a small load, its files in the test's folder."""

    def run(*extra: str, task: str = "") -> Done:
        return kvtier(tmp_path, *SMALL, *extra, task=task)

    return run


def test_every_arm_replays_every_request_in_every_cell_and_round_on_a_server_of_its_own(
    compare: Command, tmp_path: Path
) -> None:
    arms = ["recompute", "hicache-file", "restore", "kvtier", "oracle"]
    extra = ("--gaps", "0,0.05", "--oversubscription", "1.5", "--rounds", "2")
    done = compare(*extra, "--arms", ",".join(arms), "--html", str(tmp_path / "page.html"))
    assert done.status == 0, done.err
    result = done.result
    requests = result["workload"]["requests"]
    cells = [(cell["oversubscription"], cell["gap_s"]) for cell in result["cells"]]
    assert cells == [(1.5, 0.0), (1.5, 0.05)]
    for cell in result["cells"]:
        assert list(cell["arms"]) == arms
        assert {one["requests"] for one in cell["arms"].values()} == {2 * requests}
        assert {one["equal_tokens_fraction"] for one in cell["arms"].values()} == {1.0}
    assert {one["requests"] for one in result["arms"].values()} == {4 * requests}
    for name in ("1.5x-0s", "1.5x-0.05s"):
        log = tmp_path / "work" / name / "kvtier" / "server.log"
        assert log.read_text().count("ready") == 2
    # Arms take turns, and a cell's rounds go on from those of the cell before.
    order = list(dict.fromkeys((s["round"], s["arm"], s["gap_s"]) for s in result["samples"]))
    assert [arm for number, arm, _ in order if number == 2] == [*arms[1:], arms[0]]
    rounds = {(number, gap_s) for number, _, gap_s in order}
    assert rounds == {(1, 0.0), (2, 0.0), (3, 0.05), (4, 0.05)}
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
    for cell in both["cells"]:
        made = {arm: figures["requests"] for arm, figures in cell["arms"].items()}
        assert made == {"recompute": requests, "kvtier": requests, "oracle": requests}
    assert both["cells"][0]["arms"] == one["cells"][0]["arms"]
    oracles = [cell["arms"]["oracle"]["ttft_ms"] for cell in both["cells"]]
    assert oracles[0] == oracles[1]
    kept = [json.loads(line)["round"] for line in log.read_text().splitlines()[1:]]
    assert [(one["place"], one["arm"]) for one in kept] == [
        ("1.5x, pause 0 s", "recompute"), ("1.5x, pause 0 s", "kvtier"), ("pause 0 s", "oracle"),
        ("1.2x, pause 0 s", "recompute"), ("1.2x, pause 0 s", "kvtier"),
    ]  # fmt: skip
    other = compare(*arms, "--oversubscription", "1.5", "--lookahead", "2")
    assert other.status == 1
    assert "made with rules" in other.err
