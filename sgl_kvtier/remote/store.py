"""The remote store: pages that every server with the same identity and rank finds. See README.md.

It gives the guarantee of store/base.py on top of an engine that guarantees nothing. A page is
copied from the ring to its destination and verified there. No call blocks longer than its stated
bound, and no exception of the engine leaves this package.
"""

from __future__ import annotations

import functools
import importlib.util
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sgl_kvtier.errors import StoreError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.remote.channel import bytes_in_ring
from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import MOST_KEYS, Op
from sgl_kvtier.remote.child.settings import RemoteSettings, own_hostname
from sgl_kvtier.remote.link import Answer, Call, Link
from sgl_kvtier.remote.page import Namespace, can_be_named
from sgl_kvtier.remote.presence import Presence
from sgl_kvtier.remote.reads import Reader, RemoteReadJob, batch_bytes
from sgl_kvtier.remote.removals import Removals
from sgl_kvtier.remote.writes import Writer, length_of
from sgl_kvtier.store.base import (
    KV,
    PageRead,
    PageWrite,
    PutOutcome,
    ReadJob,
    ReadOutcome,
    StoreStats,
)
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.io.jobs import Ended
from sgl_kvtier.types import Lookup, PageKey

_COUNTED = {
    ReadOutcome.OK: "pages_read",
    ReadOutcome.MISS: "pages_missed",
    ReadOutcome.CORRUPT: "pages_corrupt",
    ReadOutcome.FAILED: "reads_failed",
    ReadOutcome.LATE: "reads_late",
    ReadOutcome.CANCELLED: "reads_cancelled",
    PutOutcome.STORED: "pages_written",
    PutOutcome.KEPT: "pages_kept",
    PutOutcome.REFUSED: "pages_refused",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """The state of a remote store."""

    usable: bool
    trouble: str
    """Why it is not usable; empty if it is."""
    child: int
    """Process id of the child that runs the engine; 0: there is none."""
    starts: int
    """How often a child was started."""
    exists_calls: int
    exists_late: int
    """Queries whose caller did not wait for the result."""
    ring_taken_bytes: int
    removals_waiting: int
    """Pages deleted here that the engine may still have; a clear counts as one."""


def open_remote(
    settings: RemoteSettings, identity: Identity, rank: str, page_bytes: int = 0
) -> RemoteStore:
    """Opens the remote store of one rank. Returns at once: the engine is connected in the
    background.

    `rank` names the rank's share of a page, without the numbers of data-parallel copies: stores
    with equal names share pages. The ring gets space for four pages of `page_bytes`, the largest
    page size: reads fill half of it plus up to one page, and a page can be written at the same
    time. Raises ConfigError and StoreError for invalid arguments; the message says what to do.
    """
    if settings.engine == "off":
        raise StoreError("the remote store is off: set remote.engine")
    if settings.engine == "mooncake":
        if importlib.util.find_spec("mooncake") is None:
            raise StoreError(f"Mooncake is not installed: {how_to_install('remote')}")
        if settings.hostname:
            try:
                own_hostname(settings)
            except OSError as error:
                raise StoreError(
                    f"remote.hostname = {settings.hostname} or remote.master = {settings.master} "
                    f"has no address: {error}"
                ) from error
    room = max(settings.ring_bytes, 4 * bytes_in_ring([page_bytes]))
    settings = replace(settings, ring_bytes=room)
    try:
        return RemoteStore(settings, Namespace(identity.fingerprint, rank))
    except OSError as error:
        raise StoreError(
            f"no shared memory of remote.ring_bytes = {settings.ring_bytes}: {error}"
        ) from error


class RemoteStore:
    """A `PageStore` in a distributed engine, and `ask`. Created by `open_remote`. Any thread.

    While the engine is not usable, and in a forked process, every page is a miss and every put is
    refused, at once.
    """

    def __init__(
        self, settings: RemoteSettings, namespace: Namespace, presence: Presence | None = None
    ) -> None:
        self._settings = settings
        self._presence = Presence() if presence is None else presence
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._opened_at = time.monotonic()
        self._link = link = Link(settings, namespace.prefix)
        self._reader = Reader(link, namespace, self._presence, settings.deadline_s)
        self._writer = Writer(link, namespace, self._presence)
        where = (settings.engine, settings.master, namespace.prefix)
        self._removals = Removals(link, self._presence, settings.deadline_s, where)
        link.start(self._tend)

    @property
    def usable(self) -> bool:
        """Whether the engine is connected and responds."""
        return self._link.usable

    @property
    def child_starts(self) -> int:
        """How often the child that runs the engine was started."""
        return self._link.restarts

    @property
    def most_page_bytes(self) -> int:
        """Bytes of the largest page that can be stored."""
        return self._writer.most_page_bytes

    def wait_usable(self, timeout_s: float) -> bool:
        """Blocks until `usable`, at most `timeout_s` seconds. Returns whether it is."""
        return self._link.wait_usable(timeout_s)

    def condition(self) -> Condition:
        """The state, for metrics and messages."""
        link = self._link
        return Condition(
            link.usable,
            link.trouble,
            link.child,
            link.restarts,
            self._counts["exists_calls"],
            self._counts["exists_late"],
            link.ring.taken_bytes if link.open else 0,
            self.removals_waiting,
        )

    @property
    def calls_late(self) -> int:
        """Puts, deletes and clears that returned before the engine had completed them."""
        return self._counts["puts_late"] + self._removals.late

    @property
    def removals_waiting(self) -> int:
        """Pages deleted here that the engine may still have; a clear counts as one."""
        return self._removals.waiting

    def lookup(self, keys: Sequence[PageKey], pool: str = KV) -> list[Lookup]:
        """The cached answers, without a query: HIT for pages found or written in the last 5 s."""
        if not self._link.usable:
            return [Lookup.MISS] * len(keys)
        return self._presence.lookup(pool, keys, time.monotonic())

    def ask(self, keys: Sequence[PageKey], pool: str = KV, timeout_s: float | None = None) -> bool:
        """Queries the engine for all keys without a cached answer; blocks for at most `timeout_s`
        (default `exists_wait_ms`).

        Returns whether `lookup` now knows them all. A result that comes later is kept for the next
        look-up. False too if one of the pages waits to be removed.
        """
        begun = time.monotonic()
        if timeout_s is None:
            timeout_s = self._settings.exists_wait_ms * 1e-3
        if not self._link.usable or not can_be_named(pool, keys):
            return False
        epoch = self._presence.epoch
        unknown = self._presence.unknown(pool, keys, begun)
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        waiting = 0
        for part in _parts(unknown):
            self._count("exists_calls")
            note = functools.partial(self._noted, pool, part, epoch, answers)
            if not self._begin(Call(Op.EXISTS, pool, part, note, self._limit(begun))):
                return False
            waiting += 1
        known = True
        for _ in range(waiting):
            try:
                known &= answers.get(timeout=max(0.0, begun + timeout_s - time.monotonic()))
            except queue.Empty:
                self._count("exists_late")
                return False
        return known and epoch == self._presence.epoch and not self._presence.hides(pool, keys)

    def read(
        self,
        pages: Sequence[PageRead],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_page: Callable[[int, ReadOutcome], None] | None = None,
    ) -> ReadJob:
        """Begins reading pages in the given order and returns at once.

        In addition to `PageStore.read`: a page in flight is FAILED at the deadline, or within the
        settings' `deadline_s` after it began. `in_flight` falls at once then, since the engine
        writes only to the ring. Pages that have not begun are LATE, even without a deadline, if no
        page has arrived for `deadline_s`.
        """
        now = time.monotonic()
        deadline = now + deadline_s if deadline_s is not None else None
        most = batch_bytes(self._settings.ring_bytes)
        job = RemoteReadJob(pages, deadline, on_page, self._count_reads, most)
        if not self._link.usable:
            job.end_rest(ReadOutcome.MISS)
            return job
        self._reader.enter(job, priority)
        return job

    def put(
        self, pages: Sequence[PageWrite], wanted: Callable[[], bool] | None = None
    ) -> list[PutOutcome]:
        """Writes pages; blocks for at most `deadline_s` of the settings. REFUSED: pages not written
        by then, those not begun before `wanted` became false, and pages that wait to be removed.
        """
        begun = time.monotonic()
        outcomes = [PutOutcome.REFUSED] * len(pages)
        if self._link.usable and self._settings.write != "off":
            for i, page in enumerate(pages):
                if self._presence.lookup(page.pool, [page.key], begun)[0] is Lookup.HIT:
                    outcomes[i] = PutOutcome.KEPT
            if not self._writer.write(pages, outcomes, self._limit(begun), wanted):
                self._count("puts_late")
        for page, outcome in zip(pages, outcomes, strict=True):
            self._count(_COUNTED[outcome])
            if outcome is PutOutcome.STORED:
                self._count("bytes_written", length_of(page))
        return outcomes

    def retain(self, owner: str, keys: Sequence[PageKey], seconds: float) -> int:
        """Returns 0: the engine evicts its pages itself."""
        del owner, keys, seconds
        return 0

    def delete(
        self, keys: Sequence[PageKey], pool: str = KV, first: Callable[[], None] | None = None
    ) -> int:
        """Drops pages for all servers that share them; blocks for at most `deadline_s` of the
        settings. Returns how many the engine removed by then.

        From the call on this process uses none of them: each is a miss and is not written until the
        engine has confirmed that it is gone, however long that takes. `first` is called before the
        engine is. If the process ends before that, the engine keeps the rest.
        """
        named = [key for key in keys if can_be_named(pool, [key])]
        return self._removals.remove(pool, named, first)

    def clear(self, first: Callable[[], None] | None = None) -> int:
        """Drops every page of this identity and rank, for all that share them, as `delete` does."""
        return self._removals.remove("", None, first)

    def stats(self) -> StoreStats:
        """Counters of this store. Only the engine's master knows its total content."""
        names = StoreStats.__dataclass_fields__
        counts = {name: count for name, count in self._counts.copy().items() if name in names}
        return StoreStats(**counts, open_s=time.monotonic() - self._opened_at)

    def close(self) -> None:
        """Ends all reads and the child process; blocks for 2 s at most. Idempotent."""
        if not self._link.open:
            return
        self._reader.cancel()
        self._link.close()
        self._removals.close()

    def _limit(self, begun: float) -> float:
        return begun + self._settings.deadline_s

    def _count(self, name: str, more: int = 1) -> None:
        with self._counting:
            self._counts[name] += more

    def _count_reads(self, ended: Ended, lengths: Sequence[int]) -> None:
        for i, outcome in ended:
            self._count(_COUNTED[outcome])
            if outcome is ReadOutcome.OK:
                self._count("bytes_read", lengths[i])

    def _begin(self, call: Call) -> bool:
        if not self._link.open:
            return False
        with self._link.lock:
            return self._link.begin(call)

    def _noted(
        self,
        pool: str,
        keys: Sequence[PageKey],
        epoch: int,
        answers: queue.SimpleQueue[bool],
        answer: Answer,
    ) -> None:
        """Records the engine's answers of one call, in time or not."""
        codes = answer.codes
        known = [i for i, code in enumerate(codes) if code in (Code.OK, Code.MISS)]
        here = [codes[i] == Code.OK for i in known]
        self._presence.found(pool, [keys[i] for i in known], here, time.monotonic(), epoch)
        answers.put(len(known) == len(keys))

    def _tend(self, now: float) -> float:
        return min(self._reader.tend(now), self._removals.tend(now))


def _parts(keys: Sequence[PageKey]) -> list[Sequence[PageKey]]:
    return [keys[i : i + MOST_KEYS] for i in range(0, len(keys), MOST_KEYS)]
