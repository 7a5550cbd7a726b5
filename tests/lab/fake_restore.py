"""A fake server that stores prompts and restores them in the way it is switched to, for tests of
the restoration bench.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from aiohttp import web
from fake_sglang import FakeServer

from sgl_kvtier.lab.experiment.restore import trial as restore_trial
from sgl_kvtier.lab.experiment.restore.plan import RestorePlan
from sgl_kvtier.lab.experiment.restore.run import Grid, Run
from sgl_kvtier.lab.experiment.restore.trial import RestoreLog, ServerCpu, Trials
from sgl_kvtier.lab.outside.client import Client

PAGE = 16
PAGE_BYTES = 1024


@dataclass
class RestoringServer(FakeServer):
    """Stores whole pages of every prompt; computes, loads or halves a stored prefix as
    policy.restore says.

    `refuses` are settings it does not change; `wrong_when_loaded` makes it answer otherwise when
    something was loaded.
    """

    admin_key: str = "secret"
    refuses: tuple[str, ...] = ()
    wrong_when_loaded: bool = False
    stored: set[tuple[int, ...]] = field(default_factory=set)
    device: set[tuple[int, ...]] = field(default_factory=set)
    restore: str = "auto"
    prefetch: str = "timeout"
    gbps: float = 0.0
    written: int = 0
    kept: int = 0
    states: list[tuple[str, str, float]] = field(default_factory=list)
    """What was set when each request came: policy.restore, prefetch policy, bandwidth."""
    turn: float = -1.0
    """rules.place, where it was set."""
    changes: list[float] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)

    async def cached(self, input_ids: list[int]) -> dict[str, int]:
        pages = [tuple(input_ids[: end * PAGE]) for end in range(1, len(input_ids) // PAGE + 1)]
        usable = [page for page in pages if len(page) < len(input_ids)]
        on_device = PAGE * sum(page in self.device for page in usable)
        in_store = PAGE * sum(page in self.stored for page in usable)
        self.states.append((self.restore, self.prefetch, self.gbps))
        share = {"compute": 0, "auto": 2, "both": 2}.get(self.restore, 1)
        loaded = 0 if share == 0 or on_device else in_store // share // PAGE * PAGE
        fresh = [page for page in pages if page not in self.stored]
        self.written += len(fresh)
        self.kept += len(pages) - len(fresh)
        self.stored.update(fresh)
        self.device.update(pages)
        await asyncio.sleep(0)
        return {"device": on_device, "host": 0, "storage": loaded}

    def answer(self, input_ids: list[int], count: int) -> list[int]:
        right = super().answer(input_ids, count)
        loads = self.restore != "compute" and tuple(input_ids[:PAGE]) in self.stored - self.device
        return [(token + 1) % 256 for token in right] if self.wrong_when_loaded and loads else right

    def is_aborted(self, rid: str | None) -> bool:
        return rid in self.aborted

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/set_internal_state", self.set_state)
        app.router.add_get("/kvtier/settings", self.policy)
        app.router.add_post("/kvtier/settings", self.set_policy)
        app.router.add_put("/hicache/storage-backend", self.set_prefetch)
        app.router.add_delete("/hicache/storage-backend", self.note)
        app.router.add_post("/abort_request", self.abort)

    async def note(self, request: web.Request) -> web.Response:
        if request.path == "/flush_cache":
            self.device.clear()
        if request.path.endswith("clear"):
            self.stored.clear()
        return await super().note(request)

    async def set_state(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return web.Response(status=401, text="no")
        values = (await request.json())["server_args"]
        self.turn = values.get("kvtier.rules.place", self.turn)
        if "kvtier.throttle.read_gbps" in values:
            self.gbps = values["kvtier.throttle.read_gbps"]
            self.changes.append(self.gbps)
        return web.json_response([True])

    async def set_policy(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return web.Response(status=401, text="no")
        values = (await request.json())["policy"]
        if refused := [name for name in values if name in self.refuses]:
            return web.json_response({"reason": f"policy.{refused[0]} is fixed"}, status=400)
        self.restore = values.get("restore", self.restore)
        return web.json_response({"reason": ""})

    async def policy(self, _: web.Request) -> web.Response:
        return web.json_response({"settings": {"policy": {"restore": self.restore}}})

    async def set_prefetch(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self.admin_key}":
            return web.Response(status=400, text="admin api key missing")
        self.prefetch = (await request.json()).get("hicache_storage_prefetch_policy", self.prefetch)
        return web.Response(text="ok")

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        self.metrics_text = (
            f'kvtier:store_pages{{tp_rank="0"}} {len(self.stored)}\n'
            f'kvtier:pages_written_total{{tp_rank="0"}} {self.written}\n'
            f'kvtier:pages_kept_total{{tp_rank="0"}} {self.kept}\n'
            f'kvtier:written_bytes_total{{tp_rank="0"}} {self.written * PAGE_BYTES}\n'
        )
        return await super().metrics(request)


def trials_of(client: Client, **more: Any) -> Trials:
    """Trials that wait for nothing and find every machine quiet, unless `more` says otherwise."""
    quiet: dict[str, Any] = {"quiet_foreign": 1e9, "look_every_s": 0.0, "pace": lambda: 1.0}
    return Trials(client, ServerCpu(None), **(quiet | more))


def measure(
    server: RestoringServer,
    options: RestorePlan,
    log: RestoreLog,
    run: type[Run] = Grid,
    dilation: float = 1.0,
    **more: Any,
) -> None:
    """What is planned, on the fake."""

    async def go() -> None:
        async with (
            server.up(),
            Client(server.url, admin_key="secret", timeout_s=30, dilation=dilation) as client,
        ):
            await run(options, trials_of(client, discard=log.keep, **more), log).run()

    with patch.object(restore_trial, "PUBLISHED_S", 0.0):
        asyncio.run(go())
