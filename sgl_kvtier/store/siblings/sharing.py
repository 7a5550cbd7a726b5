"""Divides one capacity between all owners of the same pages; runs the thread that polls siblings.

`Room.whole` is the space that all folders may take together. An owner may create a segment as long
as the existing ones leave space for it. An owner's part is `whole` divided by the number of owners
that hold or want something. An owner without space that holds less than its part removes the least
recently used segment of a folder without an owner, or signals that it wants space. Owners that hold
more than their part then give segments back one by one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.errors import StoreBusyError
from sgl_kvtier.store.disk import forks
from sgl_kvtier.store.disk.env import create_file
from sgl_kvtier.store.disk.namespace import WANTED, RankFolder, is_open, lock_folder
from sgl_kvtier.store.index.core import Core
from sgl_kvtier.store.index.eviction import coldest_segment
from sgl_kvtier.store.index.room import Room
from sgl_kvtier.store.index.slots import Rows
from sgl_kvtier.store.siblings.folder import SiblingFolder
from sgl_kvtier.store.siblings.following import Following
from sgl_kvtier.tenants import NOBODY

logger = logging.getLogger(__name__)

Hits = Callable[[np.ndarray], NDArray[np.bool_]]

_TICK_S = 0.1
"""Seconds between two polls of siblings: the delay until their pages are found."""
_ALONE_S = 1.0
_AGAIN_S = 1.0
"""Seconds until an owner without space asks again."""
_WANTED_NS = 3_000_000_000


class Sharing:
    """The siblings of one store; implements `room.Siblings`. Any thread."""

    def __init__(
        self,
        core: Core,
        room: Room,
        own: RankFolder,
        alike: str,
        remove: Callable[[Callable[[], Rows]], int],
        forget_aside: Callable[[Hits], None],
    ) -> None:
        """`remove` deletes the pages whose rows its argument returns. `forget_aside` deletes pages
        in segments that could not be opened.
        """
        self._core = core
        self._room = room
        self._own = own
        self._remove = remove
        self._forget_aside = forget_aside
        self._again_at = 0.0
        self._applied = 0
        self._alive: dict[str, tuple[float, bool]] = {}
        self._stop = threading.Event()
        self._following = Following(core, room, own, alike)
        self._thread = threading.Thread(target=self._run, name="kvtier-follow", daemon=True)

    def open(self) -> None:
        """Finds siblings' pages, and starts polling. Nothing in their folders makes it raise."""
        self._core.stamps = True
        self._room.siblings = self
        self._guarded(self._following.open)
        self._guarded(self._apply_deletes)
        self._thread.start()

    def follow(self) -> None:
        """Polls all siblings once: finds what they wrote and applies what they deleted. Nothing in
        their folders makes it raise; a failure is counted and retried at the next poll.
        """
        self._guarded(self._following.look)
        self._guarded(self._apply_deletes)
        self._guarded(self._balance)

    def delete(self, keys: list[bytes], pool: str, tenant: str = NOBODY) -> bool:
        """`Following.delete`."""
        return self._following.delete(keys, pool, tenant)

    def deleted_rows(self) -> Rows:
        """`Following.deleted_rows`."""
        return self._following.deleted_rows()

    def measure(self) -> None:
        self._following.look()

    def make_room(self, nbytes: int) -> bool:
        now, room = self._core.env.now(), self._room
        if now < self._again_at or not self._following.folders:
            return False
        self._again_at = now + _AGAIN_S
        if room.charged_bytes + room.held_by_siblings + nbytes <= room.whole:
            return False
        if room.charged_bytes + nbytes > self._part(wants=True):
            return False
        if self._remove_ownerless():
            self._again_at = now
            return True
        try:
            self._core.check_owner()
            path = os.path.join(self._own.path, WANTED)
            self._core.env.close(create_file(self._core.env, path, os.O_WRONLY))
        except OSError as error:
            self._core.complaints.about("asking for room", error)
        return False

    def close(self) -> None:
        """Ends the thread. Must not be called on it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._following.close()

    def leave_to_parent(self) -> None:
        """In a forked child, where the thread does not exist: closes open files."""
        self._room.siblings = None
        self._following.leave_to_parent()

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S if self._following.folders else _ALONE_S):
            self.follow()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            # Out of memory, or a bug: opening the store and the thread go on.
            self._core.failed_once("following other servers' pages", error)

    def _apply_deletes(self) -> None:
        told = self._following.told
        if told != self._applied:
            self._forget_aside(self._following.deleted)
            self._remove(self._following.deleted_rows)
            # Not earlier, so that a delete that failed is retried.
            self._applied = told
            # A page that was put again after its delete may be found in place of the dropped one.
            self._following.look()

    def _balance(self) -> None:
        room = self._room
        wanted = any(map(self._wants, self._siblings()))
        holds = room.charged_bytes
        total = holds + room.held_by_siblings
        over = total > room.whole
        above = (wanted or over) and holds > self._part(wants=False)
        room.giving = wanted and above
        if over and self._remove_ownerless():
            return
        if above and (over or (wanted and total + room.segment_target > room.whole)):
            with room.changing:
                if not self._core.closing:
                    room.retire_coldest()

    def _part(self, *, wants: bool) -> int:
        """This owner's part of `whole`, in bytes. `wants`: it counts even without a segment."""
        others = [f for f in self._siblings() if (f.segments or self._wants(f)) and self._lives(f)]
        mine = 1 if wants or self._room.segments else 0
        return self._room.whole // max(1, len(others) + mine)

    def _siblings(self) -> list[SiblingFolder]:
        return list(self._following.folders.values())

    def _wants(self, folder: SiblingFolder) -> bool:
        recent = self._core.env.wall_ns() - folder.wanted_ns < _WANTED_NS
        return recent and self._lives(folder)

    def _lives(self, folder: SiblingFolder) -> bool:
        now = self._core.env.now()
        until, alive = self._alive.get(folder.path, (0.0, False))
        if now >= until:
            try:
                alive = is_open(self._core.env, folder.path)
            except OSError:
                alive = True
            self._alive[folder.path] = (now + _AGAIN_S, alive)
        return alive

    def _remove_ownerless(self) -> bool:
        """Removes the least recently used segment of all folders that no process owns."""
        core = self._core
        homes = {
            segment.number: (folder, segment)
            for folder in self._siblings()
            if folder.segments and not self._lives(folder)
            for segment in list(folder.segments.values())
            if segment.base >= 0
        }
        with core.lock:
            found = coldest_segment(core.table, [segment for _, segment in homes.values()])
        if found is None:
            return False
        folder, segment = homes[found[0].number]
        try:
            owned = RankFolder(folder.path, self._own.namespace, lock_folder(core.env, folder.path))
        except (StoreBusyError, OSError):
            return False
        forks.owns(owned)
        try:
            core.env.unlink(segment.path)
        except FileNotFoundError:
            # Another owner without space was faster.
            return False
        except OSError as error:
            core.complaints.about("removing a segment that no server owns", error)
            return False
        finally:
            forks.release(core.env, owned)
        self._following.look()
        return True
