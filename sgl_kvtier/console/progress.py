"""How far long work has come: done of total, elapsed, and an estimate of the time left. Always on stderr.

Standard output stays clean for tables and `--json -`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

PLAIN_EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""


class Progress:
    """The counters of one piece of work. All methods may be called from any thread and from coroutines; none blocks.

    `total` and the steps are floats, so work of different length can be weighed; None means the total is not known.
    """

    def __init__(self, label: str, total: float | None, unit: str, clock: Callable[[], float]) -> None:
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
        """Count `steps` as done; `note` (if given) says what comes now."""
        with self._lock:
            self.done += steps
            self.note = self.note if note is None else note

    def describe(self, note: str) -> None:
        """Say what is going on now."""
        self.note = note

    def expect(self, total: float | None) -> None:
        """Change the total, when the work turns out longer or shorter than thought."""
        self.total = total

    def say(self, message: str) -> None:
        """Print a line that stays, above the progress display."""
        self._say(message)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the work began."""
        return self._clock() - self._started

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left at the pace so far; None until something is done or while the total is not known."""
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
        """Done of total with the unit: "12/40 requests"."""
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


@contextmanager
def progress(
    label: str,
    total: float | None = None,
    unit: str = "",
    *,
    file: TextIO | None = None,
    every_s: float = PLAIN_EVERY_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Show progress on `file` (stderr if None) while the block runs; yields the `Progress` to count on.

    A live bar on a terminal; elsewhere a plain line every `every_s` seconds and one at the end. The display has its own
    thread, so it goes on while the caller waits.
    """
    state = Progress(label, total, unit, clock)
    file = file or sys.stderr
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    live = console.is_terminal and not console.is_dumb_terminal
    with _live(state, console) if live else _plain(state, console, every_s):
        yield state


@contextmanager
def _live(state: Progress, console: Console) -> Iterator[None]:
    # The note alone gives way on a narrow terminal: counts and times are what people look for.
    # stdout is not redirected: what the caller prints there must reach stdout, not the bar's stderr.
    bar = RichProgress(
        _Cell(state, lambda s: s.label, "bold"),
        BarColumn(bar_width=24 if console.width >= 90 else 8),
        _Cell(state, lambda s: s.count()),
        _Cell(state, lambda s: format_duration(s.elapsed_s)),
        _Cell(state, _left, "cyan"),
        _Cell(state, lambda s: s.note, "dim", table_column=Column(ratio=1, no_wrap=True)),
        console=console,
        redirect_stdout=False,
        expand=True,
    )
    state._say = lambda message: bar.console.print(Text(message))
    with bar:
        bar.add_task(state.label, total=None)
        try:
            yield
        finally:
            bar.refresh()


class _Cell(ProgressColumn):
    """One text of the live display, read from the state each time it is drawn."""

    def __init__(
        self, state: Progress, text: Callable[[Progress], str], style: str = "", table_column: Column | None = None
    ) -> None:
        super().__init__(table_column or Column(no_wrap=True))
        self._state, self._text, self._style = state, text, style

    def render(self, task: Task) -> Text:
        task.total, task.completed = self._state.total, self._state.done
        return Text(self._text(self._state), style=self._style, overflow="ellipsis", no_wrap=True)


def _left(state: Progress) -> str:
    return "" if state.left_s is None else f"~{format_duration(state.left_s)} left"


@contextmanager
def _plain(state: Progress, console: Console, every_s: float) -> Iterator[None]:
    stop = threading.Event()

    def write(message: str) -> None:
        print(message, file=console.file, flush=True)

    def tell() -> None:
        while not stop.wait(every_s):
            write(state.line())

    state._say = write
    thread = threading.Thread(target=tell, name="kvtier-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        write(state.line())
