"""Readers of traces that hold messages as text: ShareGPT, OpenAI's request bodies and batches, the
multi-turn files of aiperf and vLLM.

Three forms are told apart by what a record says of itself. A transcript has the answers in it: each
is the output of a call. A request has the whole prompt in it, and requests of one session follow
each other. A list of turns has only what the client says: an empty answer stands for each of the
server's, which `--feedback server` replaces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from sgl_kvtier.lab.workload.lines import (
    MOST_LINE_BYTES,
    BadRecord,
    count_of,
    inside,
    list_of,
    milliseconds_of,
    text_of,
)
from sgl_kvtier.lab.workload.reader import Reader, Setting
from sgl_kvtier.lab.workload.session import Append, Call, Edit, Event, Message, Session
from sgl_kvtier.outside import is_text, is_whole, shown
from sgl_kvtier.types import Span

UNKNOWN_OUTPUT_TOKENS = 220
"""What is asked for where a file gives no length: SGLang's DEFAULT_AGENTIC_OUTPUT_LEN
(sglang/benchmark/datasets/agentic_trace.py in 0.5.23).
"""
NO_LENGTH = (
    f"lengths of answers, which the file lacks: {UNKNOWN_OUTPUT_TOKENS} tokens are asked for"
)
_TOOLS = "tools"
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_WITHOUT_TEXT = (
    "role",
    "content",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    "id",
    "of",
)
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_BOUNDS = ("max_completion_tokens", "max_tokens")


def message_of(record: Any, left_out: Counter[str]) -> Message:
    """A message as OpenAI's API has it. Tool calls are text behind the content, as the swe format
    has them; parts that are no text are counted in `left_out`. Raises BadRecord.
    """
    if not isinstance(record, dict):
        raise BadRecord(f"a message must be an object, not {shown(record)}")
    pieces = [_content(record.get("content"), left_out)]
    calls = list_of(record, "tool_calls") if record.get("tool_calls") else []
    if record.get("function_call"):
        calls = [*calls, {"function": record["function_call"]}]
    pieces += [tool_call_text(call) for call in calls]
    for key, value in record.items():
        if value is not None and key not in _WITHOUT_TEXT:
            left_out[f"{shown(key)} fields of messages"] += 1
    role = _TOOLS if record.get("of") == _TOOLS else text_of(record, "role")
    return Message(role, "\n".join(piece for piece in pieces if piece))


def _content(content: Any, left_out: Counter[str]) -> str:
    parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
    texts = []
    for part in parts:
        if not isinstance(part, dict):
            raise BadRecord(f"'content' must be a text or a list of parts, not {shown(content)}")
        kind = part.get("type")
        if kind not in _TEXT_PARTS:
            left_out[f"{shown(kind)} parts of messages"] += 1
            continue
        if not is_text(part.get("text"), MOST_LINE_BYTES):
            raise BadRecord(f"'content' must be a text or a list of parts, not {shown(content)}")
        texts.append(part["text"])
    return "".join(texts)


def tool_call_text(call: Any) -> str:
    """A tool call as text: its name and its arguments. Raises BadRecord."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadRecord(f"a tool call must be an object, not {shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, (dict, list)):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not is_text("" if arguments is None else arguments, MOST_LINE_BYTES):
        raise BadRecord(f"'arguments' of a tool call must be a text, not {shown(arguments)}")
    return f"{text_of(function, 'name')} {arguments or ''}"


class Request(NamedTuple):
    """One request with its whole prompt. `output_tokens` None: the file gives no length.
    `most_tokens` is the bound that the client asked for: the length where nothing else says it.
    """

    messages: list[Message]
    output_tokens: int | None
    most_tokens: int | None
    gap_s: float = 0.0
    arrival_s: float | None = None


def _first_of(body: dict[str, Any], *keys: str) -> int | None:
    """The first count that a body has. Raises BadRecord."""
    return next((count_of(body, key) for key in keys if body.get(key) is not None), None)


def transcript(messages: Sequence[Message], left_out: Counter[str]) -> list[Event]:
    """A conversation with its answers as events. What stands behind the last answer is left out."""
    events: list[Event] = []
    for message in messages:
        asked = bool(events) and not isinstance(events[-1], Call)
        answers = message.role == "assistant" and asked
        events.append(Call(message) if answers else Append(message))
    while events and not isinstance(events[-1], Call):
        events.pop()
        left_out["messages behind the last answer"] += 1
    if not events:
        raise BadRecord("the conversation has no answer behind a question")
    return events


def whole_prompts(requests: Sequence[Request], left_out: Counter[str]) -> list[Event]:
    """The requests of one session as events. The answer to one is what the next prompt goes on
    with, if that is the assistant's.
    """
    events: list[Event] = []
    context: list[Message] = []
    for number, request in enumerate(requests):
        messages = request.messages
        if not messages:
            raise BadRecord("a request without a message")
        same = 0
        while same < min(len(context), len(messages)) and context[same] == messages[same]:
            same += 1
        if same < len(context):
            kept: list[Span | Message] = [Span(0, same)] if same else []
            events.append(Edit((*kept, *messages[same:]), "prefix dropped"))
        else:
            events += [Append(message) for message in messages[same:]]
        context = list(messages)
        following = requests[number + 1].messages if number + 1 < len(requests) else []
        goes_on = following[: len(messages)] == messages and len(following) > len(messages)
        answer = following[len(messages)] if goes_on else None
        if answer is not None and answer.role != "assistant":
            answer = None
        tokens = request.output_tokens
        if tokens is None and answer is None:
            tokens = request.most_tokens
        if tokens is None and answer is None:
            tokens = UNKNOWN_OUTPUT_TOKENS
            left_out[NO_LENGTH] += 1
        events.append(Call(answer, tokens, request.gap_s, arrival_s=request.arrival_s))
        if answer is not None:
            context.append(answer)
    return events


class ChatReader(Reader):
    """Records of one of the formats of this file to sessions. Requests that name a session are kept
    until the end of the file, and are one session then.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._by_session: dict[str, tuple[int, list[dict[str, Any]]]] = {}

    def share_gpt(self, line: int, record: dict[str, Any]) -> list[Session]:
        """A conversation as ShareGPT has it: `from` and `value`."""
        messages = []
        for number, turn in enumerate(list_of(record, "conversations")):
            if not isinstance(turn, dict):
                raise BadRecord(f"turn {number}: must be an object")
            speaker = text_of(turn, "from")
            if speaker not in _SPEAKERS:
                raise BadRecord(f"turn {number}: 'from' = {shown(speaker)} is no known speaker")
            messages.append(Message(_SPEAKERS[speaker], text_of(turn, "value", "")))
        return [self._session(line, record, transcript(messages, self.left_out))]

    def messages(self, line: int, record: dict[str, Any]) -> list[Session]:
        """A list of `messages`: a request of a session that is named, or that ends with the
        client's message; else a conversation with its answers.
        """
        list_of(record, "messages")
        if record.get("message_mode") not in (None, "history"):
            raise BadRecord(
                f"'message_mode' = {shown(record['message_mode'])} is not read: write each "
                "request's whole prompt"
            )
        if record.get("session_id") is not None:
            name = text_of(record, "session_id")
            self._by_session.setdefault(name, (line, []))[1].append(record)
            return []
        last = record["messages"][-1] if record["messages"] else None
        if isinstance(last, dict) and last.get("role") == "assistant":
            events = transcript(self._messages(record), self.left_out)
            return [self._session(line, record, events, record)]
        return [self._of_requests(line, record, [record])]

    def batch(self, line: int, record: dict[str, Any]) -> list[Session]:
        """A line of OpenAI's batch: the body of one request."""
        url, body = text_of(record, "url", _CHAT), record.get("body")
        if not isinstance(body, dict) or url not in (_CHAT, _COMPLETION):
            raise BadRecord(
                f"'url' = {shown(url)}: only bodies of {_CHAT} and {_COMPLETION} are read"
            )
        if url == _COMPLETION:
            body = {**body, "messages": [{"role": "user", "content": text_of(body, "prompt")}]}
        return [self._of_requests(line, record, [body])]

    def payloads(self, line: int, record: dict[str, Any]) -> list[Session]:
        """A session of aiperf's inputs.json: the bodies of its requests in order."""
        bodies = list_of(record, "payloads")
        if not bodies or not all(isinstance(body, dict) for body in bodies):
            raise BadRecord("'payloads' must be a list of request bodies")
        return [self._of_requests(line, record, bodies)]

    def turns(self, line: int, record: dict[str, Any]) -> list[Session]:
        """A session of aiperf's multi-turn file: what the client says, turn by turn."""
        events: list[Event] = []
        start_s: float | None = None
        for number, turn in enumerate(list_of(record, "turns")):
            with inside(f"turn {number}"):
                texts = self._texts(turn)
                at_s = milliseconds_of(turn, "timestamp")
                start_s = at_s if start_s is None else start_s
                call = Call(
                    Message("assistant", ""),
                    self._length(turn),
                    milliseconds_of(turn, "delay") or 0.0,
                    arrival_s=None if at_s is None or start_s is None else at_s - start_s,
                )
            events += [*(Append(Message(text_of(turn, "role", "user"), t)) for t in texts), call]
        if not events:
            raise BadRecord("the session has no turn")
        return [self._session(line, record, events, start_s=start_s or 0.0)]

    def kept(self) -> Iterator[tuple[int, Callable[[], Session]]]:
        for number, rows in self._by_session.values():
            yield number, partial(self._of_requests, number, rows[0], rows)

    def _of_requests(
        self, line: int, record: dict[str, Any], bodies: Sequence[dict[str, Any]]
    ) -> Session:
        requests, first_s, last_s = [], None, None
        for body in bodies:
            at_s = milliseconds_of(body, "timestamp")
            gap_s = milliseconds_of(body, "delay")
            if gap_s is None:  # how long the server took is in none of these files
                gap_s = max(0.0, at_s - last_s) if at_s is not None and last_s is not None else 0.0
            first_s = at_s if first_s is None else first_s
            last_s = at_s
            arrival_s = None if at_s is None or first_s is None else max(0.0, at_s - first_s)
            tokens, most = _first_of(body, "output_length"), _first_of(body, *_BOUNDS)
            requests.append(Request(self._messages(body), tokens, most, round(gap_s, 6), arrival_s))
        events = whole_prompts(requests, self.left_out)
        return self._session(line, record, events, bodies[0], start_s=first_s or 0.0)

    def _messages(self, body: dict[str, Any]) -> list[Message]:
        return [message_of(one, self.left_out) for one in list_of(body, "messages")]

    def _length(self, turn: dict[str, Any]) -> int:
        if turn.get("output_length") is not None:
            return count_of(turn, "output_length")
        self.left_out[NO_LENGTH] += 1
        return UNKNOWN_OUTPUT_TOKENS

    def _texts(self, turn: Any) -> list[str]:
        if not isinstance(turn, dict):
            raise BadRecord("must be an object")
        texts = turn.get("texts", turn.get("text"))
        texts = texts if isinstance(texts, list) else [texts]
        if not texts or not all(is_text(text, MOST_LINE_BYTES) for text in texts):
            raise BadRecord(f"'text' must be a text, or 'texts' a list of them, not {shown(texts)}")
        known = ("text", "texts", "timestamp", "delay", "role", "output_length")
        for key, value in turn.items():
            if value is not None and key not in known:
                self.left_out[f"{shown(key)} fields of turns"] += 1
        return texts

    def _session(
        self,
        line: int,
        record: dict[str, Any],
        events: list[Event],
        body: dict[str, Any] | None = None,
        start_s: float = 0.0,
    ) -> Session:
        said = next((record[k] for k in ("session_id", "custom_id", "id") if record.get(k)), line)
        if not is_whole(said) and not is_text(said, MOST_LINE_BYTES):
            raise BadRecord(f"a session's name must be a text or a number, not {shown(said)}")
        tools = body.get("tools") if body is not None else None
        schemas = json.dumps(tools, ensure_ascii=False) if tools else None
        if schemas is not None and not is_text(schemas, MOST_LINE_BYTES):
            raise BadRecord("'tools' holds what UTF-8 cannot")
        return self.session(
            f"{self.stem}:{said}",
            events,
            tools=None if schemas is None else Message(_TOOLS, schemas),
            start_s=start_s,
            model=text_of(body, "model", "") if body is not None else "",
        )
