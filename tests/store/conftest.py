"""A store that is closed after the test, whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_pages import open_at

from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.native_lanes import NATIVE


@pytest.fixture(params=["native", "threads"])
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., DiskStore]]:
    """Opens stores below one folder; `opened(capacity_bytes=...)`. Every test runs with both kinds of lanes."""
    stores: list[DiskStore] = []
    native = request.param == "native"
    if native and not NATIVE:
        pytest.skip("the native lanes are not built here (no C compiler when the package was installed)")

    def open_(path: Path = tmp_path, **settings: Any) -> DiskStore:
        settings.setdefault("native_io", native)
        stores.append(open_at(path, **settings))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[..., DiskStore]) -> DiskStore:
    return opened()
