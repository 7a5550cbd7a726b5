"""Remote stores over the memory engine that are closed after the test, whatever the test did."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from remote_pages import IDENTITY, STARTED_S

from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.store import RemoteStore, open_remote
from sgl_kvtier.store.disk.identity import Identity

Opened = Callable[..., RemoteStore]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the memory engine's objects are."""
    with tempfile.TemporaryDirectory(prefix="kvtier-remote-") as name:
        yield Path(name)


@pytest.fixture
def opened(folder: Path) -> Iterator[Opened]:
    """Opens stores that share one engine; `opened(rank="tp1", deadline_s=0.5)`."""
    stores: list[RemoteStore] = []

    def open_(
        identity: Identity = IDENTITY,
        rank: str = "tp0",
        wait: bool = True,
        page_bytes: int = 0,
        **settings: Any,
    ) -> RemoteStore:
        chosen: dict[str, Any] = {"engine": "memory", "master": str(folder), "ring_bytes": 4 << 20}
        store = open_remote(RemoteSettings(**(chosen | settings)), identity, rank, page_bytes)
        stores.append(store)
        assert not wait or store.wait_usable(STARTED_S), store.condition().trouble
        return store

    yield open_
    for store in stores:
        store.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[RemoteStore]:
    """One store for all tests that need nothing of it but pages: a child takes a while to start."""
    with tempfile.TemporaryDirectory(prefix="kvtier-remote-") as name:
        store = open_remote(RemoteSettings("memory", name, ring_bytes=4 << 20), IDENTITY, "shared")
        yield store
        store.close()


@pytest.fixture
def store(shared: RemoteStore) -> RemoteStore:
    """A store without pages. Its counters go on."""
    assert shared.wait_usable(STARTED_S), shared.condition().trouble
    shared.clear()
    return shared
