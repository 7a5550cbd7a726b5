"""Where two prompts diverge, what differs there, and how much of the longer one a cache can still
have.

Pure: text and token ids in, no files, no network, no tokenizer. A prompt is a list of parts in the
order in which a chat template renders them: the list of tools, then each message. A prompt of text
or of token ids is one part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from sgl_kvtier.outside import is_whole, parse_json

NAMESPACE_KEYS: Final = ("cache_salt", "extra_key", "lora_path")
"""Keys of a request that are part of every page key: requests with other values share no pages."""
_EXCERPT: Final = 48
"""Characters that are shown of each prompt, from shortly before the difference on."""
_BEFORE: Final = 16
_AGREE: Final = 12
"""After a difference in white space, so many equal characters mean that nothing else differs."""
_TIME: Final = re.compile(
    r"\d{4}-\d\d?-\d\d?(?:[T ]\d\d?:\d\d(?::\d\d(?:\.\d+)?)?)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|\d\d?[/.]\d\d?[/.]\d{2,4}"
    r"|\b\d\d?:\d\d(?::\d\d(?:\.\d+)?)?\b"
    r"|\b1[0-9]{9}(?:[0-9]{3})?\b"
    r"|(?:\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b,? ?)?"
    r"(?:\d\d? )?\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,4}(?:, \d{4})?"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
)
_ID: Final = re.compile(
    r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b(?=\w*\d)(?:\w+[-_:])?[0-9a-zA-Z]{10,}\b"
)
_MARK: Final = re.compile(r"<\|[^|<>]{1,40}\|>|</?[a-z_]{2,20}>|\[/?[A-Z_]{2,20}\]")
"""Markers that templates put between messages, and around reasoning and tool calls."""
_THINK: Final = re.compile(r"<think>.*?</think>\s*", re.S)


@dataclass(frozen=True)
class Part:
    """A named piece of a prompt: `tools`, `message 3 (user)`, `text`."""

    name: str
    text: str
    message: int | None = None
    """Its index in the list of messages."""
    value: Any = None
    """The value that was rendered as the text, for parts that are JSON."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, as it was read from a file. `tokens` is None if they are not known."""

    parts: tuple[Part, ...]
    tokens: tuple[int, ...] | None = None
    namespace: Mapping[str, Any] = field(default_factory=dict)
    """Its values for the keys in `NAMESPACE_KEYS`."""
    request: Mapping[str, Any] | None = None
    """The chat request, for the template."""


@dataclass(frozen=True)
class Parting:
    """Where two prompts diverge. `kind` is one of a fixed list (docs/manual/operate.md)."""

    kind: str
    text: str
    """What differs, as text."""
    token: int | None
    """The first token that differs; None if tokens are not known."""
    character: int | None
    """The first character of the part that differs; None if only tokens are known."""
    part: str | None
    message: int | None
    excerpts: tuple[str, str]
    page: int | None
    """The page in which they diverge."""
    hit_tokens: int | None
    """Tokens of the longer prompt that a cache can have from the other: whole pages, without the
    last token.
    """
    longer_tokens: int | None

    @property
    def hit_fraction(self) -> float | None:
        """`hit_tokens` as a fraction of the longer prompt; None if tokens are not known."""
        if self.hit_tokens is None or not self.longer_tokens:
            return None
        return self.hit_tokens / self.longer_tokens


def parse(text: str) -> Prompt:
    """A prompt from a file's text: a JSON list of token ids, a request with `input_ids`, `text`,
    `prompt` or `messages`, a JSON list of messages, or else the text itself. Raises ValueError if a
    request has none of these, or if messages are not objects.
    """
    try:
        value = parse_json(text)
    except ValueError:
        return _of_text(text)
    if isinstance(value, list) and value and all(is_whole(one, 0) for one in value):
        return Prompt((), tuple(value))
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        value = {"messages": value}
    return of_request(value) if isinstance(value, dict) else _of_text(text)


def of_request(value: Mapping[str, Any]) -> Prompt:
    """A request's prompt. Raises ValueError if it has none, or if messages are not objects."""
    namespace = {key: value[key] for key in NAMESPACE_KEYS if value.get(key) is not None}
    if "messages" in value:
        return Prompt(_parts_of(value), None, namespace, value)
    ids = value.get("input_ids", value.get("prompt"))
    if isinstance(ids, list) and ids and all(is_whole(one, 0) for one in ids):
        return Prompt((), tuple(ids), namespace)
    said = value.get("text", value.get("prompt"))
    if not isinstance(said, str):
        raise ValueError("a request has to have messages, text, prompt or input_ids")
    return Prompt(_of_text(said).parts, None, namespace)


def part(a: Prompt, b: Prompt, page_tokens: int) -> Parting:
    """Compares two prompts. Pages require the tokens of both."""
    token = _common(a.tokens, b.tokens) if a.tokens and b.tokens else None
    found = _in_namespace(a, b) or _in_parts(a, b) or _in_tokens(a, b, token)
    if token is None:
        return found
    assert a.tokens is not None and b.tokens is not None
    lengths = sorted((len(a.tokens), len(b.tokens)))
    other = found.kind == "namespace"
    # A repeated prompt of whole pages computes its last token, and so its last page.
    hit = 0 if other else min(token, lengths[1] - 1) // page_tokens * page_tokens
    ended = token >= lengths[1]
    if found.kind == "extended" and lengths[0] - token >= page_tokens:
        # A template appends less than a page to ask for an answer.
        said = "the messages go on, and the template rendered earlier ones in another way"
        shown = _token_excerpts(a.tokens, b.tokens, token)
        found = Parting("template", said, None, None, None, None, shown, None, None, None)
    return Parting(
        found.kind,
        found.text,
        None if ended else token,
        found.character,
        found.part,
        found.message,
        found.excerpts,
        0 if other else None if ended else token // page_tokens,
        hit,
        lengths[1],
    )


def _of_text(text: str) -> Prompt:
    return Prompt((Part("text", text),))


def _parts_of(request: Mapping[str, Any]) -> tuple[Part, ...]:
    messages, tools = request["messages"], request.get("tools")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError("messages has to be a list of objects")
    parts = [Part("tools", _dump(tools), value=tools)] if tools else []
    for place, message in enumerate(messages):
        role = str(message.get("role", "?"))
        content = message.get("content")
        rest = {k: v for k, v in message.items() if k not in ("role", "content")}
        text = content if isinstance(content, str) else "" if content is None else _dump(content)
        text += _dump(rest) if rest else ""
        parts.append(Part(f"message {place} ({role})", text, place, message))
    return tuple(parts)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _in_namespace(a: Prompt, b: Prompt) -> Parting | None:
    for key in NAMESPACE_KEYS:
        here, there = a.namespace.get(key), b.namespace.get(key)
        if here != there:
            return Parting(
                "namespace",
                f"{key} differs, which is part of every page key: no page is shared",
                None,
                None,
                key,
                None,
                (_short(str(here)), _short(str(there))),
                None,
                None,
                None,
            )
    return None


def _comparable(a: Prompt, b: Prompt) -> bool:
    """Whether both prompts have the same kind of parts: messages, or text."""
    return bool(a.parts and b.parts) and (a.request is None) == (b.request is None)


def _in_parts(a: Prompt, b: Prompt) -> Parting | None:
    """The first parts that differ; None if all are equal, or if they cannot be compared."""
    if not _comparable(a, b):
        return None
    for place, (one, other) in enumerate(zip(a.parts, b.parts, strict=False)):
        if (one.name, one.text) != (other.name, other.text):
            at = _common(one.text, other.text)
            kind, said = _what(a.parts[place:], b.parts[place:], at)
            return _parting(kind, said, one, other, at)
    if len(a.parts) == len(b.parts):
        return None
    longer = max(a.parts, b.parts, key=len)[min(len(a.parts), len(b.parts))]
    return _parting("extended", _EXTENDED, longer, longer, 0)


_EXTENDED: Final = "one prompt goes on where the other ends"


def _in_tokens(a: Prompt, b: Prompt, token: int | None) -> Parting:
    """The difference between prompts whose parts are equal, or that are token ids."""
    nothing = (None, None, None, None)
    if token is None or a.tokens == b.tokens:
        if token is None and not _comparable(a, b):
            said = "the prompts are of two kinds: only a tokenizer can compare them (--model-path)"
            return Parting("not comparable", said, *nothing, ("", ""), None, None, None)
        return Parting("equal", "the prompts are equal", *nothing, ("", ""), None, None, None)
    assert a.tokens is not None and b.tokens is not None
    excerpts = _token_excerpts(a.tokens, b.tokens, token)
    if token >= min(len(a.tokens), len(b.tokens)):
        return Parting("extended", _EXTENDED, *nothing, excerpts, None, None, None)
    if _comparable(a, b):
        said = "the text is equal, and was turned into tokens in two ways"
        if a.request is not None:
            said = "messages and tools are equal, and the template rendered them in two ways"
        return Parting("template", said, *nothing, excerpts, None, None, None)
    return Parting("other", "the token ids differ", *nothing, excerpts, None, None, None)


def _token_excerpts(a: Sequence[int], b: Sequence[int], token: int) -> tuple[str, str]:
    one, other = (_short(str(list(tokens[token : token + 8]))) for tokens in (a, b))
    return one, other


def _parting(kind: str, said: str, one: Part, other: Part, at: int) -> Parting:
    low = max(0, at - _BEFORE)
    excerpts = (_short(one.text[low:]), _short(other.text[low:]))
    return Parting(kind, said, None, at, one.name, one.message, excerpts, None, None, None)


def _what(a: Sequence[Part], b: Sequence[Part], at: int) -> tuple[str, str]:
    """What differs between the first parts, which diverge at character `at`: a kind, and a text."""
    one, other = a[0], b[0]
    if one.name == other.name == "tools":
        if same := _same_tools(one.value, other.value):
            return same
    elif "tools" in (one.name, other.name):
        return "tools", "only one of the requests has a list of tools"
    elif one.message is not None:
        if _drops(a, b):
            return "messages dropped", "earlier messages are missing in one of the prompts"
        if same := _same_message(one, other):
            return same
        if one.name != other.name:
            return "other", "the roles of the messages differ"
    short, more = (a, b) if len(one.text) <= len(other.text) else (b, a)
    if at == len(short[0].text) and len(short) == 1:
        if not more[0].text[at:].strip():
            return "whitespace", "only white space at the end differs"
        return "extended", _EXTENDED
    return _in_text(one.text, other.text, at)


def _same_tools(one: Any, other: Any) -> tuple[str, str] | None:
    if not isinstance(one, list) or not isinstance(other, list):
        return None
    first, second = ([json.dumps(tool, sort_keys=True) for tool in tools] for tools in (one, other))
    if first == second:
        return "template", "the keys inside a tool have another order"
    if sorted(first) == sorted(second):
        return "tool order", "the same tools come in another order"
    if set(first) != set(second):
        return "tools", "the lists have different tools"
    return None


def _drops(a: Sequence[Part], b: Sequence[Part]) -> bool:
    """Whether the continuation of one prompt comes later in the other: at least two neighbouring
    parts, or one long message.
    """
    for short, long in ((a, b), (b, a)):
        pairs = [(x.text, y.text) for x, y in pairwise(long[1:])]
        if len(short) > 1 and (short[0].text, short[1].text) in pairs:
            return True
        if len(short[0].text) >= _EXCERPT and any(x.text == short[0].text for x in long[1:]):
            return True
    return False


def _same_message(one: Part, other: Part) -> tuple[str, str] | None:
    """The difference, if two messages are renderings of the same content."""
    bare = [_THINK.sub("", part.text).strip() for part in (one, other)]
    if bare[0] == bare[1] and ("<think>" in one.text) != ("<think>" in other.text):
        return "template", "the reasoning of an earlier answer is only in one of the prompts"
    if one.name == other.name and _canonical(one.value) == _canonical(other.value):
        return "template", "the same values are written as JSON in another way"
    return None


def _canonical(value: Any) -> Any:
    """A value in which texts that are themselves JSON, such as tool call arguments, are decoded."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return _canonical(parse_json(value))
        except ValueError:
            return value
    return value


def _in_text(one: str, other: str, at: int) -> tuple[str, str]:
    if _differ_in_space(one, other, at):
        return "whitespace", "only white space differs there"
    for kind, words, pattern in (
        ("timestamp", "a date or time differs", _TIME),
        ("id", "an id or random number differs", _ID),
        ("template", "what the template puts between messages differs", _MARK),
    ):
        if _spans(pattern, one, at) and _spans(pattern, other, at):
            return kind, words
    if _spans(_MARK, one, at) or _spans(_MARK, other, at):
        return "template", "what the template puts between messages differs"
    return "other", "the texts differ"


def _spans(pattern: re.Pattern[str], text: str, at: int) -> bool:
    """Whether a match of the pattern covers this character, or the end of the text there."""
    low = max(0, at - 64)
    return any(
        found.start() + low <= at < found.end() + low
        for found in pattern.finditer(text[low : at + 64])
    )


def _differ_in_space(one: str, other: str, at: int) -> bool:
    """Whether the texts are equal again after skipping white space on either side."""
    while at > 0 and one[at - 1].isspace():
        at -= 1
    rests = [text[at:].lstrip()[:_AGREE] for text in (one, other)]
    apart = any(text[at : at + 1].isspace() for text in (one, other))
    return apart and rests[0] == rests[1] and bool(rests[0])


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Number of leading items that are equal."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return min(len(a), len(b))


def _short(text: str) -> str:
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"
