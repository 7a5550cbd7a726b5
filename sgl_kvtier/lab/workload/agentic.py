"""The data set agentic-trace of SGLang's own benchmark, read and written: one JSON object, the
conversations of which are lists of turns.

A turn has `messages`, the new ones of this round: SGLang's client sends them behind those before
and its server's own answers (sglang/benchmark/datasets/agentic_trace.py in SGLang 0.5.23). The
recorded answer, its length and the times have no place in the format. They are written under
further keys, which SGLang passes over: `output`, `output_tokens`, `gap_s`, `latency_s` and
`arrival_s` of a turn, and `sessions` in the metadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.chats import UNKNOWN_OUTPUT_TOKENS, message_of
from sgl_kvtier.lab.workload.encoder import Encoder, PromptTokens
from sgl_kvtier.lab.workload.lines import BadRecord, count_of, inside, list_of, seconds_of, text_of
from sgl_kvtier.lab.workload.reader import Reader
from sgl_kvtier.lab.workload.session import Append, Call, Context, Edit, Event, Message, Session
from sgl_kvtier.outside import shown

FORMAT = "agentic-trace"
_TOOLS = "tools"


def conversations_of(document: dict[str, Any]) -> list[Any]:
    """The conversations of a file of this format, each with what our own file says of it."""
    conversations = list_of(document, "conversations")
    heads = _heads(document, len(conversations))
    return list(zip(conversations, heads, strict=True))


class AgenticReader(Reader):
    """Conversations to sessions."""

    def sessions(self, number: int, conversation: tuple[Any, dict[str, Any]], /) -> list[Session]:
        """The session of one of `conversations_of`. Raises BadRecord."""
        turns, head = conversation
        if not isinstance(turns, list):
            raise BadRecord(f"a conversation must be a list of turns, not {shown(turns)}")
        events: list[Event] = []
        tools: Message | None = None
        for place, turn in enumerate(turns):
            with inside(f"turn {place}"):
                new, call = _turn(turn, self.left_out)
            if not events and new and new[0].role == _TOOLS:
                tools = new.pop(0)
            events += [*map(Append, new), call]
        if not events:
            raise BadRecord("the conversation has no turn")
        clipped = count_of(head, "clipped_messages") if "clipped_messages" in head else 0
        return [
            self.session(
                text_of(head, "session_id", f"{self.stem}-{number}"),
                events,
                source=text_of(head, "source", self.origin.source),
                licence=text_of(head, "licence", self.origin.licence),
                tools=tools,
                start_s=seconds_of(head, "start_s") or 0.0,
                model=text_of(head, "model", ""),
                batch=text_of(head, "batch", ""),
                truncated=head.get("truncated") is True,
                clipped_messages=clipped,
            )
        ]


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


def _turn(turn: Any, left_out: Counter[str]) -> tuple[list[Message], Call]:
    if not isinstance(turn, dict):
        raise BadRecord("a turn must be an object")
    tokens = count_of(turn, "output_tokens") if turn.get("output_tokens") is not None else None
    call = Call(
        output=Message("assistant", text_of(turn, "output", "")),
        output_tokens=UNKNOWN_OUTPUT_TOKENS if tokens is None and "output" not in turn else tokens,
        gap_s=seconds_of(turn, "gap_s") or 0.0,
        latency_s=seconds_of(turn, "latency_s"),
        arrival_s=seconds_of(turn, "arrival_s"),
    )
    return [message_of(one, left_out) for one in list_of(turn, "messages")], call


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
