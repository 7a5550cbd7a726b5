"""A thread that sleeps in a device's events, one after the other, in place of polling them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Waitable(Protocol):
    """Something of a device that comes."""

    def wait(self) -> None:
        """Blocks until it has come, without the interpreter."""


class EventWaiter:
    """Waits for what it is given, in that order; `then` is called on its thread for each. Begun by
    the first, so that a CPU has no such thread.
    """

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        """`enter` is called on its thread before anything else."""
        self._name, self._enter = name, enter
        self._changed = threading.Condition()
        self._due: deque[tuple[Waitable, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, waitable: Waitable, then: Callable[[], None]) -> None:
        """Any thread."""
        with self._changed:
            self._due.append((waitable, then))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after what it was given. An event that has not come by then keeps the
        thread, which is left behind. Idempotent.
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
                # The device failed; who asks it next learns of it.
                logger.exception("kvtier: an event of the device failed")
            then()
