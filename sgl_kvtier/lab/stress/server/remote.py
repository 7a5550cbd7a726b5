"""Two servers on one remote store, whose master and owner are killed, stopped and started again at
random while both are fuzzed.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sgl_kvtier.errors import BenchError, StoreError
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.stress.server.log import FuzzLog
from sgl_kvtier.lab.stress.server.run import FuzzOptions, FuzzRun
from sgl_kvtier.lab.stress.server.server import FuzzServer
from sgl_kvtier.lab.stress.trouble import chance, halted
from sgl_kvtier.remote.servers import Servers, missing_engine

NAMES = ("a", "b")
SEGMENT_BYTES = 32 << 20
"""Little enough to be full now and then."""
LOST = 0.2
"""The share of local pages that are gone when they are looked up: the other store has them."""
_CALM_S, _STOPPED_S, _GONE_S = (1.0, 8.0), (3.0, 15.0), (0.5, 6.0)
"""Seconds from and to: between two accidents, of a stop, and until another one is started."""
_COUNTED = (
    "pages_read",
    "pages_sent",
    "pages_refused",
    "pages_missed",
    "pages_corrupt",
    "reads_failed",
    "reads_late",
)


class Menace:
    """A master and an owner in trouble. Use it in a `with` block: all processes end with it."""

    def __init__(self, log: FuzzLog, seed: int) -> None:
        if reason := missing_engine():
            raise BenchError(reason)
        self.engine = Servers(SEGMENT_BYTES)
        self._log = log
        self._random = chance(seed, "remote")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Menace:
        try:
            for name in ("master", "owner"):
                self._start(name)
        except BaseException:
            self.engine.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.stop()

    def sections(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """A server's sections over this store; where pages are lost, more of them."""
        lab = dict(sections["lab"])
        if "lose_rate" in lab["faults"]:
            lab["faults"] = {**lab["faults"], "lose_rate": LOST}
        remote = {"engine": "mooncake", "master": self.engine.master}
        return {**sections, "lab": lab, "remote": remote}

    async def run(self) -> None:
        """One accident after another until it is cancelled."""
        accidents: tuple[Callable[[str], Awaitable[None]], ...] = (self._halt, self._kill)
        while True:
            await asyncio.sleep(self._random.uniform(*_CALM_S))
            name = self._random.choice(("master", "owner"))
            await self._random.choice(accidents)(name)

    async def _halt(self, name: str) -> None:
        self._log.note(f"{name} stopped")
        with halted([self._processes[name].pid]):
            await asyncio.sleep(self._random.uniform(*_STOPPED_S))

    async def _kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()
        self._log.note(f"{name} killed")
        await asyncio.sleep(self._random.uniform(*_GONE_S))
        try:
            await asyncio.to_thread(self._start, name)
        except StoreError:
            self._log.note(f"{name} not back")  # its port, or a master that has just stopped
            await asyncio.to_thread(self._start, name)

    def _start(self, name: str) -> None:
        start = self.engine.start_master if name == "master" else self.engine.start_owner
        self._processes[name] = start()


async def fuzz_two(
    runs: Sequence[FuzzRun], servers: Sequence[FuzzServer], menace: Menace
) -> dict[str, int]:
    """Both servers until they have had their requests, in trouble all the time: what they counted
    of the remote store, together.
    """

    async def both() -> None:
        await asyncio.gather(*(one.run() for one in runs))

    trouble, work = (asyncio.create_task(one) for one in (menace.run(), both()))
    try:
        done, _ = await asyncio.wait({trouble, work}, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for one in (trouble, work):
            one.cancel()
        await asyncio.gather(trouble, work, return_exceptions=True)
    found: Counter[str] = Counter()
    for server in servers:
        async with Client(server.url, admin_key=server.admin_key) as client:
            metrics = await client.metrics()
            for name in _COUNTED:
                found[name] += int(metrics.total(f"kvtier:remote_{name}_total") or 0)
    return dict(found)


def halves(whole: FuzzOptions) -> list[FuzzOptions]:
    """The options of two servers with the requests together, each with accidents of its own."""

    def half(total: int | None, place: int) -> int | None:
        return None if total is None else (total + 1 - place) // 2

    return [
        replace(
            whole,
            run=f"{whole.run}-{name}",
            chaos=replace(whole.chaos, seed=2 * whole.chaos.seed + place),
            requests=half(whole.requests, place),
            restored=half(whole.restored, place),
        )
        for place, name in enumerate(NAMES)
    ]
