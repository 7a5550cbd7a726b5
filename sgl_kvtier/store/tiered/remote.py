"""What a store that is shared with other servers can do besides keeping pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgl_kvtier.store.base import KV, PageStore
from sgl_kvtier.types import PageKey


class RemoteStore(PageStore, Protocol):
    """Pages that other servers may have written. `lookup` answers from what is known at the moment,
    without I/O; a page that nothing is known of is a MISS. No call lasts longer than the store's
    own limits, whatever happened to the other side.
    """

    @property
    def usable(self) -> bool:
        """Whether it answers now. While it does not, every page is a MISS at once."""

    @property
    def child_starts(self) -> int:
        """How often what has the engine was started, the first time too."""

    def ask(self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float = 0.0) -> bool:
        """Finds out about all of these pages in one call, so that `lookup` knows them. Waits at
        most `timeout_s`; False when the answer has not come by then. It is kept when it comes.
        """
