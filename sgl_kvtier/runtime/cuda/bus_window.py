"""How much may be queued on the bus to the device at a time, and which amount a GPU's figures call
for.

SGLang uploads indices for every prefill round and for every decode batch that changed. Those small
copies wait behind whatever the same copy engine holds, so a load is sent in slices: the next one
goes when the oldest one in flight has come.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SLICE_BYTES = 2 << 20
"""Largest slice. From about this size on a bus is as fast as it gets."""
START_BYTES = 4 << 20
"""In flight before anything was measured."""
CHOICES = tuple(mib << 20 for mib in (1, 2, 4, 8, 16, 32))
"""Windows that are tried at start, in bytes."""
MOST_DELAY_S = 300e-6
"""Longest that a small copy may wait for a window that is chosen for its bandwidth."""
_FAST_ENOUGH = 0.95
_SLICE, _FILLED, _SENT = 2, 3, 4
"""Places in the fields that C reads and writes (`Window` in native/pages.c)."""


@dataclass(frozen=True)
class Trial:
    """What was measured with one window."""

    window_bytes: int
    gbytes_per_s: float
    small_copy_s: float
    """How long a copy of 4 KiB on another stream took beside the burst, from its turn on that
    stream to its end.
    """


def window_for(trials: Sequence[Trial]) -> int:
    """The window to use, in bytes: the smallest one with 95 % of the best bandwidth, of those that
    delay small copies by less than `MOST_DELAY_S`. Where every window delays them longer, the
    smallest one. Of no trials `START_BYTES`.
    """
    if not trials:
        return START_BYTES
    prompt = [trial for trial in trials if trial.small_copy_s < MOST_DELAY_S]
    if not prompt:
        return min(trial.window_bytes for trial in trials)
    enough = _FAST_ENOUGH * max(trial.gbytes_per_s for trial in prompt)
    return min(trial.window_bytes for trial in prompt if trial.gbytes_per_s >= enough)


class BusWindow:
    """Bounds the bytes that one stream has queued on the bus. One thread, the mover's."""

    def __init__(
        self, module: Any, stream: Any, nbytes: int, driver_events: tuple[int, int] | None
    ) -> None:
        """At most `nbytes` are in flight, in two slices or more. `driver_events` are the addresses
        of the driver's functions that record an event and wait for one; None where torch makes
        each copy.
        """
        slice_bytes = max(1, min(SLICE_BYTES, nbytes // 2))
        self.nbytes, self._stream = nbytes, stream
        self._events = [module.Event(blocking=True) for _ in range(max(2, nbytes // slice_bytes))]
        handles: list[int] = []
        if driver_events is not None:
            for event in self._events:
                event.record(stream)  # torch makes an event when it is recorded first
                handles.append(event.cuda_event)
        self.fields = array("Q", [*(driver_events or (0, 0)), slice_bytes, 0, 0, *handles])
        """What `send_pages` takes as its window, with `driver_events`."""

    def room(self) -> int:
        """Bytes that may be sent now, as one piece. Blocks, without the interpreter, until there
        are some. For copies that torch makes.
        """
        fields = self.fields
        if not fields[_FILLED] and fields[_SENT] >= len(self._events):
            self._event().synchronize()
        return fields[_SLICE] - fields[_FILLED]

    def sent(self, nbytes: int) -> None:
        """Notes a piece of at most `room()` bytes that was sent after that call."""
        fields = self.fields
        fields[_FILLED] += nbytes
        if fields[_FILLED] >= fields[_SLICE]:
            self._event().record(self._stream)
            fields[_SENT] += 1
            fields[_FILLED] = 0

    def _event(self) -> Any:
        """The one behind the slice that is being sent."""
        return self._events[self.fields[_SENT] % len(self._events)]
