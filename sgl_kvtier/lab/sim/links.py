"""Bytes in virtual time: pipes with limited bandwidth, and streams that share them.

Streams are re-timed as others come and go. A stream runs over one or more pipes at once (SSD to the
device: the drive and PCIe) at the least of what they leave it. Bytes are bytes, seconds are
virtual. Nothing here knows pages or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import simpy

_GRAIN = 1e-9
"""Share of a stream, and seconds, below which the rest is rounding."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """One thing that moves bytes."""

    bytes_per_s: float


@dataclass(slots=True)
class Usage:
    """The use of one pipe. `busy_s`: seconds with at least one stream on it."""

    nbytes: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True, eq=False)
class Stream:
    """One transfer under way. `busy_s` is its time on the pipes, latency included, once it has
    ended.
    """

    pipes: tuple[str, ...]
    nbytes: int
    left: float
    began: float
    done: Callable[[Stream], object]
    rate: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True)
class _PipeState:
    rate: float
    usage: Usage = field(default_factory=Usage)
    streams: int = 0


class Network:
    """All pipes of a machine, and the streams on them. Callbacks run inside the event at which a
    stream ends.
    """

    def __init__(self, env: simpy.Environment, pipes: Mapping[str, Pipe]) -> None:
        self._env = env
        self._pipes = {name: _PipeState(pipe.bytes_per_s) for name, pipe in pipes.items()}
        self._streams: list[Stream] = []
        self._as_of = env.now
        self._version = 0

    def usage(self) -> dict[str, Usage]:
        """The use of each pipe up to now."""
        self._advance()
        return {name: state.usage for name, state in self._pipes.items()}

    def open(
        self,
        pipes: tuple[str, ...],
        nbytes: int,
        done: Callable[[Stream], object],
        latency_s: float = 0.0,
    ) -> Stream:
        """Begins a transfer: `latency_s` first, in which it takes no bandwidth, then its bytes.
        `done` is called once.
        """
        stream = Stream(pipes, nbytes, float(nbytes), self._env.now, done)
        if latency_s > 0:
            self._later(latency_s, lambda _: self._join(stream))
        else:
            self._join(stream)
        return stream

    def _join(self, stream: Stream) -> None:
        self._advance()
        self._streams.append(stream)
        for name in stream.pipes:
            self._pipes[name].streams += 1
        self._retime()

    def _advance(self) -> None:
        """Moves every stream's bytes up to now, at the rates that held since."""
        elapsed = self._env.now - self._as_of
        self._as_of = self._env.now
        if elapsed <= 0 or not self._streams:
            return
        moved = dict.fromkeys(self._pipes, 0.0)
        for stream in self._streams:
            nbytes = min(stream.left, stream.rate * elapsed)
            stream.left -= nbytes
            for name in stream.pipes:
                moved[name] += nbytes
        for name, state in self._pipes.items():
            if state.streams:
                state.usage.nbytes += moved[name]
                state.usage.busy_s += elapsed

    def _retime(self) -> None:
        """New rates for all, and one timer for whichever stream ends next."""
        self._version += 1
        self._share()
        ends = [stream.left / stream.rate if stream.left > 0 else 0.0 for stream in self._streams]
        if ends:
            version = self._version
            self._later(min(ends), lambda _: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [
            stream
            for stream in self._streams
            if stream.left <= _GRAIN * stream.nbytes or stream.left <= stream.rate * _GRAIN
        ]
        for stream in ended:
            self._streams.remove(stream)
            for name in stream.pipes:
                self._pipes[name].streams -= 1
            stream.busy_s = self._env.now - stream.began
        self._retime()
        for stream in ended:
            stream.done(stream)

    def _share(self) -> None:
        """Max-min fairness: the tightest pipe is filled first; streams it limits leave the rest to
        the others.
        """
        left = {name: state.rate for name, state in self._pipes.items() if state.streams}
        count = {name: state.streams for name, state in self._pipes.items() if state.streams}
        rising = list(self._streams)
        while rising:
            level = min(left[name] / count[name] for stream in rising for name in stream.pipes)
            tight = level * (1 + _GRAIN)
            settled = [
                stream
                for stream in rising
                if any(left[name] / count[name] <= tight for name in stream.pipes)
            ]
            for stream in settled:
                stream.rate = level
                for name in stream.pipes:
                    left[name] = max(0.0, left[name] - level)
                    count[name] -= 1
            rising = [stream for stream in rising if stream not in settled]

    def _later(self, seconds: float, call: Callable[[Any], None]) -> None:
        timer = self._env.timeout(seconds)
        assert timer.callbacks is not None
        timer.callbacks.append(call)
