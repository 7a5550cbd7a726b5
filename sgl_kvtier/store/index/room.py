"""Space for new pages: free slots, new segments within the budget, slots of evicted pages."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
from collections import defaultdict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.errors import StoreError
from sgl_kvtier.sizes import format_bytes
from sgl_kvtier.store.disk.format import BLOCK, DROP, RECORD, slot_bytes
from sgl_kvtier.store.disk.index_log import INDEX_BYTES_PER_SLOT
from sgl_kvtier.store.disk.namespace import folder_bytes, list_ranks
from sgl_kvtier.store.disk.removal import others_by_age, remove_namespace
from sgl_kvtier.store.disk.segment import (
    MOST_SEGMENT_NUMBER,
    Segment,
    create_segment,
    segment_name,
    spoil_segment,
)
from sgl_kvtier.store.disk.space import NoRoom, fixed_bytes, no_room
from sgl_kvtier.store.index.core import Core
from sgl_kvtier.store.index.eviction import LeastRecentlyUsed, coldest_segment
from sgl_kvtier.store.index.retention import Retention
from sgl_kvtier.store.index.shares import Holding, Shares
from sgl_kvtier.store.index.slots import Rows, State
from sgl_kvtier.tenants import parse_tenants

logger = logging.getLogger(__name__)

_MOST_SEGMENTS = 512
"""The number of segments, and so of open files, to aim for: a large capacity gets large segments.
"""
_FEWEST_SEGMENTS = 8
"""A small capacity gets smaller segments, so that two slot sizes can exist side by side."""
_NAMES_TRIED = 10_000
_AGAIN_S = 1.0
"""Seconds until a full owner measures again what other identities take."""


class Siblings(Protocol):
    """The other owners of folders with the same pages. The caller holds `Room.changing`."""

    def measure(self) -> None:
        """Updates `Room.held_by_siblings`. Does I/O; never raises OSError."""

    def make_room(self, nbytes: int) -> bool:
        """Tries to find `nbytes` for a segment of an owner that holds less than its part. True if a
        segment in a folder without an owner was removed. Otherwise it asks the owners that hold
        more than their part to give segments back. Never raises OSError.
        """


class Room:
    """The segments of one open store, and the space they may take.

    "Locked" methods are called with the core's lock held and do no I/O; the others take it
    themselves.
    """

    def __init__(self, core: Core, namespace: str, ranks: int) -> None:
        self._core = core
        self._namespace = namespace
        self._ranks = ranks
        self.changing = threading.Lock()
        """Held while segments are created, removed or closed. Taken before the log's and core's
        locks.
        """
        self._syncing = threading.Lock()
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lru: dict[tuple[int, int | None], LeastRecentlyUsed] = {}
        self.retention = Retention(core.table, core.env.now)
        """Pages that are evicted last. The core's lock guards it."""
        named = parse_tenants(core.config.tenants)
        self.shares = Shares(core.table, named, ranks) if named else None
        """Guaranteed shares of tenants; None if no tenant is named."""
        self._next_number = 1
        self._stuck_bytes = 0
        self._aside: dict[int, int] = {}
        self.aside = np.zeros(0, RECORD)
        """Records of the pages in segments that could not be opened. The core's lock guards it."""
        self._others: list[tuple[str, int]] = []
        """The other identities' folders and their bytes, as last measured."""
        self._other_folders_bytes = 0
        """Bytes in this identity's other folders, as last measured."""
        self._kept = 0
        """Bytes that other identities cannot take from these pages while this store is open."""
        self._measure_at = 0.0
        self._held_then = 0
        """`held_by_siblings` when the others were measured."""
        self._left_alone: set[str] = set()
        self._removed = False
        self._said_why = False
        self.segments: dict[int, Segment] = {}
        self.theirs: dict[int, Segment] = {}
        """Open segments of siblings' folders, by the number that `named_apart` gives."""
        self.siblings: Siblings | None = None
        self.held_by_siblings = 0
        self.giving = False
        """Holds more than its part while a sibling wants space, and so creates no segment."""

    @property
    def bytes_used(self) -> int:
        """Bytes of all segments, including those that could not be opened or removed."""
        open_bytes = sum(s.nbytes for s in list(self.segments.values()))
        return open_bytes + self.aside_bytes + self._stuck_bytes

    @property
    def aside_bytes(self) -> int:
        """Bytes on disk of the segments that could not be opened."""
        return sum(list(self._aside.values()))

    @property
    def charged_bytes(self) -> int:
        """`bytes_used`, plus the bytes that the index log can grow to for their slots."""
        return self.bytes_used + INDEX_BYTES_PER_SLOT * sum(
            s.slots for s in list(self.segments.values())
        )

    @property
    def whole(self) -> int:
        """Bytes that all owners of these pages may take: their share of the capacity that other
        identities leave. Bytes they held before other identities grew stay theirs.
        """
        share = max(0, self._core.config.capacity_bytes - self._others_bytes) // self._ranks
        return max(self._kept, share - fixed_bytes(share))

    @property
    def fixed_bytes(self) -> int:
        """Bytes that a folder's small files may take."""
        return fixed_bytes(self._core.config.capacity_bytes // self._ranks)

    @property
    def allowance(self) -> int:
        """Bytes this owner may take: `whole` minus the bytes of siblings."""
        return self.whole - self.held_by_siblings

    @property
    def _limit(self) -> int:
        """Bytes this owner may grow to: its allowance, and what all other folders leave."""
        elsewhere = self._others_bytes + self._other_folders_bytes
        left = self._core.config.capacity_bytes - elsewhere - self.fixed_bytes
        return min(self.allowance, max(0, left))

    def _fits_alone(self) -> bool:
        """Whether this rank's segments would fit its share of the capacity without other
        identities.
        """
        share = self._core.config.capacity_bytes // self._ranks
        return self.charged_bytes <= share - fixed_bytes(share)

    @property
    def _others_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._others)

    @property
    def segment_target(self) -> int:
        """Target size of a new segment."""
        config = self._core.config
        share = config.capacity_bytes // self._ranks
        return min(max(config.segment_bytes, share // _MOST_SEGMENTS), share // _FEWEST_SEGMENTS)

    def no_room(self, page_bytes: int = 1) -> NoRoom | None:
        """Why no segment for a page of `page_bytes` could be created now, even after removing
        identities that no process has open; None if one could be.
        """
        core = self._core
        found = no_room(
            core.env, core.folder, core.config, ranks=self._ranks, page_bytes=page_bytes
        )
        if found is None or found.lasting:
            return found
        with contextlib.suppress(OSError):
            spare = core.env.free_bytes(core.folder) - core.config.min_free_bytes
            if spare + self._others_bytes >= BLOCK + slot_bytes(page_bytes):
                return None
        return found

    def adopt(self, segments: list[Segment], aside: list[int]) -> None:
        """Registers the segments found at open. Those that could not be opened (`aside`) only count
        towards the budget. Called before any other thread runs.
        """
        for number in aside:
            self._next_number = max(self._next_number, number + 1)
            self._aside[number] = 0
            with contextlib.suppress(OSError):
                self._aside[number] = self._core.env.bytes_on_disk(self._path(number))
        self._core.table.reserve(sum(segment.slots for segment in segments))
        for segment in segments:
            segment.base = self._core.table.add_rows(segment.slots, segment.number)
            self.segments[segment.number] = segment
            self._next_number = max(self._next_number, segment.number + 1)

    def settle(self, highest_number: int) -> None:
        """Called after the rows were filled, before any other thread runs: lists the free rows and
        removes segments beyond the budget.
        """
        self._next_number = max(self._next_number, highest_number + 1)
        for segment in self.segments.values():
            rows = np.arange(segment.base, segment.base + segment.slots)
            self._free[segment.slot_bytes].extend(
                rows[self._core.table.state[rows] == State.FREE].tolist()
            )
        self._others = others_by_age(self._core.env, self._namespace)
        self._evict_others(self.charged_bytes)
        before, fits = self.bytes_used, self._fits_alone()
        while self.charged_bytes > self.allowance and self._retire_coldest(None):
            pass
        if fits and self.bytes_used < before:
            logger.warning(
                "%s of pages in %s were removed: other models' pages in the same store.path take "
                "%s of store.capacity_bytes. Raise store.capacity_bytes, or give each model a "
                "store.path of its own",
                format_bytes(before - self.bytes_used),
                self._core.folder,
                format_bytes(self._others_bytes),
            )

    def release(self, rows: Rows) -> None:
        """Locked. Returns free rows to the free lists, except those of removed segments."""
        for row in rows.tolist():
            segment = self.segments.get(int(self._core.table.segment[row]))
            if segment is not None:
                self._free[segment.slot_bytes].append(row)

    def slots_of(
        self, rows: Rows, numbers: NDArray[np.uint32], which: NDArray[np.bool_]
    ) -> tuple[Rows, NDArray[np.uint32], dict[int, Segment]]:
        """Locked. (slot of each row, number of its segment, those segments by number). Only the
        entries in `which` are meaningful.
        """
        known = numbers[which]
        if len(known) and (known == known[0]).all():
            segment = self._segment(int(known[0]))
            return rows - segment.base, numbers, {segment.number: segment}
        # Not np.unique: sorting releases the GIL, and getting it back takes 5 ms next to a busy
        # thread.
        segments = {n: self._segment(n) for n in set(known.tolist())}
        bases = np.array(
            [segments[n].base if n in segments else 0 for n in numbers.tolist()], np.int64
        )
        return rows - bases, numbers, segments

    def records(self, rows: Rows, kind: int) -> NDArray[np.void]:
        """Locked. Index records of what these rows hold or held last."""
        table = self._core.table
        bases = np.zeros(max(self.segments, default=0) + 1, np.int64)
        for number, segment in self.segments.items():
            bases[number] = segment.base
        records = np.zeros(len(rows), RECORD)
        records["key"] = table.keys[rows].view("V32").reshape(-1)
        records["pool"] = table.names_of(rows)
        records["sequence"] = table.sequence[rows]
        records["segment"] = table.segment[rows]
        records["slot"] = rows - bases[table.segment[rows]]
        records["length"] = table.length[rows]
        records["kind"] = kind
        return records

    def has_free(self, slot_bytes: int, count: int) -> bool:
        """Locked. Whether `take` would find `count` free slots without evicting."""
        return len(self._free[slot_bytes]) >= count

    def take(self, slot_bytes: int, count: int, tenant: int = 0) -> Rows:
        """Locked. Allocates up to `count` rows for a tenant's pages. If too few are free, it evicts
        pages: the least recently used ones, or as `shares` decides. The rows are sorted, so that
        neighbours stay together.
        """
        free = self._free[slot_bytes]
        missing = count - len(free)
        if missing > 0 and self.shares is not None:
            group = int(self._core.table.group[tenant])
            evict = functools.partial(self._evict_of, slot_bytes)
            self.shares.evict(group, missing, len(free), slot_bytes, self._promised(), evict)
        elif missing > 0:
            victims = self._lru_of(slot_bytes).victims(missing, self._of_size(slot_bytes))
            self._core.counters.pages_evicted += len(victims)
            free.extend(self._core.table.drop(victims).tolist())
        taken = np.array(free[:count], np.int64)
        del free[:count]
        return np.sort(taken)

    def make(self, slot_bytes: int, count: int) -> None:
        """Adds segments until `count` rows are free, within budget and disk space. Does I/O; never
        raises OSError.
        """
        with self.changing:
            while True:
                with self._core.lock:
                    if self._core.closing or len(self._free[slot_bytes]) >= count:
                        return
                if not self._grow(slot_bytes) and not self._take_from_others(slot_bytes):
                    self._complain(slot_bytes)
                    return

    def remove(self, segment: Segment) -> None:
        """Deletes and closes a segment after `forget`. Does I/O; never raises OSError."""
        env = self._core.env
        try:
            self._core.check_owner()
            env.unlink(segment.path)
            self._removed = True
        except OSError as error:
            self._stuck_bytes += segment.nbytes
            self._core.complaints.about("removing a segment", error)
            # After ESTALE the folder may belong to another process.
            if error.errno != errno.ESTALE:
                self._invalidate(segment)
        # Another thread may be syncing the segment.
        with self._syncing:
            env.close(segment.fd)

    def _invalidate(self, segment: Segment) -> None:
        """Marks a segment whose file cannot be removed, so that the next open ignores its pages."""
        try:
            spoil_segment(self._core.env, segment)
        except OSError:
            dropped = np.zeros(segment.slots, RECORD)
            dropped["segment"], dropped["slot"], dropped["kind"] = (
                segment.number,
                np.arange(segment.slots),
                DROP,
            )
            dropped["sequence"] = self._core.sequence
            self._core.log.append(dropped)

    def forget(self, segment: Segment) -> None:
        """Locked. Drops a segment's rows and pages. `remove` must follow, without the lock."""
        self._core.table.remove_rows(segment.base, segment.slots)
        del self.segments[segment.number]
        span = range(segment.base, segment.base + segment.slots)
        self._free[segment.slot_bytes] = [
            row for row in self._free[segment.slot_bytes] if row not in span
        ]

    def give_back_idle(self) -> int:
        """Deletes segments without I/O in flight; returns how many pages. Never raises OSError."""
        with self.changing:
            idle = []
            with self._core.lock:
                before = len(self._core.table)
                for segment in [] if self._core.closing else list(self.segments.values()):
                    if coldest_segment(self._core.table, [segment]) is not None:
                        self.forget(segment)
                        idle.append(segment)
                removed = before - len(self._core.table)
            for segment in idle:
                self.remove(segment)
            for number in [] if self._core.closing else list(self._aside):
                # If the file cannot be removed, DROP records in the log say that its pages are
                # gone.
                with contextlib.suppress(OSError):
                    self._core.check_owner()
                    self._core.env.unlink(self._path(number))
                    del self._aside[number]
                    self._removed = True
        return removed

    def close(self) -> None:
        """Closes all files. The caller holds `changing`."""
        for segment in (*self.segments.values(), *self.theirs.values()):
            self._core.env.close(segment.fd)

    def leave_to_parent(self) -> None:
        """Closes all files in a forked child, where the threads that hold the locks are gone."""
        self.changing, self._syncing = threading.Lock(), threading.Lock()
        self.close()
        self.segments, self.theirs = {}, {}

    def sync(self) -> None:
        """Makes everything written so far survive a power loss. Raises OSError."""
        # One thread at a time: a segment that another thread is syncing is not safe before that has
        # ended.
        with self._syncing:
            for segment in list(self.segments.values()):
                if segment.dirty:
                    segment.dirty = False
                    try:
                        self._core.env.sync(segment.fd)
                    except OSError:
                        segment.dirty = True
                        raise

    def sync_names(self) -> None:
        """Makes the removal of segments survive a power loss. Raises OSError."""
        if not self._removed:
            return
        env = self._core.env
        fd = env.open(self._core.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            env.sync(fd)
            self._removed = False
        finally:
            env.close(fd)

    def retire_coldest(self) -> bool:
        """Deletes the least recently used segment. The caller holds `changing`."""
        return self._retire_coldest(None)

    def _path(self, number: int) -> str:
        return os.path.join(self._core.folder, segment_name(number))

    def _segment(self, number: int) -> Segment:
        return self.segments.get(number) or self.theirs[number]

    def _of_size(self, slot_bytes: int) -> list[Segment]:
        return [s for s in self.segments.values() if s.slot_bytes == slot_bytes]

    def _lru_of(self, slot_bytes: int, group: int | None = None) -> LeastRecentlyUsed:
        name = (slot_bytes, group)
        if name not in self._lru:
            self._lru[name] = LeastRecentlyUsed(self._core.table, self.retention, group)
        return self._lru[name]

    def _evict_of(self, slot_bytes: int, group: int, count: int) -> int:
        """Locked. Evicts up to `count` pages of a group of tenants; returns how many."""
        victims = self._lru_of(slot_bytes, group).victims(count, self._of_size(slot_bytes))
        self._core.counters.pages_evicted += len(victims)
        self._free[slot_bytes].extend(self._core.table.drop(victims).tolist())
        return len(victims)

    def _promised(self, at_least: int = 0) -> list[int]:
        """Locked. Bytes of slots that each group of tenants is guaranteed, out of this store's
        slots or of `at_least` bytes.
        """
        here = sum(segment.slots * segment.slot_bytes for segment in self.segments.values())
        shares = self.shares
        return [] if shares is None else shares.promised(self.whole, max(here, at_least))

    def holdings(self) -> list[Holding]:
        """Locked. What the tenants of the settings hold; empty if none is named."""
        promised = self._promised(self.allowance)
        return [] if self.shares is None else self.shares.holdings(promised)

    def _grow(self, slot_bytes: int) -> bool:
        slots = self._slots_of_new(slot_bytes)
        changed = self.held_by_siblings != self._held_then
        if not self.giving and (slots or changed or self._core.env.now() >= self._measure_at):
            self._measure()
            slots = self._slots_of_new(slot_bytes)
        if slots == 0:
            return False
        core = self._core
        try:
            core.check_owner()
            segment = self._create(slot_bytes, slots)
        except OSError as error:
            core.complaints.about("making room for pages", error)
            self._said_why = True
            return False
        self._said_why = False
        core.complaints.room_again()
        # Another owner may have created one at the same time. At least one of the two sees that.
        self._measure()
        if self.charged_bytes + segment.nbytes > self._limit:
            self.remove(segment)
            return False
        with core.lock:
            segment.base = core.table.add_rows(slots, segment.number)
            self.segments[segment.number] = segment
            self._free[slot_bytes].extend(range(segment.base, segment.base + slots))
        return True

    def _measure(self) -> None:
        """Measures what siblings, other ranks and other identities take. Does I/O; never raises
        OSError. The caller holds `changing`.
        """
        core = self._core
        if self.siblings is not None:
            self.siblings.measure()
        # Before `_others` changes, because other threads read `whole` at any time. The other
        # identities could take only what was free, so their growth takes nothing from this store.
        self._kept = min(self.whole, self.charged_bytes + self.held_by_siblings)
        self._others = others_by_age(core.env, self._namespace, says=False)
        beside = [path for path in list_ranks(core.env, self._namespace) if path != core.folder]
        self._other_folders_bytes = sum(folder_bytes(core.env, path) for path in beside)
        self._held_then = self.held_by_siblings
        self._measure_at = core.env.now() + _AGAIN_S

    def _create(self, slot_bytes: int, slots: int) -> Segment:
        """Creates a segment under the next number whose file name is free. Raises OSError."""
        core = self._core
        for _ in range(_NAMES_TRIED):
            number = self._next_number if self._next_number <= MOST_SEGMENT_NUMBER else 1
            self._next_number = number + 1
            if number in self.segments:
                continue
            with contextlib.suppress(FileExistsError):
                return create_segment(
                    core.env, core.folder, number, slot_bytes, slots, core.identity, core.io
                )
        raise OSError(errno.EEXIST, "every name of a segment is taken")

    def _slots_of_new(self, slot_bytes: int) -> int:
        """Number of slots that the next segment of this size may have; 0 if there is no space."""
        if self.giving:
            return 0
        full = max(1, (self.segment_target - BLOCK) // slot_bytes)
        cost = slot_bytes + INDEX_BYTES_PER_SLOT
        self._evict_others(self.charged_bytes + BLOCK + full * cost)
        slots = min(full, (self._limit - self.charged_bytes - BLOCK) // cost)
        if slots > 0:
            slots = min(slots, (self._spare_bytes(BLOCK + slot_bytes) - BLOCK) // slot_bytes)
        # A file is not worth it for much less than a full segment, unless pages of this size have
        # no slot at all.
        if slots < 1 or (slots < full // 8 and self._of_size(slot_bytes)):
            return 0
        return slots

    def _spare_bytes(self, wanted: int) -> int:
        """Bytes that the filesystem has free above `store.min_free_bytes`. If they are fewer than
        `wanted`, removes other identities, provided they hold enough.
        """
        core = self._core
        least = core.config.min_free_bytes
        try:
            spare = core.env.free_bytes(core.folder) - least
            if spare >= wanted:
                return spare
            if least == 0 and core.env.filesystem_bytes(core.folder) == 0:
                return wanted + self.segment_target  # the filesystem does not report free space
            for path, nbytes in list(self._others):
                if spare + self._others_bytes < wanted or spare >= wanted:
                    break
                self._evict_other(path, nbytes)
                spare = core.env.free_bytes(core.folder) - least
            return spare
        except OSError as error:
            core.complaints.about("asking for free space", error)
            return 0

    def _complain(self, slot_bytes: int) -> None:
        """Logs once why there is no new space for pages of this size, unless an error did."""
        if self._said_why:
            return
        kept = bool(self._of_size(slot_bytes))
        fits = self.charged_bytes + BLOCK + slot_bytes + INDEX_BYTES_PER_SLOT <= self._limit
        found = self.no_room(slot_bytes - BLOCK) if fits or not kept else None
        if found is not None:
            self._core.complaints.about_room(found.why, kept=kept)
        elif not fits and not kept and not self.held_by_siblings:
            self._core.complaints.about_room(
                f"{format_bytes(self._limit)} of store.capacity_bytes are left to this rank, "
                f"{format_bytes(self.charged_bytes)} of them are used, and a page of "
                f"{format_bytes(slot_bytes)} needs a segment of its own: raise "
                "store.capacity_bytes, or remove pages of other models with kvtier purge",
                kept=False,
            )

    def _take_from_others(self, slot_bytes: int) -> bool:
        """Asks siblings for space. Else removes the least recently used segment of another slot
        size, if all its pages are older than the page that would be evicted. Returns whether it got
        space.
        """
        if self.siblings is not None and self.siblings.make_room(self.segment_target):
            return True
        if all(s.slot_bytes == slot_bytes for s in list(self.segments.values())):
            return False
        with self._core.lock:
            own = self._lru_of(slot_bytes).oldest(self._of_size(slot_bytes))
        if self.charged_bytes + BLOCK + slot_bytes + INDEX_BYTES_PER_SLOT <= self._limit:
            return False
        return self._retire_coldest(slot_bytes, own)

    def _retire_coldest(self, keep_size: int | None, older_than: int | None = None) -> bool:
        with self._core.lock:
            candidates = [s for s in self.segments.values() if s.slot_bytes != keep_size]
            if self.shares is not None:
                spared = list(self.shares.spared(candidates, self._promised()))
                # If pages of this size have slots already, they get no more at the cost of another
                # tenant's guarantee.
                candidates = spared or ([] if older_than is not None else candidates)
            kept = set(self._core.table.segment[self.retention.rows()].tolist())
            others = [segment for segment in candidates if segment.number not in kept]
            found = coldest_segment(self._core.table, others)
            if found is None and older_than is None:
                found = coldest_segment(self._core.table, candidates)
            if found is None or (older_than is not None and found[1] >= older_than):
                return False
            segment = found[0]
            before = len(self._core.table)
            if self.shares is not None:
                self.shares.gone(segment)
            self.forget(segment)
            self._core.counters.pages_evicted += before - len(self._core.table)
        self.remove(segment)
        return True

    def _evict_others(self, wanted: int) -> None:
        """Removes identities that no process has open, oldest first, until `wanted` bytes fit."""
        for path, nbytes in list(self._others):
            if wanted <= self._limit:
                return
            self._evict_other(path, nbytes)

    def _evict_other(self, path: str, nbytes: int) -> None:
        env = self._core.env
        freed = 0
        try:
            if path not in self._left_alone:
                freed = remove_namespace(env, path)
        except StoreError as error:
            # Skipped from now on: checking this folder again would slow every put.
            self._left_alone.add(path)
            logger.warning(
                "%s. This server needs the room, and tries again when it is started again", error
            )
            return
        except OSError as error:
            self._core.complaints.about("removing pages of another model", error)
            return
        if freed:
            logger.warning("removed %s (%d bytes): this server needs the room", path, nbytes)
        # Another rank or a purge may have removed it first.
        if freed or not env.exists(path):
            self._others.remove((path, nbytes))
