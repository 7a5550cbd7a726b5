"""Tables on stdout and progress on stderr, with `rich` (extra [bench]) if installed, else plain."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

from sgl_kvtier.console.progress import Progress
from sgl_kvtier.console.table import Table, encodable, plain_lines

PLAIN_EVERY_S = 5.0
"""Seconds between two progress lines if there is no terminal."""


def print_table(table: Table, file: TextIO | None = None) -> None:
    """Prints a table to `file` (stdout if None).

    On a terminal it fits the width if `rich` is installed (extra [bench]): text wraps, numbers
    never do, and a table that is too wide is printed row by row as a list. Otherwise it is plain
    text.
    """
    file = file or sys.stdout
    if importlib.util.find_spec("rich") is not None:
        from sgl_kvtier.console.rich_table import print_rich  # rich is an extra

        print_rich(table, file)
        return
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(encodable("\n".join(plain_lines(table)), encoding), file=file)


def print_statement(text: str, is_bad: bool, file: TextIO | None = None) -> None:
    """Prints a sentence (bold on a terminal, red if bad) and an empty line to `file` or stdout."""
    file = file or sys.stdout
    text = encodable(text, getattr(file, "encoding", None) or "utf-8")
    if file.isatty() and "NO_COLOR" not in os.environ:
        text = f"\033[{'1;31' if is_bad else '1'}m{text}\033[0m"
    print(f"{text}\n", file=file)


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
    """Shows progress on `file` (stderr if None) while the block runs; yields the `Progress` to
    count on. It is a live bar on a terminal if `rich` is installed (extra [bench]), otherwise a
    plain line every `every_s` seconds and one at the end. A thread of its own updates it.
    """
    state = Progress(label, total, unit, clock)
    file = file or sys.stderr
    with _live(state, file) or _plain(state, file, every_s):
        yield state


def _live(state: Progress, file: TextIO) -> AbstractContextManager[None] | None:
    """A live bar, or None without a terminal or without `rich`."""
    if not file.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from sgl_kvtier.console.live_progress import live_progress  # rich is an extra

    return live_progress(state, file)


@contextmanager
def _plain(state: Progress, file: TextIO, every_s: float) -> Iterator[None]:
    stop = threading.Event()

    def write(message: str) -> None:
        print(message, file=file, flush=True)

    def tell() -> None:
        while not stop.wait(every_s):
            write(state.line())

    state.say_by(write)
    thread = threading.Thread(target=tell, name="kvtier-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        write(state.line())
