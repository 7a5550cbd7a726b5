"""A server seen through /v1/completions, which many kinds of servers have: prompts as token ids,
answers as text.

Token ids are not asked for: SGLang would send those of the prompt back with the first token, and
that takes time. Tokens are counted by the usage in each event, where a server sends it; else an
event with text counts as one token until the last event says how many there were.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside.client import (
    MOST_LINE_BYTES,
    BadAnswer,
    Cached,
    Client,
    Completion,
    Reading,
    part_of,
    tiers_of,
    token_ids,
    whole_of,
)
from sgl_kvtier.outside import refusal, shown


class OpenAIClient(Client):
    """Asks by /v1/completions. The other methods are for SGLang's own routes, and fail where a
    server has none.
    """

    _model = ""

    async def __aenter__(self) -> OpenAIClient:
        await super().__aenter__()
        try:
            self._model = str((await self.model_info())["id"])
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def model_info(self) -> dict[str, Any]:
        """The first model of the server: `id`, and `model_path`, which may be no path. Raises
        BenchError when nothing usable answers.
        """
        listed = (await self.get_object("/v1/models")).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise BenchError(
                f"the server at {self.url} lists no model at /v1/models: {shown(listed)}"
            )
        return {"id": first["id"], "model_path": str(first.get("root") or first["id"])}

    async def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, *, rid: str | None = None, **asked: Any
    ) -> Completion:
        """Greedy generation of `max_new_tokens` tokens, streamed; of fewer by a server that does
        not know ignore_eos. Never raises for a server's or network's failures.

        There is no session, no priority and no log-prob on this route, and nothing is told before
        the end.
        """
        assert not any(asked.values()), f"the route has none of {', '.join(asked)}"
        body = self.body(input_ids, max_new_tokens) | ({} if rid is None else {"rid": rid})
        reading = Completed(time.monotonic(), max_new_tokens)
        return await self.stream("/v1/completions", body, reading)

    def body(self, input_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """The body of such a request."""
        return {
            "model": self._model,
            "prompt": list(input_ids),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "return_cached_tokens_details": True,
        }


class Completed(Reading):
    """An answer of /v1/completions. Of a server that says how many tokens were cached and not
    where, the tiers are 0.
    """

    route = "/v1/completions"
    _chars = 0
    _last_s = 0.0
    _cached_tokens: int | None = None
    _tiers: dict[str, int] | None = None

    def read(self, event: dict[str, Any]) -> None:
        self.rid = part_of(event, "id", str) or self.rid
        said = False
        for choice in part_of(event, "choices", list) or []:
            if not isinstance(choice, dict):
                raise BadAnswer(refusal("choices", choice, "a list of objects"))
            said |= self._take_choice(choice)
        usage = part_of(event, "usage", dict) or {}
        counted = max(whole_of(usage, "completion_tokens") or 0, len(self.ids))
        # A new token has the time of the last event that had a part of the output.
        self.count(counted or len(self.times) + said, self._last_s)
        prompt = whole_of(usage, "prompt_tokens")
        self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
        cached = whole_of(part_of(usage, "prompt_tokens_details", dict) or {}, "cached_tokens")
        self._cached_tokens = self._cached_tokens if cached is None else cached
        self._tiers = tiers_of(part_of(event, "sglext", dict) or {}) or self._tiers
        if self._tiers is not None or self._cached_tokens is not None:
            tiers, total = self._tiers or {}, self._cached_tokens
            total = sum(tiers.values()) if total is None else total
            self.cached = Cached(**tiers, total=total)

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        """Whether the choice has a part of the output."""
        self._last_s = self.elapsed_s()
        text, ids = part_of(choice, "text", str) or "", part_of(choice, "token_ids", list) or []
        ids = token_ids(ids, "token_ids")
        self.text.append(text)
        self._chars += len(text)
        if self._chars > MOST_LINE_BYTES:
            raise BadAnswer(f"a text of more than {MOST_LINE_BYTES >> 20} Mi characters")
        self.ids += ids
        self.ended = part_of(choice, "finish_reason", str) or self.ended
        return bool(text or ids)


class ChatClient(OpenAIClient):
    """Asks by /v1/chat/completions as well, with messages in place of token ids."""

    async def chat(self, messages: Sequence[Mapping[str, str]], max_new_tokens: int) -> Completion:
        """Greedy generation of `max_new_tokens` tokens, streamed. Never raises for a server's or
        network's failures.
        """
        body = self.body((), max_new_tokens)
        del body["prompt"], body["max_tokens"]
        body |= {"messages": list(messages), "max_completion_tokens": max_new_tokens}
        return await self.stream(
            "/v1/chat/completions", body, _Said(time.monotonic(), max_new_tokens)
        )


class _Said(Completed):
    """An answer of /v1/chat/completions. What a model thinks counts as text."""

    route = "/v1/chat/completions"

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        delta = part_of(choice, "delta", dict) or {}
        parts = (part_of(delta, name, str) or "" for name in ("reasoning_content", "content"))
        return super()._take_choice({**choice, "text": "".join(parts)})


ROUTES: dict[str, type[Client]] = {"generate": Client, "openai": OpenAIClient}
"""How a server may be asked: SGLang's own route, or the one that OpenAI's API has."""
