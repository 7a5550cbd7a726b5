"""The quickest recipe on a real server: `scripts/recipes` runs all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gauntlet
import pytest

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def test_a_recipe_is_stored_restored_and_looked_ahead_with_equal_answers(tmp_path: Path) -> None:
    recipes, dropped = gauntlet.load()
    recipe = next(one for one in recipes if one.name == "llama-3.1-405b")
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert all(row[name] for name in gauntlet.COLUMNS), row
    assert row["reason"] == "" and row["dropped"] == ["--model-path", "--tp"]
    assert row["computed_tokens"] > 0 and row["loaded_tokens"] > 0, "from both ends"
    assert row["rows"]["kv"]["checked"] > gauntlet.PROMPT and row["rows"]["kv"]["wrong"] == 0


def test_windows_are_restored_with_what_the_front_computed(tmp_path: Path) -> None:
    recipes, dropped = gauntlet.load()
    recipe = next(one for one in recipes if one.name == "gpt-oss-120b")
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["restores"] and row["equal"], row
    assert row["computed_tokens"] > 0 and row["loaded_tokens"] > 0, "from both ends"
    assert "pages of windows do not follow" in row["reason"] and not row["looks_ahead"]
    assert row["rows"]["window"]["checked"] > 0
    assert [kind["wrong"] for kind in row["rows"].values()] == [0] * len(row["rows"])


@pytest.mark.slow
def test_windows_that_do_not_come_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads leave them out while the file of $DRAFTS is there (`tests/runtime/changed_site`)."""
    recipes, dropped = gauntlet.load()
    recipe = next(one for one in recipes if one.name == "gpt-oss-120b")
    leave_out(monkeypatch)
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["restores"] and row["rows"]["kv"]["wrong"] == 0, row
    assert row["rows"]["window"]["wrong"] > 0


def leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the next server load KV pages alone."""
    real = gauntlet.environment

    def leaving_out(*given: Any) -> dict[str, str]:
        env = real(*given)
        Path(env["DRAFTS"]).touch()
        return env

    monkeypatch.setattr(gauntlet, "environment", leaving_out)


@pytest.mark.slow
def test_a_draft_whose_rows_do_not_come_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads leave it out while the file of $DRAFTS is there (`tests/runtime/changed_site`)."""
    recipes, dropped = gauntlet.load()
    recipe = next(one for one in recipes if one.name == "kimi-k2.5-eagle3")
    leave_out(monkeypatch)
    monkeypatch.setitem(gauntlet.POLICY, "proof", "off")  # which would find it first
    row = gauntlet.run(recipe, dropped, tmp_path / "server")
    assert row["restores"] and row["rows"]["kv"]["wrong"] == 0, row
    assert row["rows"]["draft kv"]["wrong"] > 0
    assert row["equal"] is False and row["accept_length"][1] < row["accept_length"][0]
