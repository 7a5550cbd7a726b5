"""The sessions a benchmark replays, at the scale the model can bear: those of a trace, or generated
ones without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.outside.model_shapes import VOCABULARY
from sgl_kvtier.lab.outside.replay import prompt_sizes
from sgl_kvtier.lab.workload.catalogue import find_trace
from sgl_kvtier.lab.workload.encoder import ByteEncoder, Encoder, TokenizerEncoder
from sgl_kvtier.lab.workload.session import Session
from sgl_kvtier.lab.workload.source import cut_session, enter_late, load_sessions

DEFAULT_TRACE = "swe_mini_deepseek"
DEFAULT_GENERATED = "generated:swe-mini"


@dataclass(frozen=True)
class LoadOptions:
    """Which sessions, how many, how long. `source` None takes the default trace if it is found,
    else generated sessions.
    """

    source: str | None = None
    traces_dir: Path | None = None
    sessions: int = 8
    skip: int = 0
    turns: int | None = None
    divisor: int = 4
    most_prompt_tokens: int | None = None
    least_prompt_tokens: int = 0
    most_output_tokens: int | None = None
    seed: int = 0
    begin: float = 0.0
    """Sessions are entered after this share of their calls."""
    block_tokens: int | None = None


@dataclass(frozen=True)
class Load:
    """Sessions ready to replay, with their sizes in the tokens that will be sent."""

    source: str
    description: str
    sessions: Sequence[Session]
    encoder: Encoder
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    @property
    def requests(self) -> int:
        """Calls in all sessions."""
        return sum(row["calls"] for row in self.rows)

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its output."""
        return max(row["longest_tokens"] for row in self.rows)

    @property
    def context_tokens(self) -> int:
        """The contexts of all sessions at their ends, added up, in tokens. A cache for all of them
        would have to hold that.
        """
        return sum(row["longest_tokens"] for row in self.rows)

    def describe(self) -> str:
        """The replayed sessions as text for people."""
        return (
            f"{self.description}\n{self.requests} requests a round and configuration, prompts up to {self.longest_tokens:,} tokens, "
            f"all contexts together {self.context_tokens:,}"
        )

    def to_json(self) -> dict[str, Any]:
        """The `workload` part of a result."""
        return {
            "source": self.source,
            "description": self.description,
            "token_divisor": self.encoder.divisor,
            "sessions": len(self.sessions),
            "requests": self.requests,
            "prompt_tokens": sum(row["prompt_tokens"] for row in self.rows),
            "output_tokens": sum(row["output_tokens"] for row in self.rows),
            "context_tokens_of_all_sessions": self.context_tokens,
            "longest_request_tokens": self.longest_tokens,
            "rows": list(self.rows),
        }


def undisturbed_tokens(load: Load, page: int) -> int:
    """The device pool in which nothing is evicted: all contexts, what was generated beside what the
    trace goes on with, and room for the longest request.
    """
    generated = sum(int(row["output_tokens"]) for row in load.rows)
    tokens = int((load.context_tokens + generated) * 1.1)
    tokens += len(load.sessions) * 4 * page + load.longest_tokens
    return -(-tokens // page) * page


def choose_encoder(model_path: Path, divisor: int) -> Encoder:
    """The scaled-down byte encoder for a lab model, the model's own tokenizer for any other."""
    if (model_path / "kvtier_model.json").exists():
        return ByteEncoder(VOCABULARY, divisor)
    return TokenizerEncoder(model_path)


def load(options: LoadOptions, encoder: Encoder) -> Load:
    """The sessions. Raises TraceError when a source that was asked for is not there or holds
    nothing.
    """
    source = options.source
    notes: list[str] = []
    if source is None:
        source, notes = _default_source(options.traces_dir)
    result = load_sessions(
        source,
        limit=options.sessions,
        skip=options.skip,
        seed=options.seed,
        traces_dir=options.traces_dir,
        encoder=encoder,
        max_calls=None if options.begin else options.turns,
        max_prompt_tokens=options.most_prompt_tokens,
        min_prompt_tokens=options.least_prompt_tokens,
        block_tokens=options.block_tokens,
    )
    sessions: Sequence[Session] = result.sessions
    if options.begin:
        entered = [enter_late(session, options.begin) for session in sessions]
        sessions = [cut_session(session, max_calls=options.turns) for session in entered]
        notes.append(
            f"Sessions are entered after {options.begin:.0%} of their calls: what came before is context."
        )
    if encoder.divisor > 1:
        notes.append(
            f"Scaled down: token counts are divided by {encoder.divisor}; turns, order and sharing of prefixes are the trace's."
        )
    rows = prompt_sizes(sessions, encoder, options.most_output_tokens)
    return Load(source, result.description, sessions, encoder, rows, notes)


def _default_source(traces_dir: Path | None) -> tuple[str, list[str]]:
    try:
        find_trace(DEFAULT_TRACE, traces_dir)
    except TraceError:
        return DEFAULT_GENERATED, [
            f"The trace {DEFAULT_TRACE} was not found, so sessions were generated from its published statistics."
        ]
    return DEFAULT_TRACE, []
