"""A run: an arm's two servers over a master and an owner of their own play every cell's sessions;
then the next arm's do.

A cell's sessions take their turns together. Between two turns the servers have time to send what
they have, at full speed; moved turns are asked for one by one, at the cell's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from sgl_kvtier.errors import BenchError, StoreError
from sgl_kvtier.lab.experiment.arms import BASELINE, Setup, has_storage, prepare, storage_folder
from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.remote.arms import REMOTE_ARMS, RemoteArm, is_moved, server_of
from sgl_kvtier.lab.experiment.remote.cluster import Cluster
from sgl_kvtier.lab.experiment.remote.turns import WARM, Cell, Moved, MovedLog, prompts
from sgl_kvtier.lab.experiment.restore.log import Scale
from sgl_kvtier.lab.experiment.restore.trial import OUTPUT_TOKENS, grown, outcome
from sgl_kvtier.lab.experiment.rounds import START_S, rotated
from sgl_kvtier.lab.outside.client import Client, Metrics
from sgl_kvtier.lab.outside.model_shapes import kv_bytes
from sgl_kvtier.lab.outside.server import Server, stop_servers
from sgl_kvtier.lab.paced.launching import LOG
from sgl_kvtier.lab.paced.pace import Reader, lost_seconds
from sgl_kvtier.lab.pages.stats import percentile

NAMES = ("a", "b")
_CALIBRATIONS = 3
_SENT_S, LOOK_S, _STILL = 60.0, 0.6, 2
"""Seconds a server has to send its pages; between two looks, as it publishes its counters twice a
second; and how many equal ones mean that it is done.
"""
_WRITTEN = (
    "sglang:backuped_tokens_total",
    "kvtier:pages_written_total",
    "kvtier:remote_pages_sent_total",
    "kvtier:remote_names_waiting",
)


@dataclass(frozen=True)
class RemoteOptions:
    """What is measured. `length` are the tokens of a session's first prompt."""

    model: str
    length: int
    arms: Sequence[str]
    cells: Sequence[Cell]
    rounds: int
    sessions: int
    turns: int
    route: str
    seed: int
    segment_bytes: int
    until: float | None = None
    """No arm begins after this, on the monotonic clock."""

    @property
    def throttled(self) -> bool:
        """Whether any speed is set."""
        return any(cell.gbps != 0 for cell in self.cells)


@dataclass
class RemoteRun:
    """One run. What it measures is in the log, also when it is interrupted."""

    options: RemoteOptions
    setup: Setup
    log: MovedLog
    folder: Path
    advance: Callable[[], None] = lambda: None
    describe: Callable[[str], None] = lambda _: None
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """All rounds. Raises BenchError where no arm could be measured."""
        options = self.options
        for number in range(1, options.rounds + 1):
            for arm in rotated(options.arms, number):
                left = [cell for cell in options.cells if not self._made(arm, number, cell)]
                for _ in range(len(options.cells) - len(left)):
                    self.advance()
                if arm in self.failures or not left:
                    continue
                if options.until is not None and time.monotonic() > options.until:
                    self.notes.append(
                        f"Time is up: {arm} of round {number} and what follows is left."
                    )
                    return
                try:
                    self._round(arm, number, left)
                except (BenchError, StoreError) as error:
                    self.failures[arm] = str(error)
                    self.notes.append(f"{arm} failed: {str(error).splitlines()[0]}")
        if len(self.failures) == len(options.arms):
            raise BenchError("no arm could be measured.\n" + "\n".join(self.failures.values()))

    def _made(self, arm: str, number: int, cell: Cell) -> bool:
        return self.log.has(arm, number, cell, (WARM + self.options.sessions) * self.options.turns)

    def _round(self, arm: str, number: int, cells: Sequence[Cell]) -> None:
        self.describe(f"round {number}, {arm}: starting")
        chosen = REMOTE_ARMS[arm]
        with cluster_of(chosen, self.options) as cluster:
            master = "" if cluster is None else cluster.master
            folder = self.folder / arm
            with pair(chosen, chosen.setup(self.setup, master), folder) as servers:
                asyncio.run(self._cells(arm, number, cells, servers, cluster))
                for server in servers:
                    server.raise_if_ended(f"in round {number}")

    async def _cells(
        self,
        arm: str,
        number: int,
        cells: Sequence[Cell],
        servers: Sequence[Server],
        cluster: Cluster | None,
    ) -> None:
        async with clients(servers, self.setup.dilation) as asked:
            play = _Play(self, arm, number, servers, asked, cluster)
            await play.warm_up()
            if arm == BASELINE and not self.log.scales:
                self.log.add("scale", await play.scale())
            for cell in cells:
                self.describe(f"round {number}, {arm}, {cell.name}")
                await play.cell(cell, self.gbps(cell))
                self.advance()

    def gbps(self, cell: Cell) -> float:
        """The bandwidth of a cell. Raises BenchError where computing was not timed yet."""
        found = self.log.gbps(cell)
        if found is None:
            raise BenchError(
                f"--load-over-compute: computing was not timed yet; measure {BASELINE} first"
            )
        return found


@dataclass
class _Play:
    """An arm's round: its servers are up."""

    run: RemoteRun
    arm: str
    number: int
    servers: Sequence[Server]
    clients: Sequence[Client]
    cluster: Cluster | None

    def __post_init__(self) -> None:
        self._paced = self.run.setup.paced
        self._steps = [Reader(server.folder / LOG) for server in self.servers]

    async def warm_up(self) -> None:
        """Prompts of the length that will be asked for: what a server does once is not measured,
        and what it learns of computing it has learned.
        """
        for place, client in enumerate(self.clients):
            for again in range(2):
                ids = self._prompts("warm", place, again)[0]
                done = await client.generate(ids, OUTPUT_TOKENS)
                if done.error is not None:
                    raise BenchError(f"{self.arm}: the warm-up request failed: {done.error}")

    async def scale(self) -> Scale:
        """What computing a prompt takes at B, and the bytes of its prefix."""
        options, times = self.run.options, []
        for again in range(_CALIBRATIONS):
            ids = self._prompts("scale", again)[0]
            done = await self.clients[1].generate(ids, OUTPUT_TOKENS)
            times.append(done.ttft_s)
        middle = percentile(times, 50)
        per_token = kv_bytes(options.model, self.run.setup.dtype)
        if self._paced is not None:
            per_token = self._paced.profile.kv_bytes_per_token
        if middle is None or per_token is None:
            raise BenchError("--load-over-compute: needs a model of ours; give --gbps instead")
        page = self.run.setup.page_size
        nbytes = options.length // page * page * per_token
        return Scale(options.model, options.length, page, nbytes, middle)

    async def cell(self, cell: Cell, gbps: float) -> None:
        """All turns of a cell's sessions."""
        options = self.run.options
        for client in self.clients:
            await settled(client)
            await client.flush()
        sessions = range(WARM + options.sessions)
        drawn = [self._prompts(self.number, cell.name, session) for session in sessions]
        for turn in range(options.turns):
            moved = is_moved(options.route, turn, options.turns)
            self._speed(gbps if moved else 0.0)
            for session in sessions:
                base = Moved(
                    options.model,
                    options.length,
                    "turn",
                    self.arm,
                    self.number,
                    gbps,
                    cell.load_over_compute,
                    cell=cell.name,
                    session=session,
                    number=turn,
                    server=server_of(options.route, REMOTE_ARMS[self.arm], turn, options.turns),
                    moved=moved,
                )
                self.run.log.add("turn", await self._turn(base, drawn[session][turn]))
            self._speed(0.0)
            for client, server in zip(self.clients, self.servers, strict=True):
                await settled(client)
                server.raise_if_ended(f"in round {self.number}")

    async def _turn(self, base: Moved, ids: Sequence[int]) -> Moved:
        client, server = self.clients[base.server], self.servers[base.server]
        before = await client.metrics()
        self._steps[base.server].new()
        watch = CpuWatch(lambda: server.usage().cpu_s)
        done = await client.generate(ids, OUTPUT_TOKENS, logprobs=True)
        share = watch.stop()
        if base.moved:  # what it writes now is not to meet the next one's loads
            await settled(client)
        read = grown(before, await client.metrics(), "kvtier:remote_read_bytes_total")
        made = replace(
            base,
            foreign_cores=share.foreign_cores,
            stolen_cores=share.stolen_cores,
            remote_bytes=read * (1.0 if self._paced is None else self._paced.bytes_scale),
            lost_s=self._lost_s(base.server, done.sent_s),
        )
        return outcome(made, done, len(ids))

    def _lost_s(self, place: int, began: float) -> float | None:
        """Seconds that a paced device lost. Raises BenchError where rows were not those of their
        tokens.
        """
        if self._paced is None:
            return None
        new = self._steps[place].new()
        wrong = [str(row["mismatch"]) for row in new if "mismatch" in row]
        if wrong:
            raise BenchError(f"{self.arm}: the paced device found other rows: {wrong[0]}")
        first = [row for row in new if row.get("step") == "prefill" and row["at"] >= began]
        return lost_seconds(first) / self._paced.dilation

    def _speed(self, gbps: float) -> None:
        if self.cluster is not None:
            self.cluster.speed(gbps / (1.0 if self._paced is None else self._paced.slower))

    def _prompts(self, *drawn_by: object) -> Sequence[Sequence[int]]:
        options = self.run.options
        return prompts((options.seed, *drawn_by), options.length, options.turns)


@contextmanager
def cluster_of(arm: RemoteArm, options: RemoteOptions) -> Iterator[Cluster | None]:
    """A fresh master and owner for an arm that shares pages: two arms with one model's name share
    keys.
    """
    if not arm.shares:
        yield None
        return
    with Cluster(options.segment_bytes, options.throttled) as cluster:
        yield cluster


@contextmanager
def pair(arm: RemoteArm, setup: Setup, folder: Path) -> Iterator[Sequence[Server]]:
    """Servers A and B with folders of their own, ready; always stopped. Raises BenchError."""
    servers: list[Server] = []
    try:
        for name in NAMES:
            place = folder / name
            shutil.rmtree(storage_folder(place), ignore_errors=True)
            servers.append(Server(f"{arm.kind}, {name}", prepare(arm.kind, setup, place), place))
            servers[-1].start()
        for server in servers:
            server.wait_until_healthy(START_S)
        yield servers
    finally:
        stop_servers(servers)
        if has_storage(arm.kind, setup):
            for name in NAMES:
                shutil.rmtree(storage_folder(folder / name), ignore_errors=True)


@asynccontextmanager
async def clients(
    servers: Sequence[Server], dilation: float = 1.0
) -> AsyncIterator[Sequence[Client]]:
    """A client for each."""
    async with contextlib.AsyncExitStack() as stack:
        asked = [Client(server.url, dilation=dilation) for server in servers]
        yield [await stack.enter_async_context(one) for one in asked]


async def settled(client: Client) -> None:
    """Waits until a server has written and sent its pages: what it counts stands still and no name
    waits. At most `_SENT_S`.
    """
    until, still, before = time.monotonic() + _SENT_S, 0, None
    while still < _STILL and time.monotonic() < until:
        now = written(await client.metrics())
        still = still + 1 if now == before and not now[-1] else 0
        before = now
        await asyncio.sleep(LOOK_S)


def written(metrics: Metrics) -> tuple[float, ...]:
    """What a server counts of its writing; last, the names that wait to be sent."""
    return tuple(metrics.total(name) or 0.0 for name in _WRITTEN)
