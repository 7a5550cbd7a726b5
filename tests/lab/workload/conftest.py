"""What the workload's tests share: tiny trace files, and the folder with the real ones."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from trace_records import WriteTrace


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder with the real traces; tests that need it are skipped elsewhere."""
    folder = Path(os.environ.get("KVTIER_TRACES", "."))
    if not (folder / "swe_mini_deepseek.jsonl.gz").is_file():
        pytest.skip("no real traces in KVTIER_TRACES, nor in shared/traces beside the clone")
    return folder


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """Writes records (objects as JSON, texts as they are) to a trace file; packed if its name ends
    in .gz.
    """

    def write(name: str, *records: Any) -> Path:
        lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
        data = "".join(line + "\n" for line in lines).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write
