"""Bytes in virtual time: pipes with limited bandwidth, streams that share them, and transfers of
pages that queue for a link.

Streams are re-timed as others come and go. A stream runs over one or more pipes at once (SSD to the
device: the drive and PCIe) at the least of what they leave it. Bytes are bytes, seconds are
virtual. A link carries a few transfers at a time, in order; one that has not begun can be cancelled
or given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import simpy

from sgl_kvtier.lab.sim.requests import LinkResult
from sgl_kvtier.policy.messages import CANCELLED
from sgl_kvtier.types import Link, Span

# --- pipes and streams ----------------------------------------------------------------------------

_GRAIN = 1e-9
"""Share of a stream, and seconds, below which the rest is rounding."""


@dataclass(frozen=True, slots=True)
class Pipe:
    """One thing that moves bytes."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """How a Link is carried: over which pipes, with which latency per transfer, and how many
    transfers at a time.
    """

    pipes: tuple[str, ...]
    latency_s: float = 0.0
    depth: int = 1


@dataclass(slots=True)
class Usage:
    """The use of one pipe. `busy_s`: seconds with at least one stream on it."""

    nbytes: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True, eq=False)
class Stream:
    """One transfer under way."""

    pipes: tuple[str, ...]
    nbytes: int
    left: float
    done: Callable[[Stream], object]
    rate: float = 0.0


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
        stream = Stream(pipes, nbytes, float(nbytes), done)
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


# --- transfers of pages ---------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Transfer:
    """Pages on their way. `begin` is asked when its turn comes and says whether there is anything
    to move. Then exactly one of `done(seconds)` and `lost(span, reason)` is called for every page
    of it.
    """

    link: Link
    rid: str
    span: Span
    begin: Callable[[Transfer], bool]
    done: Callable[[Transfer, float], None]
    lost: Callable[[Transfer, Span, str], None]
    due_s: float | None = None
    """When it is given up unless it has begun, on the kernel's clock."""
    page_bytes: float | None = None
    """Of each of its pages, where that is not the model's."""


class _Share:
    """Busy time of one link, dealt out evenly among the transfers under way: their seconds add up
    to the link's.
    """

    def __init__(self) -> None:
        self.under_way = 0
        self.each_s = 0.0
        """Seconds a transfer under way since the beginning would have been given."""
        self.busy_s = 0.0
        self._as_of = 0.0

    def change(self, now: float, by: int) -> None:
        """A transfer began or ended."""
        if self.under_way:
            self.each_s += (now - self._as_of) / self.under_way
            self.busy_s += now - self._as_of
        self._as_of = now
        self.under_way += by


class Transfers:
    """The queues of all links. Calls back inside events of the kernel."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        routes: Mapping[Link, Route],
        page_bytes: int,
    ) -> None:
        self._env = env
        self._network = network
        self._routes = routes
        self._page_bytes = page_bytes
        self._queued: dict[Link, list[Transfer]] = {link: [] for link in routes}
        self._shares = {link: _Share() for link in routes}
        self.results: dict[Link, LinkResult] = {link: LinkResult() for link in routes}
        self.on_end: Callable[[], None] = lambda: None
        """Called whenever a transfer is over, whichever way."""

    @property
    def pending(self) -> int:
        """Transfers queued or under way, on all links."""
        return sum(share.under_way for share in self._shares.values()) + sum(
            map(len, self._queued.values())
        )

    def nbytes(self, transfer: Transfer) -> int:
        """Bytes that it moves."""
        page_bytes = self._page_bytes if transfer.page_bytes is None else transfer.page_bytes
        return round(len(transfer.span) * page_bytes)

    def submit(self, transfer: Transfer) -> None:
        """Queues a transfer. One that has not begun when it is due is lost as late."""
        assert transfer.link in self._routes, (
            f"{transfer.rid}: this machine has no link {transfer.link.value}"
        )
        self._queued[transfer.link].append(transfer)
        self._watch(transfer)
        self._pump(transfer.link)

    def cancel(self, rid: str, span: Span) -> None:
        """Takes back what of these pages has not begun; each is lost as cancelled."""
        for link, queue in self._queued.items():
            for transfer in [item for item in queue if item.rid == rid]:
                low, high = max(transfer.span.start, span.start), min(transfer.span.stop, span.stop)
                if low < high:
                    self._cut(link, transfer, Span(low, high))

    def _cut(self, link: Link, transfer: Transfer, span: Span) -> None:
        rest = [Span(transfer.span.start, span.start), Span(span.stop, transfer.span.stop)]
        parts = [
            Transfer(
                link,
                transfer.rid,
                part,
                transfer.begin,
                transfer.done,
                transfer.lost,
                transfer.due_s,
                transfer.page_bytes,
            )
            for part in reversed(rest)
            if part
        ]
        at = self._queued[link].index(transfer)
        self._queued[link][at : at + 1] = parts
        for part in parts:
            self._watch(part)
        transfer.lost(transfer, span, CANCELLED)

    def _watch(self, transfer: Transfer) -> None:
        if transfer.due_s is not None:
            timer = self._env.timeout(max(0.0, transfer.due_s - self._env.now))
            assert timer.callbacks is not None
            timer.callbacks.append(lambda _: self._give_up(transfer))

    def _give_up(self, transfer: Transfer) -> None:
        if transfer in self._queued[transfer.link]:
            self._queued[transfer.link].remove(transfer)
            transfer.lost(transfer, transfer.span, "late")
            self.on_end()

    def _pump(self, link: Link) -> None:
        route, share = self._routes[link], self._shares[link]
        while self._queued[link] and share.under_way < route.depth:
            transfer = self._queued[link].pop(0)
            if not transfer.begin(transfer):
                self.on_end()
                continue
            share.change(self._env.now, +1)
            nbytes = self.nbytes(transfer)
            self._network.open(
                route.pipes, nbytes, self._ended(transfer, share.each_s), route.latency_s
            )

    def _ended(self, transfer: Transfer, each_s_before: float) -> Callable[[object], None]:
        def ended(_: object) -> None:
            share, result = self._shares[transfer.link], self.results[transfer.link]
            share.change(self._env.now, -1)
            result.nbytes += self.nbytes(transfer)
            result.transfers += 1
            result.busy_s = share.busy_s
            transfer.done(transfer, share.each_s - each_s_before)
            self.on_end()
            self._pump(transfer.link)

        return ended
