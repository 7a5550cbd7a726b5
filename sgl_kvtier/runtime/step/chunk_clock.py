"""How long prefill batches take: from launch to the end of the forward, per batch.

On a CPU a forward has ended when SGLang's `run_batch` returns. On an accelerator its ends are
events on the forward stream, read when the batch's result is processed, which waits for them
anyway. Scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvtier.policy.messages import ChunkDone, ChunkStarted
from sgl_kvtier.types import Span


@dataclass(frozen=True)
class Chunk:
    """One request's share of a prefill batch, launched at `started` and over at `ended`; None while
    it runs.
    """

    rid: str
    tokens: Span
    shared_tokens: int
    at: float
    seconds: float | None = None

    def fact(self, at: float, seconds: float) -> ChunkStarted | ChunkDone:
        """The fact for the planner, with the times all ranks agreed on."""
        if self.seconds is None:
            return ChunkStarted(self.rid, self.tokens, at)
        return ChunkDone(self.rid, self.tokens, seconds, at, self.shared_tokens)


class _Timed:
    """One prefill batch under way."""

    def __init__(self, chunks: list[tuple[str, Span, int]]) -> None:
        self.chunks = chunks
        self.started = time.monotonic()
        self.events: tuple[Any, Any] | None = None
        self.noted = False
        self.whole = True
        self.stream: Any = None


class ChunkClock:
    """Notes chunks as they start and end."""

    def __init__(self, note: Callable[[Chunk, bool], bool]) -> None:
        """`note` takes a chunk and, at its end, whether its launch was noted; it returns whether it
        notes this one.
        """
        self._note = note
        self._under_way: dict[int, _Timed] = {}

    def launch(self, batch: Any, stream: Any = None) -> _Timed:
        """Before a prefill batch is launched on an accelerator's forward stream, or on a CPU."""
        tokens = int(batch.extend_num_tokens)
        chunks = [
            (req.rid, Span(prefix, prefix + length), tokens - length)
            for req, prefix, length in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, strict=False
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
        """After it was launched: on a CPU it has ended. Not `whole`: its seconds are not those of
        its tokens, and nothing is learned of 0 seconds.
        """
        timed.whole = whole
        if timed.events is None:
            now = time.monotonic()
            self._end(timed, now, now - timed.started if whole else 0.0)
            return
        timed.events[1].record(timed.stream)
        self._under_way[batch.forward_iter] = timed

    def processed(self, batch: Any) -> None:
        """After a batch's result was processed: its forward has ended."""
        timed = self._under_way.pop(batch.forward_iter, None)
        if timed is not None and timed.events is not None:
            # A stage that does not wait for the result of a chunk in the middle has not waited for
            # its forward either. The end is reported all the same, since all ranks report equally
            # much; nothing is learned of 0 seconds.
            begin, end = timed.events
            learns = timed.whole and end.query()
            self._end(timed, time.monotonic(), begin.elapsed_time(end) / 1e3 if learns else 0.0)

    def _end(self, timed: _Timed, now: float, seconds: float) -> None:
        for rid, span, shared in timed.chunks:
            self._note(Chunk(rid, span, shared, now, seconds), timed.noted)
