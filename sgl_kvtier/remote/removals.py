"""Deletes and clears: pages stay hidden in this process until the engine confirms their removal.

A caller waits for a limited time. Unconfirmed removals are sent again when the engine responds.
Until they are confirmed, their pages are misses for this process and are not written.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import MOST_KEYS, Op
from sgl_kvtier.remote.link import Answer, Call, Link
from sgl_kvtier.remote.presence import Presence
from sgl_kvtier.types import PageKey

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Seconds until a failed removal is sent again."""
_LOOK_S = 0.05
"""Seconds between two checks whether the writes that a removal must follow have ended."""
_GONE = (Code.OK, Code.MISS)


@dataclass(eq=False)
class Removal:
    """One call that removes pages; `keys` None: all pages of this identity and rank."""

    pool: str
    keys: Sequence[PageKey] | None
    writes: set[int] = field(default_factory=set)
    """Calls that were writing these pages when they were hidden. The removal waits for them,
    because the engine might execute a write after a removal that was sent later.
    """
    due: float = math.inf
    """When to send it; infinite before `first` has returned and while it is in flight."""
    removed: int = 0
    """Number of objects that the engine removed."""
    confirmed: bool = False


class Removals:
    """The removals of one link. Any thread. `where` identifies the pages' location: the next store
    of this process at the same location continues what a closed store left unconfirmed.
    """

    def __init__(
        self, link: Link, presence: Presence, deadline_s: float, where: tuple[str, ...]
    ) -> None:
        self.late = 0
        """Deletes and clears that returned before the engine had completed them."""
        self._said = False
        """Whether it was logged that removals are unconfirmed."""
        self._link = link
        self._presence = presence
        self._deadline_s = deadline_s
        self._where = where
        self._changed = threading.Condition()
        with _leaving:
            self._pending = _left.pop(where, [])
        for removal in self._pending:
            presence.hide(removal.pool, removal.keys)
            removal.writes = set()
            removal.due = 0.0

    @property
    def waiting(self) -> int:
        """Pages whose removal the engine has not confirmed; a clear counts as one."""
        return sum(1 if r.keys is None else len(r.keys) for r in list(self._pending))

    def remove(
        self, pool: str, keys: Sequence[PageKey] | None, first: Callable[[], None] | None
    ) -> int:
        """Hides pages, None for all, calls `first`, and removes them. Waits for at most
        `deadline_s` in all, and returns how many objects were removed by then.
        """
        if not self._link.open:  # in a forked process the thread that holds the lock may not exist
            if first is not None:
                first()
            return 0
        until = time.monotonic() + self._deadline_s
        removals = self._hide(pool, keys)
        try:
            if first is not None:
                first()
        finally:
            with self._link.lock:
                for removal in removals:
                    removal.due = 0.0
            self._link.wake_before(self.tend(time.monotonic()))
        with self._changed:
            self._changed.wait_for(
                lambda: all(r.confirmed for r in removals) or not self._link.usable,
                max(0.0, until - time.monotonic()),
            )
            in_time = all(r.confirmed for r in removals)
            self.late += not in_time
        if not in_time and self._link.open and not self._said:
            self._said = True
            logger.warning(
                "the remote store has not removed pages that were deleted or cleared here: they "
                "are removed when it answers, and this server uses none of them until then"
            )
        return sum(r.removed for r in removals)

    def tend(self, now: float) -> float:
        """Sends removals that are due; returns when the next one is."""
        if not self._link.usable:
            return math.inf
        with self._link.lock:
            for removal in self._pending:
                if removal.due <= now:
                    self._send(removal, now)
            return min((r.due for r in self._pending), default=math.inf)

    def close(self) -> None:
        """After the link was closed: leaves unconfirmed removals to this process's next store."""
        with self._link.lock:
            left, self._pending = self._pending, []
        if left:
            with _leaving:
                _left[self._where] += left
        with self._changed:
            self._changed.notify_all()

    def _hide(self, pool: str, keys: Sequence[PageKey] | None) -> list[Removal]:
        if keys is None:
            removals = [Removal(pool, None)]
        else:
            parts = (keys[i : i + MOST_KEYS] for i in range(0, len(keys), MOST_KEYS))
            removals = [Removal(pool, list(part)) for part in parts]
        with self._link.lock:
            if self._link.open:
                self._presence.hide(pool, keys)
                for removal in removals:
                    removal.writes = self._link.writing(pool, removal.keys)
                self._pending += removals
        return removals

    def _send(self, removal: Removal, now: float) -> None:
        """Locked."""
        if not self._link.ended(removal.writes):
            removal.due = now + _LOOK_S
            return
        op = Op.CLEAR if removal.keys is None else Op.REMOVE
        keys = removal.keys or ()
        limit = now + self._deadline_s

        def ended(answer: Answer) -> None:
            self._ended(removal, answer)

        sent = self._link.begin(Call(op, removal.pool, keys, ended, limit, fair=True))
        removal.due = math.inf if sent else now + RETRY_S

    def _ended(self, removal: Removal, answer: Answer) -> None:
        gone = all(code in _GONE for code in answer.codes)
        with self._link.lock:
            removal.removed += answer.removed
            if not gone:
                removal.due = time.monotonic() + (RETRY_S if self._link.usable else 0.0)
            elif removal in self._pending:
                self._pending.remove(removal)
                self._presence.show(removal.pool, removal.keys)
                self._said = self._said and bool(self._pending)
        with self._changed:
            removal.confirmed = gone
            self._changed.notify_all()


_leaving = threading.Lock()
_left: defaultdict[tuple[str, ...], list[Removal]] = defaultdict(list)
"""Unconfirmed removals of stores that were closed."""
