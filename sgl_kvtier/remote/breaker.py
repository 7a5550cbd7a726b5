"""A circuit breaker in front of the engine. It has no clock: the current time is an argument."""

from __future__ import annotations

from collections import deque

FIRST_S, LONGEST_S = 1.0, 60.0
WINDOW, FEWEST = 20, 4


class Breaker:
    """Closed: calls go through. Open: no call is made until a probe has succeeded. It starts open,
    with a probe due at once.

    It opens by `trip`, or if more than half of the last 20 calls failed. Probes are then due after
    1, 2, 4, ... 60 s. All times are in seconds of one clock. Not thread-safe.
    """

    def __init__(self) -> None:
        self.closed = False
        self._due = 0.0
        self._wait_s = FIRST_S
        self._last: deque[bool] = deque(maxlen=WINDOW)

    @property
    def due(self) -> float:
        """When to probe. Meaningless while closed."""
        return self._due

    def ended(self, good: bool, now: float) -> None:
        """Records how a call ended."""
        self._last.append(good)
        bad = self._last.count(False)
        if self.closed and len(self._last) >= FEWEST and 2 * bad > len(self._last):
            self.trip(now)

    def trip(self, now: float) -> None:
        """Opens the breaker. After a failed probe the next one waits twice as long."""
        if self.closed:
            self._wait_s = FIRST_S
        self.closed = False
        self._last.clear()
        self._due = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_S)

    def probing(self, now: float) -> None:
        """Called when a probe begins. None is due while it runs."""
        self._due = now + LONGEST_S

    def close(self) -> None:
        """Closes the breaker after a successful probe."""
        self.closed = True
        self._last.clear()
