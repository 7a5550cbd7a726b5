"""The swe_*.jsonl format: agent sessions with verbatim messages and times, one
session a line.

A line has `session_id`, `source`, `licence`, optional `model`, `batch`, `batch_offset_s`,
`tools_ref`, `truncated`, and `turns`. A turn of role system, user or tool is appended. A turn of
role assistant is a request and its output; with `"hist": true` it is only appended. A turn of role
context_edit replaces the context by `parts`: `[a, b]` takes messages a to b-1, an object is a new
message. `t_offset_s` counts from the first request. On an assistant turn it is the response's end,
on others when it was there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.chats import tool_call_text
from sgl_kvtier.lab.workload.lines import (
    MOST_LINE_BYTES,
    BadRecord,
    count_of,
    inside,
    list_of,
    seconds_of,
    text_of,
    whole,
)
from sgl_kvtier.lab.workload.reader import Reader, Setting
from sgl_kvtier.lab.workload.session import Append, Call, Edit, Event, Message, Session
from sgl_kvtier.outside import is_text, parse_json, read_bounded, shown
from sgl_kvtier.types import Span

TOOLS_FILE = "swe_tools.json"
"""Beside the traces: the tool schemas that stood in the prompts, by `tools_ref`."""

_INPUT_ROLES = ("system", "user", "tool")


class SweReader(Reader):
    """Lines of one swe_*.jsonl file to sessions. Tool schemas come from swe_tools.json in the same
    folder.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._tools_path = self.path.parent / TOOLS_FILE
        self._schemas: dict[str, Any] | None = None
        self._tools: dict[str, Message] = {}

    def sessions(self, _line: int, record: dict[str, Any], /) -> list[Session]:
        """The one session of a line. Raises BadRecord, and TraceError when swe_tools.json is needed
        and missing.
        """
        reference = text_of(record, "tools_ref", "")
        walk = _Turns()
        for number, turn in enumerate(list_of(record, "turns")):
            with inside(f"turn {number}"):
                walk.take(turn)
        session = self.session(
            text_of(record, "session_id"),
            walk.events,
            source=text_of(record, "source", ""),
            tools=self._tools_message(reference) if reference else None,
            start_s=seconds_of(record, "batch_offset_s") or 0.0,
            licence=text_of(record, "licence", ""),
            model=text_of(record, "model", ""),
            batch=text_of(record, "batch", ""),
            truncated=record.get("truncated") is True,
            clipped_messages=walk.clipped,
        )
        if not session.calls:
            raise BadRecord("the session makes no request")
        return [session]

    def _tools_message(self, reference: str) -> Message:
        if reference not in self._tools:
            if self._schemas is None:
                self._schemas = self._read_schemas()
            if reference not in self._schemas:
                raise BadRecord(f"tools_ref {shown(reference)} is not in {TOOLS_FILE}")
            schemas = json.dumps(self._schemas[reference], ensure_ascii=False)
            if not is_text(schemas, MOST_LINE_BYTES):
                raise TraceError(
                    f"{self._tools_path}: {shown(reference)} holds what UTF-8 cannot. Copy the "
                    "file again"
                )
            self._tools[reference] = Message("tools", schemas)
        return self._tools[reference]

    def _read_schemas(self) -> dict[str, Any]:
        try:
            schemas = parse_json(read_bounded(self._tools_path, MOST_LINE_BYTES))
        except OSError as error:
            raise TraceError(
                f"cannot read {self._tools_path}: {error.strerror}. Sessions with a tools_ref need "
                f"{TOOLS_FILE} in the trace's folder, since the tool schemas are the beginning of "
                "every prompt"
            ) from error
        except ValueError as error:
            raise TraceError(
                f"{self._tools_path} is not JSON: {error}. Copy the file again"
            ) from error
        if not isinstance(schemas, dict):
            raise TraceError(
                f"{self._tools_path} must be an object of tool schemas by name. Copy the file again"
            )
        return schemas


@dataclass
class _Turns:
    """Turns to events, with the clock that turns times of day into waits. Negative differences are
    clock steps: 0.
    """

    events: list[Event] = field(default_factory=list)
    clipped: int = 0
    _present: int = 0
    _called: bool = False
    _done_s: float = 0.0
    _last_s: float = 0.0
    _tool_s: float = 0.0

    def take(self, turn: Any) -> None:
        """Adds one turn's event. Raises BadRecord."""
        if not isinstance(turn, dict):
            raise BadRecord("a turn must be an object")
        role = text_of(turn, "role")
        self.clipped += "clipped_from_chars" in turn
        if role == "context_edit":
            self._edit(turn)
        elif role == "assistant" and turn.get("hist") is not True:
            self._call(turn)
            return
        elif role in (*_INPUT_ROLES, "assistant"):
            self.events.append(Append(Message(role, message_text(turn))))
            self._present += 1
        else:
            raise BadRecord(f"unknown role {shown(role)}")
        self._tool_s += seconds_of(turn, "tool_exec_s") or 0.0
        at_s = seconds_of(turn, "t_offset_s")
        if at_s is not None:
            self._last_s = at_s

    def _call(self, turn: dict[str, Any]) -> None:
        done_s = seconds_of(turn, "t_offset_s")
        usage = turn.get("usage")
        gap_s = max(0.0, self._last_s - self._done_s) + self._tool_s
        latency_s = None if done_s is None else max(0.0, done_s - self._last_s)
        if not self._called and done_s == 0.0:
            # such a log begins with the first response, so how long that took is not known
            latency_s = None
        call = Call(
            output=Message("assistant", message_text(turn)),
            output_tokens=count_of(usage, "out")
            if isinstance(usage, dict) and "out" in usage
            else None,
            gap_s=round(gap_s, 6),
            latency_s=None if latency_s is None else round(latency_s, 6),
            arrival_s=None if done_s is None else max(0.0, self._last_s),
        )
        self.events.append(call)
        self._present += 1
        self._called = True
        self._tool_s = 0.0
        if done_s is not None:
            self._done_s = self._last_s = done_s

    def _edit(self, turn: dict[str, Any]) -> None:
        parts: list[Span | Message] = []
        length = 0
        for part in list_of(turn, "parts"):
            if isinstance(part, dict):
                parts.append(Message(text_of(part, "role"), message_text(part)))
                length += 1
                continue
            span = _span(part, self._present)
            parts.append(span)
            length += len(span)
        self.events.append(Edit(tuple(parts), text_of(turn, "why", "")))
        self._present = length


def message_text(turn: dict[str, Any]) -> str:
    """The text a turn puts into the context. It is reasoning where it was sent back, content, then
    each tool call's name and arguments.
    """
    pieces = [text_of(turn, "reasoning", ""), text_of(turn, "content", "")]
    pieces += map(tool_call_text, list_of(turn, "tool_calls") if turn.get("tool_calls") else ())
    return "\n".join(piece for piece in pieces if piece)


def _span(part: Any, present: int) -> Span:
    if not isinstance(part, list) or len(part) != 2:
        raise BadRecord(f"an edit's part must be [a, b] or a message, not {shown(part)}")
    start, stop = (whole(bound, "an edit's bound") for bound in part)
    if not start <= stop <= present:
        raise BadRecord(f"an edit takes messages {part} of a context of {present}")
    return Span(start, stop)
