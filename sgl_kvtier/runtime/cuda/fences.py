"""Events after everything that may still use slots that were just allocated."""

from __future__ import annotations

from typing import Any


def fence(module: Any, controller: Any) -> Any:
    """An event after every forward launched so far, and after the allocation of the slots.
    Scheduler's thread. Fences are reached in the order in which they were made, since all are
    recorded on one stream.
    """
    event, stream = sleeping_event(module), controller.load_fence_stream
    if stream is None:
        event.record()
        return event
    stream.wait_stream(module.current_stream())
    event.record(stream)
    return event


def sleeping_event(module: Any) -> Any:
    """An event whose waiter sleeps instead of spinning, if the device supports that."""
    try:
        return module.Event(blocking=True)
    except TypeError:
        return module.Event()
