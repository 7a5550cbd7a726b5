"""A client's hint as JSON: its fields, and the form in which the HTTP server sends it to the
schedulers.

    {"session": "agent-7", "expected_delay_s": 12.5, "priority": 1, "ttl_s": 600, "tool": "pytest"}
    {"tokens": [1, 2, 3, ...], "expected_delay_s": 3}    for the session whose prompts begin with
                                                         these; also as "text"

Pure functions. Every mistake of a client raises HintError with a message that tells the remedy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.outside import is_number, is_text, is_whole, parse_json, refusal, shown
from sgl_kvtier.policy.messages import Hint
from sgl_kvtier.runtime.step.session_name import known_as
from sgl_kvtier.types import PageKey

MARK = "kvtier.hint:"
"""The prefix by which the scheduler recognizes a hint among SGLang's control messages."""
MOST_TOKENS = 1 << 20
"""Most tokens of a prefix: the longest contexts there are."""
MOST_BYTES = 8 * MOST_TOKENS + 1024
"""Most bytes of a request's body with tokens: six digits, a comma and a space for each token."""
MOST_TEXT_BYTES = 1 << 20
"""Most bytes of any other body: text is tokenized here, which takes about a second per MiB."""
_COMMAS = 100
"""Most commas between the fields."""
_MOST_TOOL = 64
_MOST_NAMED = 5
_MOST_SECONDS = 1e12
_WHO = ("session", "tokens", "text")
_FIELDS = (*_WHO, "expected_delay_s", "priority", "ttl_s", "tool", "extra_key", "cache_salt")


class HintError(KVTierError):
    """A hint that cannot be read. The text says what is wrong and what to send instead."""


@dataclass(frozen=True)
class Asked:
    """A client's hint, checked. One of `session`, `tokens`, `text` names the session."""

    hint: Hint
    session: str | None = None
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class Sent:
    """A hint in flight to the schedulers: for a session by name, or for sessions whose prompts
    contain the page `page`. `at` is the HTTP server's monotonic clock, in seconds, so that all
    ranks use one time.
    """

    hint: Hint
    at: float
    session: str | None = None
    page: PageKey | None = None


def read(body: bytes) -> Asked:
    """The hint in a request's body. Raises HintError. Slow for a long body, so not for the HTTP
    server's event loop.
    """
    given = _given(body)
    who = [name for name in _WHO if name in given]
    if len(who) != 1:
        raise HintError(
            f"a hint needs exactly one of {', '.join(_WHO)} to say whose it is; it has {len(who)}. "
            f"Send {_EXAMPLE}"
        )
    if len(body) > MOST_TEXT_BYTES and "tokens" not in given:
        raise HintError(
            f"the hint has {len(body)} bytes, without tokens at most {MOST_TEXT_BYTES} are read: "
            "name the session instead of its text, or send the text's beginning"
        )
    tool = _text(given, "tool")
    hint = Hint(
        expected_delay_s=_seconds(given, "expected_delay_s"),
        priority=_whole(given, "priority"),
        ttl_s=_seconds(given, "ttl_s"),
        tool=None if tool is None else tool[:_MOST_TOOL],
    )
    if hint == Hint():
        raise HintError("the hint says nothing: add expected_delay_s, priority, ttl_s or tool")
    session = _text(given, "session")
    return Asked(
        hint=hint,
        session=None if session is None else known_as(session),
        tokens=_tokens(given),
        text=_text(given, "text"),
        extra_key=_text(given, "extra_key"),
        cache_salt=_text(given, "cache_salt"),
    )


def pack(sent: Sent) -> str:
    """Encodes the hint for one of SGLang's control messages."""
    page = None if sent.page is None else sent.page.hex()
    return MARK + json.dumps(
        {"hint": asdict(sent.hint), "at": sent.at, "session": sent.session, "page": page}
    )


def unpack(text: str) -> Sent:
    """The inverse of `pack`."""
    data: Mapping[str, Any] = json.loads(text[len(MARK) :])
    page = None if data["page"] is None else PageKey(bytes.fromhex(data["page"]))
    return Sent(Hint(**data["hint"]), data["at"], data["session"], page)


def _given(body: bytes) -> dict[str, Any]:
    """The fields of a body that are not null."""
    # Checked before parsing, which is slow for a list of millions of numbers: it has as many
    # commas.
    if len(body) > MOST_BYTES or body.count(b",") > MOST_TOKENS + _COMMAS:
        raise HintError(
            f"the hint has {len(body)} bytes, at most {MOST_BYTES} and {MOST_TOKENS} tokens are "
            "read: name the session instead, or send the beginning of its prompts"
        )
    try:
        data = parse_json(body)
    except ValueError as error:
        raise HintError(f"not JSON: {error}. Send an object such as {_EXAMPLE}") from error
    if not isinstance(data, dict):
        raise HintError(f"a hint is an object, not {shown(data)}. Send {_EXAMPLE}")
    unknown = [name for name in data if name not in _FIELDS]
    if unknown:
        named = ", ".join(map(shown, unknown[:_MOST_NAMED])) + (
            " and more" if len(unknown) > _MOST_NAMED else ""
        )
        raise HintError(f"unknown: {named}. A hint may have {', '.join(_FIELDS)}")
    return {name: value for name, value in data.items() if value is not None}


_EXAMPLE = '{"session": "agent-7", "expected_delay_s": 12.5}'


def _seconds(given: Mapping[str, Any], name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, int) and value > _MOST_SECONDS:
        return _MOST_SECONDS  # a whole number may be larger than any float
    if not is_number(value, 0, sys.float_info.max):
        raise HintError(refusal(name, value, "a number of seconds of at least 0"))
    return min(float(value), _MOST_SECONDS)


def _whole(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is not None and not is_whole(value, -(1 << 31), 1 << 31):
        raise HintError(
            refusal(name, value, "a whole number; above 0 keeps pages longer, below 0 shorter")
        )
    return value


def _text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and (not value or not is_text(value, MOST_BYTES)):
        raise HintError(refusal(name, value, "a text that is not empty and that UTF-8 can hold"))
    return value


def _tokens(given: Mapping[str, Any]) -> tuple[int, ...] | None:
    value = given.get("tokens")
    if value is None:
        return None
    good = (
        isinstance(value, list)
        and 0 < len(value) <= MOST_TOKENS
        and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    )
    if not good:
        raise HintError(
            refusal(
                "tokens",
                value,
                f"a list of at most {MOST_TOKENS} token ids, the beginning of the session's "
                "prompts",
            )
        )
    return tuple(value)
