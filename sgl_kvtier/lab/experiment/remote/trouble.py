"""What trouble of a remote store costs: a server with one beside a server without, asked in turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.console import Progress, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import OURS, Setup, prepare, storage_folder
from sgl_kvtier.lab.experiment.remote.run import clients
from sgl_kvtier.lab.experiment.rounds import START_S
from sgl_kvtier.lab.outside.client import Client, Completion
from sgl_kvtier.lab.outside.model_shapes import BYTES
from sgl_kvtier.lab.outside.replay import milliseconds
from sgl_kvtier.lab.outside.server import Server, stop_servers
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary
from sgl_kvtier.remote.servers import Servers

OFF, ON = "off", "remote"
STATES = ("empty", "hung", "dead")
"""What the master does: it answers, and has nothing; it is stopped; it is killed."""
AIMS_MS = {"empty": (10.0, None), "hung": (30.0, 100.0), "dead": (30.0, 100.0)}
"""Most milliseconds that a remote store may add to the time to first token: p50, p99."""
AIM_START_S = 0.5
"""Most seconds that a remote store without a master may add to a server's start."""
_NO_MASTER = "127.0.0.1:9"
_OUTPUTS, _WARM = 2, 4
_SEGMENT_BYTES = 256 << 20
_UP_S = 60.0
_START_LOOK_S = 0.05


@dataclass(frozen=True)
class TroubleOptions:
    """`requests` of `tokens` to each of the two servers in each state; `starts` of each kind."""

    tokens: int
    requests: int
    starts: int
    seed: int


@dataclass
class Trouble:
    """One measurement: times to first token by state and server, and seconds to start."""

    options: TroubleOptions
    setup: Setup
    folder: Path
    times: dict[str, dict[str, list[Completion]]] = field(default_factory=dict)
    starts_s: dict[str, list[float]] = field(default_factory=lambda: {OFF: [], ON: []})
    _shown: Progress = field(init=False, repr=False)

    def run(self) -> None:
        """Everything, in this order: the starts, then each state. Raises BenchError or StoreError."""
        asked = _WARM + len(STATES) * self.options.requests
        with progress(
            "measuring", 2 * (self.options.starts + asked), "starts and requests"
        ) as shown:
            self._shown = shown
            self._run()

    def _run(self) -> None:
        for number in range(self.options.starts):
            for name in (OFF, ON) if number % 2 else (ON, OFF):
                self._shown.describe(f"a start without a master, {name}")
                self.starts_s[name].append(self._start_s(name))
                self._shown.advance()
        engine = Servers(_SEGMENT_BYTES)
        try:
            master = engine.start_master().pid
            engine.start_owner()
            with self._pair(engine.master) as servers:
                asyncio.run(self._states(master, servers))
        finally:
            engine.stop()

    def results(self) -> dict[str, Any]:
        """The part `trouble` of schema kvtier.compare.remote/1."""
        return {
            "states": {state: _state(state, found) for state, found in self.times.items()},
            "start_s": {
                **{name: percentile(found, 50) for name, found in self.starts_s.items()},
                "added": _added_start(self.starts_s),
                "all": self.starts_s,
                "aim": AIM_START_S,
            },
        }

    def _setup(self, name: str, master: str) -> Setup:
        remote = {"remote": {"engine": "mooncake", "master": master}} if name == ON else {}
        return replace(self.setup, sections={**self.setup.sections, **remote})

    def _start_s(self, name: str) -> float:
        """Seconds from the start of a server without a master until it answers."""
        folder = self.folder / f"start-{name}"
        shutil.rmtree(storage_folder(folder), ignore_errors=True)
        with Server(name, prepare(OURS, self._setup(name, _NO_MASTER), folder), folder) as server:
            return server.wait_until_healthy(START_S, _START_LOOK_S)

    @contextlib.contextmanager
    def _pair(self, master: str) -> Iterator[Sequence[Server]]:
        servers: list[Server] = []
        try:
            for name in (OFF, ON):
                folder = self.folder / name
                shutil.rmtree(storage_folder(folder), ignore_errors=True)
                launch = prepare(OURS, self._setup(name, master), folder)
                servers.append(Server(name, launch, folder))
                servers[-1].start()
            for server in servers:
                server.wait_until_healthy(START_S)
            yield servers
        finally:
            stop_servers(servers)

    async def _states(self, master: int, servers: Sequence[Server]) -> None:
        async with clients(servers, self.setup.dilation) as asked:
            await usable(asked[1])
            await self._ask("warm", asked, _WARM)
            del self.times["warm"]
            for state in STATES:
                if state != "empty":
                    await usable(asked[1])
                    os.kill(master, signal.SIGSTOP if state == "hung" else signal.SIGKILL)
                await self._ask(state, asked, self.options.requests)
                if state == "hung":
                    os.kill(master, signal.SIGCONT)
                for server in servers:
                    server.raise_if_ended(f"while the master was {state}")

    async def _ask(self, state: str, asked: Sequence[Client], requests: int) -> None:
        """New prompts, the same for both servers, which take turns at being first."""
        found = self.times.setdefault(state, {OFF: [], ON: []})
        self._shown.describe(state)
        for number in range(requests):
            rng = random.Random(f"{self.options.seed}:{state}:{number}")
            ids = rng.choices(range(BYTES), k=self.options.tokens)
            both = list(zip((OFF, ON), asked, strict=True))
            for name, client in both if number % 2 else reversed(both):
                found[name].append(await client.generate(ids, _OUTPUTS))
                self._shown.advance()


async def usable(client: Client) -> None:
    """Waits until calls to the remote store go through. Raises BenchError."""
    until = time.monotonic() + _UP_S
    while not (await client.metrics()).total("kvtier:remote_up"):
        if time.monotonic() > until:
            raise BenchError("the remote store was not usable")
        await asyncio.sleep(0.5)


def _state(state: str, found: dict[str, list[Completion]]) -> dict[str, Any]:
    times = {name: [milliseconds(one.ttft_s) for one in made] for name, made in found.items()}
    figures = {name: summary(values) for name, values in times.items()}
    # Of a run that was interrupted the last prompt may have been sent to one of them only.
    made = min(len(both) for both in times.values())
    both = list(zip(times[ON][:made], times[OFF][:made], strict=True))
    pairs = [(on, off) for on, off in both if on is not None and off is not None]
    added = {q: _less(figures[ON][q], figures[OFF][q]) for q in ("p50", "p99")}
    return {
        **figures,
        "added_ms": {**added, "paired_p50": percentile((on - off for on, off in pairs), 50)},
        "aim_ms": dict(zip(("p50", "p99"), AIMS_MS[state], strict=True)),
        "ratio": pair_ratios(times[ON][:made], times[OFF][:made]),
        "first_ms": times[ON][0] if times[ON] else None,
        "errors": sum(one.error is not None for made in found.values() for one in made),
        "unequal": sum(
            on.output_ids != off.output_ids
            for on, off in zip(found[ON][:made], found[OFF][:made], strict=True)
        ),
        "all_ms": times,
    }


def _less(one: float | int | None, other: float | int | None) -> float | None:
    return one - other if one is not None and other is not None else None


def _added_start(starts: dict[str, list[float]]) -> float | None:
    return _less(percentile(starts[ON], 50), percentile(starts[OFF], 50))
