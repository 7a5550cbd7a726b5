"""Replay of sessions, each waiting for its answer and its tool before it asks again.

Closed loop: N sessions at a time, the next begins when one ends. Open loop: sessions arrive at a
rate, however many are under way.

Outputs are fed back. With "recorded" (the default) the next prompt continues with the trace's own
output. So every server gets exactly the same prompts and arms can be compared request by request;
the server's answer is only measured. With "server" its own tokens are put into the context, as a
real agent would. Two servers that answer differently then drift apart. Generated tokens are the
same number in both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiofiles

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside.client import Client, Completion
from sgl_kvtier.lab.workload.encoder import Encoder, PromptTokens, output_tokens
from sgl_kvtier.lab.workload.session import Context, Message, Session

FEEDBACK = ("recorded", "server")


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay. Gaps are the recorded waits between a response and the next request.
    With `pause_s` each is that long instead, and a session's first request does not wait.

    `concurrency` sessions run at a time. With a `rate`, in sessions per second, there is no such
    limit: they arrive at random, as `arrivals` says.
    """

    concurrency: int | None = 8
    feedback: str = "recorded"
    gap_scale: float = 1.0
    gap_cap_s: float | None = None
    most_output_tokens: int | None = None
    pause_s: float | None = None
    rate: float | None = None
    seed: int = 0
    """Of the arrivals."""
    route: str = "generate"
    """How a server is asked: a name of `openai.ROUTES`."""
    returning: bool = False
    """Sessions come back: their first request was served before (`serve_first`), so each begins
    with its second, without waiting.
    """

    def wait_s(self, turn: int, recorded_s: float) -> float:
        """How long to wait before a turn, counted from 1, where the trace waited `recorded_s`."""
        if self.pause_s is None:
            return self.gap_s(recorded_s)
        return self.pause_s if turn > 1 else 0.0

    def gap_s(self, recorded_s: float) -> float:
        """How long to wait where the trace waited `recorded_s`; clocks that were stepped back count
        as no wait.
        """
        scaled = max(0.0, recorded_s) * self.gap_scale
        return scaled if self.gap_cap_s is None else min(scaled, self.gap_cap_s)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a replay: which session and turn it was (turns count from 1), and what came of
    it.
    """

    session: str
    turn: int
    completion: Completion

    def to_json(self, **labels: Any) -> dict[str, Any]:
        """One line of the log: labels, the request, milliseconds, tokens."""
        done = self.completion
        return {
            **labels,
            "session": self.session,
            "turn": self.turn,
            "ttft_ms": milliseconds(done.ttft_s),
            "tpot_ms": milliseconds(done.tpot_s),
            "e2e_ms": milliseconds(done.e2e_s),
            "queue_ms": milliseconds(done.server_queue_s),
            "storage_wait_ms": milliseconds(done.storage_wait_s),
            "prompt_tokens": done.prompt_tokens,
            "output_tokens": len(done.token_times_s),
            "cached": None if done.cached is None else dataclasses.asdict(done.cached),
            "output_ids": list(done.output_ids),
            "output_text": done.text or None,
            "error": done.error,
        }


class SampleLog:
    """A JSON Lines file that has every finished request at once, so that an interrupted run keeps
    what it measured.
    """

    def __init__(self, path: Path | None, **labels: Any) -> None:
        self._path = path
        self._labels = labels
        self._lock = asyncio.Lock()

    async def write(self, sample: Sample) -> None:
        """Appends one line; does nothing without a path."""
        if self._path is None:
            return
        line = json.dumps(sample.to_json(**self._labels)) + "\n"
        async with self._lock, aiofiles.open(self._path, "a", encoding="utf-8") as file:
            await file.write(line)


async def replay(
    sessions: Sequence[Session],
    client: Client,
    encoder: Encoder,
    options: ReplayOptions,
    samples: list[Sample],
    *,
    log: SampleLog | None = None,
    on_done: Callable[[Sample], object] | None = None,
) -> None:
    """Replays all sessions in their order, as many at a time or at the rate that `options` say, and
    puts every request into `samples`.

    `samples` is the caller's, so what was measured before a cancellation is not lost. A failed
    request counts as one and its session goes on with the recorded output.
    """

    async def keep(sample: Sample) -> None:
        samples.append(sample)
        if log is not None:
            await log.write(sample)
        if on_done is not None:
            on_done(sample)

    def play(session: Session) -> Coroutine[Any, Any, None]:
        return _replay_session(session, client, encoder, options, keep)

    if options.rate is None:
        work = _in_turn(sessions, options.concurrency or len(sessions), play)
    else:
        times = arrivals(len(sessions), options.rate, options.seed)
        work = _arriving(sessions, [client.dilation * at_s for at_s in times], play)
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve_first(sessions: Sequence[Session], client: Client, encoder: Encoder) -> None:
    """Sends the first request of every session, one after the other, for what a server stores of
    it. Raises BenchError when one fails.
    """
    for session in sessions:
        context, tokens = Context(session), PromptTokens(encoder)
        if context.next_call() is None:
            continue
        tokens.show(context.prompt)
        done = await client.generate(tokens.ids.tolist(), 1)
        if done.error is not None:
            raise BenchError(f"{session.session_id}: its first request failed: {done.error}")


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When `count` sessions arrive, in seconds: the first at 0, the others after exponentially
    distributed pauses of 1/`rate` seconds on average. The same in every process.
    """
    drawn = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] - math.log1p(-drawn.random()) / rate)
    return times[:count]


_Play = Callable[[Session], Coroutine[Any, Any, None]]


def _in_turn(
    sessions: Sequence[Session], at_a_time: int, play: _Play
) -> list[Coroutine[Any, Any, None]]:
    waiting = deque(sessions)

    async def worker() -> None:
        while waiting:
            await play(waiting.popleft())

    return [worker() for _ in range(min(at_a_time, len(sessions)))]


def _arriving(
    sessions: Sequence[Session], times_s: Sequence[float], play: _Play
) -> list[Coroutine[Any, Any, None]]:
    async def arrive(session: Session, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await play(session)

    return [arrive(session, at_s) for session, at_s in zip(sessions, times_s, strict=True)]


async def _replay_session(
    session: Session,
    client: Client,
    encoder: Encoder,
    options: ReplayOptions,
    keep: Callable[[Sample], Any],
) -> None:
    context = Context(session)
    tokens = PromptTokens(encoder)
    turn = 1 if options.returning and context.next_call() is not None else 0
    arrived = False
    while (call := context.next_call()) is not None:
        turn += 1
        if arrived or not options.returning:
            await asyncio.sleep(options.wait_s(turn, call.gap_s) * client.dilation)
        arrived = True
        tokens.show(context.prompt)
        wanted = output_tokens(call, encoder, options.most_output_tokens)
        done = await client.generate(tokens.ids.tolist(), wanted)
        # A hash-only trace has no recorded output to replace: there the next prompt's blocks hold
        # it already.
        if options.feedback == "server" and done.error is None and call.output is not None:
            context.answer(_message(done))
        await keep(Sample(session.session_id, turn, done))


def _message(done: Completion) -> Message:
    if done.output_ids:
        return Message("assistant", token_ids=done.output_ids)
    return Message("assistant", text=done.text)


def milliseconds(seconds: float | None) -> float | None:
    """Seconds as milliseconds; None stays None."""
    return None if seconds is None else seconds * 1000.0


def prompt_sizes(
    sessions: Sequence[Session], encoder: Encoder, most_output: int | None = None
) -> list[Mapping[str, Any]]:
    """One row per session: its calls, its first, last and longest prompt, and its prompt and output
    tokens. Tokens are counted as they will be sent.
    """
    rows: list[Mapping[str, Any]] = []
    for session in sessions:
        tokens, prompts, outputs = PromptTokens(encoder), [], []
        for call, prompt in Context(session).calls():
            tokens.show(prompt)
            prompts.append(len(tokens))
            outputs.append(output_tokens(call, encoder, most_output))
        rows.append(
            {
                "session": session.session_id,
                "calls": len(prompts),
                "first_prompt_tokens": prompts[0],
                "last_prompt_tokens": prompts[-1],
                "longest_tokens": max(p + o for p, o in zip(prompts, outputs, strict=True)),
                "prompt_tokens": sum(prompts),
                "output_tokens": sum(outputs),
            }
        )
    return rows
