"""Uploads pages of the local store to the remote one, in the background.

The queue has names, not bytes: the thread reads a page from the local store, verified, when it is
its turn. For 128 names at a time it queries which are remote already; those are not sent.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageStore,
    PageWrite,
    PutOutcome,
    ReadOutcome,
    Urgency,
)
from sgl_kvtier.store.tiered.remote import RemoteStore
from sgl_kvtier.types import Lookup, PageKey

logger = logging.getLogger(__name__)

MOST_NAMES = 100_000
"""Length of the queue; beyond it the oldest name is dropped. As many names are remembered that are
not to be sent yet.
"""
_ASKED = 128
"""Names in one query."""
_SENT_BYTES = 4 << 20
"""Bytes read and sent together; at least one page."""
_ASK_S = 2.0
PAUSE_S = 1.0
"""Seconds to wait after a refusal, or if the remote store does not respond."""
_YIELD_S = 0.02
_YIELD_MOST = 50
"""Reads go first for at most this many `_YIELD_S`; then some pages are sent."""
_WRITES_MOST = 10
"""The same for writes of the local store, once per query: writes come in series, and on few cores a
concurrent upload makes them slower by half.
"""


class Name(NamedTuple):
    """A page of the local store. Its bytes are read when it is sent."""

    key: PageKey
    pool: str
    nbytes: int


class Uploader:
    """A thread that sends pages. `reading`: whether pages are being read from the remote store;
    `writing`: whether the local one is being written. Both go first. `most_unsent`: how many local
    pages may be unsent with on-evict.
    """

    def __init__(
        self,
        local: PageStore,
        remote: RemoteStore,
        policy: str,
        reading: Callable[[], bool],
        writing: Callable[[], bool],
        most_names: int = MOST_NAMES,
        most_unsent: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`policy`: all, second-hit (pages written or read here twice), on-evict (the least
        recently used ones, once the local store is full) or off.
        """
        self.sent = 0
        """Pages that the remote store newly stored."""
        self.there = 0
        """Pages that it had already."""
        self.refused = 0
        self.dropped = 0
        """Names dropped from a full queue, or whose page was gone when it was to be sent."""
        self._local = local
        self._remote = remote
        self._policy = policy
        self._reading = reading
        self._writing = writing
        self._most_unsent = most_unsent
        self._most_names = most_names
        self._waiting: OrderedDict[tuple[PageKey, str], int] = OrderedDict()
        self._once: OrderedDict[tuple[PageKey, str], int] = OrderedDict()
        """Names that are not to be sent yet, with their bytes, least recently used first."""
        self._said_large = False
        self._taken: list[Name] = []
        """The names that the thread is sending; empty if it has none or shall stop."""
        self._busy = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtier-upload", daemon=True)
        if policy != "off":
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Length of the queue."""
        return len(self._waiting)

    def written(self, names: Iterable[Name]) -> None:
        """Called with pages put to the local store, new or not. Any thread; does not block."""
        if self._policy == "on-evict":
            self._age(names)
        else:
            self._note(names, again=self._policy == "all")

    def read(self, names: Iterable[Name]) -> None:
        """Called with pages that are read from the local store. Any thread; does not block."""
        if self._policy == "on-evict":
            self._age(names)
        elif self._policy == "second-hit":
            self._note(names, again=False)

    def settle(self, timeout_s: float) -> bool:
        """Blocks until nothing is queued or in flight, at most `timeout_s`. Returns whether so."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), timeout_s)

    def forget(self, keys: Iterable[PageKey] | None = None, pool: str = KV) -> None:
        """Called after pages were deleted, None for all: their names leave the queue. If one of
        them is being sent, sending stops, and the others that were taken from the queue with it
        are queued again. Does not block: what is on its way is left to the remote store.
        """
        with self._changed:
            if keys is None:
                self._once.clear()
                self._waiting.clear()
                self._taken = []
            gone = {(key, pool) for key in keys or ()}
            for name in gone:
                self._once.pop(name, None)
                self._waiting.pop(name, None)
            left = [one for one in self._taken if (one.key, one.pool) not in gone]
            if len(left) < len(self._taken):
                self._taken = []
                for key, of, nbytes in reversed(left):
                    self._waiting[key, of] = nbytes
                    self._waiting.move_to_end((key, of), last=False)
            self._changed.notify_all()

    def stop(self) -> None:
        """Empties the queue and sends no more. Does not block."""
        with self._changed:
            self._closing = True
            self._taken = []
            self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stops and ends the thread. Blocks while pages are being sent. Idempotent."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _note(self, names: Iterable[Name], *, again: bool) -> None:
        """Queues names seen before, or all if `again`, and remembers the others."""
        if self._policy == "off":
            return
        with self._changed:
            for key, pool, nbytes in names:
                name = (key, pool)
                if not again and name not in self._once:
                    self._once[name] = nbytes
                    if len(self._once) > self._most_names:
                        self._once.popitem(last=False)
                    continue
                self._once.pop(name, None)
                self._queue(name, nbytes)
            self._changed.notify_all()

    def _age(self, names: Iterable[Name]) -> None:
        """Marks pages as used. Queues the least recently used ones if too many are unsent."""
        most = min(self._most_unsent(), self._most_names)
        with self._changed:
            for key, pool, nbytes in names:
                self._once[key, pool] = nbytes
                self._once.move_to_end((key, pool))
            while len(self._once) > most:
                self._queue(*self._once.popitem(last=False))
            self._changed.notify_all()

    def _queue(self, name: tuple[PageKey, str], nbytes: int) -> None:
        """Locked."""
        self._waiting[name] = nbytes
        if len(self._waiting) > self._most_names:
            self._waiting.popitem(last=False)
            self.dropped += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._taken, self._busy = [], False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if self._closing:
                    return
                self._busy = True
                names = self._taken = self._next()
            try:
                self._send_missing(names)
            except Exception:
                # A bug in a store: these pages are not sent, the thread goes on.
                logger.exception("kvtier: pages could not be sent to the remote store")
                self._pause(PAUSE_S)

    def _next(self) -> list[Name]:
        """Locked. Takes the oldest names of one pool from the queue."""
        names: list[Name] = []
        while self._waiting and len(names) < _ASKED:
            (key, pool), nbytes = self._waiting.popitem(last=False)
            if names and pool != names[0].pool:
                self._waiting[key, pool] = nbytes
                self._waiting.move_to_end((key, pool), last=False)
                break
            names.append(Name(key, pool, nbytes))
        return names

    def _without_large(self, names: list[Name]) -> list[Name]:
        """The names of pages that are not too large for the remote store."""
        most = self._remote.most_page_bytes
        large = [name for name in names if name.nbytes > most]
        if not large:
            return names
        self.refused += len(large)
        if not self._said_large:
            self._said_large = True
            logger.warning(
                "kvtier: pages of pool %s have %d bytes and the remote store takes up to %d: they "
                "are not sent, so that no other server finds their prefixes",
                large[0].pool,
                large[0].nbytes,
                most,
            )
        return [name for name in names if name.nbytes <= most]

    def _send_missing(self, names: list[Name]) -> None:
        names = self._without_large(names)
        if not names:
            return
        pool = names[0].pool
        keys = [name.key for name in names]
        self._yield(self._writing, _WRITES_MOST)
        self._yield(self._reading, _YIELD_MOST)
        while not self._remote.ask(keys, pool, _ASK_S):
            if not self._pause(PAUSE_S):
                return
        there = self._remote.lookup(keys, pool)
        self.there += there.count(Lookup.HIT)
        missing = [n for n, answer in zip(names, there, strict=True) if answer is not Lookup.HIT]
        while missing and self._is_wanted():
            count, nbytes = 1, missing[0].nbytes
            while count < len(missing) and nbytes + missing[count].nbytes <= _SENT_BYTES:
                nbytes += missing[count].nbytes
                count += 1
            self._yield(self._reading, _YIELD_MOST)
            self._send(missing[:count])
            missing = missing[count:]

    def _send(self, names: list[Name]) -> None:
        """Reads pages from the local store and puts those with outcome OK."""
        memory = memoryview(bytearray(sum(name.nbytes for name in names)))
        pages: list[PageRead] = []
        start = 0
        for name in names:
            pages.append(PageRead(name.key, [memory[start : start + name.nbytes]], name.pool))
            start += name.nbytes
        job = self._local.read(pages, priority=Urgency.LAST)
        while not job.wait(PAUSE_S):
            if not self._is_wanted():
                job.cancel()
        read = [
            PageWrite(page.key, page.into, page.pool)
            for page, outcome in zip(pages, job.outcomes, strict=True)
            if outcome is ReadOutcome.OK
        ]
        self.dropped += len(pages) - len(read)
        if not read or not self._is_wanted():
            return
        outcomes = self._remote.put(read, self._is_wanted)
        self.sent += outcomes.count(PutOutcome.STORED)
        self.there += outcomes.count(PutOutcome.KEPT)
        refused = outcomes.count(PutOutcome.REFUSED)
        self.refused += refused
        if refused:
            self._pause(PAUSE_S)

    def _is_wanted(self) -> bool:
        """Whether the names that were taken are still to be sent."""
        return bool(self._taken)

    def _yield(self, busy: Callable[[], bool], most: int) -> None:
        for _ in range(most):
            if not busy() or not self._pause(_YIELD_S):
                return

    def _pause(self, seconds: float) -> bool:
        """Waits; False if these names are not to be sent any more."""
        with self._changed:
            return not self._changed.wait_for(lambda: not self._is_wanted(), seconds)
