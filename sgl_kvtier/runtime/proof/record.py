"""What one scheduler process has shown of its own restorations since it started.

Three checks write here: the one at start (`start.py`), the one of pages before a forward may read
them (`pages.py`), and the one of the attach (`attach.py`). A difference refutes restoration for the
server's life.
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
"""Loads of which every page is compared, whatever their size."""
FIRST_BYTES = 8 << 30
"""Bytes of loads of which every page is compared, however many loads they are. This is smaller on a
device whose pages are those of a real one at scale.
"""
FIRST_ATTACHES = 16
"""Attaches that have to be right before a server counts as proven, where they are looked at."""


class State(IntEnum):
    """Of the proof; the gauge `kvtier:restore_proof` has these numbers."""

    REFUTED = 0
    PROVING = 1
    PROVEN = 2


@dataclass(frozen=True)
class Difference:
    """The first thing that was not as it should be."""

    check: str
    """`start`, `page`, `second look` or `attach`."""
    what: str
    """A sentence for the log: which page, which layer, how far apart."""


class Proof:
    """Counts and the verdict. Any thread may note; only the scheduler's thread acts on it."""

    def __init__(self, device: str = "", way: str = "", *, looks: bool = False) -> None:
        """`device`: GPU and driver; `way`: how pages are copied. Both are for the log. `looks`:
        whether pages of this server are compared at all.
        """
        self.device, self.way = device, way
        self.looks = looks
        self.looks_at_attaches = False
        """Whether attaches are compared as well (`attach.py`)."""
        self.state = State.PROVING
        self.difference: Difference | None = None
        self.pages: Counter[str] = Counter()
        """Pages compared with what they were loaded from, by result: `equal`, `differs`, or
        `skipped` where they could not be compared.
        """
        self.nbytes = 0
        """Of the pages that were equal."""
        self.attaches: Counter[str] = Counter()
        """Computed pages behind loaded ones compared with the stored page, by result."""
        self.loads = 0
        """Loads of which a page has landed on every rank. This and the next are alike on all ranks
        in every step, so all become proven in the same one.
        """
        self.landed_bytes = 0
        """Of pages that have landed on every rank."""
        self.has_shown_enough = False
        """As much was looked at as it takes. Alike on all ranks in every step, as these are."""
        self.changed: Callable[[Proof], None] | None = None
        """Told once of a server that is proven, and once of one that is refuted. Scheduler's
        thread.
        """
        self._lock = threading.Lock()

    @property
    def attaches_are_shown(self) -> bool:
        """Whether enough attaches were right, or four times as many were looked at, so that most of
        them cannot be compared: then pages alone are the proof. Alike on all ranks.
        """
        looked_at = sum(self.attaches.values())
        return self.attaches["equal"] >= FIRST_ATTACHES or looked_at >= 4 * FIRST_ATTACHES

    def note_pages(self, result: str, pages: int, nbytes: int = 0) -> None:
        """Any thread."""
        with self._lock:
            self.pages[result] += pages
            self.nbytes += nbytes

    def differs(self, difference: Difference) -> None:
        """Any thread. Keeps and logs the first difference. What follows from it is the engine's
        business: all ranks have to act in the same step (`RestoreEngine.refute`).
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
        """A load has ended on every rank, and these bytes of it have landed. Scheduler's thread."""
        if landed_bytes:
            self.loads += 1
            self.landed_bytes += landed_bytes

    def conclude(self) -> None:
        """Scheduler's thread, once in a step, after what ended in it was noted. The one place that
        says what makes a server proven: as many loads and bytes as are looked at in full, and as
        many attaches where these are looked at, and no difference. A rank that could not compare a
        page that it was to compare has shown nothing.
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
        """An earlier server has shown it under the same conditions. Scheduler's thread, at start,
        and on all ranks or none.
        """
        self.state, self.has_shown_enough = State.PROVEN, True

    def refute(self) -> None:
        """Scheduler's thread, on all ranks in the same step. Idempotent."""
        if self.state is not State.REFUTED:
            self._become(State.REFUTED)

    def _become(self, state: State) -> None:
        self.state = state
        if self.changed is not None:
            self.changed(self)

    def samples(self) -> Iterator[Sample]:
        """For /metrics; nothing where nothing is compared. Any thread."""
        if not self.looks and self.state is not State.REFUTED:
            return
        yield "proof", {}, int(self.state)
        with self._lock:
            pages = dict(self.pages)
        for result, count in pages.items():
            yield "proof_pages", {"result": result}, count
