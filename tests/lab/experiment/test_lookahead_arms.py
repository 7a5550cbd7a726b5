"""The arms of `kvtier compare lookahead`: what differs between them, and how large their pools are."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
SETUP = Setup(
    "model",
    "m",
    "cpu",
    PAGE,
    512,
    sections={"policy": {"min_restore_tokens": 64}, "lab": {"throttle": {"read_gbps": 2.0}}},
)


def load(contexts: int = 8, tokens: int = 1000) -> Any:
    rows = [{"output_tokens": 50, "longest_tokens": tokens} for _ in range(contexts)]
    return SimpleNamespace(
        context_tokens=contexts * tokens, longest_tokens=tokens, rows=rows, sessions=rows
    )


def launched(
    folder: Path, lookahead: list[int], arms: list[str] | None = None
) -> dict[str, tuple[tuple[str, ...], dict | None]]:
    """Per arm its arguments, and its settings file without the store's own folder."""
    setup = arm_setup(SETUP, pools(load(), 3.0, PAGE), "auto", lookahead)
    found = {}
    for arm in arms or arm_names(None, lookahead):
        launch = prepare(arm, setup, folder / arm)
        settings = None
        if has_storage(arm, setup):
            settings = json.loads((folder / arm / "storage.json").read_text())
            if "store" in settings:
                load_config(folder / arm / "storage.json")  # every setting is one the server takes
                del settings["store"]
        arguments = tuple(word for word in launch.arguments if str(folder) not in word)
        found[arm] = (arguments, settings)
    return found


def test_the_arms_are_those_promised_in_their_order() -> None:
    assert arm_names(None, [AUTO]) == [
        "recompute",
        "hicache-file",
        "restore",
        "lookahead",
        "next-use",
        "kvtier",
        "oracle",
    ]
    assert arm_names(["oracle", "restore"], [AUTO]) == ["restore", "oracle"]


def test_kvtier_arms_differ_in_the_policy_section_only(tmp_path: Path) -> None:
    arms = launched(tmp_path, [AUTO])
    ours = [arms[name] for name in ("restore", "lookahead", "next-use", OURS)]
    assert len({arguments for arguments, _ in ours}) == 1
    rest = [
        {k: v for k, v in settings.items() if k != "policy"} for _, settings in ours if settings
    ]
    assert all(one == rest[0] for one in rest)
    assert rest[0]["lab"] == {"throttle": {"read_gbps": 2.0}}


def test_each_arm_adds_one_part_to_the_one_before(tmp_path: Path) -> None:
    arms = launched(tmp_path, [AUTO])
    policies = [arms[name][1]["policy"] for name in ("restore", "lookahead", "next-use", OURS)]  # type: ignore[index]
    changed = [{k for k in b if a[k] != b[k]} for a, b in itertools.pairwise(policies)]
    assert changed == [{"prefetch"}, {"eviction"}, {"sessions"}]
    assert policies[0] == {
        "min_restore_tokens": 64, "prefetch": "off", "eviction": "lru", "sessions": False, "restore": "auto", "rules": "",
    }  # fmt: skip


def test_the_oracle_is_recompute_with_a_device_pool_for_everything(tmp_path: Path) -> None:
    arms = launched(tmp_path, [AUTO])
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
    names = arm_names(None, [0, 2, AUTO])
    assert names == [
        "recompute",
        "hicache-file",
        "restore",
        "lookahead",
        "next-use",
        "kvtier-k0",
        "kvtier-k2",
        "kvtier",
        "oracle",
    ]
    arms = launched(tmp_path, [0, 2, AUTO])
    ks = {
        name: (arms[name][1] or {})["policy"]["rules"]
        for name in names
        if name.startswith(OURS) or name == "lookahead"
    }
    assert ks == {
        "lookahead": "",
        "kvtier-k0": "sgl_kvtier.lab.rules:K0",
        "kvtier-k2": "sgl_kvtier.lab.rules:K2",
        "kvtier": "",
    }
    policies = [
        {k: v for k, v in (arms[name][1] or {})["policy"].items() if k != "rules"}
        for name in ("kvtier", "kvtier-k0")
    ]
    assert policies[0] == policies[1]


def test_one_lookahead_is_that_of_every_arm_that_moves_pages_ahead(tmp_path: Path) -> None:
    arms = launched(tmp_path, [4])
    ks = [
        (arms[name][1] or {})["policy"]["rules"]
        for name in ("restore", "lookahead", "next-use", "kvtier")
    ]
    four = "sgl_kvtier.lab.rules:K4"
    assert ks == ["", four, four, four]


def test_an_arms_rules_are_the_servers_own_with_so_many_iterations() -> None:
    assert [rules_of(f"sgl_kvtier.lab.rules:K{k}").lookahead for k in (0, 2, 4)] == [0, 2, 4]
    assert rules_of("").lookahead == AUTO


@pytest.mark.parametrize("wanted", [["recompute", "nonsense"], [], ["oracle", "oracle"]])
def test_wrong_arms_are_refused_with_those_there_are(wanted: list[str]) -> None:
    with pytest.raises(BenchError, match=", ".join(LOOKAHEAD_ARMS)):
        arm_names(wanted, [AUTO])
