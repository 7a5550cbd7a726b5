"""An accelerator that lies in wait: streams that run late, and a sanitizer that sees every access
that nothing orders, whether or not this run happened to do it in the right order.

Order is counted as vector clocks. It comes from three things only: a stream does one operation
after the other; a stream waits for an event; the host has seen an event (`query`, `synchronize`).
Accesses are declared when an operation is enqueued, since its place in the order is known then.
The operation itself runs when `step` picks its stream, by chance.

`module` stands in for `torch.cuda`, and is as strict about devices, events without a record and
events without timing. The scheduler's device is not device 0, as in a second rank.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

Clock: TypeAlias = dict[int, int]
"""How far each stream (and the host, number 0) is known to be."""

HOST = 0
INDEX = 3
"""The device of this process."""
_PATIENCE_S = 30.0


class Race(AssertionError):
    """Two accesses to one place that nothing orders, one of them a write."""


def merge(into: Clock, other: Clock) -> None:
    """Everything known to `other` is known to `into`."""
    for who, tick in other.items():
        if into.get(who, 0) < tick:
            into[who] = tick


class Memory:
    """Who wrote each place last, and who has read it since. A place is anything hashable."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._writer: dict[Any, tuple[int, int, str]] = {}
        self._readers: dict[Any, dict[int, tuple[int, str]]] = {}

    def read(self, places: Iterable[Any], who: int, clock: Clock, what: str) -> None:
        """Raises Race where the last writer may still be at it."""
        for place in places:
            writer = self._writer.get(place)
            if writer is not None and clock.get(writer[0], 0) < writer[1]:
                raise Race(f"{self.name}[{place}]: {what} reads what {writer[2]} may still write")
            self._readers.setdefault(place, {})[who] = (clock[who], what)

    def write(self, places: Iterable[Any], who: int, clock: Clock, what: str) -> None:
        """Raises Race where the last writer or a reader since may still be at it."""
        for place in places:
            writer = self._writer.get(place)
            if writer is not None and clock.get(writer[0], 0) < writer[1]:
                raise Race(f"{self.name}[{place}]: {what} writes over {writer[2]}")
            for reader, (tick, name) in self._readers.pop(place, {}).items():
                if clock.get(reader, 0) < tick:
                    raise Race(f"{self.name}[{place}]: {what} writes what {name} may still read")
            self._writer[place] = (who, clock[who], what)


class Operation:
    """What a stream does next: not before `may` says so."""

    def __init__(self, does: Callable[[], None], may: Callable[[], bool] = lambda: True) -> None:
        self.does, self.may = does, may


class VirtualDevice:
    """All streams of a device. Nothing runs by itself: `step` runs one operation."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.changed = threading.Condition(threading.RLock())
        self.races: list[Race] = []
        self.now_ms = 0.0
        self.host: Clock = {}
        self.streams: list[Stream] = []
        self.events: dict[int, Event] = {}
        """By the number that a driver knows them by."""
        self._threads = threading.local()
        self._maker = threading.current_thread()
        self.default = Stream(self)
        self.module = _module(self)
        self.index = INDEX

    # --- what a thread has set ------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The calling thread's device; a new thread has device 0."""
        return getattr(self._threads, "index", 0)

    @index.setter
    def index(self, index: int) -> None:
        self._threads.index = index

    @property
    def current(self) -> Stream:
        """The calling thread's stream."""
        return getattr(self._threads, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """As `torch.cuda.stream`: it switches the device as well."""
        before = (self.index, self.current)
        self.index, self._threads.stream = INDEX, stream
        try:
            yield
        finally:
            self.index, self._threads.stream = before

    # --- what is done ----------------------------------------------------------------------------

    def need_own(self, what: str) -> None:
        """A thread that has not set the device would work on the first one, or make itself at home
        there, in some hundred megabytes.
        """
        if self.index != INDEX:
            raise RuntimeError(f"{what} by a thread on device {self.index}")

    def launch(
        self,
        what: str,
        reads: Iterable[tuple[Memory, Iterable[Any]]] = (),
        writes: Iterable[tuple[Memory, Iterable[Any]]] = (),
        does: Callable[[], None] = lambda: None,
    ) -> None:
        """Enqueues an operation on the calling thread's stream."""
        with self.changed:
            stream = self.current
            self.need_own(what)
            clock = stream.tick()
            self._access(stream.number, clock, what, reads, writes)
            stream.todo.append(Operation(does))

    def touch(
        self,
        what: str,
        reads: Iterable[tuple[Memory, Iterable[Any]]] = (),
        writes: Iterable[tuple[Memory, Iterable[Any]]] = (),
    ) -> None:
        """The host itself reads or writes, now."""
        with self.changed:
            self.host[HOST] = self.host.get(HOST, 0) + 1
            self._access(HOST, dict(self.host), what, reads, writes)

    def _access(self, who: int, clock: Clock, what: str, reads: Any, writes: Any) -> None:
        try:
            for memory, places in reads:
                memory.read(places, who, clock, what)
            for memory, places in writes:
                memory.write(places, who, clock, what)
        except Race as race:
            self.races.append(race)  # whoever launched it may take any failure for a lost page
            raise

    def hold(self, stream: Stream) -> Callable[[], None]:
        """A stream that goes no further until the answer is called: a long kernel."""
        held = SimpleNamespace(over=False)
        with self.changed:
            stream.tick()
            stream.todo.append(Operation(lambda: None, lambda: held.over))
        return lambda: setattr(held, "over", True)

    # --- time ------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one operation of some stream; whether there was one."""
        with self.changed:
            ready = [stream for stream in self.streams if stream.todo and stream.todo[0].may()]
            if not ready:
                return False
            self.now_ms += 0.25
            self.chance.choice(ready).todo.popleft().does()
            self.changed.notify_all()
            return True

    def steps(self, most: int) -> None:
        """Up to so many operations."""
        for _ in range(most):
            if not self.step():
                return

    def drain(self) -> None:
        """Everything that may run."""
        while self.step():
            pass

    def wait(self, condition: Callable[[], bool]) -> None:
        """Blocks the calling thread until others have let the streams run so far; the thread that
        made the device lets them run itself.
        """
        end = time.monotonic() + _PATIENCE_S
        if threading.current_thread() is self._maker:
            while not condition():
                assert self.step(), "what is waited for never comes"
            return
        with self.changed:
            while not condition():
                left = end - time.monotonic()
                assert left > 0, "what is waited for never comes"
                self.changed.wait(left)

    def check(self) -> None:
        """Raises the first race, also where whoever launched it has caught it."""
        if self.races:
            raise self.races[0]


class Stream:
    """One queue of a device; its clock is that of what was enqueued last."""

    def __init__(self, device: VirtualDevice) -> None:
        self.virtual = device
        self.device = torch.device("cuda", INDEX)
        self.todo: deque[Operation] = deque()
        self.clock: Clock = {}
        device.streams.append(self)
        self.number = self.cuda_stream = len(device.streams)

    def tick(self) -> Clock:
        """The clock of what is enqueued now: behind all that is here, and all the host has seen."""
        merge(self.clock, self.virtual.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return dict(self.clock)

    def wait_event(self, event: Event) -> None:
        """What follows runs after the event's latest record; without one there is no wait."""
        with self.virtual.changed:
            merge(self.clock, event.clock)
            due = event.records
            self.todo.append(Operation(lambda: None, lambda: event.come >= due))

    def wait_stream(self, other: Stream) -> None:
        """What follows runs after all that the other holds now."""
        event = Event(self.virtual)
        event.record(other)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        """As `event.record` on this stream."""
        event = Event(self.virtual) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Blocks until this stream is empty."""
        self.virtual.wait(lambda: not self.todo)
        merge(self.virtual.host, self.clock)


class Event:
    """A mark in a stream. Never recorded it has come, and orders nothing, as in CUDA."""

    def __init__(self, device: VirtualDevice, enable_timing: bool = False) -> None:
        self._device, self._timed = device, enable_timing
        self.clock: Clock = {}
        self.records = self.come = 0
        self.at_ms = 0.0
        self.cuda_event = 0

    def record(self, stream: Stream | None = None) -> None:
        """Marks what the stream holds now."""
        device = self._device
        with device.changed:
            if stream is None and device.index != INDEX:
                raise RuntimeError("recorded on a stream of another device")
            stream = device.current if stream is None else stream
            if not self.cuda_event:  # torch makes an event when it is recorded first
                self.cuda_event = len(device.events) + 1
                device.events[self.cuda_event] = self
            self.clock = stream.tick()
            self.records += 1
            number = self.records

            def come() -> None:
                self.come, self.at_ms = max(self.come, number), device.now_ms

            stream.todo.append(Operation(come))

    def wait(self, stream: Stream | None = None) -> None:
        """As `stream.wait_event`."""
        (self._device.current if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Whether it has come; then the host knows."""
        self._device.need_own("an event asked")
        with self._device.changed:
            if self.come < self.records:
                return False
            merge(self._device.host, self.clock)
            return True

    def synchronize(self) -> None:
        """Blocks until it has come, by what other threads let run."""
        self._device.need_own("an event waited for")
        self._device.wait(self.query)

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds between two events that have come."""
        if not (self._timed and other._timed):
            raise RuntimeError("both events need enable_timing")
        if not (self.records and other.records and self.query() and other.query()):
            raise RuntimeError("device not ready")
        return other.at_ms - self.at_ms


def _module(device: VirtualDevice) -> Any:
    """What `torch.get_device_module` gives."""

    def set_device(index: Any) -> None:
        if not isinstance(index, int):
            index = torch.device(index).index
        if index is None:
            raise ValueError("Expected a torch.device with a specified index or an integer")
        device.index = index

    def event(enable_timing: bool = False, blocking: bool = False) -> Event:
        del blocking
        return Event(device, enable_timing)

    return SimpleNamespace(
        Stream=lambda *_, **__: Stream(device),
        Event=event,
        stream=device.on,
        current_stream=lambda *_: device.current,
        current_device=lambda: device.index,
        set_device=set_device,
        is_available=lambda: True,
        synchronize=lambda *_: device.wait(
            lambda: not any(stream.todo for stream in device.streams)
        ),
    )
