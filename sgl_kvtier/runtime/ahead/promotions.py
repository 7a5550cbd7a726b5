"""Carries out the prefetches of a plan: host pages to the device, and pages of expected sessions
from storage to host memory.

    host -> device   SGLang's own load-back of a path of the tree, before its request is admitted.
                     The slots are the tree's at once. A batch launched while copies are in flight
                     waits for their layer counters, as SGLang's own admitting batch does, so no
                     layer reads pages that have not arrived.
    storage -> host  for expected sessions without a request: the store reads pages into host
                     slots, which are then grafted into the tree. For waiting requests, SGLang's
                     prefetch and restorations load the pages from storage.

A model with anchors (windows, states) can continue a prefix only after an anchor. There a move
brings the whole path up to an anchor: from storage, all of it that is stored, with the anchor at
its end, or nothing.

A move that cannot be carried out is reported as dropped from the target tier. Runs on the
scheduler's thread; reads end on the store's. All ranks begin the same moves in the same steps. The
end of a move is a poll (`polls.py`), so it counts once all ranks have it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_kvtier.policy.ahead.budget import FIRST_HOP
from sgl_kvtier.policy.messages import Fact, Move, TransferDone
from sgl_kvtier.runtime.ahead.counters import LookaheadCounters
from sgl_kvtier.runtime.ahead.tier_facts import TierFacts
from sgl_kvtier.runtime.sglang import anchors, storage_ops
from sgl_kvtier.runtime.sglang.attached import store_of
from sgl_kvtier.runtime.sglang.host_tier import Pin
from sgl_kvtier.runtime.sglang.tree_nodes import Found, TreeNodes
from sgl_kvtier.runtime.step.context import StepContext
from sgl_kvtier.runtime.step.polls import LANDED, LOST, Poll
from sgl_kvtier.runtime.step.tracked import Path
from sgl_kvtier.store.base import ReadOutcome, Urgency
from sgl_kvtier.types import Link, PageKey, Span, Tier

logger = logging.getLogger(__name__)

_LATER = 0.0
_NO_SPAN = Span(0, 0)
_RESET_S = 30.0
_MOST_FETCHES = 4
_HOST_SHARE = 4
"""Prefetched pages not used yet may occupy a quarter of the host pool at most, and half of the part
that copies of device pages leave.
"""
_AGAIN_S = 0.1
"""Seconds until a failed move may be planned again."""


@dataclass
class _Fetch:
    """Pages being read from storage to host memory."""

    path: Path
    keys: tuple[PageKey, ...]
    start: int
    host: Any
    pin: Pin
    """Pin of the node after which they will be grafted."""
    job: Any
    poll: Poll
    begun_at: float
    deadline_at: float
    source: Tier
    onwards: bool
    anchor: Any = None
    """Host slots of the anchor at the end of these pages."""


@dataclass
class _Copying:
    """The latest copies to the device. `ack` is SGLang's record of them."""

    counter: int
    ack: Any
    begun_at: float
    started: float
    """`begun_at` by this rank's own clock."""
    poll: Poll

    def look(self) -> None:
        """Checks whether they have ended on this rank."""
        if self.poll.local[0] or not self.ack.finish_event.query():
            return
        seconds = time.monotonic() - self.started
        if self.ack.timing_enabled:
            seconds = self.ack.start_event.elapsed_time(self.ack.finish_event) / 1e3
        self.poll.mark(0, LANDED, self.begun_at + seconds)


class Promotions:
    """The prefetches of one scheduler process."""

    def __init__(
        self,
        context: StepContext,
        facts: TierFacts,
        tell: Callable[[Fact], None],
        counters: LookaheadCounters,
    ) -> None:
        """Uses the slots, numbers and clock of `context`, which are the same on every rank."""
        self._tree = TreeNodes(context.tree)
        self._context = context
        self._facts = facts
        self._slots = context.slots
        self._tell = tell
        self._counters = counters
        self._page = context.page
        self._host, self._device = context.host, context.device
        self._anchors = context.anchors
        host, device = (port.tokens // self._page for port in (context.host, context.device))
        # With write-through, pages on the device have host copies, which cannot be evicted; the
        # rest of the host pool is available.
        left = host if context.host.write_back else max(0, host - device) // 2
        self._most_unused = min(host // _HOST_SHARE, left)
        self._page_bytes = context.page_bytes
        self._fetches: list[_Fetch] = []
        self._copying: _Copying | None = None
        """None once they have been reported."""
        self._failed: deque[tuple[float, tuple[PageKey, ...], Tier]] = deque()
        self.claiming_for: Path | None = None
        """The path that host pages are being allocated for: pages needed sooner stay."""

    @property
    def consumer(self) -> int:
        """The layer counter for a batch without loads of its own; -1 when no copy is in flight."""
        if self._copying is None or self._copying.ack.finish_event.query():
            return -1
        return self._copying.counter

    @property
    def hangs(self) -> bool:
        """Whether a read is in flight past its deadline, although it was cancelled."""
        return any(self._context.now > fetch.deadline_at for fetch in self._fetches)

    def polls(self) -> list[Poll]:
        """The moves in progress, in the order in which they began."""
        copying = self._copying
        if copying is None:
            return [fetch.poll for fetch in self._fetches]
        copying.look()
        return [copying.poll, *(fetch.poll for fetch in self._fetches)]

    # --- moves ------------------------------------------------------------------------------------

    def carry_out(
        self,
        moves: tuple[Move, ...],
        path_of: Callable[[Move], Path | None],
        owed_tokens: int,
        deadline_s: float,
    ) -> None:
        """Begins as many moves as possible. `owed_tokens` device slots stay reserved."""
        loaded = False
        for move in moves:
            path = path_of(move)
            if move.target > move.source:
                self._fail(
                    move.keys, move.target, "written through"
                )  # every page is written through as soon as it is computed
            elif path is None:
                self._fail(move.keys, move.target, "unknown")
            elif move.source in FIRST_HOP:
                if move.rid is None:
                    self._fetch(move, path, deadline_s)
                # else: SGLang's prefetch or a restoration loads them; if not, the move times out in
                # the planner
            elif self._device.copies_are_begun:
                self._fail(move.keys, move.target, "busy")
            else:
                loaded = self._load_back(path, move.keys, owed_tokens) > 0 or loaded
        if loaded:
            self._begin_copies()

    def refuse(self, moves: tuple[Move, ...], reason: str) -> None:
        """Reports these moves as failed without beginning any."""
        for move in moves:
            self._fail(move.keys, move.target, reason)

    def _fail(self, keys: tuple[PageKey, ...], target: Tier, reason: str) -> None:
        """Counts the failure at once and reports it after `_AGAIN_S`, so that the same move is not
        planned in every step.
        """
        if keys:
            self._counters.failed_moves[reason] += len(keys)
            self._failed.append((self._context.now + _AGAIN_S, keys, target))

    def _report_failed(self) -> None:
        now = self._context.now
        while self._failed and self._failed[0][0] <= now:
            _, keys, target = self._failed.popleft()
            self._facts.failed(keys, target)

    def _load_back(self, path: Path, keys: tuple[PageKey, ...], owed_tokens: int) -> int:
        """Loads the path's host pages up to the last of `keys`, in whole nodes; returns the number
        of pages. The whole path is locked, and cannot be evicted, until they have arrived.
        """
        nodes = self._nodes(path)
        try:
            last = path.keys.index(keys[-1])
        except ValueError:
            nodes = []
        absent = [n for n in nodes if n.full_value_len is None]
        fitting = [n for n in absent if n.path_end <= (last + 1) * self._page] or absent[:1]
        if self._anchors is not None:
            fitting = absent
        pages = (fitting[-1].path_end - absent[0].path_start) // self._page if fitting else 0
        reason = "not there"
        if pages:
            room = self._device.claimable() - owed_tokens
            needed = pages * self._page + self._device.locked_by_copies(fitting[-1].node_id)
            fits = needed <= room and (self._anchors is None or self._anchors.spares(1))
            reason = "" if fits else "no room"
        if not reason:
            self._slots.claiming = True  # no restoration gives up slots for it
            try:
                if not self._device.queue_copies(fitting[-1].node_id):
                    reason, pages = "refused", 0
            finally:
                self._slots.claiming = False
        there = nodes[0].path_start if nodes else 0
        for node in nodes:
            if node.full_value_len is None and not (
                pages and not reason and node.path_end <= fitting[-1].path_end
            ):
                break
            there = node.path_end
        came = frozenset(path.keys[: there // self._page])
        self._facts.placed(tuple(key for key in keys if key in came), Tier.DEVICE)
        self._fail(tuple(key for key in keys if key not in came), Tier.DEVICE, reason or "partly")
        return 0 if reason else pages

    def _nodes(self, path: Path) -> list[Any]:
        """The nodes of a path from the root on, as long as they are on the device or in host
        memory.
        """
        try:
            if path.node is None or self._anchors is not None:
                raise KeyError
            nodes = self._tree.path(path.node)
        except KeyError:
            path.node = self._find(path).node
            nodes = self._tree.path(path.node)
        usable = []
        for node in nodes:
            if node.full_value_len is None and not self._host.has_copy(node.node_id):
                break
            usable.append(node)
        return usable

    def _find(self, path: Path) -> Found:
        """How much of a path is in the tree now."""
        return self._tree.find(self._context.names.radix_key(path, 0, len(path.keys)))

    # --- copies to the device ---------------------------------------------------------------------

    def _begin_copies(self) -> None:
        context, started = self._context, time.monotonic()
        begun = self._device.begin_copies()
        if begun is not None:
            (counter, ack), poll = begun, Poll(context.next_number(), 1)
            self._copying = _Copying(counter, ack, context.now, started, poll)
            self._copying.look()

    def _note_copied(self) -> None:
        """Reports copies that have ended, with their duration."""
        copying = self._copying
        if copying is None or not copying.poll.over:
            return
        self._copying = None
        seconds = max(0.0, copying.poll.seen_at - copying.begun_at)
        slots = getattr(copying.ack, "num_tokens_by_pool", None) or {}
        own = 0 if self._anchors is None else slots.get(self._anchors.name, 0)
        nbytes = self._bytes(copying.ack.num_tokens // self._page, own)
        self._counters.moved_bytes[Link.HOST_TO_DEVICE] += nbytes
        self._tell(TransferDone("", Link.HOST_TO_DEVICE, _NO_SPAN, nbytes, seconds, _LATER))

    def _bytes(self, pages: int, anchor_slots: int) -> int:
        """Bytes of this many pages and of these anchor slots."""
        own = 0
        if self._anchors is not None:
            own = anchor_slots // self._anchors.page_slots * self._anchors.page_bytes
        return pages * self._page_bytes + own

    def end_copies(self) -> bool:
        """Blocks until copies have ended, and makes SGLang note it; whether there were any."""
        if self._copying is None:
            return False
        self._device.end_copies()
        return True

    # --- reads from storage -----------------------------------------------------------------------

    def _fetch(self, move: Move, path: Path, deadline_s: float) -> None:
        storage = store_of(self._context.tree.cache_controller)
        if storage is None or len(self._fetches) >= _MOST_FETCHES:
            self._fail(move.keys, move.target, "busy")
            return
        found = self._find(path)
        start, anchor = found.tokens // self._page, found.host_node
        keys = self._missing(move, path, start)
        if not keys or not self._host.takes_behind(anchor):
            self._fail(move.keys, move.target, "gap")
            return
        coming = frozenset(keys)
        self._facts.failed(tuple(key for key in move.keys if key not in coming), move.target)
        pin = self._host.pin(anchor)
        left = (
            self._most_unused - self._facts.unused - sum(len(fetch.keys) for fetch in self._fetches)
        )
        fitting = keys[: max(0, left)]
        if self._anchors is not None and len(fitting) < len(keys):
            fitting = ()
        self._fail(keys[len(fitting) :], move.target, "no room")
        keys = fitting
        self.claiming_for = path
        try:
            host, own = self._claim_host(len(keys), start) if keys else (None, None)
        finally:
            self.claiming_for = None
        if host is None:
            self._host.unpin(pin)
            self._fail(keys, move.target, "no room")
            return
        now, poll, started = (
            self._context.now,
            Poll(self._context.next_number(), len(keys)),
            time.monotonic(),
        )

        def on_page(page: int, outcome: ReadOutcome) -> None:
            if own is not None:
                page = len(keys) - 1 - page
            poll.mark(
                page,
                LANDED if outcome is ReadOutcome.OK else LOST[outcome],
                now + time.monotonic() - started,
            )

        order, slots = keys, host
        if own is not None:  # the last page first, because the anchor comes with it
            order, slots = keys[::-1], host.view(-1, self._page).flip(0).flatten()
        job = storage.begin_read(order, slots, deadline_s, on_page, Urgency.AHEAD, own)
        for page in range(len(keys) if job is None else 0):
            on_page(page, ReadOutcome.MISS)
        self._fetches.append(
            _Fetch(
                path,
                keys,
                start,
                host,
                pin,
                job,
                poll,
                now,
                now + deadline_s,
                move.source,
                move.target is Tier.DEVICE,
                own,
            )
        )

    def _missing(self, move: Move, path: Path, start: int) -> tuple[PageKey, ...]:
        """The pages of a move that the tree lacks; it has the first `start` pages of the path. With
        anchors, all pages of the path in storage. Empty if a page before them is missing.
        """
        if self._anchors is not None:
            return path.keys[start : start + self._facts.stored(path.keys[start:])]
        first = path.keys.index(move.keys[0]) if move.keys[0] in path.keys else len(path.keys)
        keys = move.keys[start - first :] if first <= start else ()
        return keys if path.keys[start : start + len(keys)] == keys else ()

    def _claim_host(self, pages: int, start: int) -> tuple[Any, Any]:
        """Allocates host slots for `pages` pages after the first `start` of a path, and for their
        anchor, if the model has anchors, with the last page's first. Returns None for both if there
        is no room, or if the anchor begins before these pages.
        """
        own = None
        if self._anchors is not None:
            count = self._anchors.pages
            if pages < count:  # the whole of a prefix shorter than a window is its anchor
                count = pages if start == 0 else 0
            own = self._slots.claim_host_anchors(count) if count else None
            if own is None:
                return None, None
            own = own.view(-1, self._anchors.page_slots).flip(0).flatten()
        host = self._slots.claim_host(pages * self._page)
        if host is None and own is not None:
            self._slots.put_back_host_anchors(own)
        return host, own if host is not None else None

    def look(self) -> None:
        """Notes what has ended since the last tick."""
        self._note_copied()
        self._report_failed()
        fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            if fetch.poll.over:
                self._land(fetch, fetch.poll.well)
                continue
            if self._context.now > fetch.deadline_at and fetch.job is not None:
                fetch.job.cancel()
            self._fetches.append(fetch)

    def _land(self, fetch: _Fetch, pages: int) -> None:
        """Grafts the first `pages` pages into the tree and frees the rest. No read is in flight."""
        if fetch.anchor is not None and pages < len(fetch.keys):
            # No request can continue after an incomplete prefix. These pages count as lost until
            # they are found in storage again, so that they are not read again in vain.
            self._facts.dropped(fetch.keys, fetch.source)
            pages = 0
        kept = self._graft(fetch, pages) if pages else _NO_SPAN
        if fetch.anchor is not None and not kept:
            self._slots.put_back_host_anchors(fetch.anchor)
        self._host.unpin(fetch.pin)
        self._slots.put_back_host(fetch.host[: kept.start * self._page])
        self._slots.put_back_host(fetch.host[kept.stop * self._page :])
        self._slots.give_host(len(kept) * self._page)
        self._fail(fetch.keys[kept.stop :], Tier.HOST, "not read")
        if fetch.source is Tier.REMOTE:
            # Nothing else reports pages that other servers have dropped.
            self._facts.dropped(fetch.keys[pages:], Tier.REMOTE)
        self._facts.brought(fetch.keys[kept.start : kept.stop])
        if fetch.onwards:
            self._facts.failed(fetch.keys, Tier.DEVICE)  # to the device by another move

    def _graft(self, fetch: _Fetch, pages: int) -> Span:
        """Inserts the pages that were read into the tree. Returns those that the tree took: the
        ones after those it had already, or none.
        """
        page, names = self._page, [key.hex() for key in fetch.keys[:pages]]
        nbytes = self._bytes(pages, 0 if fetch.anchor is None else len(fetch.anchor))
        tokens = self._context.names.radix_key(fetch.path, fetch.start, fetch.start + pages)
        taken = self._host.graft(
            fetch.pin.node,
            tokens,
            fetch.host[: pages * page],
            names,
            None if fetch.anchor is None else partial(self._give_anchor, fetch),
        )
        if taken is None:
            return _NO_SPAN
        fetch.path.node = taken.node or fetch.path.node
        link = FIRST_HOP[fetch.source]
        self._counters.moved_bytes[link] += nbytes
        storage_ops.count_loaded(self._context.tree, 0, pages * page)
        seconds = max(0.0, fetch.poll.seen_at - fetch.begun_at)
        if fetch.begun_at > self._context.loaded_at:
            self._tell(TransferDone("", link, _NO_SPAN, nbytes, seconds, _LATER))
        return Span(taken.known_tokens // page, pages)

    def _give_anchor(self, fetch: _Fetch, inserted: Any) -> None:
        """Passes the anchor to the tree, which has just inserted the pages into host memory."""
        assert self._anchors is not None
        in_order = fetch.anchor.view(-1, self._anchors.page_slots).flip(0).flatten()
        tree, behind = self._context.tree, fetch.pin.node
        anchors.given(tree, self._anchors.name, behind, in_order, inserted)
        fetch.anchor = None

    def reset(self) -> None:
        """Ends all moves, before the pools are emptied or for good. Blocks until no read writes to
        our host pages, and until copies to the device have ended: after this, no batch waits for
        their layer counter, although the tree has owned their pages since they began.

        If a read hangs nevertheless, its host pages stay unusable until the pools are emptied. A
        server with one rank counts as busy until that read has ended (`reads_hang` of the context).
        A server with several ranks does not wait, because the ranks would have to agree on it.
        """
        end = time.monotonic() + _RESET_S
        jobs = [fetch.job for fetch in self._fetches if fetch.job is not None]
        for job in jobs:
            job.cancel()
        fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            self._host.unpin(fetch.pin)
            if fetch.job is None or fetch.job.wait(max(0.0, end - time.monotonic())):
                self._slots.put_back_host(fetch.host)
                if fetch.anchor is not None:
                    self._slots.put_back_host_anchors(fetch.anchor)
            else:
                self._slots.give_host(len(fetch.host))
                self._context.hung_reads.append(fetch.job)
                logger.error(
                    "kvtier: a read of %d pages into host memory is still under way; they are "
                    "not used again before a flush",
                    len(fetch.keys),
                )
            self._facts.failed(fetch.keys, Tier.DEVICE if fetch.onwards else Tier.HOST)
        while self._failed:
            _, keys, target = self._failed.popleft()
            self._facts.failed(keys, target)
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.ack.finish_event.synchronize()
