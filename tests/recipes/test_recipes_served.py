"""The quickest recipe on a real server: `scripts/recipes` runs all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gauntlet
import pytest
import speed
from forking import Forked

from sgl_kvtier.lab.outside.server import Launch

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def recipe_of(name: str) -> tuple[gauntlet.Recipe, dict[str, str]]:
    """A recipe, and the flags that are dropped of all of them."""
    recipes, dropped = gauntlet.load()
    return next(one for one in recipes if one.name == name), dropped


def test_a_recipe_is_stored_restored_and_looked_ahead_with_equal_answers(tmp_path):
    recipe, dropped = recipe_of("llama-3.1-405b")
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert all(row[name] for name in gauntlet.COLUMNS), str(row)
    assert row["reason"] == "" and row["dropped"] == ["--model-path", "--tp"]
    assert row["computed_tokens"] > 0 and row["loaded_tokens"] > 0, "from both ends"
    assert row["rows"]["kv"]["checked"] > gauntlet.PROMPT and row["rows"]["kv"]["wrong"] == 0


ANCHORS = [
    ("gpt-oss-120b", "window"),
    ("qwen3-next-80b-a3b", "state"),
    ("deepseek-v4-agentx", "compressor state"),
]
"""Models that need more than KV pages at the end of a prefix, and what that is."""


@pytest.mark.parametrize(("name", "kind"), ANCHORS)
def test_windows_and_states_are_restored_with_what_the_front_computed(tmp_path, name, kind):
    recipe, dropped = recipe_of(name)
    row = gauntlet.run(recipe, dropped, tmp_path / "server", fork=True)
    assert row["restores"] and row["equal"], str(row)
    assert row["computed_tokens"] > 0 and row["loaded_tokens"] > 0, "from both ends"
    assert row["looks_ahead"] and row["reason"] == "", str(row)
    assert row["rows"][kind]["checked"] > 0
    assert [one["wrong"] for one in row["rows"].values()] == [0] * len(row["rows"])


@pytest.mark.slow
def test_keys_and_values_of_different_widths_are_stored_and_read_with_their_windows(tmp_path):
    recipe, dropped = recipe_of("gpt-oss-120b")
    recipe = replace(
        recipe,
        name="mimo-v2-flash",
        shape="mimo-v2",
        command="python -m sglang.launch_server --model-path XiaomiMiMo/MiMo-V2-Flash",
    )
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["stores"] and row["equal"], str(row)
    assert not row["restores"] and "K and V of different widths" in row["reason"], str(row)
    assert row["rows"]["kv"]["checked"] > 0 and row["rows"]["window"]["checked"] > 0
    assert [one["wrong"] for one in row["rows"].values()] == [0] * len(row["rows"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), ANCHORS)
def test_two_ranks_restore_windows_and_states_in_step(tmp_path, name, kind):
    """SGLang compares what the ranks decide, and ends the server when they differ."""
    recipe, dropped = recipe_of(name)
    command = recipe.command.replace("--tp 8", "--tp 2")
    recipe = replace(recipe, command=f"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER=1 {command}")
    del dropped["--tp"]
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["restores"] and row["equal"], str(row)
    assert row["computed_tokens"] > 0 and row["loaded_tokens"] > 0, "from both ends"
    assert len(list((tmp_path / "server" / "counts").glob("*.json"))) == 2
    assert row["rows"][kind]["checked"] > 0
    assert [one["wrong"] for one in row["rows"].values()] == [0] * len(row["rows"])


@pytest.mark.parametrize(
    ("flag", "restore", "found"),
    [
        ("", "both", 1152),
        pytest.param("", "off", 1024, marks=pytest.mark.slow, id="as SGLang has it"),
        pytest.param(" --mamba-track-interval 8192", "both", 960, marks=pytest.mark.slow),
    ],
)
def test_a_next_turn_finds_the_answer_before_it(tmp_path, monkeypatch, flag, restore, found):
    """A prompt of 1,000 tokens, an answer of 200, and 40 more: what of them is not computed again,
    by how often states are kept while tokens are generated.
    """
    recipe, dropped = recipe_of("qwen3-next-80b-a3b")
    recipe = replace(recipe, command=recipe.command + flag)
    for name, value in {"restore": restore, "prefetch": "off", "eviction": "lru"}.items():
        monkeypatch.setitem(gauntlet.POLICY, name, value)
    folder = tmp_path / "server"
    folder.mkdir()
    launch = Launch(
        tuple(gauntlet.arguments(recipe, dropped, folder)), gauntlet.environment(recipe, folder)
    )
    with Forked(recipe.name, launch, folder) as server:
        server.wait_until_healthy(gauntlet.START_S)
        asked = gauntlet.Asked(server)
        prompt = [16 + n % 200 for n in range(1000)]
        answer, _ = asked.answer(prompt, 200)
        _, meta = asked.answer([*prompt, *answer, *range(20, 60)], 1)
        shared = [16 + n * 7 % 211 for n in range(1000)]
        others = [asked.answer([*shared, *[30 + n] * 200], 1)[1] for n in range(3)]
    assert len(answer) == 200 and meta["cached_tokens"] == found
    # Where prompts part SGLang keeps a state when the second one comes.
    assert [one["cached_tokens"] for one in others] == [0, 0, 960]


@pytest.mark.slow
def test_windows_are_restored_with_a_draft(tmp_path):
    recipe, dropped = recipe_of("gpt-oss-120b-eagle3")
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["restores"] and row["equal"], str(row)
    assert row["accept_length"] == [4.0, 4.0]
    assert row["rows"]["window"]["checked"] > 0 and row["rows"]["draft kv"]["checked"] > 0
    assert [one["wrong"] for one in row["rows"].values()] == [0] * len(row["rows"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "proof"),
    [
        ("gpt-oss-120b", "window", "auto"),
        ("gpt-oss-120b", "window", "off"),
        ("qwen3-next-80b-a3b", "state", "auto"),
        ("qwen3-next-80b-a3b", "state", "off"),
    ],
)
def test_windows_and_states_that_do_not_come_are_seen(tmp_path, monkeypatch, name, kind, proof):
    """Loads leave them out while the file of $DRAFTS is there (`tests/runtime/changed_site`). With
    the proof the comparison of pages finds it, else forwards do.
    """
    recipe, dropped = recipe_of(name)
    leave_out(monkeypatch)
    monkeypatch.setitem(gauntlet.POLICY, "proof", proof)
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["restores"] is (proof == "off") and row["rows"]["kv"]["wrong"] == 0, str(row)
    assert bool(row["rows"][kind]["wrong"]) is (proof == "off")
    log = (tmp_path / "server" / "server.log").read_text(errors="replace")
    found = re.search(
        "restoration is not right on this device.* in the (window keys|recurrent states)", log
    )
    assert bool(found) is (proof == "auto")


@pytest.mark.slow
@pytest.mark.parametrize("proof", ["auto", "off"])
def test_compressor_states_that_do_not_come_are_seen(tmp_path, monkeypatch, proof):
    recipe, dropped = recipe_of("deepseek-v4-agentx")
    leave_out(monkeypatch, "deepseek_v4_c4_state")
    monkeypatch.setitem(gauntlet.POLICY, "proof", proof)
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert (row["restores"], row["equal"]) == (proof == "off", proof == "auto"), str(row)
    assert row["rows"]["window"]["wrong"] == 0, "nothing else was left out"
    assert bool(row["rows"]["compressor state"]["wrong"]) is (proof == "off")
    log = (tmp_path / "server" / "server.log").read_text(errors="replace")
    found = re.search("restoration is not right on this device.* in the c4 state pages", log)
    assert bool(found) is (proof == "auto")


def leave_out(monkeypatch: pytest.MonkeyPatch, pool: str = "") -> None:
    """Has the next server load KV pages alone, or all but those of one of DeepSeek V4's pools."""
    real = gauntlet.environment

    def leaving_out(*given: Any) -> dict[str, str]:
        env = real(*given)
        Path(env["DRAFTS"]).write_text(pool)
        return env

    monkeypatch.setattr(gauntlet, "environment", leaving_out)


@pytest.mark.slow
def test_a_draft_whose_rows_do_not_come_is_seen(tmp_path, monkeypatch):
    """Loads leave it out while the file of $DRAFTS is there (`tests/runtime/changed_site`)."""
    recipe, dropped = recipe_of("kimi-k2.5-eagle3")
    leave_out(monkeypatch)
    monkeypatch.setitem(gauntlet.POLICY, "proof", "off")  # which would find it first
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["restores"] and row["rows"]["kv"]["wrong"] == 0, str(row)
    assert row["rows"]["draft kv"]["wrong"] > 0
    assert row["equal"] is False and row["accept_length"][1] < row["accept_length"][0]


@pytest.mark.slow
def test_a_recipe_is_timed_against_the_best_split(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "RATIOS", (1.0,))
    monkeypatch.setattr(speed, "ROUNDS", 1)
    recipe, dropped = recipe_of("qwen3-next-80b-a3b")
    row = speed.run(recipe, dropped, tmp_path / "server")
    (cell,) = row["cells"]
    assert 0 < cell["loaded_tokens"] < 2 * speed.PREFIX, "both ends, twice"
    assert 0 < cell["best_ms"] < min(cell["computing_ms"], cell["loading_ms"])
    assert "qwen3-next-80b-a3b | 1 |" in speed.table([row])
