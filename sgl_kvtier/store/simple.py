"""A page store for programs other than SGLang: a mapping of keys to bytes in a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import TracebackType
from typing import Any

from sgl_kvtier.config import StoreConfig, parse_setting
from sgl_kvtier.store import engine
from sgl_kvtier.store.base import (
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadOutcome,
    StoreStats,
)
from sgl_kvtier.store.disk.format import KEY_BYTES
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.types import Lookup, PageKey


def open_store(
    path: str | os.PathLike[str],
    *,
    identity: Mapping[str, Any],
    name: str = "pages",
    rank: str = "0",
    capacity_bytes: int = 64 << 30,
    config: StoreConfig | None = None,
) -> Store:
    """Opens the store of one rank below `path`, and creates it if it does not exist.

    `identity` is plain data that says what the pages were computed with (model, weights, dtype,
    ...): a store of another identity finds none of them. `name` is the readable part of the
    folder's name. `config` replaces `path` and `capacity_bytes` to change other settings. Raises
    StoreBusyError if another process owns the rank's folder, StoreFormatError if no store made it,
    StoreError for other reasons, ConfigError for a setting out of range, and TypeError for an
    argument of a wrong type.
    """
    if not isinstance(identity, Mapping):
        raise TypeError(f"identity is a mapping of plain data, not {type(identity).__name__}")
    if config is not None and not isinstance(config, StoreConfig):
        raise TypeError(f"config is a StoreConfig, not {type(config).__name__}")
    given = {"path": os.fspath(path), "capacity_bytes": capacity_bytes}
    if config is not None:
        given = {f.name: getattr(config, f.name) for f in fields(config)}
    checked = {key: parse_setting("store", key, value) for key, value in given.items()}
    return Store(engine.open_store(StoreConfig(**checked), Identity(identity, name), rank))


def page_key(text: str | bytes) -> PageKey:
    """The key of a page with this name: its SHA-256, 32 bytes."""
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"the name of a page is a text or bytes, not {type(text).__name__}")
    return PageKey(hashlib.sha256(text.encode() if isinstance(text, str) else text).digest())


class Store:
    """An open store. Any thread; no call raises because the disk failed. Close it, or use it in a
    `with` block.

    `pages` is the underlying store, with ordered reads, deadlines and pools
    (`sgl_kvtier.store.base.PageStore`).
    """

    def __init__(self, pages: engine.DiskStore) -> None:
        self.pages: PageStore = pages
        self._disk = pages

    def put(
        self, pages: Mapping[PageKey, bytes | bytearray | memoryview]
    ) -> dict[PageKey, PutOutcome]:
        """Writes pages; returns when they can be read. Never rewrites an existing key (KEPT)."""
        if not isinstance(pages, Mapping):
            raise TypeError(f"pages are a mapping of key to bytes, not {type(pages).__name__}")
        writes = [PageWrite(key, [_bytes_of(data)]) for key, data in pages.items()]
        return dict(zip(pages, self.pages.put(writes), strict=True))

    def get(self, key: PageKey) -> bytes | None:
        """One page as it was put, or None if it is missing, or was damaged and dropped."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[PageKey]) -> dict[PageKey, bytes]:
        """The pages that are stored, read together in the order of `keys`."""
        wanted = list(dict.fromkeys(_checked(keys)))
        lengths = self._disk.lengths(wanted)
        found = {
            key: bytearray(length) for key, length in zip(wanted, lengths, strict=True) if length
        }
        job = self.pages.read([PageRead(key, [memoryview(into)]) for key, into in found.items()])
        job.wait()
        outcomes = zip(found.items(), job.outcomes, strict=True)
        return {key: bytes(into) for (key, into), outcome in outcomes if outcome is ReadOutcome.OK}

    def __contains__(self, key: PageKey) -> bool:
        return self.pages.lookup(_checked([key]))[0] is Lookup.HIT

    def __len__(self) -> int:
        return self.pages.stats().pages

    def delete(self, keys: Iterable[PageKey]) -> int:
        """Drops pages and returns how many there were."""
        return self.pages.delete(_checked(keys))

    def stats(self) -> StoreStats:
        """Counters since the store was opened, and its size."""
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


def _checked(keys: Iterable[PageKey]) -> list[PageKey]:
    """Keys as a list. Raises TypeError or ValueError where one is no key."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"keys are a list of bytes objects, not {type(keys).__name__}")
    found = list(keys)
    for key in found:
        if not isinstance(key, bytes):
            raise TypeError(f"a page key is a bytes object, not {type(key).__name__}")
        if len(key) != KEY_BYTES:
            raise ValueError(f"a page key is {KEY_BYTES} bytes, not {len(key)}: use page_key()")
    return found


def _bytes_of(data: bytes | bytearray | memoryview) -> memoryview:
    """A page as a view of its bytes. Raises TypeError if it is no contiguous memory."""
    try:
        return memoryview(data).cast("B")
    except (BufferError, TypeError) as error:
        raise TypeError(f"a page is contiguous memory, such as bytes: {error}") from None
