"""A fuzz run: many clients at once replay sessions against a server in trouble, and every answer is
compared.

The clients' prompts are the calls of agent sessions, in order within a session. The seed and the
number of the request decide everything that is done to the server. When it happens within a request
depends on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.outside.client import Client, Completion
from sgl_kvtier.lab.stress.server.chaos import Accident, Chaos, Fate
from sgl_kvtier.lab.stress.server.log import Answer, Attempt, FuzzLog, prompt_name
from sgl_kvtier.lab.stress.server.server import FuzzServer
from sgl_kvtier.lab.stress.trouble import Finding
from sgl_kvtier.lab.workload.encoder import PromptTokens, output_tokens
from sgl_kvtier.lab.workload.session import Context

_IDLE_S = 0.3
"""Seconds without requests after a flush. An idle server then checks that no memory is missing, and
ends itself if some is.
"""

_ROLL_S = 2.5
"""The map is compared with the store once a second, metrics are published twice a second."""

_PUBLISHED_S = 0.7
_COUNTS = 12
"""Write-back and what is moved up ahead come to rest meanwhile; what is lost stays lost."""
_NO_PAGE = (5, 6, 7)

_AHEAD = ("wasted_bytes", "victims", "host_victims", "drift", "failures")
_ENDS = (
    "met",
    "computed",
    "aborted",
    "flushed",
    "grown",
    "gave room",
    "in the way",
    "starved",
    "unaligned",
    "window lost",
    "state lost",
    "failed",
    "by layers",
    "differs",
    "planner failed",
    "mismatch",
    "unanswered",
)
"""How a restoration can end (docs/manual/operate.md)."""

_AUDITED = ("equal", "differs", "not read", "skipped")
"""What comes of a loaded page that is compared with the store's (`lab.audit`)."""

_DEFECTS = ("differs", "planner failed", "mismatch", "unanswered")
"""And how none may."""


@dataclass(frozen=True)
class Asked:
    """One call of a session: its prompt, the tokens to generate, and a name for both."""

    ids: tuple[int, ...]
    outputs: int
    name: str
    session: int = 0


@dataclass(frozen=True)
class FuzzOptions:
    """How long and how hard. A run ends after `requests`, after `restored` of them, or when
    `seconds` are over.
    """

    run: str
    chaos: Chaos
    concurrency: int = 8
    requests: int | None = None
    restored: int | None = None
    seconds: float | None = None
    deadline_s: float = 60.0
    page_tokens: int = 16
    dilation: float = 1.0
    gbps_scale: float = 1.0
    """Bandwidths that the server is set to, over those of `chaos`."""
    ahead: bool = False
    """The server looks ahead: sessions are named, pause between their turns, and are spoken of in
    hints.
    """
    audited: bool = False
    """The server compares loaded pages with the store's."""


def _session_name(place: int) -> str:
    return f"fuzz-{place}"


def calls_of(load: Load, most_outputs: int | None) -> list[list[Asked]]:
    """The sessions' prompts as they are sent."""
    sessions = []
    for place, session in enumerate(load.sessions):
        tokens, calls = PromptTokens(load.encoder), []
        for call, prompt in Context(session).calls():
            tokens.show(prompt)
            ids, outputs = (
                tuple(tokens.ids.tolist()),
                output_tokens(call, load.encoder, most_outputs),
            )
            calls.append(Asked(ids, outputs, prompt_name(ids, outputs), place))
        sessions.append(calls)
    return sessions


async def take_references(
    client: Client, sessions: Sequence[Sequence[Asked]], log: FuzzLog, advance: Callable[[], None]
) -> None:
    """Records the answers of a server that only computes, to every prompt. Raises BenchError when
    it fails one.
    """
    for asked in itertools.chain.from_iterable(sessions):
        if asked.name not in log.references:
            done = await client.generate(asked.ids, asked.outputs, margins=True)
            if done.error is not None:
                raise BenchError(
                    f"a prompt of {len(asked.ids)} tokens failed on the server that computes: "
                    f"{done.error}"
                )
            log.add("reference", (asked.name, Answer(done.output_ids, done.logprobs, done.margins)))
        advance()


class FuzzRun:
    """One run against one server (and its successors). Attempts go to the log as they end."""

    def __init__(
        self,
        options: FuzzOptions,
        server: FuzzServer,
        sessions: Sequence[Sequence[Asked]],
        log: FuzzLog,
        advance: Callable[[Attempt], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._server = server
        self._sessions = sessions
        self._log = log
        self._advance = advance
        self._sent = 0
        self._restored = 0
        self._under_way = 0
        self._mode = "auto"
        self._life = 0
        self._until = float("inf")
        self._open = asyncio.Event()
        self._open.set()
        self._quiet = asyncio.Condition()
        self._ended = False
        self._before: dict[str, Counter[str]] = {}

    def end(self) -> None:
        """No more requests; what is under way is still waited for."""
        self._ended = True

    async def restart(self) -> None:
        """Ends the server while requests are under way, with its next signal, and starts
        another.
        """
        await self._alone(self._kill, wait=False)

    async def run(self) -> None:
        """Until one of the limits is reached. The server is idle at the end, with its caches
        emptied.
        """
        options = self._options
        limit = float("inf") if options.seconds is None else options.seconds
        self._until = time.monotonic() + limit
        # The deadline is the client's: what has not ended by then hangs.
        async with Client(
            self._server.url,
            timeout_s=options.deadline_s,
            admin_key=self._server.admin_key,
            dilation=options.dilation,
        ) as client:
            self._client = client
            self._before = await self._totals()
            queue = self._endless()
            await asyncio.gather(*(self._worker(queue) for _ in range(options.concurrency)))
            if options.ahead:
                await self._count_host()
            await self._flush()
            if options.ahead and "holes" not in options.chaos.kinds:
                await self._compare_map()
            await self._keep_ends()
            self._server.look()

    def _endless(self) -> Iterator[Sequence[Asked]]:
        for turn in itertools.count():
            yield from self._options.chaos.order(self._sessions, turn)

    async def _worker(self, queue: Iterator[Sequence[Asked]]) -> None:
        for session in queue:
            for asked in session:
                if self._over():
                    return
                await self._turn(asked)

    def _over(self) -> bool:
        options = self._options
        return (
            self._ended
            or time.monotonic() > self._until
            or (options.requests is not None and self._sent >= options.requests)
            or (options.restored is not None and self._restored >= options.restored)
        )

    async def _turn(self, asked: Asked) -> None:
        number, chaos = self._sent, self._options.chaos
        self._sent += 1
        if self._options.ahead:
            await asyncio.sleep(chaos.pause_before(number) * self._options.dilation)
        await self._open.wait()
        if chaos.flushes_before(number):
            await self._alone(self._flush)
        if chaos.kills_at(number):
            await self._alone(self._kill, wait=False)
        hint = chaos.hint_at(number, len(self._sessions)) if self._options.ahead else None
        if hint is not None:
            await self._hint(*hint)
        switch = chaos.switch_at(number)
        if switch is not None:
            await self._switch(*switch)
        await self._open.wait()  # another client may have begun to kill the server meanwhile
        attempt = await self._ask(number, asked, chaos.accident(number))
        self._restored += attempt.restored
        self._log.keep(attempt)
        self._advance(attempt)
        if attempt.error is not None and not attempt.killed and not self._server.alive:
            self._ended = True

    async def _ask(self, number: int, asked: Asked, accident: Accident) -> Attempt:
        life, mode = self._life, self._mode
        rid = f"{self._options.run}-{number}-{life}"
        began = time.monotonic()
        async with self._counted():
            name = _session_name(asked.session) if self._options.ahead else None
            task = asyncio.create_task(
                self._client.generate(
                    asked.ids,
                    asked.outputs,
                    rid=rid,
                    session_id=name,
                    priority=self._options.chaos.priority_of(number),
                    logprobs=True,
                )
            )
            done = await self._meet(task, rid, accident)
        cached = done.cached if done is not None else None
        error = done.error if done is not None else None
        given_up = accident.fate is not Fate.ANSWERED
        hung = error is not None and error.startswith("no end after") and life == self._life
        if hung:
            with contextlib.suppress(BenchError):
                await self._client.abort(rid)
        return Attempt(
            run=self._options.run,
            number=number,
            prompt=asked.name,
            prompt_tokens=len(asked.ids),
            mode=mode,
            fate=accident.fate.value,
            seconds=(time.monotonic() - began) / self._options.dilation,
            host_tokens=cached.host if cached is not None else 0,
            storage_tokens=cached.storage if cached is not None else 0,
            tokens=done.output_ids if done is not None else (),
            logprobs=done.logprobs if done is not None else (),
            complete=done is not None and error is None,
            killed=life != self._life and (error is not None or given_up),
            hung=hung,
            error=error,
        )

    async def _meet(
        self, task: asyncio.Task[Completion], rid: str, accident: Accident
    ) -> Completion | None:
        """Waits for the answer, or carries out the accident first. None: the connection was
        closed.
        """
        if accident.fate is Fate.ANSWERED:
            return await task
        finished, _ = await asyncio.wait({task}, timeout=accident.after_s * self._options.dilation)
        if finished:
            return task.result()
        if accident.fate is Fate.ABORTED:
            with contextlib.suppress(BenchError):  # a server that is being killed
                await self._client.abort(rid)
            return await task
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._under_way += 1
        try:
            yield
        finally:
            async with self._quiet:
                self._under_way -= 1
                self._quiet.notify_all()

    async def _alone(self, work: Callable[[], Awaitable[None]], wait: bool = True) -> None:
        """Does something to the server while no request is sent; with `wait`, when none is under
        way either.
        """
        if not self._open.is_set():
            await self._open.wait()
            return
        self._open.clear()
        try:
            if wait:
                async with self._quiet:
                    await self._quiet.wait_for(lambda: self._under_way == 0)
            await work()
        finally:
            self._open.set()

    async def _flush(self) -> None:
        if not self._server.alive:
            return
        try:
            await self._client.flush()
        except BenchError as error:
            self._log.find(Finding.LEAK, f"the server did not become idle: {error}")
            return
        self._log.note("flush")
        await asyncio.sleep(_IDLE_S)

    async def _keep_ends(self) -> None:
        """Before a server ends: how its restorations ended. What it does between this and its end
        is not counted.
        """
        if self._options.audited:
            await asyncio.sleep(_ROLL_S)  # the last comparisons, and the next publishing
        now = await self._totals()
        grown = {kind: now[kind] - self._before.get(kind, Counter()) for kind in now}
        self._log.add("ends", dict(grown["ends"]))
        if self._options.audited:
            self._log.add("audited", dict(grown["audited"]))
        if grown["audited"]["differs"]:
            text = f"{grown['audited']['differs']} loaded pages differ from the store's"
            self._log.find(Finding.MISMATCH, text)
        if self._options.ahead:
            self._log.add("ahead", {name: grown["ahead"][name] for name in now["ahead"]})
            if grown["ahead"]["failures"]:
                self._log.find(
                    Finding.CRASH, "looking ahead failed and was given up; see the server's log"
                )
        defects = [how for how in _DEFECTS if grown["ends"][how]]
        if defects:
            self._log.find(
                Finding.CRASH, f"restorations ended as {', '.join(defects)}; see the server's log"
            )

    async def _totals(self) -> dict[str, Counter[str]]:
        """The server's counts since it started: ends of restorations, of lookahead, and pages that
        were compared.
        """
        metrics = await self._client.metrics()
        first = {"tp_rank": "0", "pp_rank": "0"}
        ends = {
            how: int(metrics.total("kvtier:restore_ended_total", how=how, **first) or 0)
            for how in _ENDS
        }
        ahead = {
            name: int(metrics.total(f"kvtier:lookahead_{name}_total", **first) or 0)
            for name in _AHEAD
        }
        for link in ("storage-host", "host-device"):
            ahead[f"{link}_bytes"] = int(
                metrics.total("kvtier:lookahead_moved_bytes_total", **first, link=link) or 0
            )
        audited = {
            how: int(metrics.total("kvtier:restore_audited_pages_total", result=how) or 0)
            for how in _AUDITED
        }
        return {"ends": Counter(ends), "ahead": Counter(ahead), "audited": Counter(audited)}

    async def _count_host(self) -> None:
        """Compares the host memory in use with the memory of the map's pages. It is called once
        nothing runs, before a flush frees all host memory.
        """
        used = known = 0.0
        for _ in range(_COUNTS):
            if not self._server.alive:
                return
            await self._client.generate(_NO_PAGE, 1)  # SGLang says what is in use with a step
            await asyncio.sleep(_IDLE_S + _PUBLISHED_S)
            metrics = await self._client.metrics()
            used = metrics.total("sglang:hicache_host_used_tokens", tp_rank="0", pp_rank="0") or 0.0
            known = (
                metrics.total("kvtier:lookahead_map_host_pages", tp_rank="0", pp_rank="0") or 0.0
            ) * self._options.page_tokens
            if used == known:
                return
        self._log.find(
            Finding.LEAK,
            f"{used:.0f} tokens of host memory are in use, and the map has {known:.0f}",
        )

    async def _compare_map(self) -> None:
        """Checks on the idle server that every page is where the map has it. It waits first until
        pages the store has lost are off the map.
        """
        if not self._server.alive:
            return
        await asyncio.sleep(_ROLL_S)
        before = (await self._client.metrics()).total("kvtier:lookahead_drift_total") or 0
        try:
            await self._client.set_state({"kvtier.lookahead.check": 1})
        except BenchError as error:
            self._log.find(Finding.LEAK, f"the server did not become idle: {error}")
            return
        await asyncio.sleep(_ROLL_S)
        drift = ((await self._client.metrics()).total("kvtier:lookahead_drift_total") or 0) - before
        self._log.note("map compared")
        if drift:
            self._log.find(Finding.DRIFT, f"{drift:.0f} pages of the map were elsewhere")

    async def _hint(self, session: int, said: dict[str, Any]) -> None:
        try:
            self._log.note(f"hint {await self._client.hint(_session_name(session), said)}")
        except BenchError:
            if self._open.is_set():
                raise

    async def _kill(self) -> None:
        await self._keep_ends()
        self._life += 1
        await asyncio.to_thread(self._server.kill_and_start)
        self._before = {}
        await self._client.reconnect()
        await self._switch(self._mode, 0.25)

    async def _switch(self, mode: str, gbps: float | None) -> None:
        try:
            await self._client.set_policy(restore=mode)
            if gbps is not None:
                read_gbps = gbps * self._options.gbps_scale
                await self._client.set_state({"kvtier.throttle.read_gbps": read_gbps})
        except BenchError:
            if self._open.is_set():
                raise
            return  # the server is being killed by another client
        self._mode = mode
        self._log.note("switch")
