"""The smaller commands: serve, model, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_kvtier.cli import main


def test_model_writes_a_model_and_prints_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "tiny-llama", "--folder", str(tmp_path)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_model_without_a_name_lists_what_there_is(tmp_path: Path) -> None:
    out = tmp_path / "models.json"
    assert main(["model", "--json", str(out)]) == 0
    assert [one["name"] for one in json.loads(out.read_text())["models"]][:2] == [
        "lab-mha",
        "lab-gqa",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--restore", "off", "--config", "b"], "the section policy"),
        (["--store", "a", "--config", "b"], "not both"),
        (["--config", "no_such_file.json"], "cannot read no_such_file.json"),
    ],
)
def test_serve_says_what_is_missing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", *arguments, "--print"]) == 1
    assert message in capsys.readouterr().err


def test_replay_of_a_server_that_is_not_there_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", "http://127.0.0.1:9", "--trace", "generated:swe-mini"]) == 1
    assert "kvtier serve" in capsys.readouterr().err


def test_an_address_without_a_scheme_says_how_it_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "localhost:9"])
    said = capsys.readouterr().err
    assert "give the scheme, as in http://localhost:9" in said and said.count("\n") == 1
