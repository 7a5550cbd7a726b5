"""A remote store in memory: what is known of it comes from `ask` alone, and it fails when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sgl_kvtier.store.base import KV, PageRead, PageWrite, PutOutcome, ReadOutcome, StoreStats
from sgl_kvtier.store.io.jobs import OrderedJob
from sgl_kvtier.types import Lookup, PageKey


class Shared:
    """What all servers share: pages by pool and key."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, PageKey], bytes] = {}
        self.asked: list[int] = []
        """Names of each call of `ask`."""


class RemoteDouble:
    """One server's view of `Shared`. Reads end on a thread of their own, one page after the other."""

    def __init__(self, shared: Shared | None = None) -> None:
        self.shared = shared or Shared()
        self.down = False
        """Answers nothing, takes nothing, and reads fail."""
        self.refuses = False
        self.broken = False
        """Every call raises: a mistake of the store's."""
        self.open_gate = threading.Event()
        """While it is cleared, reads wait."""
        self.open_gate.set()
        self.put_gate = threading.Event()
        """While it is cleared, puts hang."""
        self.put_gate.set()
        self.putting = False
        self.offered: list[PageKey] = []
        """Names of all calls of `put`."""
        self.calls_late = self.removals_waiting = 0
        self.most_page_bytes = 1 << 30
        self.reads: list[int] = []
        """Pages of each call of `read`."""
        self._known: dict[tuple[str, PageKey], bool] = {}
        self._threads: list[threading.Thread] = []
        self.closed = False

    @property
    def usable(self) -> bool:
        return not self.down

    @property
    def child_starts(self) -> int:
        return 1

    def ask(self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float = 0.0) -> bool:
        self._trip()
        self.shared.asked.append(len(keys))
        if self.down:
            return False
        for key in keys:
            self._known[pool, key] = (pool, key) in self.shared.pages
        return True

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        self._trip()
        known = (not self.down and self._known.get((pool, key)) for key in keys)
        return [Lookup.HIT if there else Lookup.MISS for there in known]

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> OrderedJob:
        self._trip()
        self.reads.append(len(pages))
        job = OrderedJob(len(pages), None, on_page)

        def run() -> None:
            while begun := job.begin():
                self.open_gate.wait(30)
                job.finish([(i, self._fill(pages[i])) for i in begun])

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        return job

    def put(
        self, pages: Sequence[PageWrite], wanted: Callable[[], bool] | None = None
    ) -> list[PutOutcome]:
        self._trip()
        self.putting = True
        self.offered += [page.key for page in pages]
        self.put_gate.wait(30)
        self.putting = False
        stale = wanted is not None and not wanted()
        return [PutOutcome.REFUSED if stale else self._take(page) for page in pages]

    def delete(
        self, keys: Sequence[PageKey], pool: str = KV, first: Callable[[], None] | None = None
    ) -> int:
        if first is not None:
            first()
        for key in keys:
            self._known.pop((pool, key), None)
        return sum(self.shared.pages.pop((pool, key), None) is not None for key in keys)

    def clear(self, first: Callable[[], None] | None = None) -> int:
        if first is not None:
            first()
        count = len(self.shared.pages)
        self.shared.pages.clear()
        self._known.clear()
        return count

    def stats(self) -> StoreStats:
        return StoreStats(pages=len(self.shared.pages))

    def close(self) -> None:
        self.closed = True
        self.open_gate.set()
        self.put_gate.set()
        for thread in self._threads:
            thread.join()

    def _take(self, page: PageWrite) -> PutOutcome:
        if self.down or self.refuses:
            return PutOutcome.REFUSED
        name = (page.pool, page.key)
        if name in self.shared.pages:
            return PutOutcome.KEPT
        self.shared.pages[name] = b"".join(bytes(part) for part in page.data)
        return PutOutcome.STORED

    def _fill(self, page: PageRead) -> ReadOutcome:
        if self.down:
            return ReadOutcome.FAILED
        data = self.shared.pages.get((page.pool, page.key))
        if data is None:
            return ReadOutcome.MISS
        start = 0
        for part in page.into:
            part[:] = data[start : start + part.nbytes]
            start += part.nbytes
        return ReadOutcome.OK

    def _trip(self) -> None:
        if self.broken:
            raise RuntimeError("a mistake of the remote store's")
