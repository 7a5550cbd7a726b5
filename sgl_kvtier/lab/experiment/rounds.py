"""Rounds of arms in turn: every arm a real server, the same work given to each.

Cold means cold. Before every round an arm's device and host tiers are flushed and its storage is
cleared, and the first answer must have no cached token. Where sessions return, what they were asked
first is then stored, and device and host are flushed again. All servers are up at once where memory
allows, the waiting ones asleep: starting one costs 40 processor seconds. Else each round has a
fresh server with an emptied storage folder. The order of arms changes from round to round. The
operating system's page cache is left alone: both storage backends may read from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import psutil

from sgl_kvtier.console import Progress, progress
from sgl_kvtier.errors import BenchError, StoreError
from sgl_kvtier.lab.experiment.arms import (
    Setup,
    check_arms,
    kind_of,
    missing,
    prepare,
    storage_folder,
    storage_of,
)
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.log import Log
from sgl_kvtier.lab.experiment.machine import CpuWatch
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.outside.client import Client, Metrics
from sgl_kvtier.lab.outside.model_shapes import BYTES
from sgl_kvtier.lab.outside.replay import ReplayOptions, SampleLog, replay, serve_first
from sgl_kvtier.lab.outside.server import Server, stop_servers
from sgl_kvtier.lab.paced import launching, pace
from sgl_kvtier.remote.servers import Servers

SERVER_BYTES = 7 << 29
"""Memory one lab server needs: 3.4 GiB were measured (its three processes, shared pages counted
once).
"""

PACED_SERVER_BYTES = 5 << 29
"""The same of a server on a paced device: 2.4 GiB were measured."""

START_S = 900.0
"""How long a server is waited for: a trial is long, and the machine may be busy with other things."""

SETTLE_S = 10.0
"""How long storage writes may go on after the last answer before a round is closed without them."""

LOOK_S = 0.5
"""Seconds between two looks whether they still go on."""

_WARM_UP_TOKENS = 3
_RESTARTED = "Servers were stopped and started again between what was stored and what was measured."
_T = TypeVar("_T")


def rotated(arms: Sequence[_T], number: int) -> list[_T]:
    """The arms in round `number`, from 1: each round begins one further on."""
    turn = (number - 1) % len(arms)
    return [*arms[turn:], *arms[:turn]]


def backwards(arms: Sequence[_T], number: int) -> list[_T]:
    """The arms in round `number`, from 1: every second round goes backwards."""
    return list(arms if number % 2 else reversed(arms))


def same_place(place: str, _arm: str) -> str:
    """Where the log keeps an arm's rounds, if all arms have one place."""
    return place


class Work(Protocol):
    """The work an arm is given in a round. `steps` is how many `unit` a round has."""

    steps: int
    unit: str

    async def warm_up(self, client: Client, arm: str) -> list[str]:
        """Before an arm's first round, not measured; notes for the result."""

    async def prepare(self, client: Client) -> bool:
        """Before every round, with all tiers empty, not measured. True where something was stored:
        then device and host are emptied once more.
        """

    async def measure(self, client: Client, one: Round, advance: Callable[[], None]) -> None:
        """The requests of a round, put into `one.samples` as they end."""


@dataclass(frozen=True)
class Plan:
    """Which arms, in what order, how often. `together` None: all servers at once if memory allows.
    False: one for each arm and round, which is restarted once something was stored. Rounds are
    numbered from `first_round`. No round begins after `until` on the monotonic clock.
    """

    arms: Sequence[str]
    setup: Setup
    folder: Path
    rounds: int = 3
    together: bool | None = None
    begins_at: int = 0
    """Place of the arm that is the first one of the first round."""
    request_timeout_s: float = 300.0
    first_round: int = 1
    client: type[Client] = Client
    """How servers are asked."""
    place: Callable[[str], str] = lambda _arm: ""
    """Where the log keeps an arm's rounds: rounds of one place are the same for all plans."""
    until: float | None = None
    once: Collection[str] = ()
    """Arms that are measured in the first round alone."""

    def arms_of(self, number: int) -> list[str]:
        """The arms of round `number`, from 1, in their order."""
        arms = rotated(self.arms, number + self.begins_at)
        return arms if number == 1 else [arm for arm in arms if arm not in self.once]


@dataclass
class Outcome:
    """The measurements of rounds, filled while they run, so that an interruption loses nothing."""

    rounds: list[Round] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Arms that were not tried, because a wheel or library is not installed here."""
    start_s: dict[str, float] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def failed(self) -> list[str]:
        """A note for every arm that failed."""
        return [f"{arm} failed: {why.splitlines()[0]}" for arm, why in self.failures.items()]

    def is_out(self, arm: str) -> bool:
        """Whether nothing more is measured of an arm."""
        return arm in self.failures or arm in self.skipped


@dataclass(frozen=True)
class KeptRound:
    """A complete round as it is in the log. `number` counts from 1, `one.number` from
    `first_round`.
    """

    place: str
    arm: str
    number: int
    one: Round
    start_s: float | None
    command: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What was noted while it was measured."""


class RoundLog(Log):
    """Complete rounds that a later run need not measure again."""

    kinds: ClassVar = {"round": KeptRound}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path)
        self.rounds: dict[tuple[str, str, int], KeptRound] = {}

    def take(self, kind: str, record: KeptRound) -> None:
        """Adds a round."""
        assert kind in self.kinds, "there is one kind"
        self.rounds[record.place, record.arm, record.number] = record


@dataclass
class Up:
    """Servers that are up, by arm, and the arms that have been warmed up. `engines` are the masters
    and owners of memory that arms have of their own; `missing` is why arms cannot be here.
    """

    servers: dict[str, Server] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    engines: dict[str, Servers] = field(default_factory=dict)
    missing: dict[str, str | None] = field(default_factory=dict)

    def stop(self, arm: str) -> None:
        """Ends an arm's server, if it is up, and what it has of its own."""
        server, engine = self.servers.pop(arm, None), self.engines.pop(arm, None)
        self.warm.discard(arm)
        if server is not None:
            server.stop()
        if engine is not None:
            engine.stop()


@contextlib.contextmanager
def servers_up() -> Iterator[Up]:
    """Servers that stay up from one run of rounds to the next; none is left behind the block."""
    up = Up()
    try:
        yield up
    finally:
        stop_servers(list(up.servers.values()))
        for engine in up.engines.values():
            engine.stop()


class Rounds:
    """One run. What it measures is in the `outcome` given to it, also when it is interrupted.

    Servers of `up` are used again, and those that are started stay there; without it none is left.
    """

    def __init__(
        self,
        plan: Plan,
        work: Work,
        outcome: Outcome,
        log: RoundLog | None = None,
        up: Up | None = None,
    ) -> None:
        check_arms(plan.arms, plan.setup.variants)
        self._plan = plan
        self._work = work
        self._outcome = outcome
        self._log = log or RoundLog()
        self._up = up
        self._now = Up()

    def run(self) -> None:
        """All rounds. Arms that lack a wheel or library are skipped. Raises BenchError when no arm is
        left.
        """
        plan, outcome = self._plan, self._outcome
        with servers_up() if self._up is None else contextlib.nullcontext(self._up) as up:
            self._now = up
            self._skip()
            if self._together():
                self._start_all()
            self._run_rounds()
        if all(map(outcome.is_out, plan.arms)):
            reasons = [f"{arm} is skipped: {why}" for arm, why in outcome.skipped.items()]
            why = "\n".join([*outcome.failures.values(), *reasons])
            raise BenchError(f"no configuration could be measured.\n{why}")

    def _skip(self) -> None:
        """Arms that lack a wheel or library, each looked for once."""
        known = self._now.missing
        for arm in filter(self._is_left, self._plan.arms):
            kind = kind_of(arm, self._plan.setup)
            if kind not in known:
                known[kind] = missing(kind)
                if known[kind] is not None:
                    print(f"{arm} is skipped: {known[kind]}", file=sys.stderr)
            if (reason := known[kind]) is not None:
                self._outcome.skipped[arm] = reason

    def _together(self) -> bool:
        plan = self._plan
        if plan.together is not None:
            return plan.together
        if plan.setup.host != "cpu":
            return False  # each server takes most of the accelerator's memory
        each = SERVER_BYTES if plan.setup.paced is None else PACED_SERVER_BYTES
        needed = each * len([arm for arm in plan.arms if arm not in self._now.servers])
        needed += 1 << 30 if needed else 0
        return psutil.virtual_memory().available >= needed

    def _start_all(self) -> None:
        arms = [a for a in self._plan.arms if self._is_left(a) and a not in self._now.servers]
        if not arms:
            return
        with progress("starting servers", len(arms), "ready") as shown:
            shown.describe(", ".join(arms))
            for arm in arms:
                with self._carrying_on(arm, shown):
                    self._start(arm)
            for arm in [arm for arm in arms if arm in self._now.servers]:
                with self._carrying_on(arm, shown):
                    self._await(arm)
                    shown.advance(note=f"{arm} ready")

    def _is_left(self, arm: str) -> bool:
        plan, kept = self._plan, self._log.rounds
        return not self._outcome.is_out(arm) and any(
            arm in plan.arms_of(number) and (plan.place(arm), arm, number) not in kept
            for number in range(1, plan.rounds + 1)
        )

    def _run_rounds(self) -> None:
        plan, work, outcome = self._plan, self._work, self._outcome
        numbers = range(1, plan.rounds + 1)
        total = sum(len(plan.arms_of(number)) for number in numbers) * work.steps
        with progress("measuring", total, work.unit) as shown:
            for number in numbers:
                for arm in plan.arms_of(number):
                    if outcome.is_out(arm):
                        continue
                    if self._take_over(arm, number):
                        shown.expect((shown.total or 0) - work.steps)
                        continue
                    if plan.until is not None and time.monotonic() > plan.until:
                        outcome.notes.append(
                            f"Time is up: round {number} of {arm} and what follows was not measured."
                        )
                        return
                    shown.describe(f"round {number} of {plan.rounds}, {arm}")
                    with self._carrying_on(arm, shown):
                        self._run_round(arm, number, shown)
                    if arm in outcome.failures:
                        left = sum(arm in plan.arms_of(later) for later in numbers[number:])
                        shown.expect((shown.total or 0) - left * work.steps)

    def _take_over(self, arm: str, number: int) -> bool:
        kept = self._log.rounds.get((self._plan.place(arm), arm, number))
        if kept is None:
            return False
        outcome = self._outcome
        outcome.rounds.append(replace(kept.one, number=self._plan.first_round + number - 1))
        outcome.commands.setdefault(arm, list(kept.command))
        if kept.start_s is not None:
            outcome.start_s.setdefault(arm, kept.start_s)
        outcome.notes += [note for note in kept.notes if note not in outcome.notes]
        return True

    @contextlib.contextmanager
    def _carrying_on(self, arm: str, shown: Progress) -> Iterator[None]:
        """A failure inside the block ends this arm and spares the others. It is shown with the end
        of the server's log.
        """
        try:
            yield
        except BenchError as error:
            self._outcome.failures[arm] = str(error)
            shown.say(f"{error}\nGoing on without {arm}.")
            self._now.stop(arm)

    def _run_round(self, arm: str, number: int, shown: Progress) -> None:
        """One round. A server that had served and fails while it is emptied is started anew once:
        SGLang's ends at a flush while one of its storage threads is busy for more than 10 s
        (cache_controller.py, `_stop_storage_threads`), and does not count that as work before.
        """
        plan, outcome = self._plan, self._outcome
        noted = len(outcome.notes)
        fresh = arm not in self._now.servers
        try:
            self._try_round(arm, number, shown)
        except BenchError as error:
            one = outcome.rounds[-1] if outcome.rounds else None
            if arm not in self._now.warm or one is None or one.arm != arm or one.began_s:
                raise
            said = f"{arm}: its server failed before round {one.number} and was started anew"
            outcome.rounds.pop()
            outcome.notes.append(f"{said}: {str(error).splitlines()[0]}")
            shown.say(f"{error}\n{said}.")
            self._now.stop(arm)
            self._try_round(arm, number, shown)
        one, start_s = outcome.rounds[-1], outcome.start_s.get(arm)
        command, notes = tuple(outcome.commands[arm]), tuple(outcome.notes[noted:])
        kept = KeptRound(plan.place(arm), arm, number, one, start_s, command, notes)
        self._log.add("round", kept)
        if fresh:
            self._now.stop(arm)

    def _try_round(self, arm: str, number: int, shown: Progress) -> None:
        plan, outcome = self._plan, self._outcome
        if arm not in self._now.servers:
            self._start(arm)
            self._await(arm)
        server = self._now.servers[arm]
        outcome.commands.setdefault(arm, server.command)
        one = Round(arm, plan.first_round + number - 1)
        outcome.rounds.append(one)
        try:
            stored = asyncio.run(self._prepare(server, one))
            if stored and plan.together is False:
                server.stop()
                server.start()
                server.wait_until_healthy(START_S)
                if _RESTARTED not in outcome.notes:
                    outcome.notes.append(_RESTARTED)
            asyncio.run(self._measure(server, one, stored, shown.advance))
        finally:
            server.raise_if_ended(f"in round {number}")

    def _start(self, arm: str) -> None:
        folder = self._plan.folder / arm
        shutil.rmtree(storage_folder(folder), ignore_errors=True)
        (folder / launching.LOG).unlink(missing_ok=True)
        setup = self._plan.setup
        if storage_of(arm, setup) == "mooncake":
            setup = replace(setup, master=self._engine(arm))
        server = Server(arm, prepare(arm, setup, folder), folder)
        self._outcome.commands[arm] = server.command
        self._now.servers[arm] = server
        server.start()

    def _engine(self, arm: str) -> str:
        """A master and an owner with the storage that other arms have; where the master listens."""
        engine = self._now.engines[arm] = Servers(self._plan.setup.storage_bytes)
        try:
            engine.start_master()
            engine.start_owner()
        except StoreError as error:
            raise BenchError(f"{arm}: {error}") from error
        return engine.master

    def _await(self, arm: str) -> None:
        seconds = self._now.servers[arm].wait_until_healthy(START_S)
        self._outcome.start_s.setdefault(arm, seconds)

    def _client(self, server: Server, one: Round) -> Client:
        paced = self._plan.setup.paced
        one.dilation = 1.0 if paced is None else paced.dilation
        return self._plan.client(
            server.url, timeout_s=self._plan.request_timeout_s, dilation=one.dilation
        )

    async def _prepare(self, server: Server, one: Round) -> bool:
        """Empties all tiers of a server that has served before. True: then something was stored."""
        async with self._client(server, one) as client:
            if one.arm not in self._now.warm:
                self._outcome.notes += await self._work.warm_up(client, one.arm)
                self._now.warm.add(one.arm)
            await client.flush()
            if storage_of(one.arm, self._plan.setup):
                await client.clear_storage()
                await client.flush()  # what was read ahead from storage before that was emptied
            stored = await self._work.prepare(client)
            if stored:
                await settled_metrics(client)
                await client.flush()
        return stored

    async def _measure(
        self, server: Server, one: Round, stored: bool, advance: Callable[[], None]
    ) -> None:
        plan, notes = self._plan, self._outcome.notes
        async with self._client(server, one) as client:
            one.before = await client.metrics()
            disk = server.disk_bytes()
            watch = CpuWatch(lambda: server.usage().cpu_s)
            one.began_s = time.monotonic()
            try:
                await self._work.measure(client, one, advance)
            finally:
                one.cpu = watch.stop()
                # A client that takes time to start says itself how long its requests took.
                one.wall_s = one.wall_s or one.cpu.wall_s / one.dilation
                one.usage = server.usage()
            one.after = await settled_metrics(client)
            after = server.disk_bytes()
            one.disk_bytes = (max(after[0] - disk[0], 0), max(after[1] - disk[1], 0))
            # Without its server the work ends as well, every request that was left a failure.
            server.raise_if_ended(f"in round {one.number}")
            if plan.setup.paced is not None:
                lines = pace.read(server.folder / launching.LOG)
                one.steps = [line for line in lines if line["at"] >= one.began_s]
            one.complete = True
            notes += [] if stored else not_cold(one)


@dataclass
class Replaying:
    """The work of replaying sessions; every request is appended to `log_path` as well.

    `beside` runs while a round is measured, and is cancelled at its end.
    """

    load: Load
    options: ReplayOptions
    setup: Setup
    log_path: Path
    beside: Callable[[Client, Round], Coroutine[Any, Any, None]] | None = None
    unit: str = "requests"

    def __post_init__(self) -> None:
        first = len(self.load.sessions) if self.options.returning else 0
        self.steps = self.load.requests - first
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.unlink(missing_ok=True)

    async def warm_up(self, client: Client, arm: str) -> list[str]:
        """Two equal requests with a flush between. So what a server does once, at its first
        request, is not measured. A storage tier has to show that it gives back what it took.
        """
        setup = self.setup
        tokens = min(setup.device_tokens or 8192, setup.context_tokens or 8192)
        room = tokens - _WARM_UP_TOKENS - setup.page_size
        ids = random.Random(setup.seed).choices(range(BYTES), k=min(2 * setup.chunk_tokens, room))
        for attempt in ("first", "second"):
            done = await client.generate(ids, _WARM_UP_TOKENS)
            if done.error is not None:
                raise BenchError(f"{arm}: the {attempt} warm-up request failed: {done.error}")
            await settled_metrics(client)
            await client.flush()
        if storage_of(arm, setup) and (done.cached is None or not done.cached.storage):
            return [
                f"{arm}: the warm-up prompt did not come back from storage; see the server's log."
            ]
        return []

    async def prepare(self, client: Client) -> bool:
        """Where sessions return: what each was asked first."""
        if self.options.returning:
            await serve_first(self.load.sessions, client, self.load.encoder)
        return self.options.returning

    async def measure(self, client: Client, one: Round, advance: Callable[[], None]) -> None:
        """All sessions."""
        log = SampleLog(self.log_path, arm=one.arm, round=one.number)
        beside = None if self.beside is None else asyncio.create_task(self.beside(client, one))
        try:
            await replay(
                self.load.sessions,
                client,
                self.load.encoder,
                self.options,
                one.samples,
                log=log,
                on_done=lambda _: advance(),
            )
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)


def not_cold(one: Round) -> list[str]:
    """A note where the first answer of a round had cached tokens. Requests that are sent together
    are served in another order, and the later ones find what they share with the first.
    """
    answered = [sample.completion for sample in one.samples if sample.completion.token_times_s]
    first = min(answered, key=lambda it: it.sent_s + it.token_times_s[0], default=None)
    cached = None if first is None else first.cached
    if cached is None or not cached.total:
        return []
    return [
        f"{one.arm}, round {one.number}: the first answer had {cached.total} cached tokens; the round was not cold."
    ]


async def settled_metrics(client: Client) -> Metrics:
    """The metrics once the count of tokens written to storage stands still, so that writes belong
    to their round.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_S
    metrics = await client.metrics()
    written = metrics.total("sglang:backuped_tokens_total")
    while written is not None and loop.time() < deadline:
        await asyncio.sleep(LOOK_S)
        metrics = await client.metrics()
        now = metrics.total("sglang:backuped_tokens_total")
        if now == written:
            break
        written = now
    return metrics
