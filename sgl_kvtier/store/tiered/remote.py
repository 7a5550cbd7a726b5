"""The interface of a store that several servers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sgl_kvtier.store.base import KV, PageStore, PageWrite, PutOutcome
from sgl_kvtier.types import PageKey


class RemoteStore(PageStore, Protocol):
    """Pages that other servers may have written. `lookup` uses what is known locally, without I/O;
    an unknown page is a MISS. Whatever happens to the remote side, no call takes longer than the
    store's limit (2 s), and no read waits longer than that without progress.
    """

    @property
    def usable(self) -> bool:
        """Whether the engine responds. While it does not, every page is a MISS at once."""

    @property
    def child_starts(self) -> int:
        """How often the process that runs the engine was started, including the first time."""

    @property
    def most_page_bytes(self) -> int:
        """Bytes of the largest page that can be stored."""

    def ask(self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float = 0.0) -> bool:
        """Queries the engine for all of these pages in one call, so that `lookup` knows them. Waits
        for at most `timeout_s`; False if no result has come by then. A later result is kept.
        """

    @property
    def calls_late(self) -> int:
        """Puts, deletes and clears that returned before the engine had completed them."""

    @property
    def removals_waiting(self) -> int:
        """Pages deleted here that the engine may still have; a clear counts as one."""

    def put(
        self, pages: Sequence[PageWrite], wanted: Callable[[], bool] | None = None
    ) -> list[PutOutcome]:
        """`PageStore.put` that can be stopped: no write begins once `wanted` returns false.
        `delete` and `clear` can rely on that if it becomes false in their `first`.
        """

    def delete(
        self, keys: Sequence[PageKey], pool: str = KV, first: Callable[[], None] | None = None
    ) -> int:
        """Deletes pages. From the call on this process neither finds, reads nor writes these pages
        until they are removed, in the background if it takes long. `first` is called before any is
        removed. Returns how many were removed by the end of the call.
        """

    def clear(self, first: Callable[[], None] | None = None) -> int:
        """`delete` for every page of this identity and rank."""
