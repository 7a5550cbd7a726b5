"""The progress of long work: done of total, elapsed time, and an estimate of the time left."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Progress:
    """The counters of one piece of work. All methods can be called from any thread and from
    coroutines; none blocks. `total` (None: unknown) and the steps are floats, so that work can be
    weighted.
    """

    def __init__(
        self, label: str, total: float | None, unit: str, clock: Callable[[], float]
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.note = ""
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._say: Callable[[str], object] = lambda _: None

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        """Counts `steps` as done. `note` names the work that follows."""
        with self._lock:
            self.done += steps
            self.note = self.note if note is None else note

    def describe(self, note: str) -> None:
        """Names the work that runs now."""
        self.note = note

    def expect(self, total: float | None) -> None:
        """Changes the total if the work turns out longer or shorter than expected."""
        self.total = total

    def say(self, message: str) -> None:
        """Prints a permanent line above the progress display."""
        self._say(message)

    def say_by(self, write: Callable[[str], object]) -> None:
        """Sets the function of the progress display that prints the lines of `say`."""
        self._say = write

    @property
    def elapsed_s(self) -> float:
        """Seconds since the work began."""
        return self._clock() - self._started

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left; None before the first step or without a total."""
        if self.total is None or self.done <= 0:
            return None
        return self.elapsed_s / self.done * max(self.total - self.done, 0)

    def line(self) -> str:
        """The state as one line of plain text."""
        parts = [f"{self.label}: {self.count()}", f"{format_duration(self.elapsed_s)} elapsed"]
        if self.left_s is not None:
            parts.append(f"about {format_duration(self.left_s)} left")
        return ", ".join(parts) + (f" ({self.note})" if self.note else "")

    def count(self) -> str:
        """Done and total with the unit: "12/40 requests"."""
        total = "" if self.total is None else f"/{self.total:,.0f}"
        return f"{self.done:,.0f}{total} {self.unit}".rstrip()


def format_duration(seconds: float) -> str:
    """Seconds for people: "48 s", "3 min 05 s", "2 h 10 min"."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
