"""Waiting for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits until something is true; fails after a time that no machine needs."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.002)


def beside(work: Callable[[], T]) -> Future[T]:
    """Does something in a thread of its own: `result()` waits for what it returns or raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def waits(work: Future[T], seconds: float = 0.1) -> bool:
    """Whether something has not ended after this time."""
    return not wait([work], seconds).done


def all_of(works: Iterable[Future[T]], seconds: float = 60.0) -> list[T]:
    """What all of them return."""
    return [work.result(seconds) for work in works]
