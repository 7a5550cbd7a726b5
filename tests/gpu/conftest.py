"""Tests of the path to a card. Their bodies run on a CPU too where torch can stand in, so that a
mistake in them does not hide; what needs a card is marked `gpu` and says why it is skipped. The
stand-in for a GPU runs these (tests/cuda_stand_in), but for what is marked `real_gpu` too.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from host_pools import host_pools_end

__all__ = ["host_pools_end"]
HAVE_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if HAVE_SGLANG else ["test_*.py"]


def pytest_report_header() -> str | None:
    """Says so when the room's tests cannot be collected."""
    return None if HAVE_SGLANG else "tests/gpu: not collected, SGLang is not installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a card, what is marked `gpu` is skipped; on the stand-in, what it cannot run."""
    if "CUDA_STAND_IN_HOME" in os.environ:
        for item in items:
            if marker := item.get_closest_marker("real_gpu"):
                item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]}"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _has_card():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no CUDA device: scripts/gpu-run runs it on one"))


def _has_card() -> bool:
    import torch  # only where a test of this room is collected

    return bool(torch.cuda.is_available())
