"""Stops storage threads of several ranks only when none would leave another alone in a reduction.

SGLang's ranks agree on how far each read from storage has come: a thread of each rank reduces over
all ranks. A flush stops these threads. One that has not yet taken part in a reduction then never
does, and its peer waits in it until SGLang ends the server, 10 s later. That happens where reads
are in flight for a request that was aborted, and one rank's device is slower than the other's. So
every rank first waits until its own reads and reductions have come to rest. They do, since reads
are cut short meanwhile and every rank makes the same reductions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LONGEST_S = 5.0
_POLL_S = 0.005
_AT_REST = 3
"""This many checks in a row must find nothing: between two of SGLang's steps a thread has
neither.
"""
_BUSY = "_kvtier_busy"


@contextmanager
def busy(controller: Any, what: str) -> Iterator[None]:
    """One of the controller's storage threads is at work. Each `what` is one thread's."""
    doing: dict[str, bool] = vars(controller).setdefault(_BUSY, {})
    doing[what] = True
    try:
        yield
    finally:
        doing[what] = False


def wait(controller: Any) -> bool:
    """Blocks until nothing is read or reduced on this rank, 5 s at most; whether that is so. At
    once where there is one rank.
    """
    if not getattr(controller, "prefetch_completion_sync_groups", None):
        return True
    end, at_rest = time.monotonic() + _LONGEST_S, 0
    while at_rest < _AT_REST:
        if time.monotonic() > end:
            return False
        at_rest = at_rest + 1 if _rests(controller) else 0
        time.sleep(_POLL_S)
    return True


def _rests(controller: Any) -> bool:
    queues = (controller.prefetch_queue, controller.prefetch_buffer, controller.prefetch_sync_queue)
    return all(queue.empty() for queue in queues) and not any(
        vars(controller).get(_BUSY, {}).values()
    )
