"""Where scenes of trouble are played: a server, load beside a scene, and the same questions before
and after each.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.stress.server.chaos import Chaos, Fate
from sgl_kvtier.lab.stress.server.clock import OwnClock
from sgl_kvtier.lab.stress.server.log import FuzzLog
from sgl_kvtier.lab.stress.server.run import Asked, FuzzOptions, FuzzRun
from sgl_kvtier.lab.stress.server.server import FuzzServer
from sgl_kvtier.lab.stress.trouble import Finding

GBPS = 0.1
"""Bandwidth of the store between scenes, in gigabits per second: of the order of what a lab model
computes.
"""

_PROBES = 12
_MORE_FILES = 32
_PAUSE_S = 4.0
_CALM = Chaos(kinds=("abort", "disconnect", "hint"), start=("auto", GBPS))

Scene = Callable[["Stage"], Awaitable[str]]
"""Does something to the server, load beside it; says how much of it was done."""


@dataclass(frozen=True)
class Answered:
    """The outcome of a round of questions. It counts those that had part of their prompt restored,
    and those whose front and loads met.
    """

    asked: int
    restored: int
    met: int


class Stage:
    """One server, up, and all that is done to it. `scale` is the share of each scene's full amount;
    `clock` its time of day, where it has one of its own.
    """

    def __init__(
        self,
        options: FuzzOptions,
        scale: float,
        server: FuzzServer,
        sessions: Sequence[Sequence[Asked]],
        log: FuzzLog,
        clock: OwnClock | None = None,
    ) -> None:
        self.options = options
        self.scale = scale
        self.server = server
        self.clock = clock
        self.log = log
        self._sessions = sessions
        self._runs = itertools.count()
        self._before: Answered | None = None

    async def open(self) -> None:
        """Before the first scene: the questions' prefixes are stored, what there is to learn is
        learned, all is counted.
        """
        for _ in range(2):
            await self.ask("auto")
        self._before = await self.ask("auto")
        self._usage = self.server.usage()

    async def play(self, name: str, scene: Scene) -> dict[str, Any]:
        """One scene; what came of it. What is wrong afterwards is a finding."""
        began, requests, findings = time.monotonic(), len(self.log.attempts), len(self.log.findings)
        ends = Counter(self.log.ends)
        amount = await scene(self)
        seconds = time.monotonic() - began
        during, ends = self.log.attempts[requests:], Counter(self.log.ends) - ends
        by_itself, told = await self.ask("auto"), await self.ask("both")
        self._judge(name, by_itself, told)
        return {
            "scene": name,
            "amount": amount,
            "seconds": round(seconds, 1),
            "requests": len(during),
            "given_up": sum(one.fate != Fate.ANSWERED.value for one in during),
            "under_a_kill": sum(one.killed for one in during),
            "restored": sum(one.restored for one in during),
            "ends": dict(sorted(ends.items())),
            "asked_after": by_itself.asked + told.asked,
            "restored_after": by_itself.restored + told.restored,
            "met_after": {"auto": by_itself.met, "both": told.met},
            "usage": {"before": asdict(self._usage), "after": asdict(self.server.usage())},
            "findings": self.log.findings[findings:],
        }

    @contextlib.asynccontextmanager
    async def load(
        self, chaos: Chaos = _CALM, concurrency: int | None = None, ahead: bool | None = None
    ) -> AsyncIterator[FuzzRun]:
        """Clients that ask while the block runs; every answer is compared. Behind it the server is
        idle, its caches empty. `ahead` False: what looks ahead is not asked, though the server
        does.
        """
        run = self._run(chaos, concurrency or self.options.concurrency, self._sessions, ahead=ahead)
        task = asyncio.create_task(run.run())
        try:
            yield run
        finally:
            run.end()
            await task

    async def ask(self, mode: str) -> Answered:
        """The last prompts of some sessions, all of them from empty caches, with `policy.restore`
        so.
        """
        last = [[session[-1]] for session in self._sessions[:_PROBES]]
        begun, ends = len(self.log.attempts), self.log.ends["met"]
        await self._run(Chaos(kinds=(), start=(mode, GBPS)), 2, last, requests=len(last)).run()
        found = self.log.attempts[begun:]
        return Answered(len(found), sum(one.restored for one in found), self.log.ends["met"] - ends)

    def client(self) -> Client:
        """For what an operator does: `async with stage.client() as client`."""
        return Client(
            self.server.url, timeout_s=self.options.deadline_s, admin_key=self.server.admin_key
        )

    async def wait(self, seconds: float) -> None:
        """Waits that many seconds of a full scene."""
        await asyncio.sleep(seconds * self.scale)

    async def pause(self) -> None:
        """Gives some requests time, between two acts of a scene."""
        await asyncio.sleep(max(1.0, _PAUSE_S * self.scale))

    def _run(
        self,
        chaos: Chaos,
        concurrency: int,
        sessions: Sequence[Sequence[Asked]],
        requests: int | None = None,
        ahead: bool | None = None,
    ) -> FuzzRun:
        options = replace(
            self.options,
            run=f"{self.options.chaos.seed}-scene-{next(self._runs)}-{len(self.log.attempts)}",
            chaos=chaos,
            concurrency=concurrency,
            requests=requests,
            ahead=self.options.ahead if ahead is None else ahead,
        )
        return FuzzRun(options, self.server, sessions, self.log)

    def _judge(self, name: str, by_itself: Answered, told: Answered) -> None:
        before, usage = self._before, self.server.usage()
        assert before is not None, "it was opened"
        if not told.restored:
            self.log.find(Finding.SCENE, f"{name}: nothing was restored after it")
        if before.met and not told.met:
            self.log.find(Finding.SCENE, f"{name}: front and loads met nowhere after it")
        if before.restored and not by_itself.restored:
            self.log.find(Finding.SCENE, f"{name}: policy.restore auto restored nothing after it")
        if usage.processes != self._usage.processes:
            self.log.find(
                Finding.SCENE,
                f"{name}: {usage.processes} processes after it, {self._usage.processes} before",
            )
        if usage.open_files > self._usage.open_files + _MORE_FILES:
            self.log.find(
                Finding.SCENE,
                f"{name}: {usage.open_files} open files after it, {self._usage.open_files} before",
            )


def check_store(folder: Path, log: FuzzLog) -> dict[str, Any] | None:
    """`kvtier fsck` of a store that no server has open; damage is a finding. None where there is no
    store.
    """
    if not folder.is_dir():
        return None
    start = "import sys; from sgl_kvtier.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "fsck", str(folder), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        log.find(
            Finding.SCENE,
            f"store: kvtier fsck ended with status {done.returncode}: {done.stderr.strip()[-300:]}",
        )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return None
