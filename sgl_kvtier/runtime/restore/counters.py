"""Counters of restorations since the server started, written by the scheduler's thread."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from sgl_kvtier.runtime.metrics import Sample, plain_numbers, with_unit_last
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.types import PLACES, Link, Tier

_MOST_MEETINGS = 4096


@dataclass
class RestoreCounters:
    """Counts and sums. Pages are SGLang's; seconds are of `time.monotonic` on the scheduler's
    thread.
    """

    starts: Counter[str] = field(default_factory=Counter)
    """Decided restore candidates, as "mode: reason"."""
    declined: Counter[str] = field(default_factory=Counter)
    """Prefixes left to SGLang, by reason."""
    ended: Counter[str] = field(default_factory=Counter)
    """Ended restorations, by how they ended."""
    lost_pages: Counter[str] = field(default_factory=Counter)
    """Pages that loads failed to bring, by reason."""
    turn_reads: Counter[str] = field(default_factory=Counter)
    """What was done with stored prefixes that SGLang did not read on arrival, or read again."""
    bytes_loaded: Counter[Link] = field(default_factory=Counter)
    spliced_pages: Counter[Tier] = field(default_factory=Counter)
    computed_pages: int = 0
    """Pages of restored prefixes that were computed."""
    audited_pages: Counter[str] = field(default_factory=Counter)
    """Attached pages read back from the device, by result; only with `lab.audit`."""
    paused: Counter[str] = field(default_factory=Counter)
    """Pauses in which no restoration starts, by reason."""
    unused_pages: int = 0
    """Pages that were loaded and not used."""
    jumps: int = 0
    parks: int = 0
    parked_s: float = 0.0
    meeting_wait_s: float = 0.0
    """The part of `parked_s` right before prefill and load cursor met."""
    restoring_s: float = 0.0
    """Seconds from the offer until the cursors met, summed."""
    planner_failures: int = 0
    untimed_chunks: int = 0
    """Prefills without a measured duration: their result was processed before their end was
    seen.
    """
    meetings: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_MEETINGS))
    """Computed fraction of each completed restoration's pages, since last emptied."""

    def park(self, r: Restoration) -> None:
        """The request in the chunked-prefill slot starts to wait for loads in flight."""
        if not r.parked_since:
            r.parks += 1
            r.parked_since = time.monotonic()

    def unpark(self, r: Restoration) -> None:
        """The request continues."""
        r.waited_s = time.monotonic() - r.parked_since if r.parked_since else 0.0
        r.parked_s += r.waited_s
        r.parked_since = 0.0

    def note_end(self, r: Restoration, how: str) -> None:
        """Adds up a restoration that has ended."""
        self.ended[how] += 1
        if r.mode is None:
            return
        if r.parked_since:  # it waited until it was aborted or abandoned
            self.unpark(r)
        loaded = sum(r.spliced.values())
        computed = max(0, r.front - r.resident - loaded)
        for tier, pages in r.spliced.items():
            self.spliced_pages[tier] += pages
        self.computed_pages += computed
        self.jumps += r.jumps
        self.parks += r.parks
        self.parked_s += r.parked_s
        if how == "met" and computed + loaded:
            self.meetings.append(computed / (computed + loaded))
            self.meeting_wait_s += r.waited_s
            self.restoring_s += time.monotonic() - r.offered_at

    def counts(self, page_tokens: int) -> Iterator[Sample]:
        """Everything but `meetings`, for /metrics. Any thread: iterates over copies."""
        for start, count in dict(self.starts).items():
            mode, _, reason = start.partition(": ")
            yield "started", {"mode": mode, "reason": reason}, count
        for name, label, counter in (
            ("declined", "reason", self.declined),
            ("ended", "how", self.ended),
            ("lost_pages", "reason", self.lost_pages),
            ("turn_reads", "what", self.turn_reads),
            ("audited_pages", "result", self.audited_pages),
            ("paused", "reason", self.paused),
        ):
            for reason, count in dict(counter).items():
                yield name, {label: reason}, count
        for link, nbytes in dict(self.bytes_loaded).items():
            yield "loaded_bytes", {"link": link.value}, nbytes
        for tier, pages in dict(self.spliced_pages).items():
            yield "loaded_tokens", {"tier": PLACES[tier]}, pages * page_tokens
        yield "computed_tokens", {}, self.computed_pages * page_tokens
        for name in plain_numbers(RestoreCounters):
            if name != "computed_pages":  # published in tokens
                yield with_unit_last(name), {}, getattr(self, name)
