"""The comparison: every arm as a real server, the same sessions replayed by each, arms alternating
over rounds.

Cold means cold. Before every round an arm's device and host tiers are flushed and its storage is
cleared, and the first answer must have no cached token. All servers are up at once where memory
allows (starting one costs 40 processor seconds), the waiting ones asleep; else each round has a
fresh server with an emptied storage folder. The order of arms moves by one place from round to
round. The operating system's page cache is left alone: both storage backends may read from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sgl_kvtier.console import Progress, progress
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import Setup, check_arms, has_storage, prepare, storage_folder
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.outside.client import Client, Metrics
from sgl_kvtier.lab.outside.lab_model import BYTES
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample, SampleLog, replay
from sgl_kvtier.lab.outside.server import Server, stop_servers
from sgl_kvtier.lab.paced import launching, pace

SERVER_BYTES = 7 << 29
"""Memory one lab server needs: 3.4 GiB were measured (its three processes, shared pages counted
once).
"""

SETTLE_S = 10.0
"""How long storage writes may go on after the last answer before a round is closed without them."""

_WARM_UP_TOKENS = 3


@dataclass(frozen=True)
class CompareOptions:
    """What to compare and how. `together` None: all servers at once if memory allows. `beside` runs
    while a round is measured, and is cancelled at its end. Rounds are numbered from `first_round`.
    """

    arms: Sequence[str]
    setup: Setup
    replay: ReplayOptions
    folder: Path
    rounds: int = 3
    together: bool | None = None
    start_timeout_s: float = 300.0
    request_timeout_s: float = 300.0
    beside: Callable[[Client, Round], Coroutine[Any, Any, None]] | None = None
    first_round: int = 1
    take_over: Callable[[str, int], bool] = lambda _arm, _number: False
    """Puts an arm's round, counted from 1, into the outcome if it was measured before: then it is
    not measured again.
    """
    keep: Callable[[Round, int], None] = lambda _one, _number: None
    """Takes every round that is complete, with its number from 1."""
    until: float | None = None
    """No round begins after this time on the monotonic clock; the outcome notes that some are
    missing.
    """


@dataclass
class Outcome:
    """What a comparison measured, filled while it runs, so that an interruption loses nothing."""

    rounds: list[Round] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False


class Comparison:
    """One run. What it measures is in the `outcome` given to it, also when it is interrupted."""

    def __init__(self, options: CompareOptions, load: Load, outcome: Outcome) -> None:
        check_arms(options.arms, options.setup.variants)
        self._options = options
        self._load = load
        self._outcome = outcome
        self._servers: dict[str, Server] = {}
        self._warm: set[str] = set()
        self._log_path = options.folder / "requests.jsonl"

    def run(self) -> None:
        """All rounds, or what was possible until Ctrl-C; no server is left. Raises BenchError when
        every arm failed.
        """
        options, outcome = self._options, self._outcome
        self._log_path.unlink(missing_ok=True)
        try:
            if self._together():
                self._start_all()
            self._run_rounds()
        except KeyboardInterrupt:
            outcome.interrupted = True
            outcome.notes.append("Interrupted: figures are from the requests that had ended.")
        finally:
            stop_servers(list(self._servers.values()))
        if not outcome.interrupted and len(outcome.failures) == len(options.arms):
            raise BenchError("no arm could be measured.\n" + "\n".join(outcome.failures.values()))

    def _together(self) -> bool:
        if self._options.together is not None:
            return self._options.together
        if self._options.setup.host != "cpu":
            return False  # each server takes most of the accelerator's memory
        return psutil.virtual_memory().available >= SERVER_BYTES * len(self._options.arms) + (
            1 << 30
        )

    def _start_all(self) -> None:
        arms = self._options.arms
        with progress("starting servers", len(arms), "ready") as shown:
            shown.describe(", ".join(arms))
            for arm in arms:
                with self._carrying_on(arm, shown):
                    self._start(arm)
            for arm in list(self._servers):
                with self._carrying_on(arm, shown):
                    self._await(arm)
                    shown.advance(note=f"{arm} ready")

    def _run_rounds(self) -> None:
        options, load = self._options, self._load
        with progress(
            "replaying", options.rounds * len(options.arms) * load.requests, "requests"
        ) as shown:
            for number in range(1, options.rounds + 1):
                for arm in rotated(options.arms, number - 1):
                    if arm in self._outcome.failures:
                        continue
                    if options.take_over(arm, number):
                        shown.expect((shown.total or 0) - load.requests)
                        continue
                    if options.until is not None and time.monotonic() > options.until:
                        self._outcome.notes.append(
                            f"Time is up: round {number} of {arm} and what follows was not measured."
                        )
                        return
                    shown.describe(f"round {number} of {options.rounds}, {arm}")
                    with self._carrying_on(arm, shown):
                        self._run_round(arm, number, shown)
                    if arm in self._outcome.failures:
                        left = options.rounds - number
                        shown.expect((shown.total or 0) - left * load.requests)

    @contextlib.contextmanager
    def _carrying_on(self, arm: str, shown: Progress) -> Iterator[None]:
        """A failure inside the block ends this arm, is shown with the end of the server's log, and
        spares the others.
        """
        try:
            yield
        except BenchError as error:
            self._outcome.failures[arm] = str(error)
            shown.say(f"{error}\nGoing on without {arm}.")
            server = self._servers.pop(arm, None)
            if server is not None:
                server.stop()

    def _run_round(self, arm: str, number: int, shown: Progress) -> None:
        fresh = arm not in self._servers
        if fresh:
            self._start(arm)
            self._await(arm)
        server = self._servers[arm]
        one = Round(arm, self._options.first_round + number - 1)
        self._outcome.rounds.append(one)
        try:
            asyncio.run(self._measure(server, one, shown.advance))
        finally:
            server.raise_if_ended(f"in round {number}")
        if fresh:
            server.stop()
            del self._servers[arm]
            self._warm.discard(arm)

    def _start(self, arm: str) -> None:
        folder = self._options.folder / arm
        shutil.rmtree(storage_folder(folder), ignore_errors=True)
        server = Server(arm, prepare(arm, self._options.setup, folder), folder)
        self._outcome.commands[arm] = server.command
        self._servers[arm] = server
        server.start()

    def _await(self, arm: str) -> None:
        seconds = self._servers[arm].wait_until_healthy(self._options.start_timeout_s)
        self._outcome.start_s.setdefault(arm, seconds)

    async def _measure(self, server: Server, one: Round, advance: Callable[[], None]) -> None:
        options = self._options
        paced = options.setup.paced
        one.dilation = 1.0 if paced is None else paced.dilation
        async with Client(
            server.url, timeout_s=options.request_timeout_s, dilation=one.dilation
        ) as client:
            if one.arm not in self._warm:
                await self._warm_up(client, one.arm)
                self._warm.add(one.arm)
            await _make_cold(client, storage=has_storage(one.arm, options.setup))
            one.before = await client.metrics()
            disk = server.disk_bytes()
            log = SampleLog(self._log_path, arm=one.arm, round=one.number)
            watch = CpuWatch(lambda: server.usage().cpu_s)
            began = time.monotonic()
            beside = (
                None if options.beside is None else asyncio.create_task(options.beside(client, one))
            )
            try:
                await replay(
                    self._load.sessions,
                    client,
                    self._load.encoder,
                    options.replay,
                    one.samples,
                    log=log,
                    on_done=lambda _: advance(),
                )
            finally:
                await _ended(beside)
                one.cpu = watch.stop()
                one.wall_s = one.cpu.wall_s / one.dilation
                one.usage = server.usage()
            one.after = await _settled_metrics(client)
            after = server.disk_bytes()
            one.disk_bytes = (max(after[0] - disk[0], 0), max(after[1] - disk[1], 0))
            # Without its server the replay ends as well, every request that was left a failure.
            server.raise_if_ended(f"in round {one.number}")
            if paced is not None:
                lines = pace.read(server.folder / launching.LOG)
                one.steps = [line for line in lines if line["at"] >= began]
            one.complete = True
            self._check_cold(one)
            options.keep(one, one.number - options.first_round + 1)

    async def _warm_up(self, client: Client, arm: str) -> None:
        """Two equal requests with a flush between: what a server does once at its first is not
        measured, and a storage tier has to show that it gives back what it took.
        """
        setup = self._options.setup
        room = (
            min(setup.device_tokens or 8192, setup.context_tokens or 8192)
            - _WARM_UP_TOKENS
            - setup.page_size
        )
        length = min(2 * setup.chunk_tokens, room)
        ids = random.Random(setup.seed).choices(range(BYTES), k=length)
        for attempt in ("first", "second"):
            done = await client.generate(ids, _WARM_UP_TOKENS)
            if done.error is not None:
                raise BenchError(f"{arm}: the {attempt} warm-up request failed: {done.error}")
            await _settled_metrics(client)
            await client.flush()
        stored = 0 if done.cached is None else done.cached.storage
        if has_storage(arm, setup) and not stored:
            self._outcome.notes.append(
                f"{arm}: the warm-up prompt did not come back from storage; see the server's log."
            )

    def _check_cold(self, one: Round) -> None:
        begun = min(one.samples, key=_sent, default=None)
        cached = None if begun is None else begun.completion.cached
        if cached is not None and cached.total:
            self._outcome.notes.append(
                f"{one.arm}, round {one.number}: the first request had {cached.total} cached tokens; the round was not cold."
            )


def rotated(arms: Sequence[str], by: int) -> list[str]:
    """The arms with the first `by` moved to the end."""
    turn = by % len(arms)
    return [*arms[turn:], *arms[:turn]]


def _sent(sample: Sample) -> float:
    return sample.completion.sent_s


async def _make_cold(client: Client, *, storage: bool) -> None:
    await client.flush()
    if storage:
        await client.clear_storage()


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _settled_metrics(client: Client) -> Metrics:
    """The metrics once the count of tokens written to storage stands still, so that writes belong
    to their round.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    metrics = await client.metrics()
    written = metrics.total("sglang:backuped_tokens_total")
    while written is not None and loop.time() < deadline:
        await asyncio.sleep(0.5)
        metrics = await client.metrics()
        now = metrics.total("sglang:backuped_tokens_total")
        if now == written:
            break
        written = now
    return metrics
