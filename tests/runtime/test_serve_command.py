"""What `kvtier serve` says before it becomes the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_kvtier import cli

OFF = "on a GPU restoration is off"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What --print says of a server of some model."""
    assert cli.main(["serve", "m", *words, "--print"]) == 0
    return capsys.readouterr().out


def test_on_a_card_it_says_that_restoration_is_off_and_what_turns_it_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(capsys, "--store", str(tmp_path / "s"), "--device", "cuda")
    assert OFF in said and '"restore": "both"' in said
    assert "sglang.launch_server" in said.splitlines()[-1]


def test_nothing_is_said_where_restoration_is_on_or_was_settled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert OFF not in printed(capsys, "--store", str(tmp_path / "s"), "--device", "cpu")
    for mode in ("both", "off"):
        config = tmp_path / f"{mode}.json"
        config.write_text(json.dumps({"store": {"path": "/s"}, "policy": {"restore": mode}}))
        assert OFF not in printed(capsys, "--config", str(config), "--device", "cuda")
