"""What a store that is shared with other servers can do besides keeping pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sgl_kvtier.store.base import KV, PageStore, PageWrite, PutOutcome
from sgl_kvtier.types import PageKey


class RemoteStore(PageStore, Protocol):
    """Pages that other servers may have written. `lookup` answers from what is known at the moment,
    without I/O; a page that nothing is known of is a MISS. No call lasts longer than the store's
    own limit, 2 s, and no read waits longer with nothing coming, whatever happened to the other
    side.
    """

    @property
    def usable(self) -> bool:
        """Whether it answers now. While it does not, every page is a MISS at once."""

    @property
    def child_starts(self) -> int:
        """How often what has the engine was started, the first time too."""

    @property
    def most_page_bytes(self) -> int:
        """Bytes of the largest page that it takes."""

    def ask(self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float = 0.0) -> bool:
        """Finds out about all of these pages in one call, so that `lookup` knows them. Waits at
        most `timeout_s`; False when the answer has not come by then. It is kept when it comes.
        """

    @property
    def calls_late(self) -> int:
        """Puts, deletes and clears that returned before the engine had done them."""

    @property
    def removals_waiting(self) -> int:
        """Pages that were deleted here and that the engine may still have; a clear counts as
        one.
        """

    def put(
        self, pages: Sequence[PageWrite], wanted: Callable[[], bool] | None = None
    ) -> list[PutOutcome]:
        """As `PageStore.put`. Nothing is begun to be written once `wanted` is false: `delete` and
        `clear` hold for it too where it has become false in their `first`.
        """

    def delete(
        self, keys: Sequence[PageKey], pool: str = KV, first: Callable[[], None] | None = None
    ) -> int:
        """From the call on this process neither finds, reads nor writes these pages there until
        they are removed, which goes on in the background where it takes too long. `first` is called
        before any is removed. Counts what was removed by the end of the call.
        """

    def clear(self, first: Callable[[], None] | None = None) -> int:
        """As `delete`, for every page of this identity and rank."""
