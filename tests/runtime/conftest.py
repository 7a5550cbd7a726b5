"""What tests of the room that imports SGLang need. Without SGLang they are skipped, and say so."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
collect_ignore_glob: list[str] = []
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py", "cpu/test_*.py", "cuda/test_*.py", "device/test_*.py"]


def pytest_report_header() -> str | None:
    """Says so when the room's tests cannot be collected."""
    return "tests/runtime: not collected, SGLang is not installed" if collect_ignore_glob else None


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers that others are compared with (`golden.py`), kept from run to run."""
    from golden import Golden  # imports torch

    cache = getattr(request.config, "cache", None)  # not there with -p no:cacheprovider
    return Golden(cache.mkdir("golden") if cache else tmp_path_factory.mktemp("golden"))


@pytest.fixture
def cause_of(record_property: Callable[[str, object], None]) -> Any:
    """`explained.cause_of`, which is also noted in the report of the tests (`--junitxml`)."""
    from explained import cause_of  # imports what serves

    def cause_and_note(*asked: Any) -> dict[str, Any]:
        found = cause_of(*asked)
        parts = ("prompts", "advice", "declined", "unfulfilled")
        record_property("explained", json.dumps({part: found.get(part) for part in parts}))
        return found

    return cause_and_note
