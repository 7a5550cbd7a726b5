"""Writes to the engine: pages are packed into the ring and sent in batches, in bounded time."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sgl_kvtier.remote.channel import bytes_in_ring, pack_pages, place
from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import Op
from sgl_kvtier.remote.link import Answer, Call, Link
from sgl_kvtier.remote.page import HEAD_BYTES, Namespace, can_be_named
from sgl_kvtier.remote.presence import Presence
from sgl_kvtier.remote.reads import BATCH_PAGES, batch_bytes
from sgl_kvtier.remote.ring import ALIGN
from sgl_kvtier.store.base import PageWrite, PutOutcome

_UNDER_WAY = 2
"""Batches in flight: one is written while the next is packed."""
_OUTCOMES = {Code.OK: PutOutcome.STORED, Code.KEPT: PutOutcome.KEPT}


class Written(NamedTuple):
    """A batch that ended: its pages' indexes, the answer, and `Presence.epoch` at its begin."""

    which: list[int]
    answer: Answer
    epoch: int


Done = queue.SimpleQueue[Written]


class Writer:
    """The write path of one link. Any thread."""

    def __init__(self, link: Link, namespace: Namespace, presence: Presence) -> None:
        self._link = link
        self._namespace = namespace
        self._presence = presence

    @property
    def most_page_bytes(self) -> int:
        """Bytes of the largest page that is written: it fills half of the ring."""
        return self._link.ring.nbytes // 2 // ALIGN * ALIGN - HEAD_BYTES

    def write(
        self,
        pages: Sequence[PageWrite],
        outcomes: list[PutOutcome],
        until: float,
        wanted: Callable[[], bool] | None = None,
    ) -> bool:
        """Writes pages whose outcome is not KEPT, two batches at a time, until all are written, the
        time `until` has come, or `wanted` returns false. Sets their outcomes. False if the engine
        did not reply in time.
        """
        done: Done = queue.SimpleQueue()
        batches = list(self._batches(pages, outcomes))[::-1]
        under_way = 0
        while (batches or under_way) and time.monotonic() < until:
            if batches and under_way < _UNDER_WAY:
                if self._begin(pages, batches[-1], done, until, wanted):
                    batches.pop()
                    under_way += 1
                    continue
                if not under_way:
                    return True
            try:
                written = done.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            under_way -= 1
            self._written(pages, written, outcomes)
        return time.monotonic() < until

    def _batches(
        self, pages: Sequence[PageWrite], outcomes: Sequence[PutOutcome]
    ) -> Iterator[list[int]]:
        """Batches of up to 16 pages and `batch_bytes` of one pool; skips pages that cannot be
        stored.
        """
        batch: list[int] = []
        room = 0
        for i, page in enumerate(pages):
            nbytes = length_of(page)
            if (
                outcomes[i] is PutOutcome.KEPT
                or not 0 < nbytes <= self.most_page_bytes
                or not can_be_named(page.pool, [page.key])
                or self._presence.hides(page.pool, [page.key])
            ):
                continue
            full = len(batch) == BATCH_PAGES or nbytes > room
            if batch and (full or page.pool != pages[batch[0]].pool):
                yield batch
                batch = []
            room = (room if batch else batch_bytes(self._link.ring.nbytes)) - nbytes
            batch.append(i)
        if batch:
            yield batch

    def _begin(
        self,
        pages: Sequence[PageWrite],
        which: list[int],
        done: Done,
        until: float,
        wanted: Callable[[], bool] | None,
    ) -> bool:
        """Packs a batch into the ring and sends it. False if there is no space or no child, or if a
        page was removed meanwhile.
        """
        link = self._link
        pool = pages[which[0]].pool
        keys = [pages[i].key for i in which]
        lengths = [length_of(pages[i]) for i in which]
        with link.lock:
            extent = link.ring.take(bytes_in_ring(lengths))
        if extent is None:
            return False
        heads = self._namespace.heads(pool, keys, lengths)
        placed = place(extent, heads, lengths, [list(pages[i].data) for i in which])
        pack_pages(link.ring, placed)

        def ended(answer: Answer) -> None:
            done.put(Written(which, answer, epoch))

        # The call may outlive the caller's memory, which it does not need: its pages are packed.
        call = Call(Op.PUT, pool, keys, ended, until, extent, placed._replace(buffers=[]))
        with link.lock:
            # Under the lock, so that a removal that comes later waits for this call.
            epoch = self._presence.epoch
            removed = self._presence.hides(pool, keys) or not (wanted is None or wanted())
            if not removed and link.begin(call):
                return True
            link.ring.give(extent)
        link.wake_before(0.0)  # a read may wait for that space
        return False

    def _written(
        self, pages: Sequence[PageWrite], written: Written, outcomes: list[PutOutcome]
    ) -> None:
        which = written.which
        for i, code in zip(which, written.answer.codes, strict=True):
            outcomes[i] = _OUTCOMES.get(Code(code), PutOutcome.REFUSED)
        here = [pages[i].key for i in which if outcomes[i] is not PutOutcome.REFUSED]
        self._presence.stored(pages[which[0]].pool, here, time.monotonic(), written.epoch)


def length_of(page: PageWrite) -> int:
    """Bytes of a page to write."""
    return sum(part.nbytes for part in page.data)
