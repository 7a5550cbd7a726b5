"""Limits how much may be queued on the bus to the device at a time, and chooses that limit from
measurements on a GPU.

SGLang uploads indices for every prefill round and for every decode batch that changed. Those small
copies wait for everything queued on the same copy engine. So a load is sent in slices: the next one
is queued when the oldest one in flight has arrived.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SLICE_BYTES = 2 << 20
"""Largest slice. From about this size on, a bus reaches its full bandwidth."""
START_BYTES = 4 << 20
"""Limit before anything was measured."""
CHOICES = tuple(mib << 20 for mib in (1, 2, 4, 8, 16, 32))
"""Windows that are measured at start, in bytes."""
MOST_DELAY_S = 300e-6
"""Longest delay of a small copy, in seconds, with which a window is chosen for its bandwidth."""
_FAST_ENOUGH = 0.95
_SLICE, _FILLED, _SENT = 2, 3, 4
"""Indices of the fields that C reads and writes (`Window` in native/pages.c)."""


@dataclass(frozen=True)
class Trial:
    """The measurement of one window."""

    window_bytes: int
    gbytes_per_s: float
    small_copy_s: float
    """Duration of a copy of 4 KiB on another stream during the burst, from its turn on that stream
    to its end.
    """


def window_for(trials: Sequence[Trial]) -> int:
    """The window to use, in bytes: the smallest one with 95 % of the best bandwidth, among those
    that delay small copies by less than `MOST_DELAY_S`. If every window delays them longer, the
    smallest one. Without trials `START_BYTES`.
    """
    if not trials:
        return START_BYTES
    prompt = [trial for trial in trials if trial.small_copy_s < MOST_DELAY_S]
    if not prompt:
        return min(trial.window_bytes for trial in trials)
    enough = _FAST_ENOUGH * max(trial.gbytes_per_s for trial in prompt)
    return min(trial.window_bytes for trial in prompt if trial.gbytes_per_s >= enough)


class BusWindow:
    """Limits the bytes that one stream has queued on the bus. One thread, the mover's."""

    def __init__(
        self, module: Any, stream: Any, nbytes: int, driver_events: tuple[int, int] | None
    ) -> None:
        """At most `nbytes` are in flight, in at least two slices. `driver_events` are the addresses
        of the driver's functions that record an event and wait for one; None if torch makes each
        copy.
        """
        slice_bytes = max(1, min(SLICE_BYTES, nbytes // 2))
        self.nbytes, self._stream = nbytes, stream
        self._events = [module.Event(blocking=True) for _ in range(max(2, nbytes // slice_bytes))]
        handles: list[int] = []
        if driver_events is not None:
            for event in self._events:
                event.record(stream)  # torch creates an event when it is first recorded
                handles.append(event.cuda_event)
        self.fields = array("Q", [*(driver_events or (0, 0)), slice_bytes, 0, 0, *handles])
        """The window argument of `send_pages`, if there are `driver_events`."""

    def room(self) -> int:
        """Bytes that may be sent now, in one piece. Blocks, with the GIL released, until it is more
        than 0. For copies that torch makes.
        """
        fields = self.fields
        if not fields[_FILLED] and fields[_SENT] >= len(self._events):
            self._event().synchronize()
        return fields[_SLICE] - fields[_FILLED]

    def sent(self, nbytes: int) -> None:
        """Notes that a piece of at most `room()` bytes was sent."""
        fields = self.fields
        fields[_FILLED] += nbytes
        if fields[_FILLED] >= fields[_SLICE]:
            self._event().record(self._stream)
            fields[_SENT] += 1
            fields[_FILLED] = 0

    def _event(self) -> Any:
        """The event after the slice that is being sent."""
        return self._events[self.fields[_SENT] % len(self._events)]
