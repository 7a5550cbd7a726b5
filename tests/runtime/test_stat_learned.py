"""`kvtier stat`: the speeds that servers learned and keep in a store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_kvtier.cli import main
from sgl_kvtier.config import StoreConfig
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.runtime.records.cost_profile import NAME, Profile
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.engine import open_store

PROFILE = Profile(
    {"device": "cpu"},
    {"fixed_s": 0.002, "per_token_s": 0.0001, "per_token_position_s": 1e-9},
    {"storage-device": 3 << 20},
    30,
    {"storage-device": 9},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an identity in a store."""
    config = StoreConfig(path=str(tmp_path / "store"), min_free_bytes=0)
    open_store(config, Identity({"model": "lab"}, name="lab"), "tp0").close()
    (found,) = (tmp_path / "store").glob("lab-*")
    return found


def test_what_was_learned_is_told_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost_profile.write(folder / NAME, PROFILE)
    assert main(["stat", str(folder.parent)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{folder.name}: learned from 30 chunks and 9 transfers on cpu" in said
    assert "a chunk takes 2.00 ms, 100.00 us per token, and 1.000 ns per token" in said
    assert "links: storage-device 3.0 MiB/s" in said


def test_what_was_learned_is_in_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost_profile.write(folder / NAME, PROFILE)
    assert main(["stat", str(folder.parent), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert row["learned"] == {
        "conditions": {"device": "cpu"},
        "prefill": PROFILE.prefill,
        "links_bytes_per_s": {"storage-device": 3 << 20},
        "restore": {},
        "chunks": 30,
        "transfers": {"storage-device": 9},
        "written_s": 0.0,
    }


@pytest.mark.parametrize("text", [None, "{"])
def test_a_store_without_a_profile_is_listed_all_the_same(
    folder: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (folder / NAME).write_text(text)
    assert main(["stat", str(folder.parent), "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["namespaces"]
    assert row["learned"] is None


def test_a_profile_of_an_unknown_device_and_no_link_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost_profile.write(folder / NAME, replace(PROFILE, conditions={}, links={}, transfers={}))
    assert main(["stat", str(folder.parent)]) == 0
    assert "links: none measured yet" in " ".join(capsys.readouterr().out.split())
