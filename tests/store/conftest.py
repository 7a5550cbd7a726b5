"""Stores that are closed after the test, whatever the test did."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import store_pages
from store_pages import IO_KINDS, Open, io_settings, open_at

from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.siblings import sharing


@pytest.fixture(autouse=True)
def stores() -> Iterator[list[DiskStore]]:
    """Closes every store that the test opened with `open_at`."""
    opened: list[DiskStore] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_pages, "OPENED", opened)
        yield opened
    for store in opened:
        store.close()


@pytest.fixture(params=IO_KINDS)
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    """Opens stores in one folder with every kind of I/O threads; `opened(capacity_bytes=...)`."""
    return partial(open_at, **{"path": tmp_path, **io_settings(request.param)})


@pytest.fixture
def store(opened: Open) -> DiskStore:
    return opened()


@pytest.fixture
def only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at siblings but those of the test."""
    monkeypatch.setattr(sharing, "_TICK_S", 3600.0)
    monkeypatch.setattr(sharing, "_ALONE_S", 3600.0)


@pytest.fixture
def owner(tmp_path: Path) -> Open:
    """Opens one more owner of the same pages, with the kind of I/O threads that a server takes."""
    return partial(open_at, path=tmp_path, alike="tp0")
