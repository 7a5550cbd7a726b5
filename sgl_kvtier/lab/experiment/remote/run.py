"""A run of `compare remote`: an arm's two servers A and B, over a master and an owner of their own,
play every cell's sessions; then the next arm's do.

A session has two turns: the first goes to A, the second to B, which is what is measured. A cell's
sessions take their turns together. Between the two the servers have time to send what they have, at
full speed; second turns are asked for one by one, at the cell's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from sgl_kvtier.errors import BenchError, StoreError
from sgl_kvtier.lab.experiment.arms import (
    BASELINE,
    MOONCAKE,
    OURS,
    Setup,
    prepare,
    storage_folder,
    storage_of,
)
from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.remote.far import Far
from sgl_kvtier.lab.experiment.restore.trial import OUTPUT_TOKENS, Scale, Trial, grown, outcome
from sgl_kvtier.lab.experiment.rounds import START_S, rotated
from sgl_kvtier.lab.outside.client import Client, Metrics
from sgl_kvtier.lab.outside.model_shapes import BYTES
from sgl_kvtier.lab.outside.server import Server, stop_servers
from sgl_kvtier.lab.paced.launching import LOG
from sgl_kvtier.lab.paced.pace import Reader, lost_seconds
from sgl_kvtier.lab.pages.stats import percentile
from sgl_kvtier.remote import servers as mooncake

NAMES = ("a", "b")
TURNS = 2
NEW_TOKENS = 64
"""By which a session's prompt grows from turn to turn: an answer, and what a user or tool says."""
WARM = 1
"""Sessions of every cell that are played first and not counted."""
LOCAL, REMOTE, REMOTE_LOAD, ORACLE = "kvtier-local", "kvtier-remote", "kvtier-remote-load", "oracle"

_CALIBRATIONS = 3
_LEASE_MS = 10_000
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
class RemoteArm:
    """One way: the arm of `arms.ARMS` that both servers are, and more of kvtier.json."""

    kind: str
    about: str
    shares: bool = False
    """Both servers use the remote store."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    at_home: bool = False
    """Both turns of a session go to B."""

    def setup(self, setup: Setup, master: str) -> Setup:
        """The servers' settings over the store of this master."""
        sections = {**setup.sections}
        if self.shares and self.kind == OURS:
            sections["remote"] = {"engine": "mooncake", "master": master}
        if self.policy:
            sections["policy"] = {**sections.get("policy", {}), **self.policy}
        return replace(setup, sections=sections, master=master, linked=True)


REMOTE_ARMS = {
    BASELINE: RemoteArm(BASELINE, "nothing is kept between servers: B computes the prompt"),
    LOCAL: RemoteArm(OURS, "kvtier with a folder for each server, nothing shared"),
    MOONCAKE: RemoteArm(MOONCAKE, "SGLang's own Mooncake backend", shares=True),
    REMOTE: RemoteArm(OURS, "kvtier with the remote store, restored from both ends", shares=True),
    REMOTE_LOAD: RemoteArm(OURS, "the same, loaded whole", shares=True, policy={"restore": "load"}),
    ORACLE: RemoteArm(OURS, "B served the session itself, and has it in memory", at_home=True),
}
"""Every arm. The order is the one results are shown in."""


@dataclass(frozen=True)
class Cell:
    """A speed of the link: `gbps`, or the one at which loading a prompt takes `load_over_compute`
    times as long as computing it.
    """

    gbps: float | None
    load_over_compute: float | None = None

    @property
    def name(self) -> str:
        """What draws its sessions."""
        ratio = self.load_over_compute
        return f"{self.gbps:g} Gbit/s" if ratio is None else f"load/compute {ratio:g}"


@dataclass(frozen=True)
class Moved(Trial):
    """A turn's outcome. `session` counts from 0, those below `WARM` do not count. `number` is the
    turn's, from 0; `moved` says that it is the second, `server` who answered (0 is A).
    `remote_bytes` came from the remote store meanwhile.
    """

    cell: str = ""
    session: int = 0
    number: int = 0
    server: int = 0
    moved: bool = False
    remote_bytes: float = 0.0

    @property
    def place(self) -> tuple[Any, ...]:
        """What every arm has one of."""
        return self.round, self.cell, self.session, self.number


class MovedLog(Log):
    """Turns, arm by arm and cell by cell, and the scale that bandwidths follow from. An arm's cell
    counts when it is there whole.
    """

    kinds: ClassVar = {"turn": Moved, "scale": Scale}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self._turns: dict[tuple[Any, ...], Moved] = {}
        self.scales: list[Scale] = []

    def take(self, kind: str, record: Any) -> None:
        """Adds a record, in place of an earlier one of the same turn."""
        if kind == "scale":
            self.scales.append(record)
        else:
            key = (record.arm, *record.place)
            self._turns[key] = record

    @property
    def turns(self) -> list[Moved]:
        """All of them; of a cell that was begun and played again, those that were played last."""
        return list(self._turns.values())

    def gbps(self, cell: Cell) -> float | None:
        """The bandwidth of a cell; None where it follows from computing that was not timed yet."""
        if cell.load_over_compute is None:
            return cell.gbps or 0.0
        return self.scales[0].gbps(cell.load_over_compute) if self.scales else None

    def has(self, arm: str, number: int, cell: Cell, turns: int) -> bool:
        """Whether an arm's round of a cell is there whole."""
        wanted = (arm, number, cell.name)
        return sum((one.arm, one.round, one.cell) == wanted for one in self.turns) >= turns


def prompts(drawn_by: tuple[object, ...], length: int) -> Sequence[Sequence[int]]:
    """The prompts of a session's turns. They follow from what a session is drawn by alone, so they
    are the same for all arms, and no two sessions share a page.
    """
    rng = random.Random(":".join(map(str, drawn_by)))
    ids = rng.choices(range(BYTES), k=length + NEW_TOKENS)
    return [ids[:length], ids]


class Cluster:
    """Mooncake's master, and an owner of memory that every arm reaches through the same relay. Use
    it in a `with` block: all processes end with it. Raises BenchError or StoreError where they do
    not start.

    Where `throttled` is False there is no relay: speeds cannot be set, and no namespace is needed.
    """

    def __init__(self, segment_bytes: int, throttled: bool = True) -> None:
        reason = mooncake.missing_engine()
        if reason:
            raise BenchError(reason)
        self._servers = mooncake.Servers(segment_bytes, lease_ms=_LEASE_MS)
        self._throttled = throttled
        self._far: Far | None = None

    @property
    def master(self) -> str:
        """Where the master listens, as host:port."""
        return self._servers.master

    def speed(self, gbps: float) -> None:
        """Gigabits per second between servers and owner, each way; 0: as fast as it goes."""
        if self._far is not None:
            self._far.speed(gbps)

    def __enter__(self) -> Cluster:
        try:
            self._servers.start_master()
            if not self._throttled:
                self._servers.start_owner()
                return self
            self._far = Far(self._servers.commands[1], self.master)
            until = time.monotonic() + mooncake.START_S
            while not self._servers.segments():
                if time.monotonic() > until:
                    raise BenchError("Mooncake's owner gives no memory through the relay")
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._far is not None:
            self._far.stop()
        self._servers.stop()


@dataclass
class RemoteRun:
    """One run. What it measures is in the log, also when it is interrupted. `length` are the tokens
    of a session's first prompt, `token_bytes` those of the KV cache for each.
    """

    setup: Setup
    log: MovedLog
    folder: Path
    model: str
    length: int
    token_bytes: int
    arms: Sequence[str]
    cells: Sequence[Cell]
    rounds: int
    sessions: int
    seed: int
    segment_bytes: int
    until: float | None
    """No arm begins after this, on the monotonic clock."""
    failures: dict[str, str]
    notes: list[str]
    advance: Callable[[], None]
    describe: Callable[[str], None]

    def run(self) -> None:
        """All rounds. Raises BenchError where no arm could be measured."""
        turns = TURNS * (WARM + self.sessions)
        for number in range(1, self.rounds + 1):
            for arm in rotated(self.arms, number):
                left = [cell for cell in self.cells if not self.log.has(arm, number, cell, turns)]
                for _ in range(len(self.cells) - len(left)):
                    self.advance()
                if arm in self.failures or not left:
                    continue
                if self.until is not None and time.monotonic() > self.until:
                    self.notes.append(
                        f"Time is up: {arm} of round {number} and what follows is left."
                    )
                    return
                try:
                    self._round(arm, number, left)
                except (BenchError, StoreError) as error:
                    self.failures[arm] = str(error)
                    self.notes.append(f"{arm} failed: {str(error).splitlines()[0]}")
        if len(self.failures) == len(self.arms):
            raise BenchError(
                "no configuration could be measured.\n" + "\n".join(self.failures.values())
            )

    def _round(self, arm: str, number: int, cells: Sequence[Cell]) -> None:
        self.describe(f"round {number}, {arm}: starting")
        chosen, throttled = REMOTE_ARMS[arm], any(cell.gbps != 0 for cell in self.cells)
        # A fresh master and owner: two arms with one model's name share keys.
        with Cluster(self.segment_bytes, throttled) if chosen.shares else nullcontext() as cluster:
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
                await play.cell(cell, self._gbps(cell))
                self.advance()

    def _gbps(self, cell: Cell) -> float:
        """The bandwidth of a cell. Raises BenchError where computing was not timed yet."""
        found = self.log.gbps(cell)
        if found is None:
            raise BenchError(
                f"--arms: a speed follows from the time of computing; measure {BASELINE} first, or give --gbps"
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
        run, times = self.run, []
        for again in range(_CALIBRATIONS):
            ids = self._prompts("scale", again)[0]
            done = await self.clients[1].generate(ids, OUTPUT_TOKENS)
            times.append(done.ttft_s)
        middle = percentile(times, 50)
        if middle is None:
            raise BenchError("no prompt could be computed, from which speeds follow")
        page = run.setup.page_size
        nbytes = run.length // page * page * run.token_bytes
        return Scale(run.model, run.length, page, nbytes, middle)

    async def cell(self, cell: Cell, gbps: float) -> None:
        """All turns of a cell's sessions."""
        run = self.run
        for client in self.clients:
            await settled(client)
            await client.flush()
        sessions = range(WARM + run.sessions)
        drawn = [self._prompts(self.number, cell.name, session) for session in sessions]
        for turn in range(TURNS):
            moved = turn > 0
            self._speed(gbps if moved else 0.0)
            for session in sessions:
                base = Moved(
                    run.model,
                    run.length,
                    "turn",
                    self.arm,
                    self.number,
                    gbps,
                    cell.load_over_compute,
                    cell=cell.name,
                    session=session,
                    number=turn,
                    server=int(moved or REMOTE_ARMS[self.arm].at_home),
                    moved=moved,
                )
                run.log.add("turn", await self._turn(base, drawn[session][turn]))
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
        return prompts((self.run.seed, *drawn_by), self.run.length)


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
        if storage_of(arm.kind, setup):
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
