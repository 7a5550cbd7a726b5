"""The quickest recipe on a real server: `scripts/recipes` runs all of them."""

from __future__ import annotations

from pathlib import Path

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
