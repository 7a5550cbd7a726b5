"""What a load's bytes in flight cost on an emulated GPU: its copy engine is one queue, in which
SGLang's own small uploads wait behind the slices of loads.

Only times are modelled. Steps take the profile's time and copies its link's. SGLang's scheduler
uploads 4 KiB some times for every batch that changed, one after the other, and launches the batch
behind the last. A sender keeps the bus busy with loads all the time: a new slice goes when the
oldest in flight has come and its thread has woken up. Uploads and slices are served in the order in
which they are queued.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from sgl_kvtier.lab.profile import Profile

UPLOADS = 12
"""Of a prefill round: SGLang 0.5.23 makes about a dozen (allocation.py, schedule_batch.py,
overlap_utils.py)."""
UPLOAD_EVERY_S = 50e-6
"""Time of the scheduler from one upload to the next."""
UPLOAD_S = 2e-6
"""Of the copy engine for 4 KiB."""
WAKE_S = 30e-6
"""From the end of a slice until the thread that slept for it has queued the next one; an
assumption."""
CHUNK_TOKENS = 512
DECODING, CONTEXT = 16, 8192
"""Requests that decode, and tokens of each."""
PREFILL_EVERY = 8
"""Decode steps from one prefill round to the next."""
_STEPS = 2000
_SLICE_BYTES = 2 << 20


def slices_of(window_bytes: int) -> tuple[int, int]:
    """Bytes of a slice, and slices in flight, of a window; as `runtime/cuda/bus_window.py`."""
    slice_bytes = min(_SLICE_BYTES, window_bytes // 2)
    return slice_bytes, window_bytes // slice_bytes


@dataclass
class Engine:
    """The copy engine from host to device: what is queued runs one after the other."""

    free_at: float = 0.0
    busy_s: float = 0.0

    def serve(self, at: float, seconds: float) -> float:
        """The end of a copy that is queued at `at`; calls come in the order of their times."""
        self.free_at = max(self.free_at, at) + seconds
        self.busy_s += seconds
        return self.free_at


@dataclass
class Loads:
    """Loads without end, of which `slices` slices are in flight at most."""

    slice_bytes: int
    slices: int
    sent: int = 0
    ends: list[float] = field(default_factory=list)
    """Of the slices in flight."""

    def next_at(self, wake_s: float) -> float:
        """When the next slice can be queued."""
        return 0.0 if len(self.ends) < self.slices else self.ends[0] + wake_s


@dataclass(frozen=True)
class Found:
    """Figures of one run."""

    gbytes_per_s: float
    """Of the loads."""
    small_copy_us: float
    """Mean from the queueing of an upload to its end."""
    gap_p50_ms: float
    gap_p99_ms: float
    """Between output tokens of the requests that decode."""


def run(profile: Profile, window_bytes: int, *, overlap: bool) -> Found:
    """Decode steps with a prefill round every `PREFILL_EVERY`, beside loads with `window_bytes` in
    flight, 0: without loads. `overlap`: SGLang prepares a batch while the one before it runs;
    otherwise when that has ended.
    """
    loads = window_bytes > 0
    slice_bytes, slices = slices_of(window_bytes) if loads else (1, 2)
    engine, sender = Engine(), Loads(slice_bytes, slices)
    rate = profile.to_device_gbytes_per_s * 1e9
    waits: list[float] = []
    gaps: list[float] = []

    def sent_until(at: float) -> None:
        while loads and (due := sender.next_at(WAKE_S)) <= at:
            if len(sender.ends) == sender.slices:
                heapq.heappop(sender.ends)
            heapq.heappush(sender.ends, engine.serve(due, slice_bytes / rate))
            sender.sent += slice_bytes

    # When the scheduler is free, when the last step begins and ends, and the last token's time.
    ready = before = end = token_at = 0.0
    for seconds, decodes, uploads in _steps(profile):
        at = max(ready, before) if overlap else end
        come = at
        for _ in range(uploads):
            sent_until(at)
            come = engine.serve(at, UPLOAD_S)
            waits.append(come - at)
            at += UPLOAD_EVERY_S
        ready, before = at, max(end, come, at)
        end = before + seconds
        if decodes:
            gaps.append(end - token_at)
            token_at = end
    sent_until(end)
    gaps = sorted(gaps[1:])
    return Found(
        gbytes_per_s=sender.sent / end / 1e9,
        small_copy_us=statistics.fmean(waits) * 1e6,
        gap_p50_ms=gaps[len(gaps) // 2] * 1e3,
        gap_p99_ms=gaps[int(len(gaps) * 0.99)] * 1e3,
    )


def _steps(profile: Profile) -> Iterator[tuple[float, bool, int]]:
    """Seconds of each step, whether it decodes, and uploads before it. A decode step that goes on
    with the same requests has none, as with a dense model.
    """
    decode_s = profile.decode_seconds([CONTEXT] * DECODING)
    prefill_s = profile.prefill_seconds([(CHUNK_TOKENS, 0)])
    for step in range(_STEPS):
        prefills = step % PREFILL_EVERY == PREFILL_EVERY - 1
        if prefills:
            yield prefill_s, False, UPLOADS
        yield decode_s, True, 1 if prefills else 0
