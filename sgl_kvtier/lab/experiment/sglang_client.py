"""`kvtier compare --harness sglang`: SGLang's own benchmark client sends the load.

It is given the sessions as its data set agentic-trace: new messages of each turn, sent by
/v1/chat/completions behind those before and the server's own answers. It has no pauses between
turns and one output length. Our own client sends the same conversations the same way, as the
control. Its result has no times of single requests but TTFT and the gaps between chunks, so when a
request was sent follows from those before it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.harness import OtherClient
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.experiment.rounds import Replaying
from sgl_kvtier.lab.outside.client import Cached, Client, Completion
from sgl_kvtier.lab.outside.openai import ChatClient
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample, SampleLog
from sgl_kvtier.lab.workload.agentic import to_document
from sgl_kvtier.lab.workload.encoder import ByteEncoder
from sgl_kvtier.lab.workload.session import Append, Call, Edit, Message, Session

Turn = Mapping[str, Any]
"""A turn of agentic-trace: its new `messages`, and the recorded `output`."""

_RESULT, _STEADY = "result.jsonl", "steady.jsonl"
_PEAK_SHARE = 0.8
"""Steady is the longest time with this share of the requests that ran at once at most."""
_TEMPLATE_TOKENS = 4
"""Tokens that the chat template of our models puts around a message, beside its role's letters."""


@dataclass
class ChatReplaying(Replaying):
    """The work of replaying sessions as chats, sent by our own client. Raises BenchError where a
    session cannot be told as one, and TraceError where the trace holds no text.
    """

    chats: Sequence[Sequence[Turn]] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.options.most_output_tokens is None:
            raise BenchError(
                "SGLang's client generates as many tokens for every request: --max-output-tokens N"
            )
        self.chats = chats_of(self.load)
        first = len(self.chats) if self.options.returning else 0
        self.steps = sum(map(len, self.chats)) - first

    async def prepare(self, client: Client) -> bool:
        """Where sessions return: what each was asked first. Raises BenchError when one fails."""
        assert isinstance(client, ChatClient), "its route is the one that SGLang's client asks by"
        if self.options.returning:
            for session, turns in zip(self.load.sessions, self.chats, strict=True):
                done = await client.chat(turns[0]["messages"], 1)
                if done.error is not None:
                    raise BenchError(
                        f"{session.session_id}: its first request failed: {done.error}"
                    )
        return self.options.returning

    @property
    def measured(self) -> list[list[list[Mapping[str, str]]]]:
        """The new messages of each turn that is measured, for every session."""
        if not self.options.returning:
            return [[turn["messages"] for turn in turns] for turns in self.chats]
        found = []
        for first, second, *others in self.chats:
            said = [{"role": "assistant", "content": first["output"]}] if "output" in first else []
            begin = [*first["messages"], *said, *second["messages"]]
            found.append([begin, *(turn["messages"] for turn in others)])
        return found

    async def measure(self, client: Client, one: Round, advance: Callable[[], None]) -> None:
        """All sessions."""
        assert isinstance(client, ChatClient), "its route is the one that SGLang's client asks by"
        begins_s = arrivals(len(self.chats), self.options)
        places = asyncio.Semaphore(self.options.concurrency or len(self.chats))
        log = SampleLog(self.log_path, arm=one.arm, round=one.number)

        async def play(place: int, turns: Sequence[Sequence[Mapping[str, str]]]) -> None:
            await asyncio.sleep(begins_s[place] * client.dilation)
            async with places:
                history: list[Mapping[str, str]] = []
                for turn, new in enumerate(turns, 1 + self.options.returning):
                    history += new
                    done = await client.chat(history, self.options.most_output_tokens or 1)
                    history.append({"role": "assistant", "content": done.text})
                    sample = Sample(self.load.sessions[place].session_id, turn, done)
                    one.samples.append(sample)
                    await log.write(sample)
                    advance()

        tasks = [asyncio.create_task(play(*chat)) for chat in enumerate(self.measured)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class SGLangReplaying(OtherClient, ChatReplaying):
    """The same by SGLang's own client."""

    program: ClassVar[Sequence[str]] = (
        sys.executable,
        "-m",
        "sglang.benchmark.steady_state_serving",
    )
    name = "sglang"
    keeps = (_RESULT, _STEADY)
    counted = "requests"  # it says nothing of single requests before the end

    @property
    def version(self) -> str:  # type: ignore[override]
        """The release of the SGLang that is installed."""
        try:
            return version("sglang")
        except PackageNotFoundError:
            return "unknown"

    def environment(self) -> dict[str, str]:
        """Ours; it would look up the name of the model otherwise."""
        return {**os.environ, "HF_HUB_OFFLINE": "1"}

    async def command(self, client: Client, folder: Path) -> list[str]:
        """SGLang's client, and the file of what it sends."""
        options, asked = self.options, folder / "sessions.json"
        turns = [[{"messages": new} for new in chat] for chat in self.measured]
        asked.write_text(json.dumps({"conversations": turns}), encoding="utf-8")
        model = (await client.model_info())["id"]
        goodput_ms = 2000.0 * client.dilation
        return [
            *(*self.program, "--steady-state-concurrency-ratio", str(_PEAK_SHARE)),
            *("--steady-state-output-file", _STEADY, "--goodput", f"ttft:{goodput_ms:g}"),
            *("--backend", "sglang-oai-chat", "--base-url", client.url),
            *("--model", self.setup.model_path, "--served-model-name", model),
            *("--tokenizer", self.setup.model_path, "--ready-check-timeout-sec", "0"),
            *("--dataset-name", "agentic-trace", "--dataset-path", str(asked)),
            *("--num-prompts", str(len(turns)), "--seed", str(options.seed)),
            *("--sharegpt-output-len", str(options.most_output_tokens)),
            *("--max-concurrency", str(options.concurrency or len(turns))),
            *(
                ()
                if options.rate is None
                else ("--request-rate", repr(options.rate / client.dilation))
            ),
            *("--warmup-requests", "0", "--cache-report", "--disable-tqdm"),
            *("--output-details", "--output-file", _RESULT),
        ]

    def samples(self, folder: Path, dilation: float) -> list[Sample]:
        """Those of its result. Raises BenchError where it wrote none that can be read."""
        path = folder / _RESULT
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            ended_s = time.monotonic() - (time.time() - path.stat().st_mtime)
            answers = list(_answers(result, dilation))
            began_s = ended_s - float(result["duration"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise BenchError(
                f"the result of SGLang's client cannot be read: {path}: {error}"
            ) from error
        sizes = [len(chat) for chat in self.measured]
        if len(answers) != sum(sizes):
            raise BenchError(
                f"SGLang's client has {len(answers)} of {sum(sizes)} requests in {path}"
            )
        found, left = [], iter(answers)
        free_s = [0.0] * (self.options.concurrency or len(sizes))
        begins_s = arrivals(len(sizes), self.options)
        for place, (session, count) in enumerate(zip(self.load.sessions, sizes, strict=True)):
            at_s = max(begins_s[place], heapq.heappop(free_s))
            for turn, done in enumerate(itertools.islice(left, count), 1 + self.options.returning):
                sent = replace(done, sent_s=began_s + at_s * dilation)
                found.append(Sample(session.session_id, turn, sent))
                at_s += done.e2e_s
            heapq.heappush(free_s, at_s)
        return sorted(found, key=lambda sample: sample.completion.sent_s)


def _answers(result: Mapping[str, Any], dilation: float) -> Iterator[Completion]:
    """The requests of a result in their order; times are divided by the dilation."""
    names = ("ttfts", "itls", "output_lens", "input_lens", "generated_texts", "errors")
    tiers = result["cached_tokens_details"]
    rows = zip(*(result[name] for name in names), result["cached_tokens"], tiers, strict=True)
    for ttft_s, gaps_s, tokens, prompt, text, error, cached, details in rows:
        times = [*itertools.accumulate(gaps_s, initial=ttft_s)] if tokens else []
        # A chunk may have several tokens, and the last ones may be no text.
        times = (times + times[-1:] * tokens)[:tokens]
        parts = {name: (details or {}).get(name) or 0 for name in ("device", "host", "storage")}
        done = Completion(
            sent_s=0.0,
            e2e_s=ttft_s + sum(gaps_s),
            token_times_s=tuple(times),
            prompt_tokens=prompt,
            cached=Cached(**parts, total=cached),
            text=text,
            error=error or (None if tokens else "there was no answer"),
        )
        yield done.undilated(dilation)


def arrivals(count: int, options: ReplayOptions) -> list[float]:
    """When sessions arrive, in seconds, as SGLang's client draws it: numpy's exponential pauses."""
    if options.rate is None:
        return [0.0] * count
    drawn = np.random.RandomState(options.seed).exponential(1.0 / options.rate, count - 1)
    return [0.0, *(float(at_s) for at_s in np.cumsum(drawn))]


def chats_of(load: Load) -> list[list[Turn]]:
    """The sessions as conversations of agentic-trace. For our own models, the tokenizer of which has
    a token for each byte, a message is letters, as many as it has tokens in the load, with what the
    chat template adds. Raises BenchError where a session replaces what was sent.
    """
    sessions = load.sessions
    if isinstance(load.encoder, ByteEncoder):
        sessions = [_in_letters(session, load.encoder) for session in sessions]
    for session in sessions:
        if any(isinstance(event, Edit) for event in session.events):
            raise BenchError(
                f"{session.session_id} replaces what was sent before, and SGLang's client only "
                "adds to it: take another --trace"
            )
    return to_document(sessions, load.encoder)["conversations"]


def _in_letters(session: Session, encoder: ByteEncoder) -> Session:
    def told(message: Message) -> Message:
        ids = np.asarray(encoder.encode(message))
        role = {"tools": "system", "tool": "user"}.get(message.role, message.role)
        count = max(1, len(ids) - len(role) - _TEMPLATE_TOKENS)
        text = (ids[-count:] % 26 + ord("a")).astype(np.uint8).tobytes().decode("ascii")
        return Message(role, text)

    def heard(event: Any) -> Any:
        if isinstance(event, Append):
            return Append(told(event.message))
        if isinstance(event, Call) and event.output is not None:
            return replace(event, output=told(event.output))
        return event

    tools = None if session.tools is None else told(session.tools)
    return replace(session, tools=tools, events=tuple(map(heard, session.events)))
