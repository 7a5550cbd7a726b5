"""Writes pages that were read from the remote store to the local one, in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque

import numpy as np

from sgl_kvtier.store.base import PageRead, PageStore, PageWrite, PutOutcome

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Bytes of copies that wait to be written. Beyond that, pages are not kept."""
_PUT_BYTES = 4 << 20
"""Bytes of one write."""


class Keeper:
    """A thread that writes copies of pages to a store."""

    def __init__(self, local: PageStore, most_bytes: int = MOST_BYTES) -> None:
        self.kept = 0
        """Pages that the store newly stored."""
        self._local = local
        self._most_bytes = most_bytes
        self._waiting: deque[PageWrite] = deque()
        self._nbytes = 0
        self._begun = self._ended = 0
        """Number of writes to the store."""
        self._closing = False
        self._epoch = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtier-keeper", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Counts deletes: a page whose read began in an earlier epoch is not kept."""
        return self._epoch

    def take(self, page: PageRead, epoch: int) -> None:
        """Copies a page that was read. Any thread, before the read ends for the caller."""
        nbytes = sum(part.nbytes for part in page.into)
        with self._changed:
            if self._closing or self._nbytes + nbytes > self._most_bytes:
                return
        # NumPy copies without the GIL.
        data = [np.array(np.frombuffer(part, np.uint8)).data for part in page.into]
        with self._changed:
            if self._closing or epoch != self._epoch:
                return
            self._nbytes += nbytes
            self._waiting.append(PageWrite(page.key, data, page.pool))
            self._changed.notify_all()

    def forget(self) -> None:
        """Before a delete: no page read so far is written any more. Waits for a write in flight."""
        with self._changed:
            self._epoch += 1
            self._drop_waiting()
            begun = self._begun
            self._changed.wait_for(lambda: self._ended >= begun)

    def settle(self, timeout_s: float) -> bool:
        """Blocks until all copies are written, at most `timeout_s`. Returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._nbytes == 0, timeout_s)

    def close(self) -> None:
        """Ends the thread; waiting copies are dropped. Idempotent."""
        with self._changed:
            self._closing = True
            self._drop_waiting()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if self._closing:
                    return
                pages = self._next()
                self._begun += 1
            try:
                outcomes = self._local.put(pages)
                self.kept += outcomes.count(PutOutcome.STORED)
            except Exception:
                # A bug in a store: these pages are not kept, the thread goes on.
                logger.exception("kvtier: pages from the remote store could not be kept")
            with self._changed:
                self._ended += 1
                self._nbytes -= sum(map(_nbytes_of, pages))
                self._changed.notify_all()

    def _drop_waiting(self) -> None:
        """Locked."""
        self._nbytes -= sum(map(_nbytes_of, self._waiting))
        self._waiting.clear()
        self._changed.notify_all()

    def _next(self) -> list[PageWrite]:
        """Locked. Pages to be written together."""
        pages, nbytes = [self._waiting.popleft()], 0
        while self._waiting and nbytes < _PUT_BYTES:
            nbytes += _nbytes_of(pages[-1])
            pages.append(self._waiting.popleft())
        return pages


def _nbytes_of(page: PageWrite) -> int:
    return sum(part.nbytes for part in page.data)
