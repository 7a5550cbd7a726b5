"""A small HTTP server that speaks the /v1/completions stream, as SGLang or as plainer servers do, and
that of /v1/chat/completions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from fake_sglang import listening


@dataclass
class FakeOpenAI:
    """Answers every prompt with one word per token. Each event carries `per_event` of them; `usage`
    is every (in each event), last, or none.
    """

    usage: str = "every"
    per_event: int = 1
    cached: int | None = None
    tiers: dict[str, int] | None = None
    failure: str = ""
    strange: dict[str, Any] | None = None
    """An event that is sent first."""
    models: Any = field(default_factory=lambda: [{"id": "some-model", "root": "/no/such/path"}])
    requests: list[dict] = field(default_factory=list)
    url: str = ""

    def words(self, prompt: list[int], count: int) -> list[str]:
        """What this server answers."""
        return [f"w{(sum(prompt) + 7 * place) % 256} " for place in range(count)]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.failure == "refuse":
            return web.json_response({"message": "the prompt is too long"}, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events(body):
            if event.get("object") == "break":
                return response
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    def events(self, body: dict) -> Iterator[dict]:
        prompt, words = body["prompt"], self.words(body["prompt"], body["max_tokens"])
        if self.strange is not None:
            yield self.strange
        for start in range(0, len(words), self.per_event):
            done = min(start + self.per_event, len(words))
            if self.failure in ("break", "error") and start:
                yield (
                    {"object": "break"}
                    if self.failure == "break"
                    else {"error": {"message": "out of luck"}}
                )
                return
            reason = "abort" if self.failure == "abort" else "length"
            text = "".join(words[start:done])
            choice = {"text": text, "finish_reason": reason if done == len(words) else None}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": done}
            event = {"object": "text_completion", "choices": [choice]}
            yield {**event, **({"usage": usage} if self.usage == "every" else {})}
        if self.tiers is not None:
            yield {"choices": [], "sglext": {"cached_tokens_details": self.tiers}}
        if self.usage != "none":
            details = None if self.cached is None else {"cached_tokens": self.cached}
            last = {"prompt_tokens": len(prompt), "completion_tokens": len(words)}
            usage = {**last, "prompt_tokens_details": details}
            yield {"object": "text_completion", "choices": [], "usage": usage}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The same for messages: a token is a byte of them."""
        body = await request.json()
        self.requests.append(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        prompt = list("".join(one["content"] for one in body["messages"]).encode())
        asked = {**body, "prompt": prompt, "max_tokens": body["max_completion_tokens"]}
        for event in self.events(asked):
            for choice in event["choices"]:
                choice["delta"] = {"role": "assistant", "content": choice.pop("text")}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    @asynccontextmanager
    async def up(self) -> AsyncIterator[FakeOpenAI]:
        """The server, listening on a port of its own. It has none of SGLang's own routes."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.list_models)
        async with listening(app) as self.url:
            yield self
