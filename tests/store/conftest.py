"""A store that is closed after the test, whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_pages import IO_KINDS, io_settings, open_at

from sgl_kvtier.store.engine import DiskStore


@pytest.fixture(params=IO_KINDS)
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., DiskStore]]:
    """Opens stores below one folder; `opened(capacity_bytes=...)`. Every test runs with every kind
    of I/O threads.
    """
    stores: list[DiskStore] = []
    chosen = io_settings(request.param)

    def open_(path: Path = tmp_path, **settings: Any) -> DiskStore:
        stores.append(open_at(path, **(chosen | settings)))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[..., DiskStore]) -> DiskStore:
    return opened()
