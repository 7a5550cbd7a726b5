"""Fakes that behave like the arms of a comparison, or fail as told: as child processes
(tests/lab/fake_site), and as threads.

FAKE_SGLANG is "ARM:WHAT" with WHAT one of: refuse (ends while starting), die (ends at the 4th
request), flushed (ends at a flush after its 4th request), wrong (other tokens than the other arms); of a child process also stubborn (ignores
SIGTERM), child (has a worker process that ignores SIGTERM). One that is started with an admin key
restores prompts as it is told (fake_restore.py); there WHAT may be wrong, hang (at the 9th
request), fail (at the 9th), leak (says so in its log at the 9th), forgetful (restores nothing from
the 40th on), hoard (keeps host memory that it has no pages for), unmet (counts no
restoration that met).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from fake_openai import FakeOpenAI
from fake_restore import RestoringServer
from fake_sglang import FakeServer

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside.server import Server


@dataclass
class Place:
    """What a fake does not know itself: its task, where it writes, and how it ends."""

    task: str
    say: Callable[[str], None]
    end: Callable[[int], None]


def task_of(arguments: list[str]) -> str:
    """What FAKE_SGLANG tells the server with this command line to do."""
    victim, _, task = os.environ.get("FAKE_SGLANG", "").partition(":")
    return task if victim == arm_of(arguments) else ""


def arm_of(arguments: list[str]) -> str:
    if "--enable-hierarchical-cache" not in arguments:
        return "recompute"
    if "--hicache-storage-backend" not in arguments:
        return "hicache"
    backend = arguments[arguments.index("--hicache-storage-backend") + 1]
    return "hicache-file" if backend == "file" else backend


class Arm(FakeServer):
    """A fake that gives back from storage what it was asked before."""

    def __init__(self, arm: str, arguments: list[str], place: Place) -> None:
        super().__init__()
        self.place = place
        self.stores = arm in ("hicache-file", "kvtier")
        self.stored: set[tuple[int, ...]] = set()
        self.written = 0
        flag = "--context-length"
        self.context = int(option(arguments, flag) or 1 << 30)

    def answer(self, input_ids: list[int], count: int) -> list[int]:
        ids = super().answer(input_ids, count)
        return [token + 1 for token in ids] if self.place.task == "wrong" else ids

    async def generate(self, request: web.Request) -> web.StreamResponse:
        head = tuple((await request.json())["input_ids"][:16])
        if self.place.task == "die" and len(self.requests) == 3:
            self.place.say("the end is near")
            self.place.end(7)
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        self.storage_tokens = 16 if self.stores and head in self.stored else 0
        self.fail_when = lambda ids: "refuse" if len(ids) >= self.context else None
        self.stored.add(head)
        self.written += 32
        return await super().generate(request)

    def add_routes(self, app: web.Application) -> None:
        other = FakeOpenAI(cached=0)
        app.router.add_post("/v1/completions", other.completions)
        app.router.add_post("/v1/chat/completions", other.chat)
        app.router.add_get("/v1/models", other.list_models)

    async def note(self, request: web.Request) -> web.Response:
        if request.path.endswith("clear"):
            self.stored.clear()
        elif self.place.task == "flushed" and len(self.requests) >= 4:
            self.place.say("Failed to stop HiCache storage threads cleanly.")
            self.place.end(7)
            if request.transport is not None:
                request.transport.abort()
        return await super().note(request)

    async def metrics(self, request: web.Request) -> web.Response:
        if self.stores:
            self.metrics_text = (
                f'sglang:backuped_tokens_total{{tp_rank="0"}} {self.written}\n'
                f'sglang:prefetched_tokens_total{{tp_rank="0"}} {self.written // 2}\n'
                f"sglang:hicache_backup_tokens_total {self.written}\nsglang:hicache_backup_bytes_total {self.written * 10}\n"
            )
        return await super().metrics(request)


class Restoring(RestoringServer):
    """A fake that restores prompts as it is told."""

    place: Place
    asked = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.asked >= 40 and self.place.task == "forgetful":
            self.stored.clear()
        if self.asked == 9 and self.place.task == "leak":
            self.place.say("[] pool memory leak detected! 16 tokens")
        what = {"hang": "hang", "fail": "refuse"}.get(self.place.task) if self.asked == 9 else None
        self.fail_when = lambda _: what
        return await super().generate(request)

    async def metrics(self, request: web.Request) -> web.Response:
        answer = await super().metrics(request)
        met = 0 if self.place.task == "unmet" else self.asked
        name = 'kvtier:restore_ended_total{how="met",tp_rank="0",pp_rank="0"}'
        answer.text = f"{answer.text}{name} {met}\n"
        differ = self.place.task == "altered" and self.asked > 9
        for result, pages in {"equal": 2 * self.asked, "differs": int(differ)}.items():
            name = f'kvtier:restore_audited_pages_total{{result="{result}"}}'
            answer.text = f"{answer.text}{name} {pages}\n"
        if self.place.task == "hoard":
            answer.text = (
                f'{answer.text}sglang:hicache_host_used_tokens{{tp_rank="0",pp_rank="0"}} 32\n'
            )
        return answer


def build(arguments: list[str], place: Place) -> FakeServer:
    """The fake that a server with this command line stands for."""
    key = option(arguments, "--admin-api-key")
    if key is None:
        return Arm(arm_of(arguments), arguments, place)
    server = Restoring(admin_key=key, wrong_when_loaded=place.task == "wrong")
    server.place = place
    return server


def option(arguments: list[str], flag: str) -> str | None:
    """The value of an option of a command line."""
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


class ThreadServer(Server):
    """A server as `sgl_kvtier.lab.outside.server` starts it, in a thread of this process: what is
    no child process needs no second to start.
    """

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = self.command
        task = task_of(arguments)
        self._up, self._status = threading.Event(), 0
        if task == "refuse":
            self._say("Traceback: no memory left for you")
            self._status = 3
            return
        place = Place(task, self._say, self._end)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(build(arguments, place))), daemon=True
        )
        self._thread.start()

    def wait_until_healthy(self, timeout_s: float = 300.0) -> float:
        self.raise_if_ended("while starting")
        assert self._up.wait(timeout_s), "the thread listens"
        return 0.1

    def raise_if_ended(self, when: str) -> None:
        if self._status:
            ended = f"{self.name}: the server ended with status {self._status} {when}."
            raise BenchError(f"{ended} {self.last_lines()}")

    def stop(self, patience_s: float = 10.0) -> None:
        if not self._status and self._up.is_set():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(patience_s)
        self._up.clear()

    async def _serve(self, fake: FakeServer) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with fake.up(self.port):
            self._say("ready")
            self._up.set()
            await self._over.wait()

    def _say(self, text: str) -> None:
        with self.log_path.open("a") as log:
            log.write(text + "\n")

    def _end(self, status: int) -> None:
        self._status = status
        self._over.set()
