"""The vocabulary and the walker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.session import (
    Append,
    Blocks,
    Call,
    Context,
    Edit,
    Event,
    Message,
    Session,
)
from sgl_kvtier.types import Span


def says(text: str) -> Message:
    return Message("user", text)


def session(*events: Event, tools: Message | None = None) -> Session:
    return Session("s", "test", tuple(events), tools=tools)


def texts(prompt: object) -> list[str | None]:
    return [message.text for message in prompt]  # type: ignore[attr-defined]


def test_an_edit_counts_messages_without_the_tools() -> None:
    edit = Edit((Span(1, 2), says("new"), Span(0, 1)))
    walk = Context(session(Append(says("a")), Call(says("out")), edit, Call(), tools=says("tools")))
    walk.next_call()
    walk.next_call()
    assert texts(walk.prompt) == ["tools", "out", "new", "a"]


def test_an_edit_of_messages_that_are_not_there_names_the_session() -> None:
    edit = Edit((Span(0, 2),))
    walk = Context(session(Append(says("a")), edit, Call(), tools=says("tools")))
    with pytest.raises(TraceError, match=r"session s: .*\[0, 2\) of a context of 1"):
        walk.next_call()


def test_an_answer_is_not_added_where_the_next_blocks_stand_for_it() -> None:
    walk = Context(
        session(Append(says("a")), Call(output=None), Append(says("b")), Call(output=None))
    )
    walk.next_call()
    walk.answer(says("server's own"))
    walk.next_call()
    assert texts(walk.prompt) == ["a", "b"]


def test_a_prompt_is_a_sequence() -> None:
    walk = Context(session(Append(says("a")), Append(says("b")), Call(says("later"))))
    walk.next_call()
    prompt = walk.prompt
    walk.next_call()
    assert (len(prompt), prompt[-1].text, texts(prompt[1:])) == (2, "b", ["b"])
    with pytest.raises(IndexError):
        prompt[2]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=6), st.integers(0, 40))
def test_the_head_of_blocks_has_the_first_ids(runs: list[tuple[int, int]], count: int) -> None:
    total = sum(n for _, n in runs)
    blocks = Blocks("s", 64, tuple(runs), 64 * total)
    head = blocks.head(count)
    assert head.ids().tolist() == blocks.ids().tolist()[:count]
    assert head.tokens == 64 * min(count, total)


@st.composite
def edited_sessions(draw: st.DrawFn) -> tuple[list[Event], list[list[str]]]:
    """Events, and what each call's prompt must be by the rules said plainly."""
    events: list[Event] = []
    context: list[str] = []
    prompts: list[list[str]] = []
    for number in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["append", "call", "edit"]))
        if kind == "append":
            events.append(Append(says(f"in{number}")))
            context.append(f"in{number}")
        elif kind == "call":
            events.append(Call(says(f"out{number}")))
            prompts.append(list(context))
            context.append(f"out{number}")
        else:
            parts: list[Span | Message] = []
            replaced: list[str] = []
            for piece in range(draw(st.integers(0, 3))):
                if draw(st.booleans()):
                    parts.append(says(f"new{number}.{piece}"))
                    replaced.append(f"new{number}.{piece}")
                else:
                    start = draw(st.integers(0, len(context)))
                    stop = draw(st.integers(start, len(context)))
                    parts.append(Span(start, stop))
                    replaced += context[start:stop]
            events.append(Edit(tuple(parts)))
            context = replaced
    return events, prompts


@given(edited_sessions())
def test_every_prompt_is_what_the_events_before_it_say(
    drawn: tuple[list[Event], list[list[str]]],
) -> None:
    events, expected = drawn
    kept = [prompt for _, prompt in Context(session(*events)).calls()]
    assert [texts(p) for p in kept] == expected
