"""The store benchmark measures what it says, with and without fio."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from commands import parsed

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.storebench import command
from sgl_kvtier.lab.storebench.disk import Reference
from sgl_kvtier.lab.storebench.peer import Peer


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer measurements."""
    monkeypatch.setattr(command, "IN_FLIGHT", (2,))
    monkeypatch.setattr(command, "PAIRS", 4)


def measure(tmp_path: Path, *arguments: str) -> dict:
    out = tmp_path / "bench.json"
    small = "--pages 64KiB --bytes 2MiB --runtime 0.1"
    words = ("--dir", str(tmp_path), *small.split(), *arguments, "--json", str(out))
    assert command.run(parsed(command, *words)) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize("fio", [True, False], ids=["fio", "no fio"])
def test_every_cell_has_its_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fio: bool
) -> None:
    if fio and not shutil.which("fio"):
        pytest.skip("fio is not installed")
    if not fio:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    data = measure(tmp_path)
    assert data["schema"] == "kvtier.bench.store/1"
    assert data["reference"] == ("fio" if fio else "built-in psync threads")
    main, two = data["cells"]
    assert (main["page_bytes"], main["in_flight"], main["pairs"]) == (65_536, 8, 4)
    assert two["in_flight"] == 2
    sides = ("read_vs_fio", "prefix_vs_fio", "write_vs_fio")
    for name in (*sides, "busy_vs_idle", "verified_vs_not", "read_vs_own_threads"):
        assert main[name] > 0
        assert main[name + "_iqr"][0] <= main[name] <= main[name + "_iqr"][1]
        assert len(main[name + "_pairs"]) == 4 and min(main[name + "_pairs"]) <= main[name] <= max(
            main[name + "_pairs"]
        )
    assert main["read_vs_hicache_file"] is None
    assert two["read_vs_fio"] > 0 and two["write_vs_fio"] is None
    assert os.listdir(tmp_path) == ["bench.json"]


def test_fixed_costs_alone(tmp_path: Path) -> None:
    data = measure(tmp_path, "--pages", "")
    assert data["cells"] == [] and data["fixed"]["lookup of 1000 keys (ms)"] > 0


def test_a_folder_that_is_not_there_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--dir"):
        measure(tmp_path, "--dir", str(tmp_path / "none"))


def test_a_python_without_sglang_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--sglang-python"):
        Peer(str(tmp_path / "python"), str(tmp_path), 4096, 4096)
    with pytest.raises(BenchError, match="stopped"):
        Peer(shutil.which("false") or "/bin/false", str(tmp_path), 4096, 4096)


def test_the_reference_file_is_as_large_as_told(tmp_path: Path) -> None:
    reference = Reference(str(tmp_path), 1 << 20, 0.05)
    reference.prepare()
    assert os.path.getsize(reference.path) == 1 << 20
