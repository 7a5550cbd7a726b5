"""A store that is closed after the test, whatever the test did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_pages import IO_KINDS, io_settings, open_at

from sgl_kvtier.store.engine import DiskStore


@pytest.fixture(params=IO_KINDS)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DiskStore]:
    """With every kind of I/O threads."""
    opened = open_at(tmp_path, **io_settings(request.param))
    yield opened
    opened.close()
