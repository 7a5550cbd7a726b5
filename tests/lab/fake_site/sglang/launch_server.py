"""`python -m sglang.launch_server` of the stand-in: a server process that behaves like an arm, or
fails as told.

FAKE_SGLANG is "ARM:WHAT" with WHAT one of: refuse (ends while starting), die (ends at the 4th
request), stubborn (ignores SIGTERM), wrong (other tokens than the other arms), child (has a worker
process that ignores SIGTERM). One that is started with an admin key restores prompts as it is told
(tests/lab/fake_restore.py); there WHAT may be wrong, hang (at the 9th request), fail (at the 9th),
leak (says so in its log at the 9th), forgetful (restores nothing from the 40th on), hoard (keeps
host memory that it has no pages for).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aiohttp import web
from fake_restore import RestoringServer
from fake_sglang import FakeServer


def arm_of(arguments: list[str]) -> str:
    if "--enable-hierarchical-cache" not in arguments:
        return "recompute"
    if "--hicache-storage-backend" not in arguments:
        return "hicache"
    backend = arguments[arguments.index("--hicache-storage-backend") + 1]
    return "hicache-file" if backend == "file" else backend


class Arm(FakeServer):
    def __init__(self, arm: str, task: str) -> None:
        super().__init__()
        self.task = task
        self.stores = arm in ("hicache-file", "kvtier")
        self.stored: set[tuple[int, ...]] = set()
        self.written = 0
        flag = "--context-length"
        self.context = int(sys.argv[sys.argv.index(flag) + 1]) if flag in sys.argv else 1 << 30

    def answer(self, input_ids: list[int], count: int) -> list[int]:
        ids = super().answer(input_ids, count)
        return [token + 1 for token in ids] if self.task == "wrong" else ids

    async def generate(self, request: web.Request) -> web.StreamResponse:
        head = tuple((await request.json())["input_ids"][:16])
        if self.task == "die" and len(self.requests) == 3:
            print("the end is near", flush=True)
            os._exit(7)
        self.storage_tokens = 16 if self.stores and head in self.stored else 0
        self.fail_when = lambda ids: "refuse" if len(ids) >= self.context else None
        self.stored.add(head)
        self.written += 32
        return await super().generate(request)

    async def note(self, request: web.Request) -> web.Response:
        if request.path.endswith("clear"):
            self.stored.clear()
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
    task = ""
    asked = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.asked >= 40 and self.task == "forgetful":
            self.stored.clear()
        if self.asked == 9 and self.task == "leak":
            print("[] pool memory leak detected! 16 tokens", flush=True)
        what = {"hang": "hang", "fail": "refuse"}.get(self.task) if self.asked == 9 else None
        self.fail_when = lambda _: what
        return await super().generate(request)

    async def metrics(self, request: web.Request) -> web.Response:
        answer = await super().metrics(request)
        if self.task == "hoard":
            answer.text = (
                f'{answer.text}sglang:hicache_host_used_tokens{{tp_rank="0",pp_rank="0"}} 32\n'
            )
        return answer


def build(arm: str, task: str) -> FakeServer:
    if "--admin-api-key" not in sys.argv:
        return Arm(arm, task)
    key = sys.argv[sys.argv.index("--admin-api-key") + 1]
    server = Restoring(admin_key=key, wrong_when_loaded=task == "wrong")
    server.task = task
    return server


async def serve(arm: str, task: str, port: int) -> None:
    async with build(arm, task).up(port):
        print("ready", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    arguments = sys.argv[1:]
    arm = arm_of(arguments)
    victim, _, task = os.environ.get("FAKE_SGLANG", "").partition(":")
    task = task if victim == arm else ""
    if task == "refuse":
        print("Traceback: no memory left for you", flush=True)
        sys.exit(3)
    if task == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if task == "child":
        ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('worker', flush=True); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", ignoring]):
            asyncio.run(serve(arm, task, int(arguments[arguments.index("--port") + 1])))
    asyncio.run(serve(arm, task, int(arguments[arguments.index("--port") + 1])))


main()
