"""scripts/test-gpu where there is no card."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sgl_kvtier.launch import detect_device

SCRIPT = Path(__file__).parents[3] / "scripts" / "test-gpu"


@pytest.mark.skipif(detect_device() != "cpu", reason="this machine has a card")
def test_it_refuses_with_a_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SCRIPT), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "no NVIDIA card" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_is_named() -> None:
    done = subprocess.run(
        [str(SCRIPT), "--gpus", "2"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "--gpus" in done.stderr
