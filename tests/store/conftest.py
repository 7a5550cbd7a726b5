"""A store that is closed after the test, whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_pages import open_at

from sgl_kvtier.store.engine import DiskStore


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Opens stores below one folder; `opened(capacity_bytes=...)`."""
    stores: list[DiskStore] = []

    def open_(path: Path = tmp_path, **settings: Any) -> DiskStore:
        stores.append(open_at(path, **settings))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[..., DiskStore]) -> DiskStore:
    return opened()
