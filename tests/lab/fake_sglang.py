"""A small HTTP server that speaks SGLang's /generate stream, for tests of the client side alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """Answers every prompt with tokens computed from it, and keeps what it was asked."""

    incremental: bool = False
    storage_tokens: int = 0
    metrics_text: str = ""
    fail_when: Callable[[list[int]], str | None] = lambda ids: None
    requests: list[dict] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    peers: list[object] = field(default_factory=list)
    """The other end of the connection that each reading of the metrics came over."""
    running: int = 0
    most_running: int = 0
    url: str = ""

    def is_aborted(self, rid: str | None) -> bool:
        """Whether a request was asked to end."""
        return False

    def answer(self, input_ids: list[int], count: int) -> list[int]:
        """The tokens this server generates for a prompt."""
        return [(sum(input_ids) + 7 * i) % 256 for i in range(count)]

    async def cached(self, input_ids: list[int]) -> dict[str, int]:
        """Where the prompt's tokens come from; a fake that takes time for them waits here."""
        return {"device": 0, "host": 0, "storage": self.storage_tokens}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        failure = self.fail_when(body["input_ids"])
        if failure == "refuse":
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body, failure)
        except ConnectionResetError:
            return web.Response()  # the client hung up
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: dict, failure: str | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        prompt, ids = (
            body["input_ids"],
            self.answer(body["input_ids"], body["sampling_params"]["max_new_tokens"]),
        )
        tiers = await self.cached(prompt)
        for index in range(len(ids)):
            if failure == "hang":
                await asyncio.sleep(3600)
            if failure == "break" and index == 1:
                return response
            if failure == "error" and index == 1:
                await response.write(b'data: {"error": {"message": "out of luck"}}\n\n')
                return response
            aborted = self.is_aborted(body.get("rid"))
            last = aborted or index + 1 == len(ids)
            kind = "abort" if aborted or failure == "abort" else "length"
            meta = {
                "prompt_tokens": len(prompt),
                "completion_tokens": index + 1,
                "finish_reason": {"type": kind, "message": "no room"} if last else None,
                "cached_tokens": sum(tiers.values()),
                "cached_tokens_details": tiers,
                "queue_time": 0.5,
                "id": body.get("rid", "chosen by the server"),
            }
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = [
                    [-token / 256, token, None] for token in ids[: index + 1]
                ]
            shown = ids[index : index + 1] if self.incremental else ids[: index + 1]
            await response.write(
                b"data: " + json.dumps({"output_ids": shown, "meta_info": meta}).encode() + b"\n\n"
            )
            if last:
                break
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def note(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.Response(text="done")

    async def metrics(self, request: web.Request) -> web.Response:
        self.peers.append(
            request.transport.get_extra_info("peername") if request.transport else None
        )
        return web.Response(text=self.metrics_text)

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "fake"})

    def add_routes(self, app: web.Application) -> None:
        """What a fake that can do more answers besides."""

    @asynccontextmanager
    async def up(self, port: int = 0) -> AsyncIterator[FakeServer]:
        """The server, listening on a port of its own unless one is given."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/flush_cache", self.note)
        app.router.add_post("/hicache/storage-backend/clear", self.note)
        self.add_routes(app)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.note)
        app.router.add_get("/model_info", self.model_info)
        async with listening(app, port) as self.url:
            yield self


@asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    """The address of an application that listens on this port, or on one of its own."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@contextmanager
def in_a_thread(fake: Any) -> Iterator[str]:
    """The address of a fake that is up in a thread, for a command, which has an event loop of its
    own.
    """
    up, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with fake.up():
            up.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert up.wait(30)
    try:
        yield fake.url
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
