"""Stops storage threads of several ranks only when no rank would leave another alone in a
reduction.

SGLang's ranks agree on the progress of each read from storage: a thread of each rank takes part in
a reduction over all ranks. A flush stops these threads. If one is stopped before it takes part, its
peers wait until SGLang ends the server, 10 s later. That happens if reads of an aborted request are
in flight and one rank's disk is slower than another's. So every rank first waits until its own
reads and reductions have ended. They do end, since reads are cut short meanwhile and every rank
makes the same reductions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LONGEST_S = 5.0
_POLL_S = 0.005
_AT_REST = 3
"""Number of consecutive checks that must find the threads idle: between two of SGLang's steps, a
thread seems idle for a moment.
"""
_BUSY = "_kvtier_busy"


@contextmanager
def busy(controller: Any, what: str) -> Iterator[None]:
    """Marks one of the controller's storage threads as working. Each `what` is one thread. May be
    nested: a step of SGLang's class for side pools contains the same step of its base class.
    """
    doing: dict[str, bool] = vars(controller).setdefault(_BUSY, {})
    before = doing.get(what, False)
    doing[what] = True
    try:
        yield
    finally:
        doing[what] = before


def wait(controller: Any) -> bool:
    """Blocks until nothing is read or reduced on this rank, for `_LONGEST_S` at most; returns
    whether that is so. Returns at once if there is one rank.
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
