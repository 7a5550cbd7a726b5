"""Streams, events, links and a disk in real time: only *when* work counts as done is modelled.

A forward or a copy is launched on a stream. Its data moves at once, in the order of the program,
which is one of the orders that the streams allow. Its end is a time that is known at the launch.
The rules are CUDA's:

1. Work on one stream runs in the order of launches, and none begins before it is launched.
2. An event stands for all that was launched on its stream before `record`. It is over when that is;
   one that was never recorded is over; recording again replaces what it stood for.
3. A stream that waits for an event begins nothing launched later before it. Waiting for a stream is
   waiting for an event recorded on it now. Neither makes the calling thread wait.
4. Streams do not disturb each other, except that copies in one direction share its link. A copy
   that waits for a forward blocks no other; one that is ready takes the first time that is free.
   Compute is not slowed by copies.
5. A forward behind a layer-wise load begins each layer when that layer has come (`layered`).
6. Only `synchronize` makes a thread wait. It sleeps: it needs neither a core nor the interpreter.

Times are seconds of the monotonic clock. All methods may be called from any thread.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

now = time.monotonic
_SOON_S = 0.0005
"""A thread does not wait for less than these seconds: waking up takes as long."""
_CATCH_UP_S = 0.002
"""Seconds a disk's queue may be filled behind the present: a thread that woke late loses none of
it.
"""
_lock = threading.RLock()
_local = threading.local()
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def sleep_until(at: float) -> None:
    """Sleeps until `at`, which may be over."""
    while (left := at - now()) > 0:
        time.sleep(left)


class Stream:
    """Stands for torch.cuda.Stream. `tail` is when everything launched on it is over. A driver
    knows it by the number `cuda_stream`.
    """

    device = "cpu"

    def __init__(self, *_: Any, priority: int = 0, **__: Any) -> None:
        self.priority = priority
        self.tail = 0.0
        self.cuda_stream = next(_numbers)
        with _lock:
            _streams[self.cuda_stream] = self

    def launch(self, seconds: float, at: float | None = None) -> tuple[float, float]:
        """Begin and end of work launched now, or at a time `at` before now."""
        with _lock:
            begin = max(self.tail, now() if at is None else at)
            self.tail = begin + seconds
            return begin, self.tail

    def delay(self, until: float) -> None:
        """Work launched later begins at `until` or later."""
        with _lock:
            self.tail = max(self.tail, until)

    def wait_event(self, event: Event) -> None:
        """Rule 3."""
        self.delay(event.at)

    def wait_stream(self, other: Stream) -> None:
        """Rule 3."""
        self.delay(other.tail)

    def record_event(self, event: Event | None = None) -> Event:
        """A new event, or the one given, recorded here."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all that was launched is over."""
        return now() >= self.tail

    def synchronize(self) -> None:
        """Sleeps until all that was launched is over."""
        sleep_until(self.tail)


class Event:
    """Stands for torch.cuda.Event. `at` is when what it stands for is over."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Stands for what was launched on `stream`, or on the current one."""
        self.at = max((stream or current_stream()).tail, now())

    def wait(self, stream: Stream | None = None) -> None:
        """Makes `stream`, or the current one, wait."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether it is over."""
        return now() >= self.at

    def synchronize(self) -> None:
        """Sleeps until it is over."""
        sleep_until(self.at)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end.at - self.at) * 1e3


class StreamContext:
    """Makes a stream the thread's current one inside a block; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _currents().append(self.stream or current_stream())

    def __exit__(self, *_: object) -> None:
        _currents().pop()


_default = Stream()


def _currents() -> list[Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = [_default]
    streams: list[Stream] = _local.streams
    return streams


def current_stream(device: Any = None) -> Stream:
    """The calling thread's current stream."""
    del device
    return _currents()[-1]


def stream_of(number: int) -> Stream:
    """The stream whose `cuda_stream` this is."""
    return _streams[number]


def synchronize(device: Any = None) -> None:
    """Sleeps until all streams of this process are over."""
    del device
    with _lock:
        last = max(stream.tail for stream in _streams.values())
    sleep_until(last)


def stand_in(module: Any) -> None:
    """Puts these streams and events into `module`, which is torch.cpu: there they do nothing."""
    module.Stream, module.Event, module.StreamContext = Stream, Event, StreamContext
    module.stream, module.current_stream = StreamContext, current_stream
    module.synchronize = synchronize


class Link:
    """One direction of a bus between host and device, which copies share one after the other."""

    def __init__(self, gbytes_per_s: float) -> None:
        self._bytes_per_s = gbytes_per_s * 1e9
        self._busy: list[tuple[float, float]] = []
        self.seconds = 0.0
        """For which it was or will be busy."""

    def copy(self, stream: Stream, nbytes: float) -> tuple[float, float]:
        """Begin and end of a copy launched now on `stream`."""
        with _lock:
            begin, end = self._take(max(stream.tail, now()), self.seconds_of(nbytes))
            stream.delay(end)
            return begin, end

    def seconds_of(self, nbytes: float) -> float:
        """For which a copy of `nbytes` keeps it busy."""
        return nbytes / self._bytes_per_s

    def _take(self, earliest: float, seconds: float) -> tuple[float, float]:
        self._forget()
        begin = earliest
        at = bisect.bisect_left(self._busy, (begin, begin))
        at = max(at - 1, 0)
        for first, last in self._busy[at:]:
            if begin + seconds <= first:
                break
            begin = max(begin, last)
        self._book(begin, begin + seconds)
        self.seconds += seconds
        return begin, begin + seconds

    def _forget(self) -> None:
        past, moment = 0, now()
        while past < len(self._busy) and self._busy[past][1] < moment:
            past += 1
        del self._busy[:past]

    def _book(self, begin: float, end: float) -> None:
        """Intervals that touch become one, so that the list stays as short as there are gaps."""
        at = bisect.bisect_left(self._busy, (begin, end))
        if at < len(self._busy) and self._busy[at][0] - end < 1e-9:
            end = self._busy.pop(at)[1]
        if at > 0 and begin - self._busy[at - 1][1] < 1e-9:
            at -= 1
            begin = self._busy.pop(at)[0]
        self._busy.insert(at, (begin, end))


class Disk:
    """One direction of a disk: threads that read or write wait in its queue until their turn."""

    def __init__(self, gbytes_per_s: float) -> None:
        self._bytes_per_s = gbytes_per_s * 1e9
        self._free_at = 0.0

    def serve(self, nbytes: float) -> None:
        """Sleeps until `nbytes` are read or written. Waits too short to sleep are made up for by
        the next.
        """
        with _lock:
            begin = max(self._free_at, now() - _CATCH_UP_S)
            self._free_at = begin + nbytes / self._bytes_per_s
            end = self._free_at
        if end - now() > _SOON_S:
            sleep_until(end)


def layered(
    begin: float, seconds: float, layers: int, loaded: Sequence[float], load_begin: float
) -> tuple[float, float]:
    """When a forward of `layers` equal layers begins its first, and ends. Each of them begins when
    its keys and values came.

    `loaded` are the ends of a load in equal parts, of any number. The load that the device at hand
    copies layer by layer stands for the layers of the modelled model.
    """
    first = end = max(begin, _loaded_at(1 / layers, loaded, load_begin))
    for layer in range(layers):
        end = max(end, _loaded_at((layer + 1) / layers, loaded, load_begin)) + seconds / layers
    return first, end


def _loaded_at(share: float, loaded: Sequence[float], load_begin: float) -> float:
    """When `share` of a load has come: between its parts it comes evenly."""
    place = share * len(loaded)
    part = min(max(int(-(-place // 1)) - 1, 0), len(loaded) - 1)
    before = load_begin if part == 0 else loaded[part - 1]
    return before + (loaded[part] - before) * (place - part)
