"""A server seen through /v1/completions, which many kinds of servers have: prompts as token ids,
answers as text.

Token ids are not asked for: SGLang would send those of the prompt back with the first token, and
that takes time. Tokens are counted by the usage in each event, where a server sends it; else an
event with text counts as one token until the last event says how many there were.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside.client import (
    ABORTED,
    MORE_TOKENS,
    MOST_LINE_BYTES,
    BadAnswer,
    Cached,
    Client,
    Completion,
    part_of,
    problem_in,
    whole_of,
)
from sgl_kvtier.outside import is_whole, refusal, shown


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
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        priority: int | None = None,
        logprobs: bool = False,
        margins: bool = False,
        begun: asyncio.Event | None = None,
        taken: asyncio.Event | None = None,
    ) -> Completion:
        """Greedy generation of `max_new_tokens` tokens, streamed; of fewer by a server that does
        not know ignore_eos. Never raises for a server's or network's failures.

        There is no session, no priority and no log-prob on this route, and nothing is told before
        the end.
        """
        assert not (session_id or priority or logprobs or margins or begun or taken), (
            "the route has none of these"
        )
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(input_ids),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
            "return_cached_tokens_details": True,
        }
        body |= {} if rid is None else {"rid": rid}
        reading = _Reading(time.monotonic(), max_new_tokens)
        return await self.stream("/v1/completions", body, reading)


ROUTES: dict[str, type[Client]] = {"generate": Client, "openai": OpenAIClient}
"""How a server may be asked: SGLang's own route, or the one that OpenAI's API has."""


class _Reading:
    """The part of one streamed answer that has arrived, checked."""

    def __init__(self, sent_s: float, asked_tokens: int) -> None:
        self._sent_s = sent_s
        self._most_tokens = asked_tokens + MORE_TOKENS
        self._text: list[str] = []
        self._chars = 0
        self._ids: list[int] = []
        self._times: list[float] = []
        self._last_s = 0.0
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._tiers: dict[str, int] | None = None
        self._reason: str | None = None
        self._rid: str | None = None
        self._problem: str | None = None

    def take(self, event: Any) -> None:
        """Adds one event. Raises BadAnswer on what is none; what was taken before stays."""
        if not isinstance(event, dict):
            raise BadAnswer(f"not an answer of /v1/completions: {shown(event)}")
        if "error" in event:
            self._problem = problem_in(event)
            return
        self._rid = part_of(event, "id", str) or self._rid
        said = False
        for choice in part_of(event, "choices", list) or []:
            if not isinstance(choice, dict):
                raise BadAnswer(refusal("choices", choice, "a list of objects"))
            said |= self._take_choice(choice)
        usage = part_of(event, "usage", dict) or {}
        self._count(whole_of(usage, "completion_tokens"), said)
        self._take_prompt(usage)
        self._take_tiers(part_of(event, "sglext", dict) or {})

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        """Whether the choice has a part of the output."""
        self._last_s = time.monotonic() - self._sent_s
        text, ids = choice.get("text") or "", part_of(choice, "token_ids", list) or []
        if not isinstance(text, str):
            raise BadAnswer(refusal("text", text, "a text"))
        if not all(is_whole(token, 0) for token in ids):
            raise BadAnswer(refusal("token_ids", ids, "token ids"))
        self._text.append(text)
        self._chars += len(text)
        if self._chars > MOST_LINE_BYTES:
            raise BadAnswer(f"a text of more than {MOST_LINE_BYTES >> 20} Mi characters")
        self._ids += ids
        reason = choice.get("finish_reason")
        if reason is not None and not isinstance(reason, str):
            raise BadAnswer(refusal("finish_reason", reason, "a text"))
        self._reason = reason or self._reason
        return bool(text or ids)

    def _count(self, counted: int | None, said: bool) -> None:
        """Gives each new token the time of the last event that had a part of the output."""
        known = max(counted or 0, len(self._ids)) or len(self._times) + said
        if known > self._most_tokens:
            raise BadAnswer(f"{known} output tokens, more than were asked for")
        self._times += [self._last_s] * (known - len(self._times))

    def _take_prompt(self, usage: dict[str, Any]) -> None:
        prompt = whole_of(usage, "prompt_tokens")
        self._prompt_tokens = self._prompt_tokens if prompt is None else prompt
        details = part_of(usage, "prompt_tokens_details", dict) or {}
        cached = whole_of(details, "cached_tokens")
        self._cached_tokens = self._cached_tokens if cached is None else cached

    def _take_tiers(self, extension: dict[str, Any]) -> None:
        details = part_of(extension, "cached_tokens_details", dict)
        if details is not None:
            tiers = ("device", "host", "storage")
            self._tiers = {tier: whole_of(details, tier) or 0 for tier in tiers}

    def verdict(self) -> str | None:
        """None when the answer came to its regular end, else what was wrong."""
        if self._problem is not None:
            return self._problem
        if self._reason is None:
            return "the stream ended before the answer did"
        return ABORTED if self._reason == "abort" else None

    def completion(self, error: str | None) -> Completion:
        """The outcome so far. Of a server that says how many tokens were cached and not where, the
        tiers are 0.
        """
        tiers, total = self._tiers or {}, self._cached_tokens
        total = sum(tiers.values()) if total is None else total
        unknown = self._tiers is None and self._cached_tokens is None
        return Completion(
            sent_s=self._sent_s,
            e2e_s=time.monotonic() - self._sent_s,
            output_ids=tuple(self._ids),
            token_times_s=tuple(self._times),
            prompt_tokens=self._prompt_tokens,
            cached=None if unknown else Cached(**tiers, total=total),
            error=error,
            text="".join(self._text),
            rid=self._rid,
        )
