"""Stock and ours where nothing is restored: paired rounds of new prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command

from sgl_kvtier.lab.experiment.scenarios.overhead import (
    AHEAD,
    OverheadOptions,
    new_prompts,
    overhead_figures,
)


def test_prompts_are_the_same_for_all_arms_and_new_in_every_round() -> None:
    options = OverheadOptions(requests=3, prompt_tokens=40)
    assert new_prompts(options, 1) == new_prompts(options, 1)
    heads = {tuple(ids[:16]) for number in range(5) for ids in new_prompts(options, number)}
    assert len(heads) == 15


def test_ratios_are_taken_round_by_round_and_only_where_all_arms_have_one() -> None:
    rounds = [
        {"arm": arm, "round": number, "tpot_ms": time, "ttft_ms": 1.0, "cached_tokens": 0}
        for arm, times in (("hicache-file", (10, 20, 40)), ("kvtier", (11, 21)))
        for number, time in enumerate(times, 1)
    ]
    found = overhead_figures(rounds, ["hicache-file", "kvtier"])
    ratio = found["ratios"]["kvtier/hicache-file"]["tpot_ms"]
    assert ratio["n"] == 2
    assert ratio["median"] == pytest.approx((1.1 + 1.05) / 2)
    assert found["arms"]["hicache-file"]["tpot_ms"] == 15


def test_what_looks_ahead_is_compared_with_stock_and_with_what_only_restores() -> None:
    arms = ["hicache-file", "kvtier", AHEAD]
    rounds = [
        {"arm": arm, "round": 1, "tpot_ms": time, "ttft_ms": 1.0, "cached_tokens": 0}
        for arm, time in zip(arms, (10, 11, 22), strict=True)
    ]
    ratios = {
        pair: metrics["tpot_ms"]["median"]
        for pair, metrics in overhead_figures(rounds, arms)["ratios"].items()
    }
    assert ratios == {
        "kvtier/hicache-file": 1.1,
        f"{AHEAD}/hicache-file": 2.2,
        f"{AHEAD}/kvtier": 2.0,
    }


def test_the_command_measures_every_arm_in_every_round(kvtier: Command, tmp_path: Path) -> None:
    small = "bench restore-overhead --lab-model tiny-qwen3 --rounds 2"
    done = kvtier(tmp_path, *small.split())
    result = done.result
    assert done.status == 0, done.err
    assert result["schema"] == "kvtier.restore-overhead/1"
    assert "Nothing to restore" in done.out
    assert {row["errors"] for row in result["rounds"]} == {0}
    assert [(row["round"], row["arm"]) for row in result["rounds"]] == [
        (1, "hicache-file"), (1, "kvtier-off"), (1, "kvtier"), (2, "kvtier"), (2, "kvtier-off"), (2, "hicache-file"),
    ]  # fmt: skip
    assert set(result["ratios"]) == {"kvtier/hicache-file", "kvtier/kvtier-off"}
