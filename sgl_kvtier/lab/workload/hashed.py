"""Readers of traces that hold hashes or lengths instead of text: claude_code_blocks64, Mooncake and
Azure.

Claude Code: one session a line. `keep` is the number of leading blocks a request shares with the
one before, `new` names the others. Fewer kept than there were is a context edit. A sub-agent's
requests run beside its owner's. So they become a session of their own (`parent`), in the same scope
of ids, right behind the owner's. The up to 63 tokens behind a request's last whole block have no id
and are left out.

Mooncake: one request a line with global ids of 512-token blocks; each becomes a session of one call
with its arrival time. Azure: arrival times and lengths only; the same, with no shared content.
"""

from __future__ import annotations

import bisect
import csv
import datetime
from pathlib import Path
from typing import Any, ClassVar

from sgl_kvtier.lab.workload.catalogue import Origin
from sgl_kvtier.lab.workload.lines import (
    MOST_TOKENS,
    BadRecord,
    count_of,
    list_of,
    parse_object,
    seconds_of,
    text_of,
    whole,
)
from sgl_kvtier.lab.workload.session import Append, Blocks, Call, Edit, Event, Message, Session
from sgl_kvtier.outside import is_number, is_text, is_whole, shown
from sgl_kvtier.types import Span

_MOONCAKE_BLOCK = 512
_AZURE_BLOCK = 512
_MOST_MILLISECONDS = 10**12
_MOST_NAME = 1000
_MOST_SAID = 200
_MOST_AGENTS = 16
"""Most levels of sub-agents: recorded ones have one."""
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class ClaudeCodeReader:
    """Lines of claude_code_blocks64 to sessions."""

    header_lines: ClassVar[int] = 0

    def __init__(self, path: Path, origin: Origin) -> None:
        self._stem = _stem(path)
        self._origin = origin

    @staticmethod
    def recognises(text: str) -> bool:
        """True when this line is of the format."""
        record = parse_object(text)
        return "block_size" in record and isinstance(record.get("requests"), list)

    def sessions(self, _line: int, text: str, /) -> list[Session]:
        """The session of a line, and those of its sub-agents. Raises BadRecord."""
        record = parse_object(text)
        if text_of(record, "hash_id_scope") != "local":
            raise BadRecord("'hash_id_scope' must be 'local'")
        name = f"claude-code:{_name_of(record, 'id')}"
        block_tokens = count_of(record, "block_size")
        if not block_tokens:
            raise BadRecord("'block_size' must be at least 1")
        found: list[Session] = []
        self._collect(record, name, None, 0.0, _Scope(f"{self._stem}:{name}", block_tokens), found)
        return found

    def _collect(
        self,
        record: dict[str, Any],
        name: str,
        parent: str | None,
        start_s: float,
        scope: _Scope,
        found: list[Session],
        level: int = 0,
    ) -> None:
        if level > _MOST_AGENTS:
            raise BadRecord(f"sub-agents nested more than {_MOST_AGENTS} times")
        context = _BlockContext(scope)
        agents: list[tuple[str, float, dict[str, Any]]] = []
        for number, request in enumerate(list_of(record, "requests")):
            if not isinstance(request, dict):
                raise BadRecord(f"request {number}: must be an object")
            try:
                if "requests" in request:  # of a session begun by this one
                    agents.append(
                        (_name_of(request, "agent_id"), seconds_of(request, "t") or 0.0, request)
                    )
                else:
                    context.take(request)
            except BadRecord as error:
                raise BadRecord(f"request {number}: {error}") from error
        if not context.events and parent is None:
            raise BadRecord("the session makes no request")
        if context.events:
            found.append(
                Session(
                    session_id=name,
                    source=self._origin.source,
                    events=tuple(context.events),
                    start_s=start_s,
                    licence=self._origin.licence,
                    model=context.model,
                    parent=parent,
                )
            )
        for agent, at_s, inner in agents:
            self._collect(inner, f"{name}/{agent}", name, start_s + at_s, scope, found, level + 1)


class MooncakeReader:
    """Lines of a Mooncake trace to sessions of one call."""

    header_lines: ClassVar[int] = 0

    def __init__(self, path: Path, origin: Origin) -> None:
        self._stem = _stem(path)
        self._origin = origin

    @staticmethod
    def recognises(text: str) -> bool:
        """True when this line is of the format."""
        record = parse_object(text)
        return "input_length" in record and isinstance(record.get("hash_ids"), list)

    def sessions(self, line: int, text: str, /) -> list[Session]:
        """The one request of a line. Raises BadRecord."""
        record = parse_object(text)
        ids = [whole(i, "a hash id") for i in list_of(record, "hash_ids")]
        tokens = count_of(record, "input_length")
        if not tokens or len(ids) != -(-tokens // _MOONCAKE_BLOCK):
            raise BadRecord(
                f"{len(ids)} blocks of {_MOONCAKE_BLOCK} tokens do not hold 'input_length' = "
                f"{tokens}"
            )
        blocks = Blocks(self._stem, _MOONCAKE_BLOCK, _runs(ids), tokens)
        call = Call(output_tokens=count_of(record, "output_length"), arrival_s=0.0)
        return [
            Session(
                session_id=f"{self._stem}:{line}",
                source=self._origin.source,
                events=(Append(Message("user", blocks=blocks)), call),
                start_s=count_of(record, "timestamp", _MOST_MILLISECONDS) / 1000,
                licence=self._origin.licence,
            )
        ]


class AzureReader:
    """Rows of an Azure LLM inference trace to sessions of one call that share nothing."""

    header_lines: ClassVar[int] = 1

    def __init__(self, path: Path, origin: Origin) -> None:
        self._stem = _stem(path)
        self._origin = origin
        self._first: datetime.datetime | None = None

    @staticmethod
    def recognises(text: str) -> bool:
        """True when this line is the format's header."""
        return text.strip() == AZURE_HEADER

    def sessions(self, line: int, text: str, /) -> list[Session]:
        """The one request of a row. Raises BadRecord."""
        try:
            row = next(csv.reader([text.strip()]))
            stamp, tokens, output = row[0], int(row[1]), int(row[2])
            # Seven digits after the point are more than Python 3.10 reads.
            at = datetime.datetime.fromisoformat(stamp[:26])
            start_s = (at - (self._first or at)).total_seconds()
        except (
            IndexError,
            ValueError,
            TypeError,
            csv.Error,
        ) as error:  # TypeError: with a time zone, and without
            raise BadRecord(f"not a row of {AZURE_HEADER}: {str(error)[:_MOST_SAID]}") from error
        if not is_whole(tokens, 1, MOST_TOKENS) or not is_whole(output, 0, MOST_TOKENS):
            raise BadRecord(f"{shown(tokens)} input and {shown(output)} output tokens")
        if not is_number(start_s, 0, _MOST_MILLISECONDS / 1000):
            raise BadRecord(f"{start_s:g} s after the first row")
        self._first = self._first or at
        name = f"{self._stem}:{line}"
        blocks = Blocks(name, _AZURE_BLOCK, ((0, -(-tokens // _AZURE_BLOCK)),), tokens)
        return [
            Session(
                session_id=name,
                source=self._origin.source,
                events=(
                    Append(Message("user", blocks=blocks)),
                    Call(output_tokens=output, arrival_s=0.0),
                ),
                start_s=start_s,
                licence=self._origin.licence,
            )
        ]


class _Scope:
    """The blocks of one Claude Code session: all of one size, all whole."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self._name = name
        self._block_tokens = block_tokens

    def check(self, blocks: int) -> None:
        """Raises BadRecord when a prompt of `blocks` blocks cannot be meant."""
        if blocks * self._block_tokens > MOST_TOKENS:
            raise BadRecord(f"a prompt of {blocks} blocks of {self._block_tokens} tokens")

    def message(self, runs: tuple[tuple[int, int], ...]) -> Message:
        count = sum(n for _, n in runs)
        return Message(
            "input", blocks=Blocks(self._name, self._block_tokens, runs, count * self._block_tokens)
        )


class _BlockContext:
    """Requests in keep/new form to events. `_ends[i]` = blocks up to the end of message i."""

    def __init__(self, scope: _Scope) -> None:
        self.events: list[Event] = []
        self.model = ""
        self._scope = scope
        self._messages: list[Message] = []
        self._ends: list[int] = []
        self._end_s: float | None = None

    def take(self, request: dict[str, Any]) -> None:
        keep = count_of(request, "keep")
        present = self._ends[-1] if self._ends else 0
        if keep > present:
            raise BadRecord(f"'keep' = {keep}, but the request before had {present} blocks")
        new = _new_runs(list_of(request, "new"))
        if not keep and not new:
            raise BadRecord("a request without a whole block")
        self._scope.check(keep + sum(count for _, count in new))
        if keep < present:
            self._drop_to(keep, present, new)
        elif new:
            self._push(self._scope.message(new))
            self.events.append(Append(self._messages[-1]))
        self._call(request)

    def _drop_to(self, keep: int, present: int, new: tuple[tuple[int, int], ...]) -> None:
        whole_messages = bisect.bisect_right(self._ends, keep)
        parts: list[Span | Message] = [Span(0, whole_messages)] if whole_messages else []
        cut = keep - (self._ends[whole_messages - 1] if whole_messages else 0)
        head = self._messages[whole_messages].blocks if cut else None
        del self._messages[whole_messages:], self._ends[whole_messages:]
        if head is not None:
            parts.append(self._push(self._scope.message(head.head(cut).runs)))
        if new:
            parts.append(self._push(self._scope.message(new)))
        # The last block alone changes when a client rewrites what stands at the prompt's end
        # (reminders, marks).
        why = "last block rewritten" if present - keep == 1 else "prefix dropped"
        self.events.append(Edit(tuple(parts), why))

    def _push(self, message: Message) -> Message:
        assert message.blocks is not None
        self._ends.append((self._ends[-1] if self._ends else 0) + len(message.blocks))
        self._messages.append(message)
        return message

    def _call(self, request: dict[str, Any]) -> None:
        at_s = seconds_of(request, "t")
        latency_s = seconds_of(request, "api_time")
        gap_s = seconds_of(request, "think_time")
        if gap_s is None:
            gap_s = 0.0 if at_s is None or self._end_s is None else at_s - self._end_s
        call = Call(
            output_tokens=count_of(request, "out"),
            gap_s=round(max(0.0, gap_s), 6),
            latency_s=latency_s,
            arrival_s=at_s,
        )
        self.events.append(call)
        self.model = self.model or text_of(request, "model", "")
        self._end_s = None if at_s is None else at_s + (latency_s or 0.0)


def _name_of(record: dict[str, Any], key: str) -> str:
    """A text that a session's name is made of, one for each level of sub-agents."""
    name = text_of(record, key)
    if not is_text(name, _MOST_NAME):
        raise BadRecord(f"{key!r} must have at most {_MOST_NAME} characters, not {len(name)}")
    return name


def _new_runs(flat: list[Any]) -> tuple[tuple[int, int], ...]:
    numbers = [whole(n, "an entry of 'new'") for n in flat]
    if len(numbers) % 2 or not all(numbers[1::2]):
        raise BadRecord("'new' must be pairs of start and count")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _runs(ids: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for i in ids:
        if runs and i == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return tuple(runs)


def _stem(path: Path) -> str:
    return path.name.split(".")[0]
