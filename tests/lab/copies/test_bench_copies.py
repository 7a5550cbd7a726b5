"""`kvtier bench copies` and the page made of it, small: every way is called, and has a figure."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvtier.console.environment import environment
from sgl_kvtier.lab.copies import page

ROOT = Path(__file__).parents[3]
needs_both = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("sglang", "triton", "sgl_kvtier.runtime.cuda._native")
    ),
    reason="SGLang or Triton is not installed, or our copies are not compiled",
)


def child(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: afterwards torch and Triton have no card but the null one."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@needs_both
def test_a_load_is_timed_every_way_from_pages_together_and_apart(tmp_path: Path) -> None:
    target = tmp_path / "copies.json"
    run = "import sys; from sgl_kvtier.cli import main; sys.exit(main())"
    words = ["bench", "copies", "--layers", "2", "--heads", "1", "--rounds", "2"]
    done = child("-c", run, *words, "--json", str(target))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(target.read_text())["loads"]
    assert [row["host_pages"] for row in rows] == ["together", "apart"]
    ways = ("per_layer_us", "all_layers_us", "staged_us")
    assert all(row[way] > 0 for row in rows for way in ways)
    assert all(row["ratio"] == row["per_layer_us"] / row["staged_us"] for row in rows)


def test_the_page_its_data_and_the_index_have_the_figures_of_the_last_run(tmp_path: Path) -> None:
    results = ROOT / "docs" / "results"
    (tmp_path / "data").mkdir()
    for name in ("copies.md", "README.md"):
        (tmp_path / name).write_text((results / name).read_text())
    rows = [
        {
            "heads": heads, "layers": layers, "tokens": 64, "host_pages": pages, "per_layer_us": 10.0 * layers,
            "all_layers_us": 50.0 + heads, "staged_us": 40.04 + heads, "ratio": 2.0,
        }
        for heads in page.HEADS
        for layers in page.LAYERS
        for pages in ("together", "apart")
    ]  # fmt: skip
    page.write(tmp_path, rows, {**environment(), "git_commit": "0123abc" * 5 + "-dirty"})
    text, index = (tmp_path / "copies.md").read_text(), (tmp_path / "README.md").read_text()
    assert "commit 0123abc," in text and "Through staging 41 to 48 µs at 32 layers" in text
    assert text.count("| 8 | 32 | 64 | together | 320 | 58.0 | 48.0 | 2.0 |") == 1
    assert "| 41 to 48 µs at 80 layers, SGLang's launch per layer 800 to 800 µs |" in index
    data = json.loads((tmp_path / "data" / "copies.json").read_text())
    assert len(data["grids"]["loads"]["rows"]) == len(rows)
    # Written once more, nothing but the figures changes.
    lines = len(text.splitlines())
    page.write(tmp_path, rows[::-1], environment())
    assert len((tmp_path / "copies.md").read_text().splitlines()) == lines
