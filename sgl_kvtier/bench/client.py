"""One SGLang server seen through HTTP: streamed generation with times per token, cache details, metrics, flushing.

A request that fails becomes a `Completion` with `error` set: a run of hundreds of requests is never lost to one of them.
All methods belong to one asyncio event loop.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sgl_kvtier.errors import BenchError

ABORTED = "aborted by the server"
"""How the error of a request begins that the server ended, asked to or not."""


@dataclass(frozen=True, slots=True)
class Cached:
    """Prompt tokens of one request that came from a cache, by tier, and the total the server counts beside them."""

    device: int = 0
    host: int = 0
    storage: int = 0
    total: int = 0

    @property
    def sums_up(self) -> bool:
        """True when the tiers add up to the total."""
        return self.device + self.host + self.storage == self.total


@dataclass(frozen=True, slots=True)
class Completion:
    """One request's outcome. Times in seconds: `sent_s` on the monotonic clock, the others from sending."""

    sent_s: float
    e2e_s: float
    output_ids: tuple[int, ...] = ()
    token_times_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached: Cached | None = None
    server_queue_s: float | None = None
    storage_wait_s: float | None = None
    error: str | None = None
    logprobs: tuple[float, ...] = ()
    """Of the output tokens, where they were asked for."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None when there was none."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two."""
        count = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1) if count > 1 else None


class Client:
    """Talks to one server. Use as an async context manager; safe for many concurrent requests.

    `admin_key` is what the server was given as --admin-api-key, if it was.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, admin_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # No limit on connections: the number of concurrent sessions is the replay's to decide.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def reconnect(self) -> None:
        """Forgets all connections. For a server that was started anew on the same port; requests under way fail."""
        await self.__aexit__()
        await self.__aenter__()

    async def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        logprobs: bool = False,
    ) -> Completion:
        """Greedy generation of exactly `max_new_tokens` tokens, streamed. Never raises for what a server or network does.

        `rid` names the request for `abort`, `session_id` the session it is of; `logprobs` asks for those of the output tokens.
        """
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        }
        body |= {} if rid is None else {"rid": rid}
        body |= {} if session_id is None else {"session_id": session_id}
        body |= {"return_logprob": True} if logprobs else {}
        reading = _Reading(time.monotonic())
        error: str | None
        try:
            async with self._open().post(f"{self.url}/generate", json=body) as answer:
                if answer.status != 200:
                    error = f"HTTP {answer.status}: {_short(await answer.text())}"
                else:
                    async for event in _events(answer.content):
                        reading.take(event)
                    error = reading.verdict()
        except asyncio.TimeoutError:
            error = f"no end after {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            error = f"{type(problem).__name__}: {_short(str(problem))}"
        return reading.completion(error)

    async def metrics(self) -> Metrics:
        """The server's /metrics. Empty when it was started without --enable-metrics or cannot be reached."""
        try:
            async with self._open().get(f"{self.url}/metrics") as answer:
                return Metrics.parse(await answer.text()) if answer.status == 200 else Metrics({})
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return Metrics({})

    async def model_info(self) -> dict[str, Any]:
        """What the server says about its model. Raises BenchError when nothing usable answers."""
        try:
            async with self._open().get(f"{self.url}/model_info") as answer:
                answer.raise_for_status()
                return dict(await answer.json())
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise BenchError(
                f"no SGLang server answers at {self.url}: {_short(str(error))}. Start one: kvtier serve MODEL"
            ) from error

    async def flush(self) -> None:
        """Empties the device and host tiers. Raises BenchError when the server refuses, as it does while it is working."""
        await self._post("/flush_cache?timeout=60", "flush its cache")

    async def clear_storage(self) -> None:
        """Empties the storage tier. Raises BenchError when the server refuses or has none."""
        await self._post("/hicache/storage-backend/clear", "clear its storage")

    async def abort(self, rid: str) -> None:
        """Asks the server to end a request; one it does not know is no mistake. Raises BenchError when it refuses."""
        await self._post("/abort_request", "abort a request", {"rid": rid, "abort_all": False})

    async def set_state(self, values: Mapping[str, float]) -> None:
        """Changes settings of the running server. Raises BenchError when one of its processes refuses."""
        answer = await self._post("/set_internal_state", "change its settings", {"server_args": dict(values)})
        if "false" in answer:
            raise BenchError(f"the server at {self.url} did not change {dict(values)}: see its log for the reason")

    async def hint(self, session: str, said: Mapping[str, Any]) -> str:
        """Tells a server that looks ahead of a session (docs/hints.md): what came of it. Raises BenchError when it has no such route."""
        answer = await self._post("/kvtier/hint", "take a hint", {"session": session, **said})
        return str(json.loads(answer)["result"])

    async def set_prefetch_policy(self, backend: str, policy: str) -> None:
        """How long SGLang itself waits for `backend`: best_effort, wait_complete or timeout. Needs the admin key."""
        body = {"hicache_storage_backend": backend, "hicache_storage_prefetch_policy": policy}
        await self._post("/hicache/storage-backend", "change its prefetch policy", body, "PUT")

    async def _post(self, path: str, what: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> str:
        try:
            async with self._open().request(method, self.url + path, json=body) as answer:
                text = await answer.text()
                if answer.status == 200:
                    return text
                problem = f"HTTP {answer.status}: {_short(text)}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {_short(str(error))}"
        raise BenchError(f"the server at {self.url} did not {what}: {problem}")

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client inside `async with`"
        return self._session


class Metrics:
    """One reading of a server's Prometheus counters and gauges: values by metric name and labels."""

    def __init__(self, values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]) -> None:
        self._values = dict(values)

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """From the exposition format. Lines it cannot read are left out."""
        values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match is None:
                continue
            try:
                number = float(match["value"])
            except ValueError:
                continue
            values[match["name"], frozenset(_LABEL.findall(match["labels"] or ""))] = number
        return cls(values)

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[Any]]) -> Metrics:
        """What `to_json` gave."""
        return cls({(name, frozenset(labels.items())): value for name, labels, value in rows})

    def to_json(self, prefixes: tuple[str, ...]) -> list[list[Any]]:
        """Name, labels and value of every metric whose name begins so, buckets of histograms left out."""
        kept = [key for key in self._values if key[0].startswith(prefixes) and not key[0].endswith("_bucket")]
        return [[name, dict(sorted(labels)), self._values[name, labels]] for name, labels in kept]

    def sums(self, prefix: str) -> dict[str, float]:
        """The sums over all labels of every metric whose name begins with `prefix`."""
        found: dict[str, float] = {}
        for (name, _), value in self._values.items():
            if name.startswith(prefix):
                found[name] = found.get(name, 0.0) + value
        return found

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all samples called `name` whose labels include these; None when there is none."""
        wanted = set(labels.items())
        found = [value for (key, has), value in self._values.items() if key == name and wanted <= has]
        return sum(found) if found else None


_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class _Reading:
    """What has arrived of one streamed answer."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._ids: list[int] = []
        self._times: list[float] = []
        self._logprobs: list[float] = []
        self._meta: dict[str, Any] = {}
        self._problem: str | None = None

    def take(self, event: Any) -> None:
        if not isinstance(event, dict):
            self._problem = f"not an answer of /generate: {_short(str(event))}"
            return
        if "error" in event:
            detail = event["error"]
            self._problem = _short(str(detail.get("message", detail) if isinstance(detail, dict) else detail))
            return
        now = time.monotonic() - self._sent_s
        self._meta = event.get("meta_info") or {}
        ids = event.get("output_ids") or []
        # Each event carries all tokens so far, or with --incremental-streaming-output only the new ones.
        whole = len(ids) == self._meta.get("completion_tokens")
        self._ids = list(ids) if whole else self._ids + list(ids)
        self._times += [now] * (len(self._ids) - len(self._times))
        values = [float(entry[0]) for entry in self._meta.get("output_token_logprobs") or []]
        self._logprobs = values if len(values) == len(self._ids) else self._logprobs + values

    def verdict(self) -> str | None:
        """None when the answer came to its regular end, else what was wrong."""
        if self._problem is not None:
            return self._problem
        reason = self._meta.get("finish_reason")
        if not reason:
            return "the stream ended before the answer did"
        if reason.get("type") == "abort":
            return f"{ABORTED}: {_short(str(reason.get('message', '')))}"
        return None

    def completion(self, error: str | None) -> Completion:
        return Completion(
            sent_s=self._sent_s,
            e2e_s=time.monotonic() - self._sent_s,
            output_ids=tuple(self._ids),
            token_times_s=tuple(self._times),
            prompt_tokens=self._meta.get("prompt_tokens"),
            cached=_cached(self._meta),
            server_queue_s=self._meta.get("queue_time"),
            storage_wait_s=self._meta.get("storage_prefetch_wait"),
            error=error,
            logprobs=tuple(self._logprobs),
        )


def _cached(meta: Mapping[str, Any]) -> Cached | None:
    total = meta.get("cached_tokens")
    if total is None:
        return None
    details = meta.get("cached_tokens_details") or {}
    tiers = {tier: int(details.get(tier) or 0) for tier in ("device", "host", "storage")}
    return Cached(**tiers, total=int(total))


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The decoded `data:` lines of an event stream. Splits lines itself: one may be longer than aiohttp's limit."""
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() not in (b"", b"[DONE]"):
                yield json.loads(line[5:])


def _short(text: str, most: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
