"""Pauses restoration where its copies slow the decode steps of running requests.

Copies to the device share the bus, the memory and the copy engine with decode steps. The guard
compares gaps between output tokens in which a load was in flight, if only for part of the gap, with
gaps in which none was. Only steps without prefill count, since a prefill lengthens a gap whether or
not its request is restored; and only batches of about the same size and length are compared.

Off on a CPU, where copies and forwards share the cores, so that loads always slow decoding
(`setup.py` turns it on).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.runtime.step.polls import LANDED, LOST, Poll
from sgl_kvtier.store.base import ReadOutcome

logger = logging.getLogger(__name__)

WINDOW = 200
"""Number of latest gaps of each kind that are compared."""
RATIO = 1.25
"""Restoration pauses if the 99th percentile of gaps is longer by this factor."""
SURE = 12
"""At least this many gaps with loads in flight must exceed `RATIO` times the 99th percentile of
those without. Three of 200 would suffice to raise their own 99th percentile that far, but the third
largest of 200 varies by chance: of two windows whose gaps have the same long tail, one has three
gaps above the other's 99th percentile in up to half of all cases, and 12 in one of 150.
"""
PAUSE_S = 60.0
"""Length of a pause in seconds. After it, restoration is tried again."""
SLOWER = "slower decoding"

_LOOK_EVERY = 20
"""Gaps with loads in flight after which the two windows are compared again."""
_SLOWER = LOST[ReadOutcome.LATE]


@dataclass
class _Windows:
    """Gaps of batches of one class, in seconds."""

    loading: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    quiet: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    fresh: int = 0
    """Gaps added to `loading` since the two were compared."""


class DecodeGuard:
    """Measures gaps between output tokens on this rank, and requests a pause by its poll. One per
    scheduler process; scheduler's thread. All ranks pause in the same step if any of them requests
    it.
    """

    def __init__(
        self, number: int, loading: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`number` is the poll's, the same on every rank; `loading` returns whether a load is in
        flight; `clock` is in seconds.
        """
        self.poll = Poll(number, 1)
        """`LANDED`, or lost while this rank requests a pause. It never ends."""
        self.poll.mark(0, LANDED, 0.0)
        self._loading, self._clock = loading, clock
        self._since: float | None = None
        """When the tokens of the last decode step arrived."""
        self._loaded = False
        """Whether a load was in flight at that time, or has begun since."""
        self._classes: dict[tuple[int, int], _Windows] = {}

    def load_begins(self) -> None:
        """A load begins. It may end within the same gap."""
        self._loaded = True

    def launching(self, batch: Any) -> None:
        """Called before any batch is launched."""
        if not batch.forward_mode.is_decode():
            self._since = None

    def processed(self, batch: Any) -> None:
        """Called after a batch's result was processed: its output tokens are there."""
        if not batch.forward_mode.is_decode():
            self._since = None
            return
        in_flight = self._loading()
        loaded, self._loaded = self._loaded or in_flight, in_flight
        before, self._since = self._since, self._clock()
        if before is None:
            return
        windows = self._classes.setdefault(_class_of(batch), _Windows())
        gap = self._since - before
        if not loaded:
            windows.quiet.append(gap)
            return
        windows.loading.append(gap)
        windows.fresh += 1
        if (
            windows.fresh % _LOOK_EVERY == 0
            and min(map(len, (windows.loading, windows.quiet))) == WINDOW
        ):
            self._compare(windows, len(batch.reqs))

    def _compare(self, windows: _Windows, requests: int) -> None:
        usual = p99(windows.quiet)
        longer = sum(gap > RATIO * usual for gap in windows.loading)
        if longer < SURE or self.poll.local[0] != LANDED:
            return
        logger.warning(
            "kvtier: decoding is slower while prefixes are restored: of the last %d gaps between "
            "output tokens with loads in flight 99 %% are below %.1f ms, of those without %.1f ms "
            "(%d requests decode). Restoration pauses for %.0f s",
            WINDOW,
            p99(windows.loading) * 1e3,
            usual * 1e3,
            requests,
            PAUSE_S,
        )
        self.poll.mark(0, _SLOWER, 0.0)

    def settle(self, state: bytes) -> bool:
        """Applies the agreed state of the poll; returns whether restoration pauses now. If so, gaps
        measured with loads in flight are dropped.
        """
        if state[0] == LANDED:
            return False
        self.poll.mark(0, LANDED, 0.0)
        for windows in self._classes.values():
            windows.loading.clear()
            windows.fresh = 0
        return True


def p99(gaps: Iterable[float]) -> float:
    """The 99th percentile, by nearest rank."""
    ordered = sorted(gaps)
    return ordered[-(-99 * len(ordered) // 100) - 1]


def _class_of(batch: Any) -> tuple[int, int]:
    """A batch's class: number of requests, and of tokens before the new ones, each up to a factor
    of two.
    """
    lengths = batch.seq_lens_cpu
    tokens = 0 if lengths is None else int(lengths.sum())
    return len(batch.reqs).bit_length(), tokens.bit_length()
