"""A store that is closed after the test, whatever the test did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_pages import IO_KINDS, io_settings, open_at

from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.siblings import sharing


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


@pytest.fixture
def only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at siblings but those of the test."""
    monkeypatch.setattr(sharing, "_TICK_S", 3600.0)
    monkeypatch.setattr(sharing, "_ALONE_S", 3600.0)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Opens one more owner of the same pages, with the kind of I/O threads that a server takes."""
    stores: list[DiskStore] = []

    def one(path: Path = tmp_path, **settings: Any) -> DiskStore:
        stores.append(open_at(path, **({"alike": "tp0"} | settings)))
        return stores[-1]

    yield one
    for store in stores:
        store.close()
