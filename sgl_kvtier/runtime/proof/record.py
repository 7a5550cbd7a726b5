"""What the checks have shown of this scheduler process's restorations since it started.

Three checks write here: the check at start (`start.py`), that of pages before a forward may read
them (`pages.py`), and that of the attach (`attach.py`). A difference turns restoration off until
the server restarts.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from sgl_kvtier.runtime.metrics import Sample

logger = logging.getLogger(__name__)

FIRST_LOADS = 16
"""Every page of so many first loads is compared, whatever their size."""
FIRST_BYTES = 8 << 30
"""Every page of so many first bytes is compared, however many loads they are. Smaller on a
scaled-down device.
"""
FIRST_ATTACHES = 16
"""Attaches that must be correct before a server counts as proven, if attaches are checked."""


class State(IntEnum):
    """State of the proof; the gauge `kvtier:restore_proof` has these numbers."""

    REFUTED = 0
    PROVING = 1
    PROVEN = 2


@dataclass(frozen=True)
class Difference:
    """The first wrong result."""

    check: str
    """`start`, `page`, `second look` or `attach`."""
    what: str
    """A phrase for the log: which page, which layer, how far apart."""


class Proof:
    """Counts and verdict. Any thread may report; only the scheduler's thread acts on it."""

    def __init__(self, device: str = "", way: str = "", *, looks: bool = False) -> None:
        """`device` (GPU and driver) and `way` (of copying pages) are for the log. `looks`: whether
        pages of this server are compared at all.
        """
        self.device, self.way = device, way
        self.looks = looks
        self.looks_at_attaches = False
        """Whether attaches are checked as well (`attach.py`)."""
        self.state = State.PROVING
        self.difference: Difference | None = None
        self.pages: Counter[str] = Counter()
        """Pages compared with their source, by result: `equal`, `differs`, or `skipped` if they
        could not be compared.
        """
        self.nbytes = 0
        """Bytes of the equal pages."""
        self.attaches: Counter[str] = Counter()
        """Computed pages after loaded ones, compared with the stored page, by result."""
        self.loads = 0
        """Loads of which a page has landed on every rank. This and the next field are the same on
        all ranks in every step, so all become proven in the same step.
        """
        self.landed_bytes = 0
        """Bytes of pages that have landed on every rank."""
        self.has_shown_enough = False
        """Whether enough was checked. The same on all ranks in every step."""
        self.changed: Callable[[Proof], None] | None = None
        """Called once when the server becomes proven, and once when it is refuted. Scheduler's
        thread.
        """
        self._lock = threading.Lock()

    @property
    def attaches_are_shown(self) -> bool:
        """Whether enough attaches were correct, or four times as many were checked: then most of
        them cannot be compared, and pages alone are the proof. The same on all ranks.
        """
        looked_at = sum(self.attaches.values())
        return self.attaches["equal"] >= FIRST_ATTACHES or looked_at >= 4 * FIRST_ATTACHES

    def note_pages(self, result: str, pages: int, nbytes: int = 0) -> None:
        """Counts compared pages. Any thread."""
        with self._lock:
            self.pages[result] += pages
            self.nbytes += nbytes

    def differs(self, difference: Difference) -> None:
        """Keeps and logs the first difference. Any thread. The engine acts on it, in the same step
        on all ranks (`RestoreEngine.refute`).
        """
        with self._lock:
            first, self.difference = self.difference is None, self.difference or difference
        if first:
            logger.error(
                "kvtier: restoration is not right on this device, and ends for this server's life: "
                "%s: %s (%s; copied by %s)",
                difference.check,
                difference.what,
                self.device,
                self.way,
            )

    def note_load(self, landed_bytes: int) -> None:
        """A load has ended on every rank, with this many bytes landed. Scheduler's thread."""
        if landed_bytes:
            self.loads += 1
            self.landed_bytes += landed_bytes

    def conclude(self) -> None:
        """Decides whether the server is proven: after as many loads and bytes as are compared in
        full, after enough attaches if these are checked, and without a difference. A rank that
        could not compare a page that it should have compared has shown nothing. Scheduler's thread,
        once per step, after all that ended in it was reported.
        """
        shown = self.loads >= FIRST_LOADS and self.landed_bytes >= FIRST_BYTES
        if self.looks_at_attaches:
            shown = shown and self.attaches_are_shown
        self.has_shown_enough = self.has_shown_enough or shown
        compared = self.looks and self.pages["equal"] > 0 and not self.pages["skipped"]
        if compared and shown and self.state is State.PROVING and self.difference is None:
            logger.info(
                "kvtier: restoration is proven on %s: %d pages (%.1f GiB) equal what they were "
                "loaded from, copied by %s",
                self.device,
                self.pages["equal"],
                self.nbytes / 2**30,
                self.way,
            )
            self._become(State.PROVEN)

    def was_proven(self) -> None:
        """An earlier server was proven under the same conditions. Scheduler's thread, at start, on
        all ranks or none.
        """
        self.state, self.has_shown_enough = State.PROVEN, True

    def refute(self) -> None:
        """Restoration was wrong. Scheduler's thread, on all ranks in the same step. Idempotent."""
        if self.state is not State.REFUTED:
            self._become(State.REFUTED)

    def _become(self, state: State) -> None:
        self.state = state
        if self.changed is not None:
            self.changed(self)

    def samples(self) -> Iterator[Sample]:
        """For /metrics; empty if nothing is compared. Any thread."""
        if not self.looks and self.state is not State.REFUTED:
            return
        yield "proof", {}, int(self.state)
        with self._lock:
            pages = dict(self.pages)
        for result, count in pages.items():
            yield "proof_pages", {"result": result}, count
