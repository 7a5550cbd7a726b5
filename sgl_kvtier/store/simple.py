"""A page store for programs other than SGLang: pages by key in a folder, as a mapping of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.store import engine
from sgl_kvtier.store.base import (
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadOutcome,
    StoreStats,
)
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.types import Lookup, PageKey


def open_store(
    path: str,
    *,
    identity: Mapping[str, Any],
    name: str = "pages",
    rank: str = "0",
    capacity_bytes: int = 64 << 30,
    config: StoreConfig | None = None,
) -> Store:
    """Opens the store of one rank below `path`, making it if it is not there.

    `identity` is plain data that says what the pages were computed with (model, weights, dtype,
    ...): another identity finds nothing. `name` is the readable part of the folder's name. `config`
    replaces `path` and `capacity_bytes` where more has to be set. Raises StoreError: StoreBusyError
    when another process has the rank's folder, StoreFormatError when no store made it.
    """
    settings = config or StoreConfig(path=str(path), capacity_bytes=capacity_bytes)
    return Store(engine.open_store(settings, Identity(dict(identity), name), rank))


def page_key(text: str | bytes) -> PageKey:
    """The key of a page with this name: its SHA-256, 32 bytes."""
    return PageKey(hashlib.sha256(text.encode() if isinstance(text, str) else text).digest())


class Store:
    """An open store. Any thread; nothing raises because the disk failed. Close it, or use it in a
    `with` block.

    `pages` is the store beneath, with ordered reads, deadlines and pools
    (`sgl_kvtier.store.base.PageStore`).
    """

    def __init__(self, pages: engine.DiskStore) -> None:
        self.pages: PageStore = pages
        self._disk = pages

    def put(
        self, pages: Mapping[PageKey, bytes | bytearray | memoryview]
    ) -> dict[PageKey, PutOutcome]:
        """Writes pages and returns when they can be read back. A key that is there already is never
        rewritten (KEPT).
        """
        writes = [PageWrite(key, [memoryview(data).cast("B")]) for key, data in pages.items()]
        return dict(zip(pages, self.pages.put(writes), strict=True))

    def get(self, key: PageKey) -> bytes | None:
        """One page as it was put, or None: not there, or damaged and dropped."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[PageKey]) -> dict[PageKey, bytes]:
        """The pages that are there, read together in the order given."""
        wanted = list(dict.fromkeys(keys))
        lengths = self._disk.lengths(wanted)
        found = {
            key: bytearray(length) for key, length in zip(wanted, lengths, strict=True) if length
        }
        job = self.pages.read([PageRead(key, [memoryview(into)]) for key, into in found.items()])
        job.wait()
        outcomes = zip(found.items(), job.outcomes, strict=True)
        return {key: bytes(into) for (key, into), outcome in outcomes if outcome is ReadOutcome.OK}

    def __contains__(self, key: PageKey) -> bool:
        return self.pages.lookup([key])[0] is Lookup.HIT

    def __len__(self) -> int:
        return self.pages.stats().pages

    def delete(self, keys: Iterable[PageKey]) -> int:
        """Drops pages and returns how many there were."""
        return self.pages.delete(list(keys))

    def stats(self) -> StoreStats:
        """Counters since it was opened, and its size."""
        return self.pages.stats()

    def close(self) -> None:
        """Ends the I/O threads and releases the folder. Idempotent."""
        self.pages.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()
