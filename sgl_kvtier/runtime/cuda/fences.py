"""Marks behind everything that may still use slots which were just claimed."""

from __future__ import annotations

from typing import Any


def fence(module: Any, controller: Any) -> Any:
    """An event behind every forward launched so far, and behind the allocation of the slots.
    Scheduler's thread.

    Fences come in the order in which they were requested: all are recorded on one stream.
    """
    event, stream = sleeping_event(module), controller.load_fence_stream
    if stream is None:
        event.record()
        return event
    stream.wait_stream(module.current_stream())
    event.record(stream)
    return event


def sleeping_event(module: Any) -> Any:
    """An event whose waiter sleeps in place of spinning, where the device knows the difference."""
    try:
        return module.Event(blocking=True)
    except TypeError:
        return module.Event()
