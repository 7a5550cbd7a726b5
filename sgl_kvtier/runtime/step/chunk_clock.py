"""Measures how long prefill batches take, from launch to the end of their forward.

On a CPU a forward has ended when SGLang's `run_batch` returns. On an accelerator, events on the
forward stream mark its start and end. They are read when the batch's result is processed, which
waits for them anyway. Scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvtier.policy.messages import ChunkDone, ChunkStarted
from sgl_kvtier.runtime.sglang import step
from sgl_kvtier.types import Span


@dataclass(frozen=True)
class Chunk:
    """One request's share of a prefill batch. While it runs, `at` is the launch and `seconds` None;
    after that, `at` is the end and `seconds` the duration.
    """

    rid: str
    tokens: Span
    shared_tokens: int
    at: float
    seconds: float | None = None

    def fact(self, at: float, seconds: float) -> ChunkStarted | ChunkDone:
        """The planner's fact, with the times that all ranks agreed on."""
        if self.seconds is None:
            return ChunkStarted(self.rid, self.tokens, at)
        return ChunkDone(self.rid, self.tokens, seconds, at, self.shared_tokens)


class _Timed:
    """One prefill batch in flight."""

    def __init__(self, chunks: list[tuple[str, Span, int]]) -> None:
        self.chunks = chunks
        self.started = time.monotonic()
        self.events: tuple[Any, Any] | None = None
        self.noted = False
        self.whole = True
        self.stream: Any = None


class ChunkClock:
    """Reports chunks as they start and end."""

    def __init__(self, note: Callable[[Chunk, bool], bool]) -> None:
        """`note(chunk, follows)` is called at a launch and at an end; at an end, `follows` says
        whether the launch was reported. It returns whether it reports this one.
        """
        self._note = note
        self._under_way: dict[int, _Timed] = {}

    def launch(self, batch: Any, stream: Any = None) -> _Timed:
        """Called before the launch; `stream` is an accelerator's forward stream, None on a CPU."""
        # Tokens that requests decode in this step count neither as chunks nor as shared: on a busy
        # server no other chunks could be learned from. Their time goes into a chunk's fixed cost.
        count = len(batch.reqs) - len(step.decoded_in(batch))
        tokens = sum(map(int, batch.extend_lens[:count]))
        chunks = [
            (req.rid, Span(prefix, prefix + length), tokens - length)
            for req, prefix, length in zip(
                batch.reqs[:count], batch.prefix_lens, batch.extend_lens, strict=False
            )
        ]
        timed = _Timed(chunks)
        if stream is not None:
            module = torch.get_device_module(stream.device)
            timed.events = (module.Event(enable_timing=True), module.Event(enable_timing=True))
            timed.events[0].record(stream)
            timed.stream = stream
        for rid, span, shared in chunks:
            timed.noted = self._note(Chunk(rid, span, shared, timed.started), False) or timed.noted
        return timed

    def launched(self, timed: _Timed, batch: Any, whole: bool = True) -> None:
        """Called after the launch; on a CPU the batch has ended. `whole` is False if its duration
        does not match its tokens: it is then reported as 0 seconds, from which nothing is learned.
        """
        timed.whole = whole
        if timed.events is None:
            now = time.monotonic()
            self._end(timed, now, now - timed.started if whole else 0.0)
            return
        timed.events[1].record(timed.stream)
        self._under_way[batch.forward_iter] = timed

    def processed(self, batch: Any) -> None:
        """Called after a batch's result was processed: its forward has ended."""
        timed = self._under_way.pop(batch.forward_iter, None)
        if timed is not None and timed.events is not None:
            # A pipeline stage that does not wait for the result of a middle chunk has not waited
            # for its forward either. The end is reported with 0 seconds all the same, since all
            # ranks have to report equally often.
            begin, end = timed.events
            learns = timed.whole and end.query()
            self._end(timed, time.monotonic(), begin.elapsed_time(end) / 1e3 if learns else 0.0)

    def _end(self, timed: _Timed, now: float, seconds: float) -> None:
        for rid, span, shared in timed.chunks:
            self._note(Chunk(rid, span, shared, now, seconds), timed.noted)
