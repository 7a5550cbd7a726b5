"""Where two prompts part: the kind of the difference, its place, and what can still be hit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sgl_kvtier.runtime.tools.prompt_diff import Parting, parse, part

PAGE = 16
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read", "write", "run")
]


def texts(a: str, b: str) -> Parting:
    return part(parse(a), parse(b), PAGE)


def chats(a: list[Any], b: list[Any], **more: Any) -> Parting:
    """Two chat requests; `tools` of the first one are also the second's unless `other` has some."""
    other = more.pop("other", more)
    return part(
        parse(json.dumps({"messages": a, **more})),
        parse(json.dumps({"messages": b, **other})),
        PAGE,
    )


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SYSTEM = says("system", "You are an agent that repairs programs. Answer in short sentences.")
USER = says("user", "The tests of the parser fail since yesterday. Please look into it now.")


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("Today is 2026-11-27. Help.", "Today is 2026-11-28. Help.", "timestamp"),
        ("Now: 2026-11-27T09:31:05Z. Help.", "Now: 2026-11-27T10:31:05Z. Help.", "timestamp"),
        ("It is 9:31:05 here", "It is 9:31:46 here", "timestamp"),
        ("t=1764236000 go", "t=1764236017 go", "timestamp"),
        ("Date: Friday, 27 Nov 2026", "Date: Saturday, 28 Nov 2026", "timestamp"),
        ("November 27, 2026: go", "November 28, 2026: go", "timestamp"),
        ("run 5f0c1a52-94a1-4e63-9f0a-2b1f0f4f9d10 go",
         "run 5f0c1a52-94a1-4e63-9f0a-2b1f0f4f9d11 go", "id"),
        ("nonce: a81f93bb20c4 go", "nonce: 77e1000ac9d3 go", "id"),
        ("Be short.  Be kind.", "Be short. Be kind.", "whitespace"),
        ("Be short.\nBe kind.", "Be short. Be kind.", "whitespace"),
        ("Be short. \n", "Be short.", "whitespace"),
        ("<|im_start|>assistant\n<think>\nhm</think>\nYes", "<|im_start|>assistant\nYes", "template"),
        ("a<|im_end|>b", "a<|end_of_turn|>b", "template"),
        ("You have three cats", "You have three dogs", "other"),
        ("step 14 of 20", "step 15 of 20", "other"),
        ("Be short.", "Be short. And kind.", "extended"),
        ("Be short.", "Be short.", "equal"),
    ],
)  # fmt: skip
def test_what_differs_in_a_text_is_named(a, b, kind):
    assert texts(a, b).kind == kind
    assert texts(b, a).kind == kind


def test_the_character_at_which_texts_part_is_told_with_what_stands_there():
    found = texts("Today is 2026-11-27. Help.", "Today is 2026-11-28. Help.")
    assert (found.part, found.character) == ("text", 18)
    assert [found.excerpts[0][-7:], found.excerpts[1][-7:]] == [". Help."] * 2
    assert "11-27" in found.excerpts[0] and "11-28" in found.excerpts[1]


def test_a_timestamp_elsewhere_in_the_text_is_not_blamed():
    assert texts("2026-11-27: you have cats", "2026-11-27: you have dogs").kind == "other"


def test_a_timestamp_in_the_system_block_is_found_in_its_message():
    later = says("system", SYSTEM["content"] + " It is 10:15.")
    earlier = says("system", SYSTEM["content"] + " It is 10:12.")
    found = chats([earlier, USER], [later, USER])
    assert (found.kind, found.part, found.message) == ("timestamp", "message 0 (system)", 0)
    assert found.character == len(SYSTEM["content"]) + len(" It is 10:1")


def test_the_same_tools_in_another_order_are_no_other_tools():
    found = chats([SYSTEM], [SYSTEM], tools=TOOLS, other={"tools": TOOLS[::-1]})
    assert (found.kind, found.part, found.message) == ("tool order", "tools", None)
    assert chats([SYSTEM], [SYSTEM], tools=TOOLS, other={"tools": TOOLS[:2]}).kind == "tools"
    assert chats([SYSTEM], [SYSTEM], tools=TOOLS, other={}).kind == "tools"


def test_keys_in_another_order_are_a_rendering_of_the_same_tools():
    turned = [dict(reversed(tool.items())) for tool in TOOLS]
    assert chats([SYSTEM], [SYSTEM], tools=TOOLS, other={"tools": turned}).kind == "template"


def test_reasoning_that_is_dropped_from_the_history_is_a_matter_of_the_template():
    thought = says("assistant", "<think>The parser reads twice.</think>\nFixed it.")
    bare = says("assistant", "Fixed it.")
    found = chats([SYSTEM, USER, thought], [SYSTEM, USER, bare, USER])
    assert (found.kind, found.message) == ("template", 2)


def test_arguments_of_a_call_that_are_written_anew_are_a_matter_of_the_template():
    call = {"function": {"name": "run", "arguments": '{"a": 1, "b": 2}'}}
    anew = {"function": {"name": "run", "arguments": '{"a":1,"b":2}'}}
    found = chats(
        [USER, says("assistant", None, tool_calls=[call])],
        [USER, says("assistant", None, tool_calls=[anew])],
    )
    assert (found.kind, found.message) == ("template", 1)


def test_messages_that_were_dropped_from_the_history_are_noticed():
    answer = says("assistant", "The parser reads the file twice, so that the second read is empty.")
    found = chats([SYSTEM, USER, answer, USER], [SYSTEM, answer, USER])
    assert (found.kind, found.message) == ("messages dropped", 1)


def test_a_conversation_that_goes_on_is_no_difference():
    found = chats([SYSTEM, USER], [SYSTEM, USER, says("assistant", "Yes."), USER])
    assert (found.kind, found.part, found.message) == ("extended", "message 2 (assistant)", 2)


def test_messages_that_go_on_after_others_were_rendered_anew_are_a_matter_of_the_template():
    """As templates do that leave reasoning out of earlier turns, or end with how they ask for an
    answer, which is shorter than a page.
    """

    def with_tokens(messages, tokens):
        return replace(parse(json.dumps({"messages": messages})), tokens=tuple(tokens))

    answered = [SYSTEM, USER, says("assistant", "Yes."), USER]
    found = part(
        with_tokens([SYSTEM, USER], ids(length=60)), with_tokens(answered, ids(40, length=90)), PAGE
    )
    assert (found.kind, found.token, found.message, found.hit_tokens) == ("template", 40, None, 32)
    found = part(
        with_tokens([SYSTEM, USER], ids(length=60)), with_tokens(answered, ids(56, length=90)), PAGE
    )
    assert (found.kind, found.token, found.message) == ("extended", 56, 2)


def test_a_longer_text_before_other_messages_is_a_difference():
    more = says("system", SYSTEM["content"] + " You like cats.")
    assert chats([SYSTEM, USER], [more, USER]).kind == "other"


def test_another_role_is_a_difference():
    found = chats([says("user", "Go on.")], [says("tool", "Go on.")])
    assert (found.kind, found.text) == ("other", "the roles of the messages differ")


@pytest.mark.parametrize("key", ["cache_salt", "extra_key", "lora_path"])
def test_another_salt_shares_no_page_however_equal_the_prompts_are(key):
    ids = list(range(100))
    a = parse(json.dumps({"input_ids": ids, key: "a"}))
    b = parse(json.dumps({"input_ids": ids, key: "b"}))
    found = part(a, b, PAGE)
    assert (found.kind, found.part, found.hit_tokens, found.page) == ("namespace", key, 0, 0)
    assert part(a, a, PAGE).hit_tokens == 96


def ids(*parting: int, length: int = 100) -> list[int]:
    """Token ids that are their place, but for those at the places given."""
    return [-1 + 1000 if place in parting else place for place in range(length)]


def tokens(a: list[int], b: list[int], page: int = PAGE) -> Parting:
    return part(parse(json.dumps(a)), parse(json.dumps(b)), page)


@pytest.mark.parametrize(
    ("place", "page", "hit"), [(0, 0, 0), (15, 0, 0), (16, 1, 16), (47, 2, 32), (99, 6, 96)]
)
def test_whole_pages_before_the_parting_can_be_hit(place, page, hit):
    found = tokens(ids(), ids(place))
    assert (found.kind, found.token, found.page, found.hit_tokens) == ("other", place, page, hit)
    assert found.hit_fraction == hit / 100


def test_a_prompt_that_goes_on_hits_the_whole_pages_of_the_shorter_one():
    found = tokens(ids(length=40), ids(length=160))
    assert (found.kind, found.token, found.page) == ("extended", 40, 2)
    assert (found.hit_tokens, found.longer_tokens, found.hit_fraction) == (32, 160, 0.2)


def test_of_an_equal_prompt_of_whole_pages_the_last_page_is_computed():
    found = tokens(ids(length=64), ids(length=64))
    assert (found.kind, found.token, found.page, found.hit_tokens) == ("equal", None, None, 48)


def test_text_alone_has_no_pages():
    found = texts("cats", "dogs")
    assert (found.token, found.page, found.hit_tokens, found.hit_fraction) == (None,) * 4


def test_token_ids_and_text_cannot_be_compared_without_a_tokenizer():
    found = part(parse("[1, 2, 3]"), parse("cats"), PAGE)
    assert found.kind == "not comparable" and "--model-path" in found.text


@pytest.mark.parametrize(
    "text", ["[1, 2, 3]", '{"input_ids": [1, 2, 3]}', '{"prompt": [1, 2, 3], "model": "m"}']
)
def test_token_ids_are_read_from_a_list_or_a_request(text):
    assert parse(text).tokens == (1, 2, 3)


@pytest.mark.parametrize(
    "text", ["Go on.", '{"text": "Go on."}', '{"prompt": "Go on.", "temperature": 0}']
)
def test_text_is_read_as_it_is_or_from_a_request(text):
    assert [one.text for one in parse(text).parts] == ["Go on."]


def test_a_list_of_messages_is_a_chat_request():
    assert [one.name for one in parse(json.dumps([SYSTEM, USER])).parts] == [
        "message 0 (system)", "message 1 (user)",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ['{"model": "m"}', '{"messages": "Go on."}', '{"messages": [1]}'])
def test_a_request_without_a_prompt_is_refused(text):
    with pytest.raises(ValueError, match="has to "):
        parse(text)


@pytest.mark.parametrize("text", ["", "3", "[]", "[1, -2]", '"Go on."', "{ no json"])
def test_what_is_no_request_is_text(text):
    assert [one.text for one in parse(text).parts] == [text]
