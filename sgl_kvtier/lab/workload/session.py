"""A client's messages over time: the events that build its prompts, sessions, and the walker over
them.

A session is a list of events. `Append` puts a message at the end of the context. `Call` is one
request whose prompt is the tools and the context so far. `Edit` replaces the context. `Context`
applies them and stops at every call. Nothing here knows tokens (see `encoder`) or servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.errors import TraceError
from sgl_kvtier.types import Span


@dataclass(frozen=True, slots=True)
class Blocks:
    """Content known only as block hashes: inside one `scope`, equal ids mean equal tokens.

    `runs` are (first id, count) pairs. All blocks are whole (`block_tokens` tokens) but the last,
    which may be cut so that the total is `tokens`.
    """

    scope: str
    block_tokens: int
    runs: tuple[tuple[int, int], ...]
    tokens: int

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or any(count < 1 for _, count in self.runs):
            raise ValueError(
                f"blocks of {self.block_tokens} tokens in runs {self.runs[:4]}: sizes must be "
                "positive"
            )
        whole = len(self) * self.block_tokens
        if not max(0, whole - self.block_tokens) <= self.tokens <= whole:
            raise ValueError(
                f"{len(self)} blocks of {self.block_tokens} tokens cannot hold {self.tokens} tokens"
            )

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    def ids(self) -> NDArray[np.int64]:
        """The id of every block in order."""
        if not self.runs:
            return np.empty(0, np.int64)
        return np.concatenate(
            [np.arange(first, first + count, dtype=np.int64) for first, count in self.runs]
        )

    def head(self, blocks: int) -> Blocks:
        """The first `blocks` blocks; a cut last block stays cut."""
        runs: list[tuple[int, int]] = []
        left = blocks
        for first, count in self.runs:
            if left <= 0:
                break
            runs.append((first, min(count, left)))
            left -= count
        return Blocks(
            self.scope, self.block_tokens, tuple(runs), min(self.tokens, blocks * self.block_tokens)
        )


@dataclass(frozen=True, slots=True)
class Message:
    """One piece of a prompt: verbatim text, block hashes, or token ids as a server returned them.
    Exactly one of them.
    """

    role: str
    text: str | None = None
    blocks: Blocks | None = None
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = [c for c in (self.text, self.blocks, self.token_ids) if c is not None]
        if len(given) != 1:
            raise ValueError(
                f"a message is text, blocks or token_ids; {len(given)} of them were given"
            )


@dataclass(frozen=True, slots=True)
class Append:
    """The message is put at the end of the context. No request is made."""

    message: Message


@dataclass(frozen=True, slots=True)
class Call:
    """One request. Its prompt is the tools and the context so far; its output is then appended to
    the context.

    `output` is None in hash-only traces: there the next prompt's blocks hold it. `output_tokens` is
    as the provider counted (None: not recorded). `gap_s` is the client's wait after the response
    before (0 where not recorded). `latency_s` is the recorded server's time. `arrival_s` is when
    the request was sent, from the session's start. None: not recorded.
    """

    output: Message | None = None
    output_tokens: int | None = None
    gap_s: float = 0.0
    latency_s: float | None = None
    arrival_s: float | None = None


FILLED = "last block filled"
"""Why of an Edit that only puts more tokens into a block that was cut: the context goes on."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The context is replaced. A Span takes messages [start, stop) of the present context (tools
    not counted); a Message is new.
    """

    parts: tuple[Span | Message, ...]
    why: str = ""


Event = Append | Call | Edit


@dataclass(frozen=True, slots=True)
class Session:
    """One client's conversation. `start_s` counts from the start of its batch; `parent` names the
    session of a sub-agent's owner.
    """

    session_id: str
    source: str
    events: tuple[Event, ...]
    tools: Message | None = None
    start_s: float = 0.0
    licence: str = ""
    model: str = ""
    batch: str = ""
    parent: str | None = None
    truncated: bool = False
    """The log stops before the session's end."""
    clipped_messages: int = 0
    """Results that were longer; their text is cut as the agent cut it before sending."""

    @property
    def calls(self) -> int:
        """How many requests the session makes."""
        return sum(isinstance(event, Call) for event in self.events)

    @property
    def edits(self) -> int:
        """How often its context is replaced."""
        return sum(isinstance(event, Edit) and event.why != FILLED for event in self.events)


class Prompt(Sequence[Message]):
    """The messages of one prompt: an immutable view. It is O(1) to make and to keep, however long
    the session.

    It stays valid because a context only ever grows its list at the end, and an edit begins a new
    list.
    """

    __slots__ = ("_length", "_messages")

    def __init__(self, messages: list[Message], length: int) -> None:
        self._messages = messages
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._messages[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._messages[index % self._length]

    def __iter__(self) -> Iterator[Message]:
        for i in range(self._length):
            yield self._messages[i]


class Context:
    """Walks through one session's events and stops at every call.

    `next_call` returns the call and leaves its prompt in `prompt`. The recorded output is appended
    afterwards, unless `answer` gave the one to take instead. Raises TraceError on an edit that
    takes messages the context does not have.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._messages: list[Message] = [] if session.tools is None else [session.tools]
        self._first = len(self._messages)
        self._events = iter(session.events)
        self._pending: Message | None = None

    @property
    def prompt(self) -> Prompt:
        """Tools and context as they stand now. The view does not change when the walk goes on."""
        return Prompt(self._messages, len(self._messages))

    def next_call(self) -> Call | None:
        """Applies the events up to the next call and returns it; None when the session is over."""
        self._settle()
        for event in self._events:
            if isinstance(event, Call):
                self._pending = event.output
                return event
            if isinstance(event, Append):
                self._messages.append(event.message)
            else:
                self._replace(event.parts)
        return None

    def answer(self, message: Message) -> None:
        """Takes `message` as the output of the call last returned, in place of the recorded one.

        Without effect where none is recorded: in hash-only traces the next prompt's blocks stand
        for the output.
        """
        if self._pending is not None:
            self._pending = message

    def calls(self) -> Iterator[tuple[Call, Prompt]]:
        """Every call that is left, with its prompt."""
        while (call := self.next_call()) is not None:
            yield call, self.prompt

    def _settle(self) -> None:
        if self._pending is not None:
            self._messages.append(self._pending)
            self._pending = None

    def _replace(self, parts: Iterable[Span | Message]) -> None:
        present = len(self._messages) - self._first
        replaced = self._messages[: self._first]
        for part in parts:
            if isinstance(part, Message):
                replaced.append(part)
                continue
            if part.stop > present:
                raise TraceError(
                    f"session {self.session.session_id}: an edit takes messages [{part.start}, "
                    f"{part.stop}) of a context of {present}; the trace is damaged"
                )
            replaced += self._messages[self._first + part.start : self._first + part.stop]
        self._messages = replaced
