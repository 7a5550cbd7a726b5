"""`kvtier profile`: what lies in a store, told and computed further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.runtime.records.cost_profile import NAME, Profile

CONDITIONS = {"device": "cpu", "chunk_tokens": 1024, "page_tokens": 64, "page_bytes": 64 * 1000}
BALANCED = Profile(
    CONDITIONS,
    {"fixed_s": 0.0, "per_token_s": 0.001, "per_token_position_s": 0.0},
    {"storage-device": 1e6},
    30,
    {"storage-device": 9},
)
"""A token takes a millisecond to compute and a millisecond to load."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for name in ("model-a", "model-b"):
        (tmp_path / name).mkdir()
    cost_profile.write(tmp_path / "model-a" / NAME, BALANCED)
    (tmp_path / "model-b" / NAME).write_text("{")
    return tmp_path


def test_at_balance_both_together_take_half_as_long(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(store), "--lengths", "4k", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == "kvtier.profile/1"
    (profile,) = result["profiles"]
    (one,) = profile["predictions"]
    assert (profile["name"], one["tokens"], one["link"]) == ("model-a", 4096, "storage-device")
    assert profile["links_bytes_per_s"] == {"storage-device": 1e6}
    assert profile["transfers"] == {"storage-device": 9}
    assert one["compute_s"] == pytest.approx(4.096)
    assert one["load_s"] == pytest.approx(4.096)
    assert one["both_s"] == pytest.approx(2.048)
    assert one["computed_tokens"] == 2048
    assert one["speedup_vs_best_single"] == pytest.approx(2.0)


def test_the_table_says_what_it_was_learned_from(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(store)]) == 0
    out = capsys.readouterr().out
    assert "model-a" in out
    assert "30 chunks and 9 transfers on cpu" in " ".join(out.split())


def test_without_a_profile_it_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tmp_path)]) == 1
    assert "nothing was learned" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "none")]) == 1
    assert "no store at" in capsys.readouterr().err
