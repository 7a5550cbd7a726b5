"""Pages kept in parts of some layers each, so that the upper layers can be read without the lower:
a store checks what it has under one key as a whole.

A page of layout page_first_direct is keys, then values, each layer after layer. So a part is one
run of bytes of both. Part g of a page is kept under the page's key in a pool of its own, `pool_of`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadJob,
    ReadOutcome,
    StoreStats,
)
from sgl_kvtier.tenants import parted
from sgl_kvtier.types import Lookup, PageKey

_WORST = (
    *(ReadOutcome.CORRUPT, ReadOutcome.FAILED, ReadOutcome.MISS),
    *(ReadOutcome.LATE, ReadOutcome.CANCELLED, ReadOutcome.OK),
)


def pool_of(part: int) -> str:
    """The pool that has this part of all pages, 0 the lowest layers."""
    return f"{KV}/{part}"


def cut(pieces: Sequence[memoryview], part: int, parts: int) -> list[memoryview]:
    """A part of a page: of each of its pieces the bytes of these layers. `parts` divides the number
    of layers.
    """
    found = []
    for piece in pieces:
        step = piece.nbytes // parts
        found.append(piece[part * step : (part + 1) * step])
    return found


class LayerParts:
    """A store of pages on top of a store of their parts. Other pools than `KV` pass through, and so
    do parts by name. Its counts of pages are rounded down.
    """

    def __init__(self, store: PageStore, parts: int) -> None:
        self._store = store
        self._parts = parts

    @property
    def set_read_gbps(self) -> Callable[[float], None] | None:
        """That of a throttled store behind."""
        found: Callable[[float], None] | None = getattr(self._store, "set_read_gbps", None)
        return found

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        """A page is there when all its parts are."""
        if pool != KV:
            return self._store.lookup(keys, pool)
        by_part = [self._store.lookup(keys, pool_of(part)) for part in range(self._parts)]
        return [
            next((one for one in answers if one is not Lookup.HIT), Lookup.HIT)
            for answers in zip(*by_part, strict=True)
        ]

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> ReadJob:
        if not any(page.pool == KV for page in pages):
            return self._store.read(
                pages, priority=priority, deadline_s=deadline_s, on_page=on_page
            )
        return _WholePages(self._store, pages, self._parts, priority, deadline_s, on_page)

    def put(self, pages: Sequence[PageWrite]) -> list[PutOutcome]:
        """A page is stored when all its parts are, which name no tenant."""
        each = [_parts_of(parted(page.pool)[0], self._parts) for page in pages]
        flat = [
            page
            if part is None
            else page._replace(data=cut(page.data, part, self._parts), pool=pool_of(part))
            for page, own in zip(pages, each, strict=True)
            for part in own
        ]
        outcomes = iter(self._store.put(flat))
        return [_written([next(outcomes) for _ in own]) for own in each]

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        return self._store.retain(owner, keys, seconds)

    def delete(self, keys: Sequence[PageKey], pool: str = KV) -> int:
        if pool != KV:
            return self._store.delete(keys, pool)
        return max(self._store.delete(keys, pool_of(part)) for part in range(self._parts))

    def clear(self) -> int:
        return self._store.clear() // self._parts

    def stats(self) -> StoreStats:
        """Pages instead of parts."""
        found = self._store.stats()
        counts: dict[str, Any] = {
            field.name: getattr(found, field.name) // self._parts
            for field in dataclasses.fields(found)
            if field.name.startswith("pages")
        }
        return dataclasses.replace(found, **counts)

    def close(self) -> None:
        self._store.close()


class _WholePages:
    """A read of whole pages as a read of their parts, page after page."""

    def __init__(
        self,
        store: PageStore,
        pages: Sequence[PageRead],
        parts: int,
        priority: int,
        deadline_s: float | None,
        on_page: Callable[[int, ReadOutcome], None] | None,
    ) -> None:
        each = [_parts_of(page.pool, parts) for page in pages]
        self._page_of = [index for index, own in enumerate(each) for _ in own]
        self._left = [len(own) for own in each]
        self._found = [ReadOutcome.OK] * len(pages)
        self._on_page = on_page
        self._lock = threading.Lock()
        self._fresh: list[tuple[int, ReadOutcome]] = []
        self._job = store.read(
            [
                page
                if part is None
                else PageRead(page.key, cut(page.into, part, parts), pool_of(part))
                for page, own in zip(pages, each, strict=True)
                for part in own
            ],
            priority=priority,
            deadline_s=deadline_s,
            on_page=self._part_ended,
        )  # fmt: skip

    def _part_ended(self, index: int, outcome: ReadOutcome) -> None:
        page = self._page_of[index]
        with self._lock:
            self._found[page] = min(self._found[page], outcome, key=_WORST.index)
            self._left[page] -= 1
            found = self._found[page]
            over = self._left[page] == 0
            if over:
                self._fresh.append((page, found))
        if over and self._on_page is not None:
            self._on_page(page, found)

    @property
    def outcomes(self) -> list[ReadOutcome | None]:
        with self._lock:
            return [
                None if left else one for left, one in zip(self._left, self._found, strict=True)
            ]

    @property
    def in_flight(self) -> int:
        return self._job.in_flight

    @property
    def done(self) -> bool:
        return self._job.done

    def drain(self) -> list[tuple[int, ReadOutcome]]:
        with self._lock:
            fresh, self._fresh = self._fresh, []
            return fresh

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._job.wait(timeout_s)

    def cancel(self) -> None:
        self._job.cancel()


def _parts_of(pool: str, parts: int) -> list[int | None]:
    return list(range(parts)) if pool == KV else [None]


def _written(outcomes: Sequence[PutOutcome]) -> PutOutcome:
    worst_first = (PutOutcome.REFUSED, PutOutcome.NOT_ADMITTED, PutOutcome.STORED)
    return next((one for one in worst_first if one in outcomes), PutOutcome.KEPT)
