"""A thread that blocks in a device's events, one after the other, instead of polling them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Waitable(Protocol):
    """Something that a device completes."""

    def wait(self) -> None:
        """Blocks until it is complete, with the GIL released."""


class EventWaiter:
    """Waits for the events it is given, in that order, and then calls `then` of each on its thread.
    The thread is started by the first `add`, so a CPU has none.
    """

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        """`enter` is called on its thread before anything else."""
        self._name, self._enter = name, enter
        self._changed = threading.Condition()
        self._due: deque[tuple[Waitable, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, waitable: Waitable, then: Callable[[], None]) -> None:
        """Queues an event. Any thread."""
        with self._changed:
            self._due.append((waitable, then))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the events it was given. A thread whose event is not reached within
        `timeout_s` is abandoned. Idempotent.
        """
        with self._changed:
            self._closing, thread = True, self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        self._enter()
        while True:
            with self._changed:
                while not self._due and not self._closing:
                    self._changed.wait()
                if not self._due:
                    return
                waitable, then = self._due.popleft()
            try:
                waitable.wait()
            except Exception:
                # The device failed; the next call that queries it will raise.
                logger.exception("kvtier: an event of the device failed")
            then()
