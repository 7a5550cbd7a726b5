"""The table of copies, its machinery on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.cli import main

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from sgl_kvtier.lab.gpu import copy_table
from sgl_kvtier.runtime.restore.copy_device import CpuCopies

SMALL = ["--device", "cpu", "--layers", "2", "--heads", "1", "--head-dim", "32", "--mib", "1"]


def table(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "table.json"
    words = [*SMALL, "--pages", "16", "--rounds", "1", "--json", str(target), *more]
    status = main(["bench", "copy-table", *words])
    return status, json.loads(target.read_text())


def test_every_way_has_a_row_and_what_is_logged_is_not_measured_again(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    status, found = table(tmp_path, "--log", str(log))
    assert status == 0
    ways = [row["way"] for row in found["rows"]]
    assert ways == ["chosen by the product, page_first_direct", copy_table.CEILING]
    assert all(row["gbps"] > 0 and not row["note"] for row in found["rows"])
    text = log.read_text()
    assert (
        table(tmp_path, "--log", str(log))[1]["rows"] == found["rows"] and log.read_text() == text
    )


def test_a_way_that_copies_to_the_wrong_page_is_named_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = CpuCopies.begin
    monkeypatch.setattr(
        CpuCopies,
        "begin",
        lambda self, host, device, fence: begin(self, host.roll(16), device, fence),
    )
    status, found = table(tmp_path)
    assert status == 1
    assert (found["rows"][0]["note"], found["rows"][0]["gbps"]) == ("wrong", None)


def test_a_way_that_raises_costs_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(CpuCopies, "begin", fails)
    status, found = table(tmp_path)
    assert status == 1
    assert [row["note"] for row in found["rows"]] == ["RuntimeError: no kernel", ""]


@pytest.mark.skipif(copy_table.torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "copy-table"]) != 0
    assert "no CUDA device" in capsys.readouterr().err
