"""Bandwidth over time, and a load of other requests over time: made from a seed, replayed beside a
restoration.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvtier.lab.experiment.restore.arms import ArmSwitch
from sgl_kvtier.lab.outside.client import Client

_BYTES = 256


@dataclass(frozen=True)
class BandwidthTrace:
    """Piecewise constant: from each of `starts_s` on (the first is 0) the bandwidth `gbps` at the
    same place.
    """

    starts_s: tuple[float, ...]
    gbps: tuple[float, ...]

    @classmethod
    def seeded(
        cls, seed: int, mean_gbps: float, piece_s: float, total_s: float, spread: float = 4.0
    ) -> BandwidthTrace:
        """Pieces of half to one and a half `piece_s`, their bandwidths log-uniform from 1/spread to
        spread times the mean.
        """
        rng = random.Random(seed)
        starts, rates, now = [], [], 0.0
        while now < total_s:
            starts.append(now)
            rates.append(mean_gbps * spread ** rng.uniform(-1, 1))
            now += piece_s * rng.uniform(0.5, 1.5)
        return cls(tuple(starts), tuple(rates))

    def seconds(self, nbytes: float) -> float:
        """How long the first `nbytes` take from the beginning; the last piece goes on."""
        left = nbytes
        ends = [*self.starts_s[1:], float("inf")]
        for start, end, rate in zip(self.starts_s, ends, self.gbps, strict=True):
            can = rate * 1e9 / 8 * (end - start)
            if left <= can:
                return start + left * 8e-9 / rate
            left -= can
        raise AssertionError("the last piece has no end")


class BandwidthDriver:
    """Replays a trace on a server while a request runs, and notes when each change had been made."""

    def __init__(self, switch: ArmSwitch, trace: BandwidthTrace) -> None:
        self._switch = switch
        self._trace = trace
        self.applied = trace

    async def __call__(self, over: asyncio.Event) -> None:
        """Until the trace ends or `over` is set. The first piece has to be set before."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        starts, rates = [0.0], [self._trace.gbps[0]]
        for start, rate in zip(self._trace.starts_s[1:], self._trace.gbps[1:], strict=True):
            if await _is_over(over, began + start - loop.time()):
                break
            await self._switch.bandwidth(rate)
            # A running server changes its settings between two steps; the answer comes right after.
            starts.append(loop.time() - began)
            rates.append(rate)
        self.applied = BandwidthTrace(tuple(starts), tuple(rates))


@dataclass(frozen=True)
class OtherRequests:
    """A stream of requests that no server has seen before: seconds from the beginning, and prompt
    tokens.
    """

    arrivals: tuple[tuple[float, int], ...]
    seed: int

    @classmethod
    def seeded(
        cls, seed: int, every_s: float, total_s: float, tokens: Sequence[int] = (64, 256)
    ) -> OtherRequests:
        """Arrivals at random (Poisson) with that mean distance, prompts of `tokens[0]` to
        `tokens[1]` tokens.
        """
        rng = random.Random(seed)
        arrivals, now = [], rng.expovariate(1 / every_s)
        while now < total_s:
            arrivals.append((now, rng.randint(*tokens)))
            now += rng.expovariate(1 / every_s)
        return cls(tuple(arrivals), seed)


class OtherRequestsDriver:
    """Sends such a stream while a request runs, and waits for its answers afterwards."""

    def __init__(self, client: Client, others: OtherRequests) -> None:
        self._client = client
        self._others = others
        self._sent = 0

    async def __call__(self, over: asyncio.Event) -> None:
        """Until the stream ends or `over` is set. Every replay has other tokens, so that none is
        found in a cache.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks = []
        for start, tokens in self._others.arrivals:
            if await _is_over(over, began + start - loop.time()):
                break
            self._sent += 1
            ids = random.Random(f"{self._others.seed}:{id(self)}:{self._sent}").choices(
                range(_BYTES), k=tokens
            )
            tasks.append(asyncio.create_task(self._client.generate(ids, 1)))
        await asyncio.gather(*tasks)


async def together(over: asyncio.Event, *drivers: BandwidthDriver | OtherRequestsDriver) -> None:
    """All of them at the same time."""
    await asyncio.gather(*(driver(over) for driver in drivers))


async def _is_over(over: asyncio.Event, seconds: float) -> bool:
    """Waits that many seconds, or until it is over: True then."""
    try:
        await asyncio.wait_for(over.wait(), max(seconds, 0.0))
    except asyncio.TimeoutError:
        return over.is_set()
    return True
