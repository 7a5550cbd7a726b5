"""The table of copies, its machinery on a CPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_kvtier.cli import main

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from sgl_kvtier.lab.gpu import copy_table, copy_table_command
from sgl_kvtier.lab.gpu.pools import controller, pools
from sgl_kvtier.runtime.cuda import flashinfer_scatter
from sgl_kvtier.runtime.cuda.all_layers import AllLayers
from sgl_kvtier.runtime.cuda.flashinfer_scatter import FlashInferScatter
from sgl_kvtier.runtime.cuda.scatter import TritonScatter
from sgl_kvtier.runtime.restore import copy_device
from sgl_kvtier.runtime.restore.copy_device import CpuCopies

SMALL = ["--device", "cpu", "--mib", "1"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KV cache of this shape, and one round."""
    monkeypatch.setattr(copy_table, "SHAPE", {"layers": 2, "heads": 1, "head_dim": 32})
    monkeypatch.setattr(copy_table, "ROUNDS", 1)


def table(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    target = tmp_path / "table.json"
    words = [*SMALL, "--pages", "16", "--json", str(target), *more]
    status = main(["bench", "copy-table", *words])
    return status, json.loads(target.read_text())


@pytest.mark.parametrize(("text", "sizes"), [("16,64", [16, 64]), ("16,0", None), ("16,", None)])
def test_sizes_are_whole_numbers_above_nought(text: str, sizes: list[int] | None) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    copy_table_command.add_arguments(parser)
    if sizes is None:
        with pytest.raises(argparse.ArgumentError):
            parser.parse_args(["--pages", text])
    else:
        assert parser.parse_args(["--pages", text]).pages == sizes


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


def test_a_row_says_what_it_was_measured_on_and_counts_for_that_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log.jsonl"
    first = table(tmp_path, "--log", str(log))[1]["rows"]
    wanted = {"device": "cpu", "torch": copy_table.torch.__version__, "layers": 2, "heads": 1}
    assert all(wanted.items() <= row.items() and row["head_dim"] == 32 for row in first)
    # As if a card had measured them, then with more layers: neither is this shape on a CPU.
    log.write_text(log.read_text().replace('"device": "cpu"', '"device": "NVIDIA H100"'))
    rows = len(log.read_text().splitlines())
    table(tmp_path, "--log", str(log))
    before = log.read_text()
    assert len(before.splitlines()) == rows + len(first)
    monkeypatch.setitem(copy_table.SHAPE, "layers", 3)
    _, found = table(tmp_path, "--log", str(log))
    assert {row["layers"] for row in found["rows"]} == {3}
    assert log.read_text().startswith(before) and len(log.read_text()) > len(before)


def test_a_table_whose_time_was_over_is_no_success_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, row = tmp_path / "log.jsonl", copy_table._Bench.row
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, perf_counter=time.perf_counter)

    def slow(bench: Any, mib: int) -> dict[str, Any]:
        clock.now += 9999.0
        return row(bench, mib)

    with monkeypatch.context() as patch:
        patch.setattr(copy_table, "time", clock)
        patch.setattr(copy_table._Bench, "row", slow)
        status, found = table(tmp_path, "--log", str(log))
    assert (status, found["missing"], len(found["rows"])) == (1, 1, 1)
    assert "1 rows are missing" in capsys.readouterr().out
    status, found = table(tmp_path, "--log", str(log))
    assert (status, found["missing"], len(found["rows"])) == (0, 0, 2)


@pytest.mark.parametrize("where", ["__init__", "begin"])
def test_a_way_that_failed_costs_its_row_alone_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    log = tmp_path / "log.jsonl"

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory\non this device")

    with monkeypatch.context() as patch:
        patch.setattr(CpuCopies, where, fails)
        status, found = table(tmp_path, "--log", str(log))
        notes = [row["note"] for row in found["rows"]]
        assert (status, notes) == (1, ["RuntimeError: out of memory", ""])
    status, found = table(tmp_path, "--log", str(log))
    assert (status, [row["note"] for row in found["rows"]]) == (0, ["", ""])


def test_a_log_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"about": {"seed": 0}}\n')
    assert main(["bench", "copy-table", *SMALL, "--log", str(log)]) != 0
    assert "Name another --log" in capsys.readouterr().err


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


def test_on_a_card_every_way_to_scatter_and_each_of_sglangs_kernels_is_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[Any] = []

    def prepare(made: Any) -> None:
        prepared.append(made)

    for scatter in (TritonScatter, FlashInferScatter):
        monkeypatch.setattr(scatter, "prepare", prepare)
    monkeypatch.setattr(copy_device, "StagedCopies", lambda _controller, scatter, *_rest: scatter)
    monkeypatch.setattr(copy_table, "StreamCopies", lambda *how: how[2:])
    monkeypatch.setattr(copy_table, "_memory", lambda: SimpleNamespace(unread=lambda pool: None))
    monkeypatch.setattr(flashinfer_scatter, "_append", lambda: None)
    made = {}
    for way in copy_table.ways_on("cuda"):
        device, host = pools("cpu", way.layout, heads=1, dim=32)
        host.can_use_jit = host.pin_memory = True
        served = controller(device, host, way.io)
        served.device = "cuda"
        if "SGLang's kernel copies" not in way.name and "direct copies" not in way.name:
            made[way.name] = way.make(served)
    assert {name: type(one) for name, one in made.items()} == {
        "staged, our kernel, page_first": TritonScatter,
        "staged, our kernel, page_first_direct": TritonScatter,
        "staged, FlashInfer's append, page_first": FlashInferScatter,
        "SGLang's kernel of all layers, page_first": tuple,
    }
    assert prepared == list(made.values())[:3]
    assert isinstance(made["SGLang's kernel of all layers, page_first"][0], AllLayers)


@pytest.mark.skipif(copy_table.torch.cuda.is_available(), reason="this machine has a card")
def test_without_a_card_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "copy-table"]) != 0
    assert "no CUDA device" in capsys.readouterr().err
