"""The data set agentic-trace of SGLang's own benchmark, read and written: one JSON object, the
conversations of which are lists of turns.

A turn has `messages`, the new ones of this round: SGLang's client sends them behind those before
and its server's own answers (sglang/benchmark/datasets/agentic_trace.py in SGLang 0.5.23). The
recorded answer, its length and the times have no place in the format. They are written under
further keys, which SGLang passes over: `output`, `output_tokens`, `gap_s`, `latency_s` and
`arrival_s` of a turn, and `sessions` in the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.catalogue import Origin, name_of
from sgl_kvtier.lab.workload.encoder import Encoder, PromptTokens
from sgl_kvtier.lab.workload.lines import (
    MOST_LINE_BYTES,
    BadLine,
    BadRecord,
    beginning_of,
    count_of,
    list_of,
    note,
    parse_object,
    read_document,
    seconds_of,
    text_of,
)
from sgl_kvtier.lab.workload.session import Append, Call, Context, Edit, Event, Message, Session
from sgl_kvtier.outside import is_text, shown

FORMAT = "agentic-trace"
_OUTPUT_TOKENS = 220
"""What SGLang asks for where no length is given: DEFAULT_AGENTIC_OUTPUT_LEN of the same module."""
_BEGINNING = 1 << 16
# Quotes inside a JSON text have a backslash before them, so this is no text of another trace.
_CONVERSATIONS = re.compile(r'"conversations"\s*:\s*\[')
_TOOLS = "tools"


def is_agentic(path: Path) -> bool:
    """Whether a file begins as one of this format does."""
    start = beginning_of(path, _BEGINNING).lstrip()
    return start.startswith("{") and _CONVERSATIONS.search(start) is not None


def read_conversations(
    path: Path, origin: Origin, skip: int, bad: list[BadLine]
) -> Iterator[list[Session]]:
    """A session for each conversation after `skip`; damaged ones go to `bad` with their number from
    1. Raises TraceError on a file that is not of this format.
    """
    try:
        document = parse_object(read_document(path))
        conversations = list_of(document, "conversations")
    except BadRecord as error:
        raise TraceError(f"{path}: {error}. Copy the file again") from error
    heads = _heads(document, len(conversations))
    for number, turns in enumerate(conversations[skip:], skip + 1):
        try:
            yield [_session(f"{name_of(path)}-{number}", turns, heads[number - 1], origin)]
        except BadRecord as error:
            note(bad, path, number, str(error))


def to_document(sessions: Sequence[Session], encoder: Encoder) -> dict[str, Any]:
    """Sessions of text messages as one object of the format. `encoder` counts `prompt_tokens`.

    Raises TraceError on content that is no text. A session ends before its first edit: the format
    cannot replace what was sent.
    """
    conversations, heads = [], []
    for session in sessions:
        turns = _turns(session, encoder)
        if turns:
            conversations.append(turns)
            heads.append(_head(session, len(turns)))
    # first what the file is known by
    return {"conversations": conversations, "metadata": {"sessions": heads}}


def _heads(document: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What our own file says of its sessions; nothing in another's."""
    metadata = document.get("metadata")
    found = metadata.get("sessions") if isinstance(metadata, dict) else None
    whole = isinstance(found, list) and len(found) == count
    if whole and all(isinstance(head, dict) for head in found):  # type: ignore[union-attr]
        return found  # type: ignore[return-value]
    return [{}] * count


def _session(name: str, turns: Any, head: dict[str, Any], origin: Origin) -> Session:
    if not isinstance(turns, list):
        raise BadRecord(f"a conversation must be a list of turns, not {shown(turns)}")
    events: list[Event] = []
    tools: Message | None = None
    for number, turn in enumerate(turns):
        try:
            new, call = _turn(turn)
        except BadRecord as error:
            raise BadRecord(f"turn {number}: {error}") from error
        if not events and new and new[0].role == _TOOLS:
            tools = new.pop(0)
        events += [Append(message) for message in new]
        events.append(call)
    if not events:
        raise BadRecord("the conversation has no turn")
    return Session(
        session_id=text_of(head, "session_id", name),
        source=text_of(head, "source", origin.source),
        events=tuple(events),
        tools=tools,
        start_s=seconds_of(head, "start_s") or 0.0,
        licence=text_of(head, "licence", origin.licence),
        model=text_of(head, "model", ""),
        batch=text_of(head, "batch", ""),
        truncated=head.get("truncated") is True,
        clipped_messages=count_of(head, "clipped_messages") if "clipped_messages" in head else 0,
    )


def _turn(turn: Any) -> tuple[list[Message], Call]:
    if not isinstance(turn, dict):
        raise BadRecord("a turn must be an object")
    tokens = count_of(turn, "output_tokens") if turn.get("output_tokens") is not None else None
    call = Call(
        output=Message("assistant", text_of(turn, "output", "")),
        output_tokens=_OUTPUT_TOKENS if tokens is None and "output" not in turn else tokens,
        gap_s=seconds_of(turn, "gap_s") or 0.0,
        latency_s=seconds_of(turn, "latency_s"),
        arrival_s=seconds_of(turn, "arrival_s"),
    )
    return [_message(one) for one in list_of(turn, "messages")], call


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise BadRecord(f"a message must be an object, not {shown(message)}")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
    texts = [part.get("text", "") if isinstance(part, dict) else None for part in parts]
    if not all(is_text(text, MOST_LINE_BYTES) for text in texts):
        raise BadRecord(f"'content' must be a text or a list of texts, not {shown(content)}")
    role = _TOOLS if message.get("of") == _TOOLS else text_of(message, "role")
    return Message(role, "".join(map(str, texts)))


def _turns(session: Session, encoder: Encoder) -> list[dict[str, Any]]:
    tokens, context = PromptTokens(encoder), Context(session)
    new = [] if session.tools is None else [_written(session, session.tools)]
    turns: list[dict[str, Any]] = []
    for event in session.events:
        if isinstance(event, Edit):
            break
        if isinstance(event, Append):
            new.append(_written(session, event.message))
            continue
        context.next_call()
        tokens.show(context.prompt)
        turn = {"messages": new, "prompt_tokens": len(tokens), "gap_s": event.gap_s}
        said = None if event.output is None else _written(session, event.output)["content"]
        more = {
            "output": said,
            "output_tokens": event.output_tokens,
            "latency_s": event.latency_s,
            "arrival_s": event.arrival_s,
        }
        turns.append({**turn, **{name: value for name, value in more.items() if value is not None}})
        new = []
    return turns


def _written(session: Session, message: Message) -> dict[str, str]:
    if message.text is None:
        raise TraceError(
            f"session {session.session_id} holds no text, only hashes of blocks, and {FORMAT} is "
            "text alone: export another trace"
        )
    if message.role == _TOOLS:
        return {"role": "system", "content": message.text, "of": _TOOLS}
    return {"role": message.role, "content": message.text}


def _head(session: Session, turns: int) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "source": session.source,
        "licence": session.licence,
        "model": session.model,
        "batch": session.batch,
        "start_s": session.start_s,
        "truncated": session.truncated or turns < session.calls,
        "clipped_messages": session.clipped_messages,
    }
