"""One SGLang server seen through HTTP: streamed generation with times per token, cache details,
metrics, flushing.

A request that fails becomes a `Completion` with `error` set, so one failure never loses a run of
hundreds of requests. All methods belong to one asyncio event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sgl_kvtier.errors import BenchError
from sgl_kvtier.outside import is_number, is_whole, parse_json, refusal, shown

ABORTED = "aborted by the server"
"""How the error of a request begins that the server ended, asked to or not."""
MOST_LINE_BYTES = 16 << 20
"""One event of a stream holds all tokens so far: 30 bytes each with their log-probs."""
_MOST_ANSWER_BYTES = 64 << 20
"""Most bytes of any other answer: the metrics of a large server have a few MB."""
_MOST_SAID_BYTES = 64 << 10
MORE_TOKENS = 1024
"""Output tokens beyond those asked for that are more than a miscount."""

KEEP_OPEN_S = 2.0
"""Seconds an idle connection is used again. SGLang's server closes it after 5 s, and a request sent
at that moment would fail.
"""


@dataclass(frozen=True, slots=True)
class Cached:
    """Prompt tokens of one request that came from a cache, by tier, and the total the server counts
    beside them.
    """

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
    """One request's outcome. Times in seconds: `sent_s` on the monotonic clock, the others from
    sending.
    """

    sent_s: float
    e2e_s: float
    output_ids: tuple[int, ...] = ()
    token_times_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached: Cached | None = None
    server_queue_s: float | None = None
    storage_wait_s: float | None = None
    error: str | None = None
    rid: str | None = None
    """The server's name for the request."""
    logprobs: tuple[float, ...] = ()
    """Log-probs of the output tokens, where they were asked for."""
    margins: tuple[float, ...] = ()
    """The lead of each output token's log-prob over that of the next best token, where that was
    asked for.
    """
    text: str = ""
    """The output, where the server sends text and no token ids."""

    def undilated(self, dilation: float) -> Completion:
        """The same on a clock that runs `dilation` times as fast; `sent_s` stays."""

        def faster(seconds: float | None) -> float | None:
            return None if seconds is None else seconds / dilation

        return dataclasses.replace(
            self,
            e2e_s=self.e2e_s / dilation,
            token_times_s=tuple(at / dilation for at in self.token_times_s),
            server_queue_s=faster(self.server_queue_s),
            storage_wait_s=faster(self.storage_wait_s),
        )

    @property
    def answer(self) -> tuple[int, ...] | str:
        """What two servers that answer alike both say: token ids, or text without them."""
        return self.output_ids or self.text

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None when there was none."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two."""
        count = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1) if count > 1 else None

    @property
    def token_gaps_s(self) -> list[float]:
        """Seconds from each output token to the next."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


class Client:
    """Talks to one server. Use as an async context manager; safe for many concurrent requests.

    `admin_key` is the server's --admin-api-key, if it has one. With a `dilation` the server takes
    that many times as long for everything on purpose. Completions are then those of a server that
    does not. `timeout_s` and a replay's gaps are made as much longer.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        admin_key: str | None = None,
        dilation: float = 1.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.dilation = dilation
        timeout_s *= dilation
        self._headers = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # No limit on connections: the number of concurrent sessions is the replay's to decide.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_OPEN_S),
            timeout=self._timeout,
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def reconnect(self) -> None:
        """Forgets all connections. For a server that was started anew on the same port; requests
        under way fail.
        """
        await self.__aexit__()
        await self.__aenter__()

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
        """Greedy generation of exactly `max_new_tokens` tokens, streamed. Never raises for a
        server's or network's failures.

        `rid` names the request for `abort`, `session_id` its session. `priority` is for a server
        that schedules by it. `logprobs` asks for those of the output tokens, `margins` for their
        lead as well. `begun` is set at the first token, `taken` as soon as the server has read the
        request, or the request has failed.
        """
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "stream": True,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
        }
        body |= {} if rid is None else {"rid": rid}
        body |= {} if session_id is None else {"session_id": session_id}
        body |= {} if priority is None else {"priority": priority}
        body |= {"return_logprob": True} if logprobs or margins else {}
        body |= {"top_logprobs_num": 2} if margins else {}
        reading = _Generated(time.monotonic(), max_new_tokens, begun)
        return await self.stream("/generate", body, reading, taken)

    async def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        reading: Reading,
        taken: asyncio.Event | None = None,
    ) -> Completion:
        """Posts a request, and what came of it by `reading` its streamed events. Never raises for a
        server's or network's failures. `taken` is set when it begins to answer, or has failed.
        """
        error: str | None
        # aiohttp does not say what it raises for a wrong answer; a run must not end with it
        try:
            async with self._open().post(self.url + path, json=body) as answer:
                if taken is not None:
                    taken.set()
                if answer.status != 200:
                    error = f"HTTP {answer.status}: {short(await _text(answer, _MOST_SAID_BYTES))}"
                else:
                    async for event in _events(answer.content):
                        reading.take(event)
                    error = reading.verdict()
        except asyncio.TimeoutError:
            error = f"no end after {self._timeout.total:g} s"
        except Exception as problem:
            error = f"{type(problem).__name__}: {short(str(problem))}"
        if taken is not None:
            taken.set()
        done = reading.completion(error)
        return done if self.dilation == 1.0 else done.undilated(self.dilation)

    async def metrics(self) -> Metrics:
        """The server's /metrics. Empty when it was started without --enable-metrics or cannot be
        reached.
        """
        try:
            async with self._open().get(f"{self.url}/metrics") as answer:
                return Metrics.parse(await _text(answer)) if answer.status == 200 else Metrics({})
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return Metrics({})

    async def model_info(self) -> dict[str, Any]:
        """The server's description of its model. Raises BenchError when nothing usable answers."""
        return await self.get_object("/model_info")

    async def get_object(self, path: str) -> dict[str, Any]:
        """The object at this path. Raises BenchError when nothing usable answers."""
        try:
            async with self._open().get(self.url + path) as answer:
                answer.raise_for_status()
                return _object(await _text(answer))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise BenchError(
                f"no server answers at {self.url}{path}: {short(str(error))}. Start one: kvtier "
                "serve MODEL"
            ) from error

    async def flush(self) -> None:
        """Empties the device and host tiers. Raises BenchError when the server refuses, as it does
        while it is working.
        """
        await self._post("/flush_cache?timeout=60", "flush its cache")

    async def clear_storage(self) -> None:
        """Empties the storage tier. Raises BenchError when the server refuses or has none."""
        await self._post("/hicache/storage-backend/clear", "clear its storage")

    async def abort(self, rid: str) -> None:
        """Asks the server to end a request; one it does not know is no mistake. Raises BenchError
        when it refuses.
        """
        await self._post("/abort_request", "abort a request", {"rid": rid, "abort_all": False})

    async def policy(self) -> dict[str, Any]:
        """Settings of the section `policy` in force that a running server may change. Raises
        BenchError when it has no such route.
        """
        answer = await self._post("/kvtier/settings", "say its settings", method="GET")
        try:
            return dict(_object(answer)["settings"]["policy"])
        except (ValueError, KeyError) as error:
            raise BenchError(
                f"the server at {self.url} answered with {shown(answer)}, not with its settings"
            ) from error

    async def set_policy(self, **values: Any) -> None:
        """Changes settings of the section `policy` of the running server. Raises BenchError when it
        refuses them.
        """
        await self._post("/kvtier/settings", f"change {values}", {"policy": values})

    async def set_state(self, values: Mapping[str, float]) -> None:
        """Changes numbers that are no setting (runtime/control.py) in the running server. Raises
        BenchError when one of its processes refuses.
        """
        answer = await self._post(
            "/set_internal_state", "change its settings", {"server_args": dict(values)}
        )
        if "false" in answer:
            raise BenchError(
                f"the server at {self.url} did not change {dict(values)}: see its log for the "
                "reason"
            )

    async def hint(self, session: str, said: Mapping[str, Any]) -> str:
        """Tells a server that looks ahead of a session (docs/manual/lookahead.md): what came of it.
        Raises BenchError when it has no such route.
        """
        answer = await self._post("/kvtier/hint", "take a hint", {"session": session, **said})
        try:
            return str(_object(answer)["result"])
        except (ValueError, KeyError) as error:
            raise BenchError(
                f"the server at {self.url} answered a hint with {shown(answer)}"
            ) from error

    async def set_prefetch_policy(self, backend: str, policy: str) -> None:
        """How long SGLang itself waits for `backend`: best_effort, wait_complete or timeout. Needs
        the admin key.
        """
        body = {"hicache_storage_backend": backend, "hicache_storage_prefetch_policy": policy}
        await self._post("/hicache/storage-backend", "change its prefetch policy", body, "PUT")

    async def _post(
        self, path: str, what: str, body: Mapping[str, Any] | None = None, method: str = "POST"
    ) -> str:
        try:
            async with self._open().request(method, self.url + path, json=body) as answer:
                text = await _text(answer)
                if answer.status == 200:
                    return text
                problem = f"HTTP {answer.status}: {short(text)}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {short(str(error))}"
        raise BenchError(f"the server at {self.url} did not {what}: {problem}")

    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client inside `async with`"
        return self._session


class Metrics:
    """One reading of a server's Prometheus counters and gauges: values by metric name and
    labels.
    """

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
            if not math.isfinite(number):
                continue
            values[match["name"], frozenset(_LABEL.findall(match["labels"] or ""))] = number
        return cls(values)

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[Any]]) -> Metrics:
        """The metrics that `to_json` was called on."""
        return cls({(name, frozenset(labels.items())): value for name, labels, value in rows})

    def to_json(self) -> list[list[Any]]:
        """Name, labels and value of every metric of SGLang's and ours, buckets of histograms left
        out.
        """
        kept = [
            key
            for key in self._values
            if key[0].startswith(_KEPT) and not key[0].endswith("_bucket")
        ]
        return [[name, dict(sorted(labels)), self._values[name, labels]] for name, labels in kept]

    def sums(self, prefix: str) -> dict[str, float]:
        """The sums over all labels of every metric whose name begins with `prefix`."""
        found: dict[str, float] = {}
        for (name, _), value in self._values.items():
            if name.startswith(prefix):
                found[name] = found.get(name, 0.0) + value
        return found

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all samples called `name` whose labels include these; None when there is
        none.
        """
        wanted = set(labels.items())
        found = [
            value for (key, has), value in self._values.items() if key == name and wanted <= has
        ]
        return sum(found) if found else None


_KEPT = ("sglang:", "kvtier:")
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class BadAnswer(ValueError):
    """A server sent no answer of its route. Becomes the error of that request."""


class Reading:
    """The part of one streamed answer that has arrived. Everything in it was checked: a server may
    send anything. What an event of a route holds, `read` says.
    """

    route = ""

    def __init__(
        self, sent_s: float, asked_tokens: int, begun: asyncio.Event | None = None
    ) -> None:
        self._sent_s = sent_s
        self._begun = begun
        self._most_tokens = asked_tokens + MORE_TOKENS
        self._problem: str | None = None
        self.ids: list[int] = []
        self.times: list[float] = []
        self.text: list[str] = []
        self.logprobs: list[float] = []
        self.margins: list[float] = []
        self.prompt_tokens: int | None = None
        self.cached: Cached | None = None
        self.queue_s: float | None = None
        self.storage_wait_s: float | None = None
        self.rid: str | None = None
        self.ended: str | None = None
        """How the answer ended: "abort", or the server's word for a regular end."""
        self.abort_reason = ""

    def read(self, event: dict[str, Any]) -> None:
        """Adds what one event of the route has. Raises BadAnswer."""
        raise NotImplementedError

    def take(self, event: Any) -> None:
        """Adds one event. Raises BadAnswer on what is none; what was taken before stays."""
        if not isinstance(event, dict):
            raise BadAnswer(f"not an answer of {self.route}: {shown(event)}")
        if "error" in event:
            self._problem = _problem_in(event)
        else:
            self.read(event)

    def elapsed_s(self) -> float:
        """Seconds since the request was sent."""
        return time.monotonic() - self._sent_s

    def count(self, tokens: int, at_s: float) -> None:
        """There are `tokens` output tokens now: the new ones came at `at_s`."""
        if tokens > self._most_tokens:
            raise BadAnswer(f"{tokens} output tokens, more than were asked for")
        self.times += [at_s] * (tokens - len(self.times))
        if self._begun is not None and self.times:
            self._begun.set()

    def verdict(self) -> str | None:
        """None when the answer came to its regular end, else what was wrong."""
        if self._problem is not None:
            return self._problem
        if self.ended is None:
            return "the stream ended before the answer did"
        if self.ended == "abort":
            return f"{ABORTED}: {self.abort_reason}" if self.abort_reason else ABORTED
        return None

    def completion(self, error: str | None) -> Completion:
        """The outcome so far."""
        return Completion(
            sent_s=self._sent_s,
            e2e_s=self.elapsed_s(),
            output_ids=tuple(self.ids),
            token_times_s=tuple(self.times),
            prompt_tokens=self.prompt_tokens,
            cached=self.cached,
            server_queue_s=self.queue_s,
            storage_wait_s=self.storage_wait_s,
            error=error,
            rid=self.rid,
            logprobs=tuple(self.logprobs),
            margins=tuple(self.margins),
            text="".join(self.text),
        )


class _Generated(Reading):
    """An answer of SGLang's own route."""

    route = "/generate"

    def read(self, event: dict[str, Any]) -> None:
        meta = part_of(event, "meta_info", dict) or {}
        self._take_tokens(part_of(event, "output_ids", list) or [], meta)
        self.prompt_tokens = whole_of(meta, "prompt_tokens")
        self.rid = part_of(meta, "id", str)
        self.queue_s = _seconds(meta, "queue_time")
        self.storage_wait_s = _seconds(meta, "storage_prefetch_wait")
        total = whole_of(meta, "cached_tokens")
        details = tiers_of(meta) or {}
        self.cached = None if total is None else Cached(**details, total=total)
        reason = part_of(meta, "finish_reason", dict) or {}
        said = reason.get("message", "")
        self.abort_reason = short(said if isinstance(said, str) else shown(said))
        self.ended = part_of(reason, "type", str)

    def _take_tokens(self, ids: list[Any], meta: Mapping[str, Any]) -> None:
        # Each event carries all tokens so far, or with --incremental-streaming-output only the new
        # ones.
        at_s = self.elapsed_s()
        if len(ids) == whole_of(meta, "completion_tokens"):
            del self.ids[len(ids) :]
            ids = ids[len(self.ids) :]
        self.ids += token_ids(ids, "output_ids")
        self.count(len(self.ids), at_s)
        entries = part_of(meta, "output_token_logprobs", list) or []
        if len(entries) == len(self.ids):
            del self.logprobs[len(entries) :]
            entries = entries[len(self.logprobs) :]
        if not all(isinstance(entry, list) and entry and is_number(entry[0]) for entry in entries):
            raise BadAnswer(
                refusal("output_token_logprobs", entries, "lists that begin with a number")
            )
        self.logprobs += [float(entry[0]) for entry in entries]
        self._take_margins(part_of(meta, "output_top_logprobs", list) or [])

    def _take_margins(self, positions: list[Any]) -> None:
        if len(positions) == len(self.ids):
            positions = positions[len(self.margins) :]
        for best in positions:
            pair = [entry[0] for entry in best[:2]] if isinstance(best, list) else []
            if len(pair) < 2 or not all(is_number(value) for value in pair):
                raise BadAnswer(
                    refusal("output_top_logprobs", best, "two lists with a number each")
                )
            self.margins.append(abs(float(pair[0]) - float(pair[1])))


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}


def _problem_in(event: Mapping[str, Any]) -> str:
    """What an event with an error says."""
    detail = event["error"]
    said = detail.get("message", detail) if isinstance(detail, dict) else detail
    return short(said if isinstance(said, str) else shown(said))


def part_of(data: Mapping[str, Any], name: str, kind: type) -> Any:
    """An object, a list or a text in an answer; None where there is none. Raises BadAnswer on
    another.
    """
    value = data.get(name)
    if value is not None and not isinstance(value, kind):
        raise BadAnswer(refusal(name, value, _KINDS[kind]))
    return value


def whole_of(data: Mapping[str, Any], name: str) -> int | None:
    """A count in an answer; None where there is none. Raises BadAnswer on what is no count."""
    value = data.get(name)
    if value is not None and not is_whole(value, 0):
        raise BadAnswer(refusal(name, value, "a whole number of at least 0"))
    return value


def _seconds(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is not None and not is_number(value):
        raise BadAnswer(refusal(name, value, "a number of seconds"))
    return value


def tiers_of(data: Mapping[str, Any]) -> dict[str, int] | None:
    """The cached tokens of each tier in an answer; None where it does not name tiers."""
    details = part_of(data, "cached_tokens_details", dict)
    if details is None:
        return None
    return {tier: whole_of(details, tier) or 0 for tier in ("device", "host", "storage")}


def token_ids(ids: list[Any], name: str) -> list[int]:
    """The ids if they are token ids. Raises BadAnswer."""
    if not all(is_whole(token, 0) for token in ids):
        raise BadAnswer(refusal(name, ids, "token ids"))
    return ids


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The decoded `data:` lines of an event stream. Splits lines itself: one may be longer than
    aiohttp's limit. Raises BadAnswer on a line longer than `MOST_LINE_BYTES`, ValueError on one
    that is not JSON.
    """
    rest = bytearray()
    async for piece in stream.iter_any():
        first, *others = piece.split(b"\n")
        rest += first
        for line in others:
            if (event := _data(rest)) is not None:
                yield parse_json(event)
            rest = bytearray(line)
        if len(rest) > MOST_LINE_BYTES:
            raise BadAnswer(f"a line of more than {MOST_LINE_BYTES >> 20} MiB")


def _data(line: bytearray) -> bytes | None:
    """The data of an event's line, or None when it is another line."""
    text = bytes(line[5:]).strip() if line.startswith(b"data:") else b""
    return None if text in (b"", b"[DONE]") else text


async def _text(answer: aiohttp.ClientResponse, most: int = _MOST_ANSWER_BYTES) -> str:
    """The answer's text, cut after `most` bytes; bytes that are not UTF-8 are replaced."""
    read = bytearray()
    async for piece in answer.content.iter_any():
        read += piece
        if len(read) > most:
            break
    return read[:most].decode("utf-8", "replace")


def _object(text: str) -> dict[str, Any]:
    """The JSON object in an answer. Raises BadAnswer, ValueError."""
    data = parse_json(text)
    if not isinstance(data, dict):
        raise BadAnswer(f"an object is expected, not {shown(data)}")
    return data


def short(text: str, most: int = 300) -> str:
    """A server's words in one line of at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
